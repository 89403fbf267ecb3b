"""Sweeps: one run of the configuration that stands for several, one for each point."""

import hashlib
import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any, Final

from shardmake.core.nested import overlay, paths

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
