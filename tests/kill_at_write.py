"""At its n-th write below a folder, SIGKILL or hold this process or fill the disk there; or list the writes. For tests.

The counted writes change the disk: files opened for writing, ``torch.save`` (which writes in C++ and so bypasses
Python's audit hooks), fsync, rename and remove. The process can die before each of them, and also after half of a new
file. mkdir is not counted, because any rank may create a folder that all ranks need.
"""

import contextlib
import io
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

_WRITING = os.O_WRONLY | os.O_RDWR
_CHANGES = {"os.rename", "os.remove", "os.rmdir", "os.link"}


class Killer:
    """Count the writes below ``folder``, and kill or hold the process or fill the disk at one of them.

    ``at`` is the number of that write, from 0, or a pattern that its line in ``log`` matches.
    """

    def __init__(self, folder: Path, log: Path, at: int | str, mode: str) -> None:
        self.folder, self.at, self.mode = str(folder), at, mode
        self.log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.seen = -1
        self.came = False
        self.lock = threading.RLock()  # several threads sync files

    def install(self) -> None:
        self._save, self._fsync = torch.save, os.fsync
        torch.save = torch.serialization.save = self.save  # type: ignore[assignment]
        os.fsync = self.fsync  # type: ignore[assignment]
        sys.addaudithook(self.on_audit_event)

    def count(self, kind: str, path: str) -> bool:
        """Log one write, and return whether to kill the process half way through it; further writes are not logged."""
        with self.lock:
            if self.came:
                return False
            self.seen += 1
            line = f"{kind} {path.removeprefix(self.folder)}"
            os.write(self.log, f"{line}\n".encode())
            self.came = self.seen == self.at if isinstance(self.at, int) else bool(re.search(self.at, line))
            if self.came and self.mode == "before":
                self.die()
            if self.came and self.mode == "freeze":
                os.kill(os.getpid(), signal.SIGSTOP)
            if self.came and self.mode == "hold":
                time.sleep(100000)
            if self.came and self.mode == "fill":
                fill(Path(self.folder).parent)
            return self.came and self.mode == "half"

    def die(self) -> None:
        """End as the kernel ends a process without memory: no handler runs, no buffer is flushed."""
        os.kill(os.getpid(), signal.SIGKILL)

    def on_audit_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and not isinstance(arguments[0], int) and (arguments[2] or 0) & _WRITING:
            path = os.fsdecode(arguments[0])
            if path.startswith(self.folder) and self.count("open", path):
                os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC))
                self.die()
        elif event in _CHANGES:
            path = _resolve(arguments)
            if path.startswith(self.folder):
                self.count(event, path)

    def fsync(self, descriptor: int) -> None:
        path = str(Path(f"/proc/self/fd/{descriptor}").readlink())
        if path.startswith(self.folder):
            self.count("fsync", path)
        self._fsync(descriptor)

    def save(self, value: Any, target: Any, *args: Any, **kwargs: Any) -> None:
        """Replace `torch.save` for paths and open streams."""
        name = str(target if isinstance(target, str | os.PathLike) else getattr(target, "name", ""))
        if name.startswith(self.folder) and self.count("torch.save", name):
            buffer = io.BytesIO()
            self._save(value, buffer, *args, **kwargs)
            half = buffer.getvalue()[: len(buffer.getvalue()) // 2]
            if isinstance(target, str | os.PathLike):
                Path(target).write_bytes(half)
            else:
                target.write(half)
                target.flush()
            self.die()
        self._save(value, target, *args, **kwargs)


def fill(folder: Path) -> Path:
    """Fill the file system of ``folder`` except 1 MiB, enough for a log but no checkpoint; return the filler file."""
    file = folder / "filler"
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT)
    with contextlib.suppress(OSError):
        while os.write(descriptor, bytes(1 << 20)):
            pass
    os.truncate(descriptor, os.fstat(descriptor).st_size - (1 << 20))
    os.close(descriptor)
    return file


def _resolve(arguments: tuple[Any, ...]) -> str:
    """Return the path of an event; `shutil.rmtree` gives names relative to an open folder."""
    path = os.fsdecode(arguments[0])
    folder = arguments[2] if len(arguments) == 4 else arguments[-1]  # a rename gives two names and their folders
    return path if path.startswith("/") or folder < 0 else f"{Path(f'/proc/self/fd/{folder}').readlink()}/{path}"


def fork(work: Callable[[], object]) -> int:
    """Do ``work`` in a fork of this process; return its process id. An error ends it with status 1."""
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return child


def status_of(work: Callable[[], object]) -> int:
    """Do ``work`` in a fork of this process, wait, and return its exit status, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(fork(work), 0)[1])


def points(log: Path) -> list[tuple[int, str, str]]:
    """Return every write of a successful save at which to kill: number, mode and log line."""
    found = []
    for number, line in enumerate(log.read_text().splitlines()):
        modes = ("before", "half") if line.startswith(("open", "torch.save")) else ("before",)
        found += [(number, mode, line) for mode in modes]
    return found
