"""``python -m shardmake.train.upload ORDER``: bring what a node saved on its scratch to the shared folder.

Training goes on meanwhile. One such process runs per node, started by the node's first rank, and dies with it. Each
copies the files of its node, with their checksums on the way, makes them durable and leaves a listing; the one of
node 0 waits for all listings and seals the checkpoint as any other. What is killed before that leaves nothing that
counts. No torch is imported here.
"""

import os
import shutil
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from isal.isal_zlib import crc32
from pydantic import Field, TypeAdapter

from shardmake.checkpoint import store
from shardmake.checkpoint.files import BLOCK, FileEntry, list_files, wait_visible
from shardmake.checkpoint.retention import Retention
from shardmake.core.atomic import write_json
from shardmake.core.process import die_with_parent
from shardmake.run.attempt import AttemptDir
from shardmake.run.record import RunRecord

_WORKERS = 4
_LISTING = TypeAdapter(dict[str, FileEntry])


class Order(RunRecord):
    """What one node's upload has to do."""

    local: Path = Field(description="The checkpoint as this node's ranks wrote it.")
    staged: Path = Field(description="Where it is put together before it counts.")
    attempt: Path = Field(description="Folder of the attempt; once a later one has begun, nothing is written any more.")
    node: int = Field(description="Rank of this node.")
    nodes: int = Field(description="Nodes that save.")
    parent: int = Field(description="Process id of the rank that waits for this.")
    described: dict[str, Any] = Field(description="What the record says besides files and times.")
    started: float = Field(description="Unix time at which the save began.")
    retention: Retention = Field(description="Which checkpoints stay.")

    def listing(self, node: int) -> Path:
        """Sizes and checksums of what ``node`` has brought."""
        return self.staged.parent / f"node-{node}.json"


def carry_out(order: Order) -> None:
    """Copy this node's files; on node 0, wait for those of the others and seal the checkpoint."""
    files = _copy_all(order)
    shutil.rmtree(order.local, ignore_errors=True)
    if order.node:
        write_json(order.listing(order.node), _LISTING.dump_python(files))
        return
    others = [wait_visible(order.listing(node), float("inf")) for node in range(1, order.nodes)]
    files = put_together([files, *(_LISTING.validate_json(path.read_bytes()) for path in others)])
    for path in others:
        path.unlink()
    _stop_if_superseded(order)
    store.commit_and_prune(order.staged, files, order.described, order.started, order.retention)


def put_together(listings: Iterable[dict[str, FileEntry]]) -> dict[str, FileEntry]:
    """All files of a checkpoint; one that several nodes wrote must be the same on all of them.

    Raises:
        RuntimeError: it is not.
    """
    found: dict[str, FileEntry] = {}
    for files in listings:
        for name, entry in files.items():
            if found.setdefault(name, entry) != entry:
                raise RuntimeError(f"Two nodes wrote {name}, and not the same; it must be of one of them.")
    return found


def copy(source: Path, target: Path) -> FileEntry:
    """Copy a file and make it durable; size and checksum of what was written."""
    target.parent.mkdir(parents=True, exist_ok=True)
    checksum = size = 0
    with source.open("rb") as read, target.open("wb") as written:
        while block := read.read(BLOCK):
            checksum = crc32(block, checksum)
            size += written.write(block)
        written.flush()
        os.fsync(written.fileno())
    return FileEntry(size=size, crc32=f"{checksum:08x}")


def _copy_all(order: Order) -> dict[str, FileEntry]:
    def bring(name: str) -> FileEntry:
        _stop_if_superseded(order)
        return copy(order.local / name, order.staged / name)

    order.staged.mkdir(parents=True, exist_ok=True)
    names = list_files(order.local)
    with ThreadPoolExecutor(_WORKERS) as pool:
        return dict(zip(names, pool.map(bring, names), strict=True))


def _stop_if_superseded(order: Order) -> None:
    """A rank that is killed may take seconds to give its memory back, and only then the kernel ends its child."""
    if AttemptDir(order.attempt).is_superseded():
        raise RuntimeError("A later attempt has begun.")


def main() -> None:
    """Carry out the order; the exit status is the error's number where the system gave one."""
    order = Order.model_validate_json(sys.argv[1])
    die_with_parent()
    if os.getppid() != order.parent:
        sys.exit("The rank that saved is gone.")
    try:
        carry_out(order)
    except OSError as error:
        print(error, file=sys.stderr)
        sys.exit(error.errno or 1)


if __name__ == "__main__":
    main()
