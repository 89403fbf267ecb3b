"""CPU seconds and memory of `snakemake -n` for many runs, beside a bare workflow of the same jobs.

    python -m benchmarks.workflow_speed [RESULTS.json] [--runs N ...]

The bare workflow has the same rules, inputs and outputs, and one text parameter a rule. Both are asked when nothing
is made yet and, for the first number of runs, when every run is finished: Snakemake touches four jobs a second. The two
take turns in one call, with cached byte code.
"""

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

from benchmarks.machine import machine
from shardmake.config.load import load_cluster, load_config
from shardmake.core.atomic import write_json
from shardmake.run.paths import RunDir
from shardmake.run.record import FORMAT
from shardmake.run.settings import current

REPOSITORY = Path(__file__).resolve().parents[1]
SNAKEMAKE = str(Path(sys.executable).parent / "snakemake")
RECEIPT = {
    "format": FORMAT,
    "resources": {stage: {"cpus": 1, "memory_gib": 1} for stage in ("data", "consolidate", "evaluate")},
    "verification": {"files": {"model.safetensors": {"size": 7}}},
}
"""Content of every file of a finished run; the workflow reads the resources, and looks for the files of the model."""
RENDERED = tuple(
    f"plan/{name}" for name in ("accelerate.yaml", "deepspeed.json", "training.json", "fallbacks/", "rendered.json")
)
LOCAL = ("base/config.json", "train.jsonl", "eval.jsonl")
RULES = {
    "fetch": (LOCAL, ("sources.json",)),
    "plan": (("sources.json",), ("plan/plan.json", "plan/memory.html")),
    "fetch_weights": (("sources.json", "plan/plan.json"), ("fetched/weights.json",)),
    "render": (("plan/plan.json",), RENDERED),
    "data": ((*LOCAL, "sources.json", "plan/plan.json"), ("data/receipt.json",)),
    "train": ((*RENDERED, "data/receipt.json", "fetched/weights.json"), ("train/receipt.json",)),
    "consolidate": (("train/receipt.json", "plan/plan.json"), ("model/receipt.json",)),
    "evaluate": (("model/receipt.json", "data/receipt.json", "plan/plan.json"), ("evaluation.json",)),
    "push": (("model/receipt.json", "evaluation.json"), ("push/receipt.json",)),
    "report": (("push/receipt.json", "evaluation.json", "train/receipt.json"), ("report.html", "figures/")),
}
"""Inputs and outputs of each rule for one run, as in workflow/rules; a folder ends with a slash."""


def bare_snakefile(count: int) -> str:
    """Return a workflow of `RULES` for ``count`` runs."""
    receipts = sorted({output for _, outputs in RULES.values() for output in outputs if output[-1] != "/"})
    wanted = [f"runs/{{run}}/{name}" for name in receipts]
    rules = [f"rule all:\n    input: expand({wanted}, run=[f'r{{i}}' for i in range({count})])\n"]
    for name, (inputs, outputs) in RULES.items():
        read = [path if path in LOCAL else f"runs/{{run}}/{path}".removesuffix("/") for path in inputs]
        made = [
            f"directory('runs/{{run}}/{path[:-1]}')" if path[-1] == "/" else f"'runs/{{run}}/{path}'"
            for path in outputs
        ]
        rules.append(
            f"rule {name}:\n    input: {read}\n    output: {', '.join(made)}\n"
            f"    log: 'logs/{{run}}/{name}.log'\n    params: settings='a text'\n    shell: 'true'\n"
        )
    return "\n".join(rules)


def run_of(index: int) -> dict[str, Any]:
    """Return the configuration of one run of a sweep over learning rates."""
    return {
        "model": "base", "data": {"train": "train.jsonl", "eval": "eval.jsonl"}, "sequence_length": 64,
        "global_batch_size": 8, "max_steps": 60, "learning_rate": 1e-4 + 1e-6 * index, "push": {"to": "file:out/{run}"},
    }  # fmt: skip


def make_folders(root: Path, count: int) -> dict[str, Path]:
    """Write both workflows with ``count`` runs below ``root``."""
    folders = {"bare": root / "bare", "shardmake": root / "shardmake"}
    for folder in folders.values():
        folder.mkdir()
        (folder / "train.jsonl").write_text('{"text": "one"}\n')
        (folder / "eval.jsonl").write_text('{"text": "two"}\n')
        (folder / "base").mkdir()
        (folder / "base/config.json").write_text('{"model_type": "llama"}')
    (folders["bare"] / "Snakefile").write_text(bare_snakefile(count))
    ours = folders["shardmake"]
    for name in ("Snakefile", "workflow", "profiles"):
        (ours / name).symlink_to(REPOSITORY / name)
    (ours / "config").mkdir()
    (ours / "cluster.yaml").write_text(
        "executor: local\nprocesses_per_node: 2\ncpus_per_node: 2\nmemory_gib_per_node: 6\n"
    )
    config = {"cluster": "cluster.yaml", "runs": {f"r{index}": run_of(index) for index in range(count)}}
    (ours / "config/config.yaml").write_text(yaml.safe_dump(config))
    return folders


def finish(folders: dict[str, Path]) -> None:
    """Write what finished runs leave as far as Snakemake reads it, and let it record the parameters."""
    ours = folders["shardmake"]
    with contextlib.chdir(ours):
        config = load_config(Path("config/config.yaml"))
        runs, cluster = config.runs, load_cluster(Path(config.cluster))
        for name, run in runs.items():
            rundir = RunDir(Path("runs", name))
            for output in (path for _, outputs in RULES.values() for path in outputs):
                write(rundir.root / (f"{output}loss.svg" if output[-1] == "/" else output), json.dumps(RECEIPT))
            write(rundir.model / "model.safetensors", "weights")
            for stage in ("data", "train"):
                write(rundir.stage_settings(stage), current(stage, run, cluster).model_dump_json())
    shutil.copytree(ours / "runs", folders["bare"] / "runs")
    for folder in folders.values():
        snakemake(folder, "--touch", "--forceall", "--quiet")


def write(path: Path, text: str) -> None:
    """Write ``text`` without waiting for the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def snakemake(folder: Path, *options: str) -> tuple[float, float, str]:
    """Run Snakemake in ``folder`` and return its CPU seconds, its peak memory in MiB and its output."""
    profile = ["--profile", "profiles/local"] if (folder / "profiles").exists() else ["--cores", "1"]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY / "src")}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    process = subprocess.Popen(
        [SNAKEMAKE, *profile, *options], cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True,
    )  # fmt: skip
    output = process.stdout.read() if process.stdout else ""
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"{folder}: snakemake ended with {process.returncode}:\n{output[-3000:]}")
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024, output


def compare(folders: dict[str, Path], rounds: int) -> dict[str, Any]:
    """Return the least CPU seconds and the memory of a dry run of each workflow, and the ratio."""
    taken: dict[str, list[tuple[float, float, str]]] = {name: [] for name in folders}
    for _ in range(rounds + 1):
        for name, folder in folders.items():
            taken[name].append(snakemake(folder, "-n", "-q"))
    found = {name: {"cpu_s": min(t[0] for t in all_[1:]), "mib": all_[-1][1]} for name, all_ in taken.items()}
    return found | {"ratio": found["shardmake"]["cpu_s"] / found["bare"]["cpu_s"]}


def main() -> None:
    """Measure each number of runs, nothing made yet and finished, and print one line each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, nargs="+", default=[200])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("results", nargs="?", type=Path)
    arguments = parser.parse_args()
    rows = []
    for count in arguments.runs:
        with tempfile.TemporaryDirectory() as folder:
            folders = make_folders(Path(folder), count)
            for state in ("nothing made", "finished")[: 2 if count == arguments.runs[0] else 1]:
                if state == "finished":
                    finish(folders)
                row = {"runs": count, "state": state} | compare(folders, arguments.rounds)
                rows.append(row)
                sides = [f"{name} {row[name]['cpu_s']:.1f} s, {row[name]['mib']:.0f} MiB" for name in folders]
                print(f"{count} runs, {state}: {'; '.join(sides)}; ratio {row['ratio']:.2f}", flush=True)
    if arguments.results:
        write_json(arguments.results, {"machine": machine(), "rows": rows})


if __name__ == "__main__":
    main()
