"""Allocations and frees of a whole step on one GPU: the peak by phase and term, and the reserved memory."""

from collections import deque
from dataclasses import dataclass, field

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
    _peaks: dict[str, Peak] = field(default_factory=dict)
    _live: dict[int, tuple[int, str]] = field(default_factory=dict)
    _terms: dict[str, int] = field(default_factory=dict)
    _total: int = 0
    _peak: int = 0
    _is_at_peak: bool = False
    """The memory allocated now is the peak of the phase, and is not in ``_peaks`` yet."""
    _next: int = 0
    _reserved: dict[int | None, int] = field(default_factory=dict)

    @property
    def peaks(self) -> dict[str, Peak]:
        """The peak of each phase, by its name."""
        self._record_peak()
        return self._peaks

    def enter(self, phase: str) -> None:
        """Begin ``phase``; its peak starts from the memory allocated now."""
        self._record_peak()
        self.phase = phase
        self._peak = self._peaks[phase].total if phase in self._peaks else 0
        if self._total >= self._peak:
            self._peak, self._is_at_peak = self._total, True

    def alloc(self, size: int, term: str, stream: int = COMPUTE) -> int:
        """Allocate ``size`` bytes for ``term``; return the key to free them."""
        key = self._next
        self._next += 1
        size = rounded(size)
        self._live[key] = (size, term)
        self._terms[term] = self._terms.get(term, 0) + size
        self._total += size
        self.events.append((key, size, stream))
        if self._total > self._peak:
            self._peak, self._is_at_peak = self._total, True
        return key

    def free(self, *keys: int) -> None:
        """Free the memory of ``keys``."""
        for key in keys:
            self.release(key)
            self.reuse(key)

    def release(self, key: int) -> None:
        """Count ``key`` as free while its memory waits for another stream to finish (`record_stream`)."""
        if self._is_at_peak:
            self._record_peak()
        size, term = self._live.pop(key)
        self._terms[term] -= size
        self._total -= size

    def reuse(self, key: int) -> None:
        """Make the memory of the released ``key`` available again."""
        self.events.append((key, -1, 0))

    def rename(self, key: int, term: str) -> None:
        """Count the memory of ``key`` under another term from now on."""
        self._record_peak()
        size, old = self._live[key]
        self._terms[old] -= size
        self._terms[term] = self._terms.get(term, 0) + size
        self._live[key] = (size, term)

    def _record_peak(self) -> None:
        """Write the peak down before the memory allocated now changes; most new peaks are exceeded at once."""
        if self._is_at_peak:
            self._peaks[self.phase] = Peak(self._total, {k: v for k, v in self._terms.items() if v})
            self._is_at_peak = False

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
