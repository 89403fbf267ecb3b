"""Interpreter of the opcodes of pickle protocols 2 to 5 that executes no code and is bounded by the pickle's length.

A pickle is a program for a stack machine. The standard unpickler imports and calls what the program names, allocates a
table as long as the largest index in it, and hashes keys of any depth. Here a name stays a name, a call of an unknown
name yields an `Inert` placeholder, and every opcode takes time and memory in proportion to its own bytes.

Opcodes: https://github.com/python/cpython/blob/v3.13.0/Lib/pickletools.py
"""

import struct
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

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


_LARGEST_INTEGER = 512
"""Bytes of the largest integer that is read."""
_DEEPEST_TUPLE = 32
"""Levels of tuples in tuples."""
_SHORTEST_BUDGET = 10_000
"""Elements of a short pickle that may be copied or hashed; a long one may do so with four elements a byte."""
_LONGEST_NAME = 1000
_MOST_OPERATIONS = 80_000_000
"""About twice those in the ``.metadata`` of a model with 70B parameters on 512 ranks."""
_STOP = ord(".")


class PickleMachine:
    """One run of the program in ``content``: its stack, its marks and the objects that it memorized."""

    def __init__(
        self, content: bytes, functions: Mapping[tuple[str, str], Function], persistent: Callable[[Any], Any]
    ) -> None:
        """Prepare a run: ``functions`` replace those of a module and name, ``persistent`` finds a persistent id."""
        self._content, self._at = content, 0
        self._stack: list[Any] = []
        self._below: list[list[Any]] = []
        self._memo: list[Any] = []
        self._functions, self._persistent = functions, persistent
        self._names: dict[tuple[str, str], Name] = {}
        self._budget = 4 * len(content) + _SHORTEST_BUDGET

    def run(self) -> Any:
        """Return the object that the pickle describes; raise `PickleError` if it is damaged or hostile."""
        content, operations = self._content, self._OPERATIONS
        if not content.startswith(b"\x80") or content[1:2] not in (b"\2", b"\3", b"\4", b"\5"):
            raise PickleError("it is not a pickle of protocol 2 to 5")
        self._at = 2
        try:
            for _ in range(_MOST_OPERATIONS):
                code = content[self._at]
                if code == _STOP:
                    return self._stack.pop()
                self._at += 1
                operations[code](self)
        except CheckpointError:  # a ValueError too, with a message of its own
            raise
        except IndexError:
            raise PickleError(f"it ends, or uses a missing object, at byte {self._at}") from None
        except KeyError:
            raise PickleError(f"it uses an unknown opcode or a missing object at byte {self._at}") from None
        except (TypeError, ValueError, AttributeError, struct.error) as error:
            raise PickleError(f"an operation at byte {self._at} fails ({type(error).__name__})") from None
        raise PickleError(f"it has more than {_MOST_OPERATIONS} operations")

    @property
    def names(self) -> set[str]:
        """The classes and functions that the pickle has named so far, each as ``module.name``."""
        return {str(name) for name in self._names.values()}

    def spend(self, elements: int) -> None:
        """Count work beside reading; raise `PickleError` if it is more than the pickle's length accounts for."""
        self._budget -= elements
        if self._budget < 0:
            raise PickleError(f"it copies or nests the same objects too often (byte {self._at})")

    def ordered(self, items: Sequence[Any] = ()) -> OrderedDict[Any, Any]:
        """Return an `OrderedDict` of pairs, as Python 2 pickles one."""
        self.spend(len(items))
        return OrderedDict((self._key(key), value) for key, value in items)

    def _take(self, size: int) -> bytes:
        start = self._at
        self._at = start + size
        if self._at > len(self._content):
            raise PickleError(f"it ends within an object at byte {start}")
        return self._content[start : self._at]

    def _number(self, size: int) -> int:
        start = self._at
        self._at = start + size  # if that is behind the end, `run` fails at the next opcode
        return int.from_bytes(self._content[start : self._at], "little")

    def _integer(self, size: int) -> int:
        if size > _LARGEST_INTEGER:
            raise PickleError(f"an integer of {size} bytes at byte {self._at} is too large")
        return int.from_bytes(self._take(size), "little", signed=True)

    def _text(self, width: int, encoding: str = "utf-8") -> str:
        """Return text whose length is in ``width`` bytes; that of Python 2 is in latin-1."""
        return self._take(self._number(width)).decode(encoding, "surrogatepass")

    def _line(self) -> str:
        end = self._content.index(b"\n", self._at)
        line = self._content[self._at : end].decode()
        self._at = end + 1
        return line

    def _push(self, value: Any) -> None:
        self._stack.append(value)

    def _pop(self, count: int) -> list[Any]:
        items = self._stack[-count:]
        if len(items) < count:
            raise IndexError
        del self._stack[-count:]
        return items

    def _mark(self) -> None:
        self._below.append(self._stack)
        self._stack = []

    def _pop_mark(self) -> list[Any]:
        items = self._stack
        self._stack = self._below.pop()
        return items

    def _put(self, index: int) -> None:
        """Memorize the topmost object. Indices are consecutive; one beyond them must not make a long list."""
        if index > len(self._memo):
            raise PickleError(f"the index of a memorized object at byte {self._at} is too large")
        self._memo[index : index + 1] = [self._stack[-1]]

    def _get_near(self) -> None:
        self._stack.append(self._memo[self._content[self._at]])
        self._at += 1

    def _push_name(self, module: Any, name: Any) -> None:
        if type(module) is not str or type(name) is not str or len(module) + len(name) > _LONGEST_NAME:
            raise PickleError(f"a name before byte {self._at} is not one of a class or function")
        found = self._names.get((module, name))
        if found is None:
            found = self._names[module, name] = Name(module, name, self._functions.get((module, name)))
        self._stack.append(found)

    def _push_tuple(self, items: list[Any]) -> None:
        made = tuple(items)
        for item in items:
            if type(item) is tuple:
                self._key(made)
                break
        self._stack.append(made)

    def _key(self, key: Any) -> Any:
        """Return ``key``; count all elements of nested tuples, shared ones each time, as hashing does."""
        level: list[tuple[Any, ...]] = [key] if type(key) is tuple else []
        for _ in range(_DEEPEST_TUPLE):
            if not level:
                return key
            self.spend(sum(map(len, level)))
            level = [item for held in level for item in held if type(item) is tuple]
        raise PickleError(f"tuples before byte {self._at} are nested too deeply")

    def _extend(self, items: list[Any]) -> None:
        held = self._stack[-1]
        if type(held) is list:
            held.extend(items)
        elif not isinstance(held, Inert):  # a subclass of list or set, or a deque
            raise PickleError(f"the object at byte {self._at} is not a list")

    def _set_items(self, items: list[Any]) -> None:
        held = self._stack[-1]
        if len(items) % 2:
            raise PickleError(f"a key before byte {self._at} has no value")
        if isinstance(held, Inert):  # a subclass of dict, such as a counter
            return
        if not isinstance(held, dict):
            raise PickleError(f"the object at byte {self._at} is not a dictionary")
        for index in range(0, len(items), 2):
            held[self._key(items[index])] = items[index + 1]

    def _call(self, name: Any, args: Any) -> None:
        """Push a placeholder for the result of a call, or the result of what is called instead."""
        if type(args) is not tuple:
            raise PickleError(f"the arguments of a call before byte {self._at} are not a tuple")
        if type(name) is not Name:
            raise PickleError(f"a call before byte {self._at} is not one of a name")
        call = name.replacement
        self._stack.append(Inert(name, args) if call is None else call(self, *args))

    def _build(self) -> None:
        """Give a placeholder its state; other objects need none of theirs."""
        state = self._stack.pop()
        held = self._stack[-1]
        if type(held) is Inert:
            held.state = state

    _OPERATIONS: ClassVar[dict[int, Callable[["PickleMachine"], object]]] = {
        0x80: lambda self: self._take(1),  # the protocol again, as joined pickles have it
        0x95: lambda self: self._take(8),  # the length of a frame: the content is in memory already
        ord("N"): lambda self: self._stack.append(None),
        0x88: lambda self: self._stack.append(True),
        0x89: lambda self: self._stack.append(False),
        ord("K"): lambda self: self._stack.append(self._number(1)),
        ord("M"): lambda self: self._stack.append(self._number(2)),
        ord("J"): lambda self: self._stack.append(self._integer(4)),
        0x8A: lambda self: self._stack.append(self._integer(self._number(1))),
        0x8B: lambda self: self._stack.append(self._integer(self._number(4))),
        ord("G"): lambda self: self._stack.append(struct.unpack(">d", self._take(8))[0]),
        0x8C: lambda self: self._stack.append(self._text(1)),
        ord("X"): lambda self: self._stack.append(self._text(4)),
        0x8D: lambda self: self._stack.append(self._text(8)),
        ord("U"): lambda self: self._stack.append(self._text(1, "latin-1")),
        ord("T"): lambda self: self._stack.append(self._text(4, "latin-1")),
        ord("C"): lambda self: self._stack.append(self._take(self._number(1))),
        ord("B"): lambda self: self._stack.append(self._take(self._number(4))),
        0x8E: lambda self: self._stack.append(self._take(self._number(8))),
        0x96: lambda self: self._stack.append(self._take(self._number(8))),
        ord(")"): lambda self: self._stack.append(()),
        ord("]"): lambda self: self._stack.append([]),
        0x8F: lambda self: self._stack.append([]),  # a set: nothing here needs one, and an empty one has 216 bytes
        ord("}"): lambda self: self._stack.append({}),
        ord("c"): lambda self: self._push_name(self._line(), self._line()),
        0x93: lambda self: self._push_name(*self._pop(2)),
        ord("Q"): lambda self: self._push(self._persistent(self._stack.pop())),
        ord("("): _mark,
        ord("0"): lambda self: self._stack.pop() if self._stack else self._pop_mark(),
        ord("1"): _pop_mark,
        ord("2"): lambda self: self._stack.append(self._stack[-1]),
        ord("q"): lambda self: self._put(self._number(1)),
        ord("r"): lambda self: self._put(self._number(4)),
        0x94: lambda self: self._memo.append(self._stack[-1]),
        ord("h"): _get_near,
        ord("j"): lambda self: self._stack.append(self._memo[self._number(4)]),
        0x85: lambda self: self._push_tuple(self._pop(1)),
        0x86: lambda self: self._push_tuple(self._pop(2)),
        0x87: lambda self: self._push_tuple(self._pop(3)),
        ord("t"): lambda self: self._push_tuple(self._pop_mark()),
        ord("l"): lambda self: self._push(self._pop_mark()),
        0x91: lambda self: self._push(self._pop_mark()),
        ord("a"): lambda self: self._extend(self._pop(1)),
        ord("e"): lambda self: self._extend(self._pop_mark()),
        0x90: lambda self: self._extend(self._pop_mark()),
        ord("s"): lambda self: self._set_items(self._pop(2)),
        ord("u"): lambda self: self._set_items(self._pop_mark()),
        ord("R"): lambda self: self._call(*self._pop(2)),
        0x81: lambda self: self._call(*self._pop(2)),
        0x92: lambda self: self._call(*self._pop(3)[:2]),
        ord("b"): _build,
    }
    """The operation of each opcode, without those of protocols 0 and 1, extension codes and buffers elsewhere.

    Each takes time and memory in proportion to its own bytes in the pickle.
    """
