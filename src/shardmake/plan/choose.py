"""The choice among candidates, with its reason and those of the rejected ones, and the fallbacks below it."""

from collections.abc import Iterable

from shardmake.core.errors import ConfigError
from shardmake.memory.hardware import Hardware
from shardmake.plan.candidates import Candidate, choices
from shardmake.plan.planner import Planner
from shardmake.plan.resolve import ResolvedRun

ALMOST = 1.1  # a candidate whose closed form exceeds the GPU's memory by more is not simulated
LESS = 0.97  # a fallback needs at most this part of the memory of the one before


class NothingFitsError(ConfigError):
    """No candidate of ``settings`` fits."""

    def __init__(self, message: str, settings: ResolvedRun) -> None:
        super().__init__(message)
        self.settings = settings


def choose_from(planner: Planner) -> tuple[Candidate, list[Candidate]]:
    """Choose among all candidates of ``planner``'s run."""
    possible = list(choices(planner.settings))
    planner.prepare(possible)
    return choose([planner.scan(choice) for choice in possible], planner)


def choose(candidates: list[Candidate], planner: Planner) -> tuple[Candidate, list[Candidate]]:
    """Return the fastest candidate that fits with headroom on the fewest nodes, and all candidates.

    Candidates come in closed form and are simulated from the best on, until one fits. A candidate with little headroom
    is taken only if nothing else fits. The second value holds the simulated figures where there are some.

    Raises:
        NothingFitsError: No candidate fits.
    """
    known = {candidate.name: candidate for candidate in candidates}
    for needs_headroom in (True, False):
        for candidate in sorted(candidates, key=_order_of_trial):
            if not _may_fit(candidate, planner.settings.hardware):
                continue
            if not known[candidate.name].simulated:
                known[candidate.name] = planner.simulate(candidate.choice)
            simulated = known[candidate.name]
            if simulated.fits and not (needs_headroom and simulated.low_headroom):
                return simulated, list(known.values())
    raise NothingFitsError(_nothing_fits_message(list(known.values()), planner.settings), planner.settings)


def _may_fit(candidate: Candidate, hardware: Hardware) -> bool:
    """Return True if a simulation may show that it fits: the closed form is at most a tenth above the memory."""
    return candidate.fits or (
        not hardware.is_cpu
        and candidate.memory.gpu.device < ALMOST * hardware.gpu_memory
        and candidate.memory.host_total <= hardware.host_memory
    )


def _order_of_trial(candidate: Candidate) -> tuple[int, float, tuple[bool, int], bool, int]:
    """Sort by nodes and speed; within a percent by simplicity, checkpointing and micro batch."""
    choice = candidate.choice
    simplicity = choice.is_fsdp, 0 if choice.is_fsdp else choice.spec.fallback_order
    rounded = float(f"{candidate.step_seconds:.2g}")
    return choice.nodes, rounded, simplicity, choice.gradient_checkpointing, choice.micro_batch_size


def reason_of(chosen: Candidate, candidates: list[Candidate]) -> str:
    """Return the sentence that explains the choice."""
    fitting = [candidate for candidate in candidates if candidate.fits]
    rivals = sum(candidate.choice.nodes == chosen.choice.nodes for candidate in fitting)
    lead = "the only candidate that fits" if rivals == 1 else f"the fastest of {rivals} candidates that fit"
    if rivals < len(fitting):
        lead += " on the fewest nodes"
    return (
        f"{chosen.name}: {lead} ({chosen.reason.removeprefix('fits: ')}, about {chosen.step_seconds:.3g} s per step)."
    )


def rejected(chosen: Candidate, candidates: list[Candidate]) -> dict[str, str]:
    """Return the reason against each other candidate, by name."""
    return {candidate.name: _why_not(candidate, chosen) for candidate in candidates if candidate is not chosen}


def _why_not(candidate: Candidate, chosen: Candidate) -> str:
    if not candidate.fits or candidate.low_headroom:
        return candidate.reason
    if candidate.choice.nodes > chosen.choice.nodes:
        return "takes more nodes than needed"
    ratio = candidate.step_seconds / chosen.step_seconds
    return f"{ratio:.2f} times the time per step" if ratio > 1.005 else "not faster, and less simple"


def _nothing_fits_message(candidates: list[Candidate], settings: ResolvedRun) -> str:
    best = min(candidates, key=lambda candidate: candidate.memory.gpu.device + candidate.memory.host_total)
    subject = "Nothing fits" if settings.run.strategy == "auto" else f"Strategy {settings.run.strategy} does not fit"
    return (
        f"{subject}: even {best.name} {best.reason}. "
        "Use more nodes (max_nodes), a shorter sequence_length, method: lora, or strategy: auto."
    )


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
        if not _is_below(candidate, chosen) or candidate.memory.gpu.device > LESS * below:
            continue
        simulated = candidate if candidate.simulated else planner.simulate(candidate.choice)
        known[simulated.name] = simulated
        if simulated.fits and simulated.memory.gpu.device < LESS * below:
            fallbacks.append(simulated)
            below = simulated.memory.gpu.device
    return fallbacks, list(known.values())


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


def _is_below(candidate: Candidate, chosen: Candidate) -> bool:
    """Return True for the same library, at least as many nodes and a later place in the guide's order."""
    mine, its = candidate.choice, chosen.choice
    if mine.is_fsdp != its.is_fsdp or not candidate.fits:
        return False
    if mine.spec.fallback_order < its.spec.fallback_order or mine.nodes < its.nodes:
        return False
    one_sequence = mine.micro_batch_size in (its.micro_batch_size, 1)
    return one_sequence and (mine.gradient_checkpointing or not its.gradient_checkpointing)
