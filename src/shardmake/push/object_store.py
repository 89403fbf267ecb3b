"""Push to an object store or any other place that fsspec reaches: ``s3://bucket/prefix``, ``gs://``, ``sftp://``.

These stores have no rename, so the order of writes replaces it. A model is complete if ``SHA256SUMS`` exists, and
loaders find one only if ``config.json`` does. A push that changes anything first writes a list of the files that it
will write and removes ``SHA256SUMS``; if it changes the model, it also removes the files that loaders read first. It
then sends the weights, then those files, reads each back, and writes ``SHA256SUMS`` last.
"""

import errno
import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardmake.core.errors import PushError, ShardmakeError
from shardmake.core.hub import first_line, with_retries
from shardmake.core.manifest import SUMS, FileRecord, parse_sums
from shardmake.core.secrets import public_url, redact
from shardmake.core.stores import missing_package
from shardmake.push.bundle import LOADED_FIRST, Bundle

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

UNFINISHED = f"{SUMS}.unfinished"
_BLOCK = 8 << 20


@dataclass(frozen=True)
class _Place:
    """A prefix on a file system."""

    files: "AbstractFileSystem"
    root: str

    def path(self, name: str) -> str:
        """Return the path of the model's file ``name``."""
        return f"{self.root}/{name}"

    def sizes(self) -> dict[str, int]:
        """Return the bytes of every file below the prefix, by its path relative to it."""
        self.files.invalidate_cache()
        found = self.files.find(self.root, detail=True)
        return {path.removeprefix(self.root).lstrip("/"): entry["size"] for path, entry in found.items()}

    def sums(self, name: str, sizes: dict[str, int]) -> dict[str, str]:
        """Return the digests listed in the file ``name``, and its own; nothing if it does not exist."""
        if name not in sizes:
            return {}
        content = self.files.cat_file(self.path(name))
        return {**parse_sums(content.decode()), name: hashlib.sha256(content).hexdigest()}

    def version(self, name: str) -> str | None:
        """Return the file's version id, or None if the store keeps no versions."""
        version = self.files.info(self.path(name)).get("VersionId")
        return None if version in (None, "null") else str(version)

    def digest(self, name: str) -> str:
        """Read a file and return its SHA-256."""
        with self.files.open(self.path(name), "rb", block_size=_BLOCK) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()


def missing_in_store(files: Mapping[str, FileRecord], url: str) -> list[str]:
    """Return the names of ``files`` that the prefix ``url`` lacks, or has with another size or listed checksum.

    Raises `PushError` if the prefix cannot be read.
    """
    with _with_advice(url, "Reading"):
        return with_retries(lambda: _missing_now(files, _open(url)))


def push_to_store(bundle: Bundle, url: str) -> dict[str, Any]:
    """Make the prefix ``url`` hold exactly ``bundle``; do not resend files that are there already.

    Return ``{"versions": {name: id}}`` for a store with versions (an S3 bucket with versioning), else an empty dict.

    Raises `PushError` if the prefix has files of somebody else, cannot be reached or written, or loses files.
    """
    with _with_advice(public_url(url), "The push to"):
        return with_retries(lambda: _push_once(bundle, _open(url), public_url(url)))


def _open(url: str) -> _Place:
    import fsspec

    # no cached listings: the push compares with the present state
    files, root = fsspec.core.url_to_fs(url, use_listings_cache=False)
    return _Place(files, root.rstrip("/"))


def _push_once(bundle: Bundle, place: _Place, url: str) -> dict[str, Any]:
    sizes = place.sizes()
    listed, unfinished = place.sums(SUMS, sizes), place.sums(UNFINISHED, sizes)
    _refuse_foreign(sorted(sizes.keys() - listed.keys() - unfinished.keys()), url)
    missing = _missing(bundle.manifest, place, sizes, listed)
    stale = sorted(sizes.keys() - bundle.paths.keys())
    if missing or stale:
        _write(bundle, place, sizes, missing, stale)
    versions = {name: version for name in bundle.paths if (version := place.version(name))}
    return {"versions": versions} if versions else {}


def _refuse_foreign(foreign: list[str], url: str) -> None:
    if foreign:
        raise PushError(
            f"Push refused: {url} contains files that no push of Shardmake wrote ({', '.join(foreign[:3])}"
            f"{', ...' if len(foreign) > 3 else ''}). Choose another prefix in push.to, or move these files."
        )


def _missing_now(files: Mapping[str, FileRecord], place: _Place) -> list[str]:
    sizes = place.sizes()
    return _missing(files, place, sizes, place.sums(SUMS, sizes))


def _missing(
    files: Mapping[str, FileRecord], place: _Place, sizes: dict[str, int], listed: dict[str, str]
) -> list[str]:
    return [name for name, wanted in files.items() if not _holds(place, name, wanted, sizes, listed)]


def _holds(place: _Place, name: str, wanted: FileRecord, sizes: dict[str, int], listed: dict[str, str]) -> bool:
    """Compare the stored file with ``wanted``; read it unless a finished push lists its digest."""
    if sizes.get(name) != wanted.size:
        return False
    return (listed[name] if name in listed else place.digest(name)) == wanted.sha256


def _write(bundle: Bundle, place: _Place, sizes: dict[str, int], missing: list[str], stale: list[str]) -> None:
    """Send ``missing`` and remove ``stale``; the list of checksums is absent until everything was read back."""
    planned = "".join(f"{entry.sha256}  {name}\n" for name, entry in bundle.manifest.items())
    planned += "".join(f"{'0' * 64}  {name}\n" for name in stale if name not in bundle.manifest)
    place.files.pipe_file(place.path(UNFINISHED), planned.encode())
    hidden = (SUMS, *reversed(LOADED_FIRST)) if _changes_model(bundle, missing, stale) else (SUMS,)
    for name in [name for name in hidden if name in sizes]:
        place.files.rm_file(place.path(name))
    for name in [name for name in stale if name not in (UNFINISHED, *hidden)]:
        place.files.rm_file(place.path(name))
    for name in [name for name in bundle.paths if name in {*missing, *hidden} and name != SUMS]:
        _send(bundle, place, name)
    _send(bundle, place, SUMS)
    place.files.rm_file(place.path(UNFINISHED))


def _changes_model(bundle: Bundle, missing: list[str], stale: list[str]) -> bool:
    """Return whether a push changes more than the card and its plots."""
    return any(name in bundle.model for name in missing) or stale not in ([], [UNFINISHED])


def _send(bundle: Bundle, place: _Place, name: str) -> None:
    place.files.put_file(str(bundle.paths[name]), place.path(name))
    if place.digest(name) != bundle.manifest[name].sha256:
        raise RuntimeError(f"{name} differs from what was sent when read back")


@contextmanager
def _with_advice(url: str, action: str) -> Iterator[None]:
    """Turn any error of an ``action`` into a `PushError` with advice; fsspec's file systems share no error classes."""
    protocol = url.partition("://")[0]
    try:
        yield
    except ShardmakeError:
        raise
    except Exception as error:
        raise PushError(f"{action} {url} failed: {redact(first_line(error))}\n{_advice(error, protocol)}") from error


def _advice(error: Exception, protocol: str) -> str:
    if isinstance(error, ImportError):
        return missing_package(protocol)
    if isinstance(error, PermissionError) or "credentials" in str(error).lower():
        return "Provide credentials with permission to list, read, write and delete; for s3:// run `aws configure`."
    if "quota" in str(error).lower() or getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
        return "The store is full. Free some space there, or choose another one in push.to, and push again."
    if isinstance(error, FileNotFoundError):
        return "Create the bucket first, or correct the name in push.to."
    return "Uploaded files are kept. Push again."
