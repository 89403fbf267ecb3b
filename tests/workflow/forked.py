"""Train attempts with forked ranks, without a driver or with one, from rendered files and with real saves."""

import json
import shutil
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import torch
from safetensors.torch import load_file

from shardmake.checkpoint import store
from shardmake.checkpoint.formats.pickle_names import refuse_foreign_names
from shardmake.checkpoint.record import CheckpointRecord
from shardmake.config.load import get_run, load_cluster, load_config
from shardmake.config.models import Cluster, Run, Strategy
from shardmake.core.atomic import write_json
from shardmake.core.fingerprint import FileEntry
from shardmake.launch.driver import drive
from shardmake.launch.jobs import attempt_settings
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


@dataclass
class Forked:
    """Train runs of ``checkout``; each run has its own folder outside the checkout."""

    checkout: Checkout
    server: ForkServer
    environments: dict[tuple[str, str], dict[str, str]] = field(default_factory=dict)

    def plan(self, strategy: Strategy, ranks: int, **changes: Any) -> tuple[Plan, Run, Cluster]:
        """Return the plan of the run on one node, with one forward pass per step; the batch suits 1 to 4 ranks."""
        given: dict[str, Any] = {"global_batch_size": 12, "micro_batch_size": 12 // ranks, "max_steps": 4, **changes}
        self.checkout.configure({"processes_per_node": ranks}, strategy=strategy, nodes=1, **given)
        config = load_config(self.checkout.root / "config/config.yaml")
        run, cluster = get_run(config, "demo"), load_cluster(self.checkout.root / config.cluster)
        run = run.model_copy(update={"model": str(self.checkout.root / run.model)})
        return make_plan("demo", run, cluster)[0], run, cluster

    def train(
        self, rundir: RunDir, planned: tuple[Plan, Run, Cluster], kill: dict[str, Any] | None = None,
        resume_from: Path | None = None, deepspeed: dict[str, Any] | None = None, variables: dict[str, str] | None = None,
        arguments: dict[str, Any] | None = None, program: str | None = None,
    ) -> list[int]:  # fmt: skip
        """Train one attempt in ``rundir`` with ``variables`` in the environment; return the exit statuses of its ranks.

        ``deepspeed`` is merged into the sections of the DeepSpeed file, ``arguments`` into those of Trainer. ``program``
        runs instead of `shardmake.train`.
        """
        plan, run, cluster = planned
        number = len(list(rundir.attempts.glob("*"))) + 1
        folder = AttemptDir(rundir.attempts / f"{number:03d}")
        if not rundir.data.exists():
            shutil.copytree(self.checkout.run / "data", rundir.data)
        model = read_model(run.model)
        files, _ = merge_own_files(render_files(plan, run, cluster, model, folder.root), run, plan.choice)
        plan.write(folder.plan)
        write_files(files, folder.root, model)
        training = TrainingSettings.read(folder.training)
        training = training.model_copy(update={"arguments": training.arguments | (arguments or {})})
        training.write(folder.training)
        changes = {key: files.deepspeed.get(key, {}) | section for key, section in (deepspeed or {}).items()}
        write_json(folder.deepspeed, files.deepspeed | changes)
        path = str(resume_from) if resume_from else None
        attempt_settings(number, rundir.root, cluster, plan, resume_from=path, settings_digest="r").write(
            folder.settings
        )
        return self.run_attempt(plan, folder, kill, variables, program)

    def run_attempt(
        self, plan: Plan, folder: AttemptDir, kill: dict[str, Any] | None = None,
        variables: dict[str, str] | None = None, program: str | None = None,
    ) -> list[int]:  # fmt: skip
        """Run the ranks of an attempt whose files are written; the arguments are those of `train`."""
        environment = self._environment(plan, folder) | {"ACCELERATE_CONFIG_FILE": str(folder.accelerate)}
        if "ACCELERATE_DEEPSPEED_CONFIG_FILE" in environment:
            environment["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = str(folder.deepspeed)
        return self.server.run(folder.root, environment | (variables or {}), plan.choice.world_size, kill, program)

    def drive(self, planned: tuple[Plan, Run, Cluster], program: str | None = None) -> None:
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

    def resume(
        self, rundir: RunDir, planned: tuple[Plan, Run, Cluster], kill: dict[str, Any] | None = None,
        variables: dict[str, str] | None = None, arguments: dict[str, Any] | None = None,
    ) -> tuple[list[int], CheckpointRecord | None]:  # fmt: skip
        """Call `train` from the checkpoint that the store recovers, as the driver does."""
        found = store.recover(rundir.checkpoints)
        if found:
            refuse_foreign_names(found[1], found[0].files)
        codes = self.train(
            rundir, planned, kill, resume_from=found[1] if found else None, variables=variables, arguments=arguments
        )
        return codes, found[0] if found else None

    def assert_repeats(self, rundir: RunDir, planned: tuple[Plan, Run, Cluster], **options: Any) -> dict[int, float]:
        """Resume a training of four steps from step 2; return the losses, which must be the same."""
        uninterrupted = losses(rundir)
        shutil.rmtree(rundir.checkpoints / "checkpoint-4")
        codes, resumed = self.resume(rundir, planned, **options)
        assert set(codes) == {0} and resumed is not None and resumed.step == 2, log(rundir)
        assert losses(rundir) == uninterrupted
        return uninterrupted


@dataclass
class ForkedJobs:
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

    def hosts(self, nodes: str) -> list[str]:
        return []

    def down_hosts(self, hosts: Sequence[str]) -> list[str]:
        return []

    def cancel_command(self, job: str) -> str:
        return "nothing"  # the ranks end before anyone could cancel them


def branch(source: RunDir, target: Path) -> RunDir:
    """Return a copy of a run with its checkpoints and metrics."""
    shutil.copytree(source.root, target, symlinks=True)
    return RunDir(target)


def log(rundir: RunDir) -> str:
    """Return the newest attempt's log."""
    return (max(rundir.attempts.iterdir()) / "node-0.log").read_text()


def metrics(rundir: RunDir) -> list[dict[str, Any]]:
    """Return the lines of a run's metrics."""
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
