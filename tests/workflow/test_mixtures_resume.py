"""Every family of mixtures resumes bit for bit after a kill in a save, under the strategies that shard its experts."""

import json
import shutil
import signal
from pathlib import Path

import pytest

from shardmake.checkpoint import store
from shardmake.checkpoint.record import CheckpointRecord, read_record
from shardmake.config.models import Strategy
from shardmake.run.paths import RunDir
from tests.mixtures import save_mixture
from tests.plan_in_process import plan_in_this_process
from tests.workflow.forked import Forked, log
from tests.workflow.test_saving import losses

pytestmark = pytest.mark.training
PAIRS: tuple[tuple[str, Strategy, str], ...] = (
    ("qwen2_moe", "zero1", "trainer"),
    ("qwen3_moe", "zero2", "loop"),
    ("olmoe", "zero2-offload", "trainer"),
    ("gpt_oss", "zero3", "trainer"),
    ("deepseek_v3", "zero3-offload", "loop"),
    ("mixtral", "fsdp", "trainer"),
)
"""Each family and each strategy once; test_mixtures.py has DDP."""


@pytest.mark.parametrize(("family", "strategy", "engine"), PAIRS)
def test_resumes_bit_for_bit_after_a_kill_in_a_save(
    forked: Forked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, strategy: Strategy, engine: str
) -> None:
    """Rank 0 is killed when all shards of step 4 are written; they are what the resumed training has to write."""
    plan_in_this_process(monkeypatch)
    base = save_mixture(family, forked.checkout.root / "resources/demo/base", tmp_path / "base")
    rundir = RunDir(tmp_path / "run")
    copy_unpacked(forked.checkout.run / "data", rundir.data)
    planned = forked.plan(
        strategy, 2, model=str(base), engine=engine, packing=False, learning_rate=2e-3, checkpoints={"every_steps": 2}
    )
    kill = {"rank": 0, "folder": str(rundir.checkpoints), "log": str(rundir.root / "writes.log"), "mode": "before",
            "at": r"os\.rename /\.saving/checkpoint-4$"}  # fmt: skip
    codes = forked.train(rundir, planned, kill)
    assert codes[0] == -signal.SIGKILL, log(rundir)
    reference = states(read_record(store.staged_path(rundir.checkpoints, 4)))
    uninterrupted = losses(rundir)

    codes, resumed = forked.resume(rundir, planned)
    assert codes == [0, 0] and resumed is not None and resumed.step == 2, log(rundir)
    assert losses(rundir) == uninterrupted and len(uninterrupted) == 4
    assert states(read_record(rundir.checkpoints / "checkpoint-4")) == reference


def copy_unpacked(source: Path, target: Path) -> None:
    """Copy tokenized data, each row as one example: gpt-oss has no attention kernel for packed ones on CPUs."""
    shutil.copytree(source, target)
    receipt = json.loads((target / "receipt.json").read_text())
    receipt["settings"]["packing"] = False
    (target / "receipt.json").write_text(json.dumps(receipt))


def states(record: CheckpointRecord | None) -> dict[str, str]:
    """Return the checksums of weights, optimizer states, random generators and schedulers by file."""
    assert record is not None
    found = {name: entry.crc32 for name, entry in record.files.items() if name.endswith((".pt", ".pth", ".distcp"))}
    assert len(found) > 2
    return found
