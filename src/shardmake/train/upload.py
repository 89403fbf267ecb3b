"""``python -m shardmake.train.upload REQUEST``: copy an asynchronous checkpoint from scratch to the shared folder.

Training continues meanwhile. The first rank of each node starts one such process, which ends with that rank. Each
process copies its node's files, computes their checksums, makes them durable, and writes a listing. The process of
node 0 waits for all listings and commits the checkpoint. A process that is killed earlier leaves no committed
checkpoint. This module does not import torch.
"""

import contextlib
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from isal.isal_zlib import crc32
from pydantic import Field

from shardmake.checkpoint import store
from shardmake.checkpoint.node_files import read_listings, write_listing
from shardmake.checkpoint.record import list_files
from shardmake.core.fingerprint import BLOCK, FileEntry
from shardmake.core.log import configure_logging
from shardmake.core.process import die_with_parent
from shardmake.core.run_folder import make_folder, open_file, remove
from shardmake.run.attempt import AttemptDir
from shardmake.run.record import RunRecord
from shardmake.run.training_settings import Retention

_WORKERS = 4


class UploadRequest(RunRecord):
    """The input of one node's upload process."""

    local: Path = Field(description="The checkpoint as this node's ranks wrote it.")
    staged: Path = Field(description="Folder in which the checkpoint is assembled before its commit.")
    attempt: Path = Field(description="Folder of the attempt; nothing is written once a later attempt has started.")
    node: int = Field(description="Rank of this node.")
    nodes: int = Field(description="Nodes that save.")
    parent: int = Field(description="Process id of the rank that started the upload.")
    described: dict[str, Any] = Field(description="Content of the record besides files and times.")
    started: float = Field(description="Unix time at which the save started.")
    retention: Retention = Field(description="Which checkpoints stay.")


def run_upload(request: UploadRequest) -> None:
    """Copy this node's files; on node 0, wait for the listings of the other nodes and commit the checkpoint."""
    files = _copy_all(request)
    remove(request.local)
    if request.node:
        write_listing(request.staged, request.node, files)
        return
    files = read_listings(request.staged, request.nodes, files, float("inf"))
    _stop_if_superseded(request)
    store.commit_and_prune(request.staged, files, request.described, request.started, request.retention)


def copy(source: Path, target: Path) -> FileEntry:
    """Copy a file and make it durable; return the size and checksum of what was written."""
    make_folder(target.parent)
    checksum = size = 0
    with source.open("rb") as read, open_file(target, "wb") as written:
        while block := read.read(BLOCK):
            checksum = crc32(block, checksum)
            size += written.write(block)
        written.flush()
        os.fsync(written.fileno())
    return FileEntry(size=size, crc32=f"{checksum:08x}")


def _copy_all(request: UploadRequest) -> dict[str, FileEntry]:
    def copy_file(name: str) -> FileEntry:
        _stop_if_superseded(request)
        return copy(request.local / name, request.staged / name)

    make_folder(request.staged)
    names = list_files(request.local)
    with ThreadPoolExecutor(_WORKERS) as pool:
        return dict(zip(names, pool.map(copy_file, names), strict=True))


def _stop_if_superseded(request: UploadRequest) -> None:
    """Raise once a later attempt has started.

    A killed rank may need seconds to release its memory, and the kernel ends its child only after that.
    """
    if AttemptDir(request.attempt).is_superseded():
        raise RuntimeError("The upload was stopped, because a later attempt has started.")


def main() -> None:
    """Run the upload; the exit status is the system's error number if there is one.

    Only the error goes to stderr, which the rank reads. Log lines go to stdout and so to the log of the node.
    """
    request = UploadRequest.model_validate_json(sys.argv[1])
    die_with_parent()
    if os.getppid() != request.parent:
        sys.exit("The upload was not started, because the rank that saved has ended.")
    configure_logging(rank=int(os.environ.get("RANK", "0")))
    try:
        with contextlib.redirect_stderr(sys.stdout):
            run_upload(request)
    except OSError as error:
        print(error, file=sys.stderr)
        sys.exit(error.errno or 1)


if __name__ == "__main__":
    main()
