"""CPU time and memory of estimates and plans from a config.json alone, beside an older commit and beside DeepSpeed.

    python -m benchmarks.estimate_speed RESULTS.json [--against COMMIT] [--rounds N] [--only NAME ...]

Each command starts with nothing cached, takes turns with those it is compared with, and counts with all its children;
results are medians of the rounds. Memory is the PSS, which counts a page that two processes share once: other processes
that have imported torch make it too small. A model has the default config of its type in transformers, which mostly has
the sizes of a published model. DeepSpeed's `estimate_zero3_model_states_mem_needs_all_live` counts model states only
and needs the model itself: it is built without storage, the best case for DeepSpeed.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import psutil

from benchmarks.machine import machine
from benchmarks.published_models import CONFIGS
from shardmake.memory.composites import COMPOSITES
from shardmake.memory.families import FAMILIES
from tests.tiers import FAMILIES as MOST_USED

REPOSITORY = Path(__file__).resolve().parents[1]
BEFORE = "dedf3983"
"""The last commit that started a process for each of inventory, abilities and trace."""
CHANGES: dict[str, dict[str, Any]] = {
    "gemma4": {"text_config": {"hidden_size_per_layer_input": 0, "per_layer_config": None, "global_head_dim": 512}},
    "glm4_moe": {"head_dim": 128},
}
"""Values of published models, if the defaults of a type cannot be built, or are written or sized in another way."""
WRITTEN_DOWN = ["llama", *(kind for kind in MOST_USED if kind in FAMILIES or kind in COMPOSITES)]
TRACED = ("stablelm", "olmoe", "gpt_neox")
DEEPSPEED = """
import sys, torch
from transformers import AutoConfig, AutoModelForCausalLM
from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs_all_live
with torch.device("meta"):
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(sys.argv[1]))
estimate_zero3_model_states_mem_needs_all_live(model, num_gpus_per_node=8, num_nodes=1)
"""
_LORA = {"method": "lora"}
PLANS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "8B, full, 4 A100 of 40 GB": ("Llama-3.1-8B", {}, {"accelerator": "a100-40gb", "processes_per_node": 4}),
    "70B, full, zero3, 8 H100: nothing fits": ("Llama-3.1-70B", {"strategy": "zero3"}, {}),
    "Mixtral 8x7B, full, 8 H100": ("mixtral", {}, {}),
    "gpt-oss-120b, LoRA, 8 H100": ("gpt_oss", _LORA, {}),
    "DeepSeek V3, LoRA, 8 H100": ("deepseek_v3", _LORA, {}),
}
"""Model, keys of the run and keys of the cluster of each plan."""


@dataclass(frozen=True)
class Command:
    """A command of one checkout; with ``cache``, what it cached there before is used."""

    arguments: list[str]
    checkout: Path = REPOSITORY
    cache: Path | None = None
    may_fail: bool = False
    """A plan fails if nothing fits, DeepSpeed's estimate if transformers cannot build the model."""


class Cost(NamedTuple):
    """The cost of a command and its children, and what it printed if it succeeded."""

    cpu_seconds: float
    peak_mib: float
    printed: str | None = None


def run(command: Command) -> Cost:
    """Run ``command`` in an empty folder."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as output:
        cache = {"XDG_CACHE_HOME": str(command.cache or folder), "PYTHONPATH": str(command.checkout / "src")}
        fixed = {"HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": ""}
        environment, peak = {**os.environ, **cache, **fixed}, 0
        before = _cpu_seconds()
        process = psutil.Popen(command.arguments, env=environment, cwd=folder, stdout=output, stderr=subprocess.DEVNULL)
        while process.poll() is None:
            peak = max(peak, tree_pss(process))
            time.sleep(0.05)
        cpu = _cpu_seconds() - before
        output.seek(0)
        printed = None if process.returncode else output.read()
    if printed is None and not command.may_fail:
        sys.exit(f"{command.arguments} of {command.checkout} ended with {process.returncode}")
    return Cost(cpu, peak / 2**20, printed)


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def tree_pss(process: psutil.Process) -> int:
    """PSS of a process and its descendants, in bytes; 0 while they end."""
    try:
        return sum(one.memory_full_info().pss for one in [process, *process.children(recursive=True)])
    except psutil.Error:
        return 0


def in_turns(rounds: int, *commands: Command) -> Iterator[Cost]:
    """Yield the medians of each command, which run one after the other in each round, and what it printed last."""
    turns = [[run(command) for command in commands] for _ in range(rounds)]
    for costs in zip(*turns, strict=True):
        cpu, peak = (median(cost[number] for cost in costs) for number in (0, 1))
        yield Cost(round(cpu, 2), round(peak), costs[-1].printed)


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


def shardmake(*arguments: str) -> list[str]:
    return [sys.executable, "-P", "-m", "shardmake.cli", "--quiet", *arguments]


def write_configs(folder: Path, names: Iterable[str]) -> None:
    """Write the config.json of published models and of the defaults of types."""
    from tests.model_types import default_values  # which imports torch, whose pages the parent must not share

    for name in names:
        values = CONFIGS.get(name) or default_values(name)
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(changed(values, CHANGES.get(name, {}))))


def changed(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``values`` with ``changes``, of which None removes a key."""
    new = {key: changed(values[key], one) if isinstance(one, dict) else one for key, one in changes.items()}
    return {key: value for key, value in {**values, **new}.items() if value is not None or key not in changes}


def of_families(folder: Path, before: Path, rounds: int, names: Iterable[str]) -> dict[str, Any]:
    """Compare each estimate with that of Llama 7B in the checkout ``before``, and with DeepSpeed's."""
    llama, found = Command(shardmake("estimate", str(folder / "llama"), "--json"), before), {}
    for name in names:
        estimate = Command(shardmake("estimate", str(folder / name), "--json"))
        deepspeed = Command([sys.executable, "-c", DEEPSPEED, str(folder / name)], may_fail=True)
        base, now, other = in_turns(rounds, llama, estimate, deepspeed)
        found[name] = {
            **_shown(now),
            "parameters": json.loads(now.printed or "")["parameters"],
            "of Llama 7B before": _ratio(now, base),
            "of DeepSpeed": None if other.printed is None else _ratio(now, other),  # transformers cannot build it
            "Llama 7B before": _shown(base),
            "DeepSpeed": _shown(other),
        }
        print(name, found[name], flush=True)
    return found


def of_two_commits(folder: Path, before: Path, rounds: int, name: str, *, cached: bool) -> dict[str, Any]:
    """Compare an estimate in both checkouts, and the largest relative difference of memory that they print."""
    command = shardmake("estimate", str(folder / name), "--json")
    caches = [folder / f"cache-{when}" if cached else None for when in ("before", "now")]
    commands = [Command(command, *place) for place in zip((before, REPOSITORY), caches, strict=True)]
    for one in commands if cached else ():
        run(one)
    then, now = in_turns(rounds, *commands)
    old, new = (_sizes(cost.printed or "") for cost in (then, now))
    differences = {" ".join(row): new[row] / old[row] - 1 for row in old.keys() & new.keys()}
    where = max(differences, key=lambda row: abs(differences[row]))
    found = {"of before": _ratio(now, then), "largest difference": round(differences[where], 4), "where": where}
    return {**_shown(now), **found, "before": _shown(then)}


def _sizes(printed: str) -> dict[tuple[str, str], int]:
    rows = json.loads(printed)["candidates"]
    kinds = ("without checkpointing", "with checkpointing")
    return {(row["strategy"], kinds[row["gradient_checkpointing"]]): row["gpu"]["reserved"] for row in rows}


def of_plan(folder: Path, rounds: int, name: str) -> dict[str, Any]:
    """Compare a plan, with its advice, with the estimate of the same run."""
    model, asked, more = PLANS[name]
    settings = {"model": str(folder / model), "data": {"train": "none.jsonl"}, "sequence_length": 4096}
    settings |= {"global_batch_size": 64, "max_steps": 1000, "learning_rate": 1e-5, "packing": False, **asked}
    place = {"executor": "local", "processes_per_node": 8, "max_nodes": 1, "memory_gib_per_node": 1000}
    place |= {"cpus_per_node": 64, "accelerator": "h100", **more}
    (folder / "cluster.json").write_text(json.dumps(place))
    runs = {"cluster": str(folder / "cluster.json"), "runs": {"run": settings}}
    (folder / "runs.json").write_text(json.dumps(runs))
    plan = shardmake("plan", "run", "--offline", f"--config={folder / 'runs.json'}")
    options = [f"--{key}={value}" for key, value in asked.items()]
    options += [f"--accelerator={place['accelerator']}", f"--gpus-per-node={place['processes_per_node']}"]
    estimate = shardmake("estimate", str(folder / model), "--sequence-length=4096", *options)
    alone, whole = in_turns(rounds, Command(estimate), Command(plan, may_fail=True))
    added = round(_ratio(whole, alone) - 1, 3)
    return {"added": added, "fits": whole.printed is not None, "plan": _shown(whole), "estimate": _shown(alone)}


def _shown(cost: Cost) -> dict[str, float]:
    return {"cpu_seconds": cost.cpu_seconds, "peak_mib": cost.peak_mib}


def _ratio(cost: Cost, other: Cost) -> float:
    return round(cost.cpu_seconds / other.cpu_seconds, 3)


def target(limit: float, rows: Mapping[str, Mapping[str, Any]], key: str) -> dict[str, Any]:
    """Return whether ``key`` of all ``rows`` is at most ``limit``, and the row with the largest."""
    held = {name: row[key] for name, row in rows.items() if row.get(key) is not None}
    worst, above = max(held, key=lambda name: held[name], default=None), [one for one in held if held[one] > limit]
    met = bool(held) and not above
    return {"at most": limit, "met": met, "largest": worst and held[worst], "of": worst, "above": above}


def compare(commit: str, rounds: int, only: list[str]) -> dict[str, Any]:
    """Measure all, or the models and plans in ``only``, and compare them with the targets."""
    names, traced, plans = (
        [name for name in group if not only or name in only]
        for group in ([*WRITTEN_DOWN, "Llama-3.1-405B"], TRACED, PLANS)
    )
    with tempfile.TemporaryDirectory() as name, worktree(commit) as before:
        folder = Path(name)
        for checkout in (before, REPOSITORY):  # as installed packages are
            subprocess.run([sys.executable, "-m", "compileall", "-q", str(checkout / "src")], check=True)
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            pool.submit(write_configs, folder, {"llama", *names, *traced, *(PLANS[plan][0] for plan in plans)}).result()
        families = of_families(folder, before, rounds, names)
        others = {kind: of_two_commits(folder, before, rounds, kind, cached=False) for kind in traced}
        cached = {"llama": of_two_commits(folder, before, rounds, "llama", cached=True)}
        planned = {plan: of_plan(folder, rounds, plan) for plan in plans}
    targets = {
        "families, CPU seconds of Llama 7B before": target(1.3, families, "of Llama 7B before"),
        "families, CPU seconds of DeepSpeed": target(0.5, families, "of DeepSpeed"),
        "families, MiB": target(300, families, "peak_mib"),
        "traced, CPU seconds before": target(0.25, others, "of before"),
        "traced, MiB": target(450, others, "peak_mib"),
        "cached, CPU seconds before": target(0.8, cached, "of before"),
        "plan adds to its estimate": target(2, planned, "added"),
    }
    groups = {"families": families, "traced": others, "cached": cached, "plans": planned}
    return {"targets": targets, "against": commit, "rounds": rounds, **groups, "machine": machine()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--against", default=BEFORE)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--only", nargs="+", default=[], help="types of models and names of plans")
    given = parser.parse_args()
    found = compare(given.against, given.rounds, given.only)
    given.results.write_text(json.dumps(found, indent=2) + "\n")
    print(json.dumps(found["targets"], indent=2))
