"""A launcher and ranks that wait with their imports done: real processes, hand-over, ends and what prevents it."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import psutil
import pytest
import torch

from shardmake.config.models import Slurm
from shardmake.core.process import wait_until
from shardmake.launch.ready_ranks import is_used
from shardmake.run.attempt import AttemptDir
from shardmake.run.training_settings import ScriptProgram
from shardmake.train import trainer
from shardmake.train.waiting import Waiting
from tests.unit.launch.fake_run import write_attempt
from tests.unit.plans import make_cluster, make_plan, make_training_settings

CHILD = """
import os, sys, time
from shardmake.train.waiting import wait_for_arguments
{before}
arguments = wait_for_arguments(int(sys.argv[-1]))
print(arguments, os.environ["MASTER_PORT"], os.environ.get("TORCHELASTIC_RUN_ID"), flush=True)
sys.exit(int(arguments[0]))
"""
PIPES: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
ENVIRONMENT = {**os.environ, "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "none"}


def has_ended(pid: int) -> bool:
    """Return whether the process ends within some seconds; one that nobody has waited for counts too."""
    return wait_until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE, 20)


def child(before: str = "") -> Waiting:
    waiting = Waiting([sys.executable, "-c", CHILD.format(before=before)], ENVIRONMENT, **PIPES)
    assert before or wait_until(waiting.is_ready, 60)
    return waiting


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may need more than a second until the child answers."""
    monkeypatch.setattr("shardmake.train.waiting.ANSWER_SECONDS", 60.0)


def test_the_child_gets_arguments_and_variables_and_the_parent_its_status() -> None:
    waiting = child()
    environment = {name: value for name, value in ENVIRONMENT.items() if name != "TORCHELASTIC_RUN_ID"}
    assert not waiting.start(["7", "é\udcff"], environment | {"MASTER_PORT": "2"})
    printed, _ = waiting.process.communicate()
    assert printed.decode().strip() == "['7', 'é\\udcff'] 2 None" and waiting.process.returncode == 7


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "HF_HOME", "RANK", "CUDA_VISIBLE_DEVICES", "MASTER_PORTS"])
def test_a_process_that_may_have_read_another_value_is_not_used(name: str) -> None:
    waiting = child()
    assert waiting.start(["0"], ENVIRONMENT | {name: "17"}) == f"these variables differ: {name}"
    assert waiting.process.returncode == -signal.SIGKILL


@pytest.mark.parametrize("state", ["imports", "stopped", "killed"])
def test_a_process_that_does_not_answer_is_not_used(state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = child("time.sleep(1000)" if state == "imports" else "")
    if state != "imports":
        waiting.process.send_signal(signal.SIGSTOP if state == "stopped" else signal.SIGKILL)
    monkeypatch.setattr("shardmake.train.waiting.ANSWER_SECONDS", 1.0)
    assert waiting.start(["0"], ENVIRONMENT)
    assert waiting.process.returncode == -signal.SIGKILL


def test_a_library_that_starts_cuda_ends_the_rank_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the library ignores the error: it may have taken the CPU instead."""

    def load(settings: Any) -> None:
        with contextlib.suppress(RuntimeError):
            torch.cuda.init()

    context = SimpleNamespace(settings=SimpleNamespace(objective="sft", model=mock.MagicMock()))
    monkeypatch.setattr(trainer.RankContext, "load", lambda folder: context)
    monkeypatch.setattr(trainer, "_import_engine", lambda context: None)
    monkeypatch.setattr(trainer, "load_tokenizer", lambda settings: None)
    trainer.import_libraries(Path("attempt"))
    monkeypatch.setattr(trainer, "load_tokenizer", load)
    with pytest.raises(RuntimeError, match="must not start CUDA"):
        trainer.import_libraries(Path("attempt"))


# ---- the worker -----------------------------------------------------------------------------------------------------

WORKER = f"""
import os, psutil, subprocess, sys
from pathlib import Path
from types import SimpleNamespace
from shardmake.core.process import wait_until
from shardmake.launch import ready_ranks
from shardmake.launch.ready_ranks import READY
from shardmake.launch.restart import adopt_orphans, end_descendants
from shardmake.run.attempt import AttemptDir, Heartbeat
from shardmake.train import waiting

attempt, log = SimpleNamespace(versions={{}}, commit="a"), Path(sys.argv[1])

def prepare(*phases):
    beats = [Heartbeat(rank=0, host="n", pid=os.getpid(), phase=phase, step=2, time=0.0) for phase in phases if phase]
    READY.prepare(AttemptDir(Path("attempt")), attempt, os.environ, [*beats, *[None] * phases.count("")])
    if READY.processes():  # the launcher, and its child, as its ranks
        assert wait_until(lambda: len(READY.processes()) == 2 and READY._waiting.is_ready(), 60)

def start(status):
    return READY.start([status], os.environ, attempt, log)

adopt_orphans()
waiting.ANSWER_SECONDS = 60.0
ready_ranks._LAUNCHER = ("/nothing/here",)
prepare("train")
launcher = {CHILD.format(before="import subprocess; print('imports', flush=True); subprocess.Popen(['sleep', '1000'])")!r}
ready_ranks._LAUNCHER = (sys.executable, "-c", launcher)
for phases in (("train", ""), ("train", "first step"), ("load", "train")):
    prepare(*phases)
    assert READY.processes() == [] and READY.memory() == 0
assert start("0") is None
for status in (5, 6):
    prepare("train", "train")
    launcher = READY.processes()[0]
    prepare("train", "train")
    assert READY.processes()[0] == launcher and READY.memory() > 0
    rank = subprocess.Popen(["sleep", "1000"])
    assert end_descendants() and not psutil.pid_exists(rank.pid)
    assert READY.processes()[0] == launcher and launcher.is_running()
    started = start(str(status))
    assert started.pid == launcher.pid and started.wait() == status
    assert end_descendants() and READY.processes() == [] and start("0") is None
assert not log.exists()
prepare("train")
attempt.versions = {{"torch": "new"}}
assert start("0") is None and READY.processes() == []
assert wait_until(lambda: end_descendants() and "imports" in log.read_text(), 60)
assert "not used, because libraries or Shardmake have changed." in log.read_text()
prepare("train")
print(*[process.pid for process in READY.processes()])
"""


def test_the_launcher_waits_through_the_end_of_the_ranks_and_ends_with_the_worker(tmp_path: Path) -> None:
    environment = {**os.environ, "MASTER_PORT": "1"}
    command = [sys.executable, "-c", WORKER, str(tmp_path / "log")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    launcher, its_child = map(int, done.stdout.split())
    assert has_ended(launcher)
    psutil.Process(its_child).kill()  # a rank would have ended with it


@pytest.mark.parametrize(("changes", "program", "used"), [
    ({}, {}, True), ({"restart_in_place": False}, {}, False), ({"container": "image.sif"}, {}, False),
    ({"on_one_machine": True}, {}, False), ({}, {"script": "train.py"}, False),
])  # fmt: skip
def test_ranks_are_kept_ready_for_own_trainings_in_slurm(
    tmp_path: Path, changes: dict[str, Any], program: dict[str, str], used: bool
) -> None:
    folder = AttemptDir(tmp_path / "runs/demo/train/attempts/001")
    site = make_cluster(executor="slurm", slurm=Slurm(restart_in_place=True))
    attempt = write_attempt(folder, make_plan("ddp"), site).model_copy(update=changes)
    settings = make_training_settings("ddp")
    if program:
        settings = settings.model_copy(update={"program": ScriptProgram(path="train.py", args=[], sha256="0")})
    settings.write(folder.training)
    assert is_used(folder, attempt) == used


# ---- the launcher ---------------------------------------------------------------------------------------------------

RANK = """
import os, sys, time
from shardmake.core.process import die_with_parent
from shardmake.train.waiting import wait_for_arguments
die_with_parent()
rank, ready = int(os.environ["RANK"]), len(sys.argv) > 2
if ready:
    sys.argv[1:] = wait_for_arguments(int(sys.argv[2]))
line = f"rank {rank} {os.getpid()} {os.environ['ACCELERATE_MIXED_PRECISION']} {'was ready' if ready else 'is new'}"
os.write(1, line.encode() + bytes([10]))  # the lines of two ranks stay whole
if sys.argv[1] == "sleep":
    time.sleep(1000)
if rank == 1 and int(sys.argv[1]) < 0:
    os.kill(os.getpid(), -int(sys.argv[1]))
sys.exit(rank * int(sys.argv[1]))
"""
LAUNCHER = """
import os, sys
from shardmake.launch import ready_ranks
from shardmake.train import waiting
ready_ranks._RANK = (sys.executable, "-u", "-m", "rank")
waiting.ANSWER_SECONDS = {seconds}
ready_ranks.main()
"""


def lines_of_ranks(launcher: subprocess.Popen[bytes], count: int) -> list[str]:
    """Return what the ranks print first, by rank."""
    assert launcher.stdout
    found: list[str] = []
    while len(found) < count and (line := launcher.stdout.readline().decode()):
        found += [line.strip()] if line.startswith("rank ") else []
    return sorted(found)


class Launch:
    """Two ranks that run, started by Accelerate, and the launcher and ranks that wait beside them."""

    def __init__(self, folder: Path) -> None:
        self.config = folder / "accelerate.yaml"
        self.config.write_text(
            "{compute_environment: LOCAL_MACHINE, distributed_type: MULTI_GPU, num_machines: 1, num_processes: 2, "
            "use_cpu: false, main_training_function: main, mixed_precision: 'no'}"
        )
        (folder / "rank.py").write_text(RANK)
        path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
        self.environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        self.running = subprocess.Popen(self.command("sleep"), env=self.environment, **PIPES)
        self.pids = [line.split()[2] for line in lines_of_ranks(self.running, 2)]

    def command(self, argument: str, *options: str) -> list[str]:
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        return [
            *(sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(self.config)),
            *("--machine_rank", "0", "--main_process_ip", "localhost", "--main_process_port", str(port)),
            *("--rdzv_backend", "static", "--same_network", "--max_restarts", "0", *options, "-m", "rank", argument),
        ]

    def prepare(self, seconds: float = 60.0) -> Waiting:
        """Start the launcher that waits, with its ranks, which get ``seconds`` to answer."""
        command = [sys.executable, "-c", LAUNCHER.format(seconds=seconds), "attempt", *self.pids]
        waiting = Waiting(command, self.environment, **PIPES)
        assert wait_until(waiting.is_ready, 60)
        return waiting


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launch]:
    launch = Launch(tmp_path_factory.mktemp("launch"))
    yield launch
    launch.running.terminate()
    launch.running.wait()


@pytest.mark.parametrize(
    ("argument", "status", "says"), [("0", 0, ""), ("7", 1, "exitcode  : 7"), ("-9", 1, "exitcode  : -9")]
)
def test_the_ranks_that_wait_are_those_of_the_launcher(launch: Launch, argument: str, status: int, says: str) -> None:
    waiting = launch.prepare()
    assert not waiting.start(launch.command(argument), launch.environment)
    ranks = lines_of_ranks(waiting.process, 2)
    assert [line.split()[-2:] for line in ranks] == [["was", "ready"]] * 2
    rest = waiting.process.communicate()[0].decode()
    assert waiting.process.returncode == status and says in rest
    assert all(has_ended(int(line.split()[2])) for line in ranks)


@pytest.mark.parametrize("why", ["stopped", "killed", "another precision"])
def test_a_rank_that_cannot_be_used_is_started_as_ever(launch: Launch, why: str) -> None:
    waiting = launch.prepare(5.0 if why == "stopped" else 60.0)
    options = ["--mixed_precision", "bf16"] if why == "another precision" else []
    children = psutil.Process(waiting.process.pid).children()
    (second,) = [child for child in children if child.environ()["RANK"] == "1"]
    if not options:
        second.send_signal(signal.SIGSTOP if why == "stopped" else signal.SIGKILL)
    assert not waiting.start(launch.command("0", *options), launch.environment)
    printed = waiting.process.communicate()[0].decode()
    first, last = sorted(re.findall(r"rank \d .*?(?:was ready|is new)", printed))  # their lines may be mixed
    assert waiting.process.returncode == 0 and last.endswith("is new"), printed
    assert first.endswith("bf16 is new" if options else "was ready")
    assert "Rank 1 that was kept ready is not used, because" in printed and has_ended(second.pid)


def test_the_ranks_end_with_the_launcher(launch: Launch) -> None:
    """Those that wait, and those that run."""
    for starts in (False, True):
        waiting = launch.prepare()
        ranks = [child.pid for child in psutil.Process(waiting.process.pid).children()]
        if starts:
            assert not waiting.start(launch.command("sleep"), launch.environment)
            assert [int(line.split()[2]) for line in lines_of_ranks(waiting.process, 2)] == ranks
        waiting.process.kill()
        waiting.process.wait()
        assert len(ranks) == 2 and all(map(has_ended, ranks))
