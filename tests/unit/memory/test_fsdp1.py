"""The order in which FSDP1 loads, against torch's own code with two ranks that do not communicate."""

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from peft.utils.other import fsdp_auto_wrap_policy
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, _runtime_utils
from torch.distributed.fsdp._flat_param import FlatParamHandle
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from shardmake.memory import closed_form, states
from shardmake.memory.estimate import estimate_closed_form, events_of, simulate
from shardmake.memory.fsdp1 import LOADING, ROOT, Fsdp1Memory, flat_weights
from shardmake.memory.model import ParameterSpec, split
from shardmake.memory.read_config import from_config
from shardmake.memory.scenario import LibraryBehavior, Scenario
from shardmake.memory.timeline import CAST, Timeline
from tests.unit.memory.llama_8b import BUCKETS, MODEL, scenario

TINY = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 160, "max_position_embeddings": 64,
}  # fmt: skip
TARGETS = ("q_proj", "v_proj")


@pytest.fixture
def two_ranks() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def _tiny(method: str) -> Scenario:
    model = from_config(TINY)
    parts = split(model, method, 8, TARGETS)
    return scenario(
        model, split=parts, method=method, strategy="fsdp", fsdp_version=1, ranks_per_node=2, sequence_length=32,
        checkpointing=False, lora_targets=TARGETS, lora_rank=8,
    )  # fmt: skip


def _model(method: str) -> nn.Module:
    values = {key: value for key, value in TINY.items() if key != "model_type"}
    model = LlamaForCausalLM(LlamaConfig(**values, tie_word_embeddings=False)).to(torch.bfloat16)
    if method == "full":
        return model
    return get_peft_model(model, LoraConfig(r=8, target_modules=list(TARGETS), task_type="CAUSAL_LM"))


def _wrap(model: nn.Module, method: str) -> FullyShardedDataParallel:
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={LlamaDecoderLayer})
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=policy if method == "full" else fsdp_auto_wrap_policy(model),
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )


@pytest.mark.parametrize("method", ["full", "lora"])
def test_torch_makes_the_same_flat_weights_in_the_same_order(
    method: str, two_ranks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[tuple[list[int], int]] = []
    shard = FlatParamHandle.shard

    def record(handle: FlatParamHandle) -> None:
        shard(handle)
        found.append((sorted(handle.flat_param._numels), handle.flat_param.element_size()))

    monkeypatch.setattr(FlatParamHandle, "shard", record)
    _wrap(_model(method), method)
    flats = [flat for flats in flat_weights(_tiny(method)).values() for flat in flats]
    assert [(sorted(flat.tensors), flat.loaded) for flat in flats] == found


@pytest.mark.parametrize("method", ["full", "lora"])
def test_torch_keeps_the_tensors_of_a_unit_until_its_part_is_there(
    method: str, two_ranks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    part_of, shard = FlatParamHandle._get_shard, FlatParamHandle.shard
    alive: list[bool] = []
    storages: list[StorageWeakRef] = []

    def record_part(*args: Any) -> Any:
        part = part_of(*args)
        alive.append(not any(storage.expired() for storage in storages))
        return part

    def record(handle: FlatParamHandle) -> None:
        assert handle.flat_param._params is not None
        storages[:] = [StorageWeakRef(param.untyped_storage()) for param in handle.flat_param._params]
        shard(handle)
        alive.append(not all(storage.expired() for storage in storages))

    monkeypatch.setattr(FlatParamHandle, "_get_shard", staticmethod(record_part))
    monkeypatch.setattr(FlatParamHandle, "shard", record)
    _wrap(_model(method), method)
    flats = sum(len(flats) for flats in flat_weights(_tiny(method)).values())
    assert alive == [True, False] * flats


def test_torch_reduces_the_root_when_it_has_the_gradients_of_head_and_embedding(
    two_ranks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[int] = []
    after = _runtime_utils._post_backward_hook

    def record(state: Any, handle: FlatParamHandle, *args: Any) -> None:
        ended.append(sum(handle.flat_param._numels))
        after(state, handle, *args)

    monkeypatch.setattr(_runtime_utils, "_post_backward_hook", record)
    model = _wrap(_model("full"), "full")
    model(input_ids=torch.ones(1, 8, dtype=torch.long)).logits.float().sum().backward()
    units = states.units(_tiny("full"))
    assert ended == [units[1], units[0], units[ROOT]]


def test_widened_parts_stay_until_torch_reshards_their_unit(two_ranks: None) -> None:
    """Accelerate replaces ``param.data`` of the flat weight; the parameters are views of the 16-bit part until then."""
    model = _wrap(_model("full"), "full")
    units = FullyShardedDataParallel.fsdp_modules(model)
    assert units[0] is model
    narrow = []
    for unit in units:
        flat = unit._flat_param
        narrow.append(StorageWeakRef(flat.untyped_storage()))
        flat.data = flat.data.to(torch.float32)
        unit._handle._orig_param_dtype = torch.float32
    assert not any(storage.expired() for storage in narrow)
    model(input_ids=torch.ones(1, 8, dtype=torch.long))
    assert all(storage.expired() for storage in narrow)


def _loaded(**changes: Any) -> tuple[Fsdp1Memory, Timeline]:
    timeline = Timeline()
    memory = Fsdp1Memory(scenario(strategy="fsdp", fsdp_version=1, **changes), BUCKETS, timeline)
    memory.load()
    return memory, timeline


def test_a_full_fine_tune_widens_its_parts_after_all_are_loaded() -> None:
    memory, timeline = _loaded()
    wide = 4 * sum(flat.part(8) for flats in memory._flats.values() for flat in flats)
    assert timeline._terms["weights"] == pytest.approx(wide)
    assert timeline._terms[LOADING] == pytest.approx(wide / 2)
    for block in range(len(MODEL.blocks)):
        memory.before_forward(block)
        memory.after_forward(block)
    memory.before_head()
    assert timeline._terms[LOADING] == 2 * memory._flats[ROOT][0].part(8)
    memory.start_backward()
    assert timeline._terms[LOADING] == 0


@pytest.mark.parametrize(("weights", "casts"), [("fp32", True), ("bf16", False)])
def test_casts_of_parts_have_a_stream_of_their_own(weights: str, casts: bool) -> None:
    memory, timeline = _loaded(weights=weights)
    memory.before_forward(0)
    assert (CAST in {stream for _, _, stream in timeline.events}) is casts


def test_an_offloaded_part_is_copied_before_it_is_cast() -> None:
    timeline = Timeline()
    memory = Fsdp1Memory(scenario(strategy="fsdp-offload", fsdp_version=1), BUCKETS, timeline)
    memory.load()
    assert timeline._terms.get("weights", 0) == 0
    memory.before_forward(0)
    part = memory._flats[ROOT][0].part(8)
    sizes = [size for _, size, stream in timeline.events if stream == CAST and size > 0]
    assert sizes[:2] == [4 * part, 2 * part]


def test_the_gradient_of_the_head_stays_until_the_end_of_the_backward_pass() -> None:
    case = scenario(strategy="fsdp", fsdp_version=1)
    terms = simulate(case, BUCKETS, events_of(case)).peaks["backward"].terms
    assert terms["gradients before reduction"] >= 2 * MODEL.head


@pytest.mark.parametrize(
    ("model_type", "shape", "name", "loops", "matrices"),
    [
        ("mixtral", (8, 96, 32), "gate_up_proj", True, 16),
        ("mixtral", (8, 32, 48), "down_proj", True, 8),
        ("mixtral", (8, 96, 32), "gate_up_proj", False, 1),
        ("gpt_oss", (8, 96, 32), "gate_up_proj", True, 1),
        ("mixtral", (96, 32), "gate_up_proj", True, 1),
    ],
)
def test_each_expert_of_transformers_4_has_matrices_of_its_own(
    model_type: str, shape: tuple[int, ...], name: str, loops: bool, matrices: int
) -> None:
    weight = ParameterSpec(f"model.layers.0.mlp.experts.{name}", shape, "other", 0)
    model = _with(model_type, weight)
    case = scenario(model, split=split(model, "full"), behavior=LibraryBehavior(loops_over_experts=loops))
    assert states.unit_tensors(case)[0] == [weight.numel // matrices] * matrices


def _with(model_type: str, weight: ParameterSpec) -> Any:
    return replace(
        MODEL, model_type=model_type, architecture=f"{model_type}-{weight.name}-{weight.shape}", tensors=(weight,)
    )


@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("checkpointing", [True, False])
@pytest.mark.parametrize("tokens", [2048, 16384])
def test_the_closed_form_agrees_with_the_simulated_step(method: str, checkpointing: bool, tokens: int) -> None:
    case = scenario(strategy="fsdp", fsdp_version=1, method=method, checkpointing=checkpointing, sequence_length=tokens)
    scanned = estimate_closed_form(case, BUCKETS, closed_form.profile(case, {}))
    assert scanned.gpu.allocated == pytest.approx(simulate(case, BUCKETS, events_of(case)).allocated, rel=0.02)
