"""Every family of mixtures trains as under DDP and resumes bit for bit after a kill in a save."""

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from shardmake.checkpoint import store
from shardmake.checkpoint.record import read_record
from shardmake.config.models import Strategy
from shardmake.core.atomic import sealed, unsealed
from shardmake.run.paths import RunDir
from tests.mixtures import save_mixture
from tests.plan_in_process import plan_in_this_process
from tests.workflow.forked import Forked, log, losses, states

pytestmark = pytest.mark.training
LORA: dict[str, Any] = {"method": "lora", "lora": {"rank": 4}}
EXPERTS_ALONE = {**LORA, "lora": {"rank": 4, "targets": ["experts.gate_up_proj", "experts.down_proj"]}}
QUICK: tuple[tuple[str, Strategy, dict[str, Any]], ...] = (
    ("qwen2_moe", "zero1", {}),
    ("qwen3_moe", "zero2", {}),
    ("olmoe", "zero2-offload", {}),
    ("gpt_oss", "zero3", {}),
    ("mixtral", "zero3-offload", {}),
    ("deepseek_v3", "fsdp", {}),
    ("qwen3_moe", "zero3", LORA),
    ("gpt_oss", "fsdp", EXPERTS_ALONE),
    ("qwen3_moe", "fsdp", {"expert_parallel": 2}),
)
"""Each family and strategy once, adapters of the experts, and experts spread over ranks; test_mixtures.py has DDP."""
FAMILIES = list(dict.fromkeys(family for family, *_ in QUICK))
STRATEGIES: tuple[Strategy, ...] = ("zero1", "zero2", "zero2-offload", "zero3", "zero3-offload", "fsdp")


@pytest.mark.parametrize(("family", "strategy", "changes"), QUICK)
def test_resumes_bit_for_bit_after_a_kill_in_a_save(
    forked: Forked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, strategy: Strategy,
    changes: dict[str, Any],
) -> None:  # fmt: skip
    plan_in_this_process(monkeypatch)
    check_resume(forked, tmp_path, save_base(forked, tmp_path, family), strategy, **changes)


@pytest.fixture(scope="module", params=FAMILIES)
def family_and_losses(
    forked: Forked, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, dict[int, float]]:
    """A family and its losses under DDP."""
    with pytest.MonkeyPatch.context() as patch:
        plan_in_this_process(patch)
        folder = tmp_path_factory.mktemp("ddp")
        return request.param, check_resume(forked, folder, save_base(forked, folder, request.param), "ddp")


@pytest.mark.families
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_has_the_losses_of_ddp_and_resumes(
    forked: Forked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family_and_losses: tuple[str, dict[int, float]],
    strategy: Strategy,
) -> None:  # fmt: skip
    plan_in_this_process(monkeypatch)
    family, reference = family_and_losses
    found = check_resume(forked, tmp_path, save_base(forked, tmp_path, family), strategy)
    assert found == pytest.approx(reference, abs=2e-4)


def save_base(forked: Forked, folder: Path, family: str) -> Path:
    return save_mixture(family, forked.checkout.root / "resources/demo/base", folder / "base")


def check_resume(forked: Forked, folder: Path, base: Path, strategy: Strategy, **changes: Any) -> dict[int, float]:
    """Kill rank 0 when all shards of step 4 are written, which the resumed training has to write; return the losses."""
    rundir = RunDir(folder / "run")
    copy_unpacked(forked.checkout.run / "data", rundir.data)
    planned = forked.plan(
        strategy, 2, model=str(base), packing=False, learning_rate=2e-3, checkpoints={"every_steps": 2}, **changes
    )
    kill = {"rank": 0, "folder": str(rundir.checkpoints), "log": str(rundir.root / "writes.log"), "mode": "before",
            "at": r"os\.rename /\.saving/001/checkpoint-4$"}  # fmt: skip
    codes = forked.train(rundir, planned, kill)
    assert codes[0] == -signal.SIGKILL, log(rundir)
    reference = states(read_record(store.staging_folder(rundir.checkpoints, 1) / "checkpoint-4"))
    assert len(reference) > 2
    uninterrupted = losses(rundir)

    codes, resumed = forked.resume(rundir, planned)
    assert codes == [0, 0] and resumed is not None and resumed.step == 2, log(rundir)
    assert losses(rundir) == uninterrupted and len(uninterrupted) == 4
    assert states(read_record(rundir.checkpoints / "checkpoint-4")) == reference
    return uninterrupted


def copy_unpacked(source: Path, target: Path) -> None:
    """Copy tokenized data, each row as one example: gpt-oss has no attention kernel for packed ones on CPUs."""
    shutil.copytree(source, target)
    receipt = unsealed(json.loads((target / "receipt.json").read_text()))
    receipt["settings"]["packing"] = False
    (target / "receipt.json").write_text(json.dumps(sealed(receipt)))
