"""The driver of a run's training: adopt or submit, watch, decide. It owns all retries.

Neither Snakemake nor Slurm nor torchrun repeats anything; the driver determines why an attempt ended and resumes,
takes the plan's next fallback, or stops with the error that matters. If the driver exits, the job keeps running and
the next driver adopts it.
"""

import contextlib
import fcntl
import os
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import NoReturn

from shardmake.checkpoint import store
from shardmake.checkpoint.record import CheckpointRecord
from shardmake.checkpoint.reshard.convert import find_route, reshard, write_deepspeed_hint
from shardmake.checkpoint.reshard.routes import Route, route
from shardmake.checkpoint.training_receipt import is_final, write_training_receipt
from shardmake.config.models import Cluster, Run
from shardmake.core.atomic import read_json
from shardmake.core.errors import ShardmakeError
from shardmake.core.permissions import refuse_job_of_others
from shardmake.launch import user_script
from shardmake.launch.jobs import Jobs, attempt_settings, job_name, job_owners, make_jobs
from shardmake.launch.low_memory_wait import LOCK_VARIABLE, WAITED_VARIABLE, wait_until_slot, wait_until_started
from shardmake.launch.outcome import Action, Evidence, Outcome, RetryState, classify, decide
from shardmake.launch.progress import ProgressPrinter
from shardmake.launch.slurm_states import JobState, JobStatus
from shardmake.launch.submission_limit import require_slot, snapshot_file, submission_slot, waiting_message
from shardmake.render.stage import copy_rendered
from shardmake.run import set_aside
from shardmake.run.attempt import AttemptDir
from shardmake.run.attempt_history import (
    AttemptRecord,
    EndReason,
    excluded_nodes,
    failing_nodes,
    hung_before,
    idle_attempts,
    load_history,
    may_rewind,
    next_fallback,
    save_history,
    wants_all_memory,
)
from shardmake.run.disk_budget import check_run, checkpoint_size
from shardmake.run.paths import RunDir
from shardmake.run.plan import Choice, Plan
from shardmake.run.record import RunRecord
from shardmake.run.settings_digest import settings_digest
from shardmake.run.training_settings import TrainingSettings

IDLE_ATTEMPTS = 3
POLL_SECONDS = 1.0
LOW_MEMORY_WAIT_SECONDS = 5.0
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
RECORD_SECONDS = 10.0
"""How long the first exit record may take to become visible here after Slurm has seen the job's end."""
Tell = Callable[[str], None]


class SubmittedJob(RunRecord):
    """The job that owns a run, as recorded in ``train/job.json``."""

    id: str
    attempt: int
    submitted: float


def train(run: Run, cluster: Cluster, rundir: RunDir, tell: Tell) -> None:
    """Bring the training of ``rundir`` to its end, or raise a `ShardmakeError` that says why it cannot go on."""
    plan = Plan.read(rundir.plan)
    rundir.train.mkdir(parents=True, exist_ok=True)
    with _sole_driver(rundir) as lock, _leaving_the_job_alone():
        if cluster.shared and cluster.executor == "slurm":
            refuse_job_of_others(job_owners(rundir.root), rundir.name, _short(rundir.stop_file))
        Driver(run, cluster, rundir, plan, tell, lock).drive()


@contextlib.contextmanager
def _sole_driver(rundir: RunDir) -> Iterator[int]:
    """Hold the run's lock, so that there is never a second driver; a driver that dozed has it already."""
    held = os.environ.pop(LOCK_VARIABLE, None)
    with open(int(held), "a+") if held else (rundir.train / "driver.lock").open("a+") as lock:  # noqa: PTH123
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            raise ShardmakeError(
                f"Another driver is already watching {rundir.name} ({lock.read().strip()}). Wait for it, or end it; "
                "the job itself goes on without a driver."
            ) from None
        except OSError as error:
            raise ShardmakeError(
                f"{rundir.train} is on a file system without locks ({error.strerror}), so two drivers could train the "
                "same run. Have it mounted with them (Lustre: -o flock), or keep runs/ elsewhere."
            ) from None
        lock.truncate(0)
        print(f"process {os.getpid()} on {socket.gethostname()}", file=lock, flush=True)
        yield lock.fileno()


class DriverStoppedError(KeyboardInterrupt):
    """Ctrl-C or a signal ended the driver; the job lives on."""


@contextlib.contextmanager
def _leaving_the_job_alone() -> Iterator[None]:
    """Turn the signals that end a driver into `DriverStoppedError`."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise DriverStoppedError(signal.Signals(number).name)

    heeded = [number for number in _ENDING if signal.getsignal(number) is not signal.SIG_IGN]  # nohup ignores SIGHUP
    before = {number: signal.signal(number, stop) for number in heeded}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Driver:
    """Drives one run; every decision is made from what is on disk and from Slurm's word."""

    def __init__(self, run: Run, cluster: Cluster, rundir: RunDir, plan: Plan, tell: Tell, lock: int) -> None:
        self.run, self.cluster, self.rundir, self.plan, self.tell = run, cluster, rundir, plan, tell
        self.lock = lock
        self.waited = os.environ.pop(WAITED_VARIABLE, None) is not None
        self.jobs: Jobs = make_jobs(rundir.root, cluster)
        settings = TrainingSettings.read(rundir.training)
        data_receipt = read_json(rundir.data_receipt, "shardmake data NAME")
        self.plan_digest = plan.digest
        self.recipe = settings_digest(settings, plan, data_receipt["digest"])
        self.index = rundir.attempts / "index.json"
        self.history = load_history(self.index)

    def drive(self) -> None:
        """Adopt or submit, watch, decide, until the training is over."""
        job = self._adopt()
        if job is None and not self.waited:
            self._forget_stop_file()
        while not (job is None and self._is_finished()):
            job = job or self._submit()
            self._watch(job)
            outcome = self._close(job)
            job = None
            if outcome.end is EndReason.FINISHED:
                self.tell(outcome.sentence)
            else:
                self._answer(outcome)

    def _is_finished(self) -> bool:
        """Whether the last step is sealed; the receipt is made again if it was lost."""
        if self.run.script:
            return user_script.is_finished(self.rundir, self.recipe)
        newest = next(store.committed(self.rundir.checkpoints), None)
        if newest is None or newest[0].recipe != self.recipe or not is_final(*newest):
            return False
        if not self.rundir.train_receipt.exists():
            self.tell("Training is done already; writing its receipt again.")
            write_training_receipt(self.rundir, *newest)
        return True

    # ---- jobs -------------------------------------------------------------------------------------------------

    def _adopt(self) -> SubmittedJob | None:
        """The job of an earlier driver, if it is for the settings of today; one that runs for others is ShardmakeError.

        It must not be judged by today's: it would end as something else than it was, or its model count as this one's.
        """
        job = self._find_job()
        if job is None or self._is_for_these_settings(job):
            return job
        if self.jobs.status(job.id).state not in (JobState.ENDED, JobState.GONE):
            raise ShardmakeError(
                f"Job {job.id} (attempt {job.attempt}) still trains {self.rundir.name} with other settings than it has "
                "now. Put them back to go on with it, or wait for its end, or end it "
                f"({self.jobs.how_to_cancel(job.id)}), and run the same command again."
            )
        self.tell(f"Job {job.id} (attempt {job.attempt}), which was for other settings, has ended.")
        self.rundir.job.unlink(missing_ok=True)
        return None

    def _is_for_these_settings(self, job: SubmittedJob) -> bool:
        folder = self._folder(job)
        return folder.settings.exists() and folder.read().recipe == self.recipe

    def _find_job(self) -> SubmittedJob | None:
        """The recorded job, or one that was submitted and not yet recorded."""
        recorded = SubmittedJob.model_validate_json(self.rundir.job.read_text()) if self.rundir.job.exists() else None
        try:
            alive = self.jobs.find()
        except ShardmakeError:
            if recorded is None:
                raise
            alive = None
        if recorded and (alive is None or alive == recorded.id):
            self.tell(f"Adopting job {recorded.id} (attempt {recorded.attempt}).")
            return recorded
        if alive:
            job = SubmittedJob(id=alive, attempt=self._last_attempt(), submitted=time.time())
            job.write(self.rundir.job)
            self.tell(f"Adopting job {job.id} (attempt {job.attempt}), which an earlier driver submitted.")
            return job
        return None

    def _await_room(self) -> None:
        """Doze until the user's trainings leave room in the queue, as far as the last look says."""
        if self.cluster.executor == "slurm":
            require_slot(job_name(self.rundir.root), self.cluster.trainings_per_user, self._wait)

    def _turn(self, folder: AttemptDir) -> contextlib.AbstractContextManager[None]:
        """The turn to submit the attempt in ``folder``, which goes if another driver has taken the room meanwhile."""
        if self.cluster.executor == "local":
            return contextlib.nullcontext()

        def wait(ahead: list[str] | None) -> NoReturn:
            shutil.rmtree(folder.root)
            self._wait(ahead)

        return submission_slot(job_name(self.rundir.root), self.cluster.trainings_per_user, wait)

    def _wait(self, ahead: list[str] | None) -> NoReturn:
        """Say once who is ahead, and doze."""
        limit = self.cluster.trainings_per_user
        if not self.waited:
            self.tell(waiting_message(ahead, self.rundir.name, limit))
        stop_file = str(self.rundir.stop_file.resolve())
        wait_until_slot(job_name(self.rundir.root), limit, stop_file, self.lock, str(snapshot_file()))

    def _submit(self) -> SubmittedJob:
        self._heed_stop_file()
        self._await_room()
        check_run(self.rundir)
        number = self._last_attempt() + 1
        folder = AttemptDir((self.rundir.attempts / f"{number:03d}").resolve())
        self.rundir.train_receipt.unlink(missing_ok=True)
        plan = self._write_configuration(folder)
        if self.run.script:
            user_script.make_room(self.rundir, self.recipe, self.tell)
        resume_from = None if self.run.script else self._choose_checkpoint(plan.choice)
        if resume_from:
            write_deepspeed_hint(folder.deepspeed, resume_from)
        settings = attempt_settings(
            number,
            self.rundir.root,
            self.cluster,
            plan,
            resume_from=str(resume_from) if resume_from else None,
            recipe=self.recipe,
            plan_digest=self.plan_digest,
            checkpoint_bytes=checkpoint_size(self.rundir, self.run.checkpoints.most(self.run.max_steps)),
        )
        settings.write(folder.settings)
        with self._turn(folder):
            id = self.jobs.submit(folder, plan, excluded_nodes(self.history))
            job = SubmittedJob(id=id, attempt=number, submitted=time.time())
            job.write(self.rundir.job)
        self.waited = False
        start = f"resuming from {resume_from.name}" if resume_from else self.run.script or "from the base model"
        self.tell(
            f"Attempt {number}: job {job.id}, {plan.choice.strategy} on {plan.choice.nodes} node(s) x "
            f"{plan.choice.processes_per_node} rank(s), {start}. Logs: {_short(folder.root)}"
        )
        return job

    def _write_configuration(self, folder: AttemptDir) -> Plan:
        """Put the files of this attempt's fallback into its folder, so that it tells its own history."""
        plan = self._present_plan()
        plan.write(folder.plan)
        copy_rendered(self.rundir, self.plan, next_fallback(self.history, self.plan_digest), folder.root)
        return plan

    def _present_plan(self) -> Plan:
        """The plan on the fallback, and with the memory, that the next attempt takes."""
        plan = self.plan.at(next_fallback(self.history, self.plan_digest))
        return plan.asking(self._node_memory_gib) if wants_all_memory(self.history, self.plan_digest) else plan

    @property
    def _node_memory_gib(self) -> int:
        return max(1, int(self.cluster.memory_gib_per_node))

    def _choose_checkpoint(self, choice: Choice) -> Path | None:
        """The newest whole checkpoint of this recipe; everything else is told, and removed or set aside."""
        folder = self.rundir.checkpoints.resolve()
        found = store.recover(folder)
        if found and found[0].recipe != self.recipe:
            set_aside.stash_and_restore(folder, found[0].recipe, self.recipe, self.tell)
            self.rundir.metrics.unlink(missing_ok=True)
            found = store.recover(folder)
        return self._as_read_by(choice, *found) if found else None

    def _as_read_by(self, choice: Choice, record: CheckpointRecord, checkpoint: Path) -> Path:
        """``checkpoint``, resharded if the engine of ``choice`` cannot read it as it is; refused if that cannot be."""
        folder = self.rundir.resharded.resolve()
        if find_route(record, checkpoint, choice.strategy, choice.world_size) is Route.NATIVE:
            shutil.rmtree(folder, ignore_errors=True)
            return checkpoint
        out = folder / checkpoint.name
        reshard(checkpoint, out, choice.strategy, choice.world_size, self.tell)
        return out

    def _forget_stop_file(self) -> None:
        """Who starts a driver while no job is there wants it to go on; an earlier request has been answered."""
        if self.rundir.stop_file.exists():
            self.tell(f"Removing the stop file {_short(self.rundir.stop_file)} of an earlier request.")
            self.rundir.stop_file.unlink(missing_ok=True)

    def _heed_stop_file(self) -> None:
        """Stop where it was asked for since this driver began."""
        if self.rundir.stop_file.exists():
            raise ShardmakeError(
                f"{self.rundir.name} was asked to stop ({_short(self.rundir.stop_file)}). Nothing was submitted. Run "
                "the same command again to go on."
            )

    # ---- watching ---------------------------------------------------------------------------------------------

    def _watch(self, job: SubmittedJob) -> None:
        """Wait until the job has ended, telling its progress."""
        follower = ProgressPrinter(self.rundir.metrics, self.tell)
        folder = self._folder(job)
        pause, last = POLL_SECONDS, JobState.UNKNOWN
        try:
            while (status := self.jobs.status(job.id)).state not in (JobState.ENDED, JobState.GONE):
                pause = self._next_pause(pause, status, last)
                last = status.state
                self._doze_while_pending(job, status, pause)
                self._follow_for(pause, follower, folder)
        except DriverStoppedError as signal_name:
            self.tell(
                f"{signal_name}: the driver leaves, job {job.id} goes on. To watch it again, run the same command; to "
                f"save and stop: touch {_short(self.rundir.stop_file)}; to end it: {self.jobs.how_to_cancel(job.id)}"
            )
            raise
        follower.tell_news()
        self.last_status = status

    def _next_pause(self, pause: float, status: JobStatus, last: JobState) -> float:
        """Poll soon after a change of state, and ever more gently while nothing changes."""
        if status.state is not last:
            where = f" {'on ' * (status.state is JobState.RUNNING)}{status.nodes}" if status.nodes else ""
            self.tell(f"The job is {status.state.value}{where}.")
            return POLL_SECONDS
        return min(pause * 1.5, self.jobs.slowest_poll)

    def _doze_while_pending(self, job: SubmittedJob, status: JobStatus, pause: float) -> None:
        """A job that waits for a while may wait for days: give the memory back (see `doze`)."""
        if status.word == "PENDING" and pause >= LOW_MEMORY_WAIT_SECONDS:
            self.tell(f"The job waits in the queue {status.nodes}; the driver dozes until it starts.")
            wait_until_started(job.id, self.lock, str(snapshot_file()))

    def _follow_for(self, seconds: float, follower: ProgressPrinter, folder: AttemptDir) -> None:
        """Tell news from the run's folder, which cost Slurm nothing, until it is time to ask again."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            with contextlib.suppress(OSError):  # a shared file system has its moments
                follower.tell_news()
                if self.rundir.train_receipt.exists() or folder.exits():
                    time.sleep(POLL_SECONDS)
                    return
            time.sleep(POLL_SECONDS / 2)

    # ---- deciding ---------------------------------------------------------------------------------------------

    def _close(self, job: SubmittedJob) -> Outcome:
        """Read why the job ended, and add it to the history."""
        folder = self._folder(job)
        attempt = folder.read()
        plan = attempt.plan_digest or self.plan_digest
        self._await_records(folder)
        judged = user_script.judge(self.rundir, folder, self.recipe) if self.run.script else None
        outcome = judged or classify(
            Evidence(
                finished=self._is_finished(),
                stop_file=self.rundir.stop_file.exists(),
                stopped=folder.stopped.exists(),
                job_word=self.last_status.word,
                exits=folder.exits(),
                errors=folder.rank_errors(),
                nodes=attempt.nodes,
                hang=folder.read_hang(),
                cancelled_by=self.last_status.by,
                last_words=_last_line(folder.slurm),
            )
        )
        if not self.run.script:
            store.discard_unfinished(self.rundir.checkpoints)  # on a full disk it is what is in the way
        attempt_record = AttemptRecord(
            attempt=job.attempt,
            job=job.id,
            plan=plan,
            strategy=Plan.read(folder.plan).choice.strategy,
            fallback=next_fallback(self.history, plan),
            submitted=job.submitted,
            ended=time.time(),
            end=outcome.end.value,
            sentence=outcome.sentence,
            host=outcome.host,
            checkpoint_step=self._progress(),
            failed_step=outcome.error.step if outcome.error else None,
        )
        # A driver that died right here has written it already.
        self._write([*(told for told in self.history if told.attempt != job.attempt), attempt_record])
        self.rundir.job.unlink(missing_ok=True)
        return outcome

    def _folder(self, job: SubmittedJob) -> AttemptDir:
        return AttemptDir(self.rundir.attempts / f"{job.attempt:03d}")

    def _await_records(self, folder: AttemptDir) -> None:
        """Give a network file system time to show what the nodes wrote; killed nodes write nothing."""
        deadline = time.monotonic() + RECORD_SECONDS * (self.last_status.word in ("COMPLETED", "FAILED"))
        while not folder.exits() and time.monotonic() < deadline:
            time.sleep(0.2)

    def _progress(self) -> int:
        """A number that grows with what an attempt leaves for the next one."""
        if self.run.script:
            return user_script.newest_file(self.rundir)
        newest = next(store.committed(self.rundir.checkpoints), None)
        return newest[0].step if newest else 0

    def _answer(self, outcome: Outcome) -> None:
        """Prepare the next attempt, or raise."""
        fallback = next_fallback(self.history, self.plan_digest)
        out_of_memory = outcome.end in (EndReason.GPU_OUT_OF_MEMORY, EndReason.HOST_OUT_OF_MEMORY)
        below = self._rung_below(fallback, host=outcome.end is EndReason.HOST_OUT_OF_MEMORY) if out_of_memory else None
        asked = self._present_plan().resources["train"].memory_gib
        action = decide(
            outcome,
            RetryState(
                idle_attempts=idle_attempts(self.history),
                has_rung=below is not None,
                has_others=self.cluster.executor == "slurm",
                has_memory=self.cluster.executor == "slurm" and not outcome.error and asked < self._node_memory_gib,
                host_hung_before=hung_before(self.history),
                unfit_nodes=failing_nodes(self.history),
                may_rewind=self.run.non_finite == "rewind" and may_rewind(self.history),
            ),
            cap=IDLE_ATTEMPTS,
        )
        self.tell(f"{outcome.sentence} -> {action.value}")
        if action in (Action.STOP, Action.GIVE_UP):
            raise ShardmakeError(self._last_words(outcome, action))
        decision = {
            "next_fallback": below if action is Action.NEXT_FALLBACK else fallback,
            "all_memory": action is Action.MORE_MEMORY,
            "excluded": outcome.host if action is Action.EXCLUDE_AND_RESUME else None,
        }
        self._write([*self.history[:-1], self.history[-1].model_copy(update=decision)])

    def _rung_below(self, fallback: int, *, host: bool) -> int | None:
        """The next fallback that needs less and can go on from the newest checkpoint."""
        newest = None if self.run.script else next(store.committed(self.rundir.checkpoints), None)
        for below in self.plan.fallbacks_below(fallback, host=host):
            choice = self.plan.at(below).choice
            if newest is None:
                return below
            record, checkpoint = newest
            way = route(record.strategy, record.world_size, choice.strategy, choice.world_size)
            if isinstance(way, Route):
                return below
            self.tell(
                f"The fallbacks's fallback {below} ({choice.strategy}) cannot go on from {checkpoint.name}: {way}."
            )
        return None

    def _write(self, history: list[AttemptRecord]) -> None:
        self.history = history
        save_history(self.index, history)

    def _last_words(self, outcome: Outcome, action: Action) -> str:
        """The one error that matters, and where to read on."""
        folder = self.rundir.attempts / f"{self._last_attempt():03d}"
        parts = [f"Training of {self.rundir.name} stopped: {outcome.sentence}"]
        if action is Action.GIVE_UP:
            parts.append(f"{idle_attempts(self.history)} attempts, one after the other, brought no new checkpoint.")
        if outcome.error:
            parts.append(outcome.error.traceback.rstrip())
        elif log_end := _tail(AttemptDir(folder).log(0)):
            parts.append(log_end)
        parts.append(f"Everything the ranks printed is in {_short(folder)}. {_ADVICE.get(outcome.end, _RUN_AGAIN)}")
        return "\n".join(parts)

    def _last_attempt(self) -> int:
        """Number of the newest attempt, 0 if there was none."""
        return max((int(path.name) for path in self.rundir.attempts.glob("[0-9]*")), default=0)


_RUN_AGAIN = "Mend the cause and run the same command again; it resumes from the newest checkpoint."
_ADVICE = {
    EndReason.STOP_REQUESTED: "Run the same command again to go on from there.",
    EndReason.CANCELLED: "Run the same command again to go on from the newest checkpoint.",
    EndReason.GPU_OUT_OF_MEMORY: "No fallback is left: take more nodes, a shorter sequence_length or method: lora.",
    EndReason.HOST_OUT_OF_MEMORY: "Give the job more memory (memory_gib_per_node), or take a strategy without offload.",
    EndReason.NON_FINITE: "Lower the learning rate or look at the data of that step. Steps before it are in the newest "
    "checkpoint; non_finite: rewind resumes from there by itself, which helps where a GPU miscalculated.",
    EndReason.PREFLIGHT: "Mend what the check found and run the same command again; nothing was trained.",
    EndReason.HANG: "The stacks of all ranks are in the folder's stacks. hang_seconds in the cluster file says "
    "how long a step may take.",
}


def _tail(log: Path, lines: int = 30) -> str:
    """The last lines of a log."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:]) if log.exists() else ""


def _last_line(folder: Path) -> str:
    """The last line in the logs that Slurm's step left in ``folder``."""
    logs = sorted(folder.glob("*.out"), key=lambda path: path.stat().st_mtime)
    lines = [line for log in logs for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else ""


def _short(path: Path) -> str:
    """``path`` relative to the working folder where it lies below it."""
    resolved = path.resolve()
    return str(resolved.relative_to(Path.cwd())) if resolved.is_relative_to(Path.cwd()) else str(resolved)
