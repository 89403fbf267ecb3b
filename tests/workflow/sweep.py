"""SIGKILL a rank at every write of one save, resume, and compare the result with an uninterrupted training.

`Sweep.prepare` trains to step 2 and saves, resumes, saves at step 4 and lists the writes of one rank. For each of these
writes, `Sweep.survive` resumes from step 2, kills the rank there, recovers as the driver does, and trains to the end.
The save also removes the previous checkpoint, so the sweep covers that removal.
"""

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardmake.checkpoint import store
from shardmake.config.models import Strategy
from shardmake.run.paths import RunDir
from tests.kill_at_write import points
from tests.workflow.forked import Forked, branch, log

RANKS = 2
CASES: tuple[tuple[Strategy, int], ...] = (
    ("zero3", 0),
    ("zero3", 1),
    ("fsdp", 0),
    ("fsdp", 1),
    ("zero2", 0),
    ("zero2", 1),
)


@dataclass
class Sweep:
    """A sweep of one strategy and one killed rank."""

    forked: Forked
    root: Path
    strategy: Strategy
    victim: int
    points: list[tuple[int, str, str]] = field(default_factory=list)

    @property
    def planned(self) -> Any:
        return self.forked.plan(self.strategy, RANKS, checkpoints={"every_steps": 2, "keep": 1})

    def prepare(self) -> None:
        """Run the uninterrupted training, and list the writes at which to kill the rank."""
        started = RunDir(self.root / "started")
        assert self.forked.train(started, self.forked.plan(
            self.strategy, RANKS, checkpoints={"every_steps": 2, "keep": 2}
        )) == [0] * RANKS, log(started)  # fmt: skip
        store.remove(started.checkpoints / "checkpoint-4")
        started.train_receipt.unlink()
        complete = branch(started, self.root / "uninterrupted")
        recording = self._kill(complete, -1, "before")
        codes, _ = self.forked.resume(complete, self.planned, recording)
        assert codes == [0] * RANKS, log(complete)
        self.points = points(Path(recording["log"]))
        self.expected = _result(complete)

    def _kill(self, rundir: RunDir, at: int, mode: str) -> dict[str, Any]:
        folder, file = rundir.checkpoints, rundir.root / "writes.log"
        return {"rank": self.victim, "folder": str(folder), "log": str(file), "at": at, "mode": mode}

    def _writes(self, rundir: RunDir) -> int:
        """Return the number of writes that the rank reached; it killed itself only if the last one is the chosen one."""
        return len((rundir.root / "writes.log").read_text().splitlines())

    def survive(self, at: int, mode: str) -> dict[str, Any]:
        """Kill the rank at one write and resume; ``recovered`` is true if nothing was lost or changed."""
        rundir = branch(RunDir(self.root / "started"), self.root / f"at-{at}-{mode}")
        codes, _ = self.forked.resume(rundir, self.planned, self._kill(rundir, at, mode))
        left = sorted(path.name for path in rundir.checkpoints.glob("*checkpoint-*"))
        newest = store.recover(rundir.checkpoints)
        found: dict[str, Any] = {
            "killed": codes[self.victim] == -9 and self._writes(rundir) == at + 1, "left": left, "resumed_from": newest[0].step if newest else 0,
        }  # fmt: skip
        if newest and newest[0].step < 4:
            found["codes"], _ = self.forked.resume(rundir, self.planned)
        found["recovered"] = bool(found["killed"] and newest and _result(rundir) == self.expected)
        if found["recovered"]:
            shutil.rmtree(rundir.root)
        return found


def _result(rundir: RunDir) -> tuple[dict[int, float], dict[str, str]]:
    """Return the losses by step, and the checksums of the last checkpoint's states, for an exact comparison."""
    last = store.newest_valid(rundir.checkpoints)
    if last is None or last[0].step != 4:
        return {}, {}
    states = {name: entry.crc32 for name, entry in last[0].files.items() if name.endswith((".pt", ".pth", ".distcp"))}
    lines = [json.loads(line) for line in rundir.metrics.read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}, states
