"""Detect a hang from the ranks' heartbeats, collect the stacks of all ranks, and find the rank that caused it.

In a training that hangs, one rank is stuck and all others wait for it until their libraries time out. Each node's
worker reads the heartbeats of its own ranks on the node, and copies them to one shared file now and then. The first
worker that misses one creates the attempt's ``HUNG`` file. The workers of all nodes then collect the stacks of their
ranks and end them, so that the run can be resumed.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence, Set
from functools import partial
from pathlib import Path

import psutil

from shardmake.core.build_locks import build_locks
from shardmake.core.process import wait_for_output, wait_until
from shardmake.core.run_folder import make_folder, open_file, read_bytes, unlink
from shardmake.core.units import numbered
from shardmake.launch.flight_recorder import ANALYSIS_SECONDS, analyse_dumps, is_dumped, request_dump
from shardmake.run.attempt import (
    PATIENCE,
    USER_SCRIPT_PHASE,
    AttemptDir,
    GpuUse,
    Hang,
    Heartbeat,
    NodeHeartbeats,
    NodeStates,
    RankState,
    heartbeat_file,
    host_name,
    replace_unsynced,
)

MEDIAN_STEPS = 5
STACK_SIGNAL = signal.SIGUSR1
ABANDONED_SECONDS = 15.0
PAUSE_SECONDS = 20.0
"""The worker checks every few seconds. Its ranks most likely shared a gap this long: a suspended job, a file system
that did not answer, or a changed clock."""
_ANSWER_SECONDS = 10.0
_DUMP_SECONDS = 15.0
"""torch allows itself as long for a dump of the flight recorder, whose stacks need their symbols."""
_OTHER_NODES_SECONDS = 30.0
_PUBLISHED_PER_SECOND = 10
"""Copies of heartbeats that all nodes together write, unless that makes them older than `_OLDEST_COPY`."""
_OLDEST_COPY = 30.0
_BUILD_LOCK = "torch/utils/file_baton.py"
_IN_COLLECTIVE = re.compile(r"torch/distributed/|deepspeed/comm/|deepspeed/runtime/zero/|_engine_run_backward")


def rank_state(beat: Heartbeat, stack: str, process: str = "") -> RankState:
    """Return the state of a rank at a hang from the text of its Python stacks; empty if it did not answer."""
    return RankState(
        rank=beat.rank,
        host=beat.host,
        step=beat.step,
        process=process,
        answered=bool(stack),
        in_collective=bool(_IN_COLLECTIVE.search(stack)),
        builds=_BUILD_LOCK in stack,
    )


def allowance(beat: Heartbeat, hang_seconds: float) -> float:
    """Return the seconds that may pass after ``beat`` before the next heartbeat."""
    if beat.phase == USER_SCRIPT_PHASE:
        return float("inf")
    if beat.phase != "train":
        return PATIENCE * hang_seconds
    return max(MEDIAN_STEPS * beat.median_step_seconds, hang_seconds)


def overdue(beats: Sequence[Heartbeat], now: float, hang_seconds: float, awake_since: float = 0.0) -> Heartbeat | None:
    """Return the heartbeat that has been overdue for longest at Unix time ``now``, if any.

    Time before ``awake_since``, the end of the last pause, does not count.
    """
    late = [beat for beat in beats if now - max(beat.time, awake_since) > allowance(beat, hang_seconds)]
    return min(late, key=lambda beat: beat.time, default=None)


def find_culprit(ranks: Sequence[RankState], missing: Set[int] = frozenset()) -> RankState | None:
    """Return the only rank that does not answer, is behind, or is outside a collective; None if several are.

    ``missing`` are the ranks that did not join a collective, as NCCL recorded it. NCCL's calls return at once, and a
    rank that waits may be at any later line. Without a record only the stacks show which ranks are in a collective.
    """
    last_step = max(rank.step for rank in ranks)
    for odd_ones in (
        [rank for rank in ranks if not rank.answered],
        [rank for rank in ranks if rank.step < last_step],
        [rank for rank in ranks if rank.rank in missing],
        [rank for rank in ranks if not rank.in_collective and (rank.rank in missing or not missing)],
    ):
        if len(odd_ones) == 1:
            return odd_ones[0]
    return None


def describe_hang(missed: Heartbeat, ranks: Sequence[RankState], now: float, missing: Set[int] = frozenset()) -> Hang:
    """Describe a hang that the heartbeat ``missed`` revealed; ``missing`` are those of `find_culprit`."""
    where = f"No progress for {now - missed.time:.0f} s in phase '{missed.phase}' after step {missed.step}"
    culprit = find_culprit(ranks, missing)
    if culprit is None:
        return Hang(rank=None, host=None, message=f"{where}. The stacks do not show which rank caused it.")
    state = f"does not answer (its process is {culprit.process or 'unreachable'})"
    reason = "is not in the collective that the others are in" if culprit.answered else state
    host = culprit.host or "a node that is not known"
    return Hang(
        rank=culprit.rank,
        host=culprit.host or None,
        message=f"{where}: rank {culprit.rank} on {host} {reason}; the others wait for it.",
    )


def describe_build_locks(ranks: Sequence[RankState], locks: Sequence[str]) -> str:
    """Return a sentence about ranks that wait for the build of a kernel by another process; empty without any."""
    waiting = [rank.rank for rank in ranks if rank.builds]
    if not waiting or not locks:
        return ""
    wait = "waits" if len(waiting) == 1 else "wait"
    return (
        f" {numbered('Rank', waiting)} {wait} for the lock of a kernel's build: {', '.join(locks)}. The next attempt "
        "deletes it if its owner has ended."
    )


class Watchdog:
    """Watches the heartbeats of one node's ranks, which are in the node-local folder ``beats``."""

    def __init__(
        self,
        folder: AttemptDir,
        local_ranks: range,
        world_size: int,
        hang_seconds: float,
        beats: Path,
        gpu_use: Callable[[], list[GpuUse]] = list,
    ) -> None:
        self.folder = folder
        self.beats = beats
        self.gpu_use = gpu_use
        self.nodes = world_size // len(local_ranks)
        self.node_rank = local_ranks.start // len(local_ranks)
        self.published = float("-inf")
        self.local_ranks = local_ranks
        self.world_size = world_size
        self.hang_seconds = hang_seconds
        self.started = self.awake_since = time.time()
        self.checked_at = _clocks()
        self.missed: Heartbeat | None = None
        self.abandoned_since: float | None = None

    def has_hung(self) -> bool:
        """Return whether this node's ranks hang, or another node has detected a hang."""
        if self.folder.hung.exists():
            return True
        self._detect_pause()
        if time.monotonic() - self.published >= min(self.nodes / _PUBLISHED_PER_SECOND, _OLDEST_COPY):
            self.publish()
        beats = [self._beat(rank) for rank in self.local_ranks]
        missed = overdue(beats, time.time(), self.hang_seconds, self.awake_since)
        if missed is None:
            return False
        if not self._can_write():
            self.awake_since = time.time()
            return False
        with contextlib.suppress(FileExistsError):
            open_file(self.folder.hung, "x").close()
            self.missed = missed
        return True

    def publish(self) -> None:
        """Copy the heartbeats of this node's ranks to the shared folder, for `status` and for other nodes."""
        self.published = time.monotonic()
        copied = NodeHeartbeats(beats=[beat for beat in self.local_beats() if beat], gpus=self.gpu_use())
        with contextlib.suppress(OSError):  # on a full file system training continues without them
            replace_unsynced(self.folder.node_heartbeats(self.node_rank), copied)

    def local_beats(self) -> list[Heartbeat | None]:
        """Return the last heartbeat of each of this node's ranks; None before its first."""
        return [Heartbeat.read_if_exists(heartbeat_file(self.beats, rank)) for rank in self.local_ranks]

    def _detect_pause(self) -> None:
        before, self.checked_at = self.checked_at, _clocks()
        if any(now - then > PAUSE_SECONDS for then, now in zip(before, self.checked_at, strict=True)):
            self.awake_since = time.time()

    def _can_write(self) -> bool:
        """Return whether heartbeats can be written: on a full file system training continues without them."""
        probe = self.beats / f".probe-{self.local_ranks.start}.tmp"
        try:
            make_folder(probe.parent)
            with open_file(probe, "wb") as file:
                file.write(bytes(4096))
        except OSError:
            return False
        finally:
            unlink(probe)
        return True

    def is_abandoned(self) -> bool:
        """Return whether the ranks of another node failed a while ago; otherwise these may wait half an hour."""
        if self.abandoned_since is None and self.folder.has_failed_node():
            self.abandoned_since = time.monotonic()
        return self.abandoned_since is not None and time.monotonic() - self.abandoned_since > ABANDONED_SECONDS

    def _beat(self, rank: int) -> Heartbeat:
        """Return the last heartbeat of a rank, or the start of the watchdog for a rank without one."""
        start = Heartbeat(rank=rank, host=host_name(), pid=0, phase="start", step=0, time=self.started)
        return Heartbeat.read_if_exists(heartbeat_file(self.beats, rank)) or start

    def collect(self, pipes: Path, kernels: Path) -> None:
        """Write this node's stacks, and, on the node that detected the hang, the `Hang` of all nodes.

        ``pipes`` is the folder of `recorder_variables`, ``kernels`` the folder in which torch builds kernels.
        """
        beats = [self._beat(rank) for rank in self.local_ranks]
        processes = [_process_state(beat.pid) for beat in beats]
        make_folder(self.folder.stacks, parents=False)
        for beat in beats:
            _dump_stacks(self.folder, beat)
        recorded = [beat.rank for beat in beats if beat.pid and request_dump(self.folder, pipes, beat.rank)]
        wait_until(lambda: all(self._read_stack(rank) for rank in self.local_ranks), _ANSWER_SECONDS)
        wait_until(lambda: all(is_dumped(self.folder, rank) for rank in recorded), _DUMP_SECONDS)
        for rank in self.local_ranks:
            _flush(self.folder.stack(rank))
        pairs = zip(beats, processes, strict=True)
        states = [rank_state(beat, self._read_stack(beat.rank), process) for beat, process in pairs]
        locks = [str(lock) for lock in build_locks(kernels)] if any(state.builds for state in states) else []
        NodeStates(ranks=states, build_locks=locks).write(self._states_file(self.node_rank))
        if self.missed is None:
            # Slurm ends all workers soon after the first one that ends.
            wait_until(self.folder.hang.exists, _OTHER_NODES_SECONDS + ANALYSIS_SECONDS)
            return
        written = partial(self.folder.stacks.glob, "node-*.json")
        wait_until(lambda: len([*written()]) + self.folder.count_exits() >= self.nodes, _OTHER_NODES_SECONDS)
        found = [self._read_states(node) for node in range(self.nodes)]
        ranks = [rank for node in found for rank in node.ranks]
        recorded_hang = analyse_dumps(self.folder)
        hang = describe_hang(self.missed, ranks, time.time(), recorded_hang.missing)
        locks_message = describe_build_locks(ranks, sorted({lock for node in found for lock in node.build_locks}))
        sentences = [hang.message + locks_message, recorded_hang.message]
        hang.model_copy(update={"message": " ".join(filter(None, sentences))}).write(self.folder.hang)

    def _read_stack(self, rank: int) -> str:
        """Return a rank's stacks; empty if the rank did not answer."""
        path = self.folder.stack(rank)
        return read_bytes(path).decode(errors="replace") if path.exists() else ""

    def _states_file(self, node_rank: int) -> Path:
        return self.folder.stacks / f"node-{node_rank}.json"

    def _read_states(self, node_rank: int) -> NodeStates:
        """Return the states of a node's ranks; from its last copy of heartbeats if its worker wrote none."""
        if found := NodeStates.read_if_exists(self._states_file(node_rank)):
            return found
        size = len(self.local_ranks)
        beats = {beat.rank: beat for beat in self.folder.node_beats(node_rank)}
        ranks = range(node_rank * size, (node_rank + 1) * size)
        unknown = [RankState(rank=rank, host="", step=0) for rank in ranks if rank not in beats]
        return NodeStates(ranks=[*(rank_state(beat, "") for beat in beats.values()), *unknown])


def _clocks() -> tuple[float, float]:
    """Return the wall clock, which may be changed, and the monotonic clock."""
    return time.time(), time.monotonic()


def _process_state(pid: int) -> str:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() if pid else "gone"
    return "gone"


def _dump_stacks(folder: AttemptDir, beat: Heartbeat) -> None:
    """Write the rank's Python stacks with `faulthandler` and py-spy."""
    if not beat.pid:
        return
    with contextlib.suppress(ProcessLookupError):
        os.kill(beat.pid, STACK_SIGNAL)
    _run_py_spy(beat.pid, folder.stacks / f"rank-{beat.rank}.py-spy.txt")


def _flush(path: Path) -> None:
    """Sync ``path``, which its rank keeps open, so that other nodes see its content over NFS."""
    with contextlib.suppress(OSError), open_file(path, "r+") as file:
        os.fsync(file.fileno())


def _run_py_spy(pid: int, target: Path) -> None:
    program = shutil.which("py-spy", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
    if program is None:
        return
    with open_file(target, "w") as file:
        command = [program, "dump", "--nonblocking", "--pid", str(pid)]
        wait_for_output(subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, text=True), _ANSWER_SECONDS)
