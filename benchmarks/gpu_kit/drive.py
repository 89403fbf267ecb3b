"""Run prepared cases: they start beside each other, and each gets the GPU for its turn, in the order of their worth.

Each case has a thread. A training that has imported its libraries waits for its turn (`shardmake.run.turns`), so the
GPU is busy while the next ones import; a few import at a time, so that the first is ready soon. Every case ends with
one line of JSON; one that fails has its last lines there.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Any

import psutil

from benchmarks.gpu_kit.cases import CHECKPOINT_STEPS, WARM_UP, Case, keys_of, label_of, shape_of, steps_of
from benchmarks.gpu_kit.machine import Machine
from benchmarks.gpu_kit.prepare import CLUSTER, FAILED, write_missing_weights
from shardmake.config.models import Cluster
from shardmake.core.atomic import read_json
from shardmake.core.environment import kernel_caches
from shardmake.doctor.trainings import last_lines, read_training, stage_command, write_config
from shardmake.run.attempt_history import load_history
from shardmake.run.metrics import read_metrics
from shardmake.run.paths import RunDir
from shardmake.run.plan import MemoryEstimates, Plan
from shardmake.run.turns import VARIABLE

POLL = 0.2
CPU_PATIENCE = 10
"""A rehearsal may take this many times as long: a busy CPU is slow."""
KILLED_STEP = 7
"""Rank 0 is killed while it logs this step, after the checkpoint of `CHECKPOINT_STEPS`."""
_KILL = f"""
import os, signal, sys
opened = []
def kill(event, arguments):
    if event == "open" and str(arguments[0]).endswith("metrics.jsonl") and "a" in str(arguments[1]):
        opened.append(event)
        if len(opened) == {KILLED_STEP} and os.path.basename(sys.argv[1]) == "001":
            os.kill(os.getpid(), signal.SIGKILL)
if "shardmake.train" in sys.orig_argv:
    sys.addaudithook(kill)
"""
_BUILD_ADAM = "from deepspeed.ops.op_builder import CPUAdamBuilder; CPUAdamBuilder().load(verbose=False)"
_SHORTAGE = """
import json, os, sys
def refuse(event, arguments):
    if event == "open" and str(arguments[0]).endswith("metrics.jsonl") and "a" in str(arguments[1]):
        import torch
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB (simulated).")
if "shardmake.train" in sys.orig_argv and os.path.basename(sys.argv[1]) == "001":
    sys.addaudithook(refuse)
"""
"""On a CPU a program raises the error that torch's allocator raises on a GPU with a limit."""


class CaseError(RuntimeError):
    """The case did not do what it is for."""


class Gpu:
    """The GPU, which one case at a time has; of those that wait, the one with the smallest number gets it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: list[int] = []
        self._busy = False

    @contextlib.contextmanager
    def turn(self, order: int) -> Iterator[None]:
        """Wait for the turn of case number ``order`` and hold the GPU meanwhile."""
        with self._changed:
            self._waiting.append(order)
            self._changed.wait_for(lambda: not self._busy and min(self._waiting) == order)
            self._waiting.remove(order)
            self._busy = True
        try:
            yield
        finally:
            with self._changed:
                self._busy = False
                self._changed.notify_all()


class Drive:
    """One run of the cases in the prepared folder ``work``; rows go to ``out``/rows.jsonl as cases end."""

    def __init__(self, work: Path, out: Path, machine: Machine, cases: Sequence[Case], seconds: float) -> None:
        self.work, self.out, self.machine, self.cases = work.absolute(), out, machine, cases
        self.begun, self.seconds = time.time(), seconds
        self.gpu, self.rows, self.lock = Gpu(), list[dict[str, Any]](), threading.Lock()
        self.turns = self.work / "turns"
        self.turns.mkdir(exist_ok=True)
        self.out.mkdir(parents=True, exist_ok=True)
        self.patience = CPU_PATIENCE if machine.is_cpu else 1
        self.importing = threading.Semaphore(max(2, (os.cpu_count() or 1) // 4))
        self.weights = {shape_of(case, machine): threading.Event() for case in cases}
        self.ended = {case.name: threading.Event() for case in cases}

    def run(self, at_once: int) -> list[dict[str, Any]]:
        """Run all cases, ``at_once`` of them beside each other, and return the rows."""
        threading.Thread(target=self._make_weights, daemon=True).start()
        offloads = any("offload" in str(case.keys.get("strategy")) for case in self.cases)
        build = None if self.machine.is_cpu or not offloads else _build_adam()
        self.emit("machine", **asdict(self.machine))
        with ThreadPoolExecutor(at_once) as pool:
            list(pool.map(self._case, range(len(self.cases))))
        if build:
            build.kill()
            build.wait()
        self.emit("end", seconds=round(time.time() - self.begun, 1))
        return self.rows

    def emit(self, case: str, **values: Any) -> None:
        """Write the row of a case to the file and to standard output."""
        row = {"case": case, "at": round(time.time() - self.begun, 1), **values}
        with self.lock, (self.out / "rows.jsonl").open("a") as file:
            self.rows.append(row)
            print(json.dumps(row), file=file)
            print(json.dumps({key: value for key, value in row.items() if key not in ("losses", "last")}), flush=True)

    @property
    def left(self) -> float:
        """Return the seconds until the end."""
        return self.seconds - (time.time() - self.begun)

    def _make_weights(self) -> None:
        for shape in write_missing_weights(self.work, sorted(self.weights, key=lambda shape: (shape == "8B", shape))):
            self.weights[shape].set()

    def _case(self, order: int) -> None:
        case, begun = self.cases[order], time.time()
        logs = [self.work / f"{case.name}.log"]
        reason = read_json(self.work / FAILED, "--prepare").get(case.name)
        try:
            if reason:
                raise CaseError(f"not prepared: {reason}")
            if self.left <= 0:
                raise CaseError("not reached: the time was over")
            values = self._program(case, order, logs[0]) if case.program else self._training(case, order, logs[0])
            self.emit(case.name, ok=True, seconds=round(time.time() - begun, 1), **values)
        except Exception as error:  # the other cases continue
            logs += sorted(self.work.glob(f"runs/{case.name}/train/attempts/*/node-*.log"))[-2:]
            words = f"{type(error).__name__}: {error}"
            spent = round(time.time() - begun, 1)
            self.emit(case.name, ok=False, reached=self.left > 0, error=words, seconds=spent, last=last_lines(*logs))
        finally:
            self.ended[case.name].set()
            for process in self._processes(case):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()

    def _start(self, command: Sequence[str], log: Path, **variables: str) -> "subprocess.Popen[bytes]":
        environment = os.environ | {VARIABLE: str(self.turns)} | variables
        with log.open("a") as file:
            return subprocess.Popen(
                command, cwd=self.work, stdout=file, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )

    def _ready(self, name: str, process: "subprocess.Popen[bytes]") -> bool:
        """Wait until ``name`` waits for its turn; return False if ``process`` ends before."""
        mark = self.turns / f"{name}.0.waiting"
        while not mark.exists():
            if process.poll() is not None:
                return False
            if self.left <= 0:
                raise CaseError("the time was over before its turn")
            time.sleep(POLL)
        return True

    def _program(self, case: Case, order: int, log: Path) -> dict[str, Any]:
        module, *arguments = case.program
        name = f"{case.name}-001"
        words = [sys.executable, "-m", f"benchmarks.gpu_kit.{module}", name, str(self.work), *arguments]
        with self.importing:
            process = self._start(words, log)
            ready = self._ready(name, process)
        if ready:
            self.weights[shape_of(case, self.machine)].wait()
            for training in arguments:  # it starts in less time, while the CPUs are busy with the others' imports
                self.ended[training].wait(max(1, self.left))
            with self.gpu.turn(order):
                (self.turns / f"{name}.go").touch()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(1, min(case.limit * self.patience, self.left)))
                self._end(case, process)
        if process.returncode:
            raise CaseError(
                f"exit status {process.returncode} (a negative one is a signal; the limit is {case.limit} s)"
            )
        found: dict[str, Any] = json.loads(log.read_text().splitlines()[-1])
        return found

    def _training(self, case: Case, order: int, log: Path) -> dict[str, Any]:
        run = RunDir(self.work / "runs" / case.name)
        config = Path("config", f"{case.name}.yaml")
        self._drive(case, order, config, run, log)
        if case.ends == "stop":
            config = write_config(self.work, f"{case.name}", CLUSTER, {**keys_of(case, self.machine), **case.resume})
            for stage in ("plan", "render"):
                self._stage(stage, case.name, config, log)
            self._drive(case, order, config, run, log)
        attempts = load_history(run.attempt_history)
        values = read_training(run, WARM_UP, label_of(case, self.machine)).as_json()
        ends = [(attempt.end, attempt.fallback) for attempt in attempts]
        self._judge(case, run, ends)
        for stage in case.then:
            if stage == "verify":
                command = stage_command(stage, str(run.model), config)[:-2]
                self._run(command, log)
            elif stage == "evaluate":
                with self.gpu.turn(len(self.cases) + order):
                    self._stage(stage, case.name, config, log)
            else:
                self._stage(stage, case.name, config, log)
        return {**values, "attempts": ends, "stages": list(case.then)}

    def _drive(self, case: Case, order: int, config: Path, run: RunDir, log: Path) -> None:
        """Start the driver of the training, and give each attempt its turn, until the case has what it is for."""
        first = len(list(run.attempts.glob("[0-9]*"))) + 1
        with self.importing:
            process = self._start(stage_command("train", case.name, config), log, **self._variables(case))
            self._ready(f"{case.name}-{first:03d}", process)
        for number in count(first):
            name = f"{case.name}-{number:03d}"
            if not self._ready(name, process):
                if case.ends in ("steps", "memory") or process.returncode not in (0, 3):
                    raise CaseError(f"the training ended with exit status {process.returncode}")
                return
            self.weights[shape_of(case, self.machine)].wait()
            with self.gpu.turn(order):
                (self.turns / f"{name}.go").touch()
                self._watch(case, run, number, process)
            if case.ends in ("steps", "memory") and self._steps(run) >= steps_of(case, self.machine):
                return

    def _watch(self, case: Case, run: RunDir, number: int, process: "subprocess.Popen[bytes]") -> None:
        """Wait until the ranks of an attempt have ended, or its steps are done; kill them at the limit."""
        begun, goal = time.time(), steps_of(case, self.machine)
        time.sleep(POLL)
        while any("shardmake.train" in " ".join(_words(one)) for one in self._processes(case)):
            steps = self._steps(run)
            if case.ends in ("steps", "memory") and steps >= goal:
                break
            if case.ends == "stop" and number == 1 and steps >= CHECKPOINT_STEPS:
                run.stop_file.touch()  # as `shardmake stop` does, whose start takes longer than the steps
            if time.time() - begun > case.limit * self.patience or self.left <= 0:
                self._end(case, process)
                raise CaseError(f"not at its end after {time.time() - begun:.0f} s, at step {steps}")
            time.sleep(POLL)
        if case.ends in ("steps", "memory") and self._steps(run) >= goal:
            self._end(case, process)

    def _judge(self, case: Case, run: RunDir, ends: Sequence[tuple[str, int]]) -> None:
        """Raise if the attempts did not go as the case wants."""
        first = ends[0][0] if ends else ""
        if case.ends == "kill" and (first == "finished" or ends[-1][0] != "finished" or len(ends) != 2):
            raise CaseError(f"the attempts ended with {ends}")
        if case.ends == "memory" and first != "GPU out of memory":
            raise CaseError(f"the attempts ended with {ends}")
        if case.ends == "stop" and ends[-1][0] != "finished":
            raise CaseError(f"the attempts ended with {ends}")

    def _variables(self, case: Case) -> dict[str, str]:
        """Return variables of the training: a program that each process runs first, or a limit of the allocator."""
        program = {"kill": _KILL, "memory": _SHORTAGE if self.machine.is_cpu else ""}.get(case.ends, "")
        if program:
            folder = self.work / "hooks" / case.name
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "sitecustomize.py").write_text(program)
            return {"PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}"}
        if case.ends != "memory":
            return {}
        run = RunDir(self.work / "runs" / case.name)
        limit = memory_limit(Plan.read(run.plan), MemoryEstimates.read(run.memory))
        fraction = f"expandable_segments:True,per_process_memory_fraction:{limit / self.machine.memory:.4f}"
        return {"PYTORCH_ALLOC_CONF": fraction}

    def _stage(self, stage: str, name: str, config: Path, log: Path) -> None:
        self._run(stage_command(stage, name, config), log)

    def _run(self, command: Sequence[str], log: Path) -> None:
        process = self._start(command, log)
        try:
            status = process.wait(max(1, self.left))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            status = process.wait()
        if status:
            raise CaseError(f"{command[3]} ended with exit status {status}")

    def _steps(self, run: RunDir) -> int:
        return max((line.step for line in read_metrics(run.metrics) if line.loss is not None), default=0)

    def _processes(self, case: Case) -> Iterator[psutil.Process]:
        """Yield the processes of the case that run: driver, worker, launcher, ranks, or the program."""
        for process in psutil.process_iter(["cmdline", "status"]):
            words = process.info["cmdline"] or []
            own = any(f"/runs/{case.name}/" in word for word in words) or f"{case.name}-001" in words
            mine = own or (case.name in words and f"config/{case.name}.yaml" in words)
            if mine and process.info["status"] != psutil.STATUS_ZOMBIE and process.pid != os.getpid():
                yield process

    def _end(self, case: Case, process: "subprocess.Popen[bytes]") -> None:
        """Kill the driver first, so that it starts no other attempt, then all else of the case."""
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        for one in self._processes(case):
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        process.wait()


def memory_limit(plan: Plan, estimates: MemoryEstimates) -> int:
    """Return the bytes halfway between the need of the choice and that of the last fallback."""
    most, least = (estimates.of(choice).gpu.reserved for choice in (plan.choice, plan.fallbacks[-1].choice))
    if least >= 0.8 * most:
        raise CaseError(f"the fallbacks save too little: {least} of {most} bytes")
    return (most + least) // 2


def _build_adam() -> "subprocess.Popen[bytes]":
    """Start to compile DeepSpeed's Adam where the trainings look for it: in the default scratch of a cluster file."""
    variables = os.environ | kernel_caches(Cluster.model_fields["scratch"].default)
    return subprocess.Popen([sys.executable, "-c", _BUILD_ADAM], stdout=subprocess.DEVNULL, env=variables)


def _words(process: psutil.Process) -> list[str]:
    info: Mapping[str, Any] = process.info
    return list(info["cmdline"] or [])
