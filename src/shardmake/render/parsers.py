"""The libraries' own parsers of the three files, and the keys that they accept but never read.

They keep global state and read the environment. All of this therefore runs in a process of its own
(`shardmake.render.check`), at the planned world size, without a GPU and without weights.
"""

import copy
import json
from argparse import Namespace
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from shardmake.core.environment import leave_collectives_to_gloo
from shardmake.core.nested import leaves
from shardmake.core.private_names import named_arguments, private, private_module
from shardmake.render.accelerate_file import IGNORED_IN_FILE
from shardmake.render.deepspeed_file import replace_auto

SECTIONS = ("deepspeed_config", "fsdp_config", "parallelism_config")


class Watched(dict[str, Any]):
    """A dictionary that records which keys were read; its copies are itself, so that every access is recorded."""

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
        """Return the value as `dict.get` does, and record the key."""
        self.seen.add(key)
        return super().get(key, default)

    def keys(self) -> Any:
        """Return this dictionary itself, so that ``key in values.keys()`` is recorded too."""
        return self

    def __copy__(self) -> "Watched":
        return self

    @property
    def unseen(self) -> list[str]:
        """Return the given keys that were never read."""
        return [key for key in self.given if key not in self.seen]


def pretend_world(world_size: int) -> None:
    """Start a process group of ``world_size`` with torch's fake backend, which does not communicate."""
    import torch.distributed

    leave_collectives_to_gloo()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    store = private_module("fake_pg").FakeStore()
    torch.distributed.init_process_group("fake", store=store, rank=0, world_size=world_size)


def launch_arguments(values: Mapping[str, Any], flags: list[str], folder: Path) -> tuple[Namespace, list[str]]:
    """Return the arguments that `accelerate launch` reads from file and flags, and the keys that it ignores."""
    from accelerate.commands import launch

    path = folder / "accelerate.json"
    path.write_text(json.dumps(values))
    parser = launch.launch_command_parser()
    given = parser.parse_args(["--config_file", str(path), *flags, "train.py"])
    launched, _, _ = private(launch).validate_launch_command(given)
    known = {action.dest for action in private(parser).actions} | {"fsdp_ignored_modules"}
    nested = [f"{section}.{key}" for section in SECTIONS for key in values.get(section) or {} if key not in known]
    return launched, [*(key for key in IGNORED_IN_FILE if key in values), *nested]


def check_replicas(values: Mapping[str, Any]) -> None:
    """Let Accelerate's ParallelismConfig check the sizes of the mesh."""
    from accelerate import ParallelismConfig

    ParallelismConfig(**{key.removeprefix("parallelism_config_"): value for key, value in values.items()})


def deepspeed_settings(values: Mapping[str, Any], filled: Mapping[str, Any]) -> tuple[Any, list[str]]:
    """Return DeepSpeed's config at the world size of the process group, and the top-level keys that it ignores.

    ``filled`` holds the values that Trainer puts in place of "auto". DeepSpeed refuses unknown keys below the top.
    """
    import deepspeed
    from deepspeed.runtime.config import DeepSpeedConfig

    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    watched = Watched({**filled, **replace_auto(values, {})})
    return DeepSpeedConfig(watched), watched.unseen


def training_arguments(values: Mapping[str, Any], deepspeed: Mapping[str, Any], folder: Path) -> tuple[Any, list[str]]:
    """Return TrainingArguments for the CPU with DeepSpeed's file, and the keys of ``fsdp_config`` that it ignores."""
    from accelerate.utils import FullyShardedDataParallelPlugin
    from transformers import TrainingArguments

    # The check may run on a machine without a GPU; it does not concern the device, and TF32 needs one.
    machine = {"use_cpu": True, "ddp_backend": "gloo", "tf32": None, "output_dir": str(folder / "output")}
    given = {**named_arguments(values), **machine}
    watched = Watched(given.get("fsdp_config") or {})
    arguments = TrainingArguments(
        **given | ({"fsdp_config": watched} if watched else {}) | ({"deepspeed": dict(deepspeed)} if deepspeed else {})
    )
    if arguments.fsdp_plugin_args is None:
        return arguments, []
    FullyShardedDataParallelPlugin(**arguments.fsdp_plugin_args)
    return arguments, [f"fsdp_config.{key}" for key in watched.unseen]


def unfilled(arguments: Any, hidden_size: int) -> list[str]:
    """Let Trainer fill in "auto", as it does after loading the model, and return the keys that it leaves."""
    model = SimpleNamespace(config=SimpleNamespace(hidden_size=hidden_size))
    read = arguments.hf_deepspeed_config
    read.mismatches = []
    with suppress(ValueError):  # `shardmake.render.settings_table` lists the mismatches
        read.trainer_config_finalize(arguments, model, max(arguments.max_steps, 1))
    left = [key for key, value in leaves(read.config) if value == "auto"]
    return [f'deepspeed.json: nothing fills in the "auto" of {key}' for key in left]


def culprit(values: Mapping[str, Any], attempt: Callable[[dict[str, Any]], Any]) -> str | None:
    """Return the dotted key without which ``attempt`` passes, else one without which it fails on another key."""
    try:
        attempt(copy.deepcopy(dict(values)))
    except (Exception, SystemExit) as error:
        before = f"{type(error)} {error}"
    else:
        return None
    later = None
    for key, _ in list(leaves(values)):
        try:
            attempt(without(values, key))
        except (Exception, SystemExit) as error:
            if later is None and f"{type(error)} {error}" != before:
                later = key
        else:
            return key
    return later


def usable(
    values: dict[str, Any], attempt: Callable[[dict[str, Any]], Any], refuse: Callable[[str, Any], None]
) -> dict[str, Any]:
    """Return ``values`` without the keys that ``attempt`` stops on; ``refuse`` gets each of them with its value."""
    while (key := culprit(values, attempt)) is not None:
        refuse(key, dict(leaves(values))[key])
        values = without(values, key)
    return values


def without(values: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return ``values`` without the dotted ``key``; the name of a key may have dots itself."""
    kept: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict) and key.startswith(f"{name}."):
            kept[name] = without(value, key.removeprefix(f"{name}."))
        elif name != key:
            kept[name] = value
    return kept
