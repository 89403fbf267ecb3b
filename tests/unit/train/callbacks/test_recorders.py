"""Recorded steps of rank 0."""

import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardmake.config.models import Profile
from shardmake.train.callbacks.recorders import Recorder, step_profiler


def run_steps(recorder: Recorder, first: int, last: int, *, stop: bool = False) -> None:
    weight = torch.ones(4, 4, requires_grad=True)
    for step in range(first - 1, last):
        state: Any = SimpleNamespace(global_step=step)
        recorder.on_step_begin(None, state, None)
        (weight @ weight).sum().backward()
        state.global_step += 1
        control = SimpleNamespace(should_training_stop=stop and step == last - 1)
        recorder.on_step_end(None, state, control)


@pytest.mark.parametrize(("first", "last", "stop", "name"), [
    (1, 9, False, "trace-steps-5-6.json.gz"), (6, 9, False, "trace-steps-6-6.json.gz"),
    (1, 5, True, "trace-steps-5-5.json.gz"), (7, 9, False, None),
])  # fmt: skip
def test_the_steps_are_in_a_whole_trace(tmp_path: Path, first: int, last: int, stop: bool, name: str | None) -> None:
    """A training may be resumed or stopped between the two."""
    run_steps(step_profiler(tmp_path, Profile(first_step=5, steps=2)), first, last, stop=stop)
    assert [path.name for path in tmp_path.iterdir()] == ([name] if name else [])
    if name:
        events = json.loads(gzip.decompress((tmp_path / name).read_bytes()))["traceEvents"]
        assert sum(event.get("name") == "aten::mm" for event in events) >= 3, "forward and both gradients"
