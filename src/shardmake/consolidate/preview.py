"""The files that a merge would write, for ``--dry-run``."""

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from shardmake.consolidate.merge import final_plan
from shardmake.consolidate.merge_plan import MergePlan
from shardmake.core.temporary import temporary_folder
from shardmake.core.units import format_bytes


def preview(plan: MergePlan, out: Path, *, trust_remote_code: bool = False, overwrite: bool = False) -> str:
    """Return the files that the merge of ``plan`` would write, after every check that needs no weights.

    Nothing is written beside ``out``.

    Raises:
        ShardmakeError: The merge would be refused.
    """
    plan.check_destination(out, overwrite=overwrite)
    with temporary_folder("preview") as scratch, ThreadPoolExecutor(1) as pool:
        plan, check = final_plan(plan, scratch / "skeleton", trust_remote_code, None, pool)
        plan.check(check.result())
        small = scratch / "small"
        changes = plan.write_small_files(small, trust_remote_code)
        files = {str(path.relative_to(small)): path.stat().st_size for path in small.rglob("*") if path.is_file()}
    files |= {shard.name: shard.size for shard in plan.shards}
    contents = plan.contents
    step = "" if contents.step is None else f", step {contents.step}"
    replaced = " (replaces what is there)" if out.is_dir() and any(out.iterdir()) else ""
    free = shutil.disk_usage(next(folder for folder in out.resolve().parents if folder.exists())).free
    parameters = sum(tensor.numel for tensor in plan.stored.values())
    lines = [
        f"Checkpoint: {contents.folder} ({contents.format}, {contents.world_size} ranks{step})",
        f"Base model: {plan.base or 'none'}",
        f"Model: {out}{replaced}, {parameters:,} parameters in {len(plan.stored)} tensors, type: {plan.dtype}",
        *(f"  {name:<40} {format_bytes(size):>10}" for name, size in sorted(files.items())),
        f"Space: {format_bytes(sum(files.values()))} needed, {format_bytes(free)} free",
        *changes,
        "Nothing was written.",
    ]
    return "\n".join(lines)
