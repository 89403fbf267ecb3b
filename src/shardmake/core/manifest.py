"""What a set of files holds, by name, size and SHA-256: the measure for everything that is copied anywhere.

A pushed model carries its own manifest as ``SHA256SUMS``, in the format of coreutils: whoever receives the model can
prove it with ``sha256sum -c SHA256SUMS``, and the next push can tell its own files from someone else's.
"""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from shardmake.core.atomic import sha256
from shardmake.core.errors import ShardmakeError

SUMS = "SHA256SUMS"
_READERS = 4


@dataclass(frozen=True)
class FileRecord:
    """One file: bytes and hex digest of the content."""

    size: int
    sha256: str


Manifest = Mapping[str, FileRecord]


def record(path: Path) -> FileRecord:
    """Size and digest of the file at ``path``; reads all of it."""
    return FileRecord(path.stat().st_size, sha256(path))


def read_folder(folder: Path) -> dict[str, FileRecord]:
    """The manifest of every file below ``folder``, by its path relative to it; several files are read at once."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    with ThreadPoolExecutor(_READERS) as pool:
        records = pool.map(record, paths)
        return {path.relative_to(folder).as_posix(): entry for path, entry in zip(paths, records, strict=True)}


def differences(expected: Manifest, found: Manifest) -> list[str]:
    """One sentence per file of ``expected`` that ``found`` lacks or holds with other content."""
    return [
        f"{name} {_difference(wanted, found.get(name))}"
        for name, wanted in expected.items()
        if found.get(name) != wanted
    ]


def _difference(wanted: FileRecord, found: FileRecord | None) -> str:
    if found is None:
        return "is missing"
    if found.size != wanted.size:
        return f"has {found.size} bytes instead of {wanted.size}"
    return "has other content"


def format_sums(manifest: Manifest) -> str:
    """``manifest`` in the format of ``sha256sum``."""
    return "".join(f"{entry.sha256}  {name}\n" for name, entry in sorted(manifest.items()))


def parse_sums(text: str) -> dict[str, str]:
    """Digest by file name, from text that `format_sums` wrote; `ShardmakeError` if it is anything else."""
    pairs = [line.split("  ", 1) for line in text.splitlines()]
    if any(len(pair) != 2 or len(pair[0]) != 64 for pair in pairs):
        raise ShardmakeError(
            f"There is a {SUMS} that no push of Shardmake wrote. Choose another place in push.to, or move it away."
        )
    return {name: digest for digest, name in pairs}


def manifest_json(manifest: Manifest) -> dict[str, dict[str, int | str]]:
    """``manifest`` as it stands in receipts."""
    return {name: asdict(entry) for name, entry in manifest.items()}
