"""The checks: each trains or measures on a `Machine`, adds its figures to the report and returns them."""

import json
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.saving import enlarge
from shardmake.config.load import load_cluster
from shardmake.core.environment import checkout_commit, installed_versions
from shardmake.core.units import GIB
from shardmake.demo import make_inputs
from shardmake.doctor.job import check_nodes, make_request
from shardmake.doctor.records import DoctorDir
from shardmake.run.attempt import host_name
from shardmake.run.attempt_history import AttemptRecord, load_history
from shardmake.run.findings import Finding, Verdict
from shardmake.run.metrics import read_metrics
from shardmake.run.paths import RunDir
from shardmake.run.plan import MemoryEstimates, Plan
from tests.gpu.machine import Machine
from tests.gpu.results import AttentionErrors, GpuReport, Trained
from tests.workflow.checkout import Checkout

LIBRARIES = ("torch", "transformers", "accelerate", "deepspeed", "peft", "shardmake", "snakemake")
BASELINE = "ddp"
NODE_CHECKS = (
    "driver", "GPUs", "CUDA", "GPU architecture", "matrix product", "host to GPU", "peer access", "varlen attention",
    "flash-attn", "Liger", "bitsandbytes", "all-reduce", "all-reduce in the node",
)  # fmt: skip
"""Findings of doctor that the report keeps: about GPUs and kernels, not about the site."""
KILLED_STRATEGY, KILLED_STEP = "zero2", 7
"""Rank 0 is killed while it logs this step, after the checkpoint of step 5."""
CHECKPOINT_STEPS = 5
_PATH = re.compile(r"(/[\w.+@-]+){2,}/?")
_KILL = f"""
import os, signal, sys
opened = []
def kill(event, arguments):
    if event == "open" and str(arguments[0]).endswith("metrics.jsonl") and "a" in str(arguments[1]):
        opened.append(event)
        if len(opened) == {KILLED_STEP} and os.path.basename(sys.argv[1]) == "001":
            os.kill(os.getpid(), signal.SIGKILL)
if "shardmake.train" in sys.orig_argv:
    sys.addaudithook(kill)
"""


@dataclass(frozen=True)
class Workload:
    """The model and the length of the trainings."""

    shape: Mapping[str, int] | None
    """None for the demo's own model."""
    sequence_length: int
    micro_batch: int
    steps: int
    warm_up: int
    """First steps that do not count for the step time."""

    def run(self, machine: Machine) -> dict[str, Any]:
        """Return the keys of the run: two passes per step."""
        return {
            "sequence_length": self.sequence_length,
            "micro_batch_size": self.micro_batch,
            "global_batch_size": 2 * self.micro_batch * machine.ranks,
            "max_steps": self.steps,
            "checkpoints": {"every_steps": self.steps},
            "learning_rate": 1e-4,
            "precision": machine.precision,
            "nodes": 1,
            "push": None,
        }


ON_GPU = Workload(
    shape={
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 8,
        "num_attention_heads": 12,
        "num_key_value_heads": 12,
    },
    sequence_length=1024,
    micro_batch=8,
    steps=30,
    warm_up=10,
)
"""57 million weights: a training takes seconds, and its activations need more memory than its states."""


@dataclass
class Kit:
    """The checks on one machine, in ``folder``."""

    machine: Machine
    folder: Path
    workload: Workload = ON_GPU
    report: GpuReport = field(init=False)

    def __post_init__(self) -> None:
        found = installed_versions(LIBRARIES)
        self.report = GpuReport(
            time=time.time(),
            commit=checkout_commit(),
            gpu=self.machine.gpu,
            accelerator=self.machine.accelerator,
            memory_gib=self.machine.memory / GIB,
            ranks=self.machine.ranks,
            driver=self.machine.driver,
            cuda=self.machine.cuda,
            nccl=self.machine.nccl,
            versions={name: version for name, version in found.items() if version},
        )
        make_inputs(self.folder / "inputs")
        if self.workload.shape:
            enlarge(self.folder / "inputs/base", dict(self.workload.shape))

    def add(self, **values: Any) -> None:
        """Replace fields of the report."""
        self.report = self.report.model_copy(update=values)

    def checkout(self, name: str, cluster: Mapping[str, Any] | None = None, **changes: Any) -> Checkout:
        """Return a new or existing copy of the repository, configured for a run, with tokenized data."""
        root = self.folder / name
        copy = Checkout(root) if root.exists() else Checkout.create(root, self.folder / "inputs")
        copy.configure(self.machine.cluster() | dict(cluster or {}), **self.workload.run(self.machine) | changes)
        tokenized = self.folder / "tokenized"
        if not tokenized.exists():
            copy("shardmake", "data", "demo")
            shutil.copytree(copy.run, tokenized)
        elif not copy.run.exists():
            shutil.copytree(tokenized, copy.run)
        return copy

    def train(self, copy: Checkout) -> RunDir:
        """Plan, render and train the run of ``copy``, and remove its checkpoints, which are large."""
        for stage in ("plan", "render", "train"):
            copy("shardmake", stage, "demo")
        run = RunDir(copy.run)
        shutil.rmtree(run.checkpoints)
        return run

    def trained(self, strategy: str) -> Trained:
        """Return the training under ``strategy``, which runs once."""
        for one in self.report.trained:
            if one.strategy == strategy:
                return one
        run = self.train(self.checkout(strategy, strategy=strategy))
        one = read_training(run, self.workload.warm_up)
        self.add(trained=[*self.report.trained, one])
        return one

    def kill_and_resume(self) -> tuple[list[AttemptRecord], Trained]:
        """Train while SIGKILL ends a rank, and return the attempts and the whole training."""
        saves = {"every_steps": CHECKPOINT_STEPS}
        copy = self.checkout("killed", strategy=KILLED_STRATEGY, checkpoints=saves)
        with program_of_each_process(copy.root, _KILL):
            run = self.train(copy)
        return load_history(run.attempt_history), read_training(run, self.workload.warm_up)

    def run_out_of_memory(self) -> list[AttemptRecord]:
        """Train with less memory than the plan's choice needs, and return the attempts."""
        settings: dict[str, Any] = {"strategy": BASELINE, "micro_batch_size": "auto"}
        copy = self.checkout("memory", **settings)
        copy("shardmake", "plan", "demo")
        run = RunDir(copy.run)
        with shortage(self.machine, Plan.read(run.plan), MemoryEstimates.read(run.memory), copy.root) as cluster:
            run = self.train(self.checkout("memory", cluster, **settings))
        return load_history(run.attempt_history)

    def compare_attention(self) -> AttentionErrors:
        """Compare the attention kernels in a process of its own, which frees the GPU when it ends."""
        command = [sys.executable, "-m", "tests.gpu.attention", "cuda"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode == 0, done.stderr
        errors = AttentionErrors.model_validate_json(done.stdout.splitlines()[-1])
        self.add(attention=errors)
        return errors

    def check_node(self) -> list[str]:
        """Run doctor's checks of a node without its builds; return the findings that would stop a run."""
        path = self.folder / "cluster.yaml"
        path.write_text(json.dumps(self.machine.cluster()))
        request = make_request(load_cluster(path), 1, build_kernels=False)
        (node,), _ = check_nodes(request, DoctorDir(self.folder / "doctor"))
        kept = [without_places(finding) for finding in node.findings if finding.check in NODE_CHECKS]
        self.add(node=kept, all_reduce_gbps=node.facts.intra_gbps)
        return [f"{finding.check}: {finding.found}" for finding in kept if finding.verdict is Verdict.STOPS]


def without_places(finding: Finding) -> Finding:
    """Return the finding without names of nodes and paths, which the report of a failed check could have."""
    found = _PATH.sub("PATH", finding.found.replace(host_name(), "HOST"))
    return finding.model_copy(update={"nodes": (), "found": found, "advice": ""})


def read_training(run: RunDir, warm_up: int) -> Trained:
    """Return losses, memory and step time of a finished run, measured and planned."""
    plan, lines = Plan.read(run.plan), [line for line in read_metrics(run.metrics) if line.loss is not None]
    planned = MemoryEstimates.read(run.memory).of(plan.choice)
    memory = lines[-1].memory
    tokens = plan.choice.global_batch_size * plan.workload.sequence_length
    rates = [line.tokens_per_second for line in lines if line.step > warm_up and line.tokens_per_second]
    return Trained(
        strategy=plan.choice.strategy,
        precision=plan.choice.precision,
        losses={line.step: line.loss if line.loss is not None else math.nan for line in lines},
        allocated=memory and memory.allocated,
        reserved=memory and memory.reserved,
        planned_allocated=planned.gpu.allocated,
        planned_reserved=planned.gpu.reserved,
        step_seconds=tokens / statistics.median(rates),
        planned_step_seconds=planned.step_seconds,
    )


@contextmanager
def shortage(machine: Machine, plan: Plan, estimates: MemoryEstimates, root: Path) -> Iterator[dict[str, Any]]:
    """Return the cluster keys that let PyTorch use less than the choice needs and more than the last fallback."""
    limit = memory_limit(plan, estimates)
    fraction = f"expandable_segments:True,per_process_memory_fraction:{limit / machine.memory:.4f}"
    yield {"env": {"PYTORCH_ALLOC_CONF": fraction}}


def memory_limit(plan: Plan, estimates: MemoryEstimates) -> int:
    """Return the bytes halfway between the need of the choice and that of the last fallback."""
    most, least = (estimates.of(choice).gpu.reserved for choice in (plan.choice, plan.fallbacks[-1].choice))
    assert least < 0.8 * most, f"the fallbacks save too little: {least} of {most} bytes"
    return (most + least) // 2


@contextmanager
def program_of_each_process(root: Path, program: str) -> Iterator[None]:
    """Let every Python process that starts meanwhile run ``program`` first."""
    (root / "sitecustomize.py").write_text(program)
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = f"{root}:{before or ''}"
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
