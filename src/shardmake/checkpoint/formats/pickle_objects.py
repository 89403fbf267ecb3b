"""Placeholders for the names and the objects in a pickle: `Name` and `Inert`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from shardmake.core.errors import CheckpointError


class PickleError(Exception):
    """A pickle that is damaged or hostile. The message has no full stop."""


Function = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Name:
    """A class or function that a pickle names. It is never imported; ``replacement`` is called instead, if any."""

    module: str
    name: str
    replacement: Function | None = None

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


class Inert:
    """Placeholder for an object, with its pickled state and no behavior.

    Attributes:
        kind: The object's class, or the function that would have made it.
        args: Arguments of the call.
        state: What the class would have restored: in most cases its attributes by name.
    """

    __slots__ = ("args", "kind", "state")

    def __init__(self, kind: Name, args: tuple[Any, ...] = ()) -> None:
        self.kind, self.args = kind, args
        self.state: Any = None

    def get(self, field: str) -> Any:
        """Return an attribute of the pickled object; None if it had no such attribute."""
        return self._fields().get(field)

    def __getattr__(self, field: str) -> Any:
        """Return an attribute of the pickled object; raise `CheckpointError` if it had no such attribute."""
        if field.startswith("__"):
            raise AttributeError(field)
        fields = self._fields()
        if field not in fields:
            raise CheckpointError(
                f"Cannot read the checkpoint: {self.kind} in it has no field {field!r}. Another version of the library "
                "wrote it, or the file is damaged. Use another checkpoint."
            )
        return fields[field]

    def _fields(self) -> Mapping[Any, Any]:
        """Return the attributes; objects with slots have theirs in the second of two mappings."""
        if isinstance(self.state, dict):
            return self.state
        parts = self.state if isinstance(self.state, tuple) else (self.state,)
        return {key: value for part in parts if isinstance(part, dict) for key, value in part.items()}
