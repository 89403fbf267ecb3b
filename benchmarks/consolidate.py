"""Measure time and memory of merging against ``cp`` of the same bytes and every official tool, interleaved.

    python -m benchmarks.consolidate FOLDER [--rounds 5] [--ranks 4] [--out benchmarks/results/consolidate.json]
    python -m benchmarks.consolidate FOLDER --large [--rounds 3] [--against OTHER/src]

FOLDER needs about 14 GB. With ``--large``, a ZeRO-3 checkpoint of 20 GB of weights, without Adam's states, is merged
with a cold page cache and compared with ``cp`` alone; FOLDER then needs 40 GB. ``--against`` measures the verified
merge of another version too, such as a worktree of an older commit, in turn with this one.

Every tool runs in its own process; its time includes the sync of its output. Each tool is compared with a ``cp`` that
ran just before it, because the speed of a disk varies. Tools that read the DCP checkpoint are compared with a copy of
it, all others with a copy of the merged fp32 model, which has the same size. ``warm``: the page cache is emptied and
the sources are read. ``cold``: the page cache is then emptied again. The caches of a hypervisor or storage server have
thus read every source equally recently. Otherwise the file that is copied most often would be read several times as
fast as the others. Memory is the sampled peak of the anonymous memory of the process and its children.
"""

import argparse
import json
import os
import re
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.machine import machine
from benchmarks.synthetic import llama, shapes, write_zero3

DROP_CACHES = "/proc/sys/vm/drop_caches"
RESULTS = Path("benchmarks/results")
PACKAGES = ("torch", "deepspeed", "accelerate", "safetensors", "numpy")
CP = "cp of the fp32 model"
CP_DCP = "cp of the DCP checkpoint"
DEEPSPEED = """
from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict as convert
convert("{zero}", "{out}", safe_serialization=True)
"""
ACCELERATE = "from accelerate.utils import merge_fsdp_weights; merge_fsdp_weights('{dcp}', '{out}')"
TORCH_SAVE = """
import os; os.makedirs("{out}")
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
dcp_to_torch_save("{dcp}", "{out}/model.pt")
"""
TORCH_HF = """
import os; os.makedirs("{out}")
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files
consolidate_safetensors_files("{hf}", "{out}", {{name: 1 for name in {names}}}, num_threads=2)
"""
OURS = """
import time; start = time.time()
import json
from pathlib import Path
from shardmake.checkpoint.formats.registry import read_model
from shardmake.consolidate.layout import plan_shards
from shardmake.consolidate.writer import ShardWriter
from shardmake.core.units import parse_size
contents = read_model(Path("{source}"), "{dtype}")
writer = ShardWriter(plan_shards(contents.tensors.values(), "{dtype}", parse_size("5GB")), Path("{out}"))
planned = time.time()
writer.write(4)
written = time.time()
writer.check_sums()
print(json.dumps({{"plan": planned - start, "copy": written - planned}}))
"""
WHOLE = """
from pathlib import Path
from shardmake.consolidate.merge import consolidate
consolidate(Path("{source}"), Path("{out}"), base=Path("{base}"), dtype="{dtype}")
"""
OTHER = """
import os, sys
sys.path.insert(0, "{other}")
os.environ["PYTHONPATH"] = "{other}"  # of the processes that import the libraries
"""
FIRST = """
import os, tempfile
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp()  # no report of transformers is kept from an earlier merge
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tools", default="", help="measure only tools whose name matches this, and cp")
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--against", type=Path, help="folder src of another version")
    options = parser.parse_args()
    options.out = options.out or RESULTS / ("consolidate_large.json" if options.large else "consolidate.json")
    make = make_large_sources if options.large else make_sources
    sources = make(options.folder, options.ranks)
    wanted = re.compile(f"^cp |{'ZeRO-3, verified$' if options.large else options.tools}")
    tools = {name: tool for name, tool in make_tools(sources).items() if wanted.search(name)}
    if options.against:
        source, code = tools["shardmake, ZeRO-3, verified"]
        other = str((options.against / "shardmake").resolve(strict=True).parent)
        tools["other version, ZeRO-3, verified"] = (source, OTHER.replace("{other}", other) + code)
    runs: dict[str, list[dict[str, Any]]] = {}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for done in range(1, options.rounds + 1):
        for cache in ("cold",) if options.large else ("cold", "warm"):
            measure(tools, options.folder / "out", cache, runs)
            result = {
                "machine": machine(PACKAGES), "model_bytes": sources["bytes"], "rounds": done, "tools": summary(runs),
            }  # fmt: skip
            options.out.write_text(json.dumps(result, indent=2) + "\n")


def measure(tools: dict[str, tuple[str, str]], out: Path, cache: str, runs: dict[str, list[dict[str, Any]]]) -> None:
    """Run each tool once; its result holds the seconds of the previous ``cp`` as ``cp``."""
    for name, (source, code) in tools.items():
        if code:
            copied = CP_DCP if source == tools[CP_DCP][0] else CP
            floor = run(out, *tools[copied], cache)
            runs.setdefault(f"{copied} ({cache})", []).append(floor | {"cp": floor["seconds"]})
            found = run(out, source, code, cache) | {"cp": floor["seconds"]}
            runs.setdefault(f"{name} ({cache})", []).append(found)


def make_sources(folder: Path, ranks: int) -> dict[str, Any]:
    """Write the same 0.5B model as ZeRO-3, DCP and torch's HF shards, unless they exist."""
    config = llama("0.5B")
    names = shapes(config)
    paths = {kind: folder / kind for kind in ("zero", "dcp", "hf", "base", "lora")}
    if not paths["zero"].exists():
        write_zero3(paths["zero"], paths["base"], config, ranks)
        code = f"from benchmarks.consolidate import save_dcp; save_dcp({str(paths['dcp'])!r}, {str(paths['hf'])!r})"
        subprocess.run([sys.executable, "-c", code], check=True)
        os.link(next(paths["hf"].iterdir()), paths["base"] / "model.safetensors")  # the base model has the same tensors
        save_adapter(paths["lora"])
    size = sum(4 * shape.numel() for shape in names.values())
    return {**{kind: str(path) for kind, path in paths.items()}, "bytes": size, "names": list(names)}


def make_large_sources(folder: Path, ranks: int) -> dict[str, Any]:
    """Write a model of 20 GB as ZeRO-3, unless it exists; ``cp`` copies its files, which have the same bytes."""
    config = llama("5B")
    paths = {kind: folder / kind for kind in ("zero", "base")}
    if not paths["zero"].exists():
        write_zero3(paths["zero"], paths["base"], config, ranks, adam=False)
    names = shapes(config)
    size = sum(4 * shape.numel() for shape in names.values())
    copied = {"hf": str(paths["zero"]), "dcp": ""}
    return {**{kind: str(path) for kind, path in paths.items()}, **copied, "bytes": size, "names": list(names)}


def save_dcp(dcp_folder: str, hf_folder: str) -> None:
    """Save random weights with torch's own writers."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

    state = {name: torch.rand(shape) for name, shape in shapes(llama("0.5B")).items()}
    dcp.save({"model": state}, storage_writer=dcp.FileSystemWriter(dcp_folder, thread_count=4), no_dist=True)
    dcp.save(state, storage_writer=HuggingFaceStorageWriter(hf_folder, save_distributed=True), no_dist=True)


def save_adapter(folder: Path) -> None:
    """Save a LoRA adapter of every linear layer but the head, as PEFT does."""
    import torch
    from safetensors.torch import save_file

    state = {}
    for name, shape in shapes(llama("0.5B")).items():
        if name.endswith("_proj.weight"):
            module = f"base_model.model.{name.removesuffix('.weight')}"
            state[f"{module}.lora_A.weight"] = torch.rand(16, shape[1])
            state[f"{module}.lora_B.weight"] = torch.rand(shape[0], 16) / 1024
    folder.mkdir()
    save_file(state, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 16, "lora_alpha": 32}')


def make_tools(sources: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """Return the source folder and the Python program of each tool by name; ``cp`` copies a merged fp32 model."""
    zero, dcp, hf, lora = sources["zero"], sources["dcp"], sources["hf"], sources.get("lora", "")
    tools = {
        CP: (hf, ""),
        CP_DCP: (dcp, ""),
        "shardmake, ZeRO-3": (zero, OURS.replace("{source}", zero).replace("{dtype}", "keep")),
        "shardmake, ZeRO-3 to bf16": (zero, OURS.replace("{source}", zero).replace("{dtype}", "bf16")),
        "shardmake, DCP": (dcp, OURS.replace("{source}", dcp).replace("{dtype}", "keep")),
        "shardmake, ZeRO-3, verified": (zero, WHOLE.replace("{source}", zero).replace("{dtype}", "keep")),
        "shardmake, ZeRO-3, verified, first": (
            zero,
            FIRST + WHOLE.replace("{source}", zero).replace("{dtype}", "keep"),
        ),
        "shardmake, LoRA, verified": (lora, WHOLE.replace("{source}", lora).replace("{dtype}", "keep")),
        "zero_to_fp32": (zero, DEEPSPEED),
        "accelerate merge-weights": (dcp, ACCELERATE),
        "dcp_to_torch_save": (dcp, TORCH_SAVE),
        "consolidate_safetensors_files": (hf, TORCH_HF.replace("{names}", repr(sources["names"]))),
    }
    fill = {key: sources[key] for key in ("zero", "dcp", "hf", "base")}
    return {name: (source, _fill(code, fill)) for name, (source, code) in tools.items()}


def _fill(code: str, values: dict[str, str]) -> str:
    for key, value in values.items():
        code = code.replace("{" + key + "}", value)
    return code.replace("{{", "{").replace("}}", "}")


def run(out: Path, source: str, code: str, cache: str) -> dict[str, Any]:
    """Run once; return seconds until the output is on disk, peak anonymous memory in MiB and the program's phases."""
    shutil.rmtree(out, ignore_errors=True)
    prepare(source, cache)
    program = [sys.executable, "-c", code.replace("{out}", str(out))]
    command = program if code else ["cp", "-r", source, str(out)]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "2"}
    start, used = time.perf_counter(), cpu_of_children()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, text=True)
    peak = watch(process)
    output, errors = process.communicate()
    assert process.returncode == 0, errors[-3000:]
    sync(out)
    seconds = time.perf_counter() - start
    shutil.rmtree(out)
    phases = json.loads(output.splitlines()[-1]) if output.startswith("{") else {}
    cpu = cpu_of_children() - used
    return {"seconds": seconds, "cpu_seconds": cpu, "anonymous_mib": peak / 2**20, **phases}


def cpu_of_children() -> float:
    """Return the CPU seconds of all ended child processes, which other load on the machine changes little."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def prepare(source: str, cache: str) -> None:
    """Empty the page cache and read the source's files; for ``cold``, empty it again."""
    drop_caches(source)
    for path in files(Path(source)):
        with path.open("rb", buffering=0) as file:
            while file.read(1 << 24):
                pass
    if cache == "cold":
        drop_caches(source)


def drop_caches(source: str) -> None:
    """Empty the page cache of the machine if permitted, because eviction costs time; otherwise of ``source``."""
    os.sync()
    if os.access(DROP_CACHES, os.W_OK):
        Path(DROP_CACHES).write_text("1")
        return
    for path in files(Path(source)):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())


def sync(folder: Path) -> None:
    for path in files(folder):
        with path.open("rb") as file:
            os.fsync(file.fileno())


def watch(process: subprocess.Popen[str]) -> int:
    """Return the peak anonymous memory of ``process`` and its children in bytes, sampled every 50 ms."""
    peak = 0
    while process.poll() is None:
        peak = max(peak, anonymous_tree(process.pid))
        time.sleep(0.05)
    return peak


def anonymous_tree(pid: int) -> int:
    """Return the anonymous memory in bytes of a process and its descendants, from files that are cheap to read."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        children = [child for task in tasks for child in (task / "children").read_text().split()]
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    own = sum(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))
    return own + sum(anonymous_tree(int(child)) for child in children)


def summary(runs: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Return medians, and median ratios to the ``cp`` before each run, in total and for the copy phase."""
    return {name: _medians(found) for name, found in runs.items()}


def _medians(found: list[dict[str, Any]]) -> dict[str, Any]:
    values = {key: statistics.median(run[key] for run in found) for key in found[0]}
    values["times_cp"] = statistics.median(run["seconds"] / run["cp"] for run in found)
    if "copy" in values:
        values["copy_times_cp"] = statistics.median(run["copy"] / run["cp"] for run in found)
    rounded = {key: round(value, 3) for key, value in values.items()}
    return {**rounded, "seconds_all": [round(run["seconds"], 2) for run in found]}


if __name__ == "__main__":
    main()
