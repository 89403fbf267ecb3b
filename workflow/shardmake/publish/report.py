"""A run on one page: ``report.html``, which needs nothing beside itself, and its figures as files."""

import statistics
from pathlib import Path
from typing import Any

from shardmake.config import Run
from shardmake.plan.plan import Plan, read_plan
from shardmake.publish import figures
from shardmake.publish.card import public_name
from shardmake.publish.figures import GIB, Memory, length_name
from shardmake.publish.flops import Utilization, utilization
from shardmake.publish.history import History, read_history
from shardmake.publish.secrets import redact
from shardmake.receipt import read_json, write_text
from shardmake.rundir import RunDir

TEMPLATE = Path(__file__).with_name("report.html.jinja")


def write_report(run: Run, rundir: RunDir) -> Path:
    """Write ``report.html`` and ``figures/*.svg`` of a run that was trained and evaluated; return the page's path.

    Raises `UserError` if a stage that the report tells of has not run.
    """
    from jinja2 import Environment, StrictUndefined

    evaluation = read_json(rundir.evaluation, f"shardmake evaluate {rundir.name}")
    training = read_json(rundir.train_receipt, f"shardmake train {rundir.name}")
    plan, history = read_plan(rundir.plan), read_history(rundir)
    used = utilization(run, rundir, history)
    memory = memory_of(read_json(rundir.memory, f"shardmake plan {rundir.name}"), plan, history)
    drawn = {
        "loss": figures.loss(history),
        "optimizer": figures.optimizer(history),
        "speed": figures.speed(history, used),
        "memory": figures.memory(memory),
        "by-length": figures.by_length(evaluation),
    }
    for name, drawing in drawn.items():
        write_text(rundir.figures / f"{name}.svg", drawing)
    template = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template.filters.update(bucket=length_name, duration=duration, gib=lambda size: f"{size / GIB:.1f} GiB")
    page = template.from_string(TEMPLATE.read_text()).render(
        name=rundir.name,
        base=public_name(run.model),
        data=public_name(run.data.train),
        run=run,
        plan=plan,
        training=training,
        history=history,
        evaluation=evaluation,
        memory=memory,
        tiles=_tiles(training, history, evaluation, used),
        figures=drawn,
        buckets=list(zip(evaluation["base"]["by_length"], evaluation["tuned"]["by_length"], strict=True)),
        pushed=read_json(rundir.push_receipt, "")["destinations"] if rundir.push_receipt.exists() else [],
    )
    write_text(rundir.report, redact(page))
    return rundir.report


def memory_of(estimates: dict[str, Any], plan: Plan, history: History) -> Memory:
    """The estimate of what was chosen, beside the most that the allocator held (None on CPUs)."""
    chosen = next(item for item in estimates["candidates"] if item["choice"] == plan.choice.model_dump())
    measured = [line["memory"]["reserved"] for line in history.lines if "memory" in line]
    gpu = chosen["gpu"]
    return Memory(gpu["terms"], gpu["device"], estimates["gpu_memory"], max(measured, default=None))


def _tiles(
    training: dict[str, Any], history: History, evaluation: dict[str, Any], used: Utilization | None
) -> dict[str, str]:
    """The figures that people look for first."""
    rates = history.series("tokens_per_second")[1]
    return {
        "evaluation loss": f"{evaluation['base']['loss']:.3f} → {evaluation['tuned']['loss']:.3f}",
        "perplexity": f"{evaluation['base']['perplexity']:,.1f} → {evaluation['tuned']['perplexity']:,.1f}",
        "optimizer steps": f"{training['steps']:,}",
        "tokens": f"{training['tokens']:,}",
        "tokens per second": f"{statistics.median(rates):,.0f}" if rates else "not logged",
        "MFU": f"{statistics.median(used.shares):.1%}" if used else "none on CPU",
        "device hours": f"{history.device_hours:.2f}",
        "lost to interruptions": duration(sum(item.seconds for item in history.interruptions)),
    }


def duration(seconds: float) -> str:
    """``3 h 05 min``, ``4 min 10 s`` or ``12 s``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, left = divmod(minutes, 60)
    if hours:
        return f"{hours} h {left:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
