"""One process imports the libraries once, and the ranks of every training are forked from it.

`ForkServer` is the handle; the rest runs in the process behind it. A rank is `shardmake.train`, or a function of a test,
in the environment that `accelerate launch` sets. A launched program records that environment once per strategy.
"""

import gc
import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
WRITE_ENVIRONMENT = "import json,os,sys; json.dump({**os.environ}, open(sys.argv[1] + os.getenv('RANK', '0'), 'w'))"
"""A program that writes the environment of each rank to a file."""
_TIMEOUT_SECONDS = 300
"""After that time a training is killed."""


class ForkServer:
    """A process that runs one training at a time.

    ``modules`` are imported into it in addition, and may lie in the folder ``packages``.
    """

    def __init__(self, *modules: str, packages: Path | None = None) -> None:
        environment = rank_environment()
        if packages is not None:
            environment["PYTHONPATH"] += f"{os.pathsep}{packages}"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.fork_server", *modules], cwd=REPOSITORY, env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def run(
        self, attempt: Path, environment: dict[str, str], ranks: int, kill: dict[str, Any] | None = None,
        program: str | None = None,
    ) -> list[int]:  # fmt: skip
        """Train the attempt in the folder ``attempt`` and return the exit status of each rank, negative for a signal.

        ``kill`` holds ``rank`` and the arguments of `tests.kill_at_write.Killer`. When a rank dies, the others may
        write for another half second and are then killed. ``program`` is the ``module:function`` that runs instead of
        `shardmake.train`, with the folder and the rank.
        """
        assert self.process.stdin and self.process.stdout
        request = {
            "attempt": str(attempt), "environment": environment, "ranks": ranks, "kill": kill, "program": program,
        }  # fmt: skip
        print(json.dumps(request), file=self.process.stdin, flush=True)
        return list(json.loads(self.process.stdout.readline()))

    def close(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait(timeout=60)


def rank_environment() -> dict[str, str]:
    """Return the environment of a rank on a CPU."""
    path = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    quiet = {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1"}
    return {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **quiet}


def launched_environment(command: list[str], folder: Path) -> dict[str, str]:
    """Return the variables that the launcher in ``command`` sets to the same value for all its ranks."""
    start = command.index("-m", command.index("--num_cpu_threads_per_process"))
    probe = folder / "environment.py"
    probe.write_text(WRITE_ENVIRONMENT)
    subprocess.run([*command[:start], str(probe), str(folder / "environment-")], check=True, env=rank_environment())
    return set_by_launcher(json.loads((folder / "environment-0").read_text()))


def set_by_launcher(found: dict[str, str]) -> dict[str, str]:
    """Return the variables of a rank's environment that its launcher sets to the same value for all ranks."""
    rank_specific = ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "MASTER_", "TORCHELASTIC_", "PYTHONPATH")
    before = rank_environment()
    return {name: value for name, value in found.items() - before.items() if not name.startswith(rank_specific)}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _serve() -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    _import_libraries()

    for line in sys.stdin:
        print(json.dumps(_train(json.loads(line))), file=replies, flush=True)


def _import_libraries() -> None:
    """Import and compute what every rank needs and what does not depend on the training."""
    import deepspeed.runtime.zero.muon.original_muon  # noqa: F401
    import torch.distributed.checkpoint.state_dict  # noqa: F401
    import transformers.models.llama.modeling_llama  # noqa: F401
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    import shardmake.train.trainer  # noqa: F401
    import tests.activations_on_cpu
    import tests.fsdp_on_cpu  # noqa: F401
    from shardmake.core.environment import leave_collectives_to_gloo

    get_checkpoint_conversion_mapping("llama")
    for name in sys.argv[1:]:
        import_module(name)
    leave_collectives_to_gloo()  # DeepSpeed looks for compilers here, which takes longer than a training
    gc.freeze()  # A collection in a rank would copy the memory of all that is imported


def _train(request: dict[str, Any]) -> list[int]:
    port = free_port()
    children = [_fork(request, rank, port) for rank in range(request["ranks"])]
    codes: dict[int, int] = {}
    deadline = time.monotonic() + _TIMEOUT_SECONDS
    while len(codes) < len(children):
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            codes[pid] = os.waitstatus_to_exitcode(status)
        if codes.get(pid) or time.monotonic() > deadline:
            time.sleep(0.5)
            for child in set(children) - set(codes):
                os.kill(child, signal.SIGKILL)
        time.sleep(0.02)
    return [codes[child] for child in children]


def _fork(request: dict[str, Any], rank: int, port: int) -> int:
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        log = os.open(Path(request["attempt"]) / "node-0.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.update(request["environment"])
        local_rank = rank % int(os.environ.get("LOCAL_WORLD_SIZE", request["ranks"]))
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(local_rank), "WORLD_SIZE": str(request["ranks"])}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        if request["program"] is None:
            run_rank(Path(request["attempt"]), rank, request["kill"])
        else:
            module, _, function = request["program"].partition(":")
            getattr(import_module(module), function)(Path(request["attempt"]), rank)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def run_rank(attempt: Path, rank: int, kill: dict[str, Any] | None) -> None:
    """Run `shardmake.train` for one rank, with its error on record."""
    from shardmake.core.log import configure_logging
    from shardmake.run.attempt import AttemptDir, record_error
    from shardmake.train.__main__ import load_program
    from tests.kill_at_write import Killer

    configure_logging(rank=rank)
    if kill and kill["rank"] == rank:
        Killer(Path(kill["folder"]), Path(kill["log"]), kill["at"], kill["mode"]).install()
    try:
        load_program(attempt)(attempt)
    except BaseException as error:
        record_error(AttemptDir(attempt), rank, error)
        raise


if __name__ == "__main__":
    _serve()
