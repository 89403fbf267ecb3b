"""Ask the libraries' parsers once for the same content, and one process of the user at a time.

A check imports torch and DeepSpeed, which takes seconds and half a gigabyte. Many drivers on a login node may start at
once, and a repeated rendering asks for files that were accepted before.
"""

import contextlib
import fcntl
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import shardmake
from shardmake.core.atomic import digest, write_json
from shardmake.core.environment import cache_folder, installed_versions

_LIBRARIES = ("torch", "transformers", "accelerate", "deepspeed", "trl", "peft", "pydantic")


def ask_once(module: str, request: Mapping[str, Any], ask: Callable[[], list[list[str]]]) -> list[list[str]]:
    """Return the problems that ``ask`` finds in ``request``, a list for each rendering; wait for other processes.

    Content without problems is not asked for again with the same libraries and the same source of this package. A
    problem is never kept, because its cause may be outside the content, such as a full disk.
    """
    accepted = cache_folder() / "checks" / f"{digest([module, dict(request), _software()])}.json"
    if accepted.exists():
        return [[] for _ in range(json.loads(accepted.read_text()))]
    with _one_at_a_time():
        if accepted.exists():  # another process has asked for the same content meanwhile
            return ask_once(module, request, ask)
        problems = ask()
        if not any(problems):
            write_json(accepted, len(problems))
    return problems


@contextlib.contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Hold the lock of this user's checks. The kernel releases it when the process ends."""
    folder = cache_folder() / "checks"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@cache
def _software() -> list[Any]:
    """Return what decides on an answer besides the request: versions of libraries, and the source of this package."""
    package = Path(shardmake.__file__).parent
    sources = (source.read_bytes() for source in sorted(package.rglob("*.py")))
    return [installed_versions(_LIBRARIES), hashlib.sha256(b"".join(sources)).hexdigest()]
