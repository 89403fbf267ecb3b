"""Needs of the libraries' own parsers: a process group, keys that a parser never reads, and those that it stops on."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

from shardmake.core.environment import leave_collectives_to_gloo
from shardmake.core.nested import leaves
from shardmake.core.private_names import private_module

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


def deepspeed_settings(values: Mapping[str, Any]) -> tuple[Any, list[str]]:
    """Return DeepSpeed's config at the world size of the process group, and the top-level keys that it ignores.

    DeepSpeed refuses unknown keys below the top.
    """
    import deepspeed
    from deepspeed.runtime.config import DeepSpeedConfig

    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    watched = Watched(values)
    return DeepSpeedConfig(watched), watched.unseen


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
