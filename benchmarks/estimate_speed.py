"""Time and memory of an estimate over all strategies, from config.json alone, with and without its cache.

    python -m benchmarks.estimate_speed [RESULTS.txt]

Beside it, DeepSpeed's `estimate_zero3_model_states_mem_needs_all_live`, which counts model states only and needs the
model itself: built without storage here, the best case for it, as 70B parameters would need 260 GiB.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from benchmarks.synthetic import llama

CLUSTER = ["--nodes=16", "--gpus-per-node=8", "--gpu-memory=80", "--sequence-length=4096", "--micro-batch=1"]
DEEPSPEED = """
import sys, torch
from transformers import AutoConfig, AutoModelForCausalLM
from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs_all_live
with torch.device("meta"):
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(sys.argv[1]))
estimate_zero3_model_states_mem_needs_all_live(model, num_gpus_per_node=8, num_nodes=16)
"""


def measure(command: list[str], cache: Path) -> tuple[float, int]:
    """Seconds that ``command`` takes, and the peak RSS of it and its children together, in bytes."""
    started, peak = time.perf_counter(), 0
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    process = psutil.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None:
        peak = max(peak, tree_rss(process))
        time.sleep(0.01)
    if process.returncode:
        sys.exit(f"{command} ended with {process.returncode}")
    return time.perf_counter() - started, peak


def tree_rss(process: psutil.Process) -> int:
    """RSS of a process and its descendants, in bytes; 0 while they end."""
    try:
        return sum(one.memory_info().rss for one in [process, *process.children(recursive=True)])
    except psutil.Error:
        return 0


def row(name: str, seconds: float, rss: int) -> str:
    return f"{name:<52}{seconds:6.2f} s {rss / 2**20:6.0f} MiB"


def main() -> list[str]:
    shardmake = str(Path(sys.executable).with_name("shardmake"))
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        for size in ("70B", "405B"):
            config, cache = Path(folder) / size, Path(folder) / f"cache-{size}"
            llama(size).save_pretrained(config)
            for state in ("nothing cached", "cached"):
                seconds, rss = measure([shardmake, "estimate", str(config), *CLUSTER], cache)
                lines.append(row(f"shardmake estimate, {size}, {state}", seconds, rss))
            seconds, rss = measure([sys.executable, "-c", DEEPSPEED, str(config)], cache)
            lines.append(row(f"DeepSpeed's ZeRO-3 estimate, {size}, no storage", seconds, rss))
    return lines


if __name__ == "__main__":
    table = "\n".join(main())
    print(table)
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(f"{os.cpu_count()} cores\n{table}\n")
