"""The files that one node writes of a checkpoint: its folder, its listing, and the listings of all nodes together.

The ranks of each node write to a folder of their own. So a node knows exactly what it has written, reads only that for
its checksums, from its own page cache, and no node opens the files of another. The first node's folder becomes the
checkpoint; the other nodes move their files into it.
"""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pydantic import TypeAdapter

from shardmake.checkpoint.record import VISIBLE_SECONDS, list_files, wait_visible
from shardmake.core.atomic import write_json
from shardmake.core.fingerprint import FileEntry, fingerprint
from shardmake.core.permissions import add_mode
from shardmake.core.run_folder import fsync_directory, make_folder, remove, rename, unlink

_LISTING = TypeAdapter(dict[str, FileEntry])


def node_path(staged: Path, node: int) -> Path:
    """Return the folder to which the ranks of ``node`` write the checkpoint ``staged``."""
    return staged.parent / f"node-{node}" / staged.name if node else staged


def listing_path(staged: Path, node: int) -> Path:
    """Return the file with the sizes and checksums of what ``node`` has written."""
    return staged.parent / f"node-{node}.json"


def check_files(folder: Path, workers: int) -> dict[str, FileEntry]:
    """Make every file below ``folder`` durable; return its size and checksum, by its path relative to ``folder``.

    Each file gets the permissions of the folder: some libraries write files with mode 0600, whatever the umask.
    """
    if not folder.exists():
        return {}
    allowed, names = folder.stat().st_mode & 0o666, list_files(folder)

    def check(name: str) -> FileEntry:
        add_mode(folder / name, allowed)
        return fingerprint(folder / name, sync=True)

    with ThreadPoolExecutor(workers) as pool:
        return dict(zip(names, pool.map(check, names), strict=True))


def move_files(staged: Path, node: int, files: dict[str, FileEntry]) -> None:
    """Move the checked ``files`` of ``node`` into ``staged`` and write its listing; node 0's are there already."""
    if node == 0:
        return
    source = node_path(staged, node)
    for folder in {(staged / name).parent for name in files}:
        make_folder(folder)
    for name in files:
        rename(source / name, staged / name)
    for folder in {(staged / name).parent for name in files}:
        fsync_directory(folder)
    remove(source.parent)
    write_listing(staged, node, files)


def write_listing(staged: Path, node: int, files: dict[str, FileEntry]) -> None:
    """Write what ``node`` has put into ``staged``, for node 0."""
    write_json(listing_path(staged, node), _LISTING.dump_python(files))


def read_listings(
    staged: Path, nodes: int, own: dict[str, FileEntry], deadline_seconds: float = VISIBLE_SECONDS
) -> dict[str, FileEntry]:
    """Return all files of ``staged``: ``own`` of node 0, and those in the listings of the others, which are removed.

    Raise `RuntimeError` if two nodes wrote a file with different content, and `FileNotFoundError` if a listing did not
    come within ``deadline_seconds``.
    """
    paths = [wait_visible(listing_path(staged, node), deadline_seconds) for node in range(1, nodes)]
    files = merge_listings([own, *(_LISTING.validate_json(path.read_bytes()) for path in paths)])
    for path in paths:
        unlink(path)
    return files


def merge_listings(listings: Iterable[dict[str, FileEntry]]) -> dict[str, FileEntry]:
    """Return all files of a checkpoint; raise `RuntimeError` for one that nodes wrote with different content."""
    found: dict[str, FileEntry] = {}
    for files in listings:
        for name, entry in files.items():
            if found.setdefault(name, entry) != entry:
                raise RuntimeError(f"Two nodes wrote {name} with different content. Only one node may write it.")
    return found


def complete(staged: Path, files: dict[str, FileEntry]) -> dict[str, FileEntry]:
    """Return ``files`` with every other file below ``staged``, after checking that each of ``files`` is there.

    The folders are listed once, and no file that a node has checked is opened again. A file in no listing, which a
    library wrote past its node's folder, is checked here. Raise `FileNotFoundError` for one that is not visible.
    """
    there = set(list_files(staged))
    for name in sorted(files.keys() - there):
        wait_visible(staged / name)
    unlisted = {name: fingerprint(staged / name, sync=True) for name in sorted(there - files.keys())}
    return dict(sorted((files | unlisted).items()))
