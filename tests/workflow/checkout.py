"""A copy of the repository in a folder of its own, in which a test runs commands as a user would."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from shardmake.config.load import get_run, load_cluster, load_config
from shardmake.config.models import Cluster, Run

if TYPE_CHECKING:  # benchmarks run without pytest
    import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PARTS = ("Snakefile", "workflow", "profiles", "config", "envs", "slurm")
LOCAL = {"executor": "local", "processes_per_node": 2, "cpus_per_node": 2, "memory_gib_per_node": 6}
RUN: dict[str, Any] = {
    "model": "resources/demo/base", "data": {"train": "resources/demo/train.jsonl", "eval": "resources/demo/eval.jsonl"},
    "sequence_length": 64, "global_batch_size": 8, "micro_batch_size": 2, "max_steps": 6, "learning_rate": 2e-3,
    "strategy": "zero3", "dtype": "keep", "checkpoints": {"every_steps": 2},
    "evaluation": {"batch_tokens": 2048, "prompts": ["What does os.getcwd do?"], "max_new_tokens": 4},
    "push": {"to": "file:published/{run}"},
}  # fmt: skip
UNPUSHED = {key: value for key, value in RUN.items() if key != "push"}
"""The same run without a destination, which has the name of one run."""
PROFILE = ("--profile", "profiles/local")


@dataclass
class Checkout:
    """The copy, its configuration, and commands in it. The run is called ``demo``."""

    root: Path

    @classmethod
    def create(cls, root: Path, inputs: Path) -> "Checkout":
        """Copy the workflow and the demo's inputs to ``root``, with 24 examples to evaluate.

        With all, the evaluation after a step takes longer than the step.
        """
        for part in PARTS:
            source, target = REPOSITORY / part, root / part
            target.parent.mkdir(parents=True, exist_ok=True)
            if source.is_symlink():
                target.symlink_to(source.readlink())
            elif source.is_dir():
                shutil.copytree(source, target)
            else:
                shutil.copy(source, target)
        shutil.copytree(inputs, root / "resources/demo")
        examples = root / "resources/demo/eval.jsonl"
        examples.write_text("".join(examples.read_text().splitlines(keepends=True)[:24]))
        checkout = cls(root)
        checkout.configure()
        return checkout

    def configure(self, cluster: dict[str, Any] | None = None, **changes: Any) -> None:
        """Write the cluster file and a configuration with one run, `RUN` with ``changes``; None removes a key."""
        run = {key: value for key, value in (RUN | changes).items() if value is not None}
        (self.root / "config/cluster.yaml").write_text(yaml.safe_dump(LOCAL | (cluster or {})))
        self.write_config({"cluster": "config/cluster.yaml", "runs": {"demo": run}})

    def write_config(self, config: Any) -> None:
        (self.root / "config/config.yaml").write_text(yaml.safe_dump(config))

    def load(self) -> tuple[Run, Cluster]:
        config = load_config(self.root / "config/config.yaml")
        return get_run(config, "demo"), load_cluster(self.root / config.cluster)

    @property
    def run(self) -> Path:
        return self.root / "runs/demo"

    def command(self, *words: str) -> list[str]:
        """Return a command of the environment that runs the tests."""
        return [str(Path(sys.executable).parent / words[0]), *words[1:]]

    def __call__(self, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a command in the copy and print its output for the test's report.

        Its only limit is that of the test, so that a busy machine fails no other one.
        """
        done = subprocess.run(
            self.command(*words), cwd=self.root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            check=False, env=environment(),
        )  # fmt: skip
        print(f"$ {' '.join(words)}\n{done.stdout}")
        if check and done.returncode != 0:
            raise AssertionError(f"{' '.join(words)} exited with {done.returncode}")
        return done

    def start(self, *words: str, log: Path) -> "subprocess.Popen[str]":
        """Start a command in the copy, in a session of its own, and return without waiting."""
        return subprocess.Popen(
            self.command(*words), cwd=self.root, stdout=log.open("w"), stderr=subprocess.STDOUT, text=True,
            env=environment(), start_new_session=True,
        )  # fmt: skip

    def stages(self, *names: str) -> None:
        """Run stages of the run, without ``names`` those that its training needs."""
        for name in names or ("plan", "render", "data"):
            self("shardmake", name, "demo")

    def run_at_start(self, code: str, monkeypatch: "pytest.MonkeyPatch") -> None:
        """Let every Python process of later commands run ``code`` first."""
        (self.root / "sitecustomize.py").write_text(code)
        monkeypatch.setenv("PYTHONPATH", f"{self.root}:{os.environ.get('PYTHONPATH', '')}")

    def read(self, name: str) -> Any:
        return json.loads((self.run / name).read_text())

    def metrics(self) -> list[dict[str, Any]]:
        path = self.run / "train/metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def losses(self) -> dict[int, float]:
        return {line["step"]: line["loss"] for line in self.metrics() if "loss" in line}


def wait_for(condition: Callable[[], object], seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.2)


def environment() -> dict[str, str]:
    """Return this environment without variables of Snakemake and Slurm."""
    return {key: value for key, value in os.environ.items() if not key.startswith(("SNAKEMAKE_", "SLURM_"))}
