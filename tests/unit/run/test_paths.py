"""Every path of a run lies in its folder, each in a place of its own."""

from pathlib import Path

from shardmake.run.paths import BelowRoot, RunDir

PATHS = {
    "sources": "sources.json",
    "fetched": "fetched",
    "base_model": "fetched/model",
    "adapter": "fetched/adapter",
    "weights_receipt": "fetched/weights.json",
    "plan_folder": "plan",
    "memory": "plan/memory.json",
    "memory_table": "plan/memory.html",
    "plan": "plan/plan.json",
    "accelerate": "plan/accelerate.yaml",
    "deepspeed": "plan/deepspeed.json",
    "training": "plan/training.json",
    "rendered": "plan/rendered.json",
    "fallbacks": "plan/fallbacks",
    "data": "data",
    "raw_data": "data/raw",
    "data_receipt": "data/receipt.json",
    "train": "train",
    "job": "train/job.json",
    "attempts": "train/attempts",
    "attempt_history": "train/attempts/index.json",
    "checkpoints": "train/checkpoints",
    "script_output": "train/output",
    "metrics": "train/metrics.jsonl",
    "profile": "train/profile",
    "resharded": "train/resharded",
    "stop_file": "train/STOP",
    "train_receipt": "train/receipt.json",
    "model": "model",
    "model_receipt": "model/receipt.json",
    "evaluation": "evaluation.json",
    "evaluation_losses": "evaluation.csv",
    "push_receipt": "push/receipt.json",
    "settings": "settings",
    "stage_lock": "settings/.lock",
    "figures": "figures",
    "report": "report.html",
    "driver_lock": "train/driver.lock",
    "staged_checkpoints": "train/checkpoints/.saving",
}


def test_the_layout_is_the_documented_one() -> None:
    """Rules, people and other tools rely on these names."""
    rundir = RunDir(Path("runs/docs-chat"))
    names = [name for name, value in vars(RunDir).items() if isinstance(value, BelowRoot)]
    found = {name: getattr(rundir, name) for name in names}
    assert found == {name: Path("runs/docs-chat") / path for name, path in PATHS.items()}
    assert rundir.name == "docs-chat"
    assert [rundir.rendered_files(fallback) for fallback in (0, 2)] == [rundir.plan_folder, rundir.fallbacks / "2"]
    assert rundir.stage_settings("plan") == Path("runs/docs-chat/settings/plan.json")
    assert rundir.figure("loss") == Path("runs/docs-chat/figures/loss.svg")


def test_rules_take_their_files_from_the_pattern() -> None:
    """Snakemake fills in the wildcard."""
    assert str(RunDir.pattern().plan).format(run="docs-chat") == "runs/docs-chat/plan/plan.json"
