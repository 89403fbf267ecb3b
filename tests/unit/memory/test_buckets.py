"""DeepSpeed's buffer sizes as the rendered file gives them."""

from dataclasses import replace
from typing import Any

import pytest

from shardmake.config.models import Strategy
from shardmake.memory.buckets import read_buckets, reduce_bucket_size, zero_optimization
from tests.unit.memory.llama_8b import MODEL
from tests.unit.plans import make_cluster, make_model, make_plan

Values = dict[str, Any]


def test_buckets_are_read_from_the_rendered_section() -> None:
    section = {
        "stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": 7, "sub_group_size": 1e9,
        "offload_optimizer": {"device": "cpu", "pin_memory": False},
    }  # fmt: skip
    buckets = read_buckets(section, 4096)
    assert (buckets.reduce_bucket_size, buckets.stage3_prefetch_bucket_size) == (4096**2, 7)
    assert (buckets.sub_group_size, buckets.overlap_comm, buckets.pin_memory) == (10**9, True, False)


H100 = {"accelerator": "h100", "memory_gib_per_node": 512.0}


@pytest.mark.parametrize(("cluster", "choice", "elements"), [
    (H100, {"nodes": 2}, 50_000_000),
    (H100, {"nodes": 2, "precision": "fp32"}, 41_471_180),  # a 256th of 79.1 GiB for two buckets
    (H100, {"nodes": 1}, 4096**2),  # NVLink has little latency
    ({**H100, "gpu_memory_gib": 12.0}, {"nodes": 2}, 4096**2),
    ({**H100, "gpu_memory_gib": 24.0}, {"nodes": 2}, 25_165_824), ({}, {"nodes": 2}, 4096**2),
], ids=["nodes", "fp32", "one-node", "small-gpu", "medium-gpu", "cpu"])  # fmt: skip
def test_buckets_between_nodes_are_large_if_the_gpu_has_room(cluster: Values, choice: Values, elements: int) -> None:
    found = reduce_bucket_size(make_plan("zero2", **choice).choice, MODEL, make_cluster(**cluster))
    assert found == pytest.approx(elements, rel=1e-3)


def test_a_bucket_holds_no_more_than_the_model() -> None:
    model = make_model()
    assert reduce_bucket_size(make_plan("zero2", nodes=2).choice, model, make_cluster(**H100)) == model.parameters


@pytest.mark.parametrize(("strategy", "section"), [("zero3", {"classes": ["OwnMoeBlock"]}), ("zero2", None)])
def test_zero3_gathers_blocks_with_experts_as_a_whole(strategy: Strategy, section: Values | None) -> None:
    model = replace(make_model(), leaf_classes=("OwnMoeBlock",))
    values = zero_optimization(make_plan(strategy).choice, model, make_cluster(), "")
    assert values.get("leaf_module") == section
