"""Measure the limits of a merge: time and memory to plan 70B and 405B on up to 512 ranks, and a merge in 512 MiB.

    python -m benchmarks.consolidate_limits FOLDER [--plans] [--out benchmarks/results/consolidate_limits.json]

FOLDER is the folder in which benchmarks/consolidate.py wrote its 1.8 GB model. The cgroup needs root.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.consolidate import ACCELERATE, DEEPSPEED, PACKAGES, WHOLE, watch
from benchmarks.machine import machine
from benchmarks.synthetic import llama, write_sparse_zero2, write_zero3

LIMIT = 512 << 20
PLAN = """
import time; start = time.time()
from pathlib import Path
from shardmake.consolidate.layout import plan_jobs, plan_shards
from shardmake.checkpoint.formats.registry import read_checkpoint
contents = read_checkpoint(Path("{source}"))
shards = plan_shards(contents.tensors.values(), "keep", 5 * 10**9)
plan_jobs(shards)
pieces = sum(len(tensor.pieces) for tensor in contents.tensors.values())
print(time.time() - start, time.process_time(), pieces)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--plans", action="store_true", help="measure the plans alone, and keep the other figures")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/consolidate_limits.json"))
    options = parser.parse_args()
    result = json.loads(options.out.read_text()) if options.out.exists() else {}
    result |= {"machine": machine(PACKAGES), "plan": {str(case): plan(options.folder, case) for case in CASES}}
    if not options.plans:
        result["in_512_mib"] = in_cgroup(options.folder)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=2) + "\n")


@dataclass(frozen=True)
class PlanCase:
    """A checkpoint whose merge is planned; ZeRO-1 has the files of ZeRO-2."""

    size: str
    ranks: int
    stage: int

    def __str__(self) -> str:
        return f"{self.size}, {self.ranks} ranks, ZeRO-{self.stage}"

    def write(self, checkpoint: Path, base: Path) -> None:
        """Write the checkpoint without bytes."""
        if self.stage == 3:
            write_zero3(checkpoint, base, llama(self.size), self.ranks, sparse=True)
        else:
            write_sparse_zero2(checkpoint, base, llama(self.size), self.ranks)


CASES = [PlanCase("70B", 16, 3), PlanCase("405B", 64, 3), *(PlanCase("70B", 512, stage) for stage in (2, 3))]


def plan(folder: Path, case: PlanCase) -> dict[str, float]:
    """Measure the time and memory to plan the merge of a sparse checkpoint."""
    source = folder / str(case)
    if not source.exists():
        case.write(source, folder / f"base of {case}")
    command = [sys.executable, "-c", PLAN.replace("{source}", str(source))]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    peak = watch(process)
    seconds, cpu, pieces = (float(part) for part in process.communicate()[0].split())
    return {
        "pieces": int(pieces), "seconds": round(seconds, 2), "cpu_seconds": round(cpu, 2),
        "anonymous_mib": round(peak / 2**20, 1),
    }  # fmt: skip


def in_cgroup(folder: Path) -> dict[str, Any]:
    """Return exit code and seconds of each tool in 512 MiB, page cache and children included."""
    ours = WHOLE.replace("{source}", "{zero}")
    programs = {
        "shardmake": ours.replace("{dtype}", "keep"), "shardmake to bf16": ours.replace("{dtype}", "bf16"),
        "accelerate merge-weights": ACCELERATE, "zero_to_fp32": DEEPSPEED,
    }  # fmt: skip
    found, out = {}, folder / "out-limited"
    environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
    for name, code in programs.items():
        for key in ("zero", "dcp", "base"):
            code = code.replace("{" + key + "}", str(folder / key))
        code = code.replace("{out}", str(out))
        shutil.rmtree(out, ignore_errors=True)
        with cgroup() as group:
            start = time.perf_counter()
            done = subprocess.run(
                [sys.executable, "-c", code], capture_output=True, preexec_fn=group.join, env=environment
            )
            found[name] = {"exit": done.returncode, "seconds": round(time.perf_counter() - start, 1)}
    shutil.rmtree(out, ignore_errors=True)
    return found


@dataclass(frozen=True)
class Cgroup:
    """A memory cgroup."""

    processes: Path
    """File to which the id of a new member process is written."""

    def join(self) -> None:
        """Add the calling process."""
        self.processes.write_text(str(os.getpid()))


@contextmanager
def cgroup(limit: int = LIMIT) -> Iterator[Cgroup]:
    """Create a memory cgroup (version 1 or 2) of ``limit`` bytes."""
    root = Path("/sys/fs/cgroup")
    is_first = (root / "memory").is_dir()
    group = (root / "memory" if is_first else root) / f"shardmake-{os.getpid()}"
    group.mkdir()
    (group / ("memory.limit_in_bytes" if is_first else "memory.max")).write_text(str(limit))
    try:
        yield Cgroup(group / "cgroup.procs")
    finally:
        group.rmdir()


def may_limit() -> bool:
    """Return True if memory cgroups can be created, which not every container allows."""
    root = Path("/sys/fs/cgroup")
    return os.access(root / "memory" if (root / "memory").is_dir() else root, os.W_OK)


if __name__ == "__main__":
    main()
