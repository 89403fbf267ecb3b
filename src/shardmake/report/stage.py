"""The report stage: a self-contained ``report.html``, and its figures as files."""

import statistics
from dataclasses import dataclass
from pathlib import Path

from shardmake.config.models import Run
from shardmake.core.atomic import write_text
from shardmake.core.secrets import redact
from shardmake.core.units import GIB
from shardmake.report import figures
from shardmake.report.card import public_name
from shardmake.report.figures import Memory, length_name
from shardmake.report.flops import Utilization, utilization
from shardmake.report.history import TrainingHistory, read_history
from shardmake.run.evaluation import EvaluationResult
from shardmake.run.paths import RunDir
from shardmake.run.plan import MemoryEstimates, Plan
from shardmake.run.receipts import DataReceipt, PushedTo, PushReceipt, TrainingReceipt

TEMPLATE = Path(__file__).with_name("report.html.jinja")


def write_report(run: Run, rundir: RunDir) -> Path:
    """Write ``report.html`` and ``figures/*.svg`` of a run that was trained and evaluated; return the page's path.

    Raises `ShardmakeError` if a required stage has not run.
    """
    facts = _read(run, rundir)
    drawings = {name: figures.as_svg(name, drawing) for name, drawing in _draw(facts).items()}
    for name, drawing in drawings.items():
        write_text(rundir.figure(name), drawing)
    write_text(rundir.report, redact(_page(run, rundir, facts, drawings)))
    return rundir.report


def card_plots(run: Run, rundir: RunDir) -> dict[str, bytes]:
    """Return the figures of the model card as PNG, by file name."""
    return {f"plots/{name}.png": figures.as_png(drawing) for name, drawing in _draw(_read(run, rundir)).items()}


@dataclass(frozen=True)
class _Facts:
    """Records from the run's folder."""

    plan: Plan
    training: TrainingReceipt
    history: TrainingHistory
    used: Utilization | None
    memory: Memory
    evaluation: EvaluationResult
    pushed: list[PushedTo]


def _read(run: Run, rundir: RunDir) -> _Facts:
    plan, history = Plan.read(rundir.plan), read_history(rundir)
    pushed = PushReceipt.read_if_exists(rundir.push_receipt)
    return _Facts(
        plan=plan,
        training=TrainingReceipt.read(rundir.train_receipt),
        history=history,
        used=utilization(run, rundir, history),
        memory=memory_of(MemoryEstimates.read(rundir.memory), plan, history),
        evaluation=EvaluationResult.read(rundir.evaluation),
        pushed=pushed.destinations if pushed else [],
    )


def _draw(facts: _Facts) -> dict[str, figures.Drawing]:
    return {
        "loss": figures.loss(facts.history),
        "optimizer": figures.optimizer(facts.history),
        "speed": figures.speed(facts.history, facts.used),
        "memory": figures.memory(facts.memory),
        "by-length": figures.by_length(facts.evaluation),
    }


def _page(run: Run, rundir: RunDir, facts: _Facts, drawings: dict[str, str]) -> str:
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters.update(bucket=length_name, duration=duration, gib=lambda size: f"{size / GIB:.1f} GiB")
    lengths = zip(facts.evaluation.base.by_length, facts.evaluation.tuned.by_length, strict=True)
    return environment.from_string(TEMPLATE.read_text()).render(
        vars(facts),
        name=rundir.name,
        base=public_name(run.model),
        data=public_name(run.data.train),
        data_receipt=DataReceipt.read_if_exists(rundir.data_receipt),
        run=run,
        tiles=_tiles(facts),
        figures=drawings,
        buckets=list(lengths),
    )


def memory_of(estimates: MemoryEstimates, plan: Plan, history: TrainingHistory) -> Memory:
    """Return the estimate of the choice and the allocator's measured peak (None on CPUs)."""
    measured = [line.memory.reserved for line in history.lines if line.memory]
    gpu = estimates.of(plan.choice).gpu
    return Memory(gpu.terms, gpu.device, estimates.gpu_memory, max(measured, default=None))


def _tiles(facts: _Facts) -> dict[str, str]:
    """Return the key figures for the top of the page."""
    training, history, evaluation, used = facts.training, facts.history, facts.evaluation, facts.used
    rates = history.series("tokens_per_second")[1]
    return {
        "evaluation loss": f"{evaluation.base.loss:.3f} → {evaluation.tuned.loss:.3f}",
        "perplexity": f"{evaluation.base.perplexity:,.1f} → {evaluation.tuned.perplexity:,.1f}",
        "optimizer steps": _counted(training.steps),
        "tokens": _counted(training.tokens),
        "tokens per second": f"{statistics.median(rates):,.0f}" if rates else "not logged",
        "MFU": f"{statistics.median(used.shares):.1%}" if used else "none on CPU",
        "device hours": f"{history.device_hours:.2f}",
        "lost to interruptions": duration(sum(item.seconds for item in history.interruptions)),
    }


def _counted(number: int | None) -> str:
    """Format a count; a user's script may not have logged it."""
    return "not logged" if number is None else f"{number:,}"


def duration(seconds: float) -> str:
    """Format a duration as ``3 h 05 min``, ``4 min 10 s`` or ``12 s``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, left = divmod(minutes, 60)
    if hours:
        return f"{hours} h {left:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
