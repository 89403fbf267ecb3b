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


# The stack, the memory and the constants of the interpreter of pickles.
#
# Each operation takes time and memory in proportion to its own bytes in the pickle.

_LARGEST_INTEGER = 512
"""Bytes of the largest integer that is read."""


class PickleStack:
    """The state of one run of a pickle: its stack, its marks and the objects that it memorized."""

    def __init__(self, content: bytes) -> None:
        self.content, self.at = content, 0
        self._stack: list[Any] = []
        self._below: list[list[Any]] = []
        self._memo: list[Any] = []
        self._memo_beyond: dict[int, Any] = {}

    def _take(self, size: int) -> bytes:
        start = self.at
        self.at = start + size
        if self.at > len(self.content):
            raise PickleError(f"it ends within an object at byte {start}")
        return self.content[start : self.at]

    def _number(self, size: int) -> int:
        start = self.at
        self.at = start + size  # if that is behind the end, `run` fails at the next opcode
        return int.from_bytes(self.content[start : self.at], "little")

    def _line(self) -> str:
        end = self.content.index(b"\n", self.at)
        line = self.content[self.at : end].decode()
        self.at = end + 1
        return line

    def _pop_mark(self) -> list[Any]:
        items = self._stack
        self._stack = self._below.pop()
        return items

    def proto(self) -> None:
        """Accept a second protocol number, as joined pickles have."""
        self._take(1)

    def frame(self) -> None:
        """Skip the length of a frame: the content is in memory already."""
        self._take(8)

    def push(self, value: Any) -> None:
        """Push a constant."""
        self._stack.append(value)

    def push_number(self, size: int) -> None:
        """Push an unsigned integer."""
        self._stack.append(self._number(size))

    def push_signed(self, size: int) -> None:
        """Push a signed integer of ``size`` bytes."""
        self._stack.append(int.from_bytes(self._take(size), "little", signed=True))

    def push_long(self, width: int) -> None:
        """Push an integer whose number of bytes is in ``width`` bytes."""
        size = self._number(width)
        if size > _LARGEST_INTEGER:
            raise PickleError(f"an integer of {size} bytes at byte {self.at} is too large")
        self.push_signed(size)

    def push_float(self) -> None:
        """Push a number in double precision."""
        self._stack.append(struct.unpack(">d", self._take(8))[0])

    def push_text(self, width: int) -> None:
        """Push text whose length is in ``width`` bytes."""
        self._stack.append(self._take(self._number(width)).decode("utf-8", "surrogatepass"))

    def push_bytes(self, width: int) -> None:
        """Push bytes whose length is in ``width`` bytes."""
        self._stack.append(self._take(self._number(width)))

    def push_latin(self, width: int) -> None:
        """Push the text of Python 2 whose length is in ``width`` bytes."""
        self._stack.append(self._take(self._number(width)).decode("latin-1"))

    def mark(self) -> None:
        """Begin a sequence of objects."""
        self._below.append(self._stack)
        self._stack = []

    def pop(self) -> None:
        """Drop the topmost object or mark."""
        if self._stack:
            self._stack.pop()
        else:
            self._pop_mark()

    def pop_mark(self) -> None:
        """Drop the objects above the mark, and the mark."""
        self._pop_mark()

    def duplicate(self) -> None:
        """Push the topmost object again."""
        self._stack.append(self._stack[-1])

    def push_byte(self) -> None:
        """Push an unsigned integer of one byte."""
        self._stack.append(self.content[self.at])
        self.at += 1

    def get_near(self) -> None:
        """Push the memorized object with an index of one byte."""
        index = self.content[self.at]
        self.at += 1
        self._stack.append(self._memo[index] if index < len(self._memo) else self._memo_beyond[index])

    def put(self, size: int) -> None:
        """Memorize the topmost object under an index of ``size`` bytes."""
        self._put(self._number(size), self._stack[-1])

    def _put(self, index: int, item: Any) -> None:
        """Memorize ``item``. Indices are consecutive in practice; an index beyond them must not make a long list."""
        if index == len(self._memo):
            self._memo.append(item)
        elif index < len(self._memo):
            self._memo[index] = item
        else:
            self._memo_beyond[index] = item

    def memoize(self) -> None:
        """Memorize the topmost object under the next index."""
        self._put(len(self._memo) + len(self._memo_beyond), self._stack[-1])

    def get(self, size: int) -> None:
        """Push a memorized object."""
        index = self._number(size)
        self._stack.append(self._memo[index] if index < len(self._memo) else self._memo_beyond[index])


_DEEPEST_TUPLE = 32
"""Levels of tuples in tuples."""
_SHORTEST_BUDGET = 10_000
"""Elements of a short pickle that may be copied or hashed; a long one may do so with four elements a byte."""
_LONGEST_NAME = 1000
_MOST_OPERATIONS = 80_000_000
"""About twice those in the ``.metadata`` of a model with 70B parameters on 512 ranks."""


class PickleMachine(PickleStack):
    """One run of the program in ``content``."""

    def __init__(
        self, content: bytes, functions: Mapping[tuple[str, str], Function], persistent: Callable[[Any], Any]
    ) -> None:
        """Prepare a run.

        Args:
            content: The pickle.
            functions: What to call instead of the function or class of this module and name.
            persistent: Returns the object for a persistent id.
        """
        super().__init__(content)
        self._functions, self._persistent = functions, persistent
        self._names: dict[tuple[str, str], Name] = {}
        self._budget = 4 * len(content) + _SHORTEST_BUDGET

    def run(self) -> Any:
        """Return the object that the pickle describes.

        Raises:
            PickleError: The pickle is damaged, or does what no pickle of a checkpoint does.
        """
        content, operations = self.content, _OPERATIONS
        if not content.startswith(b"\x80") or content[1:2] not in (b"\2", b"\3", b"\4", b"\5"):
            raise PickleError("it is not a pickle of protocol 2 to 5")
        self.at = 2
        try:
            for _ in range(_MOST_OPERATIONS):
                code = content[self.at]
                if code == _STOP:
                    return self._stack.pop()
                self.at += 1
                operations[code](self)
        except CheckpointError:  # a ValueError too, with a message of its own
            raise
        except IndexError:
            raise PickleError(f"it ends, or uses a missing object, at byte {self.at}") from None
        except KeyError:
            raise PickleError(f"it uses an unknown opcode or a missing object at byte {self.at}") from None
        except (TypeError, ValueError, AttributeError, struct.error) as error:
            raise PickleError(f"an operation at byte {self.at} fails ({type(error).__name__})") from None
        raise PickleError(f"it has more than {_MOST_OPERATIONS} operations")

    @property
    def names(self) -> set[str]:
        """The classes and functions that the pickle has named so far, each as ``module.name``."""
        return {str(name) for name in self._names.values()}

    def spend(self, elements: int) -> None:
        """Count work beside reading; raise `PickleError` if it is more than the pickle's length accounts for."""
        self._budget -= elements
        if self._budget < 0:
            raise PickleError(f"it copies or nests the same objects too often (byte {self.at})")

    def ordered(self, items: Sequence[Any] = ()) -> OrderedDict[Any, Any]:
        """Return an `OrderedDict` of pairs, as Python 2 pickles one."""
        self.spend(len(items))
        return OrderedDict((self._key(key), value) for key, value in items)

    def push_list(self) -> None:
        """Push an empty list. Sets are lists too: nothing here needs a set, and an empty one has 216 bytes."""
        self._stack.append([])

    def push_dict(self) -> None:
        """Push an empty dictionary."""
        self._stack.append({})

    def push_global(self) -> None:
        """Push the name in the next two lines."""
        module = self._line()
        self._push_name(module, self._line())

    def push_stack_global(self) -> None:
        """Push the name in the two topmost texts."""
        name, module = self._stack.pop(), self._stack.pop()
        self._push_name(module, name)

    def _push_name(self, module: Any, name: Any) -> None:
        if type(module) is not str or type(name) is not str or len(module) + len(name) > _LONGEST_NAME:
            raise PickleError(f"a name before byte {self.at} is not one of a class or function")
        found = self._names.get((module, name))
        if found is None:
            found = self._names[module, name] = Name(module, name, self._functions.get((module, name)))
        self._stack.append(found)

    def push_persistent(self) -> None:
        """Replace a persistent id with its object."""
        self._stack.append(self._persistent(self._stack.pop()))

    def make_tuple(self, count: int) -> None:
        """Join the ``count`` topmost objects."""
        if len(self._stack) < count:
            raise IndexError
        items = tuple(self._stack[-count:])
        del self._stack[-count:]
        self._push_tuple(items)

    def make_marked_tuple(self) -> None:
        """Join the objects above the mark."""
        self._push_tuple(tuple(self._pop_mark()))

    def make_marked_list(self) -> None:
        """Join the objects above the mark in a list."""
        items = self._pop_mark()
        self._stack.append(items)

    def _push_tuple(self, items: tuple[Any, ...]) -> None:
        if any(type(item) is tuple for item in items):
            self._walk(items)
        self._stack.append(items)

    def _walk(self, items: tuple[Any, ...]) -> None:
        """Count all elements of nested tuples, shared ones each time, as hashing does."""
        level: list[tuple[Any, ...]] = [items]
        for _ in range(_DEEPEST_TUPLE):
            self.spend(sum(map(len, level)))
            level = [item for held in level for item in held if type(item) is tuple]
            if not level:
                return
        raise PickleError(f"tuples before byte {self.at} are nested too deeply")

    def append(self) -> None:
        """Append the topmost object to the list below it."""
        item = self._stack.pop()
        self._list().append(item)

    def extend(self) -> None:
        """Append the objects above the mark to the list below it."""
        items = self._pop_mark()
        self._list().extend(items)

    def _list(self) -> list[Any]:
        held = self._stack[-1]
        if isinstance(held, Inert):  # a subclass of list or set, or a deque
            return []
        if type(held) is not list:
            raise PickleError(f"the object at byte {self.at} is not a list")
        return held

    def set_item(self) -> None:
        """Set the topmost value under the key below it."""
        value, key = self._stack.pop(), self._stack.pop()
        self._set_items([key, value])

    def set_items(self) -> None:
        """Set the keys and values above the mark."""
        self._set_items(self._pop_mark())

    def _set_items(self, items: list[Any]) -> None:
        held = self._stack[-1]
        if len(items) % 2:
            raise PickleError(f"a key before byte {self.at} has no value")
        if isinstance(held, Inert):  # a subclass of dict, such as a counter
            return
        if not isinstance(held, dict):
            raise PickleError(f"the object at byte {self.at} is not a dictionary")
        for index in range(0, len(items), 2):
            held[self._key(items[index])] = items[index + 1]

    def _key(self, key: Any) -> Any:
        if type(key) is tuple:
            self._walk(key)
        return key

    def reduce(self) -> None:
        """Replace a name and its arguments with a placeholder for the result."""
        args = self._stack.pop()
        self._call(self._stack.pop(), args)

    def new_object(self) -> None:
        """Replace a class and its arguments with a placeholder for the object."""
        self.reduce()

    def new_object_with_keywords(self) -> None:
        """Replace a class, its arguments and its keyword arguments with a placeholder for the object."""
        self._stack.pop()
        self.reduce()

    def _call(self, name: Any, args: Any) -> None:
        if type(args) is not tuple:
            raise PickleError(f"the arguments of a call before byte {self.at} are not a tuple")
        if type(name) is not Name:
            raise PickleError(f"a call before byte {self.at} is not one of a name")
        call = name.replacement
        self._stack.append(Inert(name, args) if call is None else call(self, *args))

    def build(self) -> None:
        """Give a placeholder its state; other objects need none of theirs."""
        state = self._stack.pop()
        held = self._stack[-1]
        if type(held) is Inert:
            held.state = state


def _with(operation: Callable[[PickleMachine, Any], None], argument: Any) -> Callable[[PickleMachine], None]:
    def run(machine: PickleMachine) -> None:
        operation(machine, argument)

    return run


_STOP = ord(".")
_M = PickleMachine
_OPERATIONS: dict[int, Callable[[PickleMachine], None]] = {
    0x80: _M.proto, 0x95: _M.frame,
    ord("N"): _with(_M.push, None), 0x88: _with(_M.push, True), 0x89: _with(_M.push, False),
    ord("K"): _M.push_byte,
    ord("M"): _with(_M.push_number, 2), ord("J"): _with(_M.push_signed, 4),
    0x8A: _with(_M.push_long, 1), 0x8B: _with(_M.push_long, 4), ord("G"): _M.push_float,
    0x8C: _with(_M.push_text, 1), ord("X"): _with(_M.push_text, 4), 0x8D: _with(_M.push_text, 8),
    ord("C"): _with(_M.push_bytes, 1), ord("B"): _with(_M.push_bytes, 4), 0x8E: _with(_M.push_bytes, 8),
    0x96: _with(_M.push_bytes, 8), ord("U"): _with(_M.push_latin, 1), ord("T"): _with(_M.push_latin, 4),
    ord("]"): _M.push_list, 0x8F: _M.push_list, ord("}"): _M.push_dict, ord(")"): _with(_M.push, ()),
    ord("c"): _M.push_global, 0x93: _M.push_stack_global, ord("Q"): _M.push_persistent,
    ord("("): _M.mark, ord("0"): _M.pop, ord("1"): _M.pop_mark, ord("2"): _M.duplicate,
    ord("q"): _with(_M.put, 1), ord("r"): _with(_M.put, 4), 0x94: _M.memoize,
    ord("h"): _M.get_near, ord("j"): _with(_M.get, 4),
    0x85: _with(_M.make_tuple, 1), 0x86: _with(_M.make_tuple, 2), 0x87: _with(_M.make_tuple, 3),
    ord("t"): _M.make_marked_tuple, ord("l"): _M.make_marked_list, 0x91: _M.make_marked_list,
    ord("a"): _M.append, ord("e"): _M.extend, 0x90: _M.extend, ord("s"): _M.set_item, ord("u"): _M.set_items,
    ord("R"): _M.reduce, 0x81: _M.new_object, 0x92: _M.new_object_with_keywords, ord("b"): _M.build,
}  # fmt: skip
"""The operation of each opcode, without those of protocols 0 and 1, extension codes and buffers outside the pickle."""
