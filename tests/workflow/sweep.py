"""SIGKILL a rank at every write of one save, resume, and compare the result with an uninterrupted training.

`Sweep.prepare` trains to step 2 and saves, resumes, saves at step 4 and lists the writes of one rank. For each of these
writes, `Sweep.survive` resumes from step 2, kills the rank there, recovers as the driver does, and trains to the end.
The save also removes the previous checkpoint, so the sweep covers that removal.

On two nodes of one rank each, every rank writes to a folder of its node. The sweep then also kills the rank while files
move into the checkpoint, while listings are written and merged, and while a node validates its share before a resume.
"""

import itertools
import os
import shutil
import signal
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardmake.checkpoint import store
from shardmake.config.models import Strategy
from shardmake.launch.resume_validation import validate_share
from shardmake.run.attempt import AttemptDir
from shardmake.run.paths import RunDir
from tests.kill_at_write import points, status_of
from tests.workflow.forked import Forked, Planned, branch, log, result

RANKS = 2
Point = tuple[int, str, str]
"""Number, mode and line of a write, or of a file that a node opens in its validation (mode "read")."""
CASES = tuple(itertools.product(("zero3", "fsdp", "zero2"), (0, 1), (1, 2)))
"""Strategy, killed rank, and number of nodes."""


@dataclass
class Sweep:
    """A sweep of one strategy and one killed rank."""

    forked: Forked
    root: Path
    strategy: Strategy
    victim: int
    nodes: int = 1
    points: list[Point] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of the run beside those of its checkpoints."""

    def _plan(self, keep: int = 1) -> Planned:
        settings = self.settings | {"checkpoints": {"every_steps": 2, "keep": keep}}
        return self.forked.plan(self.strategy, RANKS, **settings)

    @property
    def variables(self) -> dict[str, str]:
        return {"LOCAL_WORLD_SIZE": str(RANKS // self.nodes)}

    def prepare(self) -> None:
        """Run the uninterrupted training, and list the points at which to kill the rank."""
        started = RunDir(self.root / "started")
        assert self.forked.train(started, self._plan(keep=2), variables=self.variables) == [0] * RANKS, log(started)
        store.remove(started.checkpoints / "checkpoint-4")
        started.train_receipt.unlink()
        complete = branch(started, self.root / "uninterrupted")
        recording = self._kill(complete, -1, "before")
        codes, _ = self.forked.resume(complete, self._plan(), kill=recording, variables=self.variables)
        assert codes == [0] * RANKS, log(complete)
        self.points = points(Path(recording["log"]))
        if self.nodes > 1:
            self.points = [*self._of_several_nodes(), *self._reads(started)]
        self.expected = result(complete)

    def _of_several_nodes(self) -> list[Point]:
        """Return the writes that differ from those on one node: all of node 1, and node 0's from the merge on."""
        if self.victim:
            return self.points
        lines = [line for _, _, line in self.points]
        merge = lines.index("os.remove /.saving/002/node-1.json")
        return self.points[merge : lines.index("os.rename /.saving/002/checkpoint-4") + 1]

    def _reads(self, started: RunDir) -> list[Point]:
        """Return the first and the last file that the victim's node opens in its validation."""
        file = self.root / "reads.log"
        assert self._validate(started, file, -1) == 0
        reads = [(at, "read", line) for at, line in enumerate(file.read_text().splitlines())]
        return [reads[0], reads[-1]]

    def _validate(self, rundir: RunDir, file: Path, at: int) -> int:
        """Validate the share of the victim's node in a process that is killed at its read ``at``; return its status."""

        def validate() -> None:
            checkpoint = rundir.checkpoints / "checkpoint-2"
            attempt = AttemptDir(max(rundir.attempts.iterdir())).read()
            attempt = attempt.model_copy(update={"resume_from": str(checkpoint), "nodes": self.nodes})
            _kill_at_read(checkpoint, file, at)
            validate_share(attempt, self.victim, lambda _: None)

        return status_of(validate)

    def _kill(self, rundir: RunDir, at: int, mode: str) -> dict[str, Any]:
        folder, file = rundir.checkpoints, rundir.root / "writes.log"
        return {"rank": self.victim, "folder": str(folder), "log": str(file), "at": at, "mode": mode}

    def _end_at(self, rundir: RunDir, at: int, mode: str) -> bool:
        """Resume and kill the rank, or its node's validation, at the point; return if it was killed just there."""
        file = rundir.root / "writes.log"
        if mode == "read":
            status = self._validate(rundir, file, at)
        else:
            kill = self._kill(rundir, at, mode)
            codes, _ = self.forked.resume(rundir, self._plan(), kill=kill, variables=self.variables)
            status = codes[self.victim]
        return status == -signal.SIGKILL and len(file.read_text().splitlines()) == at + 1

    def chosen(self) -> list[tuple[int, str]]:
        """Return half a file of states, and the rename that commits the checkpoint, if rank 0 is killed."""
        halves = [(at, mode) for at, mode, what in self.points if mode == "half" and "shardmake.json" not in what]
        moved = [(at, mode) for at, mode, what in self.points if what == "os.rename /.saving/002/checkpoint-4"]
        return [halves[len(halves) // 2], *moved]

    def assert_recovers(self, chosen: list[tuple[int, str]]) -> None:
        """Kill the rank at each of the points, which must lose nothing."""
        lost = {point: found for point in chosen if not (found := self.survive(*point))["recovered"]}
        assert chosen and not lost

    def survive(self, at: int, mode: str) -> dict[str, Any]:
        """Kill the rank at one point and resume; ``recovered`` is true if nothing was lost or changed."""
        rundir = branch(RunDir(self.root / "started"), self.root / f"at-{at}-{mode}")
        found: dict[str, Any] = {"killed": self._end_at(rundir, at, mode)}
        found["left"] = sorted(path.name for path in rundir.checkpoints.glob("*checkpoint-*"))
        newest = store.recover(rundir.checkpoints)
        found["resumed_from"] = newest[0].step if newest else 0
        if newest and newest[0].step < 4:
            found["codes"], _ = self.forked.resume(rundir, self._plan(), variables=self.variables)
        found["recovered"] = bool(found["killed"] and newest and result(rundir) == self.expected)
        if found["recovered"]:
            shutil.rmtree(rundir.root)
        return found


def _kill_at_read(folder: Path, file: Path, at: int) -> None:
    """Log the files below ``folder`` that this process opens, and kill it when it opens number ``at``."""
    lines = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    seen, lock = -1, threading.Lock()  # several threads read

    def on_audit_event(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        if event != "open" or isinstance(arguments[0], int) or not os.fsdecode(arguments[0]).startswith(str(folder)):
            return
        with lock:
            seen += 1
            os.write(lines, f"read {os.fsdecode(arguments[0]).removeprefix(str(folder))}\n".encode())
            if seen == at:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(on_audit_event)
