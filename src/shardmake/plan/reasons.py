"""Why a candidate was chosen, and why the others were not: sentences with seconds, GPU-time and gigabytes."""

from collections.abc import Sequence

from shardmake.core.units import format_number, plural
from shardmake.memory.scenario import BYTES
from shardmake.plan.candidates import Candidate
from shardmake.plan.resolve import ResolvedRun
from shardmake.plan.verdict import Headroom


def describe_scaling(traced: int, tokens: int) -> str:
    """Return the sentence for an estimate whose step was traced with ``traced`` tokens instead of ``tokens``."""
    return (
        f"The model's layers loop over their tokens: a step of {traced} tokens was traced, and its bytes scaled to "
        f"{tokens:,}."
    )


def reason_of(chosen: Candidate, candidates: Sequence[Candidate], fallbacks: Sequence[Candidate]) -> str:
    """Return the sentences that explain the choice, with its risk if it is tight."""
    return " ".join(
        [
            f"{chosen.name}: about {seconds(chosen)} per step and {figures(chosen)}, {_lead(chosen, candidates)}.",
            *_last_resort_sentence(chosen, candidates),
            *_node_sentence(chosen, candidates),
            *_cheaper_sentence(chosen, candidates),
            *_risk_sentences(chosen, candidates, fallbacks),
        ]
    )


def rejected(chosen: Candidate, candidates: Sequence[Candidate]) -> dict[str, str]:
    """Return the reason against each other candidate, by name."""
    return {candidate.name: _why_not(candidate, chosen) for candidate in candidates if candidate is not chosen}


def nothing_fits_message(candidates: Sequence[Candidate], settings: ResolvedRun) -> str:
    """Return the message of a plan in which nothing fits, with the candidate that comes closest."""
    best = min(candidates, key=lambda candidate: candidate.memory.gpu.device + candidate.memory.host.total)
    subject = "Nothing fits" if settings.run.strategy == "auto" else f"Strategy {settings.run.strategy} does not fit"
    return f"{subject}: even {best.name} {best.reason}."


def risk(candidate: Candidate) -> str:
    """Return the estimator's own error for trainings like ``candidate``, as a clause."""
    error = candidate.error
    return (
        f"estimates of {error.name} trainings are off by {error.typical:.1%} (median of {error.sample}), "
        f"and nineteen in twenty needed at most {error.largest:.1%} more"
    )


AVOIDED = ("", "offload", "offload of the weights")
"""Names of the levels of `Candidate.last_resort`."""


def _lead(chosen: Candidate, candidates: Sequence[Candidate]) -> str:
    """Return the rank of the choice among those that fit on as many nodes."""
    fitting = [candidate for candidate in candidates if candidate.fits and _same_nodes(candidate, chosen)]
    rivals = [candidate for candidate in fitting if candidate.last_resort <= chosen.last_resort]
    where = f"on {plural(chosen.choice.nodes, 'node')}"
    if len(rivals) < len(fitting):
        where += f" without {AVOIDED[chosen.last_resort + 1]}"
    if len(rivals) == 1:
        return f"the only candidate that fits {where}"
    faster = [rival for rival in rivals if rival.rounded_seconds < chosen.rounded_seconds]
    of = f"of {len(rivals)} candidates that fit {where}"
    if faster:
        return f"the fastest {of}, except for {plural(len(faster), 'faster one')} with too little headroom"
    equal = [rival for rival in rivals if rival.step_seconds < 0.995 * chosen.step_seconds]
    return f"the simplest of the fastest {of}" if equal else f"the fastest {of}"


def _last_resort_sentence(chosen: Candidate, candidates: Sequence[Candidate]) -> list[str]:
    """Return why a strategy is taken that `auto` avoids, if the run left it a choice."""
    what = ("", "offloads the optimizer", "offloads the optimizer and the weights")[chosen.last_resort]
    sentence = (
        f"It {what} because nothing else fits with a margin. The time of an offload is modelled from the libraries' "
        "sources, and was compared with five measured steps only."
    )
    return [sentence] * any(candidate.last_resort < chosen.last_resort for candidate in candidates)


def _cheaper_sentence(chosen: Candidate, candidates: Sequence[Candidate]) -> list[str]:
    """Return the candidate on other nodes that takes clearly less GPU-time but is avoided, with what is against it."""
    others = [one for one in candidates if one.fits and not _same_nodes(one, chosen)]
    avoided = [one for one in others if one.headroom < chosen.headroom or one.last_resort > chosen.last_resort]
    best = min(avoided, key=lambda candidate: candidate.gpu_seconds, default=chosen)
    if best.gpu_seconds >= 0.9 * chosen.gpu_seconds:
        return []
    is_avoided = best.last_resort > chosen.last_resort
    against = f"it needs {AVOIDED[best.last_resort]}" if is_avoided else "its margin is too small"
    return [
        f"{best.name} takes fewer GPU-seconds per step ({gpu_seconds(best)} against {gpu_seconds(chosen)}; "
        f"{figures(best)}), but {against}."
    ]


def _node_sentence(chosen: Candidate, candidates: Sequence[Candidate]) -> list[str]:
    """Return why there are more nodes than needed, if there are."""
    safe = [one for one in candidates if one.fits and one.headroom >= chosen.headroom]
    fewer = [one for one in safe if one.choice.nodes < chosen.choice.nodes]
    if not fewer:
        return []
    best = min(fewer, key=lambda candidate: (candidate.last_resort, candidate.gpu_seconds))
    if best.last_resort > chosen.last_resort:
        resort = AVOIDED[best.last_resort]
        return [f"On fewer nodes only {resort} fits, such as {best.name} ({seconds(best)} per step)."]
    return [
        f"It takes {gpu_seconds(chosen)} GPU-seconds per step; {best.name}, the cheapest on fewer nodes, takes "
        f"{gpu_seconds(best)} ({seconds(best)} per step)."
    ]


_COVERS = {
    Headroom.TIGHT: "its margin covers the median",
    Headroom.TENSORS: "its tensors leave room for that, what PyTorch's cache may hold does not",
    Headroom.LITTLE: "its margin covers neither",
}


def _risk_sentences(chosen: Candidate, candidates: Sequence[Candidate], fallbacks: Sequence[Candidate]) -> list[str]:
    if chosen.headroom == Headroom.ENOUGH:
        return []
    below = "The plan has no fallback, so an out-of-memory error ends the training."
    if fallbacks:
        below = f"After an out-of-memory error training continues with {fallbacks[0].name}."
    safer = [one for one in candidates if one.fits and one.headroom > chosen.headroom and _same_nodes(one, chosen)]
    best = min(safer, key=lambda candidate: candidate.step_seconds, default=None)
    beside = [f"{best.name} has more headroom and takes {seconds(best)}."] if best else []
    return [f"It is tight: {risk(chosen)}; {_COVERS[chosen.headroom]}.", *beside, below]


def _why_not(candidate: Candidate, chosen: Candidate) -> str:
    memory = figures(candidate)
    if not candidate.fits:
        method = "" if candidate.simulated else ", closed form"
        return f"{candidate.reason} ({seconds(candidate)} per step{method}){_wider_gradients(candidate, chosen)}"
    avoided = ("", "offloads: ", "offloads the weights: ")[candidate.last_resort]
    doubt = avoided if candidate.last_resort > chosen.last_resort else ""
    tight = f"; {risk(candidate)}" if candidate.headroom < chosen.headroom and not doubt else ""
    doubt = doubt or ("tight: " if tight else "")
    if not _same_nodes(candidate, chosen):
        return (
            f"{doubt}{gpu_seconds(candidate)} GPU-seconds per step on {plural(candidate.choice.nodes, 'node')}, "
            f"against {gpu_seconds(chosen)} on {chosen.choice.nodes} ({seconds(candidate)} per step, {memory}){tight}"
        )
    against = f"{seconds(candidate)} per step against {seconds(chosen)}, {memory}"
    if candidate.rounded_seconds > chosen.rounded_seconds:
        return against
    return f"{doubt}{against}{tight}" if doubt else f"not simpler, and as fast in two digits: {against}"


def _wider_gradients(candidate: Candidate, chosen: Candidate) -> str:
    """Return why ``candidate`` needs more than ``chosen`` with a larger micro batch; empty if it does not."""
    mine, its = candidate.choice, chosen.choice
    smaller = mine.micro_batch_size < its.micro_batch_size and mine.strategy == its.strategy
    if not smaller or BYTES[mine.gradients] <= BYTES[its.gradients]:
        return ""
    return f"; it accumulates gradients, in {mine.gradients}: gradient_dtype: {its.gradients} needs less"


def _same_nodes(candidate: Candidate, chosen: Candidate) -> bool:
    return candidate.choice.nodes == chosen.choice.nodes


def beside(found: Candidate, chosen: Candidate) -> str:
    """Return how ``chosen`` compares with ``found``, as the end of a sentence: on other nodes also in GPU-seconds."""
    against = f" against {seconds(chosen)}"
    if _same_nodes(found, chosen):
        return against
    return f"{against} on {chosen.choice.nodes}, {gpu_seconds(found)} GPU-seconds against {gpu_seconds(chosen)}"


def seconds(candidate: Candidate) -> str:
    """Return the seconds per step as text."""
    return f"{format_number(candidate.step_seconds)} s"


def gpu_seconds(candidate: Candidate) -> str:
    """Return the GPU-seconds per step as text."""
    return format_number(candidate.gpu_seconds)


def memory_and_time(candidate: Candidate) -> str:
    """Return memory and seconds of a candidate that fits, and that its margin is smaller than the estimate's error."""
    tight = "" if candidate.headroom == Headroom.ENOUGH else ", tight"
    return f"{figures(candidate)}{tight}, {seconds(candidate)} per step"


def figures(candidate: Candidate) -> str:
    """Return the memory of a candidate that fits, without the verdict."""
    return candidate.reason.partition(": ")[2]
