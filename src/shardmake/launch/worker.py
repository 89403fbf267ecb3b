"""One worker per node: rendezvous, preflight, start and watch the ranks, handle signals, write the exit record.

Slurm starts the worker through `shardmake.launch.slurm_task`, the local executor as a process. Both run `main`.
"""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import IO

from shardmake.config.values import LAUNCHER_VARIABLES
from shardmake.core.atomic import read_json
from shardmake.core.build_locks import remove_stale_locks
from shardmake.core.disk import remove_swap_files
from shardmake.core.environment import kernel_caches, scratch_folder
from shardmake.core.errors import LinkError
from shardmake.core.failures import explain
from shardmake.core.permissions import make_private
from shardmake.core.process import die_with_parent, wait_for_output
from shardmake.core.run_folder import make_folder, open_file, remove
from shardmake.core.secrets import redact
from shardmake.core.temporary import temporary_folder
from shardmake.launch.flight_recorder import recorder_variables
from shardmake.launch.gpu_use import GpuSampler
from shardmake.launch.preflight import PreflightError, check_node
from shardmake.launch.ready_ranks import READY, is_used
from shardmake.launch.rendezvous import Rendezvous, RendezvousError, address_file, run_rendezvous, wait_for_address
from shardmake.launch.restart import adopt_orphans, end_descendants, wait_as_spare, wait_for_next
from shardmake.launch.resume import again_file, prepare_restart, read_settings
from shardmake.launch.resume_validation import DamagedCheckpointError, confirm_damage, validate_inputs, validate_share
from shardmake.launch.service import (
    SERVING,
    Service,
    ServiceError,
    service_address,
    service_settings,
    start_program,
    training_interface,
    wait_for_services,
)
from shardmake.launch.watchdog import Watchdog
from shardmake.launch.watcher import RANK_0_WARNING
from shardmake.render.stage import launch_command
from shardmake.run.attempt import (
    HEARTBEATS_VARIABLE,
    START_VARIABLE,
    Attempt,
    AttemptDir,
    Heartbeat,
    NodeExit,
    host_name,
    restarts,
)
from shardmake.run.attempt_owner import NONE, claim_next
from shardmake.run.plan import Plan
from shardmake.run.training_settings import TrainingSettings, script_environment

WATCH_SECONDS = 5.0
OTHERS_SECONDS = 120.0
"""How long a failed node waits for the exit records of the others, which may collect stacks first.

A node with a damaged share of the checkpoint waits as long again as it read: the others may read as long.
"""
LOST_SECONDS = 480.0
"""How much longer it waits in a job with spare nodes: Slurm removes a node that fails after minutes (SlurmdTimeout)."""
_ALLOCATOR = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}
"""Variables that configure torch's allocator; torch reads the second one first."""
_COUNTERS = {"": ("", "memory.events"), "memory": ("memory", "memory.oom_control")}
"""Folder and file below the mount point, for cgroup v2 and v1, by the controller in ``/proc/self/cgroup``."""


@dataclass(frozen=True)
class WorkerNode:
    """This node's rank, and how often its ranks were started before."""

    rank: int
    start: int


def step_nodes() -> list[str]:
    """Return Slurm's names of the step's nodes; none if Slurm does not answer."""
    command = ["scontrol", "show", "hostnames", os.environ.get("SLURM_STEP_NODELIST", "")]
    try:
        answer = wait_for_output(
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True), 10
        )
    except OSError:
        return []
    return (answer or "").split()


def node_rank(attempt: Attempt) -> int | None:
    """Return the rank of this Slurm task's node, of which each has one task; None for a spare node.

    A job that Slurm restarted without the nodes of the attempt uses its first ones.
    """
    task = int(os.environ["SLURM_PROCID"])
    if attempt.hosts and {*attempt.hosts} <= {*(step_nodes() or attempt.hosts)}:
        return attempt.hosts.index(host_name()) if host_name() in attempt.hosts else None
    return task if task < attempt.job_nodes else None


class StopRequest:
    """Creates the attempt's stop file on a signal; later signals are the same request, also in the next attempt."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.signal_name: str | None = None
        for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGURG, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.signal_name is None:
            self.signal_name = signal.Signals(number).name
        open_file(self.file, "a").close()

    def follow(self, file: Path) -> None:
        """Continue with the stop file of the attempt that follows in the job."""
        self.file = file
        if self.signal_name:
            open_file(file, "a").close()


def run_slurm_task(attempt_folder: Path, stop: StopRequest) -> AttemptDir | None:
    """Run the worker of this Slurm task; return the attempt that follows in the job, None if the job ends.

    The task must not end with the worker's status: srun would end the step.

    Raises:
        SystemExit: this node failed and another left no exit record, so that srun ends the step.
    """
    folder = AttemptDir(attempt_folder)
    if (rank := node_rank(folder.read())) is None:
        return wait_as_spare(folder)
    status = main(attempt_folder, WorkerNode(rank, restarts()), stop)
    in_place = folder.settings.exists() and folder.read().restart_in_place
    if (status or in_place) and not _all_nodes_exited(folder) and status:
        wait_for_next(folder, 0)  # spare nodes end
        sys.exit("Ending the step: another node left no exit record and may hang.")
    if not in_place:
        return None
    following = wait_for_next(folder)
    ended = NodeExit.read_if_exists(folder.exit_record(rank))
    if following is None and stop.signal_name and ended and not ended.stop_signal:
        _write_exit_record(folder, ended.model_copy(update={"later_signal": stop.signal_name}))
    return following


def _all_nodes_exited(folder: AttemptDir) -> bool:
    """Return whether every node leaves its exit record in time, or the job is asked to stop meanwhile.

    Otherwise a stuck node would keep the job running until its time limit.
    """
    attempt = folder.read()
    seconds = LOST_SECONDS if attempt.spare_nodes else 0
    return _wait_for(lambda: folder.count_exits() >= attempt.job_nodes, folder, seconds) or folder.stop_file.exists()


def _wait_for(condition: Callable[[], bool], folder: AttemptDir, seconds: float = 0) -> bool:
    """Return whether ``condition`` becomes true in time, before the job is asked to stop."""
    deadline = time.monotonic() + OTHERS_SECONDS + seconds
    while not (found := condition()) and not folder.stop_file.exists() and time.monotonic() < deadline:
        time.sleep(1)
    return found


def main(attempt_folder: Path, node: WorkerNode, stop: StopRequest | None = None) -> int:
    """Run the ranks of this node, and return the launcher's exit status.

    If a node finds the checkpoint damaged, the job keeps its nodes, and all of them start again from an older one.
    """
    folder = AttemptDir(attempt_folder)
    stop = stop or StopRequest(folder.stop_file)
    while True:
        os.environ[START_VARIABLE] = str(node.start)
        status = _run_node(folder, node, stop)
        if not _starts_again(folder, node):
            return status
        node = replace(node, start=node.start + 1)


def _starts_again(folder: AttemptDir, node: WorkerNode) -> bool:
    """Return whether a node found the checkpoint damaged, which node 0 confirms once all nodes have ended."""
    again = again_file(folder, node.start)
    if again.exists() or not any(ended.damaged for ended in folder.exits()):  # node 0 may have been faster
        return again.exists()
    seconds = sum(ended.ended - ended.started for ended in folder.exits() if ended.node_rank == node.rank)
    if node.rank:
        return _wait_for(again.exists, folder, seconds)
    nodes = folder.read().job_nodes
    if not _wait_for(lambda: folder.count_exits() >= nodes, folder, seconds) or folder.stop_file.exists():
        return False
    has_left = any(ended.message and not ended.damaged for ended in folder.exits())  # perhaps before the finding
    if has_left or not (damage := confirm_damage(folder)):
        return False
    with open_file(folder.log(0), "a") as log:  # the driver shows warnings of rank 0
        print(f"{RANK_0_WARNING}{damage} The job starts its ranks again.", file=log)
    make_folder(again.parent, parents=False)
    open_file(again, "a").close()
    return True


def _run_node(folder: AttemptDir, node: WorkerNode, stop: StopRequest) -> int:
    """Run the ranks of this node once, write the exit record, and return the launcher's exit status."""
    attempt = folder.read()
    started, killed_before = time.time(), oom_kills()
    phase, returncode, message, damaged = "rendezvous", None, "", list[str]()
    culprit: str | None = host_name()
    try:
        if node.start and node.rank == 0:
            prepare_restart(folder, node.start)
        interface, seconds = training_interface(attempt), attempt.rendezvous_seconds
        serves = node.rank >= attempt.nodes
        if serves:
            rendezvous = wait_for_address(address_file(folder.rendezvous, node.start), time.monotonic() + seconds)
        else:
            rendezvous = run_rendezvous(folder.rendezvous, node.start, node.rank, attempt.nodes, interface, seconds)
        attempt = read_settings(folder, node.start, seconds)
        phase, plan = "preflight", Plan.read(folder.plan)
        with open_file(folder.log(node.rank), "a", buffering=1) as log:
            check_node(folder, attempt, plan, node.rank, lambda line: print(line, file=log))
            if serves:
                phase, returncode = SERVING, _serve(folder, attempt, plan, node, log)
            else:
                if not attempt.finished:
                    validate_inputs(attempt, node.rank, lambda line: print(line, file=log))
                    phase = "checkpoint"
                    validate_share(attempt, node.rank, lambda line: print(line, file=log))
                phase = "training"
                returncode = 0 if attempt.finished else _run_ranks(folder, attempt, plan, node, rendezvous, log)
    except RendezvousError as error:
        names = dict(enumerate(attempt.hosts or step_nodes()))
        message, culprit = str(error), host_name() if error.absent is None else names.get(error.absent)
    except PreflightError as error:
        phase, message = "run preflight" if error.blames_run else "preflight", str(error)
    except ServiceError as error:
        phase, message = error.phase, str(error)
    except DamagedCheckpointError as error:
        message, damaged = str(error), error.files
    except Exception as error:  # the driver must get every error
        message = _describe_error(error, folder, node.rank)
    record = NodeExit(
        node_rank=node.rank,
        host=host_name(),
        started=started,
        ended=time.time(),
        phase=phase,
        returncode=returncode,
        stop_signal=stop.signal_name,
        message=message,
        damaged=damaged,
        culprit=culprit,
        oom_kills=None if killed_before is None or (kills := oom_kills()) is None else kills - killed_before,
    )
    _write_exit_record(folder, record)
    return 1 if returncode is None else returncode


def _write_exit_record(folder: AttemptDir, record: NodeExit) -> None:
    """Write the record, or print it: on a full disk, or after a move, the driver still gets the step's output."""
    try:
        if not folder.root.is_dir():
            raise FileNotFoundError(f"{folder.root} is not there any more")
        record.write(folder.exit_record(record.node_rank))
    except (OSError, LinkError) as error:
        print(f"Cannot write the exit record ({error}): {record.model_dump_json()}", flush=True)


def _describe_error(error: Exception, folder: AttemptDir, node_rank: int) -> str:
    """Return the message for the driver; the traceback of an unexpected error goes to the node's log."""
    if known := explain(error, folder.root):
        return str(known)
    with open_file(folder.log(node_rank), "a") as log:
        traceback.print_exception(error, file=log)
    return f"Unexpected error: {type(error).__name__}: {error}"


def _serve(folder: AttemptDir, attempt: Attempt, plan: Plan, node: WorkerNode, log: IO[str]) -> int:
    """Run the service of this node until the training has ended, and return 0."""
    interface, address = service_address(attempt)
    settings = TrainingSettings.read(folder.training)
    variables = node_environment(attempt, interface) | script_environment(folder, attempt, plan, settings)
    service = Service(folder, attempt, service_settings(folder), node.rank, log)
    return service.run(_inherited_environment() | variables, address)


def _run_ranks(
    folder: AttemptDir, attempt: Attempt, plan: Plan, node: WorkerNode, rendezvous: Rendezvous, log: IO[str]
) -> int:
    # The driver shows warnings of rank 0.
    warn = (lambda text: print(f"{RANK_0_WARNING}{text}", file=log, flush=True)) if node.rank == 0 else (lambda _: None)
    services = wait_for_services(folder, attempt, warn)
    if services is None:
        return 1
    command = launch_command(plan, folder.root, node.rank, rendezvous.address, rendezvous.port)
    variables = rank_environment(attempt, rendezvous) | services
    print(_heading(command, variables, rendezvous, attempt, node), file=log, flush=True)
    first = node.rank * attempt.processes_per_node
    ranks = range(first, first + attempt.processes_per_node)
    remove_local_files(folder, attempt)
    kernels = Path(variables["TORCH_EXTENSIONS_DIR"])
    for message in remove_stale_locks(kernels):
        print(message, file=log, flush=True)
    with temporary_folder("pipes", scratch_folder(attempt.scratch)) as pipes:
        recorder = {} if attempt.accelerator == "cpu" else recorder_variables(folder, pipes)
        beats = pipes / "heartbeat"
        environment = _inherited_environment() | recorder | variables | {HEARTBEATS_VARIABLE: str(beats)}
        if attempt.restart_in_place:
            adopt_orphans()
        gpus = GpuSampler(environment.get("CUDA_VISIBLE_DEVICES"))
        watchdog = Watchdog(folder, ranks, attempt.world_size, attempt.hang_seconds, beats, gpus.means)
        prepare = partial(READY.prepare, folder, attempt, environment) if is_used(folder, attempt) else None
        ready = READY.start(command, environment, attempt, folder.log(node.rank))
        process, output = start_program(command, environment, folder.log(node.rank), ready)
        if attempt.accelerator != "cpu":
            gpus.start()
        try:
            return _wait(process, watchdog, pipes, kernels, prepare)
        finally:
            gpus.ended.set()
            if attempt.restart_in_place and not end_descendants():
                claim_next(folder, NONE)
            output.wait()
            watchdog.publish()
            remove_local_files(folder, attempt)


def remove_local_files(folder: AttemptDir, attempt: Attempt) -> None:
    """Remove this run's node-local files, also those of an earlier worker that was killed."""
    remove_swap_files(read_json(folder.deepspeed, "shardmake train NAME"))
    if make_private(attempt.private):
        remove(attempt.saves)


def _wait(
    process: subprocess.Popen[bytes],
    watchdog: Watchdog,
    pipes: Path,
    kernels: Path,
    prepare: Callable[[Sequence[Heartbeat | None]], None] | None,
) -> int:
    """Wait for the launcher, and kill it if its ranks hang, other nodes failed, or a later attempt has started."""
    while True:
        try:
            return process.wait(min(WATCH_SECONDS, watchdog.hang_seconds / 5))
        except subprocess.TimeoutExpired:
            # A node that was disconnected must not write beside the next attempt, or beside a restart of its job.
            if watchdog.folder.is_superseded() or watchdog.is_abandoned():
                process.kill()
            elif watchdog.has_hung():
                watchdog.collect(pipes, kernels)
                process.kill()
            elif prepare:
                prepare(watchdog.local_beats())


def rank_environment(attempt: Attempt, rendezvous: Rendezvous) -> dict[str, str]:
    """Return the variables that the launcher and the ranks get in addition to the job's.

    Interfaces that the job's environment names stay, and the cluster file's variables replace all others.
    """
    variables = {
        "OMP_NUM_THREADS": str(max(1, attempt.cpus_per_node // attempt.processes_per_node)),
        "TOKENIZERS_PARALLELISM": "false",
        # The launcher must not handle the signals that request a save: it would kill the ranks after 30 s.
        "PET_SIGNALS_TO_HANDLE": "SIGINT",
    }
    if attempt.accelerator == "cpu":
        variables["DS_ACCELERATOR"] = "cpu"
    elif not _ALLOCATOR & {*os.environ, *attempt.environment}:
        # Segments that grow: freed memory of another size can be used again, so less than estimated stays reserved.
        variables["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    return variables | node_environment(attempt, rendezvous.interface)


def node_environment(attempt: Attempt, interface: str) -> dict[str, str]:
    """Return the variables of every program of the job, with ``interface`` for traffic between nodes."""
    variables = {
        "PYTHONUNBUFFERED": "1",
        **kernel_caches(attempt.scratch),
        # Without "=", NCCL matches prefixes.
        "NCCL_SOCKET_IFNAME": os.environ.get("NCCL_SOCKET_IFNAME") or f"={interface}",
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME") or interface,
    }
    if attempt.offline:
        variables |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    return variables | attempt.environment


def _inherited_environment() -> dict[str, str]:
    """Return the job's environment without the variables of an outer launcher, which would confuse this one.

    The programs of this Python's environment, such as ninja, come first in PATH, which a container's image sets.
    """
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER_VARIABLES)}
    return inherited | {"PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}"}


def _heading(
    command: list[str], variables: dict[str, str], rendezvous: Rendezvous, attempt: Attempt, node: WorkerNode
) -> str:
    """Return node, address and command for the top of the node's log, ready to be pasted into a shell."""
    exports = " ".join(f"{name}={shlex.quote(value)}" for name, value in sorted(variables.items()))
    return redact(
        f"# node {node.rank} of {attempt.nodes}: {host_name()}, MASTER_ADDR={rendezvous.address} "
        f"MASTER_PORT={rendezvous.port} WORLD_SIZE={attempt.world_size}\n"
        f"env {exports} \\\n  {shlex.join(command)}"
    )


def oom_kills(processes: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return how many processes in this job's cgroup the kernel killed for lack of memory; None if nothing counts."""
    kills = None
    for line in processes.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            if controller in _COUNTERS:
                folder, name = _COUNTERS[controller]
                file = mount / folder / path.lstrip("/") / name
                counts = re.findall(r"^oom_kill (\d+)$", file.read_text(), re.MULTILINE) if file.is_file() else []
                kills = sum(map(int, counts), kills or 0) if counts else kills
    return kills


def run_here(attempt_folder: Path, rank: int) -> int:
    """Run the worker as a process of this machine; that of the ranks starts the one of the service beside itself."""
    attempt = AttemptDir(attempt_folder).read()
    if rank or not attempt.service_nodes:
        return main(attempt_folder, WorkerNode(rank, start=0))
    command = [sys.executable, "-m", "shardmake.launch.worker", str(attempt_folder), str(attempt.nodes)]
    service = subprocess.Popen(command, preexec_fn=die_with_parent)
    try:
        return main(attempt_folder, WorkerNode(rank, start=0))
    finally:
        service.wait(OTHERS_SECONDS)


if __name__ == "__main__":
    sys.exit(run_here(Path(sys.argv[1]), int(sys.argv[2])))
