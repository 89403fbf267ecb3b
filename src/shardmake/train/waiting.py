"""A process that has imported its libraries and then waits for its arguments, and the parent that starts it."""

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

ANSWER_SECONDS = 1.0
_OF_ONE_ATTEMPT = re.compile(
    r"MASTER_PORT|TORCHELASTIC_(ERROR_FILE|RUN_ID)|ACCELERATE_DEEPSPEED_CONFIG_FILE|SHARDMAKE_HEARTBEATS"
    r"|TORCH_FR_DUMP_TEMP_FILE|TORCH_NCCL_DEBUG_INFO_PIPE_FILE|_MLFLOW_TELEMETRY_SESSION_ID"
    r"|PYTORCH_NVML_BASED_CUDA_CHECK"
)
"""Variables that may change later: libraries read them when they are used, MLflow a random id at its import."""


class Waiting:
    """The parent's side. The child gets ``environment`` now, and its ``arguments`` and their changes later."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], **options: Any) -> None:
        self._environment = dict(environment)
        self._socket, child = socket.socketpair()
        with child:
            self.process = subprocess.Popen(
                [*command, str(child.fileno())], env=self._environment, pass_fds=[child.fileno()], **options
            )

    def is_ready(self) -> bool:
        """Return whether the process has imported its libraries and waits."""
        try:
            return self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b"+"
        except OSError:
            return False

    def start(self, arguments: Sequence[str], environment: Mapping[str, str]) -> str:
        """Let the process run with ``arguments`` and ``environment``, and return an empty text; else end it.

        The text then says why it cannot be used: a variable differs that a library may have read, it is not ready, or
        it does not answer within a second.
        """
        names = {*self._environment, *environment}
        changed = {
            name: environment.get(name) for name in names if environment.get(name) != self._environment.get(name)
        }
        if read := sorted(name for name in changed if not _OF_ONE_ATTEMPT.fullmatch(name)):
            return self.end(f"these variables differ: {', '.join(read)}")
        if not self.is_ready():
            return self.end("it has ended or still imports its libraries")
        return "" if self._sends([list(arguments), changed]) else self.end("it does not answer")

    def end(self, why: str) -> str:
        """Kill the process, and return ``why``. One in state D is not waited for."""
        self._socket.close()
        self.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(ANSWER_SECONDS)
        return why

    def _sends(self, request: object) -> bool:
        self._socket.settimeout(ANSWER_SECONDS)
        try:
            self._socket.sendall(json.dumps(request).encode() + b"\n")
            return self._socket.recv(1) + self._socket.recv(1) == b"++"  # the process was ready, and has the request
        except OSError:
            return False


def wait_for_arguments(descriptor: int) -> list[str]:
    """Wait for the parent's request, change the variables of this process, and return its arguments.

    Raises:
        SystemExit: the parent has ended, or does not need this process any more.
    """
    with socket.socket(fileno=descriptor) as parent, parent.makefile() as lines:
        parent.sendall(b"+")
        if not (line := lines.readline()):
            sys.exit()
        arguments, changed = json.loads(line)
        for name, value in changed.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        parent.sendall(b"+")
    return list(arguments)
