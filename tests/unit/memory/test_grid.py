"""A grid of trainings: the plan's memory against a trace of the whole step, with transformers' own code.

A plan takes the step of a family that is written down from `decoder`, and of others from a trace of a few layers. Here
all layers are traced, and the training library is replayed on both. Three cells run always, the others with
``make test-models``.
"""

import json
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest

from shardmake.config.strategies import STRATEGY_SPECS
from shardmake.memory import cache as helpers
from shardmake.memory import closed_form, trace
from shardmake.memory.buckets import Buckets
from shardmake.memory.ddp import StepEvents
from shardmake.memory.decoder import weight_bytes
from shardmake.memory.estimate import estimate_closed_form, simulate
from shardmake.memory.model import Model
from shardmake.memory.read_config import from_config
from shardmake.memory.scenario import Scenario
from shardmake.memory.trace import events_of
from tests.unit.memory.llama_8b import scenario
from tests.unit.memory.test_every_model_type import in_this_process

Cell = tuple[str, str, str, bool]  # family, strategy, method, checkpointing
SIZES = {
    "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 5, "num_attention_heads": 16,
    "num_key_value_heads": 8, "vocab_size": 32000, "max_position_embeddings": 2048,
}  # fmt: skip
"""More layers than are traced of a model whose layers are alike, and tensors that are large beside a segment."""
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {}, "mistral": {}, "qwen2": {"tie_word_embeddings": True}, "qwen3": {"head_dim": 128},
    "gemma": {"head_dim": 128}, "granite": {"architectures": ["GraniteForCausalLM"], "tie_word_embeddings": True},
    "mixtral": {"architectures": ["MixtralForCausalLM"], "num_local_experts": 4},
    "gpt_neox": {"architectures": ["GPTNeoXForCausalLM"]},
}  # fmt: skip
STRATEGIES = ("ddp", "zero1", "zero2", "zero2-offload", "zero3", "zero3-offload", "fsdp", "fsdp-offload")
METHODS = ("full", "lora", "qlora")
TARGETS = {("mixtral", "qlora"): ("q_proj", "v_proj")}
BUCKETS = Buckets(2048**2, int(0.9 * 2048**2), 20480)
ALWAYS = (("mixtral", "zero3", "lora", True), ("gemma", "ddp", "qlora", False), ("granite", "fsdp", "full", True))
ALLOCATED = 0.01
RESERVED = 0.03
SEGMENTS = 4
"""The peak of the cache differs by some segments if blocks are taken in another order: here by up to four of the size
of the largest weight, at the sizes of an 8B model by 0.5 %, and by 6 % under ZeRO-1."""
TOO_LOW, TOO_HIGH = -0.06, 0.28
"""The closed form counts all gradients with the activations of any layer, and under FSDP those of experts twice. A
candidate that it finds up to 1.4 times as large as the GPU is simulated, as is every one that it finds small enough."""


def _cells() -> Iterator[Any]:
    """Yield all cells but those that a plan refuses."""
    for family in FAMILIES:
        for strategy in STRATEGIES:
            for method in METHODS:
                if method == "qlora" and not STRATEGY_SPECS[strategy].four_bits:  # type: ignore[index]
                    continue
                for checkpointing in (True, False):
                    cell = (family, strategy, method, checkpointing)
                    name = "-".join([*cell[:3], *(["checkpointing"] if checkpointing else [])])
                    yield pytest.param(cell, id=name, marks=() if cell in ALWAYS else pytest.mark.models)


@cache
def _model(family: str) -> Model:
    return from_config({**SIZES, "model_type": family, **FAMILIES[family]})


def _scenario(cell: Cell) -> Scenario:
    family, strategy, method, checkpointing = cell
    targets, model = TARGETS.get((family, method), "all-linear"), _model(family)
    return scenario(
        model, strategy=strategy, ranks_per_node=4, method=method, lora_targets=targets, checkpointing=checkpointing
    )


def _second_gradient(case: Scenario) -> int:
    """Return the bytes that a trace has too many if a weight gets two gradients, from the head and as an embedding.

    Autograd adds the second in place, but never with fake tensors. Of traced families both sides have it.
    """
    tied = case.model.decoder is not None and case.model.tied and case.method == "full"
    return tied * weight_bytes(case) * case.model.head


@pytest.fixture(scope="module")
def whole_step(tracer: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Scenario], StepEvents]]:
    """Return the trace of all layers of a scenario, which many strategies share."""
    known: dict[str, StepEvents] = {}

    def trace_all_layers(case: Scenario) -> StepEvents:
        request = {**trace._request(case), "layers": None}
        key = json.dumps(request, sort_keys=True)
        if key not in known:
            known[key] = tracer.trace(request)
        return known[key]

    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patched.setattr(helpers, "run_helper", in_this_process)
        patched.setattr(trace, "run_helper", in_this_process)
        yield trace_all_layers


@pytest.mark.parametrize("cell", _cells())
def test_the_plan_has_the_memory_of_the_whole_trace(cell: Cell, whole_step: Callable[[Scenario], StepEvents]) -> None:
    case = _scenario(cell)
    planned, traced = (simulate(case, BUCKETS, events) for events in (events_of(case), whole_step(case)))
    scanned = estimate_closed_form(case, BUCKETS, closed_form.profile(case))
    more = _second_gradient(case)
    allocated, expected = (one.peaks[one.highest()].total for one in (planned, traced))
    assert allocated == pytest.approx(expected, rel=ALLOCATED, abs=more)
    reserved = traced.reserved()
    largest = weight_bytes(case) * max(tensor.numel for tensor in case.model.tensors)
    assert planned.reserved() == pytest.approx(reserved, abs=max(RESERVED * reserved, SEGMENTS * largest) + more)
    assert TOO_LOW <= scanned.gpu.allocated / allocated - 1 <= TOO_HIGH
