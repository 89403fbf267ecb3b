"""Trainings that measure nodes: each goes through the stages as a user's run does, and its figures are read afterwards.

`shardmake doctor --node --train` compares the libraries with them on a user's nodes. The kit for one GPU
(``benchmarks/gpu_kit``) has more trainings, which take turns.
"""

import json
import math
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

from shardmake.config.models import Cluster
from shardmake.config.strategies import SHARDING, STRATEGY_SPECS
from shardmake.core.atomic import write_text
from shardmake.core.environment import checkout_commit, installed_versions
from shardmake.core.units import GIB
from shardmake.demo import make_inputs
from shardmake.demo.random_model import write_description, write_weights
from shardmake.doctor.gpu_report import GpuReport, Trained
from shardmake.doctor.records import NodeFacts
from shardmake.run.findings import Finding, Verdict, ok, ok_if, stops
from shardmake.run.metrics import read_metrics
from shardmake.run.paths import RunDir
from shardmake.run.plan import MemoryEstimates, Plan
from shardmake.run.training_settings import TrainingSettings

STEPS, WARM_UP = 12, 4
SHARDED_LOSS, LOSS = 0.002, 0.05
"""Largest differences of a step's loss of about 8: between sharded trainings whose weights have one precision, and
between others. DDP updates fp32 weights, the sharded ones of 16-bit weights round them before each step."""
LEVER_LOSS = 0.01
"""The same between trainings of one strategy: other kernels of the loss, or compiled layers, round otherwise."""
MEMORY = 0.25
"""Largest relative error of the planned memory of tensors."""
LAST_LINES = 40
_SHAPE: Mapping[str, Any] = {
    "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 12,
    "num_key_value_heads": 12,
}  # fmt: skip
"""57 million weights: a training on GPUs takes seconds. CPUs train the demo's model."""
LIBRARIES = ("torch", "transformers", "accelerate", "deepspeed", "peft", "shardmake", "snakemake")


def run_keys(model: str, data: str, steps: int, global_batch: int, /, **changes: Any) -> dict[str, Any]:
    """Return the keys of a run of ``steps`` that is saved once, at its end, with ``changes`` of other keys."""
    return {
        "model": model, "data": {"train": data}, "micro_batch_size": 1, "global_batch_size": global_batch,
        "max_steps": steps, "checkpoints": {"every_steps": steps, "keep": 1}, "learning_rate": 1e-5,
        "eval_every_steps": "never", **changes,
    }  # fmt: skip


def write_config(folder: Path, name: str, cluster: str, keys: Mapping[str, Any]) -> Path:
    """Write the configuration of the run ``name`` below ``folder``, and return its path there."""
    path = Path("config", f"{name}.yaml")
    write_text(folder / path, json.dumps({"cluster": cluster, "runs": {name: keys}}, indent=1))
    return path


def stage_command(stage: str, name: str, config: Path) -> list[str]:
    """Return the command of a stage of the run ``name``."""
    return [sys.executable, "-m", "shardmake.cli", stage, name, "--config", str(config)]


def last_lines(*logs: Path) -> list[str]:
    """Return the last lines of each log, below its name."""
    found = []
    for log in (log for log in logs if log.exists()):
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        found += [f"--- {log.name}", *lines[-LAST_LINES:]]
    return found


def read_training(run: RunDir, warm_up: int, label: str = "") -> Trained:
    """Return losses, memory and step time of a training, measured and planned; ``label`` names model and batch."""
    plan, lines = Plan.read(run.plan), [line for line in read_metrics(run.metrics) if line.loss is not None]
    planned = MemoryEstimates.read(run.memory).of(plan.choice)
    memory = lines[-1].memory
    rates = [line.tokens_per_second for line in lines if line.step > warm_up and line.tokens_per_second]
    rate = median(rates)
    return Trained(
        training=label, strategy=plan.choice.strategy, precision=plan.choice.precision,
        weights=TrainingSettings.read(run.training).model.dtype,
        losses={line.step: line.loss if line.loss is not None else math.nan for line in lines},
        allocated=memory and memory.allocated, reserved=memory and memory.reserved, device=memory and memory.device,
        planned_allocated=planned.gpu.allocated, planned_reserved=planned.gpu.reserved,
        planned_device=planned.gpu.device,
        step_seconds=plan.choice.global_batch_size * plan.workload.sequence_length / rate, tokens_per_second=rate,
        planned_step_seconds=planned.step_seconds,
    )  # fmt: skip


def judge(trained: Sequence[Trained]) -> Iterator[Finding]:
    """Compare the losses of trainings of one kind with each other, and planned memory with measured."""
    for one in trained:
        if (error := one.memory_error) is not None:
            advice = "Report it with the JSON file: the plan chooses by this estimate."
            words = f"tensors: planned {one.planned_allocated / GIB:.2f} GiB, measured {(one.allocated or 0) / GIB:.2f}"
            yield ok_if(abs(error) <= MEMORY, f"memory under {one.strategy}", f"{words} ({error:+.1%})", advice)
    for one, other in combinations(trained, 2):
        if one.training == other.training:
            sharded = not any(STRATEGY_SPECS[each.strategy].is_ddp for each in (one, other))
            limit = SHARDED_LOSS if sharded and one.weights == other.weights else LOSS
            limit = LEVER_LOSS if one.strategy == other.strategy else limit
            found = one.loss_difference(other)
            words = f"the losses of a step differ by at most {found:.4f}"
            advice = f"More than {limit:g} is more than rounding: report it with the JSON file."
            yield ok_if(found <= limit, f"{one.strategy} and {other.strategy}", words, advice, stops)


def train_strategies(
    cluster: Cluster, cluster_file: Path, nodes: int, folder: Path
) -> tuple[list[Finding], list[Trained]]:
    """Train a small model under each of `SHARDING` that the nodes allow; return findings and figures.

    Slurm gets all jobs at once. On this machine the trainings run one after another.
    """
    make_inputs(folder / "inputs")
    model = "inputs/base"
    if not cluster.is_cpu:
        model = "model"
        write_description(folder / "inputs/base", folder / model, _SHAPE)
        write_weights(folder / model)
    ranks = nodes * cluster.processes_per_node
    micro, length = (2, 64) if cluster.is_cpu else (8, 1024)
    batch = {"micro_batch_size": micro, "sequence_length": length, "nodes": nodes}
    findings: list[Finding] = []
    running: dict[str, subprocess.Popen[bytes]] = {}
    for strategy in SHARDING:
        if cluster.is_cpu and not STRATEGY_SPECS[strategy].cpu:
            continue
        keys = run_keys(model, "inputs/train.jsonl", STEPS, 2 * micro * ranks, strategy=strategy, **batch)
        config = write_config(folder, strategy, str(cluster_file.absolute()), keys)
        log = folder / f"{strategy}.log"
        if all(_start(stage, strategy, config, folder, log).wait() == 0 for stage in ("data", "plan", "render")):
            running[strategy] = _start("train", strategy, config, folder, log)
            if cluster.executor == "local":
                running[strategy].wait()
        else:
            findings.append(_failed(strategy, log))
    trained = []
    for strategy, process in running.items():
        if process.wait():
            findings.append(_failed(strategy, folder / f"{strategy}.log"))
            continue
        trained.append(one := read_training(RunDir(folder / "runs" / strategy), WARM_UP))
        words = f"{STEPS} steps of {one.step_seconds:.3f} s (planned {one.planned_step_seconds:.3f} s)"
        findings.append(ok(f"training under {strategy}", words))
    return [*findings, *judge(trained)], trained


def _start(stage: str, name: str, config: Path, folder: Path, log: Path) -> "subprocess.Popen[bytes]":
    with log.open("a") as file:
        return subprocess.Popen(stage_command(stage, name, config), cwd=folder, stdout=file, stderr=subprocess.STDOUT)


def _failed(strategy: str, log: Path) -> Finding:
    words = (last_lines(log) or ["it printed nothing"])[-1]
    return stops(f"training under {strategy}", words, f"{log} has all messages.")


def make_report(
    cluster: Cluster, facts: Sequence[NodeFacts], findings: Sequence[Finding], trained: Sequence[Trained], nodes: int,
    begun: float,
) -> GpuReport:  # fmt: skip
    """Return the report of `train_strategies` on the nodes that ``facts`` describe."""
    first = facts[0]
    bandwidth = [fact.inter_gbps or fact.intra_gbps for fact in facts]
    found = {name: version for name, version in installed_versions(LIBRARIES).items() if version}
    return GpuReport(
        time=begun, seconds=time.time() - begun, commit=checkout_commit(), gpu=first.gpu_name or "CPU",
        accelerator=cluster.accelerator, memory_gib=first.gpu_memory_gib or cluster.memory_gib_per_node,
        ranks=nodes * cluster.processes_per_node, driver=first.driver, cuda=first.cuda, nccl=first.nccl, versions=found,
        outcomes={one.check: "failed" for one in findings if one.verdict is Verdict.STOPS}, trained=list(trained),
        all_reduce_gbps=min((value for value in bandwidth if value), default=None),
    )  # fmt: skip
