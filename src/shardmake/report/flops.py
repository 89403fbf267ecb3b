"""Model FLOPs of a training, and the share of the hardware's peak that they reach (MFU).

Chowdhery et al. 2022 (PaLM, appendix B) count 6 FLOPs per weight and token, and attention separately; recomputation
does not count. Attention is exact here: a token attends to the tokens before it in its own example, so packed short
examples cost less than one long one.
"""

from shardmake.config.accelerators import find_accelerator
from shardmake.config.methods import METHODS
from shardmake.config.models import Method, Run
from shardmake.config.objectives import OBJECTIVES
from shardmake.memory.families import as_classifier
from shardmake.memory.model import Model, matrix_weights
from shardmake.memory.read_config import read_model
from shardmake.report.history import TrainingHistory, attempt_of
from shardmake.run.paths import RunDir
from shardmake.run.plan import Plan
from shardmake.run.sources import localize


def utilization(run: Run, rundir: RunDir, history: TrainingHistory) -> tuple[list[int], list[float]] | None:
    """Return the logged steps of a training and their MFU; 1 is the dense peak of all ranks' devices.

    It is None on CPUs, whose peak is not defined, without a speed or the attempts' folders, for a user's script, which
    may train another method on other data than the run names, and with frozen weights, of which some need no backward
    pass.
    """
    if run.script or run.freeze:
        return None
    peaks = {span.number: _peak(rundir, span.number) for span in history.spans}
    lines = [line for line in history.lines if line.tokens_per_second is not None and line.attempt in peaks]
    if not lines or not all(peaks.values()):
        return None
    local = localize(run, rundir)
    model = read_model(local.model, revision=local.revision, trust_remote_code=run.trust_remote_code)
    if OBJECTIVES[run.objective].new_head:
        model = as_classifier(model)
    per_token = flops_per_token(model, run.method, mean_context(rundir))
    shares = [(line.tokens_per_second or 0) * per_token / peaks[line.attempt or 0] for line in lines]
    return [line.step for line in lines], shares


def flops_per_token(model: Model, method: Method, context: float) -> float:
    """Return the FLOPs of forward and backward pass for a token that attends to ``context`` tokens on average.

    A weight costs 2 FLOPs forward, 2 for the gradient of its input and, if it is trained, 2 for its own. Attention
    costs 4 per layer, context and width forward (scores and values), and twice that backward.
    """
    weights = matrix_weights(model)
    per_weight = 4 if METHODS[method].has_adapters else 6
    return per_weight * weights + 12 * model.attention_width * context


def mean_context(rundir: RunDir) -> float:
    """Return the mean number of tokens that a token attends to: (length + 1) / 2 within each example."""
    import datasets
    import pyarrow.compute as pc

    column = datasets.load_from_disk(str(rundir.data / "train")).data.column("seq_lengths")
    lengths = pc.list_flatten(column).to_numpy().astype("float64")
    return float((lengths * (lengths + 1) / 2).sum() / lengths.sum())


def _peak(rundir: RunDir, number: int) -> float:
    """Return the dense peak of an attempt's ranks in FLOP/s; 0 on CPUs."""
    attempt = attempt_of(rundir, number)
    device = find_accelerator(attempt.read().accelerator)
    if device.is_cpu:
        return 0.0
    plan = Plan.read(attempt.plan)
    return attempt.read().world_size * device.flops(plan.choice.precision, tf32=plan.workload.tf32)
