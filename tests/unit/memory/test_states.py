"""Resident states: bytes per parameter as in the papers, the adapters, the optimizers and ZeRO-3's sub-groups."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmake.memory import states
from shardmake.memory.model import ParameterSpec
from tests.unit.memory.llama_8b import BUCKETS, MODEL, P, scenario

STATES = {  # bytes per parameter: whole, and divided by the ranks (Rajbhandari et al. 2020; DeepSpeed's and FSDP's code)
    "ddp": (4 + 8 + 4, 0),  # fp32 weights, moments, reducer buckets; gradients come with the backward pass
    "zero1": (2, 12), "zero1-offload": (2, 0), "zero2": (2, 12), "zero2-offload": (2, 0), "zero3": (0, 2 + 2 + 12),
    "zero3-offload-optimizer": (0, 2), "zero3-offload": (0, 0), "zero3-nvme": (0, 0), "fsdp": (0, 4 + 8),
    "fsdp-grad-op": (0, 4 + 8), "fsdp-offload": (0, 0),
}  # fmt: skip

ZERO2 = scenario(strategy="zero2")
REST = 2 * 128256 * 4096 + (2 * 32 + 1) * 4096
"""The weights of embedding, head and norms."""


@pytest.mark.parametrize("strategy", STATES)
def test_states_match_the_papers(strategy: str) -> None:
    terms = states.resident(scenario(strategy=strategy), BUCKETS)
    for small in ("model buffers", "cuBLAS workspaces", "persistent weights"):
        terms.pop(small, None)
    if strategy.startswith("zero"):
        terms.pop("communication buffers", None)
    whole, part = STATES[strategy]
    assert sum(terms.values()) == pytest.approx(whole * P + part * P / 8, abs=16)


@pytest.mark.parametrize(("strategy", "more"), [
    ("zero2", 4 * P / 8 - 2 * states.largest_touched(ZERO2.model, ZERO2.split, ZERO2.part)),  # the flat part
    ("zero2-offload", 4 * P / 8),  # the flat part, which is on the host with gradients in 16 bits
    ("zero3", 2 * P / 8 + 2 * BUCKETS.reduce_bucket_size), ("zero3-offload", 2 * BUCKETS.reduce_bucket_size),
    ("fsdp", 0),  # sums are in the type of the weights in any case
    ("ddp", 0),
])  # fmt: skip
def test_gradients_in_fp32(strategy: str, more: float) -> None:
    def held(gradients: str) -> int:
        case = scenario(strategy=strategy, gradient_dtype=gradients)
        return sum(states.resident(case, BUCKETS).values()) + states.gradients(case)

    assert held("fp32") - held("bf16") == pytest.approx(more, abs=16)


def test_zero2_keeps_tensors_whole_of_which_a_rank_has_a_part() -> None:
    """DeepSpeed's ``copy_grads_in_partition``: on 64 ranks, four share the embedding, and each has all of it."""
    embedding = 128256 * 4096
    held = states.gradients(scenario(strategy="zero2", nodes=8))
    assert 2 * embedding < held < 2 * (embedding + P / 64 + 14336 * 4096)
    assert held < states.gradients(scenario(strategy="zero2")) < 2 * P / 8 + 2 * embedding


def test_reduction_in_fp32() -> None:
    """FSDP reduces a layer, ZeRO-2 a bucket or a large gradient, ZeRO-3 a gradient that is larger than its bucket."""
    embedding, layer = 128256 * 4096, MODEL.largest_block
    fsdp = scenario(strategy="fsdp", gradient_dtype="fp32")
    assert states.bucket_bytes(fsdp, BUCKETS) == (2 + 4) * layer
    for strategy, small in (("zero2", 4 * BUCKETS.reduce_bucket_size), ("zero3", 0)):
        case = scenario(strategy=strategy, gradient_dtype="fp32")
        assert states.reduction_bytes(case, BUCKETS, 4096) == small
        assert states.reduction_bytes(case, BUCKETS, embedding) == 4 * embedding
        assert states.reduction_bytes(scenario(strategy=strategy), BUCKETS, embedding) == 0


def test_hybrid_shards_within_a_node() -> None:
    across = states.resident(scenario(strategy="fsdp-hybrid", nodes=4), BUCKETS)
    within = states.resident(scenario(strategy="fsdp", nodes=1), BUCKETS)
    assert across == within


def test_hpz_adds_a_second_shard_over_the_ranks_of_a_node() -> None:
    """Measured with DeepSpeed on 4 ranks, 17 208 weights in fp32: 34 416 bytes over groups of 2, 17 208 over 4."""
    second = "second shard of the weights"
    for method in ("full", "lora"):
        plain = states.resident(scenario(strategy="zero3", nodes=4, method=method), BUCKETS)
        more = states.resident(scenario(strategy="zero3-hpz", nodes=4, method=method), BUCKETS)
        held = plain["weights"] + plain.get("frozen weights", 0)
        assert second not in plain and more.pop(second) == pytest.approx(4 * held, abs=64) and more == plain


@pytest.mark.parametrize(
    ("optimizer", "per_weight"), [("adamw", 8), ("adamw8bit", 2.03125), ("muon", 4 + 4 * REST / P), ("sgd", 0)]
)
def test_optimizers(optimizer: str, per_weight: float) -> None:
    with_it = states.resident(scenario(strategy="ddp", optimizer=optimizer), BUCKETS)
    assert with_it.get("optimizer states", 0) == pytest.approx(per_weight * P, rel=1e-6)


def test_adapters_keep_the_base_in_16_or_4_bits() -> None:
    lora, qlora, cast, in_zero = (
        states.resident(scenario(**changes), BUCKETS)
        for changes in (
            {"strategy": "ddp", "method": "lora"},
            {"strategy": "ddp", "method": "qlora"},
            {"strategy": "ddp", "method": "qlora", "has_script": True},  # by a script
            {"strategy": "zero2", "method": "qlora"},
        )
    )
    assert lora["frozen weights"] == 2 * P
    in_four_bits = P - REST
    assert in_zero["frozen weights"] == qlora["frozen weights"] == 2 * REST + in_four_bits // 2
    assert cast["frozen weights"] == 4 * REST + in_four_bits // 2
    assert qlora["quantization scales"] == pytest.approx(0.01587 * in_four_bits, rel=1e-3)


def test_every_rank_holds_the_scales_of_all_4_bit_weights() -> None:
    """FSDP shards parameters; bitsandbytes' scales are an attribute."""
    cases = (scenario(strategy=strategy, method="qlora") for strategy in ("ddp", "fsdp", "fsdp-offload"))
    (size,) = {states.resident(case, BUCKETS)["quantization scales"] for case in cases}
    assert size > 100 * 2**20


@given(
    sizes=st.lists(st.integers(1, 10_000), min_size=1, max_size=12), ranks=st.integers(1, 9),
    sub_group_size=st.integers(1, 20_000),
)  # fmt: skip
def test_no_sub_group_of_zero3_is_larger_than_estimated(sizes: list[int], ranks: int, sub_group_size: int) -> None:
    """DeepSpeed pads each tensor to a multiple of the ranks, which can add one element for each tensor."""
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

    parts = [
        SimpleNamespace(part=part, partition_numel=lambda part=part: part) for part in (-(-n // ranks) for n in sizes)
    ]
    optimizer: Any = SimpleNamespace(sub_group_size=sub_group_size)
    groups = DeepSpeedZeroOptimizer_Stage3._create_fp16_sub_groups(optimizer, parts)
    largest = max(sum(tensor.part for tensor in group) for group in groups)
    tensors = tuple(ParameterSpec(f"{n}.weight", (size,), "linear") for n, size in enumerate(sizes))
    case = scenario(replace(MODEL, tensors=tensors), ranks_per_node=ranks)
    assert largest <= states.largest_group(case, replace(BUCKETS, sub_group_size=sub_group_size)) + len(sizes)
    assert sum(states.step_groups(case, BUCKETS)) == -(-sum(sizes) // ranks)


REFERENCE = {  # in the type of the trained weights; DeepSpeed casts it, and shards it under ZeRO-3 only
    "ddp": 4 * P, "zero2-offload": 2 * P, "zero3": 2 * P / 8, "zero3-offload-optimizer": 2 * P / 8, "fsdp": 4 * P / 8,
    "zero3-offload": 0, "fsdp-offload": 0,
}  # fmt: skip


@pytest.mark.parametrize("strategy", REFERENCE)
def test_the_reference_model_is_where_the_trained_weights_are(strategy: str) -> None:
    case = scenario(strategy=strategy, reference_weights=True)
    assert states.resident(case, BUCKETS).get("reference model", 0) == pytest.approx(REFERENCE[strategy], abs=16)
    assert states.reference_bytes(case) > 0 == states.reference_bytes(scenario(strategy=strategy))
