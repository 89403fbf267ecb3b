"""The model card: description, training, evaluation, usage.

A card contains only facts about the model: no paths, no host or user names, nothing from the environment. The text
depends only on the run's receipts, so the same run gives the same card.
"""

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardmake.config.models import Run
from shardmake.core.atomic import read_json
from shardmake.core.units import plural
from shardmake.report import figures
from shardmake.report.figures import length_name
from shardmake.report.plots import plots
from shardmake.report.records import Records, hide_keys, public_names
from shardmake.report.training_facts import training_facts
from shardmake.run.evaluation import EvaluationResult
from shardmake.run.paths import RunDir
from shardmake.run.sources import localize

if TYPE_CHECKING:
    from huggingface_hub import ModelCardData

TEMPLATE = Path(__file__).with_name("card.md.jinja")
_CARRIED_KEYS = ("license", "license_name", "license_link", "language")
"""Keys of the base model's card that hold for this model too."""


def render_card(run: Run, rundir: RunDir, *, pushed: bool = True) -> str:
    """Return the card of a finished, evaluated run, as Markdown with a YAML header.

    With ``pushed``, it names the destination, and the plots and checksums that lie beside it there.
    Raises `ShardmakeError` if a required stage has not run.
    """
    from huggingface_hub import ModelCard

    records = Records.read(run, rundir)
    evaluation, shown = records.evaluation, plots(records) if pushed else {}
    # Others are examples of the evaluation data, which may be private.
    is_public = run.evaluation.prompts or (run.push and run.push.samples)
    samples = [it.model_copy(update={"prompt": hide_keys(it.prompt)}) for it in evaluation.samples if is_public]
    prompts = [sample.prompt for sample in samples if sample.prompt]
    base = _base_metadata(Path(localize(run, rundir).model))
    program = f"trained by `{Path(run.script or '').name}` and merged, evaluated and published by Shardmake"
    card = ModelCard.from_template(
        _metadata(records, base), template_path=str(TEMPLATE), name=rundir.name, **common_values(records),
        trained=program if run.script else "fine-tuned with Shardmake", facts=training_facts(records),
        evaluation=evaluation, samples=[{key: _fenced(text) for key, text in sample} for sample in samples],
        plots={name: plot.title for name, plot in shown.items()}, place=_place(run) if pushed else ".",
        is_hub=pushed and _hub_name(run) is not None, pushed=pushed,
        has_chat_template=_has_chat_template(rundir.model), model_class=class_to_load(records),
        prompt=json.dumps(min(prompts, key=len, default="Hello"), ensure_ascii=False),
        length_name=length_name, inline=_inline,
    )  # fmt: skip
    return str(card)


def class_to_load(records: Records) -> str:
    """Return the class of transformers whose `from_pretrained` loads the final model."""
    if records.evaluation.reward_model:
        return "AutoModelForSequenceClassification"
    trained = records.used.workload.model_class
    return trained.name if trained.text_part else "AutoModelForCausalLM"


def card_plots(run: Run, rundir: RunDir) -> dict[str, bytes]:
    """Return the figures of the model card as PNG, by file name."""
    shown = plots(Records.read(run, rundir))
    return {f"plots/{name}.png": figures.as_png(plot.drawing) for name, plot in shown.items()}


def _metadata(records: Records, base: dict[str, Any]) -> "ModelCardData":
    from huggingface_hub import EvalResult, ModelCardData

    run, evaluation = records.run, records.evaluation
    data = public_names(run.data.eval_sources or run.data.sources)
    task = "text-classification" if evaluation.reward_model else "text-generation"
    split = data if run.data.eval else f"{data} (evaluation split)"
    scores = [(task, data, split, *_headline(evaluation))]
    finite = [(it.task, it.metric, it.tuned) for it in evaluation.tasks if it.tuned is not None]
    scores += [("text-generation", name, name, metric, value) for name, metric, value in finite]
    return ModelCardData(
        base_model=records.hub_model or base.get("base_model"), model_name=records.name, pipeline_tag=task,
        datasets=None if run.script else list(dict.fromkeys(records.hub_datasets)) or None, library_name="transformers",
        tags=["shardmake", *(["reward-model"] if evaluation.reward_model else [])],
        eval_results=[
            EvalResult(
                task_type=kind, dataset_type=source, dataset_name=name, metric_type=metric, metric_value=round(value, 4)
            )
            for kind, source, name, metric, value in scores
        ],
        **{key: base[key] for key in _CARRIED_KEYS if base.get(key)},
    )  # fmt: skip


def _headline(evaluation: EvaluationResult) -> tuple[str, float]:
    """Return name and value of the metric that describes the model.

    That is a reward model's accuracy, else the perplexity, or the loss if the perplexity is not known.
    """
    if evaluation.reward_model:
        return "accuracy", evaluation.reward_model.accuracy
    assert evaluation.tuned is not None
    perplexity = evaluation.tuned.perplexity
    return ("loss", evaluation.tuned.loss) if perplexity is None else ("perplexity", perplexity)


def _base_metadata(model: Path) -> dict[str, Any]:
    """Return the metadata in the base model's card, empty if it has none or cannot be read."""
    from huggingface_hub import ModelCard
    from yaml import YAMLError

    try:
        card = ModelCard.load(model / "README.md", ignore_metadata_errors=True)
    except (OSError, ValueError, YAMLError):  # no card, another encoding, broken metadata
        return {}
    return card.data.to_dict()


def common_values(records: Records) -> dict[str, Any]:
    """Return the values that the templates of the card and of the report have in common."""
    scores = records.evaluation.scores
    return {
        "base": records.base,
        "held_out": _held_out(records),
        "scores": scores,
        "buckets": list(zip(*(score.by_length for score in scores or ()), strict=True)),
        "by_source": list(zip(*(score.by_source for score in scores or ()), strict=True)),
    }


def _held_out(records: Records) -> str:
    """Return what the evaluation's tokens are, and how many of its examples are training examples too."""
    data, rated = records.run.data, records.evaluation.reward_model
    share = f"{100 * records.data.settings.eval_fraction:.3g} % of the examples of {public_names(data.sources)}"
    source = public_names(data.eval_sources) if data.eval else f"{share}, which were held out"
    count = plural(rated.pairs, "pair") if rated else plural(records.evaluation.tokens, "token")
    return f"{count} of {source}. {_repeated(records)}"


def _repeated(records: Records) -> str:
    if records.is_script:
        return "The script may have trained on them"
    count = records.data.repeated
    if not count:
        return "None of these examples has the same tokens as a training example"
    return f"{count:,} of these examples {'has' if count == 1 else 'have'} the same tokens as a training example"


def _hub_name(run: Run) -> str | None:
    names = [to.removeprefix("hub:") for to in (run.push.destinations if run.push else []) if to.startswith("hub:")]
    return names[0] if names else None


def _place(run: Run) -> str:
    """Return the argument of `from_pretrained`: the hub name, or the last part of another destination."""
    destinations = run.push.destinations if run.push else []
    return _hub_name(run) or next((re.split("[:/]", to.rstrip("/"))[-1] for to in destinations), ".")


def _has_chat_template(model: Path) -> bool:
    settings = model / "tokenizer_config.json"
    return (model / "chat_template.jinja").is_file() or (
        settings.is_file() and "chat_template" in read_json(settings, "shardmake consolidate NAME")
    )


def _inline(text: str) -> str:
    """Return ``text`` for a line or a cell of Markdown, where a file's name starts no HTML and no other cell."""
    return re.sub(r"`[^`]*`|<", lambda found: found[0] if len(found[0]) > 1 else "&lt;", text).replace("|", "\\|")


def _fenced(text: str) -> str:
    """Return ``text`` as a code block with a fence longer than any run of backticks in it."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text}\n{fence}"
