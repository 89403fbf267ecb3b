"""Resident states: bytes per parameter as in the papers, the adapters and the optimizers."""

import pytest

from shardmake.memory import states
from tests.unit.memory.llama_8b import BUCKETS, P, scenario

STATES = {  # bytes per parameter: whole, and divided by the ranks (Rajbhandari et al. 2020; DeepSpeed's and FSDP's code)
    "ddp": (4 + 8 + 4, 0),  # fp32 weights, moments, reducer buckets; gradients come with the backward pass
    "zero1": (2, 12),
    "zero1-offload": (2, 0),
    "zero2": (2, 12),
    "zero2-offload": (2, 0),
    "zero3": (0, 2 + 2 + 12),
    "zero3-offload-optimizer": (0, 2),
    "zero3-offload": (0, 0),
    "zero3-nvme": (0, 0),
    "fsdp": (0, 4 + 8),
    "fsdp-grad-op": (0, 4 + 8),
    "fsdp-offload": (0, 0),
}


@pytest.mark.parametrize("strategy", STATES)
def test_states_match_the_papers(strategy: str) -> None:
    terms = states.resident(scenario(strategy=strategy), BUCKETS)
    for small in ("model buffers", "cuBLAS workspaces", "persistent weights"):
        terms.pop(small, None)
    if strategy.startswith("zero"):
        terms.pop("communication buffers", None)
    whole, part = STATES[strategy]
    assert sum(terms.values()) == pytest.approx(whole * P + part * P / 8, abs=16)


def test_hybrid_shards_within_a_node() -> None:
    across = states.resident(scenario(strategy="fsdp-hybrid", nodes=4), BUCKETS)
    within = states.resident(scenario(strategy="fsdp", nodes=1), BUCKETS)
    assert across == within


@pytest.mark.parametrize(("optimizer", "per_weight"), [("adamw", 8), ("adamw8bit", 2.03125), ("sgd", 0)])
def test_optimizers(optimizer: str, per_weight: float) -> None:
    with_it = states.resident(scenario(strategy="ddp", optimizer=optimizer), BUCKETS)
    assert with_it.get("optimizer states", 0) == pytest.approx(per_weight * P, rel=1e-6)


def test_adapters_keep_the_base_in_16_or_4_bits() -> None:
    lora = states.resident(scenario(strategy="ddp", method="lora"), BUCKETS)
    qlora = states.resident(scenario(strategy="ddp", method="qlora"), BUCKETS)
    assert lora["frozen weights"] == 2 * P
    head_and_embedding = 2 * 128256 * 4096
    norms = (2 * 32 + 1) * 4096
    in_four_bits = P - head_and_embedding - norms
    assert qlora["frozen weights"] == pytest.approx(2 * (P - in_four_bits) + 0.516 * in_four_bits, rel=1e-3)
