"""The stack, the memory and the constants of the interpreter of pickles.

Each operation takes time and memory in proportion to its own bytes in the pickle.
"""

import struct
from typing import Any

from shardmake.checkpoint.formats.pickle_objects import PickleError

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
