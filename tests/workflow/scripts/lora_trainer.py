"""Train a LoRA adapter with transformers' Trainer, on a base model in 4 bits if asked; save its factors as well."""

import json
from dataclasses import dataclass, field
from pathlib import Path

import torch
from factors import save_factors
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser, Trainer, TrainingArguments


@dataclass
class ScriptArguments:
    model: str = field()
    data: str = field()
    lora: str = field()
    factors: str = field()
    four_bits: bool = field(default=False)


def read_examples(path: str, tokenizer) -> list[dict[str, torch.Tensor]]:
    lines = [json.loads(line) for line in Path(path).read_text().splitlines()[:64]]
    texts = [tokenizer.apply_chat_template(line["messages"], tokenize=False) for line in lines]
    encoded = tokenizer(texts, padding="max_length", truncation=True, max_length=64, return_tensors="pt")
    return [{"input_ids": row, "labels": row} for row in encoded["input_ids"]]


def load(model: str, four_bits: bool):
    if not four_bits:
        return AutoModelForCausalLM.from_pretrained(model)
    from four_bits import load_in_four_bits

    return load_in_four_bits(AutoModelForCausalLM, model)


def main() -> None:
    script, arguments = HfArgumentParser((ScriptArguments, TrainingArguments)).parse_args_into_dataclasses()
    tokenizer = AutoTokenizer.from_pretrained(script.model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = get_peft_model(load(script.model, script.four_bits), LoraConfig(**json.loads(script.lora)))
    trainer = Trainer(model, arguments, train_dataset=read_examples(script.data, tokenizer))
    trainer.train()
    trainer.save_model()
    save_factors(trainer.accelerator, trainer.model_wrapped, script.factors)


if __name__ == "__main__":
    main()
