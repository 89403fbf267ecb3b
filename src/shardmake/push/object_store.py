"""Push to an object store or any other place that fsspec reaches: ``s3://bucket/prefix``, ``gs://``, ``sftp://``.

These stores have no rename, so the order of writes replaces it. A model is complete if ``SHA256SUMS`` exists, and
loaders find one only if ``config.json`` does. A push that changes anything first writes a list of the files that it
will write and removes ``SHA256SUMS``; if it changes the model, it also removes the files that loaders read first. It
then sends the weights, then those files, reads each back, and writes ``SHA256SUMS`` last.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from shardmake.core.errors import PushError
from shardmake.core.hub import with_retries
from shardmake.core.manifest import SUMS, FileRecord, parse_sums
from shardmake.core.secrets import public_url
from shardmake.core.stores import Cause, explain_store_errors, open_store
from shardmake.push.bundle import LOADED_FIRST, Bundle

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

UNFINISHED = f"{SUMS}.unfinished"
_BLOCK = 8 << 20
_ADVICE: Final[Mapping[Cause, str]] = {
    "permission": "Provide credentials with permission to list, read, write and delete; for s3:// run `aws configure`.",
    "full": "The store is full. Free some space there, or choose another one in push.to, and push again.",
    "missing": "Create the bucket first, or correct the name in push.to.",
    "other": "Uploaded files are kept. Push again.",
}


@dataclass(frozen=True)
class _Place:
    """A prefix on a file system, and the bytes of every file below it by its path relative to it."""

    files: "AbstractFileSystem"
    root: str
    sizes: Mapping[str, int]

    def path(self, name: str) -> str:
        """Return the path of the model's file ``name``."""
        return f"{self.root}/{name}"

    def sums(self, name: str) -> dict[str, str]:
        """Return the digests listed in the file ``name``, and its own; nothing if it does not exist."""
        if name not in self.sizes:
            return {}
        content = self.files.cat_file(self.path(name))
        return {**parse_sums(content.decode()), name: hashlib.sha256(content).hexdigest()}

    def missing(self, wanted: Mapping[str, FileRecord], listed: Mapping[str, str]) -> list[str]:
        """Return which files are missing or different; one is read unless its digest is ``listed`` by a push."""
        alike = [name for name, entry in wanted.items() if self.sizes.get(name) == entry.size]
        held = {name for name in alike if (listed.get(name) or self.digest(name)) == wanted[name].sha256}
        return [name for name in wanted if name not in held]

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

    def compare() -> list[str]:
        place = _open(url)
        return place.missing(files, place.sums(SUMS))

    with explain_store_errors("Reading", url, PushError, _ADVICE):
        return with_retries(compare)


def push_to_store(bundle: Bundle, url: str) -> dict[str, Any]:
    """Make the prefix ``url`` hold exactly ``bundle``; do not resend files that are there already.

    Return ``{"versions": {name: id}}`` for a store with versions (an S3 bucket with versioning), else an empty dict.

    Raises `PushError` if the prefix has files of somebody else, cannot be reached or written, or loses files.
    """
    with explain_store_errors("The push to", public_url(url), PushError, _ADVICE):
        return with_retries(lambda: _push_once(bundle, _open(url), public_url(url)))


def _open(url: str) -> _Place:
    files, root = open_store(url)
    root = root.rstrip("/")
    found = files.find(root, detail=True)
    return _Place(files, root, {path.removeprefix(root).lstrip("/"): entry["size"] for path, entry in found.items()})


def _push_once(bundle: Bundle, place: _Place, url: str) -> dict[str, Any]:
    listed, unfinished = place.sums(SUMS), place.sums(UNFINISHED)
    if foreign := sorted(place.sizes.keys() - listed.keys() - unfinished.keys()):
        raise PushError(
            f"Push refused: {url} contains files that no push of Shardmake wrote ({', '.join(foreign[:3])}"
            f"{', ...' if len(foreign) > 3 else ''}). Choose another prefix in push.to, or move these files."
        )
    missing = place.missing(bundle.manifest, listed)
    stale = sorted(place.sizes.keys() - bundle.paths.keys())
    if missing or stale:
        _write(bundle, place, missing, stale)
    versions = {name: version for name in bundle.paths if (version := place.version(name))}
    return {"versions": versions} if versions else {}


def _write(bundle: Bundle, place: _Place, missing: list[str], stale: list[str]) -> None:
    """Send ``missing`` and remove ``stale``; the list of checksums is absent until everything was read back."""
    planned = "".join(f"{entry.sha256}  {name}\n" for name, entry in bundle.manifest.items())
    planned += "".join(f"{'0' * 64}  {name}\n" for name in stale if name not in bundle.manifest)
    place.files.pipe_file(place.path(UNFINISHED), planned.encode())
    changes_model = any(name in bundle.model for name in missing) or stale not in ([], [UNFINISHED])
    hidden = (SUMS, *reversed(LOADED_FIRST)) if changes_model else (SUMS,)
    for name in [name for name in hidden if name in place.sizes]:
        place.files.rm_file(place.path(name))
    for name in [name for name in stale if name not in (UNFINISHED, *hidden)]:
        place.files.rm_file(place.path(name))
    for name in [name for name in bundle.paths if name in {*missing, *hidden} and name != SUMS]:
        _send(bundle, place, name)
    _send(bundle, place, SUMS)
    place.files.rm_file(place.path(UNFINISHED))


def _send(bundle: Bundle, place: _Place, name: str) -> None:
    place.files.put_file(str(bundle.paths[name]), place.path(name))
    if place.digest(name) != bundle.manifest[name].sha256:
        raise RuntimeError(f"{name} differs from what was sent when read back")
