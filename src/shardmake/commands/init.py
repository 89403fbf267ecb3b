"""``shardmake init``: a configuration with one run, from a model, data and a cluster file."""

import json
import math
import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import typer

from shardmake.commands.workflow import DEFAULT_CONFIG, LOCAL_CLUSTER
from shardmake.config.inputs import check_inputs
from shardmake.config.load import load_cluster, parse_config
from shardmake.config.methods import METHODS
from shardmake.config.models import Data, Method
from shardmake.config.parse_text import parse_yaml
from shardmake.core.environment import PROJECT
from shardmake.core.errors import ConfigError, DataError
from shardmake.core.units import plural
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
_TEXT: Final = (".jsonl", ".json", ".csv", ".tsv")
_BYTES_PER_TOKEN: Final = 4
"""Of such a file; what the format adds to the text is about what a chat template adds."""
_TEMPLATE: Final = """\
# Written by `shardmake init`. config/README.md of Shardmake explains every key; the plan chooses what is not set here.
cluster: {cluster}
runs:
  {name}:
    model: {model}
    data:
      train: {data}
    method: {method}
    sequence_length: {length} # longer conversations are truncated
    global_batch_size: {batch} # sequences per optimizer step, the same for any number of GPUs
    epochs: {epochs}{steps}
    learning_rate: {learning_rate}
    # push: {{to: "hub:org/name"}} # private unless configured otherwise
"""


@dataclass(frozen=True)
class Answers:
    """The choices for a new configuration."""

    model: str
    data: str
    cluster: str
    name: str
    """Empty: made from the model's name."""
    method: Method


def ask(flags: Mapping[str, str]) -> dict[str, str]:
    """Return the model, the data and the cluster file: from ``flags``, or else from the person at the terminal.

    Raises `ConfigError` if one is missing and there is no terminal.
    """
    missing = [f"--{key}" for key in _QUESTIONS if not flags[key]]
    if missing and not sys.stdin.isatty():
        raise ConfigError(f"init: {', '.join(missing)} is missing. There is no terminal to ask. Add the option.")
    return {key: flags[key] or _ask(key) for key in _QUESTIONS}


def _ask(key: str) -> str:
    files = sorted(map(str, CLUSTERS.glob("*.yaml"))) or [str(LOCAL_CLUSTER)] if key == "cluster" else []
    if files:
        typer.echo(f"Cluster files: {', '.join(files)}")
    answer: str = typer.prompt(_QUESTIONS[key], default=files[0] if len(files) == 1 else None)
    return answer.strip()


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
    name = answers.name or _run_name(answers.model)
    length = _sequence_length(answers.model)
    text = _TEMPLATE.format(
        cluster=_quoted(answers.cluster),
        name=_quoted(name),
        model=_quoted(answers.model),
        data=_quoted(answers.data),
        method=answers.method,
        length=length,
        **_batch(answers.data, length, cluster.processes_per_node),
        learning_rate=METHODS[answers.method].learning_rate,
    )
    check_inputs(name, parse_config(parse_yaml(text), str(out)).runs[name])
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        with out.open("x") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(f"--out: {str(out)!r} exists, and init never overwrites. Name another file.") from None
    option = "" if str(out) == DEFAULT_CONFIG else f" --configfile {shlex.quote(str(out))}"
    return (
        f"Wrote {out}: the run {name}.\nRun this next. It checks everything and queues nothing:\n"
        f"  shardmake run plan{option}"
    )


def write_demo(out: Path) -> str:
    """Write the configuration of the demo to ``out``, and return what to do next."""
    with (PROJECT / DEFAULT_CONFIG).open() as source:
        out.write_text("".join(line for line in source if "$schema" not in line))
    return f"Wrote {out}. This trains, merges, evaluates and pushes the demo's model:\n  shardmake run"


def _run_name(model: str) -> str:
    """Return a name for the run that a folder can have, made from the last part of the model's name."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", Path(model).name).strip("-._").lower() or "run"


def _sequence_length(model: str) -> int:
    """Return the tokens per sequence; the plan reports a model folder that cannot be read."""
    try:
        positions = json.loads((Path(model) / "config.json").read_text()).get("max_position_embeddings")
    except (OSError, ValueError, AttributeError):
        return _LENGTH
    return min(_LENGTH, positions) if isinstance(positions, int) and positions > 0 else _LENGTH


def _batch(data: str, length: int, ranks: int) -> dict[str, str]:
    """Return the batch and the epochs that give data of a known size `_STEPS` optimizer steps, and a note of them."""
    try:
        paths = locate(data, Data(train=data), TRAIN_SPLITS).paths
    except DataError:  # on the hub or behind a URL
        paths = ()
    if not paths or any(path.suffix not in _TEXT for path in paths):
        return {"batch": str(_BATCH), "epochs": "1", "steps": ""}
    sequences = max(1, sum(path.stat().st_size for path in paths) // (_BYTES_PER_TOKEN * length))
    batch = min(_BATCH, batch_for(sequences, _STEPS, ranks) or ranks)
    epochs = min(_EPOCHS, math.ceil(_STEPS / optimizer_steps(1, sequences, batch)))
    steps = optimizer_steps(epochs, sequences, batch)
    return {"batch": str(batch), "epochs": str(epochs), "steps": f" # about {plural(steps, 'optimizer step')}"}


def _quoted(text: str) -> str:
    """Return text as YAML reads it back unchanged."""
    return text if re.fullmatch(r"[A-Za-z_/][\w./-]*", text) and parse_yaml(text) == text else json.dumps(text)
