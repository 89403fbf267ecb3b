from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmake.config.models import STRATEGIES
from shardmake.core.units import GIB
from shardmake.memory import closed_form, host, states
from shardmake.memory.buckets import Buckets, read_buckets
from shardmake.memory.estimate import estimate_closed_form, events_of, gpu_memory
from shardmake.memory.model import Model, split
from shardmake.memory.read_config import from_config
from shardmake.memory.scenario import Scenario

LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
MODEL = from_config(LLAMA_8B)
P = MODEL.parameters
BUCKETS = Buckets(4096**2, 500_000_000, int(0.9 * 4096**2), 40960)


def scenario(model: Model = MODEL, **more: Any) -> Scenario:
    values = {
        "model": model,
        "split": split(model, more.get("method", "full")),
        "strategy": "zero3",
        "nodes": 1,
        "ranks_per_node": 8,
        "micro_batch": 1,
        "sequence_length": 2048,
        "checkpointing": True,
    }
    return Scenario(**{**values, **more})  # type: ignore[arg-type]


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


@pytest.mark.parametrize("strategy", [s for s in STRATEGIES if s != "fsdp-hybrid"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_closed_form_and_simulation_agree(strategy: str, checkpointing: bool) -> None:
    case = scenario(strategy=strategy, checkpointing=checkpointing, accumulation=2)
    simulated = gpu_memory(case, BUCKETS)
    scanned = estimate_closed_form(case, BUCKETS, closed_form.profile(case, {})).gpu
    assert scanned.allocated == pytest.approx(simulated.allocated, rel=0.08)
    assert simulated.allocated <= simulated.reserved <= simulated.device


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_terms_add_up_to_allocated_memory(strategy: str) -> None:
    figures = gpu_memory(scenario(strategy=strategy), BUCKETS)
    assert sum(figures.terms.values()) == figures.allocated
    assert all(size > 0 for size in figures.terms.values())


def test_the_peak_is_a_maximum_over_phases_not_a_sum() -> None:
    figures = gpu_memory(scenario(sequence_length=8192), BUCKETS)
    assert figures.phase == "cross entropy"
    assert "fp32 gradients" not in figures.terms


def test_cross_entropy_is_twelve_bytes_a_logit() -> None:
    short, long = (gpu_memory(scenario(sequence_length=n, strategy="zero3-offload"), BUCKETS) for n in (4096, 8192))
    per_token = (long.allocated - short.allocated) / 4096
    saved = 2 * 4096 * 32
    assert per_token == pytest.approx(12 * 128256 + saved, rel=0.02)


def test_fused_loss_saves_the_logits() -> None:
    plain, fused = (
        gpu_memory(scenario(sequence_length=8192, loss=loss), BUCKETS).allocated for loss in ("plain", "fused")
    )
    assert fused < plain - 8 * GIB


ORDER = [("zero2", "zero3"), ("zero1", "zero2"), ("zero3", "zero3-offload-optimizer"), ("fsdp-grad-op", "fsdp")]


@pytest.mark.parametrize(("more", "less"), ORDER)
def test_each_step_of_deepspeeds_guide_saves_memory(more: str, less: str) -> None:
    assert (
        gpu_memory(scenario(strategy=less), BUCKETS).allocated < gpu_memory(scenario(strategy=more), BUCKETS).allocated
    )


SMALL = from_config({**LLAMA_8B, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3,
                     "num_attention_heads": 8, "vocab_size": 2000})  # fmt: skip
SMALL_BUCKETS = Buckets(1 << 16, 1 << 16, 1 << 15, 2560)


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from([s for s in STRATEGIES if s != "fsdp-hybrid"]),
    st.sampled_from(["full", "lora"]),
    st.integers(1, 3),
    st.sampled_from([128, 512]),
    st.integers(2, 8),
    st.booleans(),
)
def test_more_work_never_takes_less_and_more_ranks_never_more(
    strategy: str, method: str, batch: int, length: int, ranks: int, checkpointing: bool
) -> None:
    case = scenario(
        SMALL, strategy=strategy, method=method, micro_batch=batch, sequence_length=length, ranks_per_node=ranks,
        checkpointing=checkpointing,
    )  # fmt: skip
    here = gpu_memory(case, SMALL_BUCKETS)
    assert min(here.terms.values()) > 0
    assert sum(here.terms.values()) == here.allocated <= here.reserved <= here.device
    for more in (replace(case, micro_batch=batch + 1), replace(case, sequence_length=2 * length)):
        assert gpu_memory(more, SMALL_BUCKETS).allocated >= here.allocated
    assert gpu_memory(replace(case, ranks_per_node=2 * ranks), SMALL_BUCKETS).allocated <= here.allocated
    assert min((*host.host_terms(case, SMALL_BUCKETS).values(), *host.disk_terms(case, 2).values())) > 0


def test_pinned_buffers_are_powers_of_two() -> None:
    assert [host.pinned(n) for n in (0, 1, 2, 3, 1 << 20, (1 << 20) + 1)] == [0, 1, 2, 4, 1 << 20, 1 << 21]


def test_offloaded_states_are_18_and_20_bytes_a_weight() -> None:
    plain = replace(BUCKETS, pin_memory=False)
    for strategy, per_weight in (
        ("zero1-offload", 18),
        ("zero2-offload", 18),
        ("zero3-offload-optimizer", 18),
        ("zero3-offload", 20),
    ):
        terms = host.host_terms(scenario(strategy=strategy), plain)
        held = sum(size for name, size in terms.items() if name not in ("processes", "loading", "largest gradient"))
        assert held == pytest.approx(per_weight * P, rel=1e-6)


def test_nvme_holds_the_swapped_states() -> None:
    terms = host.nvme_bytes(scenario(strategy="zero3-nvme", nodes=2))
    assert terms == {"optimizer states": 16 * P // 2, "parameters": 2 * P // 2}


def test_buckets_are_read_from_the_rendered_section() -> None:
    section = {
        "stage": 3,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": 7,
        "sub_group_size": 1e9,
        "offload_optimizer": {"device": "cpu", "pin_memory": False},
    }
    buckets = read_buckets(section, 4096)
    assert (buckets.reduce_bucket_size, buckets.stage3_prefetch_bucket_size) == (4096**2, 7)
    assert (buckets.sub_group_size, buckets.overlap_comm, buckets.pin_memory) == (10**9, True, False)


def test_an_architecture_outside_the_families_is_traced(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 320}
    model = from_config(config)
    assert model.decoder is None
    cases = [scenario(model, strategy="ddp", ranks_per_node=1, micro_batch=b, sequence_length=64) for b in (3, 4)]
    three, four = (gpu_memory(case, Buckets(), events_of(case)).allocated for case in cases)
    assert 0 < four - three < three
    assert len(list(tmp_path.rglob("tracer-*.json"))) == 2


def test_reserved_stays_within_the_gpu_if_the_tensors_fit() -> None:
    case = scenario(strategy="fsdp", sequence_length=8192)
    free = gpu_memory(case, BUCKETS)
    outside = free.device - free.reserved
    capacity = (free.allocated + free.reserved) // 2 + outside
    pressed = gpu_memory(case, BUCKETS, capacity=capacity)
    assert pressed.allocated == free.allocated
    assert pressed.wanted == free.reserved > pressed.reserved
    assert pressed.device <= capacity
