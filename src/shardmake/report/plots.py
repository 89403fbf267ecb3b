"""The figures that a run has data for, and a sentence about the missing ones."""

from dataclasses import dataclass
from typing import Final

from shardmake.report import figures
from shardmake.report.figures import Drawing, Memory
from shardmake.report.history import TrainingHistory
from shardmake.report.records import Records
from shardmake.run.plan import CandidateEstimate, Choice, MemoryEstimates

_MFU: Final = " MFU counts 6 FLOPs per weight and token and the exact attention, relative to the dense peak."
_MEASURED: Final = "the peak of the allocator on rank 0, which does not count the CUDA context and NCCL"
_METRICS: Final = ("loss", "learning_rate", "grad_norm", "tokens_per_second")


@dataclass(frozen=True)
class Plot:
    """One figure, its title in the card and its caption in the report."""

    title: str
    caption: str
    drawing: Drawing


def plots(records: Records) -> dict[str, Plot]:
    """Return the figures of the card for which the run has data, by name."""
    history, found = records.history, {}
    if _has(records, "loss", "eval_loss"):
        caption = "Loss by optimizer step, stitched over the attempts; a dotted line marks the end of an attempt."
        found["loss"] = Plot("Loss by optimizer step", caption, figures.loss(history))
    if _has(records, "learning_rate", "grad_norm"):
        caption = "Learning rate, and the norm of the gradient before clipping, as far as they were logged."
        found["optimizer"] = Plot("Learning rate and gradient norm", caption, figures.optimizer(history))
    if _has(records, "tokens_per_second"):
        mfu = _MFU if records.utilization else ""
        caption = f"Tokens per second over all ranks, padding included.{mfu}"
        found["speed"] = Plot("Tokens per second", caption, figures.speed(history, records.utilization))
    if records.on_gpus:
        memory = memory_of(records)
        caption = (
            "GPU memory. Predicted: the estimate's terms in the phase with the peak, on the fullest rank. Measured: "
            f"{'no peak was logged' if memory.measured is None else _MEASURED}."
        )
        found["memory"] = Plot("Memory, predicted and measured", caption, figures.memory(memory))
    scores = records.evaluation.scores
    if scores and len(scores[0].by_length) > 1:
        caption = "Loss on the evaluation split by the length of the example, base and tuned model."
        found["by-length"] = Plot("Evaluation loss by length", caption, figures.by_length(*scores))
    return found


def report_plots(records: Records) -> dict[str, Plot]:
    """Return the figures of the report: those of the card, and the RAM of a node whose ranks ran on CPUs."""
    found = plots(records)
    if records.on_cpu:
        caption = "RAM of a node: the estimate's terms. The memory of ranks on CPUs is not measured."
        found["memory"] = Plot("RAM of a node, predicted", caption, figures.memory(memory_of(records)))
    return found


def _has(records: Records, *keys: str) -> bool:
    return any(records.history.series(key)[0] for key in keys)


def missing_metrics(records: Records) -> str:
    """Return a sentence about metrics that were not logged, or an empty string."""
    missing = [key.replace("grad_", "gradient_").replace("_", " ") for key in _METRICS if not _has(records, key)]
    if not missing:
        return ""
    if len(missing) < len(_METRICS):
        return f"Not logged, and therefore not shown: {', '.join(missing)}."
    if not records.is_script:
        return "This run has no metrics: train/metrics.jsonl is missing or empty. Loss and speed are not shown."
    return (
        "The training script logged no metrics (it wrote nothing to SHARDMAKE_METRICS), so its loss, learning rate and "
        "speed are not known."
    )


def memory_of(records: Records) -> Memory:
    """Return the memory that limited a run: of a GPU, see `find_memory`, or of a node whose ranks ran on CPUs."""
    planned, used = records.planned.choice, records.used.choice
    if not records.on_cpu:
        return find_memory(records.memory, planned, used, records.history)
    found = trained_candidate(records.memory, planned, used)
    terms, ranks = dict(found.host.terms), found.choice.processes_per_node
    for name, size in found.gpu.terms.items():
        terms[name] = terms.get(name, 0) + ranks * size
    predicted = found.host.total + ranks * found.gpu.reserved
    return Memory(terms, predicted, 0, records.memory.host_memory, None, place="RAM of a node")


def find_memory(estimates: MemoryEstimates, planned: Choice, used: Choice, history: TrainingHistory) -> Memory:
    """Return the estimate of the choice that trained, and the measured peak, both of the allocator."""
    measured = [line.memory.reserved for line in history.lines if line.memory]
    gpu = trained_candidate(estimates, planned, used).gpu
    outside = gpu.device - gpu.reserved
    return Memory(gpu.terms, gpu.reserved, outside, estimates.gpu_memory, max(measured, default=None))


def trained_candidate(estimates: MemoryEstimates, planned: Choice, used: Choice) -> CandidateEstimate:
    """Return the estimate of the choice that trained, or else of the planned one."""
    known = {candidate.choice: candidate for candidate in estimates.candidates}
    return known[used if used in known else planned]
