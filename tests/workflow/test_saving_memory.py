"""A save that copies storages to the host, as from GPUs, needs the host RAM that the plan counts for it."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from shardmake.config.models import Strategy
from shardmake.core.units import MIB
from shardmake.memory.buckets import Buckets
from shardmake.memory.host import save_bytes
from shardmake.memory.model import split
from shardmake.memory.read_config import read_model
from shardmake.memory.scenario import Scenario
from shardmake.run.paths import RunDir
from tests.fork_server import ForkServer
from tests.workflow.forked import Forked, log

pytestmark = pytest.mark.training
SUB_GROUP = 500_000
"""Elements, of which the rank's part of the embedding has eight times as many."""


@pytest.fixture(scope="module")
def measured(forked: Forked) -> Iterator[Forked]:
    """Trainings whose saves copy as from a GPU, and whose freed blocks return to the system at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")
        server = ForkServer("tests.saves_as_from_gpu")
    yield Forked(forked.checkout, server)
    server.close()


@pytest.fixture(scope="module")
def large_model(forked: Forked, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's model with 21 million weights."""
    folder = tmp_path_factory.mktemp("model") / "large"
    shutil.copytree(forked.checkout.root / "resources/demo/base", folder)
    config = LlamaConfig.from_pretrained(folder)
    config.update({"hidden_size": 2048, "intermediate_size": 512, "num_hidden_layers": 1, "num_attention_heads": 16})
    config.update({"num_key_value_heads": 2, "head_dim": 128})
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("strategy", "ranks"), [("zero1", 2), ("zero2", 2), ("zero3", 2), ("zero3", 1)])
def test_a_save_needs_the_planned_host_ram(
    measured: Forked, large_model: Path, tmp_path: Path, strategy: Strategy, ranks: int
) -> None:
    """Less than the plan counts, beside 3 MiB of each rank for all that is not a storage, and more than 80 % of it."""
    rundir = RunDir(tmp_path / "run")
    planned = measured.plan(strategy, ranks, model=str(large_model), max_steps=1, checkpoints={"every_steps": 1})
    zero = {"zero_optimization": {"sub_group_size": SUB_GROUP} if strategy == "zero3" else {}}
    codes = measured.train(rundir, planned, deepspeed=zero, variables={"SAVE_MEMORY": str(tmp_path)})
    assert codes == [0] * ranks, log(rundir)
    model = read_model(str(large_model))
    with_gpus = Scenario(
        model=model, split=split(model, "full"), strategy=strategy, nodes=1, ranks_per_node=ranks,
        micro_batch=1, sequence_length=64, precision="fp32",
    )  # fmt: skip
    term = save_bytes(with_gpus, Buckets(sub_group_size=SUB_GROUP))
    peaks = [int((tmp_path / str(rank)).read_text()) for rank in range(ranks)]
    assert 0.8 * term < sum(peaks) < term + ranks * 3 * MIB, (peaks, term)
