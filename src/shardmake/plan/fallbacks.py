"""The fallbacks below a choice: what the driver takes after an out-of-memory error, in order."""

from collections.abc import Iterable, Sequence
from typing import Final

from shardmake.config.objectives import OBJECTIVES
from shardmake.plan.candidates import Candidate
from shardmake.plan.planner import Planner

LESS: Final = 0.97
"""A fallback needs at most this part of the memory of the one before."""


def find_fallbacks(
    chosen: Candidate, candidates: list[Candidate], planner: Planner
) -> tuple[list[Candidate], list[Candidate]]:
    """Return the fallbacks, each with less GPU memory than the one before, and all candidates.

    Their order is that of DeepSpeed's guide: recomputation, ZeRO-2, its offload, ZeRO-3, its offloads, 16 bits, NVMe,
    more nodes. The second value holds simulated figures for the fallbacks.
    """
    fallbacks: list[Candidate] = []
    candidates = [*candidates, *_half_precision(candidates, planner)]
    known = {candidate.name: candidate for candidate in candidates}
    below = chosen.memory.gpu.device
    for candidate in sorted(candidates, key=_next_fallback):
        if not _is_below(candidate, chosen, planner) or candidate.memory.gpu.device > LESS * below:
            continue
        simulated = candidate if candidate.simulated else planner.simulate(candidate.choice)
        known[simulated.name] = simulated
        if simulated.fits and simulated.memory.gpu.device < LESS * below:
            fallbacks.append(simulated)
            below = simulated.memory.gpu.device
    return fallbacks, list(known.values())


def has_fallback(candidate: Candidate, candidates: Sequence[Candidate], planner: Planner) -> bool:
    """Return whether one of ``candidates`` is a fallback below ``candidate``."""
    limit = LESS * candidate.memory.gpu.device
    return any(_is_below(other, candidate, planner) and other.memory.gpu.device < limit for other in candidates)


def _half_precision(candidates: Iterable[Candidate], planner: Planner) -> list[Candidate]:
    """Return ``candidates`` in 16 bits if the run has fp32: bf16 from Ampere on, fp16 before."""
    settings = planner.settings
    if settings.hardware.is_cpu or settings.precision != "fp32":
        return []
    half = "bf16" if settings.hardware.accelerator.bf16 else "fp16"
    return [planner.scan(candidate.choice.model_copy(update={"precision": half})) for candidate in candidates]


def _next_fallback(candidate: Candidate) -> tuple[int, bool, bool, int, bool, int]:
    choice = candidate.choice
    late = choice.nodes, choice.spec.uses_nvme, candidate.is_half_precision
    return *late, choice.spec.fallback_order, choice.gradient_checkpointing, -choice.micro_batch_size


def _is_below(candidate: Candidate, chosen: Candidate, planner: Planner) -> bool:
    """Return True for the same library, at least as many nodes and a later place in the guide's order.

    If the loss compares the examples of a micro batch, that must stay the same on as many ranks.
    """
    mine, its = candidate.choice, chosen.choice
    if mine.is_fsdp != its.is_fsdp or not candidate.fits:
        return False
    if mine.spec.fallback_order < its.spec.fallback_order or mine.nodes < its.nodes:
        return False
    if OBJECTIVES[planner.settings.run.objective].compares_batch:
        same = (mine.micro_batch_size, mine.nodes) == (its.micro_batch_size, its.nodes)
        return same and (mine.gradient_checkpointing or not its.gradient_checkpointing)
    one_sequence = mine.micro_batch_size in (its.micro_batch_size, 1)
    return one_sequence and (mine.gradient_checkpointing or not its.gradient_checkpointing)
