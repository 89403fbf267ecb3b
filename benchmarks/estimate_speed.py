"""Time and memory of an estimate over all strategies, from config.json alone, with and without its cache.

    python -m benchmarks.estimate_speed [RESULTS.txt]
    python -m benchmarks.estimate_speed --traced [--against COMMIT] [--rounds N] [RESULTS.json]
    python -m benchmarks.estimate_speed --plans [--against COMMIT] [RESULTS.json]

The second command compares the CPU seconds of this checkout with those of another commit, for a model whose steps are
traced: StableLM of 3B parameters, with nothing cached. The two take turns, and their JSON must be equal. The third
compares `shardmake plan --offline` with its advice, for an 8B that fits and a 70B that fits nowhere.

Beside it, DeepSpeed's `estimate_zero3_model_states_mem_needs_all_live`, which counts model states only and needs the
model itself: built without storage here, the best case for it, as 70B parameters would need 260 GiB.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from benchmarks.machine import machine
from benchmarks.published_models import CONFIGS
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

REPOSITORY = Path(__file__).resolve().parents[1]
BEFORE = "dedf3983"
"""The last commit that started a process for each of inventory, abilities and trace."""
STABLELM_3B = {
    "model_type": "stablelm", "architectures": ["StableLmForCausalLM"], "vocab_size": 50304, "hidden_size": 2560,
    "intermediate_size": 6912, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
    "max_position_embeddings": 4096, "bos_token_id": 0, "eos_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip


def measure(command: list[str], cache: Path, fails: bool = False, **more: str) -> tuple[float, int]:
    """Seconds that ``command`` takes, and the peak RSS of it and its children together, in bytes."""
    started, peak = time.perf_counter(), 0
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache), **more}
    process = psutil.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None:
        peak = max(peak, tree_rss(process))
        time.sleep(0.01)
    if process.returncode and not fails:
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


@contextmanager
def worktree(commit: str) -> Iterator[Path]:
    """A checkout of another commit."""
    with tempfile.TemporaryDirectory() as folder:
        git = ["git", "-C", str(REPOSITORY), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", folder, commit], check=True)
        try:
            yield Path(folder)
        finally:
            subprocess.run([*git, "remove", "--force", folder], check=True)


def cpu_of_cold_estimate(checkout: Path, config: Path) -> tuple[float, str]:
    """CPU seconds of an estimate and all its children, with nothing cached, and what it prints."""
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "PYTHONPATH": str(checkout / "src"), "XDG_CACHE_HOME": cache}
        command = [sys.executable, "-P", "-m", "shardmake.cli", "--quiet", "estimate", str(config), "--json"]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        printed = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, printed


def compare_traced(commit: str, rounds: int) -> dict[str, Any]:
    """CPU seconds of both checkouts in each round, and the ratio of their medians."""
    with tempfile.TemporaryDirectory() as folder, worktree(commit) as other:
        config = Path(folder) / "config.json"
        config.write_text(json.dumps(STABLELM_3B))
        turns = [[cpu_of_cold_estimate(one, config) for one in (other, REPOSITORY)] for _ in range(rounds)]
    if len({printed for turn in turns for _, printed in turn}) != 1:
        sys.exit("The two commits print different estimates.")
    before, now = ([round(turn[number][0], 2) for turn in turns] for number in (0, 1))
    ratio = round(statistics.median(now) / statistics.median(before), 3)
    return {"ratio": ratio, "cpu_seconds": now, "against": commit, "its_cpu_seconds": before, "machine": machine()}


PLANS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "8B, full, 4 A100 of 40 GB": ("8B", {}, {"accelerator": "a100-40gb", "processes_per_node": 4}),
    "70B, full, zero3, 8 H100: nothing fits": ("70B", {"strategy": "zero3"}, {"accelerator": "h100"}),
}


def compare_plans(commit: str) -> dict[str, Any]:
    """CPU seconds and peak RSS in MiB of each plan in both checkouts, with nothing cached."""
    found: dict[str, Any] = {}
    with worktree(commit) as other:
        for name, (size, run, cluster) in PLANS.items():
            for checkout in (other, REPOSITORY):
                found.setdefault(name, []).append(_cost_of_plan(checkout, size, run, cluster))
    return {"before": commit, "before_and_now": found, "machine": machine()}


def _cost_of_plan(checkout: Path, size: str, run: Mapping[str, Any], cluster: Mapping[str, Any]) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "base").mkdir()
        (folder / "base/config.json").write_text(json.dumps(CONFIGS[f"Llama-3.1-{size}"]))
        asked = {"model": str(folder / "base"), "data": {"train": "none.jsonl"}, "sequence_length": 4096}
        asked |= {"global_batch_size": 64, "max_steps": 1000, "learning_rate": 1e-5, **run}
        place = {"executor": "local", "processes_per_node": 8, "max_nodes": 1, "memory_gib_per_node": 1000}
        (folder / "cluster.yaml").write_text(json.dumps({**place, "cpus_per_node": 64, **cluster}))
        (folder / "config.json").write_text(
            json.dumps({"cluster": str(folder / "cluster.yaml"), "runs": {"run": asked}})
        )
        command = [sys.executable, "-P", "-m", "shardmake.cli", "--quiet", "plan", "run", "--offline"]
        command += [f"--config={folder / 'config.json'}", f"--runs={folder / 'runs'}"]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        _, peak = measure(command, folder / "cache", fails=True, PYTHONPATH=str(checkout / "src"))
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"cpu_seconds": round(cpu, 2), "peak_mib": round(peak / 2**20)}


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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="?", type=Path)
    parser.add_argument("--traced", action="store_true")
    parser.add_argument("--plans", action="store_true")
    parser.add_argument("--against", default=BEFORE)
    parser.add_argument("--rounds", type=int, default=2)
    asked = parser.parse_args()
    if asked.traced:
        text = json.dumps(compare_traced(asked.against, asked.rounds), indent=2)
    elif asked.plans:
        text = json.dumps(compare_plans(asked.against), indent=2)
    else:
        text = "\n".join([f"{os.cpu_count()} cores", *main()])
    print(text)
    if asked.results:
        asked.results.write_text(f"{text}\n")
