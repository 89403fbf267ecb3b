"""Train attempts with forked ranks, without a driver or with one, from rendered files and with real saves."""

import json
import shutil
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import torch
from safetensors.torch import load_file

from shardmake.checkpoint import store
from shardmake.checkpoint.formats.pickle_names import refuse_foreign_names
from shardmake.checkpoint.record import CheckpointRecord
from shardmake.checkpoint.reshard.convert import set_load_universal
from shardmake.config.models import Cluster, Run, Strategy
from shardmake.consolidate.merge import consolidate
from shardmake.core.atomic import write_json
from shardmake.core.fingerprint import FileEntry
from shardmake.data.stage import prepare
from shardmake.launch.driver import drive
from shardmake.launch.jobs import Jobs, attempt_settings
from shardmake.launch.slurm_states import JobState, JobStatus
from shardmake.launch.training import Training
from shardmake.memory.read_config import read_model
from shardmake.plan.stage import make_plan
from shardmake.render import stage as render
from shardmake.render.stage import launch_command, render_files, write_files
from shardmake.render.user_files import merge_own_files
from shardmake.run.attempt import AttemptDir, NodeExit
from shardmake.run.paths import RunDir
from shardmake.run.plan import Plan
from shardmake.run.training_settings import TrainingSettings
from tests.fork_server import ForkServer, free_port, launched_environment
from tests.workflow.checkout import Checkout

Planned = tuple[Plan, Run, Cluster]
Weights = dict[str, torch.Tensor]


@dataclass
class Forked:
    """Train runs of ``checkout``; each run has its own folder outside the checkout."""

    checkout: Checkout
    server: ForkServer
    environments: dict[tuple[str, str], dict[str, str]] = field(default_factory=dict)
    references: dict[str, "Trained"] = field(default_factory=dict)

    @property
    def inputs(self) -> Path:
        return self.checkout.root / "resources/demo"

    @property
    def unpacked(self) -> dict[str, Any]:
        """Return the settings of a run whose sequences have one example each; its data are tokenized with it."""
        return {"packing": False, "data": {split: str(self.inputs / f"{split}.jsonl") for split in ("train", "eval")}}

    def trained(
        self, folder: Path, strategy: Strategy, ranks: int = 2, options: Mapping[str, Any] = {}, **settings: Any
    ) -> "Trained":
        """Train a run below ``folder`` to its end; ``options`` are those of `train`."""
        return Trained(self, RunDir(folder / "run"), self.plan(strategy, ranks, **settings), options).train()

    def once(self, strategy: Strategy, ranks: int = 2, **settings: Any) -> "Trained":
        """Return what `trained` returned for the same settings before, or train now."""
        key = json.dumps([strategy, ranks, settings], sort_keys=True)
        if key not in self.references:
            folder = self.checkout.root.with_name(f"{self.checkout.root.name}-{len(self.references)}")
            self.references[key] = self.trained(folder, strategy, ranks, **settings)
        return self.references[key]

    def plan(self, strategy: Strategy, ranks: int, **changes: Any) -> Planned:
        """Return the plan of the run on one node, with one forward pass per step; the batch suits 1 to 4 ranks."""
        given: dict[str, Any] = {"global_batch_size": 12, "micro_batch_size": 12 // ranks, "max_steps": 4, **changes}
        self.checkout.configure({"processes_per_node": ranks}, strategy=strategy, nodes=1, **given)
        return plan_of(self.checkout)

    def train(
        self, rundir: RunDir, planned: Planned, kill: dict[str, Any] | None = None,
        resume_from: Path | None = None, deepspeed: dict[str, Any] | None = None, variables: dict[str, str] | None = None,
        arguments: dict[str, Any] | None = None, program: str | None = None,
    ) -> list[int]:  # fmt: skip
        """Train one attempt in ``rundir`` with ``variables`` in the environment; return the exit statuses of its ranks.

        ``deepspeed`` is merged into the sections of the DeepSpeed file, ``arguments`` into those of Trainer. ``program``
        runs instead of `shardmake.train`.
        """
        if not rundir.data.exists():
            shutil.copytree(self._data(planned[1]), rundir.data)
        folder = write_attempt(rundir, planned, resume_from, deepspeed, arguments)
        return self.run_attempt(planned[0], folder, kill, variables, program)

    def _data(self, run: Run) -> Path:
        """Return the tokenized data of the checkout, or those that `unpacked` asks for, tokenized once."""
        if not Path(str(run.data.train)).is_absolute():
            return self.checkout.run / "data"
        prepare(run, rundir := RunDir(self.checkout.root / f"runs/{run.data.order}"))
        return rundir.data

    def run_attempt(
        self, plan: Plan, folder: AttemptDir, kill: dict[str, Any] | None = None,
        variables: dict[str, str] | None = None, program: str | None = None,
    ) -> list[int]:  # fmt: skip
        """Run the ranks of an attempt whose files are written; the arguments are those of `train`."""
        environment = self._environment(plan, folder) | {"ACCELERATE_CONFIG_FILE": str(folder.accelerate)}
        if "ACCELERATE_DEEPSPEED_CONFIG_FILE" in environment:
            environment["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = str(folder.deepspeed)
        return self.server.run(folder.root, environment | (variables or {}), plan.choice.world_size, kill, program)

    def drive(self, planned: Planned, program: str | None = None) -> None:
        """Train the run of the checkout from its start with the driver, which takes fallbacks and resumes.

        The libraries do not read the rendered files before; the ranks do. Raises what the driver raises.
        """
        _, run, cluster = planned
        rundir = RunDir(self.checkout.run)
        shutil.rmtree(rundir.train, ignore_errors=True)
        plan, memory = make_plan("demo", run, cluster)
        plan.write(rundir.plan)
        memory.write(rundir.memory)
        with mock.patch.object(render, "check_rendered"):
            render.render(plan, run, cluster, rundir)
        rundir.train.mkdir()
        training = Training.load(run, cluster, rundir, 0)
        training.jobs = ForkedJobs(self, program)
        drive(training)

    def _environment(self, plan: Plan, folder: AttemptDir) -> dict[str, str]:
        key = (plan.choice.model_dump_json(), plan.precision)
        if key not in self.environments:
            command = launch_command(plan, folder.root, 0, "127.0.0.1", free_port())
            self.environments[key] = launched_environment(command, folder.root)
        return self.environments[key]

    def resume(self, rundir: RunDir, planned: Planned, **options: Any) -> tuple[list[int], CheckpointRecord | None]:
        """Call `train` from the checkpoint that the store recovers, as the driver does."""
        found = store.recover(rundir.checkpoints)
        if found:
            refuse_foreign_names(found[1], found[0].files)
        codes = self.train(rundir, planned, resume_from=found[1] if found else None, **options)
        return codes, found[0] if found else None


def plan_of(checkout: Checkout) -> Planned:
    """Return the plan of the run in ``checkout``, whose model has an absolute path."""
    run, cluster = checkout.load()
    run = run.model_copy(update={"model": str(checkout.root / run.model)})
    return make_plan("demo", run, cluster)[0], run, cluster


def write_attempt(
    rundir: RunDir, planned: Planned, resume_from: Path | None = None, deepspeed: dict[str, Any] | None = None,
    arguments: dict[str, Any] | None = None,
) -> AttemptDir:  # fmt: skip
    """Write the files of the next attempt, which the libraries do not check; see `Forked.train`."""
    plan, run, cluster = planned
    number = len(list(rundir.attempts.glob("*"))) + 1
    folder, model = AttemptDir(rundir.attempts / f"{number:03d}"), read_model(run.model)
    files, _ = merge_own_files(render_files(plan, run, cluster, model, folder.root), run, plan.choice)
    plan.write(folder.plan)
    write_files(files, folder.root, model)
    training = TrainingSettings.read(folder.training)
    training.model_copy(update={"arguments": training.arguments | (arguments or {})}).write(folder.training)
    changes = {key: files.deepspeed.get(key, {}) | section for key, section in (deepspeed or {}).items()}
    write_json(folder.deepspeed, files.deepspeed | changes)
    set_load_universal(folder.deepspeed, resume_from)
    path = str(resume_from) if resume_from else None
    attempt_settings(number, rundir.root, cluster, plan, resume_from=path, settings_digest="r").write(folder.settings)
    return folder


@dataclass(frozen=True)
class Trained:
    """A run in its folder; every attempt has the same ``options`` of `Forked.train`."""

    forked: Forked
    rundir: RunDir
    planned: Planned
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def base(self) -> Path:
        return Path(self.planned[1].model)

    @property
    def last(self) -> Path:
        """The checkpoint of the last of four steps."""
        return self.rundir.checkpoints / "checkpoint-4"

    def train(self, resume_from: Path | None = None) -> "Trained":
        """Run an attempt, in which no rank may fail."""
        codes = self.forked.train(self.rundir, self.planned, resume_from=resume_from, **self.options)
        assert set(codes) == {0}, log(self.rundir)
        return self

    def losses(self, key: str = "loss") -> dict[int, float]:
        return losses(self.rundir, key)

    def repeat(self) -> "Trained":
        """Resume a training of four steps from step 2; the losses must be the same."""
        uninterrupted = self.losses()
        store.remove(self.last)
        codes, resumed = self.forked.resume(self.rundir, self.planned, **self.options)
        assert set(codes) == {0} and resumed is not None and resumed.step == 2, log(self.rundir)
        assert self.losses() == uninterrupted
        return self

    def merged(self, out: str = "model", **options: Any) -> Weights:
        """Merge the last checkpoint into the folder ``out`` of the run; return the weights by name."""
        model_class = self.planned[0].workload.model_class
        consolidate(self.last, self.rundir.root / out, base=self.base, model_class=model_class, **options)
        name = "adapter_model" if options.get("adapter") else "model"
        return load_file(self.rundir.root / out / f"{name}.safetensors")


@dataclass
class ForkedJobs(Jobs):
    """An executor whose ranks are forked; an attempt has ended when it is submitted."""

    forked: Forked
    program: str | None
    slowest_poll: ClassVar[float] = 0.0

    def submit(self, folder: AttemptDir, plan: Plan, excluded: list[str]) -> str:
        started = time.time()
        codes = self.forked.run_attempt(plan, folder, program=self.program)
        NodeExit(
            node_rank=0, host=socket.gethostname(), started=started, ended=time.time(), phase="training",
            returncode=next((code for code in codes if code), 0), stop_signal=None,
        ).write(folder.exit_record(0))  # fmt: skip
        return folder.root.name

    def find(self) -> None:
        return None

    def status(self, job: str) -> JobStatus:
        return JobStatus(JobState.ENDED, "")

    def cancel_command(self, job: str) -> str:
        return "nothing"  # the ranks end before anyone could cancel them


def branch(source: RunDir, target: Path) -> RunDir:
    """Return a copy of a run with its checkpoints and metrics."""
    shutil.copytree(source.root, target, symlinks=True)
    return RunDir(target)


def log(rundir: RunDir) -> str:
    return (max(rundir.attempts.iterdir()) / "node-0.log").read_text()


def metrics(rundir: RunDir) -> list[dict[str, Any]]:
    return [json.loads(line) for line in rundir.metrics.read_text().splitlines()]


def losses(rundir: RunDir, key: str = "loss") -> dict[int, float]:
    """Return the values of ``key`` by step, each of which is logged once."""
    lines = [line for line in metrics(rundir) if key in line]
    found = {line["step"]: line[key] for line in lines}
    assert len(found) == len(lines), "no step is logged twice"
    return found


def official_weights(checkpoint: Path, strategy: Strategy) -> dict[str, Any]:
    """Return the weights of a checkpoint as the engine's own tools read them."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    if strategy == "ddp":
        return load_file(checkpoint / "model.safetensors")
    if not strategy.startswith("fsdp"):
        return dict(get_fp32_state_dict_from_zero_checkpoint(str(checkpoint)))
    dcp_to_torch_save(checkpoint / "pytorch_model_fsdp_0", converted := checkpoint.parent / "official.pt")
    return dict(torch.load(converted, weights_only=True)["model"])


def states(record: CheckpointRecord | None) -> dict[str, FileEntry]:
    """Return size and checksum of weights, optimizer states, random generators and schedulers by file."""
    assert record is not None
    return {name: entry for name, entry in record.files.items() if name.endswith((".pt", ".pth", ".distcp"))}


def result(rundir: RunDir) -> tuple[dict[int, float], dict[str, FileEntry]]:
    """Return the losses by step, and the checksums of the newest checkpoint's states, for an exact comparison."""
    last = store.newest_valid(rundir.checkpoints)
    return (losses(rundir), states(last[0])) if last else ({}, {})
