"""The origin of a run's values in messages and in the output of `shardmake config`."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml

from shardmake.config.inheritance import Origin, Path
from shardmake.config.models import Run
from shardmake.core.secrets import mask

BUILT_IN = "default of Shardmake"


def note_origins(lines: Sequence[str], origins: Mapping[Any, Mapping[Path, Origin]]) -> list[str]:
    """Return error lines (``KEY: MESSAGE``) with the origin of inherited values.

    An error in an inherited value is one line; it names one run and counts the others.
    """
    found: dict[tuple[str, ...], list[str]] = {}
    for line in lines:
        key, _, message = line.partition(": ")
        # The names of runs may have dots.
        named = [run for run in origins if f"{key}.".startswith(f"runs.{run}.")]
        run = max(named, key=lambda run: len(str(run)), default=None)
        below = key.removeprefix(f"runs.{run}").removeprefix(".")
        note = _note(str(run), below, message, origins[run]) if named else ""
        identity = (below, message, note) if note else (line,)
        found.setdefault(identity, []).append(f"{line}{note}")
    others = {1: "", 2: " It is also in another run."}
    return [
        lines[0] + others.get(len(lines), f" It is also in {len(lines) - 1} other runs.") for lines in found.values()
    ]


def _note(run: str, key: str, message: str, origins: Mapping[Path, Origin]) -> str:
    """Return a sentence for each inherited value that the error is about."""
    notes = []
    for path, origin in origins.items():
        if origin == Origin(f"runs.{run}"):
            continue
        name = ".".join(map(str, path))
        if name == key or key.startswith(f"{name}."):
            notes.append(f" This value is from {origin}.")
        elif name.startswith(f"{key}." if key else "") and re.search(rf"\b{re.escape(str(path[-1]))}\b", message):
            notes.append(f" {name} is from {origin}.")
    return "".join(notes)


def describe_run(run: Run, origins: Mapping[Path, Origin]) -> str:
    """Return every value of ``run`` as YAML, without secrets, each line with its origin."""
    values = run.model_dump(mode="json")
    lines = list(_lines(values, (), origins))
    width = min(max(len(line) for line, origin in lines if origin), 60)
    return "\n".join(f"{line:<{width}}  # {origin}" if origin else line for line, origin in lines)


def _lines(values: Mapping[str, Any], path: Path, origins: Mapping[Path, Origin]) -> Iterator[tuple[str, str]]:
    """Yield each line of the YAML and its origin; a section has none."""
    for key, value in values.items():
        place, indent = (*path, key), "  " * len(path)
        if isinstance(value, Mapping) and value:
            yield f"{indent}{key}:", ""
            yield from _lines(value, place, origins)
        else:
            text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=10**9)
            text = text.removesuffix("\n").removesuffix("\n...")
            # The value may be inside a value of the file.
            origin = next((origins[at] for end in range(len(place), 0, -1) if (at := place[:end]) in origins), BUILT_IN)
            yield f"{indent}{key}: {mask(text)}", str(origin)
