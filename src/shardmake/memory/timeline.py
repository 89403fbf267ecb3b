"""Allocations and frees of a whole step on one GPU: the peak by phase and term, and the reserved memory."""

from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from types import MappingProxyType

from shardmake.memory.allocator import CachingAllocator, rounded

COMPUTE, COMMUNICATION, REDUCTION, CAST = range(4)  # streams
HEAP_BLOCK = 32 << 20  # glibc's largest dynamic mmap threshold: the process keeps freed blocks below it


@dataclass
class Peak:
    """The most bytes at once in one phase, by term."""

    total: int = 0
    terms: dict[str, int] = field(default_factory=dict)


@dataclass
class Timeline:
    """Records allocations and frees under the name of the current phase."""

    phase: str = "load"
    events: list[tuple[int, int, int]] = field(default_factory=list)
    live: dict[int, tuple[int, str]] = field(default_factory=dict)
    keys: Iterator[int] = field(default_factory=count)
    peaks: dict[str, Peak] = field(default_factory=dict)
    """The peak of each phase, by its name."""
    _terms: Counter[str] = field(default_factory=Counter)
    _total: int = 0
    _peak: int = 0
    _reserved: dict[int | None, int] = field(default_factory=dict)

    def enter(self, phase: str, more: Mapping[str, int] = MappingProxyType({})) -> None:
        """Begin ``phase``; its peak is at least the memory allocated now, with ``more`` of some terms."""
        self.phase = phase
        self._peak = self.peaks[phase].total if phase in self.peaks else 0
        if self._total + sum(more.values()) >= self._peak:
            self._record_peak(more)

    def alloc(self, size: int, term: str, stream: int = COMPUTE) -> int:
        """Allocate ``size`` bytes for ``term``; return the key to free them."""
        key, size = next(self.keys), rounded(size)
        self.live[key] = (size, term)
        self._terms[term] += size
        self._total += size
        self.events.append((key, size, stream))
        if self._total > self._peak:
            self._record_peak({})
        return key

    def free(self, *keys: int) -> None:
        """Free the memory of ``keys``."""
        for key in keys:
            self.release(key)
            self.reuse(key)

    def release(self, key: int) -> None:
        """Count ``key`` as free while its memory waits for another stream to finish (`record_stream`)."""
        size, term = self.live.pop(key)
        self._terms[term] -= size
        self._total -= size

    def reuse(self, key: int) -> None:
        """Make the memory of the released ``key`` available again."""
        self.events.append((key, -1, 0))

    def repeat(self, part: "Timeline") -> None:
        """Record the allocations and frees of ``part`` again, in its phases; without a name in this one."""
        for phase, peak in part.peaks.items():
            if phase:
                self.enter(phase, peak.terms)
            elif self._total + peak.total > self._peak:
                self._record_peak(peak.terms)
        self.events += part.events
        for term, size in part._terms.items():
            self._terms[term] += size
        self._total += part._total

    def cut(self) -> "Timeline":
        """Return what is recorded, and begin anew; what is live stays live."""
        part = Timeline(events=self.events, peaks=self.peaks, _terms=self._terms, _total=self._total)
        self.events, self.peaks, self._terms, self._total, self._peak = [], {}, Counter(), 0, 0
        return part

    def rename(self, key: int, term: str) -> None:
        """Count the memory of ``key`` under another term from now on."""
        size, old = self.live[key]
        self._terms[old] -= size
        self._terms[term] += size
        self.live[key] = (size, term)

    def _record_peak(self, more: Mapping[str, int]) -> None:
        """Write down the memory allocated now, and ``more`` of some terms, as the peak of the phase."""
        terms = {**self._terms, **{term: self._terms[term] + size for term, size in more.items()}}
        self._peak = self._total + sum(more.values())
        self.peaks[self.phase] = Peak(self._peak, {term: size for term, size in terms.items() if size})

    def highest(self) -> str:
        """Return the phase of the peak."""
        return max(self.peaks, key=lambda phase: self.peaks[phase].total)

    def resident(self) -> int:
        """Return the peak RSS of a process on CPU: glibc keeps smaller blocks and returns larger ones."""
        sizes: dict[int, int] = {}
        heap = mapped = heap_peak = peak = 0
        for key, size, _ in self.events:
            change = size if size >= 0 else -sizes.pop(key)
            if size >= 0:
                sizes[key] = size
            if abs(change) < HEAP_BLOCK:
                heap += change
                heap_peak = max(heap_peak, heap)
            else:
                mapped += change
            peak = max(peak, heap_peak + mapped)
        return peak

    def reserved(self, limit: int | None = None) -> int:
        """Return the peak of the caching allocator on a device that gives it at most ``limit`` bytes.

        The timeline must be complete: the result is kept for the next call.
        """
        if limit not in self._reserved:
            allocator = CachingAllocator(limit)
            for key, size, stream in self.events:
                if size >= 0:
                    allocator.alloc(key, size, stream)
                else:
                    allocator.free(key)
            self._reserved[limit] = allocator.peak
        return self._reserved[limit]


@dataclass
class Pending:
    """Released memory that can be reused when the GPU has finished with it, in this order (`record_stream`)."""

    timeline: Timeline
    _keys: deque[int] = field(default_factory=deque)

    def add(self, key: int) -> None:
        """Release ``key``."""
        self.timeline.release(key)
        self._keys.append(key)

    def drain(self, left: int) -> None:
        """Let the GPU finish until at most ``left`` keys are pending."""
        while len(self._keys) > left:
            self.timeline.reuse(self._keys.popleft())
