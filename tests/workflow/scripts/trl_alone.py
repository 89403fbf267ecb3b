"""Train with one of TRL's trainers alone, on text; write the logged values as JSON, and the model.

``trl_alone.py OBJECTIVE MODEL DATA METHOD OUT [ADAPTER]``; a METHOD may end in ``-precomputed`` for the reference of
KTO. An ADAPTER is continued.
"""

import json
import sys
from pathlib import Path
from typing import Any

import trl
from datasets import load_dataset
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, set_seed

from shardmake.train.process_group import end_process, leave_together

objective, model, data, method, out, *start = sys.argv[1:]
method, _, reference = method.partition("-")
kind, own = {
    "sft": ("SFT", {"assistant_only_loss": True}),  # without the newline after a turn, as the template marks it
    "dpo": ("DPO", {}),
    "kto": ("KTO", {"desirable_weight": 3.0, "precompute_ref_log_probs": reference == "precomputed"}),
    "reward": ("Reward", {"center_rewards_coefficient": 0.01}),
}[objective]
if objective == "reward" and method != "qlora":
    own |= {"model_init_kwargs": {"dtype": "float32"}}
if objective != "kto":
    own |= {"train_sampling_strategy": "sequential"}
arguments = getattr(trl, f"{kind}Config")(
    output_dir=f"{out}.files", max_steps=4, per_device_train_batch_size=3, gradient_accumulation_steps=2,
    learning_rate=2e-3, lr_scheduler_type="cosine", warmup_steps=1, max_length=128, logging_steps=1, save_strategy="no",
    report_to="none", seed=42, data_seed=42, use_cpu=True, bf16=method == "qlora", gradient_checkpointing=False,
    disable_tqdm=True, ddp_backend="gloo", **own,
)  # fmt: skip
task = "SEQ_CLS" if objective == "reward" else "CAUSAL_LM"
adapters: Any = None
if method != "full" and not start:
    adapters = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type=task)
base: Any = model
if method == "qlora":
    from four_bits import load_in_four_bits

    if objective == "reward":
        set_seed(arguments.seed)  # the new head and the adapters are drawn in this order, as TRL draws them
        base = get_peft_model(load_in_four_bits(AutoModelForSequenceClassification, model, num_labels=1), adapters)
        adapters = None
    else:
        base = load_in_four_bits(AutoModelForCausalLM, model)
elif objective != "reward":
    base = AutoModelForCausalLM.from_pretrained(model, dtype="float32")
for folder in start:
    base = PeftModel.from_pretrained(base, folder, is_trainable=True)
trainer = getattr(trl, f"{kind}Trainer")(
    model=base, args=arguments, train_dataset=load_dataset("json", data_files=data, split="train"),
    processing_class=AutoTokenizer.from_pretrained(model), **({} if objective == "sft" else {"peft_config": adapters}),
)  # fmt: skip
trainer.train()
trainer.save_model(f"{out}.model")
if trainer.accelerator.is_main_process:
    with Path(out).open("w") as file:
        json.dump(trainer.state.log_history, file)
leave_together()
end_process()
