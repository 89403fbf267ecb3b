"""Convert a checkpoint of one strategy and number of ranks to another, if there is a route."""

import logging
import shutil
from enum import Enum
from pathlib import Path

from shardmake.checkpoint import store
from shardmake.checkpoint.formats import dcp
from shardmake.checkpoint.formats.pickle_names import refuse_foreign_names
from shardmake.checkpoint.formats.zero import is_universal, universal_folder
from shardmake.checkpoint.formats.zero_files import swap_folder
from shardmake.checkpoint.node_files import check_files
from shardmake.checkpoint.record import RECORD_NAME, CheckpointRecord, find_problems, read_record, refuse_unlisted
from shardmake.config.strategies import STRATEGY_SPECS
from shardmake.core.atomic import read_json, write_json
from shardmake.core.disk import check_save
from shardmake.core.errors import CheckpointError
from shardmake.core.run_folder import make_folder, remove, rename


class Route(Enum):
    """How a checkpoint is made readable."""

    NATIVE = "read without conversion"
    UNIVERSAL = "DeepSpeed's universal checkpoint"
    DISTRIBUTED = "torch's distributed checkpoint"


def route(wrote: str, wrote_ranks: int, reads: str, ranks: int) -> Route | str:
    """Return the route from ``wrote`` on ``wrote_ranks`` ranks to ``reads`` on ``ranks`` ranks, or why there is none.

    Without a universal checkpoint, DeepSpeed resumes only the ZeRO stage and world size that wrote the checkpoint, and
    with NVMe only checkpoints of NVMe. torch's distributed checkpoints fit any world size. Under DDP every rank reads
    everything.
    """
    source, target = STRATEGY_SPECS[wrote], STRATEGY_SPECS[reads]
    is_same_family = source.checkpoint_family == target.checkpoint_family
    if is_same_family and (wrote_ranks == ranks or not target.is_deepspeed):
        return Route.NATIVE
    if source.is_ddp:
        return f"checkpoints of {wrote} cannot be converted, only those of ZeRO and FSDP"
    if target.is_deepspeed:
        return Route.UNIVERSAL
    if target.is_fsdp:
        return Route.DISTRIBUTED
    return f"checkpoints of {wrote} cannot be converted for {reads}"


logger = logging.getLogger(__name__)

_WORKERS = 4
_NOT_COPIED = {"latest", "zero_to_fp32.py", "zero_to_torch.py", RECORD_NAME}


def find_route(record: CheckpointRecord, checkpoint: Path, strategy: str, ranks: int) -> Route:
    """Return how ``strategy`` on ``ranks`` ranks can resume ``checkpoint``; raise `CheckpointError` if it cannot."""
    found = route(record.strategy, record.world_size, strategy, ranks)
    if isinstance(found, Route):
        return found
    raise CheckpointError(
        f"{checkpoint} was written by {record.strategy} on {record.world_size} ranks and cannot be resumed by "
        f"{strategy} on {ranks}: {found}. Restore the previous strategy and nodes, or move {checkpoint.parent} away to "
        "start from the base model."
    )


def reshard(checkpoint: Path, out: Path, strategy: str | None, ranks: int) -> CheckpointRecord:
    """Convert ``checkpoint`` for ``strategy`` on ``ranks`` ranks, write it to ``out`` and return its record.

    Without a strategy, the checkpoint's own is kept. An earlier conversion in ``out`` is reused if it is complete.
    Raise `CheckpointError` if the checkpoint is not complete, or cannot be converted.
    """
    record, problems = read_record(checkpoint), find_problems(checkpoint)
    if record is None or problems:
        raise CheckpointError(
            f"{checkpoint} is not a complete Shardmake checkpoint: {'; '.join(problems)}. Use an older checkpoint."
        )
    refuse_unlisted(checkpoint, record)
    refuse_foreign_names(checkpoint, record.files)
    strategy = strategy or record.strategy
    found = find_route(record, checkpoint, strategy, ranks)
    if found is Route.NATIVE:
        raise CheckpointError(
            f"{checkpoint} needs no resharding. {strategy} on {ranks} ranks can resume it without conversion."
        )
    done = read_record(out)
    if done and _is_reusable(done, record, strategy, ranks) and not find_problems(out):
        logger.info("Reusing %s.", out)
        done = done.model_copy(update={"strategy": strategy, "world_size": ranks})
        store.commit_in_place(out, done)
    else:
        check_save(out.parent, record.size * (2 if found is Route.DISTRIBUTED else 1))
        wrote = f"{record.strategy} on {record.world_size} ranks"
        logger.info("Resharding %s (%s) for %s on %d.", checkpoint.name, wrote, strategy, ranks)
        done = _write(checkpoint, record, out, strategy, ranks)
    if STRATEGY_SPECS[strategy].uses_nvme:  # DeepSpeed copies the swap files from these folders, which are empty
        for rank in range(ranks):
            make_folder(swap_folder(universal_folder(out), rank))
    return done


def _write(checkpoint: Path, record: CheckpointRecord, out: Path, strategy: str, ranks: int) -> CheckpointRecord:
    """Convert to a folder beside ``out`` and rename it once its record is written."""
    folder = out.with_name(f".{out.name}.partial")
    for leftover in (folder, out):
        remove(leftover)
    make_folder(folder, private=True)
    make_folder(partial := folder / out.name)
    _convert(checkpoint, record, partial, strategy)
    _copy_unsharded_files(checkpoint, partial, record.world_size, ranks)
    files = check_files(partial, _WORKERS)
    resharded = record.model_copy(update={"strategy": strategy, "world_size": ranks, "files": files})
    store.commit_in_place(partial, resharded)
    rename(partial, out)
    remove(folder)
    return resharded


def set_load_universal(config: Path, checkpoint: Path | None) -> None:
    """Set ``load_universal`` in the DeepSpeed file ``config`` as resuming from ``checkpoint`` needs it."""
    values = read_json(config, "shardmake train NAME")
    universal, section = checkpoint is not None and is_universal(checkpoint), values.get("checkpoint", {})
    if universal != section.get("load_universal", False):
        write_json(config, values | {"checkpoint": {**section, "load_universal": universal}})


def _is_reusable(done: CheckpointRecord, record: CheckpointRecord, strategy: str, ranks: int) -> bool:
    """Return True if an earlier conversion of the same checkpoint fits ``strategy`` on ``ranks`` ranks.

    A universal checkpoint fits any number of ranks and every ZeRO stage; a distributed one fits every FSDP strategy.
    Only the name of the random state file is different for a single rank.
    """
    same_library = STRATEGY_SPECS[done.strategy].library == STRATEGY_SPECS[strategy].library
    same_source = all(getattr(done, it) == getattr(record, it) for it in ("step", "saved_at", "settings_digest"))
    same_names = (done.world_size == 1) == (ranks == 1)
    return same_source and same_names and same_library


def _convert(checkpoint: Path, record: CheckpointRecord, target: Path, strategy: str) -> None:
    from shardmake.checkpoint.reshard import states  # imports torch

    is_fsdp = STRATEGY_SPECS[strategy].is_fsdp
    held = states.states_of_fsdp(checkpoint, record.step) if dcp.find(checkpoint) else states.states_of_zero(checkpoint)
    if is_fsdp and held.rest:
        raise CheckpointError(
            f"Cannot convert {checkpoint} for FSDP. It holds {held.rest}, which cannot be converted. "
            "Resume with a ZeRO strategy."
        )
    universal = target / ".universal" if is_fsdp else target
    states.write_universal(held, universal)
    if is_fsdp:
        states.write_distributed(held, universal, target)
        remove(universal)


def _copy_unsharded_files(checkpoint: Path, target: Path, wrote: int, ranks: int) -> None:
    """Copy scheduler, Trainer state, random states, config and tokenizer, which do not depend on the sharding."""
    for path in checkpoint.iterdir():
        if path.is_file() and path.name not in _NOT_COPIED:
            shutil.copy(path, target / path.name)
    several, single = target / "rng_state_0.pth", target / "rng_state.pth"  # the name without ranks is for one process
    written, read = (single if count == 1 else several for count in (wrote, ranks))
    if written.exists():
        rename(written, read)
