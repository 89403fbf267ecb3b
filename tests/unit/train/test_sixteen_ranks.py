"""Meshes, shards and buckets at two nodes of eight ranks, over torch's fake process group, which does not communicate.

Collectives return at once and leave their results unwritten, so that sizes and order are real and numbers are not. What
cannot run here: NCCL, collectives that overlap with the computation on streams of a GPU, and so the order of ZeRO-3's
prefetches that depends on when the last ones ended.
"""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import ParallelismConfig
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, LlamaConfig

from shardmake.config.models import Strategy
from shardmake.core.environment import leave_collectives_to_gloo
from shardmake.memory import probe, states
from shardmake.memory.buckets import Buckets, read_buckets
from shardmake.memory.model import split
from shardmake.memory.scenario import Scenario
from shardmake.render.accelerate_file import accelerate_config
from shardmake.render.deepspeed_file import deepspeed_config
from shardmake.train.library_patches import share_rows
from tests.unit.plans import LLAMA, make_cluster, make_model, make_plan, make_run

RANK, NODES, PER_NODE = 11, 2, 8


@pytest.fixture(autouse=True)
def world(request: pytest.FixtureRequest) -> Iterator[None]:
    """Be rank 3 of the second node, or the rank of the parameter."""
    rank = getattr(request, "param", RANK)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=NODES * PER_NODE)
    yield
    dist.destroy_process_group()


def mesh_of(strategy: Strategy, **choice: int) -> Any:
    """Return the mesh that Accelerate builds from the rendered file, and the dimensions that FSDP2 gets of it."""
    plan = make_plan(strategy, nodes=NODES, processes_per_node=PER_NODE, **choice)
    file = accelerate_config(plan, make_run(), make_model())
    sizes = {key.removeprefix("parallelism_config_"): size for key, size in file["parallelism_config"].items()}
    config = ParallelismConfig(**sizes)
    mesh = config.build_device_mesh("cpu")
    assert mesh is not None
    return mesh, mesh[tuple(config.fsdp_dim_names)]


def shard(mesh: Any) -> tuple[int, int]:
    """Return the bytes of this rank's weights under FSDP2, wrapped layer by layer, and those of the whole model."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**LLAMA))
    for block in model.model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    parts = [p.to_local() for p in model.parameters() if isinstance(p, DTensor)]
    return sum(part.nbytes for part in parts), sum(p.nbytes for p in model.parameters())


def scenario_of(strategy: Strategy) -> Scenario:
    model = make_model()
    return Scenario(
        model=model, split=split(model, "full", 16, "all-linear"), strategy=strategy, nodes=NODES,
        ranks_per_node=PER_NODE, micro_batch=1, sequence_length=32,
    )  # fmt: skip


def estimated_weights(strategy: Strategy) -> int:
    return states.resident(scenario_of(strategy), Buckets())["weights"]


def test_hybrid_sharding_shards_within_a_node_and_replicates_between_nodes() -> None:
    mesh, fsdp = mesh_of("fsdp-hybrid")
    assert (mesh["dp_replicate"].get_local_rank(), mesh["dp_shard_cp"].get_local_rank()) == (1, RANK - PER_NODE)
    assert fsdp.shape == (NODES, PER_NODE)
    assert dist.get_process_group_ranks(fsdp["dp_shard_cp"].get_group()) == list(range(8, 16))
    assert dist.get_process_group_ranks(fsdp["dp_replicate"].get_group()) == [RANK - PER_NODE, RANK]
    assert shard(fsdp)[0] == estimated_weights("fsdp-hybrid")


def test_full_sharding_shards_over_all_ranks() -> None:
    mesh = dist.device_mesh.init_device_mesh("cpu", (NODES * PER_NODE,))
    local, whole = shard(mesh)
    assert local == estimated_weights("fsdp") and local * NODES * PER_NODE == whole


def test_a_tensor_parallel_group_is_within_a_node() -> None:
    mesh, fsdp = mesh_of("fsdp", tensor_parallel=4)
    assert dist.get_process_group_ranks(mesh["tp"].get_group()) == [8, 9, 10, 11]
    assert fsdp.shape == (4,) and dist.get_process_group_ranks(fsdp.get_group()) == [3, 7, 11, 15]


def test_the_ranks_of_a_tensor_parallel_group_get_the_same_batches() -> None:
    state = SimpleNamespace()
    accelerator: Any = SimpleNamespace(num_processes=NODES * PER_NODE, device=torch.device("cpu"), state=state)
    share_rows(accelerator, 4)
    mesh = state.ds_device_mesh
    assert (mesh["dp_shard"].get_local_rank(), mesh["tp"].get_local_rank()) == (2, 3)
    assert dist.get_process_group_ranks(mesh["tp"].get_group()) == [8, 9, 10, 11]


class Collectives(TorchDispatchMode):
    """The elements of every collective, by its name in torch: of the gathered or unreduced tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[str, list[int]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(function)
        if name.startswith("c10d."):
            flat = [part for value in args for part in (value if isinstance(value, list) else [value])]
            tensors = [value.numel() for value in flat if isinstance(value, torch.Tensor)]
            self.sizes.setdefault(name.split(".")[1], []).append(max(tensors, default=0))
        return function(*args, **(kwargs or {}))


SMALL = {"reduce_bucket_size": 10_000, "stage3_prefetch_bucket_size": 9_000, "stage3_param_persistence_threshold": 100}
GATHER, REDUCE_SCATTER = "_allgather_base_", "_reduce_scatter_base_"


@pytest.fixture
def deepspeed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """DeepSpeed over the fake process group, whose groups it forgets after the test."""
    import deepspeed
    from deepspeed.utils import groups

    monkeypatch.setenv("LOCAL_RANK", str(dist.get_rank() % PER_NODE))
    monkeypatch.setattr(deepspeed.comm.comm, "cdb", None)
    monkeypatch.setattr(torch.nn.functional, "linear", torch.nn.functional.linear)  # ZeRO-3 replaces it for good
    leave_collectives_to_gloo()
    for name in ("_WORLD_GROUP", "_DATA_PARALLEL_GROUP", "_MODEL_PARALLEL_GROUP", "_ZERO_PARAM_INTRA_PARALLEL_GROUP"):
        monkeypatch.setattr(groups, name, getattr(groups, name))
    return deepspeed


def make_engine(deepspeed: Any, strategy: Strategy, folder: Path) -> tuple[Any, Buckets]:
    """Return an engine from the rendered file, but with small buckets, and their sizes."""
    sizes = {"nodes": NODES, "processes_per_node": PER_NODE}
    plan = make_plan(strategy, precision="fp32", gradient_accumulation_steps=1, **sizes)
    file = deepspeed_config(plan, make_run(), make_cluster(), make_model(), folder)
    zero = file["zero_optimization"]
    zero |= {name: size for name, size in SMALL.items() if name in zero}
    given = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1, "gradient_clipping": 1.0}
    model = AutoModelForCausalLM.from_config(LlamaConfig(**LLAMA))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=file | given)
    return engine, read_buckets(zero, LLAMA["hidden_size"])


def train(engine: Any) -> tuple[Collectives, Collectives, Collectives]:
    """Run a step; return the collectives of the forward pass, the backward pass and the optimizer."""
    ids = torch.arange(64).reshape(2, 32)
    with Collectives() as forward:
        loss = engine(input_ids=ids, labels=ids, use_cache=False).loss
    with Collectives() as backward:
        engine.backward(loss)
    with Collectives() as step:
        engine.step()
    return forward, backward, step


@pytest.mark.parametrize("strategy", ["zero1", "zero2"])
def test_zero_reduces_in_buckets_and_gathers_once(deepspeed: Any, tmp_path: Path, strategy: Strategy) -> None:
    """Each gradient is reduced once; one larger than the bucket is reduced apart, in parts of the ranks that own it."""
    engine, buckets = make_engine(deepspeed, strategy, tmp_path)
    scenario = scenario_of(strategy)
    forward, backward, step = train(engine)
    reduced = backward.sizes["allreduce_"]
    assert forward.sizes == {} and set(backward.sizes) == {"allreduce_"}
    assert sum(reduced) == make_model().parameters and len(reduced) > 10
    assert max(reduced) <= max(buckets.reduce_bucket_size, states.largest_trained(scenario))
    assert step.sizes[GATHER] == [make_model().parameters]
    (part,) = engine.optimizer.single_partition_of_fp32_groups
    assert [part.numel()] == states.step_groups(scenario, buckets)


@pytest.mark.parametrize("world", [0], indirect=True)
def test_zero3_gathers_and_reduces_in_buckets(deepspeed: Any, tmp_path: Path) -> None:
    """As rank 0: the others compare their order of layers with that of rank 0, which the fake group does not send.

    In the second step the weights of later layers are gathered ahead. The last tensor may exceed the bucket.
    """
    engine, buckets = make_engine(deepspeed, "zero3", tmp_path)
    tensors = [tensor.numel for tensor in make_model().tensors]
    persistent = [numel for numel in tensors if numel <= buckets.stage3_param_persistence_threshold]
    first, second = train(engine), train(engine)
    for _, backward, step in (first, second):
        reduced = backward.sizes[REDUCE_SCATTER]
        assert sum(reduced) == sum(tensors)
        assert max(reduced) <= max(buckets.reduce_bucket_size, *tensors) and len(reduced) < len(tensors)
        assert step.sizes[GATHER] == persistent
    assert sorted(first[0].sizes[GATHER]) == sorted(tensors)
    ahead = second[0].sizes[GATHER]
    assert sum(ahead) == sum(tensors) - sum(persistent)
    assert len(ahead) < len(tensors) - len(persistent)
    assert max(ahead) < buckets.stage3_prefetch_bucket_size + max(tensors)
    (part,) = engine.optimizer.fp32_partitioned_groups_flat
    assert [part.numel()] == states.step_groups(scenario_of("zero3"), buckets)


def test_fsdp2_gathers_and_reduces_unit_by_unit() -> None:
    """The embedding, each layer, and norm with head; the last one stays gathered for the backward pass."""
    model = probe.sharded(LLAMA | {"tie_word_embeddings": False}, "cpu")
    ids = torch.arange(32).reshape(1, 32)
    with Collectives() as forward:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    with Collectives() as backward:
        loss.backward()
    units = states.units(scenario_of("fsdp"))
    order = [states.EMBEDDING, 0, 1, states.HEAD]
    assert set(units) == set(order)
    assert forward.sizes == {GATHER: [units[unit] for unit in order]}
    assert backward.sizes[REDUCE_SCATTER] == [units[unit] for unit in reversed(order)]
    assert sorted(backward.sizes[GATHER]) == sorted(units[unit] for unit in order[:-1])
