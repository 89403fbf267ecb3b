"""Checkpoints of any size in the exact layout of DeepSpeed ZeRO, without a training.

With ``sparse``, files have their full length but hold no bytes, so that a checkpoint of 405B parameters takes no space.
"""

import math
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.serialization import skip_data
from transformers import AutoModelForCausalLM, LlamaConfig

SHAPES = {
    "0.2B": {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 16, "vocab_size": 32000},
    "0.5B": {"hidden_size": 1536, "intermediate_size": 4096, "num_hidden_layers": 15, "vocab_size": 32000},
    "5B": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 27, "vocab_size": 32000},
    "70B": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "vocab_size": 128256},
    "405B": {"hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "vocab_size": 128256},
}


def llama(name: str) -> LlamaConfig:
    """A Llama config of the size called ``name``."""
    hidden = SHAPES[name]["hidden_size"]
    heads = {"num_attention_heads": hidden // 128, "num_key_value_heads": max(hidden // 1024, 1)}
    return LlamaConfig(**SHAPES[name], **heads, architectures=["LlamaForCausalLM"])


def shapes(config: LlamaConfig) -> OrderedDict[str, torch.Size]:
    """Name and shape of every weight, in the order of the model."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return OrderedDict((name, parameter.shape) for name, parameter in model.named_parameters())


def write_zero3(
    checkpoint: Path, base: Path, config: LlamaConfig, ranks: int, *, sparse: bool = False, adam: bool = True
) -> None:
    """Write ``checkpoint/global_step1``, with Adam's states as a real one has if ``adam``, and ``base/config.json``."""
    folder = checkpoint / "global_step1"
    folder.mkdir(parents=True)
    (checkpoint / "latest").write_text("global_step1")
    config.save_pretrained(base)
    names = shapes(config)
    elements = sum(math.ceil(shape.numel() / ranks) for shape in names.values())
    for rank in range(ranks):
        stem = folder / f"zero_pp_rank_{rank}_mp_rank_00"
        torch.save(_model_state(names, dict.fromkeys(names, torch.Size([0]))), f"{stem}_model_states.pt")
        if sparse:
            with FakeTensorMode():
                state = _optimizer_state(elements, ranks, adam)
            _save_sparse(state, f"{stem}_optim_states.pt")
        else:
            torch.save(_optimizer_state(elements, ranks, adam), f"{stem}_optim_states.pt")


def write_sparse_zero2(checkpoint: Path, base: Path, config: LlamaConfig, ranks: int) -> None:
    """Write what `write_zero3` writes, sparse and in the layout of ZeRO-1 and 2."""
    folder = checkpoint / "global_step1"
    folder.mkdir(parents=True)
    (checkpoint / "latest").write_text("global_step1")
    config.save_pretrained(base)
    names = shapes(config)
    elements = sum(shape.numel() for shape in names.values())
    with FakeTensorMode():
        _save_sparse(_model_state(names, names, torch.bfloat16), f"{folder}/mp_rank_00_model_states.pt")
        state = _optimizer_state(math.ceil(elements / (2 * ranks)) * 2, ranks, True)
    held = state["optimizer_state_dict"]
    held |= {"zero_stage": 2, "single_partition_of_fp32_groups": held.pop("fp32_flat_groups")}
    for rank in range(ranks):
        _save_sparse(state, f"{folder}/zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")


def _save_sparse(state: dict[str, Any], path: str) -> None:
    with skip_data(materialize_fake_tensors=True):
        torch.save(state, path)


def _model_state(
    names: OrderedDict[str, torch.Size], held: Mapping[str, torch.Size], dtype: torch.dtype = torch.float32
) -> dict[str, object]:
    return {
        "module": OrderedDict((name, torch.empty(held[name], dtype=dtype)) for name in names), "buffer_names": [],
        "param_shapes": [names], "frozen_param_shapes": None, "frozen_param_fragments": None, "shared_params": {},
        "global_steps": 1, "ds_config": {}, "ds_version": "0.19.8",
    }  # fmt: skip


def _optimizer_state(elements: int, ranks: int, adam: bool) -> dict[str, Any]:
    moments = {"exp_avg": torch.zeros(elements), "exp_avg_sq": torch.zeros(elements)} if adam else {}
    inner = {"state": {0: {"step": 1, **moments}}, "param_groups": [{"lr": 1e-3}]}
    flat = torch.rand(elements)
    return {
        "optimizer_state_dict": {
            "zero_stage": 3,
            "partition_count": ranks,
            "optimizer_state_dict": inner,
            "fp32_flat_groups": [flat],
        }
    }
