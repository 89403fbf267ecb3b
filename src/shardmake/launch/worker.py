"""One worker per node: meet the others, check the node, start the ranks, watch them, answer signals, write the record.

Slurm starts it through submitit, the local executor as a process; both run `main`, so the two paths share everything
but the submission.
"""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO

from shardmake.core.atomic import read_json
from shardmake.core.disk import remove_swap_files
from shardmake.core.environment import kernel_caches
from shardmake.core.process import die_with_parent, wait_for_output
from shardmake.launch.cgroup import oom_kills
from shardmake.launch.preflight import PreflightError, check_node
from shardmake.launch.rendezvous import Rendezvous, RendezvousError, meet
from shardmake.launch.watchdog import Watchdog, flight_recorder
from shardmake.render.stage import launch_command
from shardmake.run.attempt import Attempt, AttemptDir, NodeExit, host_name
from shardmake.run.plan import Plan

WATCH_SECONDS = 5.0
OTHERS_SECONDS = 120.0
"""How long a node that failed waits for the records of others, which may collect stacks first."""
_IGNORED_BY_RANKS = (signal.SIGTERM, signal.SIGUSR2, signal.SIGHUP)


@dataclass(frozen=True)
class WorkerNode:
    """Which node of the job this is."""

    rank: int
    start: int

    @classmethod
    def from_slurm(cls) -> "WorkerNode":
        """One task per node, so the task's rank is the node's; the restart count tells requeues apart."""
        return cls(int(os.environ["SLURM_PROCID"]), int(os.environ.get("SLURM_RESTART_COUNT", "0")))


def name_of(rank: int) -> str | None:
    """Slurm's name of the node of that rank, which is its place in the step's list; None where Slurm does not tell."""
    command = ["scontrol", "show", "hostnames", os.environ.get("SLURM_STEP_NODELIST", "")]
    try:
        answer = wait_for_output(
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True), 10
        )
    except OSError:
        return None
    names = (answer or "").split()
    return names[rank] if rank < len(names) else None


class StopRequest:
    """Turns the first signal into the attempt's stop file; later ones are the same request."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.signal_name: str | None = None
        for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.signal_name is None:
            self.signal_name = signal.Signals(number).name
        self.file.touch()


def run_slurm_task(attempt_folder: str) -> int:
    """What submitit pickles: the worker of this Slurm task.

    Raises:
        SystemExit: this node failed and another left no record, so that srun ends the step; submitit drops a status.
    """
    status = main(Path(attempt_folder), WorkerNode.from_slurm())
    if status and not _others_told(AttemptDir(Path(attempt_folder))):
        sys.exit("Another node left no record: it may hang. The step ends.")
    return status


def _others_told(folder: AttemptDir) -> bool:
    """Whether every node leaves its record in time, or the job is told to end meanwhile.

    A node that is stuck would hold the job until its time limit.
    """
    nodes, give_up = folder.read().nodes, time.monotonic() + OTHERS_SECONDS
    while len(folder.exits()) < nodes and not folder.stop_file.exists():
        if time.monotonic() > give_up:
            return False
        time.sleep(1)
    return True


def main(attempt_folder: Path, node: WorkerNode) -> int:
    """Run the ranks of this node to their end; return the launcher's exit status."""
    folder = AttemptDir(attempt_folder)
    attempt = folder.read()
    stop = StopRequest(folder.stop_file)
    started, killed_before = time.time(), oom_kills()
    phase, returncode, message = "rendezvous", None, ""
    blamed: str | None = host_name()
    try:
        if node.start and node.rank == 0:
            set_aside(folder, node.start - 1)  # the other nodes wait for what `meet` publishes
        meeting = meet(
            folder.rendezvous,
            node.start,
            node.rank,
            attempt.nodes,
            attempt.network_interface,
            attempt.rendezvous_seconds,
        )
        phase, plan = "preflight", Plan.read(folder.plan)
        with folder.log(node.rank).open("a", buffering=1) as log:
            check_node(folder, attempt, plan, node.rank, lambda line: print(line, file=log))
            phase = "training"
            returncode = _run_ranks(folder, attempt, plan, node, meeting, log)
    except RendezvousError as error:
        message, blamed = str(error), host_name() if error.absent is None else name_of(error.absent)
    except PreflightError as error:
        phase, message = "run preflight" if error.blames_run else "preflight", str(error)
    except Exception:  # whatever it is, the driver must hear of it
        message = traceback.format_exc()
    record = NodeExit(
        node_rank=node.rank,
        host=host_name(),
        started=started,
        ended=time.time(),
        phase=phase,
        returncode=returncode,
        stop_signal=stop.signal_name,
        message=message,
        blamed=blamed,
        oom_kills=oom_kills() - killed_before,
    )
    try:
        record.write(folder.exit_record(node.rank))
    except OSError as error:  # a full disk; the step's output is the driver's last resort
        print(f"The exit record cannot be written ({error}): {record.model_dump_json()}", flush=True)
    return 1 if returncode is None else returncode


def set_aside(folder: AttemptDir, start: int) -> None:
    """Move what an earlier ``start`` of the job told into ``start-START``: Slurm requeued it, and all begins anew."""
    aside = folder.root / f"start-{start}"
    aside.mkdir(exist_ok=True)
    told = [folder.errors, folder.hang, folder.hung, folder.stacks, folder.stopped, folder.stop_file]
    for path in [*told, folder.heartbeat(0).parent, *folder.root.glob("node-*.json")]:
        if path.exists():
            path.replace(aside / path.name)


def _run_ranks(
    folder: AttemptDir, attempt: Attempt, plan: Plan, node: WorkerNode, meeting: Rendezvous, log: IO[str]
) -> int:
    command = launch_command(plan, folder.root, node.rank, meeting.address, meeting.port)
    variables = rank_environment(attempt, meeting)
    _write_heading(log, command, variables, meeting, attempt, node)
    watch = _watch(folder, attempt, node)
    _remove_local_files(folder, attempt)
    with tempfile.TemporaryDirectory(prefix="shardmake-", dir=attempt.scratch) as pipes:
        recorder = {} if attempt.accelerator == "cpu" else flight_recorder(folder, Path(pipes))
        process = subprocess.Popen(
            command,
            env=_inherited_environment() | variables | recorder,
            stdout=log,
            stderr=subprocess.STDOUT,
            preexec_fn=_leave_signals_to_worker,
        )
        try:
            return _wait(process, watch, Path(pipes))
        finally:
            _remove_local_files(folder, attempt)


def _remove_local_files(folder: AttemptDir, attempt: Attempt) -> None:
    """What this run's ranks leave on the node; a worker that is killed leaves it to the next one."""
    remove_swap_files(read_json(folder.deepspeed, "shardmake train NAME"))
    shutil.rmtree(attempt.saves, ignore_errors=True)


def _watch(folder: AttemptDir, attempt: Attempt, node: WorkerNode) -> Watchdog:
    first = node.rank * attempt.processes_per_node
    ranks = range(first, first + attempt.processes_per_node)
    return Watchdog(folder, ranks, attempt.world_size, attempt.hang_seconds)


def _wait(process: subprocess.Popen[bytes], watch: Watchdog, pipes: Path) -> int:
    """Wait for the launcher's end; bring it about if its ranks hang, others failed, or a later attempt has begun."""
    while True:
        try:
            return process.wait(min(WATCH_SECONDS, watch.hang_seconds / 5))
        except subprocess.TimeoutExpired:
            # A node that was cut off and given up must not write beside the next attempt.
            if watch.folder.is_superseded() or watch.is_abandoned():
                process.kill()
            elif watch.has_hung():
                watch.collect(pipes)
                process.kill()


def rank_environment(attempt: Attempt, meeting: Rendezvous) -> dict[str, str]:
    """What the launcher and the ranks find in their environment beyond what the job has."""
    variables = {
        "OMP_NUM_THREADS": str(max(1, attempt.cpus_per_node // attempt.processes_per_node)),
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **kernel_caches(attempt.scratch),
        # The launcher must not answer the signals that mean "save now": it would end the ranks after 30 s.
        "PET_SIGNALS_TO_HANDLE": "SIGINT",
        "NCCL_SOCKET_IFNAME": f"={meeting.interface}",  # else NCCL takes any whose name begins so
        "GLOO_SOCKET_IFNAME": meeting.interface,
    }
    if attempt.accelerator == "cpu":
        variables["DS_ACCELERATOR"] = "cpu"
    if attempt.offline:
        variables |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    return variables


def _inherited_environment() -> dict[str, str]:
    """The job's environment without what an outer launcher may have left: it would mislead this one."""
    misleading = ("MASTER_", "RANK", "LOCAL_RANK", "WORLD_SIZE", "ACCELERATE_", "TORCHELASTIC_", "PET_")
    return {name: value for name, value in os.environ.items() if not name.startswith(misleading)}


def _leave_signals_to_worker() -> None:
    """Run in the child before exec: ignored signals stay ignored, and it ends when the worker is killed."""
    for number in _IGNORED_BY_RANKS:
        signal.signal(number, signal.SIG_IGN)
    die_with_parent()


def _write_heading(
    log: IO[str], command: list[str], variables: dict[str, str], meeting: Rendezvous, attempt: Attempt, node: WorkerNode
) -> None:
    """What was started where, at the top of the node's log; the lines can be pasted into a shell."""
    exports = " ".join(f"{name}={shlex.quote(value)}" for name, value in sorted(variables.items()))
    print(
        f"# node {node.rank} of {attempt.nodes}: {host_name()}, MASTER_ADDR={meeting.address} "
        f"MASTER_PORT={meeting.port} WORLD_SIZE={attempt.world_size}\n"
        f"env {exports} \\\n  {shlex.join(command)}",
        file=log,
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), WorkerNode(rank=int(sys.argv[2]), start=0)))
