"""The libraries' own readers of the three files, and which keys they accept but never look at.

They keep global state and read the environment, so all of this runs in a process of its own (`shardmake.render.check`),
at the world size that is asked for, without a GPU and without weights.
"""

import json
from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from shardmake.core.environment import leave_collectives_to_gloo
from shardmake.render.accelerate_file import IGNORED_IN_FILE

SECTIONS = ("deepspeed_config", "fsdp_config", "parallelism_config")


class Watched(dict[str, Any]):
    """A dictionary that remembers which keys were looked up; copies are itself, so that nothing escapes it."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.given = list(values)
        self.seen: set[str] = set()

    def __contains__(self, key: object) -> bool:
        self.seen.add(str(key))
        return super().__contains__(key)

    def __getitem__(self, key: str) -> Any:
        self.seen.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        """As `dict.get`."""
        self.seen.add(key)
        return super().get(key, default)

    def keys(self) -> Any:
        """This dictionary itself, so that ``key in values.keys()`` is seen too."""
        return self

    def __copy__(self) -> "Watched":
        return self

    @property
    def unseen(self) -> list[str]:
        """Keys given that nobody asked for."""
        return [key for key in self.given if key not in self.seen]


def pretend_world(world_size: int) -> None:
    """A process group of ``world_size`` with torch's fake backend: the libraries read sizes, nothing communicates."""
    import torch.distributed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    leave_collectives_to_gloo()
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)


def launch_arguments(values: Mapping[str, Any], flags: list[str], folder: Path) -> tuple[Namespace, list[str]]:
    """What `accelerate launch` makes of its file and flags, and the file's keys that change nothing in it."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    path = folder / "accelerate.json"
    path.write_text(json.dumps(values))
    parser = launch_command_parser()
    launched, _, _ = _validate_launch_command(parser.parse_args(["--config_file", str(path), *flags, "train.py"]))
    known = {action.dest for action in parser._actions} | {"fsdp_ignored_modules"}
    nested = [f"{section}.{key}" for section in SECTIONS for key in values.get(section) or {} if key not in known]
    return launched, [*(key for key in IGNORED_IN_FILE if key in values), *nested]


def check_replicas(values: Mapping[str, Any]) -> None:
    """Accelerate's ParallelismConfig takes the sizes of the mesh, or raises."""
    from accelerate import ParallelismConfig

    ParallelismConfig(**{key.removeprefix("parallelism_config_"): value for key, value in values.items()})


def deepspeed_settings(values: Mapping[str, Any], filled: Mapping[str, Any]) -> tuple[Any, list[str]]:
    """DeepSpeed's config at the pretended world size, and the keys at its top level that it never reads.

    ``filled`` stands in for what Trainer puts in place of "auto". Below the top level DeepSpeed refuses unknown keys.
    """
    import deepspeed
    from deepspeed.runtime.config import DeepSpeedConfig

    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    watched = Watched({**filled, **without_auto(values)})
    return DeepSpeedConfig(watched), watched.unseen


def without_auto(values: Mapping[str, Any]) -> dict[str, Any]:
    """``values`` without the keys that Trainer fills in."""
    return {
        key: without_auto(value) if isinstance(value, dict) else value
        for key, value in values.items()
        if value != "auto"
    }


def training_arguments(values: Mapping[str, Any], deepspeed: Mapping[str, Any], folder: Path) -> tuple[Any, list[str]]:
    """TrainingArguments on the CPU, with DeepSpeed's file beside it, and the keys of ``fsdp_config`` it never reads."""
    from accelerate.utils import FullyShardedDataParallelPlugin
    from transformers import TrainingArguments

    # The check may run where there is no GPU; the device is not what it is about.
    given = {**values, "use_cpu": True, "ddp_backend": "gloo", "output_dir": str(folder / "output")}
    watched = Watched(given.get("fsdp_config") or {})
    arguments = TrainingArguments(
        **given | ({"fsdp_config": watched} if watched else {}) | ({"deepspeed": dict(deepspeed)} if deepspeed else {})
    )
    if arguments.fsdp_plugin_args is None:
        return arguments, []
    # FSDP1's broadcast of the weights looks for a GPU already here.
    on_gpu = {"sync_module_states": False, "cpu_ram_efficient_loading": False}
    is_fsdp1 = arguments.fsdp_plugin_args["fsdp_version"] == 1
    FullyShardedDataParallelPlugin(**arguments.fsdp_plugin_args | (on_gpu if is_fsdp1 else {}))
    return arguments, [f"fsdp_config.{key}" for key in watched.unseen]


def mismatches(arguments: Any, hidden_size: int) -> list[str]:
    """Have Trainer fill in "auto" and compare the rest, as it does once the model is loaded on every rank."""
    model = SimpleNamespace(config=SimpleNamespace(hidden_size=hidden_size))
    read = arguments.hf_deepspeed_config
    found = [f"deepspeed.json and training.json differ: {line.lstrip('- ')}" for line in read.mismatches]
    read.mismatches = []
    try:
        read.trainer_config_finalize(arguments, model, max(arguments.max_steps, 1))
    except ValueError as error:
        found.append(str(error))
    left = [key for key, value in leaves(read.config) if value == "auto"]
    return [*found, *(f'deepspeed.json: nothing fills in the "auto" of {key}' for key in left)]


def leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every value of nested dictionaries with its dotted key."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
