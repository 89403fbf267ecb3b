"""The destinations of ``push.to``: their form, the run's name in them, and that no two runs share one."""

import os
import re
from collections.abc import Iterator, Mapping
from itertools import combinations
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from shardmake.config.values import expand

if TYPE_CHECKING:
    from shardmake.config.models import Push

RUN = "{run}"


def check_destination(destination: str) -> str:
    """Return ``destination`` with its variables expanded.

    Raises:
        ValueError: It is not a destination, or a name in braces or a variable is unknown.
    """
    kind, _, rest = destination.partition(":")
    if not rest or (kind not in ("file", "hub") and not re.fullmatch(r"//[^/].*", rest)):
        raise ValueError(f"{destination!r} is not a destination. Write file:FOLDER, hub:ORG/NAME or s3://BUCKET/PREFIX")
    rest = expand(rest)
    if unknown := re.search(r"\{.*?\}", rest):
        raise ValueError(f"{destination!r} has the unknown name {unknown[0]}. Only {RUN}, the run's name, is replaced")
    if kind == "hub" and not re.fullmatch(r"[\w.-]+/[\w.-]+", rest):
        raise ValueError(f"{destination!r} is not a hub repository. Write hub:ORG/NAME")
    return f"{kind}:{rest}"


def with_run_name(name: Any, run: Any) -> Any:
    """Return the values of a run, as they are in the file, with ``{run}`` in ``push.to`` replaced by ``name``."""
    push = run.get("push") if isinstance(run, dict) else None
    if not isinstance(push, dict):
        return run
    to = push.get("to")
    if isinstance(to, str):
        named: Any = to.replace(RUN, str(name))
    elif isinstance(to, list):
        named = [one.replace(RUN, str(name)) if isinstance(one, str) else one for one in to]
    else:
        return run
    return {**run, "push": {**push, "to": named}}


def check_distinct(pushes: Mapping[str, "Push"]) -> None:
    """Raise a `ValueError` if a destination is named twice, or is a folder inside another one.

    A push replaces what the last push left, so the second run would replace the model of the first.
    """
    named = [(run, to, _place(to, push)) for run, push in pushes.items() for to in _replaced(push)]
    for (first, to, (kind, path)), (second, other, (other_kind, other_path)) in combinations(named, 2):
        if kind == other_kind and (path.is_relative_to(other_path) or other_path.is_relative_to(path)):
            both = f"to {to!r} and" if first == second else f"to {to!r}, {second!r}"
            raise ValueError(
                f"run {first!r} pushes {both} to {other!r}. One would replace the other. Write {RUN} in push.to, such "
                f"as 'file:published/{RUN}', or name separate destinations"
            )


def _replaced(push: "Push") -> Iterator[str]:
    """Yield the destinations whose content a push replaces; a pull request replaces nothing."""
    for to in push.destinations:
        if not (push.pull_request and to.startswith("hub:")):
            yield to


def _place(destination: str, push: "Push") -> tuple[str, PurePosixPath]:
    """Return the kind of a destination and its normalized path; the hub ignores capitals and has branches."""
    kind, _, rest = destination.partition(":")
    if kind == "file":
        return kind, PurePosixPath(os.path.realpath(rest))
    if kind == "hub":
        return f"hub {push.revision or 'main'}", PurePosixPath(rest.lower())
    return kind.lower(), PurePosixPath(os.path.normpath(rest.lstrip("/")))
