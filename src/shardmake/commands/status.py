"""The state of runs from the files in their folders: of one run in full, of all runs in a table.

Nothing is written, locked or imported that a running training uses, also while the run is in progress.
"""

import contextlib
import itertools
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from shardmake.checkpoint import store
from shardmake.commands.driver_state import describe_drivers, driver_jobs
from shardmake.commands.stage_logs import StageJobs, local_stages, stage_end, stage_jobs
from shardmake.config.effects import values_of
from shardmake.config.load import get_run, sweep_runs
from shardmake.config.models import Cluster, Config, Run
from shardmake.core.errors import ConfigError, ShardmakeError, SlurmError
from shardmake.core.tables import print_table, rich_table
from shardmake.core.units import format_duration, plural
from shardmake.launch.jobs import LocalJobs, job_name
from shardmake.launch.slurm_jobs import list_jobs
from shardmake.launch.slurm_states import JobState, JobStatus, held_message
from shardmake.launch.submission_check import parse_start
from shardmake.run.attempt import AttemptDir, SubmittedJob
from shardmake.run.attempt_history import BY_PERSON, AttemptRecord, load_history
from shardmake.run.evaluation import EvaluationResult
from shardmake.run.paths import RunDir, short_path
from shardmake.run.receipts import PushReceipt, TrainingReceipt
from shardmake.run.record import check_format
from shardmake.run.settings import STAGES_BEFORE, changed_settings
from shardmake.run.state import Event, RunState, living_driver, read_progress, read_tail
from shardmake.run.usage import gpu_use, stragglers

if TYPE_CHECKING:
    from shardmake.report.comparison import Comparison
DONE, OPEN, CHANGED, OUTDATED = "done", "open", "changed", "outdated"
_FROM_FILES: Final = (DONE, OPEN, CHANGED, OUTDATED)
"""States that follow from files of a run alone; the others are those of `StageEnd`."""
Stages = dict[str, tuple[str, list[str]]]
"""State of each stage, and the settings that changed since it ran, or how it ended."""
Queue = Mapping[str, JobStatus] | None
"""Jobs in Slurm's queue by id; None if Slurm does not answer."""
REFRESH_SECONDS: Final = 10.0
"""Seconds between two screens of ``--watch``; each one asks Slurm once for all runs."""
_FRESH_SECONDS: Final = 45.0
_MOST_WIDTH: Final = 90
"""Characters of a cell; ``shardmake status NAME`` has the whole text."""


def describe(run: Run, cluster: Cluster, rundir: RunDir) -> str:
    """Return each stage, the training, the results, and the files to look at next."""
    found = read_state(run, cluster, rundir, queue_of([rundir], cluster), jobs_of_stages(cluster))
    stages, lines = found.stages, [f"{rundir.name} in {rundir.root}"]
    width = max(8, *map(len, stages.values()))
    for stage, state in stages.items():
        why = "; ".join(found.changes[stage])
        lines.append(f"  {state:<{width}}  {stage}" + (f": {why}" if why else ""))
    if {CHANGED, OUTDATED} & {*stages.values()}:
        lines.append("\nSettings changed since these stages ran. The next `snakemake` runs them again.")
    if found.details:
        lines += [f"\nTraining: {found.progress() or found.headline}", *(f"  {line}" for line in found.details)]
        if CHANGED in (stages["plan"], stages["render"], stages["data"]):
            lines.append("  It ran before the settings changed. If they change the result, training starts anew.")
    if cluster.executor == "slurm":
        lines += [f"\n{line}" for line in describe_drivers(rundir.root.parent, [rundir.name])]
    if rundir.train_receipt.exists():
        lines.append(_trained(TrainingReceipt.read(rundir.train_receipt), stages["train"]))
    if rundir.evaluation.exists():
        lines += _evaluation(EvaluationResult.read(rundir.evaluation))
    return "\n".join([*lines, *_where_next(run, rundir)])


def _trained(receipt: TrainingReceipt, state: str) -> str:
    length = "" if receipt.steps is None else f" {receipt.steps:,} steps"
    length += "" if receipt.tokens is None else f", {receipt.tokens:,} tokens,"
    ranks, attempts = plural(receipt.world_size, "rank"), plural(receipt.attempts, "attempt")
    old = "" if state == DONE else ", before the settings changed"
    return f"\nTrained{length} with {receipt.strategy} on {ranks} in {attempts}{old}."


def _evaluation(evaluation: EvaluationResult) -> list[str]:
    lines = []
    if evaluation.scores:
        base, tuned = evaluation.scores
        perplexity = f"perplexity {base.perplexity_text(1)} -> {tuned.perplexity_text(1)}"
        lines.append(f"Evaluation loss {base.loss:.3f} -> {tuned.loss:.3f}, {perplexity}.")
        if evaluation.has_exact:
            answered = f"{base.exact:.1%} -> {tuned.exact:.1%}"
            lines.append(f"Held-out examples that greedy decoding answers word for word: {answered}.")
    for name, share in evaluation.shares.items():
        if name != "exact answers" and share is not None:
            what = "completions" if evaluation.completions else "pairs"
            lines.append(f"Held-out {what}: {name} {share:.1%}, margin {evaluation.margin:.4f}.")
    if evaluation.samples:
        sample = evaluation.samples[0]
        lines += ["\nPrompt:", _indent(sample.prompt), "The tuned model:", _indent(sample.tuned)]
    return lines


def _indent(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.strip().splitlines())


def _where_next(run: Run, rundir: RunDir) -> list[str]:
    places = {
        "plan and its reasons": rundir.plan, "loss and speed, by step": rundir.metrics,
        "the model": rundir.model_receipt.parent, "evaluation": rundir.evaluation, "report": rundir.report,
    }  # fmt: skip
    lines = [f"  {what:<24} {path}" for what, path in places.items() if path.exists()]
    if run.push and rundir.push_receipt.exists():
        pushed = PushReceipt.read(rundir.push_receipt).destinations
        lines += [f"  {'pushed to':<24} {destination.to}" for destination in pushed]
    return ["\nWhere to look next:", *lines] if lines else []


def read_states(config: Config, cluster: Cluster, runs: Path) -> list[RunState]:
    """Return the state of each run of the configuration. A run whose files cannot be read gets the reason."""
    rundirs = {name: RunDir(runs / name) for name in config.runs}
    queue, found = queue_of(rundirs.values(), cluster), list[RunState]()
    jobs = jobs_of_stages(cluster)
    for name, rundir in rundirs.items():
        try:
            found.append(read_state(config.runs[name], cluster, rundir, queue, jobs))
        except (ShardmakeError, OSError) as error:
            found.append(RunState(run=name, state=f"cannot be read: {error}"))
    return found


def status_json(config: Config, cluster: Cluster, runs: Path) -> list[Any]:
    """Return what ``shardmake status --json`` prints: a `RunState` for each run of the configuration."""
    drivers = driver_jobs(runs, config.runs) if cluster.executor == "slurm" else {}
    states = read_states(config, cluster, runs)
    return [state.model_copy(update={"driver_job": drivers.get(state.run)}).as_json() for state in states]


def jobs_of_stages(cluster: Cluster) -> StageJobs:
    """Return the jobs of stages in Slurm's queue; none without an answer."""
    if cluster.executor == "slurm":
        with contextlib.suppress(SlurmError):
            return stage_jobs(Path.cwd(), shared=cluster.shared)
    return {}


def read_state(
    run: Run, cluster: Cluster, rundir: RunDir, queue: Queue, jobs: StageJobs = MappingProxyType({})
) -> RunState:
    """Return the state of a run without its driver job; ``queue`` and ``jobs`` are what Slurm's queue has."""
    check_format(rundir)
    stages = stage_states(run, cluster, rundir)
    running = local_stages() if any(state == OPEN for state, _ in stages.values()) else set()
    for stage, (state, _) in stages.items():
        is_seen = stage == "train" and (rundir.job.exists() or rundir.attempt_history.exists())
        if state == OPEN and not is_seen and (end := stage_end(rundir, stage, jobs, running)):
            stages[stage] = (end.state, [end.text])
    if training := None if rundir.train_receipt.exists() else _training(rundir, cluster, queue):
        stages["train"] = (training.pop("stage_state"), [])
    stage, state = next_stage(stages)
    return RunState(
        run=rundir.name,
        stages={name: state for name, (state, _) in stages.items()},
        changes={name: changes for name, (_, changes) in stages.items()},
        last_event=last_event(rundir),
        **({"stage": stage, "state": state} if training is None else {"stage": "train"} | training),
    )


def unfinished_stage(run: Run, cluster: Cluster, rundir: RunDir) -> str:
    """Return the stage that has no result but a job, a process or a log, else the training."""
    stages = read_state(run, cluster, rundir, queue_of([rundir], cluster), jobs_of_stages(cluster)).stages
    return next((stage for stage, state in stages.items() if state not in _FROM_FILES), "train")


def stage_states(run: Run, cluster: Cluster, rundir: RunDir) -> Stages:
    """Return for each stage whether it is done with the current settings, and the settings that changed since.

    A stage is outdated if an earlier one that it uses is not done.
    """
    made = {
        "fetch": [rundir.sources, rundir.weights_receipt], "plan": [rundir.plan, rundir.memory_table],
        "render": [rundir.accelerate, rundir.deepspeed, rundir.training, rundir.fallbacks, rundir.rendered],
        "data": [rundir.data_receipt], "train": [rundir.train_receipt], "consolidate": [rundir.model_receipt],
        "evaluate": [rundir.evaluation],
        **({"push": [rundir.push_receipt]} if run.push else {}),
    }  # fmt: skip
    values, found = values_of(run, cluster), Stages()
    for stage, files in made.items():
        is_made = all(file.exists() for file in files)  # Snakemake runs a stage again that has lost one
        changes = changed_settings(stage, values, rundir) if is_made else []
        # The fetch is open as long as the weights are not here.
        before = {earlier: found[earlier][0] for earlier in STAGES_BEFORE.get(stage, ())}
        uses_old = any(old in (CHANGED, OUTDATED) or (old == OPEN and one != "fetch") for one, old in before.items())
        state = OPEN if not is_made else CHANGED if changes else OUTDATED if uses_old else DONE
        found[stage] = (state, changes)
    return found


def next_stage(stages: Stages) -> tuple[str, str]:
    """Return the stage that is next, and the run's state."""
    for stage, (state, changes) in stages.items():
        if state == CHANGED:
            return stage, f"changed since the last {stage}: {'; '.join(changes)}"
    for stage, (state, text) in stages.items():
        if state not in _FROM_FILES:
            return stage, ": ".join(filter(None, (state, *text)))
    unfinished = next((stage for stage, (state, _) in stages.items() if state != DONE), None)
    if unfinished is None:
        return DONE, DONE
    return unfinished, "not started" if unfinished == "fetch" else f"next step: {unfinished}"


def queue_of(rundirs: Iterable[RunDir], cluster: Cluster) -> Queue:
    """Return the jobs, of all users, of those runs that have one in Slurm's queue; None without Slurm or such a run."""
    names = ",".join(job_name(rundir.root) for rundir in rundirs if rundir.job.exists())
    if cluster.executor == "slurm" and names:
        with contextlib.suppress(SlurmError):
            return list_jobs("list the jobs of the runs", f"--name={names}")
    return None


def _training(rundir: RunDir, cluster: Cluster, queue: Queue) -> dict[str, Any] | None:
    """Return the fields of `RunState` for a training that has not finished; None before its first attempt."""
    job = SubmittedJob.read_if_exists(rundir.job)
    history = load_history(rundir.attempt_history)
    if job is not None:
        return _with_job(rundir, job, _status(rundir, job, cluster, queue))
    if driver := living_driver(rundir):
        return _fields("running", "no job yet", f"The driver ({driver}) waits, or prepares the next attempt.")
    return _ended(rundir, history[-1]) if history else None


def _fields(stage_state: str, state: str, *details: str, **others: Any) -> dict[str, Any]:
    """Return fields of `RunState`, and the state of the stage; the headline is the state unless ``others`` has one."""
    return {"stage_state": stage_state, "state": state, "headline": state, "details": details, **others}


def _status(rundir: RunDir, job: SubmittedJob, cluster: Cluster, queue: Queue) -> JobStatus:
    """Return the state of a job; one that is not in Slurm's queue has ended."""
    if cluster.executor != "slurm":
        return LocalJobs(rundir.root).status(job.id)
    if queue is None:
        return JobStatus(JobState.UNKNOWN)
    found = queue.get(job.id)
    return found if found and found.job_name == job_name(rundir.root) else JobStatus(JobState.GONE)


def _with_job(rundir: RunDir, job: SubmittedJob, status: JobStatus) -> dict[str, Any]:
    """Return the fields for a training that has a job."""
    name = f"job {job.id} (attempt {job.attempt})"
    if status.state is JobState.PENDING:
        return _pending(job, status, name)
    folder = AttemptDir(rundir.attempts / f"{job.attempt:03d}")
    beat = next(iter(folder.node_beats(0)), None)
    is_alive = beat is not None and time.time() - beat.time < _FRESH_SECONDS  # as on another machine than this one
    if status.state in (JobState.ENDED, JobState.GONE) and not is_alive:
        advice = "A driver that is running records why; if there is none, run the same command again."
        return _fields("unfinished", f"{name} has ended", advice, _last_step(rundir))
    where = f" on {status.nodes}" if status.nodes else ""
    unknown = ("Slurm does not answer.",) if status.state is JobState.UNKNOWN else ()
    if beat is None:
        reported = f"The ranks of {name}{where} have not reported yet."
        return _fields("running", "starting", reported, *unknown, queue=_queue(status))
    age = format_duration(time.time() - beat.time)
    lines = [f"As {name}{where}; last heartbeat {age} ago in phase {beat.phase}."]
    if use := gpu_use(folder):
        lines.append(f"Since its start {use}.")
    if slow := stragglers(folder):
        lines.append(f"{slow[0].upper()}{slow[1:]}.")
    if rundir.stop_file.exists():
        stop = short_path(rundir.stop_file)
        lines.append(f"A stop was requested ({stop}): the ranks save and stop after their current step.")
    return _fields("running", "training", *lines, *unknown, queue=_queue(status), **read_progress(rundir, beat))


def _pending(job: SubmittedJob, status: JobStatus, name: str) -> dict[str, Any]:
    """Return the fields for a training whose job waits."""
    starts, estimate = parse_start(status.expected_start), "Slurm does not know when it will start."
    if starts is not None:
        estimate = f"Slurm expects to start it in {format_duration(starts - time.time())}."
    waited = format_duration(time.time() - job.submitted)
    return _fields(
        "queued", "waits in the queue", f"Submitted {waited} ago as {name}. {held_message(job.id, status) or estimate}",
        headline=f"waits in the queue: {status.nodes}", queue=_queue(status), expected_start=starts,
    )  # fmt: skip


def _queue(status: JobStatus) -> str:
    """Return the state of a job in the queue: its state, and its nodes or the reason why it waits."""
    if status.state is JobState.UNKNOWN:
        return "Slurm does not answer"
    return " ".join(filter(None, (status.state.value, status.nodes)))


def _ended(rundir: RunDir, last: AttemptRecord) -> dict[str, Any]:
    """Return the fields for a training whose last attempt has ended, and which no driver continues."""
    if last.end in BY_PERSON:
        return _fields("cancelled", "stopped on request", last.message)
    logs = short_path(rundir.attempts / f"{last.attempt:03d}")
    of_stage, state, resumes = "failed", "failed", "Fix the cause and run the same command again."
    if last.next_fallback is not None:
        of_stage, state = "unfinished", "between two attempts"
        resumes = "The same command resumes it, unless a driver on another machine does."
    ended = f"Attempt {last.attempt} (job {last.job}) ended: {last.message}"
    return _fields(of_stage, f"{state}: {last.end}", ended, _last_step(rundir), f"Logs: {logs}. {resumes}")


def _last_step(rundir: RunDir) -> str:
    """Return the last logged step and the newest checkpoint."""
    lines = read_tail(rundir.metrics)
    saved = max((int(path.name.split("-")[1]) for path in rundir.checkpoints.glob("checkpoint-[0-9]*")), default=None)
    logged = f"The last logged step is {lines[-1].step:,}. " if lines else ""
    return f"{logged}The newest checkpoint is of step {saved:,}." if saved else f"{logged}There is no checkpoint yet."


def last_event(rundir: RunDir) -> Event | None:
    """Return the last event of a run; None if no stage of it has finished."""
    return max(_events(rundir), key=lambda event: event.time, default=None)


def _events(rundir: RunDir) -> Iterator[Event]:
    for path in rundir.settings.glob("*.json"):
        yield Event(path.stat().st_mtime, f"{path.stem} finished")
    for attempt in load_history(rundir.attempt_history)[-1:]:
        yield Event(attempt.ended, f"attempt {attempt.attempt} ended: {attempt.end}")
    if job := SubmittedJob.read_if_exists(rundir.job):
        yield Event(job.submitted, f"job {job.id} submitted")
    for record, path in itertools.islice(store.committed(rundir.checkpoints), 1):
        yield Event(path.stat().st_mtime, f"checkpoint of step {record.step:,}")
    for path, text in ((rundir.stop_file, "stop requested"), (rundir.report, "report written")):
        if path.exists():
            yield Event(path.stat().st_mtime, text)


COLUMNS: Final[Mapping[str, Callable[[RunState], str]]] = {
    "run": lambda run: run.run,
    "stage": lambda run: run.stage,
    "state": lambda run: run.state,
    "step": lambda run: "" if run.step is None else f"{run.step:,}" + ("" if run.total is None else f"/{run.total:,}"),
    "loss": lambda run: "" if run.loss is None else f"{run.loss:.4g}",
    "tokens/s": lambda run: "" if run.tokens_per_second is None else f"{run.tokens_per_second:,.0f}",
    "left": lambda run: "" if run.seconds_left is None else format_duration(run.seconds_left),
    "queue": lambda run: run.queue or "",
    "starts": lambda run: f"{datetime.fromtimestamp(run.expected_start):%Y-%m-%d %H:%M}" if run.expected_start else "",
    "last event": lambda run: "" if run.last_event is None else str(run.last_event),
}
"""Columns of the table of runs."""


def cells(state: RunState) -> list[str]:
    """Return the row of a run in the table."""
    texts = [column(state) for column in COLUMNS.values()]
    return [text if len(text) <= _MOST_WIDTH else f"{text[: _MOST_WIDTH - 3]}..." for text in texts]


def watch(read: Callable[[], list[RunState]]) -> None:
    """Show the states that ``read`` returns on a screen that is renewed until Ctrl-C.

    Raises `ConfigError` if the output is not a terminal.
    """
    if not sys.stdout.isatty():
        raise ConfigError("--watch cannot be used: the output is not a terminal. Use `status` or `status --json`.")
    from rich.console import Group
    from rich.live import Live

    try:
        with Live(auto_refresh=False, screen=True) as live:
            while True:
                now = f"{datetime.now():%H:%M:%S}, every {REFRESH_SECONDS:.0f} s; Ctrl-C ends it"
                live.update(Group(now, rich_table([*COLUMNS], [cells(state) for state in read()])), refresh=True)
                time.sleep(REFRESH_SECONDS)
    except KeyboardInterrupt:
        return


def select_runs(config: Config, names: Sequence[str], sweep: str | None) -> dict[str, Run]:
    """Return the runs called ``names``, or those of ``sweep``. Raises `ConfigError` for fewer than two runs."""
    if bool(names) == (sweep is not None):
        raise ConfigError("compare: the runs are missing. Name at least two runs, or one sweep with --sweep NAME.")
    chosen = {name: get_run(config, name) for name in (names if sweep is None else sweep_runs(config, sweep))}
    if len(chosen) < 2:
        raise ConfigError(f"compare: {', '.join(chosen)} is one run. Name at least two different runs.")
    return chosen


def print_comparison(comparison: "Comparison") -> None:
    """Print the table and the notes."""
    print_table(*comparison.table())
    print("* is the best value of the runs.")
    for note in comparison.notes:
        print(note)
