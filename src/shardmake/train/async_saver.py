"""A node's scratch folder as the first stop of a checkpoint, and the process that takes it on from there."""

import os
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardmake.checkpoint.retention import Retention
from shardmake.core import disk
from shardmake.core.errors import ShardmakeError
from shardmake.memory.scenario import BYTES
from shardmake.run.plan import Choice
from shardmake.train.upload import Order

MARGIN = 64 << 20
"""Bytes that stay free beside a checkpoint: its parts are not quite of one size."""


def share_of_node(choice: Choice, node: int) -> float:
    """The most that the ranks of ``node`` write of a checkpoint, as a part of one: their shards.

    The first rank writes besides what is not sharded. That is all under ddp, and under ZeRO-1 and ZeRO-2 the weights
    in the compute type, whose part is the largest where an optimizer holds nothing but master weights.
    """
    compute = BYTES[choice.precision]
    whole = {0: float(choice.spec.is_ddp), 1: compute / (4 + compute), 2: compute / (4 + compute), 3: 0.0}
    first = whole[choice.zero_stage]
    return (1 - first) / choice.nodes + (first if node == 0 else 0)


@dataclass(frozen=True)
class ScratchFolder:
    """Where the ranks of one node write a checkpoint that is saved asynchronously."""

    folder: Path
    """Of this node alone; whatever is in it goes before a save."""
    attempt: Path
    """Folder of the attempt."""
    node: int
    nodes: int
    share: float
    """As `share_of_node` says."""

    def make_room(self, size: int) -> str:
        """Empty the folder; what is wrong where this node's part of a checkpoint of ``size`` bytes does not fit."""
        shutil.rmtree(self.folder, ignore_errors=True)
        try:
            self.folder.mkdir(parents=True)
            disk.check_save(self.folder, int(size * self.share) + MARGIN)
        except (OSError, ShardmakeError) as error:
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
