"""``shardmake init``: a configuration with one run, from a model, data and a cluster file."""

import json
import math
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import typer
import yaml

from shardmake.commands.workflow import DEFAULT_CONFIG, LOCAL_CLUSTER
from shardmake.config.inputs import check_inputs
from shardmake.config.load import load_cluster, parse_config
from shardmake.config.methods import DEFAULT_METHOD, METHODS
from shardmake.config.models import Data, Method, Objective
from shardmake.config.objectives import OBJECTIVES
from shardmake.config.parse_text import parse_yaml
from shardmake.config.translate import Translation, translate
from shardmake.core.environment import PROJECT
from shardmake.core.errors import ConfigError, DataError
from shardmake.core.nested import overlay
from shardmake.core.units import plural
from shardmake.data.files import raw_rows
from shardmake.data.sources import TRAIN_SPLITS, locate
from shardmake.run.length import batch_for, optimizer_steps

CLUSTERS: Final = LOCAL_CLUSTER.parent
"""Folder of the cluster files."""
_QUESTIONS: Final[Mapping[str, str]] = {
    "model": "Base model (hub id org/name, or a folder)",
    "data": "Training data (a file, a folder, or a hub data set)",
    "cluster": "Cluster file",
}
_LENGTH: Final = 2048
"""Tokens per sequence, or the positions of a local model if it has fewer."""
_BATCH: Final = 64
"""Largest batch, in sequences, and that for data of unknown size."""
_STEPS: Final = 50
"""Optimizer steps that the batch aims at, with up to `_EPOCHS`."""
_EPOCHS: Final = 3
_PREFERENCE_RATE: Final = 0.1
"""Part of a method's learning rate for an objective that stays near a reference."""
_HEAD: Final = (
    "# Written by `shardmake init`. config/README.md of Shardmake has every key; the plan chooses the others."
)
_TEXT: Final = (".jsonl", ".json", ".csv", ".tsv")
_BYTES_PER_TOKEN: Final = 4
"""Of such a file; what the format adds to the text is about what a chat template adds."""
_NOTES: Final = {
    "sequence_length": "longer conversations are truncated",
    "global_batch_size": "sequences per optimizer step, the same for any number of GPUs",
}


@dataclass(frozen=True)
class Answers:
    """The choices for a new configuration."""

    model: str
    data: str
    cluster: str
    name: str
    """Empty: made from the model's name."""
    method: Method | None
    objective: Objective | None = None
    source: Path | None = None
    """File of another tool that has the rest."""


def ask(flags: Mapping[str, str], source: Path | None = None) -> dict[str, str]:
    """Return the model, the data and the cluster file: from ``flags``, or else from the person at the terminal.

    A ``source`` has the model and the data. Raises `ConfigError` if one is missing and there is no terminal.
    """
    missing = [key for key in _QUESTIONS if not flags[key] and (key == "cluster" or source is None)]
    if missing and not sys.stdin.isatty():
        named = ", ".join(f"--{key}" for key in missing)
        raise ConfigError(f"init: {named} is missing. There is no terminal to ask. Add the option.")
    return {**flags, **{key: _ask(key) for key in missing}}


def _ask(key: str) -> str:
    files = sorted(map(str, CLUSTERS.glob("*.yaml"))) or [str(LOCAL_CLUSTER)] if key == "cluster" else []
    if files:
        typer.echo(f"Cluster files: {', '.join(files)}")
    answer = str(typer.prompt(_QUESTIONS[key], default=files[0] if len(files) == 1 else None)).strip()
    return str(Path(answer).expanduser()) if answer.startswith("~") else answer


def write_config(answers: Answers, out: Path) -> str:
    """Write a validated configuration to the new file ``out``, and return what to do next.

    Raises `ConfigError` if ``out`` exists, or if a value cannot be used; nothing is written then.
    """
    if not Path(answers.cluster).is_file():
        raise ConfigError(
            f"--cluster: {answers.cluster!r} is not a file. Write one for a Slurm cluster with `shardmake doctor "
            "--node --write FILE`, or name config/clusters/local.yaml, for this machine without a GPU."
        )
    cluster = load_cluster(Path(answers.cluster))
    if answers.source is None:
        run, notes, remarks = *_new_run(answers, cluster.processes_per_node), []
    else:
        made = translate(answers.source, cluster.processes_per_node, answers.objective)
        run, notes, remarks = _translated(made.run, answers), {}, list(_untranslated(made))
        notes["global_batch_size"] = f"for {plural(cluster.processes_per_node, 'GPU')}: the file has those of one"
    name = answers.name or re.sub(r"[^A-Za-z0-9._-]+", "-", Path(run["model"]).name).strip("-._").lower() or "run"
    text = _as_text({"cluster": answers.cluster, "runs": {name: run}}, _NOTES | notes, remarks)
    check_inputs(name, parse_config(parse_yaml(text), str(out)).runs[name])
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        with out.open("x") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(f"--out: {str(out)!r} exists, and init never overwrites. Name another file.") from None
    option = "" if str(out) == DEFAULT_CONFIG else f" --configfile {shlex.quote(str(out))}"
    listed = "".join(f"{line}\n" for line in remarks)
    return (
        f"Wrote {out}: the run {name}.\n{listed}Run this next. It checks everything and queues nothing:\n"
        f"  shardmake run plan{option}"
    )


def write_demo(out: Path) -> str:
    """Write the configuration of the demo to ``out``, and return what to do next."""
    with (PROJECT / DEFAULT_CONFIG).open() as source:
        out.write_text("".join(line for line in source if "$schema" not in line))
    return f"Wrote {out}. This trains, merges, evaluates and pushes the demo's model:\n  shardmake run"


def _new_run(answers: Answers, ranks: int) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the keys of a run, and notes beside them."""
    objective, method, length = answers.objective or "sft", answers.method or DEFAULT_METHOD, _length_of(answers.model)
    spec = OBJECTIVES[objective]
    size, notes = _batch(answers.data, None if spec.trl else length, ranks * spec.least_micro_batch)
    rate = METHODS[method].learning_rate * (_PREFERENCE_RATE if spec.has_reference else 1)
    return {
        "model": answers.model,
        "data": {"train": answers.data},
        **({"objective": objective} if objective != "sft" else {}),
        "method": method,
        "sequence_length": length,
        **size,
        "learning_rate": float(f"{rate:g}"),
    }, notes


def _translated(run: dict[str, Any], answers: Answers) -> dict[str, Any]:
    """Return a translated run with the answers in place."""
    given = {"model": answers.model, "data.train": answers.data, "method": answers.method or ""}
    run = overlay(run, {key: value for key, value in given.items() if value})
    named = {"--model": run.get("model"), "--data": run.get("data", {}).get("train")}
    missing = [option for option, found in named.items() if not found]
    if missing:
        raise ConfigError(f"{answers.source} does not say what {' and '.join(missing)} is. Add the option.")
    data = run["data"]
    for key in ("train", "eval"):
        if isinstance(data.get(key), list) and data[key] == [{"source": data[key][0]["source"]}]:
            data[key] = data[key][0]["source"]
    keys = ("model", "data", "objective", "method", "lora")  # the order of a configuration that a person writes
    return {key: run[key] for key in (*keys, *run) if key in run}


def _as_text(config: Mapping[str, Any], notes: Mapping[str, str], remarks: Sequence[str]) -> str:
    """Return a configuration as YAML, with the note of each key and ``remarks`` as comments."""
    lines = [_HEAD, *(f"# {remark}" for remark in remarks)]
    for line in yaml.safe_dump(config, sort_keys=False, allow_unicode=True, width=10_000).splitlines():
        note = notes.get(line.strip().partition(":")[0])
        lines.append(f"{line} # {note}" if note else line)
    return "\n".join([*lines, '    # push: {to: "hub:org/name"} # private unless configured otherwise\n'])


def _length_of(model: str) -> int:
    """Return the tokens per sequence; the plan reports a model folder that cannot be read."""
    try:
        positions = json.loads((Path(model) / "config.json").read_text()).get("max_position_embeddings")
    except (OSError, ValueError, AttributeError):
        return _LENGTH
    return min(_LENGTH, positions) if isinstance(positions, int) and positions > 0 else _LENGTH


def _batch(data: str, length: int | None, ranks: int) -> tuple[dict[str, int], dict[str, str]]:
    """Return the batch and the epochs that give data of a known size `_STEPS` optimizer steps, and a note of them.

    A sequence has ``length`` tokens of packed examples; None: it is a row.
    """
    try:
        paths = locate(data, Data(train=data), TRAIN_SPLITS).paths
    except DataError:  # on the hub or behind a URL
        paths = ()
    most = batch_for(_BATCH, 1, ranks) or ranks
    if not paths or any(path.suffix not in _TEXT for path in paths):
        return {"global_batch_size": most, "epochs": 1}, {}
    size = sum(path.stat().st_size for path in paths)
    sequences = max(1, size // (_BYTES_PER_TOKEN * length) if length else sum(1 for _ in raw_rows(paths)))
    batch = min(most, batch_for(sequences, _STEPS, ranks) or ranks)
    epochs = min(_EPOCHS, math.ceil(_STEPS / optimizer_steps(1, sequences, batch)))
    steps = optimizer_steps(epochs, sequences, batch)
    return {"global_batch_size": batch, "epochs": epochs}, {"epochs": f"about {plural(steps, 'optimizer step')}"}


_ADVICE: Final = {
    "beta": " (give --objective dpo or kto)",
    "warmup_steps": " (set warmup_ratio to these steps divided by those that the plan prints)",
}


def _untranslated(made: Translation) -> Iterator[str]:
    """Yield lines for what the run does not have from the file."""
    if made.planned:
        yield f"The plan decides instead of {', '.join(made.planned)}."
    if made.assumed:
        values = ", ".join(f"{key}: {json.dumps(value)}" for key, value in made.assumed.items())
        yield f"Not in the file, taken for the defaults of {made.tool}; compare them with your version: {values}."
    if made.untranslated:
        yield "Not translated, and may change the result:"
        for key, value in made.untranslated.items():
            yield f"  {key}: {json.dumps(value, default=str)}{_ADVICE.get(key, '')}"
