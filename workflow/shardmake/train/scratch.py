"""A node's scratch folder as the first stop of a checkpoint, and the process that takes it on from there."""

import os
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardmake import space
from shardmake.errors import UserError
from shardmake.train.ledger import Retention
from shardmake.train.upload import Order

MARGIN = 64 << 20
"""Bytes that stay free beside a checkpoint: its parts are not quite of one size."""


@dataclass(frozen=True)
class Scratch:
    """Where the ranks of one node write a checkpoint that is saved asynchronously."""

    folder: Path
    """Of this node alone; whatever is in it goes before a save."""
    attempt: Path
    """Folder of the attempt."""
    node: int
    nodes: int
    parts: int
    """Nodes that share a checkpoint's bytes; without sharding the first node writes all."""

    def make_room(self, size: int) -> str:
        """Empty the folder; what is wrong where this node's part of a checkpoint of ``size`` bytes does not fit."""
        shutil.rmtree(self.folder, ignore_errors=True)
        try:
            self.folder.mkdir(parents=True)
            space.check_save(self.folder, size // self.parts + MARGIN)
        except (OSError, UserError) as error:
            return str(error)
        return ""

    def send(
        self, local: Path, staged: Path, described: dict[str, Any], started: float, rule: Retention
    ) -> "subprocess.Popen[str]":
        """Start the upload of what this node's ranks wrote to ``local``; the arguments are those of an `Order`."""
        order = Order(
            local=local,
            staged=staged,
            attempt=self.attempt,
            node=self.node,
            nodes=self.nodes,
            parent=os.getpid(),
            described=described,
            started=started,
            retention=rule,
        )
        command = [sys.executable, "-m", "shardmake.train.upload", order.model_dump_json()]
        return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def failure(upload: "subprocess.Popen[str]") -> OSError:
    """What ended ``upload``, which gives its error's number as its exit status, and the text last."""
    assert upload.stderr is not None
    code, told = upload.wait(), upload.stderr.read().strip()
    reason = told.splitlines()[-1] if told else f"it ended with {code}"
    return OSError(max(code, 0), f"{reason} (on {socket.gethostname()})")
