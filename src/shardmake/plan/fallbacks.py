"""The fallbacks below a choice: what the driver takes after an out-of-memory error, in order."""

from collections.abc import Iterable, Sequence
from typing import Final

from shardmake.config.objectives import OBJECTIVES
from shardmake.plan.candidates import Candidate
from shardmake.plan.planner import Planner

STEP: Final = 0.7
"""A fallback needs at most this part of the memory of the one before."""
LEAST: Final = 0.97
"""The last one before a dearer kind of change, with the least memory, needs at most this part."""


def find_fallbacks(
    chosen: Candidate, candidates: list[Candidate], planner: Planner
) -> tuple[list[Candidate], list[Candidate]]:
    """Return the fallbacks, and all candidates; the planner has simulated each fallback.

    Each is the largest that needs clearly less GPU memory than the one before. Smaller micro batches come before
    recomputation, other strategies, offload, 16 bits where the run has fp32, NVMe and more nodes. The least of each
    kind ends it. The second value holds simulated figures for the fallbacks.
    """
    fallbacks: list[Candidate] = []
    known = {candidate.name: candidate for candidate in [*candidates, *_half_precision(candidates, planner)]}
    kinds: dict[tuple[int | bool, ...], list[Candidate]] = {}
    for candidate in known.values():
        if _is_below(candidate, chosen, planner):
            kinds.setdefault(_kind(candidate, chosen), []).append(candidate)
    below = chosen.memory.gpu.device

    def simulated(candidates: Iterable[Candidate], limit: float) -> Candidate | None:
        """Return the first of ``candidates`` that needs at most ``limit`` bytes."""
        for candidate in candidates:
            if not (found := known[candidate.name]).simulated and found.memory.gpu.device <= limit:
                found = known[candidate.name] = planner.simulate(candidate.choice)
            if found.simulated and found.fits and found.memory.gpu.device <= limit:
                return found
        return None

    for kind in sorted(kinds):
        least = sorted(kinds[kind], key=lambda item: item.memory.gpu.device)
        steps = sorted(kinds[kind], key=lambda item: (item.choice.gradient_checkpointing, -item.memory.gpu.device))
        while found := simulated(steps, STEP * below) or simulated(least, LEAST * below):
            fallbacks.append(found)
            below = found.memory.gpu.device
    return fallbacks, list(known.values())


def _kind(candidate: Candidate, chosen: Candidate) -> tuple[int | bool, ...]:
    """Return how much a change from ``chosen`` costs, to sort by."""
    choice, spec = candidate.choice, candidate.choice.spec
    is_other = spec.checkpoint_family != chosen.choice.spec.checkpoint_family
    return choice.nodes, spec.uses_nvme, candidate.is_half_precision, spec.offload_optimizer is not None, is_other


def has_fallback(candidate: Candidate, candidates: Sequence[Candidate], planner: Planner) -> bool:
    """Return whether one of ``candidates`` is a fallback below ``candidate``."""
    limit = LEAST * candidate.memory.gpu.device
    return any(_is_below(other, candidate, planner) and other.memory.gpu.device <= limit for other in candidates)


def _half_precision(candidates: Iterable[Candidate], planner: Planner) -> list[Candidate]:
    """Return ``candidates`` in 16 bits if the run has fp32: bf16 from Ampere on, fp16 before."""
    settings = planner.settings
    if settings.hardware.is_cpu or settings.precision != "fp32":
        return []
    half = "bf16" if settings.hardware.accelerator.bf16 else "fp16"
    return [planner.scan(candidate.choice.model_copy(update={"precision": half})) for candidate in candidates]


def _is_below(candidate: Candidate, chosen: Candidate, planner: Planner) -> bool:
    """Return True for the same library, at least as many nodes and a later place in the guide's order.

    If the loss compares the examples of a micro batch, that must stay the same on as many ranks.
    """
    mine, its = candidate.choice, chosen.choice
    if mine.is_fsdp != its.is_fsdp or not candidate.fits or (its.gradient_checkpointing > mine.gradient_checkpointing):
        return False
    if mine.spec.fallback_order < its.spec.fallback_order or mine.nodes < its.nodes:
        return False
    if OBJECTIVES[planner.settings.run.objective].compares_batch:
        return (mine.micro_batch_size, mine.nodes) == (its.micro_batch_size, its.nodes)
    return mine.micro_batch_size <= its.micro_batch_size
