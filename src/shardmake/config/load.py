"""Read, merge and validate configuration files.

An error message names the key, the value, the allowed values and the nearest spelling.
"""

import contextlib
import copy
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

from pydantic import BaseModel, ValidationError

from shardmake.config.checks import contradictions
from shardmake.config.foreign_files import TOOLS
from shardmake.config.inheritance import BASE, DEFAULTS, SWEEP, Layer, Resolved, note_origins, resolve
from shardmake.config.models import Cluster, Config, Run, Section
from shardmake.config.schema import KEY_ITSELF, Schema
from shardmake.config.settings import SETTINGS
from shardmake.config.slurm_options import OF_A_NODE, SLURM_OPTIONS
from shardmake.core.errors import ConfigError, nearest
from shardmake.core.secrets import keys_of_tokens

S = TypeVar("S", bound=Section)


COPY_OF = "# The configuration of one invocation, merged from "
"""Start of the first line of a merged configuration; the files that the user wrote follow."""


def load_config(*paths: Path) -> Config:
    """Read and validate configuration files; later ones override earlier ones, as in Snakemake."""
    return load_resolved(*paths)[0]


def load_resolved(*paths: Path) -> tuple[Config, Resolved]:
    """Return the same as `load_config`, and the origin of each value of each run."""
    merged: dict[str, Any] = {}
    contents = [read_yaml(path) for path in paths]  # a missing file gets a message of its own
    layers = [Layer(_origin(path), values) for path, values in zip(paths, contents, strict=True)]
    for layer in layers:
        merge(merged, copy.deepcopy(layer.values))
    return _parse(merged, " + ".join(layer.name for layer in layers), layers)


def parse_config(values: Mapping[str, Any], source: str, layers: Sequence[Layer] = ()) -> Config:
    """Resolve `defaults`, `base` and `sweep` in ``values``, and validate the result.

    ``source`` is the name for errors; ``layers`` are the files and the command line that ``values`` were merged from.
    """
    return _parse(values, source, layers)[0]


def _parse(values: Mapping[str, Any], source: str, layers: Sequence[Layer]) -> tuple[Config, Resolved]:
    resolved = resolve(values, source, layers)
    config = parse_section(Config, resolved.values, source, lambda lines: note_origins(lines, resolved.origins))
    return config, resolved


def load_cluster(path: Path) -> Cluster:
    """Read and validate the cluster file ``path``, which the key ``cluster`` names."""
    if not path.is_file():
        raise ConfigError(f"cluster: {_absent(path)} Name a cluster file, such as config/clusters/local.yaml.")
    return parse_section(Cluster, read_yaml(path), str(path))


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML or JSON file."""
    if not path.is_file():
        raise ConfigError(f"{_absent(path)} Name an existing file, or write one: shardmake init")
    from shardmake.config.parse_text import parse_yaml

    values = read_file(path, parse_yaml)
    if not isinstance(values, dict):
        raise ConfigError(f"{path} has no keys. See config/README.md for the keys.")
    return values


def read_file(path: Path, parse: Callable[[str], Any], advice: str = "Name an existing file.") -> Any:
    """Return what ``parse`` makes of the text of a file. Raises `ConfigError` with the line of what is wrong."""
    import yaml

    from shardmake.config.parse_text import DuplicateKeyError

    try:
        return parse(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, IsADirectoryError):
        raise ConfigError(f"{_absent(path)} {advice}") from None
    except OSError as error:
        raise ConfigError(f"Cannot read {path}: {error.strerror}.") from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else "?"
        raise ConfigError(f"{path}, line {line} is not valid YAML: {error.problem}.") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}.") from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ConfigError(f"{path}, line {line} is not valid UTF-8. Save the file as UTF-8.") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}, line {error.lineno} is not valid JSON: {error.msg}.") from None
    except DuplicateKeyError as error:
        raise ConfigError(f"{path} is ambiguous: the key {error} occurs twice. Remove one of them.") from None
    except (ValueError, RecursionError, TypeError):
        raise ConfigError(f"{path} cannot be read: it holds a value that is not valid. Correct the file.") from None


def _absent(path: Path) -> str:
    if path.is_dir():
        return f"{str(path)!r} is a folder."
    return f"{str(path)!r} does not exist{'' if path.is_absolute() else f' in {Path.cwd()}'}."


def _origin(path: Path) -> str:
    """Return the name of ``path`` for messages: for a merged configuration, the files that the user wrote."""
    with path.open(errors="replace") as file:
        first = file.readline().rstrip()
    return first.removeprefix(COPY_OF) if first.startswith(COPY_OF) else str(path)


def get_run(config: Config, name: str) -> Run:
    """Return the run called ``name``."""
    if name in config.sweeps:
        raise ConfigError(f"Run {name!r} is a sweep. Name one of its runs: {', '.join(config.sweeps[name])}.")
    if name not in config.runs:
        raise ConfigError(
            f"Run {name!r} does not exist.{nearest(name, config.runs)} The runs are: {', '.join(config.runs)}."
        )
    return config.runs[name]


def sweep_runs(config: Config, sweep: str) -> list[str]:
    """Return the names of the runs of a sweep."""
    if sweep not in config.sweeps:
        known = f"The sweeps are: {', '.join(config.sweeps)}." if config.sweeps else "The configuration has no sweep."
        raise ConfigError(f"Sweep {sweep!r} does not exist.{nearest(sweep, config.sweeps)} {known}")
    return config.sweeps[sweep]


def merge(base: dict[str, Any], update: Mapping[str, Any]) -> None:
    """Replace values of ``base`` by those of ``update``, section by section."""
    for key, value in update.items():
        if isinstance(value, Mapping) and isinstance(base.get(key), dict):
            merge(base[key], value)
        else:
            base[key] = value


def parse_section(
    model: type[S], values: Mapping[str, Any], source: str, note: Callable[[list[str]], list[str]] = list
) -> S:
    """Validate ``values`` as a ``model``; ``source`` is what the error names first, ``note`` completes its lines."""
    try:
        problems = [f"{key}: {_TOKEN}" for key in keys_of_tokens(values)]
        found = None if problems else model.model_validate(values)
        problems += [] if found is None else contradictions(found)
    except ValidationError as error:
        problems = error_lines(model, error)
    if problems:
        raise ConfigError("\n".join([f"{source} cannot be used:", *(f"  {line}" for line in note(problems))]))
    assert found is not None
    return found


_TOKEN: Final = (
    "this looks like a token or key, and neither the file nor the run's records are secret. Remove it, and export it "
    "in your shell: jobs inherit its variables."
)


Detail = Mapping[str, Any]


def error_lines(model: type[BaseModel], error: ValidationError) -> list[str]:
    """Return one line per wrong key.

    Pydantic reports one error per branch of a union. Only the first is kept, or an error of a nested key.
    """
    schema, messages = Schema(model), dict[str, str]()
    for detail in error.errors():
        key = ".".join(schema.walk(detail["loc"])[0])
        messages.setdefault(key, _message(schema, detail))
    deepest = [key for key in messages if not any(other.startswith(f"{key}.") for other in messages)]
    return [f"{key}: {messages[key]}" if key else messages[key] for key in deepest]


def _message(schema: Schema, detail: Detail) -> str:
    if detail["type"] == "extra_forbidden":
        return _unknown_key(schema, detail)
    if detail["type"] == "missing":
        return "this key is required and missing."
    if detail["type"] == "value_error":
        return f"{detail['msg'].removeprefix('Value error, ').removesuffix('.')}."
    if detail["loc"][-1:] == (KEY_ITSELF,) or detail["type"] == "invalid_key":
        return "YAML reads this name as a number, as null, or as true or false. Put it in quotes."
    return _wrong_value(schema, detail)


_ABSENT: Final = {
    "engine": "Trainer trains. Remove this key; examples/train_loop.py is a script that trains without Trainer.",
    "fsdp_version": "runs use FSDP2 alone. Remove this key.",
    "deepspeed_values": 'deepspeed.json always holds numbers. Remove this key; your own file can say "auto".',
    "context_parallel": "torch 2.13 cannot shard attention over CPU ranks, so it is not proved. Use sequence_parallel.",
}
"""Why there is no such key (any more), and what to do."""
_RESOLVED: Final = {"Config": (DEFAULTS,), "Run": (BASE, SWEEP)}
"""Keys of a file that are resolved before the validation, by the model of their section."""


def _unknown_key(schema: Schema, detail: Detail) -> str:
    if why := _ABSENT.get(detail["loc"][-1]):
        return why
    section = schema.section(schema.walk(detail["loc"][:-1])[1])
    assert section is not None
    allowed = [*section["properties"], *_RESOLVED.get(section["title"], ())]
    key, title = str(detail["loc"][-1]), section["title"]
    option = SLURM_OPTIONS.get(key.replace("_", "-"))
    if title == "Slurm" and option and option.refused:
        return f"it cannot be given here: {option.refused}."
    names = dict(_names_elsewhere(title, allowed, {key: detail["input"]}))
    for place, other in schema.sections():
        names |= {name: f"{place}.{name}" for name in other["properties"] if not place.endswith("ENTRY")}
    name = key.replace("-", "_")
    meant = f" Did you mean {names[name]!r}?" if name in names else nearest(key, allowed)
    others = " Other options of sbatch go under extra." if title == "Slurm" else ""
    return f"there is no such key.{meant} Allowed here: {', '.join(allowed)}.{others}"


def _names_elsewhere(title: str, allowed: Sequence[str], given: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield names that other programs have for ``allowed``, the keys of the section ``title``, each with the key.

    ``given`` is the unknown key with its value.
    """
    for row in SETTINGS.values():
        names = (*(name for name in row.deepspeed_keys if not name.endswith((".type", ".enabled"))), *row.trainer)
        yield from ((name.rpartition(".")[2], row.key) for name in names if row.key in allowed)
    for name, key in _names_of_tools(given):
        section, _, last = key.rpartition(".")
        if key.partition(".")[0] in allowed:
            yield name, key
        elif section and last in allowed:
            yield from ((name, last), (name.removeprefix(f"{section}_"), last))
    if title in ("Cluster", "Slurm"):
        place = "slurm." if title == "Cluster" else ""
        for option in SLURM_OPTIONS.values():
            if not option.refused:
                yield option.flag.replace("-", "_"), place + (option.key or f"extra.{option.flag}")
        yield from dict.fromkeys(("module", "modules"), f"{place}setup").items()
    if title == "Cluster":
        yield from OF_A_NODE.items()


def _names_of_tools(given: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield names of training tools, each with the key of a run; those that a function translates only if ``given``."""
    for name, row in ((name, row) for tool in TOOLS for name, row in tool.keys.items()):
        if isinstance(row, str):
            yield name, row
        elif name in given:
            with contextlib.suppress(Exception):  # a value that the tool itself would refuse
                yield from ((name, key) for key in (row(given[name], given) or {}) if key)


def _wrong_value(schema: Schema, detail: Detail) -> str:
    value, (_, node) = detail["input"], schema.walk(detail["loc"])
    problem = "the value is missing" if value is None else f"{value!r} is not allowed"
    suggestion = nearest(value, schema.choices(node)) if isinstance(value, str) else ""
    words = schema.words(node)
    return f"{problem}.{suggestion} Allowed: {', '.join(words)}.{_yaml_hint(value, words)}"


def _yaml_hint(value: Any, allowed: list[str]) -> str:
    """Explain a value that YAML reads as another type than text."""
    if isinstance(value, bool) and "text" in allowed:
        return " YAML reads on, off, yes and no as true or false. Put the word in quotes."
    if isinstance(value, int | float) and "text" in allowed:
        return " YAML reads this as a number. Put it in quotes."
    if isinstance(value, list) and "text" in allowed:
        return " This is a list. Write one text, in quotes if it begins with [."
    return ""
