"""Steps whose layers loop over their tokens are traced with few tokens and scaled."""

import json
from pathlib import Path
from typing import Any

import pytest

from shardmake.memory import token_loops, trace
from shardmake.memory.closed_form import of_events
from shardmake.memory.read_config import from_config
from shardmake.memory.token_loops import LENGTHS, found_in, scaled_to
from shardmake.memory.trace import _request, traced_tokens
from tests.unit.memory.llama_8b import scenario
from tests.unit.memory.test_parameter_inventory import SIZES

Patch = pytest.MonkeyPatch

MAMBA = {"model_type": "mamba", "vocab_size": 320, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 16}


def step(tokens: int, *, more: int = 0) -> list[list[Any]]:
    """A step with one layer: a constant, a linear and a quadratic tensor, and 100 bytes for each token."""
    sizes = [5000, 7 * tokens + 11, 3 * tokens * tokens, *[100] * tokens, *[9] * more]
    allocations = [["alloc", number, size, "aten.mul.Tensor"] for number, size in enumerate(sizes)]
    return [["forward", 0], *allocations, ["forward end", 0]]


def test_the_bytes_of_each_allocation_follow_from_three_short_steps() -> None:
    events = scaled_to(4096, [step(length) for length in LENGTHS])
    assert events is not None
    constant, linear, quadratic, *loop = [event[2] for event in events if event[0] == "alloc"]
    assert (constant, linear, quadratic) == (5000, 7 * 4096 + 11, 3 * 4096**2)
    assert len(loop) == LENGTHS[-1] and sum(loop) == pytest.approx(100 * 4096, rel=0.01)


def test_many_tensors_of_one_size_that_are_as_many_in_each_step_are_no_loop() -> None:
    traces = [step(length, more=64) for length in LENGTHS]
    events = scaled_to(4096, traces)
    assert events is not None and [event[2] for event in events if event[0] == "alloc"][-64:] == [9] * 64
    assert found_in(traces) and not found_in([step(1, more=64) for _ in LENGTHS])


def test_sizes_of_other_operators_are_not_counted_as_those_of_a_loop() -> None:
    """With some lengths the size of a tensor is by chance that of the loop, or its number is that of other tensors."""
    traces = [[*step(length)[:-1], ["alloc", -1, 100, "aten.cat.default"], step(1)[-1]] for length in LENGTHS]
    traces[0][-2][2] = 90
    events = scaled_to(4096, traces)
    assert events is not None and len(events) == len(traces[-1])


def test_a_layer_without_a_loop_over_tokens_has_a_tape_for_every_micro_batch(tracer: Any, monkeypatch: Patch) -> None:
    request = _request(
        scenario(
            model=from_config({**SIZES, "model_type": "llama"}), sequence_length=48, attention="sdpa", micro_batch=2
        )
    )
    ordinary = tracer.tape({**request, "lengths": 1})
    monkeypatch.setattr(token_loops, "MOST_ALIKE", 1)
    assert tracer.tape({**request, "lengths": 1}) == ordinary and ordinary["lengths"] == [48]


def test_short_steps_that_differ_are_not_scaled() -> None:
    assert scaled_to(4096, [step(length, more=length == LENGTHS[1]) for length in LENGTHS]) is None


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
def test_a_scaled_step_has_the_peaks_of_the_whole_one(checkpointing: bool, tracer: Any, monkeypatch: Patch) -> None:
    case = scenario(from_config(MAMBA), sequence_length=48, attention="sdpa", checkpointing=checkpointing)
    whole = of_events(tracer.trace(_request(case)), 2)
    monkeypatch.setattr(token_loops, "MOST_ALIKE", 32)
    tape = tracer.tape({**_request(case), "lengths": 1})
    assert tape["scaled"] == LENGTHS[-1]
    assert of_events(tape["events"], 2) == pytest.approx(whole, rel=0.01)


def test_an_estimate_names_the_tokens_of_a_scaled_trace(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tapes = {"mamba": LENGTHS[-1], "gpt2": None}

    def run_helper(_name: str, asked: Any, _doing: str) -> None:
        for step in asked["requests"]:
            scaled = tapes[step["config"]["model_type"]]
            Path(step["general"]).parent.mkdir(parents=True, exist_ok=True)
            tape = {"lengths": [step["sequence_length"]], "scaled": scaled, "events": []}
            Path(step["general"]).write_text(json.dumps(tape))

    monkeypatch.setattr(trace, "run_helper", run_helper)
    gpt2 = {"model_type": "gpt2", "vocab_size": 320, "n_embd": 64, "n_layer": 2, "n_head": 2}
    found = [traced_tokens(scenario(model=from_config(config), micro_batch=1)) for config in (MAMBA, gpt2)]
    assert found == [LENGTHS[-1], None] and traced_tokens(scenario()) is None
