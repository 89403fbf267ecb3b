"""Names of what a merge refuses unless the user allows it."""

from collections.abc import Collection
from typing import Literal, get_args

from shardmake.core.errors import ConfigError

Allowed = Literal["steps", "unexpected", "untied"]
"""``steps``: the optimizer counted other steps than the training. ``unexpected``: tensors that the class lacks.
``untied``: weights that the config ties have different values, so that the model stores both."""


def parse_allowed(names: Collection[str]) -> tuple[Allowed, ...]:
    """Return ``names`` if all of them are `Allowed`; raise `ConfigError` otherwise."""
    known: tuple[Allowed, ...] = get_args(Allowed)
    for name in names:
        if name not in known:
            raise ConfigError(f"Unknown value of --allow: {name!r}. Use one of {', '.join(known)}.")
    return tuple(name for name in known if name in names)
