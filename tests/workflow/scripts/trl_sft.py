"""Train with TRL's SFTTrainer alone, on prompts with completions; write the logged values as JSON, and the model."""

import json
import sys
from pathlib import Path

from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

from shardmake.train.process_group import end_process, leave_together

model, data, method, out = sys.argv[1:]
assert method == "full"
arguments = SFTConfig(
    output_dir=f"{out}.files",
    max_steps=4,
    per_device_train_batch_size=3,
    gradient_accumulation_steps=2,
    learning_rate=2e-3,
    lr_scheduler_type="cosine",
    warmup_steps=1,
    max_length=128,
    assistant_only_loss=True,  # without the newline after a turn, as the template marks it
    train_sampling_strategy="sequential",
    logging_steps=1,
    save_strategy="no",
    report_to="none",
    seed=42,
    data_seed=42,
    use_cpu=True,
    bf16=False,
    gradient_checkpointing=False,
    disable_tqdm=True,
    ddp_backend="gloo",
)
trainer = SFTTrainer(
    model=AutoModelForCausalLM.from_pretrained(model, dtype="float32"),
    args=arguments,
    train_dataset=load_dataset("json", data_files=data, split="train"),
    processing_class=AutoTokenizer.from_pretrained(model),
)
trainer.train()
trainer.save_model(f"{out}.model")
if trainer.accelerator.is_main_process:
    with Path(out).open("w") as file:
        json.dump(trainer.state.log_history, file)
leave_together()
end_process()
