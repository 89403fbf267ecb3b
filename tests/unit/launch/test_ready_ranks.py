"""A launcher and ranks that wait with their imports done: real processes, hand-over, ends and what prevents it."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from shardmake.config.models import Slurm
from shardmake.launch.ready_ranks import is_used
from shardmake.run.attempt import AttemptDir
from shardmake.run.training_settings import ScriptProgram
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


def child(before: str = "") -> Waiting:
    command = [sys.executable, "-c", CHILD.format(before=before)]
    return Waiting(command, ENVIRONMENT, **PIPES)


def has_ended(pid: int) -> bool:
    """Return whether the process ends within some seconds; one that nobody has waited for counts too."""
    for _ in range(100):
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.1)
    return False


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may need more than a second until the child answers."""
    monkeypatch.setattr("shardmake.train.waiting.ANSWER_SECONDS", 60.0)


@pytest.mark.usefixtures("patient")
def test_the_child_gets_arguments_and_variables_and_the_parent_its_status() -> None:
    waiting = child()
    environment = {name: value for name, value in ENVIRONMENT.items() if name != "TORCHELASTIC_RUN_ID"}
    assert waiting.start(["7", "é\udcff"], environment | {"MASTER_PORT": "2"})
    printed, _ = waiting.process.communicate()
    assert printed.decode().strip() == "['7', 'é\\udcff'] 2 None" and waiting.process.returncode == 7


@pytest.mark.usefixtures("patient")
def test_a_signal_to_the_child_is_its_end() -> None:
    waiting = child("sys.exit = lambda status: time.sleep(1000)")
    assert waiting.start(["0"], ENVIRONMENT)
    waiting.process.terminate()
    assert waiting.process.wait() == -signal.SIGTERM


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "HF_HOME", "RANK", "CUDA_VISIBLE_DEVICES", "MASTER_PORTS"])
def test_a_process_that_may_have_read_another_value_is_not_used(name: str) -> None:
    waiting = child()
    assert not waiting.start(["0"], ENVIRONMENT | {name: "17"})
    assert waiting.process.returncode == -signal.SIGKILL


@pytest.mark.parametrize("state", ["imports", "stopped", "killed"])
def test_a_process_that_does_not_answer_is_not_used(state: str) -> None:
    waiting = child("print('imports', flush=True); time.sleep(1000)" if state == "imports" else "print(flush=True)")
    assert waiting.process.stdout and waiting.process.stdout.readline()
    if state != "imports":
        waiting.process.send_signal(signal.SIGSTOP if state == "stopped" else signal.SIGKILL)
    assert not waiting.start(["0"], ENVIRONMENT)
    assert waiting.process.returncode == -signal.SIGKILL


def test_a_process_that_waits_ends_with_its_parent(tmp_path: Path) -> None:
    program = f"""
import os, subprocess, sys, time
from shardmake.train.waiting import Waiting
waiting = Waiting([sys.executable, "-c", {CHILD.format(before="")!r}], os.environ, stderr=subprocess.DEVNULL)
print(waiting.process.pid, flush=True)
time.sleep(1000)
"""
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert parent.stdout
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    assert has_ended(pid)


# ---- the worker -----------------------------------------------------------------------------------------------------

WORKER = f"""
import os, psutil, subprocess, sys
from pathlib import Path
from shardmake.launch import ready_ranks
from shardmake.launch.ready_ranks import READY
from shardmake.launch.restart import end_descendants
from shardmake.run.attempt import AttemptDir, Heartbeat
from shardmake.train import waiting

def prepare(*phases):
    beats = [Heartbeat(rank=0, host="n", pid=os.getpid(), phase=phase, step=2, time=0.0) for phase in phases if phase]
    READY.prepare(AttemptDir(Path("attempt")), [*beats, *[None] * phases.count("")], os.environ)

waiting.ANSWER_SECONDS = 60.0
ready_ranks._LAUNCHER = (sys.executable, "-c", {CHILD.format(before="import subprocess; subprocess.Popen(['sleep', '1000'])")!r})
ready_ranks.is_used = lambda _: True
for phases in (("train", ""), ("train", "first step"), ("load", "train")):
    prepare(*phases)
    assert READY.processes() == [] and READY.memory() == 0
assert READY.start(["0"], os.environ) is None
prepare("train", "train")
launcher = READY.processes()[0]
while len(READY.processes()) < 2 and launcher.is_running(): pass  # a child of the launcher, as its ranks
prepare("train", "train")
assert READY.processes()[0] == launcher and READY.memory() > 0
rank = subprocess.Popen(["sleep", "1000"])
assert end_descendants() and not psutil.pid_exists(rank.pid)
assert READY.processes()[0] == launcher and launcher.is_running()
started = READY.start(["5"], os.environ)
assert started.pid == launcher.pid and started.wait() == 5
assert READY.processes() == [] and READY.start(["0"], os.environ) is None
prepare("train")
print(*[process.pid for process in READY.processes()])
"""


def test_the_launcher_waits_through_the_end_of_the_ranks_and_ends_with_the_worker() -> None:
    environment = {**os.environ, "MASTER_PORT": "1"}
    done = subprocess.run([sys.executable, "-c", WORKER], capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    assert has_ended(int(done.stdout.split()[-1]))


@pytest.mark.parametrize(
    ("changes", "program", "used"),
    [
        ({}, {}, True),
        ({"restart_in_place": False}, {}, False),
        ({"container": "image.sif"}, {}, False),
        ({"on_one_machine": True}, {}, False),
        ({}, {"script": "train.py"}, False),
    ],
)
def test_ranks_are_kept_ready_for_own_trainings_in_slurm(
    tmp_path: Path, changes: dict[str, Any], program: dict[str, str], used: bool
) -> None:
    folder = AttemptDir(tmp_path / "runs/demo/train/attempts/001")
    site = make_cluster(executor="slurm", slurm=Slurm(restart_in_place=True))
    write_attempt(folder, make_plan("ddp"), site).model_copy(update=changes).write(folder.settings)
    settings = make_training_settings("ddp")
    if program:
        settings = settings.model_copy(update={"program": ScriptProgram(path="train.py", args=[], sha256="0")})
    settings.write(folder.training)
    assert is_used(folder) == used


# ---- the launcher ---------------------------------------------------------------------------------------------------

RANK = """
import os, sys, time
from shardmake.core.process import die_with_parent
from shardmake.train.waiting import wait_for_arguments
die_with_parent()
rank, ready = int(os.environ["RANK"]), len(sys.argv) > 2
if ready:
    sys.argv[1:] = wait_for_arguments(int(sys.argv[2]))
precision = os.environ["ACCELERATE_MIXED_PRECISION"]
print("rank", rank, os.getpid(), precision, "was ready" if ready else "is new", flush=True)
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
waiting.ANSWER_SECONDS = float(os.environ["ANSWER"])
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
        self.environment["ANSWER"] = "60"
        self.running = subprocess.Popen(self.command("sleep"), env=self.environment, **PIPES)
        self.pids = [line.split()[2] for line in lines_of_ranks(self.running, 2)]

    def command(self, argument: str, *options: str) -> list[str]:
        """Return the worker's command."""
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        return [
            *(sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(self.config)),
            *("--machine_rank", "0", "--main_process_ip", "localhost", "--main_process_port", str(port)),
            *("--rdzv_backend", "static", "--same_network", "--max_restarts", "0", *options, "-m", "rank", argument),
        ]

    def prepare(self, **variables: str) -> Waiting:
        """Start the launcher that waits."""
        command = [sys.executable, "-c", LAUNCHER, "attempt", *self.pids]
        return Waiting(command, self.environment | variables, **PIPES)


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launch]:
    launch = Launch(tmp_path_factory.mktemp("launch"))
    yield launch
    launch.running.terminate()
    launch.running.wait()


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize(
    ("argument", "status", "says"), [("0", 0, ""), ("7", 1, "exitcode  : 7"), ("-9", 1, "exitcode  : -9")]
)
def test_the_ranks_that_wait_are_those_of_the_launcher(launch: Launch, argument: str, status: int, says: str) -> None:
    waiting = launch.prepare()
    assert waiting.start(launch.command(argument), launch.environment)
    ranks = lines_of_ranks(waiting.process, 2)
    assert [line.split()[-2:] for line in ranks] == [["was", "ready"]] * 2
    rest = waiting.process.communicate()[0].decode()
    assert waiting.process.returncode == status and says in rest
    assert all(has_ended(int(line.split()[2])) for line in ranks)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("why", ["stopped", "killed", "another precision"])
def test_a_rank_that_cannot_be_used_is_started_as_ever(launch: Launch, why: str) -> None:
    waiting = launch.prepare(ANSWER="1" if why == "stopped" else "60")
    options = ["--mixed_precision", "bf16"] if why == "another precision" else []
    children = psutil.Process(waiting.process.pid).children
    while len(children()) < 2 or any("RANK" not in child.environ() for child in children()):
        time.sleep(0.1)
    (second,) = [child for child in children() if child.environ()["RANK"] == "1"]
    if not options:
        second.send_signal(signal.SIGSTOP if why == "stopped" else signal.SIGKILL)
    environment = launch.environment | {"ANSWER": "1" if why == "stopped" else "60"}
    assert waiting.start(launch.command("0", *options), environment)
    printed = waiting.process.communicate()[0].decode()
    ranks = sorted(line for line in printed.splitlines() if line.startswith("rank "))
    assert waiting.process.returncode == 0 and len(ranks) == 2, printed
    assert ranks[1].endswith("is new")
    if why != "stopped":  # then both have one second
        assert ranks[0].endswith("bf16 is new" if options else "was ready")
    assert has_ended(second.pid)


@pytest.mark.usefixtures("patient")
def test_the_ranks_end_with_the_launcher(launch: Launch) -> None:
    waiting = launch.prepare()
    assert waiting.start(launch.command("sleep"), launch.environment)
    ranks = lines_of_ranks(waiting.process, 2)
    waiting.process.kill()
    waiting.process.wait()
    assert all(has_ended(int(line.split()[2])) for line in ranks)
