"""Fetch a model or data from an object store, or any other place that fsspec reaches by a URL.

The files are kept beside the hub's cache, in a folder whose name is a digest of the URL and of what the store lists:
the names, sizes and versions of the files. A store that changed therefore never mixes with files of an earlier fetch.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from shardmake.config.formats import DATA_SUFFIXES, data_kind
from shardmake.core.atomic import digest
from shardmake.core.errors import DataError, ModelError
from shardmake.core.hub import with_retries
from shardmake.core.manifest import FileRecord, record
from shardmake.core.stores import Cause, explain_store_errors, open_store
from shardmake.core.temporary import temporary_folder
from shardmake.fetch.model import FETCH_AGAIN, check_model_folder, choose_files, is_weights
from shardmake.run.sources import PinnedSource, missing_files

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

_VERSIONS = ("VersionId", "ETag", "etag", "md5Hash", "mtime", "LastModified", "created")
"""Keys of fsspec's file systems that change with a file's content; the first of them that a store has is compared."""
_ADVICE: Final[Mapping[Cause, str]] = {
    "permission": "Provide credentials with permission to list and read; for s3:// run `aws configure`.",
    "missing": "Check the URL: there is nothing at it, or nothing that you may see.",
    "other": FETCH_AGAIN,
}


@dataclass(frozen=True)
class Listing:
    """The files below a URL."""

    url: str
    files: "AbstractFileSystem"
    entries: Mapping[str, Mapping[str, Any]]
    """The store's description of each file, by its path relative to the URL; the key ``name`` is its path there."""

    @classmethod
    def of(cls, url: str) -> "Listing":
        """Ask the store."""
        files, root = open_store(url)
        if files.isfile(root):
            return cls(url, files, {root.rpartition("/")[2]: files.info(root)})
        found = files.find(root, detail=True)
        return cls(url, files, {path.removeprefix(root).lstrip("/"): entry for path, entry in found.items()})

    def size(self, name: str) -> int:
        """Return the bytes of a file; -1 if the store does not say."""
        size = self.entries[name].get("size")
        return -1 if size is None else int(size)

    def digest(self, names: Iterable[str]) -> str:
        """Return a digest of names, sizes and versions."""
        versions = {
            name: [self.size(name), str(next((v for key in _VERSIONS if (v := self.entries[name].get(key))), ""))]
            for name in names
        }
        return digest({"url": self.url, "files": versions})

    def folder(self, names: Iterable[str]) -> Path:
        """Return the folder on this machine for these files."""
        from huggingface_hub.constants import HF_HOME

        return Path(HF_HOME) / "shardmake" / self.digest(names)


def describe_model(url: str) -> PinnedSource:
    """Fetch the model at ``url`` without its weights, and list these.

    Raises `ModelError` if there is no complete model, or the store cannot be read.
    """
    with explain_store_errors("Fetching", url, ModelError, _ADVICE):
        return with_retries(lambda: _describe_once(url))


def _describe_once(url: str) -> PinnedSource:
    listing = Listing.of(url)
    names = choose_files(listing.entries)
    if "config.json" not in names:
        raise ModelError(f"No model at {url}: there is no config.json. Name the folder that save_pretrained wrote.")
    folder = listing.folder(names)
    small = _download(listing, [name for name in names if not is_weights(name)], folder)
    weights = {name: FileRecord(listing.size(name), "") for name in names if is_weights(name)}
    check_model_folder(folder, weights)
    return PinnedSource(name=url, listing=listing.digest(names), path=str(folder), files=small | weights)


def fetch_weights(source: PinnedSource) -> None:
    """Fetch the missing weights of ``source``, a model at a URL.

    Raises `ModelError` if the store has changed since `describe_model`, or cannot be read.
    """
    with explain_store_errors("Fetching", source.name, ModelError, _ADVICE):
        with_retries(lambda: _fetch_weights_once(source))


def _fetch_weights_once(source: PinnedSource) -> None:
    listing = Listing.of(source.name)
    known = [name for name in source.files if name in listing.entries]
    if listing.digest(known) != source.listing:
        raise ModelError(
            f"{source.name} has changed since its config was fetched. To take the new files, remove the run's "
            "sources.json and fetch again."
        )
    _download(listing, missing_files(source), Path(source.path))


def fetch_data(url: str, *, every_file: bool = False) -> PinnedSource:
    """Fetch the data file at ``url``, or those of a folder there, and record their digests.

    With ``every_file``, files of other kinds than data with examples are fetched too, hidden ones excepted.

    Raises `DataError` if there are none, or the store cannot be read.
    """
    with explain_store_errors("Fetching", url, DataError, _ADVICE):
        return with_retries(lambda: _fetch_data_once(url, every_file=every_file))


def _fetch_data_once(url: str, *, every_file: bool) -> PinnedSource:
    listing = Listing.of(url)
    shown = [name for name in listing.entries if not name.startswith(".") and "/." not in name]
    names = shown if every_file else [name for name in shown if data_kind(name)]
    if not names:
        wanted = "no file" if every_file else f"no file with examples. Use {', '.join(DATA_SUFFIXES)}"
        raise DataError(f"No data at {url}: there is {wanted}.")
    folder = listing.folder(names)
    files = _download(listing, names, folder)
    return PinnedSource(name=url, listing=listing.digest(names), path=str(folder), files=files)


def _download(listing: Listing, names: Iterable[str], folder: Path) -> dict[str, FileRecord]:
    """Copy the files that are not in ``folder`` yet; each gets its name once it is complete."""
    found = {}
    for name in names:
        path = folder / name
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            with temporary_folder("fetch", folder.parent) as work:
                part = work / path.name
                listing.files.get_file(listing.entries[name]["name"], str(part))
                if listing.size(name) not in (-1, part.stat().st_size):
                    raise RuntimeError(f"{name} arrived with {part.stat().st_size} of {listing.size(name)} bytes")
                part.rename(path)
        found[name] = record(path)
    return found
