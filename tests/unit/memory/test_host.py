"""Host RAM and NVMe: what offload keeps there."""

from dataclasses import replace
from typing import Any

import pytest

from shardmake.config.models import Cluster
from shardmake.core.units import GIB
from shardmake.memory import host
from shardmake.memory.hardware import from_cluster
from shardmake.memory.read_config import from_config
from tests.unit.memory.llama_8b import BUCKETS, LLAMA_8B, P, scenario

SMALL_GROUPS = replace(BUCKETS, sub_group_size=10**8)


def test_pinned_buffers_are_powers_of_two() -> None:
    assert [host.pinned(n) for n in (0, 1, 2, 3, 1 << 20, (1 << 20) + 1)] == [0, 1, 2, 4, 1 << 20, 1 << 21]


def test_offloaded_states_are_18_and_20_bytes_a_weight() -> None:
    plain = replace(BUCKETS, pin_memory=False, pin_parameters=False)
    offload = {"zero1-offload": 18, "zero2-offload": 18, "zero3-offload-optimizer": 18, "zero3-offload": 20}
    others = ("processes", "loading", "saving", "largest gradient")
    for strategy, per_weight in offload.items():
        terms = host.host_terms(scenario(strategy=strategy), plain)
        held = sum(size for name, size in terms.items() if name not in others)
        assert held == pytest.approx(per_weight * P, rel=1e-6)


def test_ranks_that_wait_count_and_their_launcher() -> None:
    kept = scenario(keeps_ready=True)
    ready = {"ready ranks": kept.ranks_per_node * host.READY_RANK + host.LAUNCHER}
    assert host.host_terms(kept, BUCKETS) == host.host_terms(scenario(), BUCKETS) | ready


def test_offloaded_activations_are_the_input_of_each_layer_on_each_rank() -> None:
    """32 layers of 2,048 tokens of 4,096 elements in bf16; pinned memory comes in powers of two."""
    sized = scenario(micro_batch=1, sequence_length=2048, checkpointing=True, activation_offload=True)
    terms = host.host_terms(sized, BUCKETS)
    assert terms["activations"] == sized.ranks_per_node * 32 * 2048 * 4096 * 2
    longer = host.host_terms(replace(sized, sequence_length=2049), BUCKETS)
    assert longer["activations"] == 2 * terms["activations"]


def test_nvme_holds_the_swapped_states() -> None:
    terms = host.nvme_bytes(scenario(strategy="zero3-nvme", nodes=2))
    assert terms == {"optimizer states": 16 * P // 2, "parameters": 2 * P // 2}


def test_parameters_on_nvme_have_buffers_and_a_part_in_ram() -> None:
    """DeepSpeed pins ``buffer_count`` buffers, and keeps the first ``max_in_cpu`` elements of a rank's part in RAM."""
    sizes = replace(BUCKETS, pin_parameters=False, param_buffer_count=3, param_buffer_size=1000, max_in_cpu=500)
    terms = host.host_terms(scenario(strategy="zero3-nvme", nodes=2, ranks_per_node=1), sizes)
    assert (terms["parameters"], terms["parameter swap buffers"]) == (2 * 500, 2 * 3 * 1000)
    whole = host.host_terms(scenario(strategy="zero3-nvme", nodes=2, ranks_per_node=1), replace(sizes, max_in_cpu=P))
    assert whole["parameters"] == 2 * -(-P // 2)


def test_a_script_under_zero3_may_gather_the_whole_model_to_save_it() -> None:
    for strategy, size in (("zero3", 2 * P), ("zero3-offload", 2 * P), ("zero2", 0), ("ddp", 0)):
        terms = host.host_terms(scenario(strategy=strategy, has_script=True), SMALL_GROUPS)
        assert terms.get("gathered weights", 0) == pytest.approx(size, rel=1e-3), strategy
        assert ("loading" in terms) == (size == 0), strategy


def test_a_save_copies_the_largest_storage_of_each_rank() -> None:
    """Eight ranks under ZeRO-3 have an eighth of an 8B model each, in a sub-group of 1e9 elements and one tensor."""
    terms = host.host_terms(scenario(strategy="zero3"), BUCKETS)
    assert terms["saving"] == 8 * 4 * P // 8
    fewer = host.save_bytes(scenario(strategy="zero3", ranks_per_node=4), BUCKETS)
    assert fewer == 4 * 4 * (10**9 - 1 + 128256 * 4096 // 4)
    small = host.host_terms(scenario(strategy="zero3"), SMALL_GROUPS)
    assert "saving" not in small and small["loading"] == 2 * P
    assert host.host_terms(scenario(strategy="zero2"), BUCKETS)["loading"] == 8 * 2 * P


@pytest.mark.parametrize("changes", [{"strategy": "fsdp"}, {"strategy": "zero3-offload"}, {"on_cpu": True}])
def test_states_that_are_on_the_host_or_split_need_no_copy(changes: dict[str, Any]) -> None:
    assert "saving" not in host.host_terms(scenario(**changes), BUCKETS)


GPUS = from_cluster(
    Cluster(executor="slurm", accelerator="a100-80gb", processes_per_node=8, cpus_per_node=96, memory_gib_per_node=900)
)


@pytest.mark.parametrize(  # an 8B model fits each GPU
    ("backend", "weights", "ranks", "held"),
    [("auto", 16, 8, 0), ("whole", 16, 1, 0), ("auto", 140, 8, 280), ("zero3-offload", 16, 8, 32),
     ("device-map", 16, 1, 32)],
)  # fmt: skip
def test_evaluation_counts_each_process(backend: Any, weights: int, ranks: int, held: int) -> None:
    asked = host.evaluation_bytes(weights * GIB // 2, weights * GIB, ranks, GPUS, backend)
    assert asked == host.CPU_PROCESS + ranks * host.PROCESS + held * GIB


def test_evaluation_on_cpus_holds_fp32_weights_on_each_rank() -> None:
    on_cpu = from_cluster(Cluster(executor="local", processes_per_node=2, cpus_per_node=2, memory_gib_per_node=6))
    one, two = (host.evaluation_bytes(P, 2 * P, ranks, on_cpu, "auto") for ranks in (1, 2))
    assert two - one == 4 * P + host.CPU_PROCESS + host.CPU_PASS


def largest_four() -> int:
    return sum(sorted((tensor.numel for tensor in scenario().model.tensors), reverse=True)[:4])


@pytest.mark.parametrize(
    ("strategy", "method", "held"), [("ddp", "full", 4), ("ddp", "lora", 2), ("zero2", "full", 2), ("zero2", "lora", 2)]
)
def test_weights_for_the_gpu_are_on_the_host_while_they_are_converted(strategy: str, method: str, held: int) -> None:
    """Embedding and head are the largest tensors; transformers reads four at a time, on each of eight ranks."""
    case = scenario(strategy=strategy, method=method)
    before = host.host_terms(case, SMALL_GROUPS)["loading"]
    assert before == 8 * held * P
    direct = host._load(replace(case, loads_on_gpu=True, gpu_memory=80 * GIB))
    assert direct == 8 * held * largest_four() < before / 6


def test_zero2_flattens_on_the_host_if_the_gpu_cannot_hold_the_weights_twice() -> None:
    sizes = [host._load(scenario(strategy="zero2", loads_on_gpu=True, gpu_memory=gib * GIB)) for gib in (24, 40)]
    assert sizes[0] - sizes[1] == 8 * 2 * 2 * P
    adapters = scenario(strategy="zero2", method="lora", loads_on_gpu=True, gpu_memory=24 * GIB)
    assert host._load(adapters) == 8 * 2 * largest_four()


def test_4_bit_weights_are_read_one_by_one() -> None:
    """Eight ranks under FSDP each quantize the whole model on their GPU, before it is sharded."""
    largest = max(tensor.numel for tensor in scenario().model.tensors)
    for strategy in ("ddp", "fsdp"):
        quantized = scenario(strategy=strategy, method="qlora", loads_on_gpu=True, gpu_memory=80 * GIB)
        assert host._load(quantized) == 8 * 2 * largest


def test_rank_0_copies_the_flat_weights_under_zero2() -> None:
    """On many nodes a rank's part is small, but rank 0 saves the whole model; with offload it still does."""
    assert host.save_bytes(scenario(strategy="zero2", nodes=8), BUCKETS) == 7 * 4 * -(-P // 64) + 2 * P
    assert host.save_bytes(scenario(strategy="zero2-offload"), BUCKETS) == 2 * P
    assert host.save_bytes(scenario(strategy="zero1", ranks_per_node=1), BUCKETS) == 4 * P


def test_safetensors_copies_a_whole_file_under_ddp() -> None:
    assert host.save_bytes(scenario(strategy="ddp"), BUCKETS) == 4 * P
    assert host.save_bytes(scenario(strategy="ddp", weights="bf16"), BUCKETS) == 2 * P
    twice = from_config({**LLAMA_8B, "num_hidden_layers": 64})
    assert host.save_bytes(scenario(twice, strategy="ddp"), BUCKETS) == host.WEIGHTS_FILE
    assert host.save_bytes(scenario(strategy="ddp", method="lora"), BUCKETS) < P // 40


@pytest.mark.parametrize(("strategy", "held"), [("zero3-offload", 2 * P), ("fsdp-offload", 4 * P)])
def test_parameter_offload_keeps_the_reference_model_on_the_host(strategy: Any, held: int) -> None:
    case = scenario(strategy=strategy, reference_weights=True)
    terms = host.host_terms(case, BUCKETS)
    assert terms["reference model"] == pytest.approx(held * case.ranks_per_node / case.world_size, abs=64)
