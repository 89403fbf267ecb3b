"""The report stage: a self-contained ``report.html``, its figures as files, and a card in the model's folder."""

import statistics
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from shardmake.config.models import Run
from shardmake.core.atomic import write_text
from shardmake.core.errors import ConfigError
from shardmake.core.run_folder import unlink
from shardmake.core.secrets import redact
from shardmake.core.units import format_bytes, format_duration, format_number, plural
from shardmake.report import figures
from shardmake.report.card import class_to_load, common_values, render_card
from shardmake.report.figures import length_name
from shardmake.report.history import attempt_of, hours_name
from shardmake.report.plots import memory_of, missing_metrics, report_plots, trained_candidate
from shardmake.report.records import Records, hide_folders, hide_folders_in_text, hide_keys, public_names
from shardmake.report.training_facts import training_facts
from shardmake.run.length import Length
from shardmake.run.paths import MODEL_CARD, RunDir
from shardmake.run.receipts import PushReceipt
from shardmake.run.settings import stage_times
from shardmake.run.usage import gpu_use, stragglers

_TEXTS: Final = frozenset({"command", "prompts"})
"""Keys of commands and sentences, in which a path is one word."""
_FREE_TEXTS: Final = _TEXTS | {"script_args"}
"""Keys of texts in which a person may have written a key of some service."""
_URL_PATHS: Final = frozenset({"health"})


def configuration(runs: Mapping[str, Run]) -> str:
    """Return the entries of ``runs`` in a configuration file, as YAML: every setting that is not the default.

    Of an absolute path only the last part is shown, after three dots.
    """
    import yaml

    entries = {name: _public(run.model_dump(mode="json", exclude_defaults=True)) for name, run in runs.items()}
    return yaml.safe_dump({"runs": entries}, sort_keys=False, allow_unicode=True, width=100)


def _public(value: Any, key: str = "") -> Any:
    if isinstance(value, dict):
        return {name: _public(inner, name) for name, inner in value.items()}
    if isinstance(value, list):
        return [_public(inner, key) for inner in value]
    if not isinstance(value, str) or key in _URL_PATHS:
        return value
    if key in _FREE_TEXTS:
        value = hide_keys(value)
    return hide_folders_in_text(value) if key in _TEXTS else hide_folders(value)


TEMPLATE = Path(__file__).with_name("report.html.jinja")


def write_report(run: Run, rundir: RunDir, profile: str = "slurm", before: Mapping[str, Run] | None = None) -> Path:
    """Write ``report.html``, ``figures/*.svg`` and ``model/README.md`` of a run that was trained and evaluated.

    Return the page's path.

    ``before`` has the runs of a chain that lead to this one, first one first. The command that repeats the run has
    Snakemake's ``profile``. A figure without data is not drawn; the page says in words what is missing. Raises
    `ShardmakeError` if a required stage has not run.
    """
    records = Records.read(run, rundir)
    shown = report_plots(records)
    drawings = {name: figures.as_svg(name, plot.drawing) for name, plot in shown.items()}
    for old in rundir.figures.glob("*.svg"):
        if old.stem not in drawings:
            unlink(old)
    for name, drawing in drawings.items():
        write_text(rundir.figure(name), drawing)
    entries = configuration({**(before or {}), rundir.name: run})
    captions = {name: plot.caption for name, plot in shown.items()}
    write_text(rundir.model / MODEL_CARD, redact(render_card(run, rundir, pushed=False)))
    write_text(rundir.report, redact(_page(records, rundir, profile, entries, drawings, captions)))
    return rundir.report


def _page(
    records: Records, rundir: RunDir, profile: str, entries: str, drawings: dict[str, str], captions: dict[str, str]
) -> str:
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters.update(bucket=length_name, duration=format_duration, public=hide_folders)
    # In UTC: reports of one run are equal on all machines.
    environment.filters["moment"] = lambda time: f"{datetime.fromtimestamp(time, UTC):%Y-%m-%d %H:%M UTC}"
    pushed = PushReceipt.read_if_exists(rundir.push_receipt)
    facts = {name: value.replace("`", "") for name, value in training_facts(records).items()}
    return environment.from_string(TEMPLATE.read_text()).render(
        records=records, name=rundir.name, **common_values(records), data=public_names(records.run.data.sources),
        hours=hours_name(on_gpus=records.on_gpus), facts=facts | _attempt_facts(records, rundir), tiles=_tiles(records),
        model_class=class_to_load(records), **_done(records), notes=_notes(records),
        recorded=sorted(str(path.relative_to(rundir.root)) for path in rundir.profile.glob("[!.]*")),
        memory=_memory_rows(records), figures=drawings, captions=captions,
        pushed=pushed.destinations if pushed else [], configuration=entries, profile=hide_folders(profile),
    )  # fmt: skip


def _attempt_facts(records: Records, rundir: RunDir) -> dict[str, str]:
    """Return the use of the last attempt's GPUs, if nvidia-smi reported it, its slow ranks, and each stage's time.

    That of the training is the time of its last driver.
    """
    times = ", ".join(f"{stage} {format_duration(seconds)}" for stage, seconds in stage_times(rundir).items())
    last = attempt_of(rundir, records.training.attempts)
    facts = {"GPU use, last attempt": gpu_use(last), "Slow ranks at the end": stragglers(last), "Stages": times}
    return {name: value for name, value in facts.items() if value}


def _done(records: Records) -> dict[str, Any]:
    """Return what was trained, in a sentence, and warnings about its length."""
    run, data, steps = records.run, records.data, records.training.steps
    if records.is_script or data.train.sequences == 0:
        done = "The script trained" + (f" for {plural(steps, 'optimizer step')}" if steps else "")
        return {"done": f"{done} in {plural(records.training.attempts, 'attempt')}.", "warnings": []}
    ranks = records.used.choice.processes_per_node
    length = Length(run, data.train.examples, data.train.tokens, data.train.sequences, ranks)
    done = f"Trained on {length.describe()}."
    if records.planned_steps:
        done += f" It ended after {plural(steps or 0, 'step')}, because the evaluation loss no longer fell."
    try:
        warnings = length.check()
    except ConfigError as error:  # a run of a version that planned it
        warnings = [str(error)]
    return {"done": done, "warnings": warnings}


def _tiles(records: Records) -> dict[str, str]:
    """Return the key figures for the top of the page, as far as they are known."""
    training, history, evaluation = records.training, records.history, records.evaluation
    rated, tiles = evaluation.reward_model, {}
    if evaluation.scores:
        base, tuned = evaluation.scores
        tiles["evaluation loss"] = f"{base.loss:.3f} → {tuned.loss:.3f}"
        tiles["perplexity"] = f"{base.perplexity_text(1)} → {tuned.perplexity_text(1)}"
    for name, share in evaluation.shares.items():
        tiles[name] = "" if share is None else f"{share:.1%}"
    if evaluation.scores and tiles["exact answers"]:
        tiles["exact answers"] = f"{base.exact:.1%} → {tuned.exact:.1%}"
    lost = sum(item.seconds for item in history.interruptions)
    tiles |= {
        "reward margin": f"{rated.margin:.3f}" if rated else "",
        "optimizer steps": "" if training.steps is None else f"{training.steps:,}",
        "tokens": "" if training.tokens is None else f"{training.tokens:,}",
        "tokens per second": "" if history.speed is None else f"{history.speed:,.0f}",
        "MFU": f"{statistics.median(records.utilization[1]):.1%}" if records.utilization else "",
        hours_name(on_gpus=records.on_gpus): f"{history.device_hours:.2f}" if history.spans else "",
        "lost to interruptions": format_duration(lost) if history.interruptions else "",
    }
    return {name: value for name, value in tiles.items() if value}


def _memory_rows(records: Records) -> dict[str, str]:
    """Return what was estimated and measured, and the limits, for the table of the plan.

    It has no memory if it is not known whether the ranks ran on GPUs.
    """
    candidate = trained_candidate(records.memory, records.planned.choice, records.used.choice)
    seconds = {"predicted": candidate.step_seconds, "measured (median)": records.history.step_seconds}
    rows = {f"Time of a step, {name}": f"{format_number(time)} s" for name, time in seconds.items() if time}
    if records.attempt is None:
        return rows
    found, sizes = memory_of(records), dict[str, int | None]()
    if not records.on_cpu:
        sizes = {
            "GPU memory, predicted, held by the allocator": found.predicted,
            "GPU memory, measured on rank 0, held by the allocator": found.measured,
            "GPU memory, predicted, with CUDA context and NCCL": found.device,
            "GPU memory, limit": found.capacity,
        }
    sizes["RAM of a node, predicted"] = found.predicted if records.on_cpu else candidate.host.total
    sizes["RAM of a node, limit"] = records.memory.host_memory
    return rows | {name: format_bytes(size) for name, size in sizes.items() if size is not None}


def _notes(records: Records) -> list[str]:
    """Return a sentence for everything that a reader may look for and that the page does not show."""
    on_cpu = "The ranks ran on CPUs: the share of a GPU's peak (MFU) and the allocator's memory are not defined there."
    removed = (
        "The folder of the last attempt is missing from train/attempts. Therefore its hardware is not known, and its "
        "memory is not shown."
    )
    notes = {
        missing_metrics(records): True,
        on_cpu: records.on_cpu,
        removed: records.attempt is None,
        "No attempt's times are recorded: hours and interruptions are not known.": not records.history.spans,
    }
    return [note for note, holds in notes.items() if note and holds]
