"""Snakemake's messages about a stage that a person stopped or a signal ended: without the words for a failure.

Snakemake knows only jobs that succeeded and jobs that failed. A training that saved and stopped must not count as done,
so its job fails with an exit status of its own. So does a driver that a signal ended while the training's job
continues, and every other stage after Ctrl-C. This filter removes the report of that failure.

After a real failure, Snakemake's last line sends the reader back up through its own report. The filter adds what the
stage itself said.
"""

import contextlib
import logging
import re
import shlex
import signal
import sys
from pathlib import Path

import psutil

from shardmake.commands.stage_logs import last_message
from shardmake.config.effects import STAGES
from shardmake.core.errors import STOPPED, ShardmakeError
from shardmake.run.attempt_history import BY_PERSON, load_history
from shardmake.run.paths import RUNS, RunDir

_COMMAND = re.compile(rf"\bshardmake ({'|'.join(STAGES)}|compare --sweep) (\S+)")
_STATUS = re.compile(r"returned non-zero exit status (\d+)\.")
_SIGNALLED = (128 + signal.SIGINT, 128 + signal.SIGTERM)
"""Exit statuses of a stage, also of a driver that waits in low memory, after a signal."""
_HINTS = ("Exiting because a job execution failed", "Shutting down, this might take some time")
_CTRL_C = "Terminating processes on user request"
_END = "At least one job did not complete successfully"
_LOCKED = "Directory cannot be locked"


class StopFilter(logging.Filter):
    """A filter for Snakemake's logger."""

    def __init__(self, runs: Path = RUNS) -> None:
        super().__init__()
        self.runs = runs
        self.stopped: dict[tuple[str, str], int] = {}
        """Exit statuses by stage and run: trainings that were stopped, and stages that a signal ended."""
        self.is_interrupted = False
        """A person pressed Ctrl-C: a stage that was still starting ends with any status."""
        self.has_failures = False
        self.failed: dict[tuple[str, str], None] = {}
        """Stages and runs that failed, and comparisons of sweeps."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether Snakemake prints ``record``; the last error becomes the line that says how to resume."""
        text = record.getMessage()
        event = getattr(getattr(record, "event", None), "name", "")
        if _LOCKED in text:
            record.msg, record.args = _explain_lock(), ()
        command, status = _COMMAND.search(text), _STATUS.search(text)
        self.is_interrupted |= _CTRL_C in text
        has_stopped = status and (self.is_interrupted or int(status[1]) in (STOPPED, *_SIGNALLED))
        if event == "ERROR" and command and status and has_stopped:
            self.stopped[command[1], command[2]] = int(status[1])
            return False
        if event == "JOB_ERROR":
            found = _COMMAND.search(getattr(record, "shellcmd", "") or "")
            is_stop = found is not None and (found[1], found[2]) in self.stopped
            self.has_failures |= not is_stop
            if found and not is_stop:
                self.failed[found[1].partition(" ")[0], found[2]] = None
            return not is_stop
        if self.has_failures or not self.stopped:
            if _END in text:
                record.msg, record.args = "\n".join([text, *(self._repeated(*what) for what in self.failed)]), ()
            return True
        if _END in text:
            record.msg, record.args = "\n".join(self._message(stage, run) for stage, run in self.stopped), ()
            record.levelno, record.levelname = logging.WARNING, "WARNING"
            record.__dict__.pop("event", None)
        return not text.startswith(_HINTS)

    def _message(self, stage: str, run: str) -> str:
        if stage != "train":
            return f"{stage.partition(' ')[0]} of {run} was interrupted. The same command continues it."
        if self.stopped[stage, run] != STOPPED:
            return f"The driver of {run} ended. The training's job, if there is one, is not affected."
        with contextlib.suppress(ShardmakeError, OSError):
            history = load_history(RunDir(self.runs / run).attempt_history)
            if history and history[-1].end in BY_PERSON:
                return history[-1].message
        return f"Training of {run} stopped as requested. Run the same command again to resume."

    def _repeated(self, stage: str, run: str) -> str:
        """Return the message with which a stage ended, from its log, also if only its Slurm job had one."""
        with contextlib.suppress(OSError):
            if last := last_message(RunDir(self.runs / run), stage):
                return "\n".join([f"{stage} of {run} failed, see {last[0]}:", *last[1]])
        return f"{stage} of {run} failed."


def _explain_lock() -> str:
    """Return who holds the lock of this folder, or the command that removes a lock of a process that was killed."""
    here, me = str(Path.cwd()), psutil.Process()
    above = {process.pid for process in (me, *me.parents())}
    for process in psutil.process_iter(["cmdline", "cwd", "pid"]):
        words = process.info["cmdline"] or []
        is_snakemake = any(Path(word).name == "snakemake" for word in words)  # not `tail -f .snakemake/log/...`
        if is_snakemake and process.info["cwd"] == here and process.pid not in above:
            shown = " ".join(words)
            return f"Error: Another Snakemake works in {here}: process {process.pid} ({shown}). Wait until it ends."
    command = shlex.join(["snakemake", *sys.argv[1:]])
    return (
        f"Error: {here} is locked by a Snakemake that was killed or runs on another machine. If none runs, remove "
        f"the lock, and repeat the command:\n  {command} --unlock"
    )
