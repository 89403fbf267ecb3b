"""The service of a node with a real process: its start, its address, its end, and what a failure says."""

import contextlib
import os
import socket
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from shardmake.config import models
from shardmake.config.script_file import SERVICE_VARIABLES
from shardmake.launch import service
from shardmake.launch.service import Service, ServiceAddress, ServiceError, answers, wait_for_services
from shardmake.render.stage import render_files, write_files
from shardmake.run.attempt import AttemptDir, host_name
from tests.finished_run import make_exit
from tests.unit.launch.fake_run import write_attempt
from tests.unit.plans import make_cluster, make_model, make_plan, make_run
from tests.workflow.checkout import wait_for

SERVER = (
    "import http.server as h; "
    "h.ThreadingHTTPServer(('$SHARDMAKE_SERVICE_HOST', $SHARDMAKE_SERVICE_PORT), h.SimpleHTTPRequestHandler)"
    ".serve_forever()"
)
COMMAND = f'echo loading; cd /proc/self/fd; exec {sys.executable} -c "{SERVER}"'


@pytest.fixture
def folder(tmp_path: Path) -> AttemptDir:
    """The attempt of a script on one node, with a service beside it, on this machine."""
    folder = AttemptDir(tmp_path / "train/attempts/001")
    plan = make_plan("ddp", nodes=1).model_copy(update={"service_nodes": 1})
    write_attempt(folder, plan)
    folder.rendezvous.mkdir()
    service = {"command": COMMAND, "start_seconds": 20}
    script = tmp_path / "train.py"
    script.touch()
    run = make_run(script=str(script), nodes=1, service_nodes=1, service=service)
    write_files(render_files(plan, run, make_cluster(), make_model(), folder.root), folder.root, make_model())
    return folder


def make_service(folder: AttemptDir, command: str, seconds: float, health: str | None = None) -> Service:
    settings = models.Service(command=command, health=health, start_seconds=seconds)
    return Service(folder, folder.read(), settings, node_rank=1, log=folder.log(1).open("a", buffering=1))


@pytest.fixture
def serving(folder: AttemptDir) -> Iterator[list[object]]:
    """A service that runs in a thread, and in the end what it returned or raised."""
    found: list[object] = []
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(make_service(folder, COMMAND, 20, "/0").run, {}, "127.0.0.1")
        running.add_done_callback(lambda done: found.append(done.exception() or done.result()))
        yield found
        write_exit(folder, 0, 0)


def write_exit(folder: AttemptDir, rank: int, returncode: int | None) -> None:
    make_exit(rank, returncode=returncode).write(folder.exit_record(rank))


def process_at(port: int) -> psutil.Process:
    """Return this test's own child that listens at ``port``."""
    for child in psutil.Process().children(recursive=True):
        if any(one.status == psutil.CONN_LISTEN and one.laddr.port == port for one in child.net_connections()):
            return child
    pytest.fail("no process listens")


def belongs_to_a_service(process: psutil.Process) -> bool:
    """Return whether a service started ``process``; other tests of this process may have children, too."""
    with contextlib.suppress(psutil.Error):
        return SERVICE_VARIABLES[0] in process.environ()
    return False


def end_of(found: list[object]) -> object:
    wait_for(lambda: found)
    return found[0]


@pytest.mark.parametrize("returncode", [0, 1])
def test_it_serves_the_ranks_until_they_end(folder: AttemptDir, serving: list[object], returncode: int) -> None:
    variables = wait_for_services(folder, folder.read()) or {}
    host, port, addresses = variables.values()
    assert list(variables) == [f"SHARDMAKE_SERVICE_{name}" for name in ("HOST", "PORT", "ADDRESSES")]
    assert host == "127.0.0.1" and addresses == f"{host}:{port}" and answers(host, int(port), "/0")
    process = process_at(int(port))
    write_exit(folder, 0, returncode)
    assert end_of(serving) == 0 and not process.is_running() and not answers(host, int(port), None)
    log = folder.log(1).read_text()
    assert f"env SHARDMAKE_SERVICE_HOST=127.0.0.1 SHARDMAKE_SERVICE_PORT={port}" in log and "loading" in log


def test_a_service_that_ends_before_the_ranks_is_a_failure(folder: AttemptDir, serving: list[object]) -> None:
    variables = wait_for_services(folder, folder.read()) or {}
    process_at(int(variables["SHARDMAKE_SERVICE_PORT"])).kill()
    error = end_of(serving)
    assert isinstance(error, ServiceError) and error.phase == service.SERVING
    assert "was ended by SIGKILL before the training." in str(error)


@pytest.mark.parametrize(("command", "words"), [
    ("echo no GPU is free; exit 3", "ended with status 3 before it was ready. Its last output: no GPU is free"),
    ("kill -9 $$", "was ended by SIGKILL before it was ready."),
    ("echo loading; sleep 100", "did not answer at /health within 2 s (service.start_seconds). Its last output: loading"),
    ("echo $SHARDMAKE_MODLE", "SHARDMAKE_MODLE: "), ("true", "ended with status 0 before it was ready."),
])  # fmt: skip
def test_a_service_that_does_not_start_says_why(folder: AttemptDir, command: str, words: str) -> None:
    with pytest.raises(ServiceError) as error:
        make_service(folder, command, 2, "/health").run({"PATH": "/usr/bin:/bin"}, "127.0.0.1")
    assert words in str(error.value) and error.value.phase == service.STARTING
    children = psutil.Process().children(recursive=True)
    assert not list(filter(belongs_to_a_service, children)), "nothing that it started stays"


def test_what_a_service_prints_is_logged_without_secrets(folder: AttemptDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STORE_PASSWORD", "Plant-by-value-1")
    command = "echo serving --api-key=Plant77w!; echo $STORE_PASSWORD; echo login with password=Plant78w! >&2; exit 3"
    with pytest.raises(ServiceError, match=r"Its last output: login with password=\[removed\]$"):
        make_service(folder, command, 20).run(os.environ, "127.0.0.1")
    log = folder.log(1).read_text()
    assert log.endswith("serving --api-key=[removed]\n[removed]\nlogin with password=[removed]\n")
    assert "Plant" not in log


def test_a_service_that_loads_is_reported_with_its_output(folder: AttemptDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "MINUTE", 0.05)
    monkeypatch.setattr(service, "_POLL_SECONDS", 0.1)
    folder.log(1).write_text("# output of the service\nshard 3 of 9\n")
    lines: list[str] = []
    warn = lambda text: lines.append(text) or len(lines) < 2 or folder.stop_file.touch()  # noqa: E731
    assert wait_for_services(folder, folder.read(), warn) is None
    assert lines[0] == "The service has been loading for 1 minute. Its last output: shard 3 of 9"
    assert lines[1].startswith("The service has been loading for 2 minutes.")


def test_a_failed_node_ends_a_start_without_blame(folder: AttemptDir) -> None:
    write_exit(folder, 0, None)
    assert make_service(folder, "sleep 100", 20).run({"PATH": "/usr/bin:/bin"}, "127.0.0.1") == 0
    assert wait_for_services(folder, folder.read()) is None


def publish(folder: AttemptDir, port: int) -> None:
    folder.services.mkdir()
    address = ServiceAddress(address="127.0.0.1", port=port, host="c3", seconds=1.0)
    address.write(folder.services / "start-0-node-1.json")


def test_ranks_do_not_start_without_reaching_the_service(folder: AttemptDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "CONNECT_SECONDS", 0.5)
    publish(folder, port=1)
    folder.log(1).write_text("# output of the service\nshard 9 of 9\nlistening\n")
    words = (
        rf"^{host_name()} could not connect to the service on c3 at 127.0.0.1, port 1, for 0.5 s, although it answers "
    )
    with pytest.raises(ServiceError, match=rf"{words}.*network_interface .*Its last output: listening$"):
        wait_for_services(folder, folder.read())


def test_a_node_connects_to_a_service_that_it_reaches_late(folder: AttemptDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """The port opens after the first connection was refused."""
    monkeypatch.setattr(service, "_POLL_SECONDS", 0.1)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        publish(folder, port)
        refused: list[bool] = []

        def answers_late(*where: Any) -> bool:
            found = answers(*where)
            refused.append(not found)
            listener.listen()
            return found

        monkeypatch.setattr(service, "answers", answers_late)
        variables = wait_for_services(folder, folder.read())
    assert refused == [True, False] and variables is not None
    assert variables["SHARDMAKE_SERVICE_PORT"] == str(port)


@pytest.mark.parametrize("end", ["stop", "another node failed"])
def test_a_node_that_tries_to_connect_ends_with_the_job(folder: AttemptDir, end: str) -> None:
    publish(folder, port=1)
    if end == "stop":
        folder.stop_file.touch()
    else:
        write_exit(folder, 0, 1)
    assert wait_for_services(folder, folder.read()) is None


def test_variables_name_every_service_and_one_node_leaves_loopback_for_it(folder: AttemptDir) -> None:
    services = [ServiceAddress(address=one, port=2, host="h", seconds=1.0) for one in ("10.0.0.3", "fd00::4")]
    assert service.service_variables(services)["SHARDMAKE_SERVICE_ADDRESSES"] == "10.0.0.3:2,[fd00::4]:2"
    attempt = folder.read()
    assert service.training_interface(attempt) is None
    elsewhere = attempt.model_copy(update={"on_one_machine": False, "network_interface": "none0"})
    with pytest.raises(RuntimeError, match="has no address on the interface 'none0'"):
        service.training_interface(elsewhere)
