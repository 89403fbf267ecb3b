"""Load a base model in 4 bits and prepare it for adapters, as PEFT's guide to quantization does."""

from typing import Any

import torch
from peft import prepare_model_for_kbit_training
from transformers import BitsAndBytesConfig

import tests.bitsandbytes_on_cpu  # noqa: F401


def load_in_four_bits(kind: Any, model: str, **options: Any) -> Any:
    """Return the model of transformers' class ``kind`` with NF4 weights, which compute in bf16."""
    config = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )  # fmt: skip
    loaded = kind.from_pretrained(model, dtype=torch.bfloat16, quantization_config=config, **options)
    return prepare_model_for_kbit_training(loaded, use_gradient_checkpointing=False)
