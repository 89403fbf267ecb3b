#!/usr/bin/env bash
# transformers 5.23.0 with schedulefree 1.4.1: what Trainer saves depends on whether it evaluated just before.
#
# A schedule-free optimizer holds two sets of weights: the averaged ones, which are the result, and those at which gradients are
# taken. optimizer.eval() and .train() put one or the other into the model. Trainer calls eval() for an evaluation and train()
# at the next step; for a checkpoint and for save_model it calls neither. A step that is saved without an evaluation, and the end
# of a training without one, therefore leave the other weights in the files.
#
# Seen (20 steps, same seed; the second training evaluates at its last step):
#   schedule_free_adamw: training losses equal: True, saved weights equal: False, saved without an evaluation: 0.9 averaged + 0.1 other
#   adamw_torch: training losses equal: True, saved weights equal: True
#
# Why one would guess otherwise: the optimizer is an ordinary choice of "optim", and Trainer does switch its modes for
# evaluations, so the evaluation losses are those of the averaged weights. The model that is published is another one, and
# evaluating it again gives another loss than the log.
set -eu
where=$(mktemp -d)
trap 'rm -rf "$where"' EXIT
python3 -m venv "$where/env"
"$where/env/bin/pip" install -q torch==2.13.0
"$where/env/bin/pip" install -q transformers==5.23.0 accelerate==1.15.0 datasets==5.2.0 schedulefree==1.4.1
export HF_HOME="$where/cache" HF_HUB_OFFLINE=1
"$where/env/bin/python" -W ignore - "$where" <<'END' 2>"$where/log" || { status=$?; cat "$where/log"; exit $status; }
import sys

import torch
from datasets import Dataset
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

SIZES = dict(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, pad_token_id=None)
rows = [[place * step % 64 for place in range(16)] for step in range(1, 33)]
data = Dataset.from_dict({"input_ids": rows, "labels": rows})


def train(optim, evaluate):
    set_seed(0)
    folder = f"{sys.argv[1]}/{optim}-{evaluate}"
    arguments = TrainingArguments(
        folder, max_steps=20, per_device_train_batch_size=8, learning_rate=1e-2, lr_scheduler_type="constant", optim=optim,
        logging_steps=1, eval_strategy="steps" if evaluate else "no", eval_steps=20, save_strategy="no", use_cpu=True,
        report_to="none", disable_tqdm=True,
    )
    trainer = Trainer(LlamaForCausalLM(LlamaConfig(**SIZES)), arguments, train_dataset=data, eval_dataset=data)
    trainer.train()
    trainer.save_model(folder)
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    other = {}
    for name, value in trainer.model.named_parameters():
        other[name] = trainer.optimizer.state[value].get("z")
    return losses, load_file(f"{folder}/model.safetensors"), other


same = True
print()
for optim in ("schedule_free_adamw", "adamw_torch"):
    (losses, plain, other), (again, evaluated, _) = train(optim, False), train(optim, True)
    equal = all(torch.equal(plain[name], evaluated[name]) for name in plain)
    text = f"{optim}: training losses equal: {losses == again}, saved weights equal: {equal}"
    mixed = optim == "schedule_free_adamw" and all(
        torch.allclose(plain[name], 0.9 * evaluated[name] + 0.1 * other[name], atol=1e-6) for name in plain
    )
    print(text + (", saved without an evaluation: 0.9 averaged + 0.1 other" if mixed else ""))
    same &= losses == again and equal == (optim == "adamw_torch") and mixed == (not equal)
print("as described" if same else "CHANGED")
sys.exit(not same)
END
