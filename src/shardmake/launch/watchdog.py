"""A hang: find it from the ranks' heartbeats, collect what every rank is doing, and say which one held up the others.

In a training that hangs, one rank is stuck and all others wait for it, for as long as their libraries let them. Each
node's worker reads the heartbeats of its own ranks; the first that misses one creates the attempt's ``HUNG`` file, and
then the workers of all nodes collect the stacks of their ranks and end them, so that the run can be resumed.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from shardmake.core.atomic import write_json
from shardmake.core.process import wait_for_output
from shardmake.run.attempt import USER_SCRIPT_PHASE, AttemptDir, Hang, Heartbeat
from shardmake.run.timeouts import PATIENCE

MEDIAN_STEPS = 5
STACK_SIGNAL = signal.SIGUSR1
ABANDONED_SECONDS = 15.0
PAUSE_SECONDS = 20.0
"""The worker looks every few seconds. A gap this long is a pause that its ranks most likely shared: a suspended job, a
file system that did not answer, or a clock that was set."""
_ANSWER_SECONDS = 10.0
_OTHER_NODES_SECONDS = 20.0
_IN_COLLECTIVE = re.compile(r"torch/distributed/|deepspeed/comm/|deepspeed/runtime/zero/|_engine_run_backward")


@dataclass(frozen=True)
class RankState:
    """What is known of a rank at a hang."""

    beat: Heartbeat
    stack: str
    """Text of its Python stacks; empty if it did not answer."""
    process: str = ""
    """State of its process, as `psutil` names it (running, sleeping, stopped, disk-sleep); gone if there is none."""


def allowance(beat: Heartbeat, hang_seconds: float) -> float:
    """Seconds for which a rank may be silent after ``beat``."""
    if beat.phase == USER_SCRIPT_PHASE:
        return float("inf")
    if beat.phase != "train":
        return PATIENCE * hang_seconds
    return max(MEDIAN_STEPS * beat.median_step_seconds, hang_seconds)


def overdue(beats: Sequence[Heartbeat], now: float, hang_seconds: float, awake_since: float = 0.0) -> Heartbeat | None:
    """The heartbeat that has been overdue for longest at Unix time ``now``, if one is.

    No rank's silence counts from before ``awake_since``, the end of the last pause.
    """
    late = [beat for beat in beats if now - max(beat.time, awake_since) > allowance(beat, hang_seconds)]
    return min(late, key=lambda beat: beat.time, default=None)


def find_culprit(ranks: Sequence[RankState]) -> RankState | None:
    """The rank that holds up the others: the only one that does not answer, is behind, or waits for nobody."""
    last_step = max(rank.beat.step for rank in ranks)
    for odd_ones in (
        [rank for rank in ranks if not rank.stack],
        [rank for rank in ranks if rank.beat.step < last_step],
        [rank for rank in ranks if not _IN_COLLECTIVE.search(rank.stack)],
    ):
        if len(odd_ones) == 1:
            return odd_ones[0]
    return None


def describe_hang(missed: Heartbeat, ranks: Sequence[RankState], now: float) -> Hang:
    """What to tell of a hang that ``missed`` gave away."""
    where = f"No progress for {now - missed.time:.0f} s in phase '{missed.phase}' after step {missed.step}"
    odd = find_culprit(ranks)
    if odd is None:
        return Hang(rank=None, host=None, sentence=f"{where}; no rank stands out among the stacks.")
    reason = "waits for nobody" if odd.stack else f"does not answer (its process is {odd.process or 'out of reach'})"
    return Hang(
        rank=odd.beat.rank,
        host=odd.beat.host,
        sentence=f"{where}: rank {odd.beat.rank} on {odd.beat.host} {reason}, the others wait for it.",
    )


class Watchdog:
    """Watches the heartbeats of one node's ranks."""

    def __init__(self, folder: AttemptDir, local_ranks: range, world_size: int, hang_seconds: float) -> None:
        self.folder = folder
        self.local_ranks = local_ranks
        self.world_size = world_size
        self.hang_seconds = hang_seconds
        self.started = self.awake_since = time.time()
        self.looked = _clocks()
        self.missed: Heartbeat | None = None
        self.abandoned_since: float | None = None

    def has_hung(self) -> bool:
        """Whether this node's ranks hang, or another node found that its own do."""
        if self.folder.hung.exists():
            return True
        self._notice_pause()
        beats = [self._beat(rank) for rank in self.local_ranks]
        missed = overdue(beats, time.time(), self.hang_seconds, self.awake_since)
        if missed is None:
            return False
        if not self._can_beat():
            self.awake_since = time.time()
            return False
        with contextlib.suppress(FileExistsError):
            self.folder.hung.touch(exist_ok=False)
            self.missed = missed
        return True

    def _notice_pause(self) -> None:
        before, self.looked = self.looked, _clocks()
        if any(now - then > PAUSE_SECONDS for then, now in zip(before, self.looked, strict=True)):
            self.awake_since = time.time()

    def _can_beat(self) -> bool:
        """Whether the file system takes heartbeats; one that others have filled does not, and training goes on."""
        probe = self.folder.heartbeat(self.local_ranks.start).with_name(f".probe-{self.local_ranks.start}.tmp")
        try:
            probe.parent.mkdir(exist_ok=True)
            probe.write_bytes(bytes(4096))
        except OSError:
            return False
        finally:
            probe.unlink(missing_ok=True)
        return True

    def is_abandoned(self) -> bool:
        """Whether the ranks of another node failed a while ago; these here may wait for them for half an hour."""
        if self.abandoned_since is None and any(node.returncode != 0 for node in self.folder.exits()):
            self.abandoned_since = time.monotonic()
        return self.abandoned_since is not None and time.monotonic() - self.abandoned_since > ABANDONED_SECONDS

    def _beat(self, rank: int) -> Heartbeat:
        """The last heartbeat of a rank; the start of the watch for one that never came to life."""
        silent = Heartbeat(rank=rank, host=os.uname().nodename, pid=0, phase="start", step=0, time=self.started)
        return self.folder.beat(rank) or silent

    def collect(self, pipes: Path) -> None:
        """Write this node's stacks, wait for those of the others, and on the node that found the hang tell of it.

        ``pipes`` is the folder of `flight_recorder`.
        """
        beats = [self._beat(rank) for rank in self.local_ranks]
        states = {beat.rank: _process_state(beat.pid) for beat in beats}
        for beat in beats:
            _ask_for_stack(self.folder, beat, pipes)
        _await(lambda: all(self._has_stack(rank) for rank in self.local_ranks), _ANSWER_SECONDS)
        for rank in self.local_ranks:
            _flush(self.folder.stack(rank))
        write_json(self.folder.stacks / f"states-from-{self.local_ranks.start}.json", states)
        if self.missed is None:
            _await(self.folder.hang.exists, _OTHER_NODES_SECONDS)
            return
        nodes = self.world_size // len(self.local_ranks)
        _await(lambda: len(self._told()) + len(self.folder.exits()) >= nodes, _OTHER_NODES_SECONDS)
        ranks = [self._state(rank) for rank in range(self.world_size)]
        describe_hang(self.missed, ranks, time.time()).write(self.folder.hang)

    def _has_stack(self, rank: int) -> bool:
        path = self.folder.stack(rank)
        return path.exists() and path.stat().st_size > 0

    def _states(self) -> dict[int, str]:
        """State of every rank's process, as far as their nodes have told."""
        told = [json.loads(path.read_text()) for path in self._told()]
        return {int(rank): state for states in told for rank, state in states.items()}

    def _told(self) -> list[Path]:
        """What each node wrote of its processes."""
        return list(self.folder.stacks.glob("states-from-*.json"))

    def _state(self, rank: int) -> RankState:
        stack = self.folder.stack(rank).read_text() if self._has_stack(rank) else ""
        return RankState(self._beat(rank), stack, self._states().get(rank, ""))


def _clocks() -> tuple[float, float]:
    """Seconds by the clock that may be set, and by the one that may not."""
    return time.time(), time.monotonic()


def _await(condition: Callable[[], bool], seconds: float) -> None:
    """Wait for ``condition``, no longer than ``seconds``."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.1)


def _process_state(pid: int) -> str:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() if pid else "gone"
    return "gone"


def _ask_for_stack(folder: AttemptDir, beat: Heartbeat, pipes: Path) -> None:
    """Have `faulthandler` write the rank's Python stacks, py-spy its own view of them, NCCL its flight recorder."""
    folder.stacks.mkdir(exist_ok=True)
    if not beat.pid:
        return
    with contextlib.suppress(ProcessLookupError):
        os.kill(beat.pid, STACK_SIGNAL)
    _spy(beat.pid, folder.stacks / f"rank-{beat.rank}.py-spy.txt")
    _dump_flight_recorder(pipes / f"rank-{beat.rank}.pipe")


def _flush(path: Path) -> None:
    """Let other nodes see what ``path`` holds: its rank keeps it open, so that NFS may have it on this node alone."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDWR)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _spy(pid: int, target: Path) -> None:
    program = shutil.which("py-spy", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
    if program is None:
        return
    with target.open("w") as file:
        command = [program, "dump", "--nonblocking", "--pid", str(pid)]
        wait_for_output(subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, text=True), _ANSWER_SECONDS)


def flight_recorder(folder: AttemptDir, pipes: Path) -> dict[str, str]:
    """Environment variables under which NCCL records its last collectives and writes them when asked to.

    The dumps go to the attempt's folder. Rank R is asked through ``rank-R.pipe`` in ``pipes``, a folder on the node.
    """
    return {
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": str(folder.stacks / "nccl-rank-"),
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": str(pipes / "rank-"),
    }


def _dump_flight_recorder(pipe: Path) -> None:
    with contextlib.suppress(OSError):  # no such pipe without NCCL, nobody at its other end if the rank is gone
        descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        os.write(descriptor, b"1")
        os.close(descriptor)
