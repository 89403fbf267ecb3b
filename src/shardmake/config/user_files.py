"""Read a run's own DeepSpeed and Accelerate files (``deepspeed_config``, ``accelerate_config``)."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from shardmake.config.load import read_file, read_yaml
from shardmake.config.models import Run
from shardmake.config.settings import SETTINGS
from shardmake.core.errors import ConfigError

Kind = Literal["deepspeed", "accelerate", "training"]
KINDS: Final[tuple[Kind, ...]] = ("deepspeed", "accelerate")
"""The files that a run may name; training arguments are a file for `shardmake check`."""
TITLES: Final[dict[Kind, str]] = {"deepspeed": "a DeepSpeed file", "accelerate": "an Accelerate file"}
SIGNS: Final[dict[Kind, tuple[str, ...]]] = {
    "accelerate": ("distributed_type", "compute_environment", "num_processes", "deepspeed_config"),
    "deepspeed": (
        "zero_optimization",
        *(key for row in SETTINGS.values() for key in row.deepspeed if "." not in key and key not in row.trainer),
        *("optimizer", "scheduler"),
    ),
}
"""Keys that identify each kind of file, in the order in which they are looked for."""


@dataclass(frozen=True)
class UserFile:
    """One configuration file of the user's, as the library reads it."""

    kind: Kind
    name: str
    values: dict[str, Any]

    def section(self, key: str) -> Mapping[str, Any]:
        """Return the section ``key``, empty if the file has none."""
        section = self.values.get(key)
        return section if isinstance(section, Mapping) else {}


UserFiles = dict[Kind, UserFile]
"""The files that one run names."""


def read_user_files(run: Run) -> UserFiles:
    """Return the files that ``run`` names. Raises `ConfigError` if one cannot be read or is of the other kind."""
    return {kind: file for kind in KINDS if (file := read_user_file(kind, run))}


def read_user_file(kind: Kind, run: Run) -> UserFile | None:
    """Return one of the files that ``run`` names, or None. Raises as `read_user_files` does."""
    name: str | None = getattr(run, f"{kind}_config")
    if name is None:
        return None
    from shardmake.config.parse_text import parse_json

    path = Path(name)
    try:
        values: Any = read_file(path, parse_json) if path.suffix == ".json" else read_yaml(path)
    except ConfigError as error:
        raise ConfigError(f"{kind}_config: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{kind}_config: {name} holds no keys. Name {TITLES[kind]}.")
    other: Kind = "accelerate" if kind == "deepspeed" else "deepspeed"
    if not any(sign in values for sign in SIGNS[kind]) and any(sign in values for sign in SIGNS[other]):
        raise ConfigError(
            f"{kind}_config: {name} looks like {TITLES[other]}. Name it under {other}_config, or name {TITLES[kind]}."
        )
    return UserFile(kind, name, values)
