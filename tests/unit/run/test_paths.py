"""Every path of a run lies in its folder, each in a place of its own."""

import re
from pathlib import Path

from shardmake.run.paths import BelowRoot, RunDir

PAGE = Path(__file__).parents[3] / "docs/reference/run-folder.md"
INTERNAL = {"train/job.json", "train/STOP", "train/driver.lock", "train/checkpoints/.saving", "settings/.lock"}
"""Paths by which processes of other versions, and people, find each other; the page leaves them out."""


def test_the_layout_is_the_documented_one() -> None:
    """Rules, people and other tools rely on these names."""
    column = "".join(row.split("|")[1] for row in PAGE.read_text().splitlines() if row.startswith("| `"))
    documented = {path.rstrip("/") for path in re.findall(r"`([^`]+)`", column)}
    patterns = {"train/attempts/NNN", "train/reference-DIGEST.safetensors", "settings/STAGE.json"}
    paths = {value.path for value in vars(RunDir).values() if isinstance(value, BelowRoot)}
    assert documented - patterns | INTERNAL <= paths
    rundir = RunDir(Path("runs/docs-chat"))
    assert rundir.name == "docs-chat" and rundir.metrics == Path("runs/docs-chat/train/metrics.jsonl")
    assert rundir.plan == Path("runs/docs-chat/plan/plan.json")
    assert [rundir.rendered_files(fallback) for fallback in (0, 2)] == [rundir.plan_folder, rundir.fallbacks / "2"]
    assert rundir.stage_settings("plan") == Path("runs/docs-chat/settings/plan.json")
    assert rundir.figure("loss") == Path("runs/docs-chat/figures/loss.svg")
    assert str(RunDir.pattern().plan).format(run="docs-chat") == str(rundir.plan), "Snakemake fills in the wildcard"
