"""The part of a model that the plan counts on a tensor-parallel rank is the one that DeepSpeed's AutoTP leaves there.

This file is also the program of a rank.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import deepspeed
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from shardmake.memory.families import part_of
from shardmake.memory.read_config import from_config

if TYPE_CHECKING:
    from tests.workflow.forked import Forked

pytestmark = pytest.mark.training
RANKS = 4
SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "vocab_size": 128,
}  # fmt: skip
CONFIGS: list[dict[str, Any]] = [
    {**SIZES, "model_type": "llama", "tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True},
    {**SIZES, "model_type": "qwen2", "tie_word_embeddings": False},
    {**SIZES, "model_type": "qwen3", "tie_word_embeddings": True, "head_dim": 16},
    {**SIZES, "model_type": "gemma", "head_dim": 16},
]
SHARED = 2


def run_rank(folder: Path, rank: int) -> None:
    """Write each model's shapes by name, and the elements of this rank's part of the flat states."""
    deepspeed.init_distributed("gloo")
    settings = {
        "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True, "tensor_parallel": {"autotp_size": SHARED},
    }  # fmt: skip
    found = []
    for config in CONFIGS:
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
        optimizer = torch.optim.AdamW(model.parameters())
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
        shapes = {name: list(part.shape) for name, part in engine.module.named_parameters()}
        found.append([shapes, sum(part.numel() for part in engine.optimizer.single_partition_of_fp32_groups)])
    if rank == 0:
        (folder / "shapes.json").write_text(json.dumps(found))
    torch.distributed.barrier()


@pytest.mark.full
def test_the_plan_counts_the_part_of_a_rank(forked: "Forked", tmp_path: Path) -> None:
    """Names and shapes of four families, with and without biases and tied heads, on two groups of two ranks."""
    codes = forked.server.run(tmp_path, {}, RANKS, program=f"{__name__}:run_rank")
    assert codes == [0] * RANKS, (tmp_path / "node-0.log").read_text()
    found = json.loads((tmp_path / "shapes.json").read_text())
    for config, (shapes, flat) in zip(CONFIGS, found, strict=True):
        part = part_of(from_config(config), SHARED)
        assert {tensor.name: list(tensor.shape) for tensor in part.tensors} == shapes
        assert flat == pytest.approx(part.parameters / (RANKS // SHARED), rel=1e-3)
