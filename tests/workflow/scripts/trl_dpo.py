"""Train with TRL's DPOTrainer alone, on pairs as text; write the logged values as JSON, and the model."""

import json
import sys
from pathlib import Path

from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer

from shardmake.train.process_group import end_process, leave_together

model, data, method, out = sys.argv[1:]
arguments = DPOConfig(
    output_dir=f"{out}.files",
    max_steps=4,
    per_device_train_batch_size=3,
    gradient_accumulation_steps=2,
    learning_rate=2e-3,
    lr_scheduler_type="cosine",
    warmup_steps=1,
    max_length=128,
    train_sampling_strategy="sequential",
    logging_steps=1,
    save_strategy="no",
    report_to="none",
    seed=42,
    data_seed=42,
    use_cpu=True,
    bf16=method == "qlora",
    gradient_checkpointing=False,
    disable_tqdm=True,
    ddp_backend="gloo",
)
if method == "qlora":
    from four_bits import load_in_four_bits

    base = load_in_four_bits(AutoModelForCausalLM, model)
else:
    base = AutoModelForCausalLM.from_pretrained(model, dtype="float32")
trainer = DPOTrainer(
    model=base,
    args=arguments,
    train_dataset=load_dataset("json", data_files=data, split="train"),
    processing_class=AutoTokenizer.from_pretrained(model),
    peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    if method != "full"
    else None,
)
trainer.train()
trainer.save_model(f"{out}.model")
if trainer.accelerator.is_main_process:
    with Path(out).open("w") as file:
        json.dump(trainer.state.log_history, file)
leave_together()
end_process()
