"""Read conversations for the training scripts of this folder, and add and save LoRA adapters."""

import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer


def read_rows(path: str, model: str, count: int | None = None) -> list[torch.Tensor]:
    """Return the tokens of the first ``count`` conversations, each of shape (64,)."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    lines = [json.loads(line) for line in Path(path).read_text().splitlines()[:count]]
    texts = [tokenizer.apply_chat_template(line["messages"], tokenize=False) for line in lines]
    encoded = tokenizer(texts, padding="max_length", truncation=True, max_length=64, return_tensors="pt")
    return list(encoded["input_ids"])


def adapted(model: torch.nn.Module, lora: str | None) -> torch.nn.Module:
    """Return the model with an adapter that has the settings ``lora``, as JSON."""
    if not lora:
        return model
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(**json.loads(lora)))


def save_factors(state: Mapping[str, torch.Tensor], path: str) -> None:
    """Save the trained factors in ``state``, which all ranks gathered."""
    if os.environ["RANK"] == "0":
        save_file({name: tensor.contiguous() for name, tensor in state.items() if ".lora_" in name}, path)
