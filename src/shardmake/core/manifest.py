"""Manifests: size and SHA-256 of each file, with which copies are verified.

A pushed model contains its manifest as ``SHA256SUMS``, in the format of coreutils. Recipients can verify the model
with ``sha256sum -c SHA256SUMS``, and the next push can distinguish its own files from others.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from isal.isal_zlib import crc32

from shardmake.core.atomic import sha256
from shardmake.core.errors import PushError
from shardmake.core.fingerprint import FileEntry

SUMS = "SHA256SUMS"
_READERS = 4
_BLOCK = 1 << 20  # bytes of one read; they stay in the core's cache for both sums


@dataclass(frozen=True)
class FileRecord:
    """Size and SHA-256 of a file."""

    size: int
    sha256: str


Manifest = Mapping[str, FileRecord]
Entry = TypeVar("Entry")


class HasSize(Protocol):
    """A record of a file."""

    @property
    def size(self) -> int:
        """Bytes of the file."""


def record(path: Path) -> FileRecord:
    """Return size and digest of the file at ``path``."""
    return FileRecord(path.stat().st_size, sha256(path))


def record_twice(path: Path) -> tuple[FileRecord, FileEntry]:
    """Return what `record` and `fingerprint` do, from one pass over the file."""
    strong, crc, size = hashlib.sha256(), 0, 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            strong.update(block)
            crc, size = crc32(block, crc), size + len(block)
    return FileRecord(size, strong.hexdigest()), FileEntry(size=size, crc32=f"{crc:08x}")


def read_folder(folder: Path) -> dict[str, FileRecord]:
    """Return the manifest of all files below ``folder``, by their relative paths."""
    return read_files(folder, record)


def read_files(folder: Path, read: Callable[[Path], Entry]) -> dict[str, Entry]:
    """Return what ``read`` returns for each file below ``folder``, by their relative paths."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return read_named(folder, [path.relative_to(folder).as_posix() for path in paths], read)


def read_named(folder: Path, names: Sequence[str], read: Callable[[Path], Entry]) -> dict[str, Entry]:
    """Return what ``read`` returns for the files ``names`` of ``folder``."""
    with ThreadPoolExecutor(_READERS) as pool:
        return dict(zip(names, pool.map(lambda name: read(folder / name), names), strict=True))


def differences(expected: Mapping[str, HasSize], found: Mapping[str, HasSize]) -> list[str]:
    """Return one sentence per file of ``expected`` that is missing or different in ``found``."""
    return [
        f"{name} {_difference(entry, found.get(name))}" for name, entry in expected.items() if found.get(name) != entry
    ]


def _difference(expected: HasSize, found: HasSize | None) -> str:
    if found is None:
        return "is missing"
    if found.size != expected.size:
        return f"has {found.size} bytes instead of {expected.size}"
    return "has other content"


def format_sums(manifest: Manifest) -> str:
    """Return ``manifest`` in the format of ``sha256sum``."""
    return "".join(f"{entry.sha256}  {name}\n" for name, entry in sorted(manifest.items()))


def parse_sums(text: str) -> dict[str, str]:
    """Return the digests by file name from the text of `format_sums`; raise a `PushError` for other text."""
    pairs = [line.split("  ", 1) for line in text.splitlines()]
    if any(len(pair) != 2 or len(pair[0]) != 64 for pair in pairs):
        raise PushError(
            f"The destination has a {SUMS} that was not written by Shardmake. Change push.to, or move the file away."
        )
    return {name: digest for digest, name in pairs}
