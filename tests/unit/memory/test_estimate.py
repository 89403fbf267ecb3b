from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmake.config.models import STRATEGIES, Strategy
from shardmake.config.strategies import STRATEGY_SPECS
from shardmake.core.units import GIB
from shardmake.doctor.gpu_report import GpuReport
from shardmake.memory import closed_form, host, states
from shardmake.memory.buckets import Buckets
from shardmake.memory.ddp import replay
from shardmake.memory.estimate import estimate_closed_form, gpu_memory, outside, rank_memory, simulate, step_of
from shardmake.memory.model import selected_experts, split, with_experts
from shardmake.memory.read_config import from_config
from shardmake.memory.timeline import Timeline
from shardmake.memory.trace import events_of
from tests.unit.memory.llama_8b import BUCKETS, LLAMA_8B, scenario
from tools.gpu_page import RESULTS


def test_the_peak_is_a_maximum_over_phases_not_a_sum() -> None:
    figures = gpu_memory(scenario(sequence_length=8192), BUCKETS)
    assert figures.phase == "cross entropy" and "fp32 gradients" not in figures.terms


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


def test_context_and_communicators_are_those_of_each_training_alone_on_an_h100() -> None:
    rows = GpuReport.read(RESULTS / "nvidia-h100-80gb-hbm3-x1-20261127-000000.json").trained
    for row in rows:
        alone = scenario(strategy=row.strategy, ranks_per_node=1, gpu_capability=9.0)
        assert row.device and outside(alone) == pytest.approx(row.device - row.reserved, abs=0.03 * GIB)
    assert {"ddp", "zero1", "zero2", "zero3", "fsdp"} <= {row.strategy for row in rows}


ORDER = [("zero2", "zero3"), ("zero1", "zero2"), ("zero3", "zero3-offload-optimizer"), ("fsdp-grad-op", "fsdp")]


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3", "fsdp", "zero3-offload"])
def test_a_step_in_parts_has_the_memory_of_its_single_events(strategy: Strategy) -> None:
    case = scenario(SMALL, strategy=strategy, accumulation=2, split=split(SMALL, "full"))
    events = events_of(case)
    apart = [("grad", event[1], "none of the weights") for event in events if event[0] == "alloc"]
    whole = replace(case, split=replace(case.split, frozen_names=frozenset({"none of the weights"})))
    parts, single = (step_of(whole, one) for one in (events, [*events, *apart]))
    assert len(parts) < len(single) / 2 and not any(isinstance(part, Timeline) for part in single)
    one, other = (simulate(whole, SMALL_BUCKETS, step) for step in (parts, single))
    assert one.peaks == other.peaks and [[*peak.terms] for peak in one.peaks.values()] == [
        [*peak.terms] for peak in other.peaks.values()
    ]
    assert (one.reserved(), one.resident()) == (other.reserved(), other.resident())


@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name != "fsdp-hybrid"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_repeated_micro_step_has_the_memory_of_one_simulated_again(strategy: Strategy, accumulation: int) -> None:
    case = scenario(SMALL, strategy=strategy, accumulation=accumulation, split=split(SMALL, "full"))
    step, timeline = step_of(case), Timeline()
    memory = rank_memory(case, SMALL_BUCKETS, timeline)
    memory.load()
    timeline.enter("load")
    for micro_steps in (1, accumulation):
        for _ in range(micro_steps):
            replay(step, memory, timeline, 2)
        timeline.enter("optimizer step")
        memory.step()
    found = simulate(case, SMALL_BUCKETS, step)
    assert found.peaks == timeline.peaks and len(found.events) == len(timeline.events)
    assert (found.reserved(), found.resident()) == (timeline.reserved(), timeline.resident())


@pytest.mark.parametrize(("more", "less"), ORDER)
def test_each_step_of_deepspeeds_guide_saves_memory(more: str, less: str) -> None:
    larger, smaller = (gpu_memory(scenario(strategy=one), BUCKETS).allocated for one in (more, less))
    assert smaller < larger


SMALL = from_config({**LLAMA_8B, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3,
                     "num_attention_heads": 8, "vocab_size": 2000})  # fmt: skip


SMALL_BUCKETS = Buckets(1 << 16, 1 << 15, 2560)


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from([s for s in STRATEGIES if s != "fsdp-hybrid"]), st.sampled_from(["full", "lora"]),
    st.integers(1, 3), st.sampled_from([128, 512]), st.integers(2, 8), st.booleans(),
)  # fmt: skip
def test_more_work_never_takes_less_and_more_ranks_never_more(
    strategy: str, method: str, batch: int, length: int, ranks: int, checkpointing: bool
) -> None:
    case = scenario(
        SMALL, strategy=strategy, method=method, micro_batch=batch, sequence_length=length, ranks_per_node=ranks,
        checkpointing=checkpointing,
    )  # fmt: skip
    here = gpu_memory(case, SMALL_BUCKETS)
    assert min(here.terms.values()) > 0 and sum(here.terms.values()) == here.allocated <= here.reserved <= here.device
    for more in (replace(case, micro_batch=batch + 1), replace(case, sequence_length=2 * length)):
        assert gpu_memory(more, SMALL_BUCKETS).allocated >= here.allocated
    assert gpu_memory(replace(case, ranks_per_node=2 * ranks), SMALL_BUCKETS).allocated <= here.allocated
    assert min((*host.host_terms(case, SMALL_BUCKETS).values(), *host.disk_terms(case, 2).values())) > 0


def test_an_architecture_outside_the_families_is_traced(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 320}
    model = from_config(config)
    assert model.decoder is None
    cases = [scenario(model, strategy="ddp", ranks_per_node=1, micro_batch=b, sequence_length=64) for b in (3, 4)]
    three, four = (gpu_memory(case, Buckets(), events_of(case)).allocated for case in cases)
    assert 0 < four - three < three
    assert len(list(tmp_path.rglob("tracer-*.json"))) == 1, "one tape serves both micro batches"


def test_reserved_stays_within_the_gpu_if_the_tensors_fit() -> None:
    case = scenario(strategy="fsdp", sequence_length=8192)
    free = gpu_memory(case, BUCKETS)
    outside = free.device - free.reserved
    capacity = (free.allocated + free.reserved) // 2 + outside
    pressed = gpu_memory(case, BUCKETS, capacity=capacity)
    assert pressed.allocated == free.allocated and pressed.wanted == free.reserved > pressed.reserved
    assert pressed.device <= capacity


def test_qlora_under_fsdp_needs_the_whole_4_bit_model_on_each_gpu_first() -> None:
    """Each rank quantizes its own copy before FSDP shards it: 37 GiB for 70B, and 11 GiB afterwards on eight GPUs."""
    wide = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
    model = from_config({**LLAMA_8B, **wide})
    case = scenario(model, strategy="fsdp", method="qlora", sequence_length=512, loads_on_gpu=True)
    for figures in (gpu_memory(case, BUCKETS), estimate_closed_form(case, BUCKETS, closed_form.profile(case)).gpu):
        assert figures.phase == "load" and figures.allocated == states.frozen_bytes(case) > 36 * GIB


LLAMA_1B = {**LLAMA_8B, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
            "tie_word_embeddings": True}  # fmt: skip
SMALL_BUCKETS = Buckets(reduce_bucket_size=2048**2, stage3_prefetch_bucket_size=int(0.9 * 2048**2))


@pytest.mark.parametrize(("strategy", "gradients", "reserved", "device", "tolerance"), [
    ("ddp", None, 38_287_704_064, 37_829, 0.03), ("zero1", None, 36_964_401_152, 36_955, 0.07),
    ("zero2", "fp32", 37_994_102_784, 37_937, 0.03), ("zero3", "fp32", 38_767_951_872, 38_287, 0.03),
    ("fsdp", "fp32", 36_146_511_872, 35_787, 0.03), ("fsdp-offload", "fp32", 16_391_340_032, 16_965, 0.03),
])  # fmt: skip
def test_a_single_h100_held_what_is_estimated(
    strategy: str, gradients: str | None, reserved: int, device: int, tolerance: float
) -> None:
    """1.24 billion weights, 4,096 tokens, two passes: PyTorch's cache in bytes, and nvidia-smi's MiB (27 Nov 2026)."""
    case = scenario(
        from_config(LLAMA_1B), strategy=strategy, ranks_per_node=1, sequence_length=4096, accumulation=2,
        checkpointing=False, attention="varlen", gradient_dtype=gradients, gpu_memory=int(79.1 * GIB),
        gpu_capability=9.0, loads_on_gpu=True,
    )  # fmt: skip
    found = gpu_memory(case, SMALL_BUCKETS, capacity=int(79.1 * GIB))
    assert found.reserved == pytest.approx(reserved, rel=tolerance)
    assert found.device == pytest.approx(device << 20, rel=tolerance)


def test_a_rank_gathers_its_experts_alone_and_keeps_the_same_part_of_all() -> None:
    """Four ranks have two of eight experts each; a mixture's other states are sharded over all eight ranks as before."""
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 8}
    mixture = {"model_type": "mixtral", "architectures": [], "num_local_experts": 8, "num_experts_per_tok": 2}
    model = from_config({**LLAMA_8B, **sizes, **mixture})
    whole = scenario(model, strategy="fsdp", precision="bf16")
    local = from_config(with_experts(model.config, 2))
    spread = replace(whole, expert_parallel=4, local_model=local)
    before, after = (states.resident(case, BUCKETS) for case in (whole, spread))
    exchanged = after.pop("exchanged tokens")
    assert after == before and exchanged == 2 * 2048 * selected_experts(model) * 512 * (1 + 3)
    saved = 2 * 6 * 3 * 512 * 2048  # bytes of six experts
    first = "backward of the first layer"
    gathered = [
        closed_form.phases(case, BUCKETS, closed_form.Profile())[first]["gathered weights"] for case in (whole, spread)
    ]
    assert gathered[0] - gathered[1] >= 2 * saved


@pytest.mark.parametrize("strategy", [s for s in STRATEGIES if s != "fsdp-hybrid"])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("gradients", ["bf16", "fp32"])
def test_closed_form_and_simulation_agree(strategy: str, checkpointing: bool, gradients: str) -> None:
    if gradients == "fp32" and not STRATEGY_SPECS[strategy].accumulates_in_fp32:
        gradients = "bf16"  # no plan has it otherwise
    case = scenario(strategy=strategy, checkpointing=checkpointing, gradient_dtype=gradients, accumulation=2)
    simulated = gpu_memory(case, BUCKETS)
    scanned = estimate_closed_form(case, BUCKETS, closed_form.profile(case)).gpu
    assert scanned.allocated == pytest.approx(simulated.allocated, rel=0.08)
    assert simulated.allocated <= simulated.reserved <= simulated.device
