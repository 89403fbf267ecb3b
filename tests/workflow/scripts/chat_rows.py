"""Read conversations for the training scripts of this folder."""

import json
from pathlib import Path

import torch
from transformers import AutoTokenizer


def read_rows(path: str, model: str, count: int | None = None) -> list[torch.Tensor]:
    """Return the tokens of the first ``count`` conversations, each of shape (64,)."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    lines = [json.loads(line) for line in Path(path).read_text().splitlines()[:count]]
    texts = [tokenizer.apply_chat_template(line["messages"], tokenize=False) for line in lines]
    encoded = tokenizer(texts, padding="max_length", truncation=True, max_length=64, return_tensors="pt")
    return list(encoded["input_ids"])
