"""Validate what a job loads: every node reads its share of the files, and the driver checks findings in a checkpoint.

All nodes read at once, before their ranks start, so together they read every byte once, and what the ranks then load is
in the page cache of their node. The ranks load nothing before all of them have met in the network check, so a node with
a finding keeps the others from loading a damaged checkpoint. The driver then reads the named files itself: if they are
damaged, the checkpoint is set aside and the next attempt resumes from an older one. If they are not, the node that read
them differently is at fault.

DeepSpeed and torch import and call what a checkpoint's pickles name. A checkpoint with a name that no training wrote is
therefore not loaded, and neither is one with a file that its record does not list; the run stops, because a person must
find out who wrote it.
"""

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from shardmake.checkpoint import store
from shardmake.checkpoint.formats.pickle_names import refuse_foreign_names
from shardmake.checkpoint.record import RECORD_NAME, find_damaged, is_intact, read_record, refuse_unlisted
from shardmake.core.errors import CheckpointError, ModelError
from shardmake.core.fingerprint import FileEntry
from shardmake.core.manifest import FileRecord
from shardmake.core.run_folder import real_path
from shardmake.core.units import GIB
from shardmake.launch.preflight import PreflightError
from shardmake.run.attempt import Attempt, AttemptDir
from shardmake.run.findings import stops
from shardmake.run.paths import RunDir
from shardmake.run.sources import recorded_data, recorded_weights, refuse_changed

_READERS = 8


class DamagedCheckpointError(RuntimeError):
    """Files of the checkpoint are not as recorded; ``files`` are their names."""

    def __init__(self, problems: Mapping[str, str]) -> None:
        super().__init__("; ".join(problems.values()))
        self.files = list(problems)


def share_of_files(files: Mapping[str, FileEntry] | Mapping[str, FileRecord], node: int, nodes: int) -> list[str]:
    """Return the names that ``node`` of ``nodes`` validates: of each size every node gets about as many files."""
    return sorted(files, key=lambda name: (files[name].size, name))[node::nodes]


def validate_inputs(attempt: Attempt, node_rank: int, report: Callable[[str], None]) -> None:
    """Compare this node's share of base weights and data with their records, and pass ``report`` number and duration.

    Raises:
        PreflightError: a file is not as `shardmake fetch` or `shardmake data` recorded it.
    """
    started, weights = time.monotonic(), recorded_weights(attempt.rundir)
    files = {**weights, **recorded_data(attempt.rundir, "train", "eval")}
    share = {name: files[name] for name in share_of_files(files, node_rank, attempt.nodes)}
    try:
        refuse_changed(attempt.rundir, share)
    except ModelError as error:
        raise PreflightError([stops("inputs", str(error).removesuffix("."))], blames_run=True) from None
    size, seconds = sum(entry.size for entry in share.values()) / GIB, time.monotonic() - started
    report(f"{len(share)} of {len(files)} files of model and data are as recorded ({size:.2f} GiB, {seconds:.1f} s)")
    if not weights:
        report("warning: the base weights were not compared, because `shardmake fetch` has recorded none")


def validate_share(attempt: Attempt, node_rank: int, report: Callable[[str], None]) -> None:
    """Read the files that this node validates, and pass their number and the duration to ``report``.

    Raises:
        DamagedCheckpointError: a file is not as recorded.
        PreflightError: loading a file would import what no training wrote, or the record does not list a file.
        CheckpointError: this user may not read a file.
    """
    if attempt.resume_from is None:
        return
    started, checkpoint = time.monotonic(), Path(attempt.resume_from)
    record = read_record(checkpoint)
    if record is None:
        raise DamagedCheckpointError({RECORD_NAME: f"{checkpoint / RECORD_NAME} is damaged or cannot be read"})
    names = share_of_files(record.files, node_rank, attempt.nodes)
    if problems := find_damaged(checkpoint, record, names, workers=_READERS):
        raise DamagedCheckpointError(problems)
    try:
        refuse_unlisted(checkpoint, record)
        refuse_foreign_names(checkpoint, names)
    except CheckpointError as error:
        raise PreflightError([stops("checkpoint", str(error).removesuffix("."))], blames_run=True) from None
    size = sum(record.files[name].size for name in names) / GIB
    seconds = time.monotonic() - started
    report(f"{checkpoint.name}: {len(names)} of {len(record.files)} files are intact ({size:.2f} GiB, {seconds:.1f} s)")


def confirm_damage(folder: AttemptDir) -> str:
    """Set the run's checkpoint of an attempt aside if a node found it damaged and this machine does as well.

    Return a sentence about it; empty without such a finding. A driver that was killed in here repeats the call.

    Raises:
        CheckpointError: this user may not read a file.
    """
    found = [node for node in folder.exits() if node.damaged]
    resume_from = folder.read().resume_from
    if not found or resume_from is None:
        return ""
    checkpoint, run = Path(resume_from), RunDir(folder.root.absolute().parents[2])
    parent = checkpoint.parent.resolve()
    converted, own = parent == real_path(run.resharded).resolve(), parent == real_path(run.checkpoints).resolve()
    if not converted and not own:
        return ""
    if checkpoint.exists():
        record, names = read_record(checkpoint), {name for node in found for name in node.damaged} - {RECORD_NAME}
        if record is not None and all(is_intact(record, checkpoint, name) for name in names):
            return ""
        # The next attempt makes a converted checkpoint again. Any other is kept under another name.
        (store.remove if converted else store.set_aside)(checkpoint)
    return f"{checkpoint.name} is damaged and was set aside. {found[0].host} found: {found[0].message}."
