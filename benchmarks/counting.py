"""Count the file operations of many simulated nodes in one process, for `benchmarks.scale`.

Each thread says which node it acts for. Python's audit hooks report opens, listings, renames, removals and new folders;
stat, chmod and fsync have no such hook and are replaced while a counter is active.
"""

import contextlib
import os
import pickle
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

_EVENTS = {"open", "os.listdir", "os.scandir", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link"}
_CALLS = ("stat", "lstat", "fsync", "chmod")
PLACE = threading.local()
"""``PLACE.node`` is the rank of the node for which the current thread acts."""


class OperationCounter:
    """Counts the operations on files below a folder, by node; a node is charged for its own calls only."""

    _active: "OperationCounter | None" = None
    _hooked = False

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)
        self.by_node: Counter[int] = Counter()
        self.by_kind: Counter[str] = Counter()
        self.lock = threading.Lock()

    @property
    def total(self) -> int:
        """Operations of all nodes."""
        return self.by_node.total()

    @property
    def busiest(self) -> int:
        """Operations of the node with the most."""
        return max(self.by_node.values(), default=0)

    def count(self, kind: str, path: Any) -> None:
        """Count one operation if it is below the folder."""
        if isinstance(path, str | bytes | os.PathLike):
            path = os.fsdecode(path)
        elif kind == "fsync":
            path = str(Path(f"/proc/self/fd/{path}").readlink())
        else:
            return
        if path.startswith(self.folder) and not getattr(PLACE, "paused", False):
            with self.lock:
                self.by_node[getattr(PLACE, "node", 0)] += 1
                self.by_kind[kind] += 1

    @staticmethod
    @contextlib.contextmanager
    def paused() -> Iterator[None]:
        """Do not count what this thread does within the block."""
        PLACE.paused = True
        try:
            yield
        finally:
            PLACE.paused = False

    @contextlib.contextmanager
    def counting(self) -> Iterator["OperationCounter"]:
        """Count within the block."""
        if not OperationCounter._hooked:
            OperationCounter._hooked = True
            sys.addaudithook(_on_audit_event)
        with contextlib.ExitStack() as stack:
            for name in _CALLS:
                stack.enter_context(patch.object(os, name, self._counted(name, getattr(os, name))))
            OperationCounter._active = self
            try:
                yield self
            finally:
                OperationCounter._active = None

    def _counted(self, kind: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(path: Any, *args: Any, **kwargs: Any) -> Any:
            self.count(kind, path)
            return call(path, *args, **kwargs)

        return counted


def _on_audit_event(event: str, arguments: tuple[Any, ...]) -> None:
    if event in _EVENTS and OperationCounter._active is not None and arguments:
        OperationCounter._active.count(event.removeprefix("os."), arguments[0])


class FakeGroup:
    """The collectives of `shardmake.train.collectives` among threads, one for the first rank of each node.

    ``received`` counts the bytes that each rank receives: eight for a reduction, and the object of a broadcast.
    """

    def __init__(self, nodes: int, ranks_per_node: int) -> None:
        self.nodes = nodes
        self.ranks_per_node = ranks_per_node
        self.received = 0
        self._barrier = threading.Barrier(nodes)
        self._values: list[Any] = [None] * nodes

    def largest(self, value: int) -> int:
        """Return the largest value of all nodes."""
        return int(max(self._exchange(value, 8)))

    def first_found(self, value: Any) -> Any:
        """Return the value of the first node that has one."""
        found = next((each for each in self._exchange(value, 8) if each is not None), None)
        if found is not None and PLACE.node == 0:
            self.received += len(pickle.dumps(found))
        return found

    def _exchange(self, value: Any, received: int) -> list[Any]:
        """Return the values of all nodes, and count the bytes that the real function receives for them."""
        self._values[PLACE.node] = value
        self._barrier.wait()
        values = list(self._values)
        if PLACE.node == 0:
            self.received += received
        self._barrier.wait()
        return values

    def run_on_first_rank(self, function: Callable[[], Any]) -> Any:
        """Call ``function`` for node 0 and return its result on every node."""
        if PLACE.node == 0:
            self._values[0] = function()
            self.received += len(pickle.dumps(self._values[0]))
        self._barrier.wait()
        result = self._values[0]
        self._barrier.wait()
        return result

    def replacements(self) -> dict[str, Callable[..., Any]]:
        """Return what replaces the functions of the same names."""
        return {
            "largest": self.largest, "first_found": self.first_found, "barrier": lambda: self.largest(0) and None,
            "run_on_first_rank": self.run_on_first_rank, "get_rank": lambda: PLACE.node * self.ranks_per_node,
            "get_world_size": lambda: self.nodes * self.ranks_per_node, "get_node": lambda: PLACE.node,
            "get_node_size": lambda: self.ranks_per_node, "is_first_of_node": lambda: True,
        }  # fmt: skip


class NodePool(ThreadPoolExecutor):
    """A pool of one thread, which acts for the node of its creator."""

    def __init__(self, workers: int) -> None:
        super().__init__(1, initializer=setattr, initargs=(PLACE, "node", PLACE.node))


def run_on_nodes(nodes: int, function: Callable[[int], Any]) -> list[Any]:
    """Call ``function`` with the rank of each node, in one thread per node, and return the results.

    Raises:
        BaseException: the first error of a node.
    """
    results: list[Any] = [None] * nodes
    errors: list[BaseException] = []

    def run(node: int) -> None:
        PLACE.node = node
        try:
            results[node] = function(node)
        except BaseException as error:
            errors.append(error)

    before = threading.stack_size(1 << 20)
    try:
        threads = [threading.Thread(target=run, args=(node,), daemon=True) for node in range(nodes)]
        for thread in threads:
            thread.start()
    finally:
        threading.stack_size(before)
    for thread in threads:
        thread.join(600)
    if errors:
        raise errors[0]
    return results
