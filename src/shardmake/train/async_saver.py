"""The node-local scratch folder of an asynchronous save, and the process that uploads its content."""

import os
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardmake.core import disk
from shardmake.core.errors import ShardmakeError
from shardmake.core.permissions import make_private
from shardmake.core.units import MIB
from shardmake.memory.scenario import BYTES
from shardmake.run.plan import Choice
from shardmake.run.training_settings import Retention
from shardmake.train.upload import UploadRequest

MARGIN = 64 * MIB
"""Bytes that stay free beside a checkpoint, because its parts differ slightly in size."""


def share_of_node(choice: Choice, node: int) -> float:
    """Return the largest part of a checkpoint that the ranks of ``node`` write.

    All ranks write their shards. The first rank also writes what is not sharded: everything under ddp, and the weights
    in the compute type under ZeRO-1 and ZeRO-2. Their part is largest when the optimizer has only master weights.
    """
    compute = BYTES[choice.precision]
    unsharded = {0: float(choice.spec.is_ddp), 1: compute / (4 + compute), 2: compute / (4 + compute), 3: 0.0}
    first = unsharded[choice.zero_stage]
    return (1 - first) / choice.nodes + (first if node == 0 else 0)


@dataclass(frozen=True)
class ScratchFolder:
    """The folder to which the ranks of one node write an asynchronous checkpoint."""

    folder: Path
    """Used by this node only; it is emptied before each save."""
    private: Path
    """The folder above it that must belong to this user alone."""
    attempt: Path
    """Folder of the attempt."""
    node: int
    nodes: int
    share: float
    """Result of `share_of_node`."""

    def make_room(self, size: int) -> str:
        """Empty the folder; return an error message if this node's part of ``size`` bytes does not fit.

        Nothing is written where another user could read or replace it.
        """
        if not make_private(self.private):
            return f"{self.private} is not a folder of this user alone. Remove it, or set another scratch folder"
        shutil.rmtree(self.folder, ignore_errors=True)
        try:
            self.folder.mkdir(parents=True)
            disk.check_save(self.folder, int(size * self.share) + MARGIN)
        except (OSError, ShardmakeError) as error:
            return str(error)
        return ""

    def start_upload(
        self, local: Path, staged: Path, described: dict[str, Any], started: float, retention: Retention
    ) -> "subprocess.Popen[str]":
        """Start to upload what this node's ranks wrote to ``local``; see `UploadRequest` for the arguments."""
        request = UploadRequest(
            local=local, staged=staged, attempt=self.attempt, node=self.node, nodes=self.nodes, parent=os.getpid(),
            described=described, started=started, retention=retention,
        )  # fmt: skip
        command = [sys.executable, "-m", "shardmake.train.upload", request.model_dump_json()]
        return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def upload_error(upload: "subprocess.Popen[str]") -> OSError:
    """Return the error that ended ``upload``: its exit status is the error number, its last line the message."""
    assert upload.stderr is not None
    code, stderr = upload.wait(), upload.stderr.read().strip()
    reason = stderr.splitlines()[-1] if stderr else f"it ended with {code}"
    return OSError(max(code, 0), f"{reason} (on {socket.gethostname()})")
