"""Inheritance between runs: ``defaults``, ``base`` and ``sweep`` are resolved before the configuration is validated.

A run has the values of ``defaults``, then those of the run that its ``base`` names, then its own. Sections are merged
key by key; a list replaces a list. Each value keeps its origin, for messages and for `shardmake config`.
"""

import copy
import hashlib
import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from functools import partial
from typing import Any, Final

from shardmake.config.checks import run_before
from shardmake.config.models import Run
from shardmake.core.errors import ConfigError, nearest
from shardmake.core.nested import overlay, paths
from shardmake.core.secrets import mask

DEFAULTS: Final = "defaults"
BASE: Final = "base"
SWEEP: Final = "sweep"
SWEEPS: Final = "sweeps"
_TEMPLATE: Final = "chat_template"
BUILT_IN: Final = "default of Shardmake"
Path = tuple[Any, ...]
"""The keys that lead to a value."""


@dataclass(frozen=True)
class Layer:
    """The values of one configuration file or of the command line; ``name`` is for messages."""

    name: str
    values: Mapping[str, Any]


@dataclass(frozen=True)
class Origin:
    """The place of a value: ``defaults``, ``runs.NAME`` or ``runs.NAME.sweep``, and its file if there are several."""

    place: str
    file: str = ""

    def __str__(self) -> str:
        return f"{self.place} in {self.file}" if self.file else self.place


@dataclass(frozen=True)
class ResolvedRun:
    """The values of one run with those that it inherits, and the origin of each."""

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[Path, Origin] = field(default_factory=dict)

    def take(self, values: Mapping[str, Any], origin: Callable[[Path], Origin]) -> None:
        """Replace values by ``values``, section by section; ``origin`` returns the place of a value."""
        for path, value in paths(values):
            section = _section(self.values, path[:-1])
            if value == {} and isinstance(section.get(path[-1]), dict):
                continue
            section[path[-1]] = copy.deepcopy(value)
            for other in list(self.origins):  # at, above or below the path
                if other[: len(path)] == path or path[: len(other)] == other:
                    del self.origins[other]
            self.origins[path] = origin(path)


@dataclass(frozen=True)
class Resolved:
    """A configuration without inheritance: its values, and the origin of each value of each run."""

    values: dict[str, Any]
    origins: dict[Any, dict[Path, Origin]]


def resolve(values: Mapping[str, Any], source: str, layers: Sequence[Layer] = ()) -> Resolved:
    """Return ``values`` with every run complete and every sweep expanded.

    ``layers`` are the parts from which ``values`` were merged, the last one with precedence. Raises `ConfigError`,
    which starts with ``source``, if a base or a sweep cannot be used.
    """
    return _Resolver(values, source, layers if len(layers) > 1 else ()).resolve()


class _Resolver:
    def __init__(self, values: Mapping[str, Any], source: str, layers: Sequence[Layer]) -> None:
        self.values, self.source, self.layers = values, source, layers
        self.runs: Any = values.get("runs")
        self.defaults: Any = values.get(DEFAULTS)

    def resolve(self) -> Resolved:
        rest = {key: value for key, value in self.values.items() if key != DEFAULTS}
        if self.defaults is not None and not isinstance(self.defaults, Mapping):
            raise self._error(DEFAULTS, f"{self.defaults!r} is not a section. Write the keys of a run in it.")
        if not isinstance(self.runs, Mapping):
            return Resolved(rest, {})
        runs: dict[Any, Any] = {}
        origins: dict[Any, dict[Path, Origin]] = {}
        sweeps: dict[str, list[str]] = {}
        for name in self.runs:
            for point, run in self._runs_of(name, sweeps):
                if point in runs or (point != name and point in self.runs):
                    message = f"there are two runs with the name {point!r}. Rename one of them."
                    raise self._error(f"runs.{name}", message)
                own = self._own(name)  # the validation reports one that is not a section
                runs[point], origins[point] = run.values if isinstance(own, Mapping) else own, run.origins
        for name in runs:
            _continue_chain(name, runs, origins)
        return Resolved({**rest, "runs": runs} | ({SWEEPS: sweeps} if sweeps else {}), origins)

    def _runs_of(self, name: Any, sweeps: dict[str, list[str]]) -> Iterator[tuple[Any, ResolvedRun]]:
        own = self._own(name)
        if not isinstance(own, Mapping) or SWEEP not in own:
            yield name, self._plain(name)
            return
        try:
            points = expand_sweep(str(name), own[SWEEP])
        except ValueError as error:
            raise self._error(f"runs.{name}.{SWEEP}", f"{error}.") from None
        sweeps[str(name)] = list(points)
        for point, changes in points.items():
            run = self._plain(name)
            run.take(changes, lambda _: self._origin(("runs", name, SWEEP), ()))
            yield point, run

    def _plain(self, name: Any) -> ResolvedRun:
        """Return a run with what it inherits, without its sweep."""
        run = ResolvedRun()
        run.take(self.defaults or {}, partial(self._origin, (DEFAULTS,)))
        for one in self._bases(name):
            if isinstance(own := self._own(one), Mapping):
                values = {key: value for key, value in own.items() if key not in (BASE, SWEEP)}
                run.take(values, partial(self._origin, ("runs", one)))
        return run

    def _origin(self, place: Path, path: Path) -> Origin:
        file = next((layer.name for layer in reversed(self.layers) if _has(layer.values, (*place, *path))), "")
        return Origin(".".join(map(str, place)), file)

    def _bases(self, name: Any) -> list[Any]:
        """Return the runs whose values ``name`` has, itself last."""
        chain = [name]
        while isinstance(own := self._own(chain[0]), Mapping) and own.get(BASE) is not None:
            base, key = own[BASE], f"runs.{chain[0]}.{BASE}"
            if isinstance(base, dict | list) or base not in self.runs:
                close, known = nearest(str(base), map(str, self.runs)), ", ".join(map(str, self.runs))
                raise self._error(key, f"run {base!r} does not exist.{close} The runs are: {known}.")
            if base in chain:
                circle = " -> ".join(map(str, [*reversed(chain[: chain.index(base) + 1]), base]))
                raise self._error(key, f"{base!r} has this run as its own base ({circle}). Remove one `base`.")
            chain.insert(0, base)
        return chain

    def _own(self, name: Any) -> Any:
        """Return the section of a run. An empty one is complete if there are defaults."""
        own = self.runs[name]
        return {} if own is None and self.defaults else own

    def _error(self, key: str, message: str) -> ConfigError:
        return ConfigError(f"{self.source} cannot be used:\n  {key}: {message}")


def _continue_chain(name: Any, runs: dict[Any, Any], origins: dict[Any, dict[Path, Origin]]) -> None:
    """Complete a run that starts from another run's model: that model has its chat template, and no revision.

    A revision that was inherited together with another model is removed; one of the run's own is refused later.
    """
    run, before = runs[name], _before(runs[name])
    if before is None:
        return
    revision = origins[name].get(("revision",))
    if revision is not None and revision.place != origins[name]["model",].place:
        del run["revision"], origins[name]["revision",]
    data, seen = run.get("data"), {name}
    while isinstance(data, dict) and _TEMPLATE not in data and before in runs and before not in seen:
        seen.add(before)
        if _has(runs[before], ("data", _TEMPLATE)):
            data[_TEMPLATE] = runs[before]["data"][_TEMPLATE]
            origins[name]["data", _TEMPLATE] = origins[before]["data", _TEMPLATE]
        before = _before(runs[before])


def _before(run: Any) -> str | None:
    """Return the run from whose model a run starts; None for any other model."""
    model = run.get("model") if isinstance(run, Mapping) else None
    return run_before(model) if isinstance(model, str) else None


def _section(values: dict[Any, Any], path: Path) -> dict[Any, Any]:
    """Return the section at ``path``, created if another value or nothing is there."""
    for key in path:
        if not isinstance(values.get(key), dict):
            values[key] = {}
        values = values[key]
    return values


def _has(values: Any, path: Path) -> bool:
    if not path:
        return True
    return isinstance(values, Mapping) and path[0] in values and _has(values[path[0]], path[1:])


# --- the origin of values in messages and in the output of `shardmake config` -----------------------------------------


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
    import yaml

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


# --- sweeps: one run of the configuration that stands for several, one for each point ---------------------------------

SHORT: Final = {
    "learning_rate": "lr", "seed": "s", "global_batch_size": "b", "sequence_length": "len", "max_steps": "steps",
    "weight_decay": "wd", "warmup_ratio": "warmup", "lora.rank": "r", "lora.alpha": "alpha",
}  # fmt: skip
"""Keys whose name in the name of a run is short."""
_LONGEST: Final = 32
"""Longest text of one value in the name of a run, in characters."""
_MOST_POINTS: Final = 1000


def expand_sweep(name: str, sweep: Any) -> dict[str, dict[str, Any]]:
    """Return what each run of the sweep changes, by the run's name.

    ``sweep`` is a section with a list of values for each key, of which the product is taken, or a list of points. A key
    inside a section is nested or has dots (``lora.rank``). A name depends on the values of its own point alone, so more
    points do not rename runs. Raises `ValueError` if the sweep has another form or two points have one name.
    """
    points = list(_points(sweep))
    names = ["-".join([name, *(_tag(key, value) for key, value in point.items())]) for point in points]
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ValueError(f"two points have the name {twice[0]!r}. Remove one of them")
    return {name: overlay({}, point) for name, point in zip(names, points, strict=True)}


def _points(sweep: Any) -> Iterator[dict[str, Any]]:
    """Yield the values of each point by their dotted keys."""
    if isinstance(sweep, Mapping) and sweep:
        axes = _flat(sweep)
        for key, values in axes.items():
            if not isinstance(values, list) or not values:
                raise ValueError(f"{key} is {values!r}. Write a list of values, such as [1, 2, 3]")
        _check_count(math.prod(map(len, axes.values())))
        for values in itertools.product(*axes.values()):
            yield dict(zip(axes, values, strict=True))
    elif isinstance(sweep, list) and sweep:
        _check_count(len(sweep))
        for point in sweep:
            if not isinstance(point, Mapping) or not point:
                raise ValueError(f"the point {point!r} is not a section. Write the keys that it sets")
            yield _flat(point)
    else:
        raise ValueError(f"{sweep!r} is not allowed. Write a list of values for each key, or a list of points")


def _check_count(count: int) -> None:
    if count > _MOST_POINTS:
        raise ValueError(f"it has {count:,} points, more than {_MOST_POINTS:,}. Write fewer values")


def _flat(values: Mapping[Any, Any]) -> dict[str, Any]:
    return {".".join(map(str, path)): value for path, value in paths(values)}


def _tag(key: str, value: Any) -> str:
    """Return the part of a run's name for one value, such as ``lr1e-5`` or ``strategy-zero2``."""
    short = SHORT.get(key, key.replace(".", "-"))
    number = _number(value)
    return f"{short}-{_text(value)}" if number is None or key not in SHORT else f"{short}{number}"


def _number(value: Any) -> str | None:
    """Return a number in its shortest form, the same for every spelling; None for other values."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    if not math.isfinite(number):
        return None
    decimal = Decimal(repr(number)).normalize()
    plain, scientific = f"{decimal:f}", f"{decimal:e}".replace("+", "")
    is_short = number == 0 or (decimal.adjusted() >= 0 and len(plain) < 16)
    return plain if is_short or len(plain) <= len(scientific) else scientific


def _text(value: Any) -> str:
    """Return a value in characters that the name of a folder can have; a long one ends with a digest."""
    number = _number(value)
    text = number or (value if isinstance(value, str) else json.dumps(value))
    safe = re.sub(r"[^A-Za-z0-9._]+", "-", text).strip("-.") or "none"
    if len(safe) <= _LONGEST:
        return safe
    return f"{safe[: _LONGEST - 9].strip('-.')}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
