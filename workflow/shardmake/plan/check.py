"""The libraries' own parsers over the rendered files, before anything is queued.

Accelerate's config class and argument parser, transformers' TrainingArguments and DeepSpeed's config class read the
files just as they will on the nodes, at the planned world size, without a GPU and without weights. They keep global
state and read the environment, so they run in a process of their own: ``python -m shardmake.plan.check``.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml

from shardmake.caches import kernel_caches, leave_collectives_to_gloo
from shardmake.errors import UserError
from shardmake.plan.engine import engine_of
from shardmake.plan.plan import Choice


@dataclass(frozen=True)
class Files:
    """The three rendered files as data."""

    accelerate: dict[str, Any]
    deepspeed: dict[str, Any]
    training: dict[str, Any]


def check_rendered(files: Files, choice: Choice, hidden_size: int, flags: list[str], scratch: str) -> None:
    """Have the libraries read ``files``; a `UserError` lists everything that they refuse or understand differently.

    ``hidden_size`` is the model's, from which Trainer fills in bucket sizes. ``flags`` are the options of `accelerate
    launch` that stand beside the file; ``scratch`` is the folder for compiled kernels, of which DeepSpeed builds one
    for the CPU as soon as it reads a configuration.
    """
    request = {
        "files": asdict(files),
        "choice": choice.model_dump(mode="json"),
        "hidden_size": hidden_size,
        "flags": flags,
    }
    with tempfile.TemporaryDirectory(prefix="shardmake-check-") as folder:
        answer = Path(folder, "answer.json")
        Path(folder, "request.json").write_text(json.dumps(request))
        process = subprocess.run(
            [sys.executable, "-m", "shardmake.plan.check", folder],
            env=_environment(choice, files) | kernel_caches(scratch),
            capture_output=True,
            text=True,
            check=False,
        )
        if not answer.is_file():
            raise UserError(f"The rendered files could not be checked:\n{process.stderr[-3000:]}")
        problems = json.loads(answer.read_text())
    if problems:
        raise UserError("\n".join(["The rendered files do not fit together:", *(f"  {line}" for line in problems)]))


def _environment(choice: Choice, files: Files) -> dict[str, str]:
    """What the launcher would set for rank 0, so that the libraries see the planned world."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("ACCELERATE_", "FSDP_"))}
    world = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(choice.world_size), "MASTER_ADDR": "localhost"}
    engine = {"ACCELERATE_USE_DEEPSPEED": "true", "DS_ACCELERATOR": "cpu"} if files.deepspeed else {}
    return inherited | world | engine


# --- in the child process ---------------------------------------------------------------------------------------------


def _main(folder: Path) -> None:
    request = json.loads((folder / "request.json").read_text())
    files = Files(**request["files"])
    choice = Choice.model_validate(request["choice"])
    _pretend_world(choice.world_size)
    leave_collectives_to_gloo()
    problems = [
        *_problems_of(lambda: _check_accelerate(files, choice, folder, request["flags"])),
        *_problems_of(lambda: _check_deepspeed(files, choice)),
        *_problems_of(lambda: _check_training(files, choice, request["hidden_size"], folder)),
    ]
    (folder / "answer.json").write_text(json.dumps(problems))


def _problems_of(check: Callable[[], list[str]]) -> list[str]:
    """What ``check`` finds; whatever a library raises over a file is its way of refusing it."""
    try:
        return check()
    except Exception as error:
        return [f"{type(error).__module__.split('.')[0]}.{type(error).__name__}: {error}"]


def _pretend_world(world_size: int) -> None:
    """A process group of ``world_size`` with torch's fake backend: the libraries read sizes, nothing communicates."""
    import torch.distributed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)


def _check_accelerate(files: Files, choice: Choice, folder: Path, flags: list[str]) -> list[str]:
    """Accelerate's config class and launcher read the file; each key must reach the launch arguments."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    path = folder / "accelerate.yaml"
    path.write_text(yaml.safe_dump(files.accelerate))
    arguments = ["--config_file", str(path), *flags, "-m", "shardmake.train"]
    launched, defaults, _ = _validate_launch_command(launch_command_parser().parse_args(arguments))
    per_node, engine = launched.num_processes // launched.num_machines, engine_of(choice).distributed_type
    _check_replicas(files.accelerate.get("parallelism_config", {}))
    return [
        *_differences("accelerate.yaml", _flat(files.accelerate), vars(launched)),
        *_unequal("accelerate.yaml: processes per node", per_node, choice.processes_per_node),
        *_unequal("accelerate.yaml: distributed_type", defaults.distributed_type.value, engine),
    ]


def _check_replicas(values: Mapping[str, Any]) -> None:
    """Accelerate's ParallelismConfig takes the sizes of the mesh, or raises."""
    from accelerate import ParallelismConfig

    ParallelismConfig(**{key.removeprefix("parallelism_config_"): value for key, value in values.items()})


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """The file's keys as the launcher names its arguments; those it handles apart are left out."""
    apart = {"compute_environment", "distributed_type", "main_training_function"}
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat.update(value if isinstance(value, dict) else {key: value})
    return {key: value for key, value in flat.items() if key not in apart}


def _check_deepspeed(files: Files, choice: Choice) -> list[str]:
    """DeepSpeed's config class at the planned world size: known keys, types, batch arithmetic."""
    if not files.deepspeed:
        return []
    import deepspeed
    from deepspeed.runtime.config import DeepSpeedConfig

    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    values = _without_auto(files.deepspeed)
    sizes = {"train_micro_batch_size_per_gpu": choice.micro_batch_size} | {
        "gradient_accumulation_steps": choice.gradient_accumulation_steps
    }
    read = DeepSpeedConfig(sizes | values)
    return [
        *_unequal("deepspeed.json: train_batch_size", read.train_batch_size, choice.global_batch_size),
        *_unequal("deepspeed.json: stage", int(read.zero_optimization_stage), choice.zero_stage),
    ]


def _without_auto(values: Mapping[str, Any]) -> dict[str, Any]:
    """``values`` without the keys that Trainer fills in."""
    return {
        key: _without_auto(value) if isinstance(value, dict) else value
        for key, value in values.items()
        if value != "auto"
    }


def _check_training(files: Files, choice: Choice, hidden_size: int, folder: Path) -> list[str]:
    """TrainingArguments takes every argument, counts the same batch, and agrees with DeepSpeed's file or FSDP."""
    from transformers import TrainingArguments

    extra: dict[str, Any] = {"deepspeed": files.deepspeed} if files.deepspeed else {}
    # The check may run where there is no GPU; the device is not what it is about.
    given = files.training["arguments"] | {"use_cpu": True, "ddp_backend": "gloo"}
    arguments = TrainingArguments(output_dir=str(folder / "output"), **given, **extra)
    batch = arguments.world_size * arguments.train_batch_size * arguments.gradient_accumulation_steps
    return [
        *_unequal("training.json: sequences per optimizer step", batch, choice.global_batch_size),
        *(_check_auto(arguments, hidden_size) if files.deepspeed else []),
        *(_check_fsdp(arguments) if choice.is_fsdp else []),
    ]


def _check_auto(arguments: Any, hidden_size: int) -> list[str]:
    """Have Trainer fill in "auto" and compare the rest, as it does once the model is loaded on every rank."""
    model = SimpleNamespace(config=SimpleNamespace(hidden_size=hidden_size))
    read = arguments.hf_deepspeed_config
    mismatches = list(read.mismatches)
    read.mismatches = []
    read.trainer_config_finalize(arguments, model, max(arguments.max_steps, 1))
    left = [key for key, value in _leaves(read.config) if value == "auto"]
    return [
        *(f"deepspeed.json and training.json differ: {line.lstrip('- ')}" for line in mismatches),
        *(f'deepspeed.json: nothing fills in the "auto" of {key}' for key in left),
    ]


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every value of nested dictionaries with its dotted key."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _check_fsdp(arguments: Any) -> list[str]:
    """Accelerate's plugin takes what Trainer hands it; FSDP1's broadcast of weights stays out, it wants a GPU."""
    from accelerate.utils import FullyShardedDataParallelPlugin

    needs_gpu = {"sync_module_states": False, "cpu_ram_efficient_loading": False}
    FullyShardedDataParallelPlugin(**arguments.fsdp_plugin_args | (needs_gpu if _is_fsdp1(arguments) else {}))
    return []


def _is_fsdp1(arguments: Any) -> bool:
    return arguments.fsdp_plugin_args["fsdp_version"] == 1


def _differences(place: str, written: Mapping[str, Any], understood: Mapping[str, Any]) -> list[str]:
    return [line for key, value in written.items() for line in _unequal(f"{place}: {key}", understood.get(key), value)]


def _unequal(what: str, understood: object, planned: object) -> list[str]:
    return [] if understood == planned else [f"{what} is understood as {understood!r}; planned is {planned!r}"]


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
