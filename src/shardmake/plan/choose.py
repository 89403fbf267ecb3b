"""The choice among candidates: the fastest whose margin covers the estimator's own error."""

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Final

from shardmake.config.models import Strategy
from shardmake.core.errors import ConfigError
from shardmake.memory.hardware import Hardware
from shardmake.memory.model import expert_count
from shardmake.plan.candidates import Candidate, choices
from shardmake.plan.fallbacks import has_fallback
from shardmake.plan.planner import Planner
from shardmake.plan.reasons import nothing_fits_message
from shardmake.plan.resolve import ResolvedRun
from shardmake.plan.verdict import Headroom
from shardmake.run.plan import Choice

ALMOST: Final = 1.4
"""A candidate whose closed form exceeds the GPU's memory by more is not simulated.

For FSDP of a model with 405B parameters the closed form is 30 % above the simulation.
"""
CLEARLY: Final = 0.9
"""A tight candidate, or one on more nodes, must cost at most this part of the GPU-time of the other.

The median error of step times on runs that the model was not fitted to is 4 % (benchmarks/step_time_accuracy.py).
"""


class NothingFitsError(ConfigError):
    """No candidate of ``settings`` fits; ``candidates`` holds them with their memory."""

    def __init__(self, message: str, settings: ResolvedRun, candidates: list[Candidate]) -> None:
        super().__init__(message)
        self.settings = settings
        self.candidates = candidates


def choose_from(planner: Planner) -> tuple[Candidate, list[Candidate]]:
    """Choose among all candidates of ``planner``'s run."""
    possible = list(choices(planner.settings))
    planner.prepare(possible)
    return choose([planner.scan(choice) for choice in possible], planner)


def find_choice(planner: Planner, strategies: Sequence[Strategy] = ()) -> Candidate | None:
    """Return the choice that `choose_from` makes, None if nothing fits; what certainly does not is not looked at.

    ``strategies`` replaces the run's own.
    """
    possible = [choice for choice in choices(planner.settings, strategies) if planner.can_hold(choice)]
    planner.prepare(possible)
    try:
        return choose([planner.scan(choice) for choice in possible], planner)[0] if possible else None
    except NothingFitsError:
        return None


def fits_better(planner: Planner, is_better: Callable[[Choice, float], bool]) -> bool:
    """Return True if a choice of ``planner``'s run fits that ``is_better`` accepts, by its seconds per step."""
    hardware = planner.settings.hardware
    possible = (choice for choice in choices(planner.settings) if is_better(choice, planner.seconds(choice)))
    better = [choice for choice in possible if planner.can_hold(choice)]
    planner.prepare(better)
    scanned = sorted(map(planner.scan, better), key=lambda item: item.memory.gpu.device)
    return any(_may_fit(item, hardware) and planner.simulate(item.choice).fits for item in scanned)


def choose(candidates: list[Candidate], planner: Planner) -> tuple[Candidate, list[Candidate]]:
    """Return the best candidate that fits, and all candidates, simulated where that was needed.

    Those without offload come first (`Candidate.last_resort`). Among equals, candidates with enough headroom come
    first, and a tight one is taken if it is clearly faster and has a fallback. One with little headroom is taken only
    if nothing else fits. Raises `NothingFitsError` if no candidate fits.
    """
    search = _Search(candidates, planner)
    levels = sorted({item.last_resort for item in candidates})
    tiers = [[item for item in candidates if item.last_resort == level] for level in levels]
    trials = chain(map(search.best_with_margin, tiers), (search.best(tier, Headroom.LITTLE) for tier in tiers))
    if chosen := next(filter(None, trials), None):
        return chosen, search.found
    raise NothingFitsError(nothing_fits_message(search.found, planner.settings), planner.settings, search.found)


class _Search:
    """Simulates candidates, the best first, until one fits."""

    def __init__(self, candidates: Iterable[Candidate], planner: Planner) -> None:
        self._planner = planner
        self._known = {candidate.name: candidate for candidate in candidates}

    @property
    def found(self) -> list[Candidate]:
        """Every candidate, with its simulated figures where there are some."""
        return list(self._known.values())

    def best_with_margin(self, candidates: Sequence[Candidate]) -> Candidate | None:
        """Return the best of ``candidates`` whose margin covers the typical error, or else that of the tensors.

        Of a mixture of experts it is a tight one only if no other has a margin: the typical error is that of other
        models.
        """
        safe = self.best(candidates, Headroom.ENOUGH)
        if safe is None:
            return self.best(candidates, Headroom.TIGHT) or self.best(candidates, Headroom.TENSORS)
        if expert_count(self._planner.settings.model):
            return safe
        faster = [candidate for candidate in candidates if candidate.gpu_seconds < CLEARLY * safe.gpu_seconds]
        return self.best(faster, Headroom.TIGHT, needs_fallback=True) or safe

    def best(
        self, candidates: Iterable[Candidate], minimum: Headroom, *, needs_fallback: bool = False
    ) -> Candidate | None:
        """Return the fastest of ``candidates`` on the fewest nodes with at least ``minimum`` headroom.

        More nodes are taken where they cost clearly less GPU-time.
        """
        ordered = sorted(candidates, key=_order_of_trial)
        few = self._first(ordered, minimum, needs_fallback=needs_fallback)
        if few is None:
            return None
        limit = CLEARLY * few.gpu_seconds
        cheaper = [one for one in ordered if one.choice.nodes > few.choice.nodes and one.gpu_seconds < limit]
        cheaper.sort(key=lambda candidate: candidate.gpu_seconds)
        return self._first(cheaper, minimum, needs_fallback=needs_fallback) or few

    def _first(self, ordered: Iterable[Candidate], minimum: Headroom, *, needs_fallback: bool) -> Candidate | None:
        for candidate in ordered:
            if not _may_fit(candidate, self._planner.settings.hardware):
                continue
            if not (simulated := self._known[candidate.name]).simulated:
                simulated = self._known[candidate.name] = self._planner.simulate(candidate.choice)
            fits = simulated.fits and simulated.headroom >= minimum
            if fits and (not needs_fallback or has_fallback(simulated, self.found, self._planner)):
                return simulated
        return None


def _may_fit(candidate: Candidate, hardware: Hardware) -> bool:
    """Return True if a simulation may show that it fits: the closed form is not far above the memory."""
    return candidate.fits or (
        not hardware.is_cpu
        and candidate.memory.gpu.device < ALMOST * hardware.gpu_memory
        and candidate.memory.host.total <= hardware.host_memory
    )


def _order_of_trial(candidate: Candidate) -> tuple[int, float, tuple[bool, bool, int], bool, int]:
    """Sort by nodes and speed; equal in two digits: by simplicity, checkpointing and micro batch.

    The simplest is DDP, then ZeRO-1 and ZeRO-2, FSDP, and ZeRO-3, whose hooks take the most time of the CPU.
    """
    choice, spec = candidate.choice, candidate.choice.spec
    simplicity = spec.zero_stage == 3, spec.is_fsdp, 0 if spec.is_fsdp else spec.fallback_order
    return (
        choice.nodes, candidate.rounded_seconds, simplicity, choice.gradient_checkpointing, choice.micro_batch_size,
    )  # fmt: skip
