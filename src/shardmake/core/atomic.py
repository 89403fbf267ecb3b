"""Atomic writes: to a temporary name, fsynced, then renamed, and only if the content changed.

A reader sees the complete old file or the complete new one, also after a power failure. An unchanged file keeps its
modification time, so Snakemake does not rerun the rules that read it.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from shardmake.core import run_folder
from shardmake.core.errors import ShardmakeError


def write_bytes(path: Path, content: bytes) -> bool:
    """Write ``content`` to ``path`` atomically and durably; return whether the file changed.

    The temporary name contains the host and the process id, so that two writers do not collide. The last rename wins.
    """
    if path.is_file() and path.read_bytes() == content:
        return False
    run_folder.make_folder(path.parent)
    temporary = path.with_name(f".{path.name}.{os.uname().nodename}.{os.getpid()}.tmp")
    try:
        with run_folder.open_file(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        run_folder.rename(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            run_folder.unlink(temporary)
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error  # a failed write names no file
    run_folder.fsync_directory(path.parent)
    return True


def write_text(path: Path, text: str) -> bool:
    """Write ``text`` as UTF-8 with `write_bytes`."""
    return write_bytes(path, text.encode())


def write_json(path: Path, value: Any) -> bool:
    """Write ``value`` as indented JSON with `write_bytes`, in the order of its keys."""
    return write_text(path, json.dumps(value, indent=2) + "\n")


def read_json(path: Path, made_by: str) -> Any:
    """Return the JSON at ``path``; error messages name ``made_by``, the command that writes it."""
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise ShardmakeError(f"{path} does not exist yet. Write it with: {made_by}") from None
    except json.JSONDecodeError as error:
        raise ShardmakeError(
            f"Cannot read {path}: it is not valid JSON ({error}). Write it again with: {made_by}"
        ) from None


def sha256(path: Path) -> str:
    """Return the hex digest of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


CHECKSUM: Final = "checksum"
"""Key of a record with the `digest` of all other keys."""


def sealed(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record ``values`` with its checksum."""
    return {**values, CHECKSUM: digest(values)}


def unsealed(values: Any) -> Any:
    """Return the JSON ``values`` without the checksums of the records in it.

    Raises `ValueError` if one of them is not that of its record: a byte is damaged, or somebody edited the file.
    """
    if isinstance(values, list):
        return [unsealed(entry) for entry in values]
    if not isinstance(values, dict) or CHECKSUM not in values:
        return values
    content = {key: value for key, value in values.items() if key != CHECKSUM}
    if values[CHECKSUM] != digest(content):
        raise ValueError("the content does not have its checksum: the file is damaged, or was edited by hand")
    return content


def digest(value: Any) -> str:
    """Return a short hex digest of a JSON-like value, independent of the order of keys."""
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]
