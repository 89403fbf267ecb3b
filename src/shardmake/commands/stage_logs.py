"""The logs of the stages that Snakemake runs, and what they say about a stage that is not done."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Final

import psutil

from shardmake.config.effects import STAGES
from shardmake.core.errors import ConfigError
from shardmake.launch.slurm_jobs import list_jobs
from shardmake.launch.slurm_states import JobState, JobStatus
from shardmake.run.paths import RunDir, short_path

_SLURM_LOGS: Final = ".snakemake/slurm_logs/rule_{rule}/{run}"
"""Folder of the logs of Snakemake's Slurm executor, which removes that of a job that succeeded."""
_PARTS: Final = {"fetch": ("fetch", "fetch-weights")}
"""Stages that have several rules: names of their logs."""
_COMMENT = re.compile(r"rule_(\w+?)(?:_weights)?_run_wildcards_(.+)")
"""Comment by which Snakemake's Slurm executor names the rule and the run of a job."""
_SCHEDULER = re.compile(r"(?:slurmstepd|srun|sbatch|bash)\S*: .*error|slurmstepd: .*|/bin/(?:ba)?sh: .*", re.IGNORECASE)
_CANCELLED = re.compile(r"CANCELLED AT \S+(?: \*\*\*)?$")
_MOST_LINES: Final = 30
"""Lines of a stage's message that are repeated."""
StageJobs = Mapping[tuple[str, str], tuple[str, JobStatus]]
"""Job and its state by stage and run."""


@dataclass(frozen=True)
class StageEnd:
    """How a stage ended that has no result, or what it does now."""

    state: str
    """queued, running, failed, cancelled, or unfinished: nothing here says whether it still runs elsewhere."""
    text: str
    """The last line of its log, when, and where."""


def log_files(rundir: RunDir, stage: str) -> list[Path]:
    """Return the logs of a stage, oldest first: those that its rules write, and those of Slurm's jobs."""
    folder, parts = rundir.root.parent.parent, _PARTS.get(stage, (stage,))
    found = [folder / f"logs/{rundir.name}/{part}.log" for part in parts]
    found += [folder / f"logs/{stage}-{rundir.name}.log"]  # that of the comparison of a sweep
    for part in parts:
        rule = f"{part.replace('-', '_')}_run"
        found += (folder / _SLURM_LOGS.format(rule=rule, run=rundir.name)).glob("*.log")
    return sorted((path for path in found if path.exists()), key=lambda path: path.stat().st_mtime)


def last_message(rundir: RunDir, stage: str) -> tuple[Path, list[str]] | None:
    """Return the newest log of a stage and its error, or its last line without one; None without a log.

    The log of a Slurm job repeats what the stage printed. Then the stage's own log is named, whose error is whole.
    """
    files = log_files(rundir, stage)
    if not files:
        return None
    lines = _error(files[-1])
    for own in (file for file in files if file.parent.parent.name == "logs"):
        if (whole := _error(own)) and lines and whole[0] == lines[0]:
            return own, whole
    return files[-1], lines


def _error(log: Path) -> list[str]:
    """Return the lines of the last error in ``log``, else of Slurm's last message, else the last line."""
    lines = [line.rstrip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    if first := [number for number, line in enumerate(lines) if line.startswith("Error: ")]:
        return lines[first[-1] :][:_MOST_LINES]
    return [line for line in lines if _SCHEDULER.match(line)][-1:] or lines[-1:]


def stage_jobs(folder: Path, *, shared: bool = False) -> StageJobs:
    """Return the jobs of stages in Slurm's queue that were submitted in ``folder``; `SlurmError` without an answer.

    Only a ``shared`` folder has jobs of other users, for which Slurm lists the whole queue.
    """
    whose = () if shared else ("--me",)
    queue = list_jobs("list the jobs of the stages", *whose, columns="%i|%T|%R|%k|%S|%u|%Z")
    named = ((job, status, _COMMENT.fullmatch(status.job_name)) for job, status in queue.items())
    return {
        (found[1], found[2]): (job, status)
        for job, status, found in named
        if found and Path(status.script).resolve() == folder.resolve()
    }


def local_stages() -> set[tuple[str, str]]:
    """Return stage and run of every command ``shardmake STAGE RUN`` that runs on this machine in this folder."""
    found, here = set(), str(Path.cwd())
    for process in psutil.process_iter(["cmdline", "cwd"]):
        words = process.info["cmdline"] or []
        place = next((number for number, word in enumerate(words) if Path(word).name == "shardmake"), len(words))
        if len(words) > place + 2 and words[place + 1] in STAGES and process.info["cwd"] == here:
            found.add((words[place + 1], words[place + 2]))
    return found


def stage_end(rundir: RunDir, stage: str, jobs: StageJobs, running: Collection[tuple[str, str]]) -> StageEnd | None:
    """Return how ``stage``, which has no result, ended or what it does now; None if it has not started."""
    if job := jobs.get((stage, rundir.name)):
        number, status = job
        state = "queued" if status.state is JobState.PENDING else "running"
        return StageEnd(state, f"job {number} {status.nodes}".strip())
    last = last_message(rundir, stage)
    if last is None:
        return StageEnd("running", "") if (stage, rundir.name) in running else None
    log, lines = last
    if log.stem == "fetch" and rundir.sources.exists():  # the weights come later
        return None
    when = f"{datetime.fromtimestamp(log.stat().st_mtime):%Y-%m-%d %H:%M:%S}"
    where = f"job {log.stem}, {when}" if log.stem.isdecimal() else when
    line = lines[0] if lines else ""
    if (stage, rundir.name) in running:
        return StageEnd("running", line)
    is_error = line.startswith("Error: ") or bool(_SCHEDULER.match(line))
    state = "cancelled" if _CANCELLED.search(line) else "failed" if is_error else "unfinished"
    return StageEnd(state, f"{line.removeprefix('Error: ')} ({where}, {short_path(log)})")


def read_stage_log(rundir: RunDir, stage: str, lines: int) -> str:
    """Return the end of each log of ``stage``, the newest last; raise `ConfigError` if there is none."""
    if files := log_files(rundir, stage):
        parts = (file.read_text(errors="replace").splitlines()[-lines:] for file in files)
        return "\n".join("\n".join([f"==> {short_path(file)}", *part]) for file, part in zip(files, parts, strict=True))
    slurm = _SLURM_LOGS.format(rule=f"{stage}_run", run=rundir.name)
    raise ConfigError(
        f"No logs: {stage} of {rundir.name}. Neither logs/{rundir.name}/{stage}.log nor a file in {slurm} exists. "
        "Snakemake's Slurm executor writes there unless `slurm-logdir` names another folder. A job that Slurm could "
        "not start has no log: `scontrol show job JOB` says where its StdOut is, and why it waits or ended."
    )
