"""The launcher and the ranks of an attempt that may follow in the job: they import while the present ranks train.

The worker starts ``python -m shardmake.launch.ready_ranks ATTEMPT PIDS``. This process imports the launcher, starts a
process for each rank of its node with the environment of the present one, which ``PIDS`` names, and waits. At a restart
in place it becomes the launcher, and the ranks that it starts are those that wait. They are its children, as ever.
Where one cannot be used, the launcher or the rank is started as without them (`shardmake.train.waiting`).
"""

import contextlib
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import psutil

from shardmake.core.run_folder import open_file
from shardmake.core.secrets import LogCopy
from shardmake.launch.service import PROGRAM_OPTIONS
from shardmake.run.attempt import Attempt, AttemptDir, Heartbeat
from shardmake.run.training_settings import TrainingSettings
from shardmake.train.waiting import Waiting, wait_for_arguments

_RANK = (sys.executable, "-u", "-m", "shardmake.train")
_WITHOUT_CUDA = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
"""With it, an import that asks for GPUs starts no CUDA."""
_LAUNCHER = (sys.executable, "-m", "shardmake.launch.ready_ranks")


class ReadyRanks:
    """The next launcher and ranks of this worker's node; none until the ranks of an attempt have done a step."""

    def __init__(self) -> None:
        self._waiting: Waiting | None = None
        self._code: object = None

    def prepare(
        self, folder: AttemptDir, attempt: Attempt, environment: Mapping[str, str], beats: Sequence[Heartbeat | None]
    ) -> None:
        """Start them once the ranks train. ``environment`` is that of the launcher, ``beats`` are the heartbeats."""
        trained = [str(beat.pid) for beat in beats if beat and beat.phase == "train"]
        if self._waiting or len(trained) < len(beats):
            return
        with contextlib.suppress(OSError, subprocess.SubprocessError):  # no further process can be started
            self._waiting = Waiting([*_LAUNCHER, str(folder.root), *trained], environment, **PROGRAM_OPTIONS)
            self._code = attempt.versions, attempt.commit

    def start(
        self, command: Sequence[str], environment: Mapping[str, str], attempt: Attempt, log: Path
    ) -> subprocess.Popen[bytes] | None:
        """Return the launcher that has waited, now with ``command``; None if there is none that can be used.

        What one prints that cannot be used goes to ``log``.
        """
        waiting, self._waiting = self._waiting, None
        if waiting is None:
            return None
        is_same = self._code == (attempt.versions, attempt.commit)
        why = waiting.start(command, environment) if is_same else waiting.end("libraries or Shardmake have changed")
        if not why:
            return waiting.process
        with open_file(log, "a") as file:
            print(f"The launcher that was kept ready is not used, because {why}.", file=file)
        LogCopy(waiting.process, log, environment)
        return None

    def processes(self) -> list[psutil.Process]:
        """Return the processes that wait."""
        if not self._waiting or self._waiting.process.poll() is not None:
            return []
        try:
            launcher = psutil.Process(self._waiting.process.pid)
            return [launcher, *launcher.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def memory(self) -> int:
        """Return the bytes of host RAM that they have for themselves."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return sum(found.rss - found.shared for found in (process.memory_info() for process in self.processes()))
        return 0


READY: Final = ReadyRanks()


def is_used(folder: AttemptDir, attempt: Attempt) -> bool:
    """Return whether ranks are kept ready for attempts such as this one."""
    in_place = attempt.restart_in_place and not (attempt.on_one_machine or attempt.container)
    return in_place and TrainingSettings.read(folder.training).program.kind == "trainer"


def main() -> None:
    """Start the ranks that wait, import the launcher, wait for its arguments, and run it."""
    attempt, *pids, descriptor = sys.argv[1:]
    environments = [_environment(int(pid)) for pid in pids]
    ranks = {
        found["LOCAL_RANK"]: Waiting([*_RANK, attempt], found | _WITHOUT_CUDA, start_new_session=True)
        for found in environments
    }
    from accelerate.commands import launch
    from torch.distributed import run as _  # noqa: F401
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    if any(found.get("ACCELERATE_USE_DEEPSPEED") == "true" for found in environments):
        import_module("deepspeed.launcher.runner")
    start = subprocess_handler.Popen

    def start_rank(args: Sequence[str], env: dict[str, str], **options: Any) -> "subprocess.Popen[bytes]":
        waiting = ranks.pop(env["LOCAL_RANK"], None)
        as_planned = tuple(args[: len(_RANK)]) == _RANK and not (options.get("stdout") or options.get("stderr"))
        if waiting and as_planned:
            if not (why := waiting.start(args[len(_RANK) :], env)):
                return waiting.process
            print(f"Rank {env['RANK']} that was kept ready is not used, because {why}.", flush=True)
        return start(args=args, env=env, **options)

    vars(subprocess_handler)["Popen"] = start_rank
    command = wait_for_arguments(int(descriptor))
    sys.argv = [launch.__file__, *command[3:]]
    launch.main()


def _environment(pid: int) -> dict[str, str]:
    """Return the environment with which a process was started."""
    pairs = os.fsdecode(Path(f"/proc/{pid}/environ").read_bytes()).rstrip("\0").split("\0")
    return dict(pair.split("=", 1) for pair in pairs)


if __name__ == "__main__":
    main()
