"""A training script for transformers' Trainer that does not use Shardmake."""

import json
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser, Trainer, TrainingArguments


@dataclass
class ScriptArguments:
    model_name_or_path: str = field()
    train_file: str = field()


def read_examples(path: str, tokenizer) -> list[dict[str, torch.Tensor]]:
    lines = [json.loads(line) for line in Path(path).read_text().splitlines()]
    texts = [tokenizer.apply_chat_template(line["messages"], tokenize=False) for line in lines]
    encoded = tokenizer(texts, padding="max_length", truncation=True, max_length=64, return_tensors="pt")
    return [{"input_ids": row, "labels": row} for row in encoded["input_ids"]]


def main() -> None:
    script, arguments = HfArgumentParser((ScriptArguments, TrainingArguments)).parse_args_into_dataclasses()
    tokenizer = AutoTokenizer.from_pretrained(script.model_name_or_path)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(script.model_name_or_path)
    trainer = Trainer(model, arguments, train_dataset=read_examples(script.train_file, tokenizer))
    checkpoints = sorted(Path(arguments.output_dir).glob("checkpoint-*"))
    trainer.train(resume_from_checkpoint=str(checkpoints[-1]) if checkpoints else None)
    trainer.save_model()


if __name__ == "__main__":
    main()
