"""A run's service: a program on the last nodes of the job, which serves the training script (docs/how-to).

The worker of a service node starts the command, waits until it answers, and publishes its address. The workers of the
training nodes wait for that before they start their ranks. The service ends with the training; if it ends earlier, the
attempt has failed.
"""

import contextlib
import http.client
import os
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

from pydantic import Field

from shardmake.config import models
from shardmake.config.script_file import SERVICE_VARIABLES
from shardmake.core.process import die_with_parent
from shardmake.core.run_folder import make_folder, read_bytes
from shardmake.core.secrets import LogCopy, redact
from shardmake.core.units import plural
from shardmake.launch.rendezvous import choose_address, listen
from shardmake.run.attempt import Attempt, AttemptDir, host_name
from shardmake.run.record import RunFile
from shardmake.run.training_settings import ScriptProgram, TrainingSettings

STARTING, SERVING = "service start", "service"
"""Phases of a node's worker: until the service answers, and from then on."""
_POLL_SECONDS = 1.0
_ANSWER_SECONDS = 10.0
CONNECT_SECONDS = 60.0
"""How long a training node tries to connect to a service that answers on its own node."""
_END_SECONDS = 10.0
"""How long the service may take to end after SIGINT, before SIGKILL."""
MINUTE = 60.0
_LATER_SECONDS = 60.0
"""How much longer than the service's own limit a training node waits: its worker may start later."""
_IGNORED = (signal.SIGTERM, signal.SIGUSR2, signal.SIGHUP)
"""Signals that ask a job to save and stop: the worker handles them, and the ranks need the service until they saved."""


class ServiceError(RuntimeError):
    """The service did not start, or ended before the training; ``phase`` is that of the worker."""

    def __init__(self, message: str, phase: str) -> None:
        super().__init__(message)
        self.phase = phase


class ServiceAddress(RunFile):
    """Address of a service that answers."""

    address: str = Field(description="Address of the node.")
    port: int = Field(description="Port.")
    host: str = Field(description="Name of the node.")
    seconds: float = Field(description="Time from the start of the command to the first answer.")


def training_interface(attempt: Attempt) -> str | None:
    """Return the interface for the rendezvous: a single training node must not take loopback beside a service node."""
    if not attempt.service_nodes or attempt.on_one_machine:
        return attempt.network_interface
    return service_address(attempt)[0]


def service_address(attempt: Attempt) -> tuple[str, str]:
    """Return the interface and the address of this node for traffic between the ranks and the service."""
    return choose_address(attempt.network_interface, nodes=1 if attempt.on_one_machine else attempt.job_nodes)


@dataclass
class Service:
    """The service of one node, in one start of the job."""

    folder: AttemptDir
    attempt: Attempt
    settings: models.Service
    node_rank: int
    log: IO[str]
    output: LogCopy | None = None

    def run(self, environment: Mapping[str, str], address: str) -> int:
        """Run the command at a free port of ``address`` until the training has ended, and return 0.

        Raises:
            ServiceError: it did not answer in time, or ended before the training.
        """
        with listen(address) as listener:
            port = int(listener.getsockname()[1])
        variables = dict(zip(SERVICE_VARIABLES, (address, str(port)), strict=False))
        command = ["/bin/sh", "-uc", self.settings.command]
        print(_heading(self.attempt, self.node_rank, variables, command), file=self.log, flush=True)
        environment = {**environment, **variables}
        started = time.monotonic()
        log = self.folder.log(self.node_rank)
        process, self.output = start_program(
            command, environment, log, stdin=subprocess.DEVNULL, start_new_session=True
        )
        try:
            if self._is_ready(process, address, port):
                seconds = time.monotonic() - started
                ready = ServiceAddress(address=address, port=port, host=host_name(), seconds=seconds)
                ready.write(_address_file(self.folder, self.attempt.start, self.node_rank))
                self._watch(process)
        finally:
            _end(process)
            self.output.wait()
        return 0

    def _is_ready(self, process: subprocess.Popen[bytes], address: str, port: int) -> bool:
        """Wait until the service answers; return False if the job ends before that."""
        deadline = time.monotonic() + self.settings.start_seconds
        while not answers(address, port, self.settings.health):
            if self._is_over() or self.folder.stop_file.exists():
                return False
            if process.poll() is not None:
                raise ServiceError(f"The service {self._ended(process)} before it was ready.{self._last()}", STARTING)
            if time.monotonic() > deadline:
                where = self.settings.health or "its port"
                raise ServiceError(
                    f"The service on {host_name()} did not answer at {where} within {self.settings.start_seconds:g} s "
                    f"(service.start_seconds).{self._last()}",
                    STARTING,
                )
            time.sleep(_POLL_SECONDS)
        return True

    def _watch(self, process: subprocess.Popen[bytes]) -> None:
        """Return when the training has ended; raise `ServiceError` if the process ends before."""
        while not self._is_over():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_POLL_SECONDS)
                if not self._is_over():
                    raise ServiceError(
                        f"The service {self._ended(process)} before the training.{self._last()}", SERVING
                    )

    def _is_over(self) -> bool:
        """Return whether all training nodes have ended or one has failed, or a later start of the job has begun."""
        return (
            self.folder.has_failed_node()
            or self.folder.is_superseded()
            or all(self.folder.exit_record(rank).exists() for rank in range(self.attempt.nodes))
        )

    def _ended(self, process: subprocess.Popen[bytes]) -> str:
        status = process.returncode
        number = -status if status < 0 else status - 128  # the shell's status for a program that a signal ended
        by = f"was ended by {signal.Signals(number).name}" if number in signal.valid_signals() else ""
        return f"on {host_name()} {by or f'ended with status {status}'}"

    def _last(self) -> str:
        """Return the last line of the service's output as a sentence; empty without output."""
        if self.output is not None:
            self.output.wait()
        return _last_output(self.folder.log(self.node_rank))


def _last_output(log: Path) -> str:
    """Return the last line of a service's output in the log of its node as a sentence; empty without output."""
    if not log.exists():
        return ""
    lines = read_bytes(log).decode(errors="replace").rpartition(_OUTPUT)[2].splitlines()
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return f" Its last output: {last}" if last else ""


def service_settings(folder: AttemptDir) -> models.Service:
    """Return the service of the attempt in ``folder``, which has one."""
    program = TrainingSettings.read(folder.training).program
    assert isinstance(program, ScriptProgram) and program.service, "the plan takes nodes for a service only"
    return program.service


def wait_for_services(
    folder: AttemptDir, attempt: Attempt, warn: Callable[[str], object] = lambda text: None
) -> dict[str, str] | None:
    """Wait until every service answers this node, and return the variables that lead the script to them.

    Return None if the job ends before that. ``warn`` gets a line every minute.

    Raises:
        ServiceError: a service failed, or this node cannot connect to it.
    """
    if not attempt.service_nodes:
        return {}
    ranks = range(attempt.nodes, attempt.job_nodes)
    deadline = time.monotonic() + service_settings(folder).start_seconds + _LATER_SECONDS
    found = list[ServiceAddress]()
    for rank in ranks:
        one = _wait_for_address(folder, _address_file(folder, attempt.start, rank), deadline, folder.log(rank), warn)
        if one is None or not _connects(folder, one, folder.log(rank)):
            return None
        found.append(one)
    return service_variables(found)


def service_variables(services: Sequence[ServiceAddress]) -> dict[str, str]:
    """Return the variables of the ranks: address and port of the first service, and ``ADDRESS:PORT`` of all."""
    first = services[0]
    hosts = [f"[{one.address}]" if ":" in one.address else one.address for one in services]
    addresses = ",".join(f"{host}:{one.port}" for host, one in zip(hosts, services, strict=True))
    return dict(zip(SERVICE_VARIABLES, (first.address, str(first.port), addresses), strict=True))


def _connects(folder: AttemptDir, service: ServiceAddress, log: Path) -> bool:
    """Wait until this node can connect to ``service``, which writes to ``log``; return False if the job ends before.

    Raises:
        ServiceError: it cannot within `CONNECT_SECONDS`.
    """
    deadline = time.monotonic() + CONNECT_SECONDS
    while not answers(service.address, service.port, None):
        if _job_ends(folder):
            return False
        if time.monotonic() > deadline:
            raise ServiceError(
                f"{host_name()} could not connect to the service on {service.host} at {service.address}, port "
                f"{service.port}, for {CONNECT_SECONDS:g} s, although it answers on {service.host}. Check "
                f"network_interface in the cluster file and the nodes' firewall.{_last_output(log)}",
                STARTING,
            )
        time.sleep(_POLL_SECONDS)
    return True


def _job_ends(folder: AttemptDir) -> bool:
    """Return whether the ranks must not start any more."""
    return folder.has_failed_node() or folder.stop_file.exists() or folder.is_superseded()


def _wait_for_address(
    folder: AttemptDir, file: Path, deadline: float, log: Path, warn: Callable[[str], object]
) -> ServiceAddress | None:
    started, minutes = time.monotonic(), 0
    while (found := ServiceAddress.read_if_exists(file)) is None:
        if time.monotonic() - started > (minutes + 1) * MINUTE:
            minutes += 1
            warn(f"The service has been loading for {plural(minutes, 'minute')}.{_last_output(log)}")
        if _job_ends(folder):
            return None
        if time.monotonic() > deadline:
            raise ServiceError(
                f"{host_name()} timed out waiting for {file}: the service did not become ready.", STARTING
            )
        time.sleep(_POLL_SECONDS)
        make_folder(folder.services, parents=False)
        list(folder.services.iterdir())  # makes NFS refresh the folder
    return found


def answers(address: str, port: int, health: str | None) -> bool:
    """Return whether a program listens at ``address``, and answers a request for ``health`` with status 200."""
    if health is None:
        with contextlib.suppress(OSError), socket.create_connection((address, port), _ANSWER_SECONDS):
            return True
        return False
    connection = http.client.HTTPConnection(address, port, timeout=_ANSWER_SECONDS)
    try:
        connection.request("GET", health)
        return connection.getresponse().status == http.client.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _address_file(folder: AttemptDir, start: int, node_rank: int) -> Path:
    return folder.services / f"start-{start}-node-{node_rank}.json"


def _before_exec() -> None:
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    die_with_parent()


PROGRAM_OPTIONS: Final[Mapping[str, Any]] = {
    "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "preexec_fn": _before_exec
}  # fmt: skip
"""With which `start_program` starts a process."""


def start_program(
    command: Sequence[str],
    environment: Mapping[str, str],
    log: Path,
    started: subprocess.Popen[bytes] | None = None,
    **options: Any,
) -> tuple[subprocess.Popen[bytes], LogCopy]:
    """Start the ranks or the service of a node: it leaves the job's signals to the worker, and ends with the worker.

    ``started`` is its process if it was started before.
    """
    process = started or subprocess.Popen(command, env=environment, **PROGRAM_OPTIONS, **options)
    return process, LogCopy(process, log, environment)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the service and every process that it started in its session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_SECONDS)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


_OUTPUT = "# output of the service"


def _heading(attempt: Attempt, node_rank: int, variables: Mapping[str, str], command: Sequence[str]) -> str:
    exports = " ".join(f"{name}={value}" for name, value in variables.items())
    return (
        f"# node {node_rank}: {host_name()}, a service beside the {attempt.nodes} training nodes\n"
        f"env {exports} \\\n  {redact(shlex.join(command))}\n{_OUTPUT}"
    )
