"""The reshard stage: a checkpoint of one strategy and number of ranks becomes one of another."""

import shutil
from collections.abc import Callable
from pathlib import Path

from shardmake.checkpoint import store
from shardmake.checkpoint.files import RECORD_NAME, fingerprint, list_files
from shardmake.checkpoint.record import CheckpointRecord, find_problems, read_record
from shardmake.checkpoint.reshard.dcp import states_of_fsdp, write_distributed
from shardmake.checkpoint.reshard.routes import Route, route
from shardmake.checkpoint.reshard.universal import States, is_universal, make_swap_folders, write_universal
from shardmake.checkpoint.reshard.zero import frozen_or_buffers, states_of_zero
from shardmake.config.strategies import STRATEGY_SPECS
from shardmake.core.atomic import read_json, write_json
from shardmake.core.disk import check_save
from shardmake.core.errors import ShardmakeError

Tell = Callable[[str], None]
_LEFT_BEHIND = {"latest", "zero_to_fp32.py", "zero_to_torch.py", RECORD_NAME}


def find_route(record: CheckpointRecord, checkpoint: Path, strategy: str, ranks: int) -> Route:
    """How ``strategy`` on ``ranks`` ranks goes on from ``checkpoint``; a `ShardmakeError` if it cannot."""
    found = route(record.strategy, record.world_size, strategy, ranks)
    if isinstance(found, Route):
        return found
    raise ShardmakeError(
        f"{checkpoint} was written by {record.strategy} on {record.world_size} ranks and cannot be resumed by "
        f"{strategy} on {ranks}: {found}. Set strategy and nodes as they were, or move {checkpoint.parent} away to "
        "start afresh."
    )


def reshard(checkpoint: Path, out: Path, strategy: str | None, ranks: int, tell: Tell) -> CheckpointRecord:
    """Write ``checkpoint`` to ``out`` as ``strategy`` on ``ranks`` ranks resumes it; return the record of ``out``.

    Without a strategy it stays what it was. What is there already is used again if it is whole. ``out`` appears when
    it is complete.

    Raises:
        ShardmakeError: the checkpoint is not whole, or cannot be converted.
    """
    record, found = read_record(checkpoint), find_problems(checkpoint)
    if record is None or found:
        raise ShardmakeError(f"{checkpoint} is no whole checkpoint of Shardmake: {'; '.join(found)}.")
    strategy = strategy or record.strategy
    way = find_route(record, checkpoint, strategy, ranks)
    if way is Route.NATIVE:
        raise ShardmakeError(f"{checkpoint} needs no resharding: {strategy} on {ranks} ranks resumes it as it is.")
    done = read_record(out)
    if done and _is_same(done, record, strategy, ranks) and not find_problems(out):
        tell(f"{out} is there already.")
        done = done.model_copy(update={"strategy": strategy, "world_size": ranks})
        store.commit_in_place(out, done)
    else:
        check_save(out.parent, record.size * (2 if way is Route.DISTRIBUTED else 1))
        wrote = f"{record.strategy} on {record.world_size} ranks"
        tell(f"Resharding {checkpoint.name} ({wrote}) for {strategy} on {ranks}.")
        done = _write(checkpoint, record, out, strategy, ranks)
    if STRATEGY_SPECS[strategy].uses_nvme:
        make_swap_folders(out, ranks)
    return done


def _write(checkpoint: Path, record: CheckpointRecord, out: Path, strategy: str, ranks: int) -> CheckpointRecord:
    """Convert beside ``out``, and let it appear when it is complete, with its record."""
    partial = out.with_name(f".{out.name}.partial")
    for leftover in (partial, out):
        shutil.rmtree(leftover, ignore_errors=True)
    _convert(checkpoint, record, partial, strategy)
    _copy_the_rest(checkpoint, partial, record.world_size, ranks)
    files = {name: fingerprint(partial / name, sync=True) for name in list_files(partial)}
    resharded = record.model_copy(update={"strategy": strategy, "world_size": ranks, "files": files})
    store.commit_in_place(partial, resharded)
    partial.rename(out)
    return resharded


def write_deepspeed_hint(config: Path, checkpoint: Path) -> None:
    """Put into the DeepSpeed file ``config`` that ``checkpoint`` is a universal one, where it is."""
    if is_universal(checkpoint):
        values = read_json(config, "shardmake train NAME")
        write_json(config, values | {"checkpoint": {**values.get("checkpoint", {}), "load_universal": True}})


def _is_same(done: CheckpointRecord, record: CheckpointRecord, strategy: str, ranks: int) -> bool:
    """A universal checkpoint serves any number of ranks and every stage, torch's distributed one any of FSDP's.

    Only the file of random states is named otherwise for one rank alone.
    """
    same_library = STRATEGY_SPECS[done.strategy].library == STRATEGY_SPECS[strategy].library
    same_source = (done.step, done.saved_at, done.recipe) == (record.step, record.saved_at, record.recipe)
    same_names = (done.world_size == 1) == (ranks == 1)
    return same_source and same_names and same_library


def _convert(checkpoint: Path, record: CheckpointRecord, target: Path, strategy: str) -> None:
    if not STRATEGY_SPECS[strategy].is_fsdp:
        write_universal(_states(checkpoint, record), target)
        return
    if rest := frozen_or_buffers(checkpoint):
        raise ShardmakeError(
            f"{checkpoint} holds {rest}, which are not converted for FSDP. Resume under a ZeRO strategy."
        )
    between, states = target / ".universal", _states(checkpoint, record)
    write_universal(states, between)
    write_distributed(states, between, target)
    shutil.rmtree(between)


def _states(checkpoint: Path, record: CheckpointRecord) -> States:
    if STRATEGY_SPECS[record.strategy].is_fsdp:
        return states_of_fsdp(checkpoint, record.step)
    return states_of_zero(checkpoint)


def _copy_the_rest(checkpoint: Path, target: Path, wrote: int, ranks: int) -> None:
    """Scheduler, Trainer's state, random number states, config, tokenizer: they do not depend on the sharding."""
    for path in checkpoint.iterdir():
        if path.is_file() and path.name not in _LEFT_BEHIND:
            shutil.copy(path, target / path.name)
    several, one = target / "rng_state_0.pth", target / "rng_state.pth"  # one process alone uses a name of its own
    written, read = (one if count == 1 else several for count in (wrote, ranks))
    if written.exists():
        written.rename(read)
