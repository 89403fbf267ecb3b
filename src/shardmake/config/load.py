"""Read, merge and validate configuration files."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError

from shardmake.config.messages import error_lines
from shardmake.config.models import Cluster, Config, Run, Section
from shardmake.core.errors import ConfigError, nearest

S = TypeVar("S", bound=Section)


def load_config(*paths: Path) -> Config:
    """Read and validate configuration files; later ones override earlier ones, as in Snakemake."""
    merged: dict[str, Any] = {}
    for path in paths:
        _merge(merged, read_yaml(path))
    return parse_config(merged, " + ".join(str(path) for path in paths))


def parse_config(values: Mapping[str, Any], source: str) -> Config:
    """Validate ``values``; ``source`` is the file name for errors."""
    return _parse(Config, values, source)


def load_cluster(path: Path) -> Cluster:
    """Read and validate a cluster file."""
    return _parse(Cluster, read_yaml(path), str(path))


class _Loader(yaml.SafeLoader):
    """A loader that rejects duplicate keys, of which plain YAML silently takes the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.constructor.ConstructorError(
                    problem=f"the key {key.value!r} occurs twice", problem_mark=key.start_mark
                )
            seen.add(key.value if isinstance(key, yaml.ScalarNode) else id(key))
        return super().construct_mapping(node, deep)


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file."""
    if not path.is_file():
        raise ConfigError(f"{path} does not exist in {Path.cwd()}. Name an existing file.")
    try:
        values = yaml.load(path.read_bytes(), _Loader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else "?"
        raise ConfigError(f"{path}, line {line} is not valid YAML: {error.problem}.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path} has no keys. See config/README.md for the keys.")
    return values


def get_run(config: Config, name: str) -> Run:
    """Return the run called ``name``."""
    if name not in config.runs:
        raise ConfigError(
            f"Run {name!r} does not exist.{nearest(name, config.runs)} The runs are: {', '.join(config.runs)}."
        )
    return config.runs[name]


def _merge(base: dict[str, Any], update: Mapping[str, Any]) -> None:
    for key, value in update.items():
        if isinstance(value, Mapping) and isinstance(base.get(key), dict):
            _merge(base[key], value)
        else:
            base[key] = value


def _parse(model: type[S], values: Mapping[str, Any], source: str) -> S:
    try:
        return model.model_validate(values)
    except ValidationError as error:
        lines = [f"  {line}" for line in error_lines(model, error)]
        raise ConfigError("\n".join([f"{source} cannot be used:", *lines])) from None
