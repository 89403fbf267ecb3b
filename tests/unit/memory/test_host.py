"""Host RAM and NVMe: what offload keeps there."""

from dataclasses import replace
from typing import Any

import pytest

from shardmake.memory import host
from tests.unit.memory.llama_8b import BUCKETS, P, scenario

SMALL_GROUPS = replace(BUCKETS, sub_group_size=10**8)


def test_pinned_buffers_are_powers_of_two() -> None:
    assert [host.pinned(n) for n in (0, 1, 2, 3, 1 << 20, (1 << 20) + 1)] == [0, 1, 2, 4, 1 << 20, 1 << 21]


def test_offloaded_states_are_18_and_20_bytes_a_weight() -> None:
    plain = replace(BUCKETS, pin_memory=False, pin_parameters=False)
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


def test_parameters_on_nvme_have_buffers_and_a_part_in_ram() -> None:
    """DeepSpeed pins ``buffer_count`` buffers, and keeps the first ``max_in_cpu`` elements of a rank's part in RAM."""
    sizes = replace(BUCKETS, pin_parameters=False, param_buffer_count=3, param_buffer_size=1000, max_in_cpu=500)
    terms = host.host_terms(scenario(strategy="zero3-nvme", nodes=2, ranks_per_node=1), sizes)
    assert (terms["parameters"], terms["parameter swap buffers"]) == (2 * 500, 2 * 3 * 1000)
    whole = host.host_terms(scenario(strategy="zero3-nvme", nodes=2, ranks_per_node=1), replace(sizes, max_in_cpu=P))
    assert whole["parameters"] == 2 * -(-P // 2)


def test_a_script_under_zero3_may_gather_the_whole_model_to_save_it() -> None:
    for strategy, size in (("zero3", 2 * P), ("zero3-offload", 2 * P), ("zero2", 0), ("ddp", 0)):
        terms = host.host_terms(scenario(strategy=strategy, gathers_on_save=True), SMALL_GROUPS)
        assert terms.get("gathered weights", 0) == pytest.approx(size, rel=1e-3), strategy
        assert ("loading" in terms) == (size == 0), strategy


def test_a_save_copies_the_largest_storage_of_each_rank() -> None:
    """Eight ranks under ZeRO-3 hold an eighth of an 8B model each; a sub-group has at most 1e9 elements."""
    terms = host.host_terms(scenario(strategy="zero3"), BUCKETS)
    assert terms["saving"] == 8 * 4 * 10**9
    small = host.host_terms(scenario(strategy="zero3"), SMALL_GROUPS)
    assert "saving" not in small and small["loading"] == 2 * P
    assert host.host_terms(scenario(strategy="zero2"), BUCKETS)["loading"] == 8 * 2 * P


@pytest.mark.parametrize("changes", [{"strategy": "fsdp"}, {"strategy": "zero3-offload"}, {"on_cpu": True}])
def test_states_that_are_on_the_host_or_split_need_no_copy(changes: dict[str, Any]) -> None:
    assert "saving" not in host.host_terms(scenario(**changes), BUCKETS)
