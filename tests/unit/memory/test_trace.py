"""Traces of transformers' own code: any architecture, and a few layers unrolled to all."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardmake.config.models import Lora
from shardmake.memory import trace
from shardmake.memory.buckets import Buckets
from shardmake.memory.closed_form import of_events
from shardmake.memory.decoder import micro_step
from shardmake.memory.estimate import gpu_memory
from shardmake.memory.model import split
from shardmake.memory.read_config import from_config
from shardmake.memory.stand_in import stand_in
from shardmake.memory.trace import _prefix, _request, failure, size_at
from shardmake.memory.unroll import kept_layers, neighborhoods, unrolled
from shardmake.plan.candidates import choices
from shardmake.plan.planner import Planner
from shardmake.plan.resolve import resolve
from shardmake.plan.verdict import STAND_IN, error_of
from tests.plan_in_process import plan_in_this_process
from tests.unit.memory.test_decoder import AUTOCAST, SIZES, agree, gradients, saved, scenario
from tests.unit.memory.test_every_model_type import in_this_process
from tests.unit.memory.test_parameter_inventory import OTHERS
from tests.unit.plans import LLAMA, make_cluster, make_run


@pytest.mark.parametrize("config", [config for config, _ in OTHERS], ids=lambda config: config["model_type"])
def test_any_architecture_can_be_traced(config: dict[str, Any], tracer: Any) -> None:
    """Encoders, encoder-decoders, mixtures of experts: marks for each layer and a gradient for each weight."""
    model = from_config(config)
    case = scenario(model=model, split=split(model, "full"), sequence_length=32, attention="sdpa", masked=True)
    events = tracer.trace(_request(case))
    blocks = len(model.blocks)
    assert [event[1] for event in events if event[0] == "forward"] == list(range(blocks))
    assert gradients(events) >= {tensor.name for tensor in model.tensors if tensor.block is not None} - UNUSED
    assert gpu_memory(replace(case, strategy="zero3", ranks_per_node=2), Buckets(4096), events).allocated > 0
    matrices = {tensor.name for tensor in model.tensors if tensor.block is not None and len(tensor.shape) == 2}
    assert gradients(stand_in(case)) >= matrices, "a step that could not be traced"


@pytest.fixture
def here(tracer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, of traces in this process."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(trace, "run_helper", in_this_process)
    return tmp_path


FAILING: dict[str, tuple[dict[str, Any], str]] = {
    "raises": ({"model_type": "deepseek_v2", "num_experts_per_tok": None}, "its code raised TypeError"),
    "takes sizes from values": ({"model_type": "jetmoe", "kv_channels": 16}, "takes sizes from the values of tensors"),
}


@pytest.mark.parametrize("name", FAILING)
def test_a_step_that_cannot_be_traced_is_estimated_with_a_margin(name: str, here: Path) -> None:
    """JetMoE counts the tokens of each expert."""
    config, words = FAILING[name]
    case = scenario(model=from_config({**SIZES, **config}), sequence_length=32, attention="sdpa")
    assert words in str(failure(case)) and "No other attention kernel helped" in str(failure(case))
    assert error_of(case) == STAND_IN
    events = trace.events_of(case)
    assert of_events(events, 2).forward > 0
    assert gpu_memory(replace(case, strategy="zero3", ranks_per_node=2), Buckets(4096), events).allocated > 0


def test_the_message_names_a_kernel_that_works(here: Path) -> None:
    """Sparse attention indexes the mask that FlashAttention does not have."""
    model = from_config({"model_type": "deepseek_v32", **SPARSE})
    flash, sdpa = (
        scenario(model=model, sequence_length=32, attention=kernel, masked=kernel == "sdpa")
        for kernel in ("flash", "sdpa")
    )
    assert "With --attention sdpa" in str(failure(flash)) and failure(sdpa) is None


SPARSE = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 320,
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 16, "head_dim": 8, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 16, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
}  # fmt: skip


LEVERS: dict[str, dict[str, Any]] = {
    "chunked loss": {"loss": "chunked"}, "fused loss": {"loss": "fused"},
    "inputs of layers on the host": {"checkpointing": True, "activation_offload": True},
    "shared sequences": {"sequence_parallel": 2}, "preferences": {"log_probs": True, "extra_forwards": 1},
    "preferences with lora under autocast": {"log_probs": True, "extra_forwards": 1, "method": "lora", **AUTOCAST},
}  # fmt: skip


@pytest.mark.parametrize("name", LEVERS)
def test_a_trace_has_the_memory_of_the_simulated_lever(name: str, tracer: Any) -> None:
    """On a Llama, for which both exist. Liger's layers are not traced: their plain form is an upper bound."""
    case = scenario(**LEVERS[name])
    traced, simulated = tracer.trace(_request(case)), micro_step(case)
    if case.loss == "fused":
        assert saved(traced) > saved(simulated)
        return
    agree(traced, simulated, saves=5e-3)
    assert gradients(traced) == gradients(simulated)


def test_a_model_without_layers_of_attention_is_traced_without_a_cache(tracer: Any) -> None:
    """As in training: Bamba's cache asks for a layer of attention."""
    model = from_config({**SIZES, "model_type": "bamba", "mamba_n_heads": 8, "mamba_d_head": 256})
    case = scenario(model=model, sequence_length=32, attention="sdpa")
    assert of_events(tracer.trace(_request(case)), 2).forward > 0


def _moe(count: int, **more: Any) -> dict[str, Any]:
    sizes = {"hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": count, "head_dim": 16}
    return {**SIZES, **sizes, **more}


KINDS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 64, "n_layer": 7, "n_head": 4},
    "mixtral": _moe(7, num_local_experts=4),
    "olmo3": _moe(9, layer_types=(["sliding_attention"] * 2 + ["full_attention"]) * 3),
    "qwen2_moe": _moe(9, num_experts=4, moe_intermediate_size=32, mlp_only_layers=[0, 1, 2]),
}


@pytest.mark.parametrize(("kind", "more"), [
    ("gpt2", {"method": "lora"}), ("gpt2", {"checkpointing": True}), ("mixtral", {"method": "lora"}), ("olmo3", {}),
    ("qwen2_moe", {"checkpointing": True}), ("olmo3", {"loss": "chunked", "extra_forwards": 1}),
], ids=str)  # fmt: skip
def test_a_few_layers_unroll_to_the_full_trace(kind: str, more: dict[str, Any], tracer: Any) -> None:
    """Event for event, but for the order of those that fall together and the numbers."""
    model = from_config({**KINDS[kind], "model_type": kind, "vocab_size": 320})
    count = len(model.blocks)
    case = scenario(model=model, sequence_length=32, **more)
    request = _request(case)
    assert request["layers"] is not None and len(request["layers"]) < count
    grown = unrolled(tracer.trace(request), request["layers"], model.kinds, _prefix(model))
    whole = tracer.trace({**request, "layers": None})
    assert grown is not None and sorted(map(plain, grown)) == sorted(map(plain, whole))
    assert of_events(grown, count) == of_events(whole, count)


@pytest.mark.parametrize(
    "kinds", ["AAAAAAAA", "AAABBBBBBB", "ABABABAB", "AAABAAABAAABAAAB", "AAAAABAAAAABAA", "AB", "ABCDEF"]
)
def test_the_kept_layers_have_every_neighborhood(kinds: str) -> None:
    numbers = [kinds.index(kind) for kind in kinds]
    kept = kept_layers(numbers) or list(range(len(numbers)))
    assert {*neighborhoods([numbers[layer] for layer in kept])} >= {*neighborhoods(numbers)} and len(kept) <= 9


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_a_tape_gives_the_events_of_other_sizes(rows: int, tracer: Any) -> None:
    model = from_config({"model_type": "gpt2", "vocab_size": 320, **KINDS["gpt2"]})
    request = _request(scenario(model=model, sequence_length=2048, micro_batch=rows, attention="eager"))
    tape = tracer.tape({**request, "lengths": 3})
    shorter = tracer.trace({**request, "sequence_length": 896})
    assert tape["lengths"] == [512, 1024, 2048]
    sizes = [event[2] if isinstance(event[2], list) else [event[2]] for event in tape["events"] if event[0] == "alloc"]
    found = [size_at(tuple(one), tape["lengths"], rows, 896) if len(one) > 1 else one[0] for one in sizes]
    assert found == [event[2] for event in shorter if event[0] == "alloc"]


def test_what_a_model_makes_in_its_first_step_alone_is_not_in_a_tape(tracer: Any) -> None:
    """CTRL converts its table of positions when it runs first, and keeps it."""
    sizes = {"vocab_size": 320, "n_embd": 64, "n_layer": 2, "n_head": 4, "dff": 128, "n_positions": 64}
    case = scenario(model=from_config({"model_type": "ctrl", **sizes}), sequence_length=32, attention="eager")
    first, second = tracer._steps(_request(case), [(1, 32)] * 2)
    assert first == second


@pytest.mark.parametrize("tied", [True, False])
def test_rows_of_tokens_are_estimated(tied: bool, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PEFT copies the embedding and the head in each forward pass, and the gradient of the head's copy is as large."""
    plan_in_this_process(monkeypatch)
    config = {**LLAMA, "vocab_size": 32_000, "tie_word_embeddings": tied}
    (here / "config.json").write_text(json.dumps(config))
    run = make_run(model=str(here), method="lora", nodes=1, strategy="ddp", attention="sdpa")
    cluster = make_cluster(accelerator="h100")
    plain = resolve(run, cluster)
    settings = [plain, resolve(run.model_copy(update={"lora": Lora(train_tokens=["a", "b"])}), cluster)]
    choice = next(iter(choices(plain)))
    before, after = (Planner(one).simulate(choice).memory.gpu.allocated for one in settings)
    width, head = LLAMA["hidden_size"], 2 * 32_000 * LLAMA["hidden_size"]
    assert settings[1].split.trainable - plain.split.trainable == 2 * width * (2 - tied)
    assert head <= after - before <= 4 * head


def plain(event: Any) -> str:
    """An event without its storage's number."""
    return repr((event[0], *event[2:]) if event[0] in ("alloc", "free", "grad") else tuple(event))


def test_a_model_with_different_layers_is_not_unrolled() -> None:
    config = {**SIZES, "model_type": "llama", "num_hidden_layers": 8}
    events = micro_step(scenario(config))
    prefix = "model.layers."
    two = [list(event) for event in events if not (event[0] == "grad" and f"{prefix}2." in event[2])]
    assert unrolled(two, range(8), [0] * 8, prefix) is None


# T5's relative attention bias is an embedding that the stand-in for fused attention does not read.
UNUSED = {f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight" for side in ("encoder", "decoder")}
