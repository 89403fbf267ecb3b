"""The training of a run with adapters by TRL's SFTTrainer: ``python -m benchmarks.gpu_kit.bare_trl CASE WORK RUN``.

It takes model, data, batch and adapters of the run, and TRL's own defaults for all else, with packing.
"""

import json
import sys
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoTokenizer
from trl import SFTConfig, SFTTrainer

from benchmarks.gpu_kit.bare import Watch, figures
from shardmake.run.paths import RunDir
from shardmake.run.plan import Plan
from shardmake.run.training_settings import AdapterMethod, TrainingSettings
from shardmake.run.turns import wait_for_turn


def main(name: str, work: Path, run_name: str) -> None:
    """Tokenize before the turn, train, and print the figures as the last line."""
    run = RunDir(work / "runs" / run_name)
    plan, settings = Plan.read(run.plan), TrainingSettings.read(run.training)
    assert isinstance(settings.method, AdapterMethod)
    base = str(work / settings.model.path)
    tokenizer = AutoTokenizer.from_pretrained(base)
    lines = (work / "inputs/train.jsonl").read_text().splitlines()
    chats = [tokenizer.apply_chat_template(json.loads(line)["messages"], return_dict=True) for line in lines]
    data = Dataset.from_list([{"input_ids": chat["input_ids"]} for chat in chats])
    wait_for_turn(name)
    on_gpu = torch.cuda.is_available()
    arguments = SFTConfig(
        output_dir=str(run.root / "bare-trl"), per_device_train_batch_size=plan.choice.micro_batch_size,
        gradient_accumulation_steps=plan.choice.gradient_accumulation_steps, max_steps=settings.arguments["max_steps"],
        max_length=plan.workload.sequence_length, packing=True,
        gradient_checkpointing=plan.choice.gradient_checkpointing, learning_rate=settings.arguments["learning_rate"],
        logging_steps=1, save_strategy="no", report_to="none", bf16=on_gpu, use_cpu=not on_gpu,
        model_init_kwargs={"dtype": settings.model.dtype, "attn_implementation": "sdpa"},
    )  # fmt: skip
    method = settings.method
    adapters = LoraConfig(r=method.rank, lora_alpha=method.alpha, target_modules=method.targets, task_type="CAUSAL_LM")
    watch = Watch()
    trainer = SFTTrainer(
        model=base, args=arguments, train_dataset=data, processing_class=tokenizer, peft_config=adapters,
        callbacks=[watch],
    )  # fmt: skip
    trainer.train()
    found = figures(watch, plan.choice.global_batch_size * plan.workload.sequence_length)
    print(json.dumps({"trainer": "TRL's SFTTrainer, sdpa", "of": run_name, **found}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
