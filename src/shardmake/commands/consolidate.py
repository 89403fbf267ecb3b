"""``shardmake consolidate``: its options, one field each, for a checkpoint's folder."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

from typer import Option

from shardmake.checkpoint.formats.dtypes import Target
from shardmake.core.errors import ConfigError

KEY_HELP: Final = "Of several models in one checkpoint, such as model and ema: the one that is meant."
MOST_PROCESSES: Final = 1024


@dataclass(frozen=True)
class MergeRequest:
    """The options of ``shardmake consolidate``."""

    base: Annotated[
        str | None, Option(help="Base model, for tokenizer and config: a folder or a hub id, org/name[@revision].")
    ] = None
    dtype: Annotated[Target, Option(help="Data type of the weights. keep: that of the training.")] = "keep"
    adapter: Annotated[bool, Option("--adapter", help="Write only the LoRA adapter, unmerged.")] = False
    max_shard_size: Annotated[str, Option(help="Maximum size of a file.")] = "5GB"
    workers: Annotated[int, Option(help="Worker threads besides the reading one.", min=1, max=MOST_PROCESSES)] = 4
    tasks: Annotated[
        int, Option(help="Number of processes, on any nodes, that share the merge.", min=1, max=MOST_PROCESSES)
    ] = 1
    task_index: Annotated[
        int, Option(envvar="SLURM_PROCID", help="Index of this process, from 0. Default: that of the Slurm task.")
    ] = 0
    trust_remote_code: Annotated[
        bool, Option("--trust-remote-code", help="Run model code that comes with the model.")
    ] = False
    overwrite: Annotated[
        bool, Option("--overwrite", help="Replace a model folder that holds other files; they are deleted.")
    ] = False
    raw: Annotated[
        bool, Option("--raw", help="Write the weights alone, under the checkpoint's names; needs no config.")
    ] = False
    allow: Annotated[
        Sequence[str],
        Option(
            help="steps: the optimizer was started again. unexpected: keep tensors that the class lacks. untied: keep "
            "both of two tied weights that differ."
        ),
    ] = ()
    dry_run: Annotated[
        bool, Option("--dry-run", help="Check everything but the weights, and list the files to write.")
    ] = False
    key: Annotated[str | None, Option(help=KEY_HELP)] = None


def merge(request: MergeRequest, checkpoint: Path, out: Path) -> str:
    """Merge ``checkpoint`` into the model folder ``out``; with ``dry_run`` only return the list of files to write."""
    from shardmake.consolidate.destination import find_base
    from shardmake.consolidate.merge import consolidate, preview
    from shardmake.consolidate.merge_plan import plan_merge
    from shardmake.consolidate.stream import show_progress

    planned: dict[str, Any] = {
        "base": find_base(request.base) if request.base is not None else None,
        **{name: getattr(request, name) for name in ("dtype", "adapter", "max_shard_size", "raw", "allow", "key")},
    }
    replaced: dict[str, Any] = {"trust_remote_code": request.trust_remote_code, "overwrite": request.overwrite}
    if request.dry_run:
        return preview(plan_merge(checkpoint, **planned), out, **replaced)
    task = (request.task_index if request.tasks > 1 else 0, request.tasks)
    consolidate(checkpoint, out, **planned, **replaced, workers=request.workers, task=task, progress=show_progress)
    return ""


def require_run(request: MergeRequest, source: str, config: list[Path]) -> None:
    """Raise `ConfigError` if ``source`` is a checkpoint, so that the model's folder is missing, or has its options."""
    if os.sep in source or (Path(source).is_dir() and not _is_run(source, config)):
        raise ConfigError(
            f"The model's folder is missing. Name it after the checkpoint: shardmake consolidate {source} MODEL"
        )
    others = (request.adapter, request.raw, request.dry_run, request.overwrite, request.allow, request.key)
    if request.tasks > 1 or request.base is not None or any(others):
        raise ConfigError(
            f"{source} is the name of a run, whose configuration decides everything but --workers. For other options, "
            "name two folders: shardmake consolidate CHECKPOINT MODEL"
        )


def _is_run(name: str, config: list[Path]) -> bool:
    from shardmake.config.load import get_run, load_config

    try:
        get_run(load_config(*config), name)
    except ConfigError:
        return False
    return True
