"""Measure the limits of a merge: time and memory to plan 70B and 405B, and a merge in a 512 MiB cgroup.

    python benchmarks/consolidate_limits.py FOLDER [--out benchmarks/results/consolidate_limits.json]

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

from benchmarks.consolidate import ACCELERATE, DEEPSPEED, WHOLE, machine, watch
from benchmarks.synthetic import llama, write_zero3

LIMIT = 512 << 20
PLAN = """
import time; start = time.time()
from pathlib import Path
from shardmake.consolidate.jobs import plan_jobs
from shardmake.consolidate.layout import plan_shards
from shardmake.checkpoint.formats.registry import read_checkpoint
contents = read_checkpoint(Path("{source}"), "bf16")
shards = plan_shards(contents.tensors.values(), "bf16", 5 * 10**9)
plan_jobs(shards)
print(time.time() - start, time.process_time())
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/consolidate_limits.json"))
    options = parser.parse_args()
    plans = {f"{name}, {ranks} ranks": plan(options.folder, name, ranks) for name, ranks in (("70B", 16), ("405B", 64))}
    result = {"machine": machine(), "plan": plans, "in_512_mib": in_cgroup(options.folder)}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=2) + "\n")


def plan(folder: Path, name: str, ranks: int) -> dict[str, float]:
    """Measure the time and memory to plan the merge of a sparse checkpoint of this size."""
    source = folder / f"sparse-{name}"
    if not source.exists():
        write_zero3(source, folder / f"base-{name}", llama(name), ranks, sparse=True)
    command = [sys.executable, "-c", PLAN.replace("{source}", str(source))]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    peak = watch(process)
    seconds, cpu = (float(part) for part in process.communicate()[0].split())
    return {"seconds": round(seconds, 2), "cpu_seconds": round(cpu, 2), "anonymous_mib": round(peak / 2**20, 1)}


def in_cgroup(folder: Path) -> dict[str, Any]:
    """Return exit code and seconds of each tool in 512 MiB, page cache and children included."""
    ours = WHOLE.replace("{source}", "{zero}")
    programs = {
        "shardmake": ours.replace("{dtype}", "keep"),
        "shardmake to bf16": ours.replace("{dtype}", "bf16"),
        "accelerate merge-weights": ACCELERATE,
        "zero_to_fp32": DEEPSPEED,
    }
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
