"""A process that has imported its libraries and then waits for its arguments, and the parent that starts it."""

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

    def start(self, arguments: Sequence[str], environment: Mapping[str, str]) -> bool:
        """Let the process run with ``arguments`` and ``environment``; end it and return False if it cannot.

        It cannot if a variable differs that a library may have read, or if it does not answer within a second: it has
        ended, is stopped or still imports.
        """
        names = {*self._environment, *environment}
        changed = {
            name: environment.get(name) for name in names if environment.get(name) != self._environment.get(name)
        }
        read = [name for name in changed if not _OF_ONE_ATTEMPT.fullmatch(name)]
        with self._socket:
            self._socket.settimeout(ANSWER_SECONDS)
            if not read and self._sends([list(arguments), changed]):
                return True
        why = f"these variables differ: {', '.join(sorted(read))}" if read else "it does not answer"
        print(f"A process that was kept ready is not used, because {why}.", flush=True)
        self.process.kill()
        self.process.wait()
        return False

    def _sends(self, request: object) -> bool:
        try:
            self._socket.sendall(json.dumps(request).encode() + b"\n")
            return self._socket.recv(1) == b"+"
        except OSError:
            return False


def wait_for_arguments(descriptor: int) -> list[str]:
    """Wait for the parent's request, change the variables of this process, and return its arguments.

    Raises:
        SystemExit: the parent has ended, or does not need this process any more.
    """
    with socket.socket(fileno=descriptor) as parent, parent.makefile() as lines:
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
