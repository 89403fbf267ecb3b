"""A resume on other ranks or under another strategy keeps states, data and losses."""

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.checkpoint.ds_to_universal import main as convert

from shardmake.checkpoint import store
from shardmake.checkpoint.record import find_problems
from shardmake.checkpoint.reshard.convert import Route, find_route, reshard
from shardmake.config.models import Strategy
from shardmake.core.errors import ShardmakeError
from shardmake.run.attempt import AttemptDir
from shardmake.run.paths import RunDir
from tests.workflow.forked import Forked, log, losses

pytestmark = pytest.mark.training
STEPS = 4
Setup = tuple[Strategy, int]
"""Strategy and number of ranks."""


GIVEN: dict[str, Any] = {
    "weight_decay": 0.1, "checkpoints": {"every_steps": 1},
    "learning_rates": {"model.embed_tokens": 1e-2, "*.mlp": 1e-5},
}  # fmt: skip


@pytest.fixture
def uninterrupted(forked: Forked) -> dict[int, float]:
    return forked.once("zero2", **GIVEN).losses()


def train_further(
    forked: Forked, rundir: RunDir, setup: Setup, *, to_the_end: bool = False, zero: dict[str, Any] | None = None
) -> Path:
    """Resume the run under ``setup`` for one step, or to the end; return the newest checkpoint."""
    newest = store.recover(rundir.checkpoints)
    source = newest[1] if newest else None
    if newest and find_route(*newest, *setup) is not Route.NATIVE:
        source = rundir.train / f"resharded-{newest[0].step}"
        reshard(newest[1], source, *setup)
    if not to_the_end:
        rundir.train.mkdir(parents=True, exist_ok=True)
        rundir.stop_file.touch()
    sections = {"zero_optimization": zero} if zero else {}
    codes = forked.train(rundir, forked.plan(*setup, **GIVEN), resume_from=source, deepspeed=sections)
    rundir.stop_file.unlink(missing_ok=True)
    assert codes == [0] * setup[1], log(rundir)
    return newest_of(rundir)


@pytest.mark.parametrize(
    "setups",
    [
        (("zero3", 4), ("zero3", 2), ("zero3", 3)), (("zero2", 4), ("zero3", 3), ("zero1", 2)),
        (("fsdp", 4), ("fsdp", 2), ("fsdp", 3)), (("zero3", 2), ("fsdp", 3), ("zero2", 2)),
    ],
    ids=lambda setups: "-".join(f"{strategy}x{ranks}" for strategy, ranks in setups),
)  # fmt: skip
def test_losses_are_the_same_after_resharding(
    forked: Forked, uninterrupted: dict[int, float], tmp_path: Path, setups: tuple[Setup, Setup, Setup]
) -> None:
    rundir = RunDir(tmp_path / "run")
    for setup in setups[:2]:
        train_further(forked, rundir, setup)
    train_further(forked, rundir, setups[2], to_the_end=True)
    assert losses(rundir) == pytest.approx(uninterrupted, abs=2e-4)
    assert len(list(rundir.attempts.iterdir())) == 3
    assert rundir.train_receipt.exists()
    assert {float(step) for step in adam_steps(newest_of(rundir))} == {float(STEPS)}
    assert AttemptDir(rundir.attempts / "003").read().world_size == setups[2][1]


def test_many_zero3_sub_groups_are_resharded(forked: Forked, uninterrupted: dict[int, float], tmp_path: Path) -> None:
    """ZeRO-3 splits large models into sub-groups of ``sub_group_size`` elements."""
    rundir, small = RunDir(tmp_path / "run"), {"sub_group_size": 100_000}
    checkpoint = train_further(forked, rundir, ("zero3", 2), zero=small)
    shards = checkpoint / "global_step1/zero_pp_rank_0_mp_rank_00_optim_states.pt"
    assert len(torch.load(shards, weights_only=False)["optimizer_state_dict"]["fp32_flat_groups"]) > 4
    train_further(forked, rundir, ("zero3", 3), zero=small)
    train_further(forked, rundir, ("zero2", 2), to_the_end=True)
    assert losses(rundir) == pytest.approx(uninterrupted, abs=2e-4)


@pytest.mark.parametrize("setup", [("zero3", 3), ("zero2", 3)])
def test_states_equal_deepspeeds_own_conversion(
    forked: Forked, tmp_path: Path, caplog: pytest.LogCaptureFixture, setup: Setup
) -> None:
    """Weights, both moments and the step of every parameter are equal bit for bit; invalid requests are rejected."""
    caplog.set_level("INFO", "shardmake")
    checkpoint = train_further(forked, RunDir(tmp_path / "run"), setup)
    out = tmp_path / "ours"
    record = reshard(checkpoint, out, "zero1", 2)
    assert (record.strategy, record.world_size) == ("zero1", 2) and find_problems(out) == []
    theirs = tmp_path / "theirs"
    options = dict(num_extract_workers=1, num_merge_workers=1, keep_temp_folder=False, strict=True)
    folders = dict(input_folder=str(checkpoint / "global_step1"), output_folder=str(theirs))
    convert(argparse.Namespace(**folders, inject_missing_state=True, **options))
    tied = "lm_head.weight"  # ZeRO-2 writes it a second time
    files = [path.relative_to(theirs / "zero") for path in theirs.glob("zero/*/*.pt") if path.parent.name != tied]
    assert {path.name for path in files} >= {"fp32.pt", "exp_avg.pt", "exp_avg_sq.pt"}
    for path in files:
        ours, expected = load(out / "global_step1/zero" / path), load(theirs / "zero" / path)
        assert torch.equal(torch.as_tensor(ours).flatten(), torch.as_tensor(expected).flatten()), path

    assert reshard(checkpoint, out, "zero3", 4) == record.model_copy(update={"strategy": "zero3", "world_size": 4})
    assert caplog.messages[-1] == f"Reusing {out}."
    for refused, message in ((setup, "needs no resharding"), (("ddp", 2), "cannot be converted for ddp")):
        with pytest.raises(ShardmakeError, match=message):
            reshard(checkpoint, tmp_path / "no", *refused)
    (checkpoint / "latest").write_text("global_step2")
    with pytest.raises(ShardmakeError, match=r"is not a complete Shardmake checkpoint: .*latest"):
        reshard(checkpoint, tmp_path / "no", "zero1", 2)


def newest_of(rundir: RunDir) -> Path:
    return next(path for _, path in store.committed(rundir.checkpoints))


def adam_steps(checkpoint: Path) -> list[float]:
    """Return Adam's step counts of every group on every rank under ZeRO."""
    files = list(checkpoint.rglob("*optim_states.pt"))
    inner = [torch.load(file, weights_only=False)["optimizer_state_dict"] for file in files]
    bases = [state.get("base_optimizer_state", state.get("optimizer_state_dict")) for state in inner]
    return [group["step"] for base in bases for group in base["state"].values()] or [float(STEPS)]


def load(path: Path) -> Any:
    held = torch.load(path, weights_only=False)
    return held["param"] if isinstance(held, dict) else held
