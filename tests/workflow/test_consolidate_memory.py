"""Memory does not grow with the model: planned at 405B, measured on real bytes."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

from benchmarks.consolidate import watch
from benchmarks.consolidate_limits import cgroup, may_limit
from benchmarks.synthetic import llama, shapes, write_zero3
from shardmake.consolidate.verify import compare
from shardmake.core.units import MIB

LIMIT = 300 * MIB
PER_WORKER = 32 * MIB
PLAN = """
import json, sys
from pathlib import Path
from shardmake.consolidate.layout import plan_jobs, plan_shards
from shardmake.checkpoint.formats.registry import read_checkpoint
contents = read_checkpoint(Path(sys.argv[1]), "bf16")
shards = plan_shards(contents.tensors.values(), "bf16", 5 * 10**9)
jobs = plan_jobs(shards)
moved = sum(move.end - move.begin for of_shard in jobs for job in of_shard for move in job.moves)
print(json.dumps([sum(tensor.numel for tensor in contents.tensors.values()), moved, len(shards)]))
"""
MERGE = """
import sys
from pathlib import Path
from shardmake.consolidate.merge import consolidate
consolidate(Path(sys.argv[1]), Path(sys.argv[2]), base=Path(sys.argv[3]), dtype=sys.argv[4], workers=2)
"""


def peak_of(code: str, *arguments: object, join: Callable[[], object] | None = None) -> tuple[int, str]:
    """Run a Python program; return its peak of anonymous memory in bytes, children included, and its output."""
    command = [sys.executable, "-c", code, *(str(argument) for argument in arguments)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=join)
    peak = watch(process)
    output, _ = process.communicate()
    assert process.returncode == 0
    return peak, output


@pytest.mark.parametrize(("name", "ranks"), [("70B", 16), ("405B", 64)])
def test_planning_the_merge_of_a_huge_model(tmp_path: Path, name: str, ranks: int) -> None:
    config = llama(name)
    write_zero3(tmp_path / "checkpoint", tmp_path / "base", config, ranks, sparse=True)
    peak, output = peak_of(PLAN, tmp_path / "checkpoint")
    elements, moved, shards = json.loads(output)
    expected = sum(shape.numel() for shape in shapes(config).values())
    assert elements == expected
    assert moved == 4 * expected
    assert shards >= 2 * expected // 5_000_000_000
    assert peak < LIMIT


def test_merging_a_model_larger_than_the_memory(tmp_path: Path) -> None:
    """Merge within the documented memory, and within 512 MiB of cgroup memory if cgroups are available."""
    config = llama("0.2B")
    write_zero3(tmp_path / "checkpoint", tmp_path / "base", config, 2, adam=False)
    assert sum(4 * shape.numel() for shape in shapes(config).values()) > 2 * (LIMIT + 2 * PER_WORKER)
    for dtype in ("keep", "bf16"):
        with cgroup() if may_limit() else nullcontext() as group:
            places = (tmp_path / "checkpoint", tmp_path / dtype, tmp_path / "base")
            peak, _ = peak_of(MERGE, *places, dtype, join=group and group.join)
        assert peak < LIMIT + 2 * PER_WORKER
        compare(tmp_path / dtype, tmp_path / "checkpoint")
        shutil.rmtree(tmp_path / dtype)
