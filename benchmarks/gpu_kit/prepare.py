"""Prepare every case without a GPU: inputs, descriptions of the models, data, plans and rendered files.

A folder that was prepared on one machine can be moved to another: its configurations name relative paths. Only the
weights are missing, which `write_missing_weights` makes in seconds.
"""

import contextlib
import json
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from benchmarks.gpu_kit.cases import SHAPES, Case, keys_of, shape_of
from benchmarks.gpu_kit.machine import Machine
from shardmake.cli import stages
from shardmake.core.atomic import write_json
from shardmake.core.environment import checkout_commit
from shardmake.core.errors import ShardmakeError
from shardmake.core.library_process import one_library_process
from shardmake.demo import make_preferences
from shardmake.demo.random_model import write_description, write_weights
from shardmake.doctor.trainings import write_config

CLUSTER = "config/cluster.yaml"
COMMIT = "commit.json"
FAILED = "failed.json"
"""Why cases could not be prepared, by name."""
_CONVERSATIONS = (20, 90)
"""Fewest and most of the demo's conversations that become one: about 1,500 tokens in the mean."""
_ROUNDS = 3


def prepare(work: Path, machine: Machine, cases: Sequence[Case]) -> dict[str, str]:
    """Prepare ``cases`` in the new folder ``work`` for ``machine``; return why cases failed, by name."""
    make_preferences(work / "inputs")
    join_conversations(work / "inputs/train.jsonl")
    for shape in {shape_of(case, machine) for case in cases}:
        write_description(
            work / "inputs/base", work / "bases" / shape, {"max_position_embeddings": 40960} | SHAPES[shape]
        )
    write_json(work / CLUSTER, machine.cluster())
    write_json(work / COMMIT, checkout_commit())
    failed: dict[str, str] = {}
    with one_library_process(), contextlib.chdir(work):
        for case in (case for case in cases if not case.program):
            begun = time.monotonic()
            config = [write_config(Path(), case.name, CLUSTER, keys_of(case, machine))]
            try:
                for stage in (stages.data, stages.plan, stages.render):
                    stage(case.name, config=config)
            except ShardmakeError as error:
                failed[case.name] = str(error)
            print(f"{case.name}: {failed.get(case.name, 'prepared')} ({time.monotonic() - begun:.1f} s)", flush=True)
    write_json(work / FAILED, failed)
    return failed


def join_conversations(path: Path) -> None:
    """Make long conversations of the demo's short ones, so that a sequence has a few examples instead of a hundred."""
    rng, found = random.Random(1), []
    lines = [json.loads(line)["messages"] for line in path.read_text().splitlines()]
    for _ in range(_ROUNDS):
        rng.shuffle(lines)
        rest = list(lines)
        while rest:
            count = rng.randint(*_CONVERSATIONS)
            joined = [message for messages in rest[:count] for message in messages]
            found.append(json.dumps({"messages": joined}) + "\n")
            rest = rest[count:]
    path.write_text("".join(found))


def write_missing_weights(work: Path, shapes: Iterable[str]) -> Iterator[str]:
    """Write the weights of each shape that has none yet, and yield its name when they are there."""
    for shape in shapes:
        folder = work / "bases" / shape
        mark = folder / ".weights"
        if not mark.exists():
            write_weights(folder)
            mark.touch()
        yield shape
