"""Refusals of a plan: tensor parallelism, strategies, TF32, losses, activations on the host."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from deepspeed.module_inject.tp_plan_converter import SUPPORTED_STYLES
from transformers import CONFIG_MAPPING

from shardmake.config.models import STRATEGIES
from shardmake.config.strategies import STRATEGY_SPECS
from shardmake.core.errors import ConfigError, ShardmakeError
from shardmake.memory.families import FAMILIES
from shardmake.memory.hardware import from_cluster
from shardmake.memory.model import Model
from shardmake.memory.read_config import from_config
from shardmake.plan import parallelism
from shardmake.plan.abilities import parallel_styles
from shardmake.plan.candidates import choices
from shardmake.plan.parallelism import (
    AUTOTP_STYLES,
    attention_heads,
    wrong_sequence_parallel,
    wrong_tensor_parallel,
)
from shardmake.plan.refusals import refuse, refuse_before_fetch, unsuitable, wrong_loss, wrong_precision
from shardmake.plan.resolve import check, resolve
from tests.plan_in_process import plan_in_this_process
from tests.unit.plans import LLAMA, make_cluster, make_model, make_run
from tests.unit.wording import Wording

H100 = {"accelerator": "h100"}
SERVICE = {"script": "train.py", "service_nodes": 1, "service": {"command": "serve"}}
SPARE = {"spare_nodes": 1, "restart_in_place": True}
TOKENS = {"method": "lora", "lora": {"train_tokens": ["<a>"]}}
MIXTURE = {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "pad_token_id": 0}
REFUSED: list[tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    ("tensor_parallel: 2", {"tensor_parallel": 2, "strategy": "zero3"}, {}, {}),
    ("tensor_parallel: 2", {"tensor_parallel": 2, "strategy": "fsdp"}, {}, {}),
    ("tensor_parallel: 2", {"tensor_parallel": 2, "strategy": "zero1", "method": "lora"}, {}, {}),
    ("tensor_parallel: 2", {"tensor_parallel": 2, "strategy": "zero1"}, {"processes_per_node": 3}, {}),
    ("tensor_parallel: 2", {"tensor_parallel": 2, "strategy": "zero1"}, {}, {"num_key_value_heads": 1}),
    ("tensor_parallel: 2", {"tensor_parallel": 2, "strategy": "zero1"}, {}, {"num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": 16}),
    ("tf32: true", {"tf32": True, "precision": "bf16"}, H100, {}),
    ("tf32: true", {"tf32": True, "precision": "fp32"}, {"accelerator": "v100-32gb"}, {}),
    ("tf32: true", {"tf32": True, "precision": "fp32"}, {"accelerator": "cpu"}, {}),
    ("tf32: true", {"tf32": True, "precision": "fp32", "script": "train.py"}, H100, {}),
    ("loss: chunked", {"loss": "chunked"}, {}, {"model_type": "granite", "architectures": [], "logits_scaling": 2.0, "pad_token_id": 0}),
    ("loss: chunked", {"loss": "chunked", "script": "x.py"}, {}, {}),
    ("loss: chunked", {"loss": "chunked", "strategy": "zero1", "tensor_parallel": 2}, {}, {}),
    ("loss: chunked", {"loss": "chunked", "torch_compile": True}, {}, {}),
    ("loss: chunked", {"loss": "chunked", "method": "lora", "lora": {"targets": ["lm_head"]}}, {}, {}),
    ("loss: chunked", {"loss": "chunked", "method": "lora", "lora": {"targets": ["q_proj", "lm_head"]}}, {}, {}),
    ("activation_offload: true", {"activation_offload": True}, {"accelerator": "cpu"}, {}),
    ("activation_offload: true", {"activation_offload": True, "gradient_checkpointing": False}, H100, {}),
    ("activation_offload: true", {"activation_offload": True, "script": "x.py"}, H100, {}),
    ("activation_offload: true", {"activation_offload": True, "torch_compile": True}, H100, {}),
    ("freeze", {"freeze": ["*.mlp"], "strategy": "zero3-nvme"}, {}, {}),
    ("learning_rates", {"learning_rates": {"*.mlp": 1e-5}, "strategy": "zero3-nvme"}, {}, {}),
    ("lora.train_tokens", {**TOKENS, "strategy": "zero3"}, {}, {}),
    ("lora.train_tokens", {**TOKENS, "strategy": "fsdp"}, H100, {"tie_word_embeddings": True}),
    ("lora.train_tokens", {**TOKENS, "loss": "chunked", "sequence_parallel": 2, "torch_compile": True, "packing": False}, {}, {}),
    ("lora.train_tokens", {**TOKENS, "objective": "dpo", "packing": False}, {}, {}),
    ("lora.train_tokens", {**TOKENS, "tensor_parallel": 2, "strategy": "zero1", "method": "qlora"}, H100, {}),
    ("lora.train_tokens", {**TOKENS, "lora": {"train_tokens": ["<a>"], "adapter": "x", "targets": ["lm_head"]}}, {}, {}),
    ("tensor_parallel: 2", {"learning_rates": {"*.mlp": 1e-5}, "strategy": "zero1", "tensor_parallel": 2}, {}, {}),
    ("tensor_parallel: 2", {"freeze": ["*.mlp"], "strategy": "zero1", "tensor_parallel": 2}, {}, {}),
    ("sequence_parallel: 2", {"sequence_parallel": 2, "packing": False, "strategy": "ddp"}, {}, {}),
    ("sequence_parallel: 2", {"sequence_parallel": 2, "packing": False, "strategy": "zero3-nvme"}, {}, {}),
    ("sequence_parallel: 2", {"sequence_parallel": 2, "packing": False, "script": "x.py"}, {}, {}),
    ("sequence_parallel: 2", {"sequence_parallel": 2, "packing": False, "strategy": "zero1", "tensor_parallel": 2}, {}, {}),
    ("sequence_parallel: 2", {"sequence_parallel": 2, "packing": False, "torch_compile": True}, {}, {}),
    ("sequence_parallel: 2", {"sequence_parallel": 2, "packing": False, "eval_every_steps": 2}, {}, {}),
    ("sequence_parallel: 2", {"sequence_parallel": 2, "packing": False, "checkpoints": {"keep_best": True}}, {}, {}),
    ("sequence_parallel: 2", {"sequence_parallel": 2, "packing": False, "checkpoints": {"early_stopping": 2}}, {}, {}),
    ("sequence_parallel: 2", {"sequence_parallel": 2, "packing": False}, {"processes_per_node": 3}, {}),
    ("sequence_parallel: 2", {"sequence_parallel": 2, "packing": False, "sequence_length": 33}, {}, {}),
    ("sequence_parallel: 2", {"sequence_parallel": 2, "packing": False}, {}, {"num_key_value_heads": 1}),
    ("sequence_parallel: 2", {"sequence_parallel": 2, "packing": False}, {}, {"num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": 16}),
    ("sequence_parallel: 2", {"sequence_parallel": 2, "packing": False, "attention": "eager"}, {}, {}),
    ("sequence_parallel: 2", {"sequence_parallel": 2, "packing": True}, {}, {}),
    ("sequence_parallel: 2", {"sequence_parallel": 2, "packing": False}, {}, {"model_type": "mistral", "sliding_window": 16, "architectures": []}),
    ("expert_parallel: 2", {"expert_parallel": 2}, H100, {}),
    ("expert_parallel: 2", {"expert_parallel": 2}, {"accelerator": "cpu"}, MIXTURE),
    ("expert_parallel: 2", {"expert_parallel": 2, "strategy": "fsdp-hybrid"}, H100, MIXTURE),
    ("expert_parallel: 2", {"expert_parallel": 2, "method": "lora", "optimizer": "adafactor"}, H100, MIXTURE),
    ("expert_parallel: 2", {"expert_parallel": 2, "script": "x.py", "torch_compile": True, "loss": "chunked"}, H100, MIXTURE),
    ("expert_parallel: 2", {"expert_parallel": 2, "freeze": ["lm_head"], "learning_rates": {"*.norm": 1e-5}}, H100, MIXTURE),
    ("expert_parallel: 2", {"expert_parallel": 2, "strategy": "fsdp", "activation_offload": True}, H100, MIXTURE),
    ("expert_parallel: 3", {"expert_parallel": 3}, {"accelerator": "v100-32gb"}, MIXTURE),
    ("expert_parallel: 2", {"expert_parallel": 2}, H100, {**MIXTURE, "num_local_experts": 3}),
    ("global_batch_size", {"global_batch_size": 7}, {}, {}),
    ("global_batch_size", {"micro_batch_size": 3}, {}, {}),
    ("The", {"nodes": 9}, {**H100, "max_nodes": 4}, {}),
    ("optimizer: adamw8bit", {"optimizer": "adamw8bit"}, {}, {}),
    ("method: qlora", {"method": "qlora"}, {}, {}),
    ("precision: fp16", {"precision": "fp16"}, {}, {}),
    ("gradient_dtype: bf16", {"gradient_dtype": "bf16", "precision": "fp32"}, H100, {}),
    ("gradient_dtype: bf16", {"gradient_dtype": "bf16", "strategy": "ddp"}, H100, {}),
    ("gradient_dtype: fp32", {"gradient_dtype": "fp32", "strategy": "zero1-offload"}, H100, {}),
    ("precision: bf16", {"precision": "bf16"}, {"accelerator": "v100-32gb"}, {}),
    ("attention: flash", {"attention": "flash"}, {"accelerator": "v100-32gb"}, {}),
    ("attention: varlen", {"attention": "varlen"}, {"accelerator": "t4"}, {}),
    ("attention: flash", {"attention": "flash", "precision": "fp32"}, H100, {}),
    ("sequence_length", {"sequence_length": 16384}, H100, {"max_position_embeddings": 8192}),
    ("Strategy", {"strategy": "zero3-nvme"}, {"accelerator": "h100", "max_nodes": 4, "nvme_path": None}, {}),
    ("Strategy", {"strategy": "zero3-hpz", "nodes": 1}, H100, {}),
    ("Strategy", {"strategy": "zero3-hpz"}, {"accelerator": "h100", "max_nodes": 4, "processes_per_node": 1}, {}),
    ("The", {**SERVICE, "nodes": 2}, {"executor": "slurm", "max_nodes": 2, "accelerator": "h100"}, {}),
    ("slurm.spare_nodes", {**SERVICE, "nodes": 1}, {"executor": "slurm", "max_nodes": 2, "slurm": SPARE}, {}),
    ("service_nodes", {**SERVICE, "nodes": 1}, H100, {}),
    ("service_nodes: 2", {**SERVICE, "service_nodes": 2, "nodes": 1}, {}, {}),
    ("attention: varlen", {"objective": "dpo", "attention": "varlen"}, H100, {}),
    ("optimizer: adafactor", {"optimizer": "adafactor", "strategy": "fsdp"}, H100, {}),
    ("optimizer: adafactor", {"optimizer": "adafactor", "strategy": "zero2"}, H100, {}),
    ("optimizer: muon", {"optimizer": "muon", "strategy": "zero2-offload"}, H100, {}),
    ("optimizer: muon", {"optimizer": "muon", "strategy": "fsdp-offload"}, H100, {}),
    ("optimizer: muon", {"optimizer": "muon", "objective": "reward"}, H100, {}),
    ("optimizer: muon", {"optimizer": "muon", "freeze": ["*_proj"]}, H100, {}),
    ("optimizer: muon", {"optimizer": "muon"}, H100, {"model_type": "mixtral", "architectures": []}),
    ("optimizer: muon", {"optimizer": "muon", "sequence_parallel": 2, "packing": False}, H100, {}),
    ("optimizer: adamw_anyprecision", {"optimizer": "adamw_anyprecision"}, {}, {}),
    ("Strategy", {"script": "train.py", "strategy": "zero3-nvme"}, H100, {}),
]  # fmt: skip
"""The beginning of the message, and changes of the run, the cluster and the model's config."""


@pytest.mark.parametrize(("key", "run", "cluster", "model"), REFUSED, ids=lambda value: str(value).replace("'", ""))
def test_a_plan_is_refused(
    key: str, run: dict[str, Any], cluster: dict[str, Any], model: dict[str, Any], tmp_path: Path, wording: Wording,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    plan_in_this_process(monkeypatch)
    if "expert_parallel" in run:  # whatever the installed transformers can spread
        styles = {"mixtral": {"ep_dispatch_experts"}}
        monkeypatch.setattr(parallelism, "parallel_styles", lambda kind, _: styles.get(kind, {}))
        monkeypatch.setattr(parallelism, "version", lambda _: "5.23.0")
    monkeypatch.chdir(tmp_path)
    for name in ("train.py", "x.py"):
        (tmp_path / name).touch()
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | model))
    with pytest.raises(ConfigError) as error:
        settings = resolve(make_run(model=str(tmp_path), **run), make_cluster(**cluster))
        check(settings)
        list(choices(settings))
    assert str(error.value).startswith(key)
    wording(error.value)


def test_supported_runs_pass() -> None:
    for run in ({}, {"strategy": "zero1"}, {"strategy": "zero2"}, {"strategy": "fsdp", "script": "x.py"}):
        refuse(wrong_tensor_parallel(make_run(tensor_parallel=2, **run), make_cluster(), make_model()))
    for name in ("a100-80gb", "h100"):  # TF32 is for fp32 on Ampere and later
        refuse(wrong_precision(make_run(tf32=True), "fp32", from_cluster(make_cluster(accelerator=name))))
    model = make_model()
    for strategy in ["auto", *(name for name, spec in STRATEGY_SPECS.items() if spec.sequence_parallel)]:
        run = make_run(sequence_parallel=2, strategy=strategy, packing=True)
        refuse(wrong_sequence_parallel(run, make_cluster(), model, "varlen"))
        refuse(wrong_sequence_parallel(run.model_copy(update={"packing": False}), make_cluster(), model, "sdpa"))
    for window in ({"sliding_window": 16, "use_sliding_window": False}, {"sliding_window": 4096}):
        run, model = make_run(sequence_parallel=2, packing=False), make_model(model_type="mistral", **window)
        refuse(wrong_sequence_parallel(run, make_cluster(), model, "sdpa"))


@pytest.mark.parametrize(
    ("kind", "style"), [("mixtral", "moe_tp_experts, packed_colwise"), ("olmo2", "rowwise_split_input")]
)
def test_autotp_is_refused_for_layers_at_which_it_stops(kind: str, style: str) -> None:
    model = replace(make_model(), model_type=kind)
    with pytest.raises(ShardmakeError, match=f"plan for {kind} has .*{style}, at which DeepSpeed's AutoTP stops"):
        refuse(wrong_tensor_parallel(make_run(tensor_parallel=2, strategy="zero1"), make_cluster(), model))
    with pytest.raises(ShardmakeError, match="AutoTP stops"):
        refuse(wrong_tensor_parallel(make_run(tensor_parallel=2), make_cluster(), model))
    refuse(wrong_tensor_parallel(make_run(tensor_parallel=2, strategy="fsdp", script="x.py"), make_cluster(), model))


@pytest.mark.parametrize(("kind", "heads", "default"), [("mistral", 32, 8), ("qwen2", 64, 32), ("mixtral", 32, 8)])
def test_key_value_heads_that_a_config_leaves_out_are_the_default(kind: str, heads: int, default: int) -> None:
    model = without_key_value_heads(kind, heads)
    assert CONFIG_MAPPING[kind]().num_key_value_heads == default
    assert attention_heads(model) == {"attention": heads, "key-value": default}
    run, cluster = make_run(tensor_parallel=default * 2, strategy="zero1"), make_cluster(processes_per_node=default * 2)
    with pytest.raises(ShardmakeError, match=f"has {default} key-value heads, which {default * 2} ranks cannot"):
        refuse(wrong_tensor_parallel(run, cluster, model))


def without_key_value_heads(kind: str, heads: int) -> Model:
    """Return a model whose config.json has no ``num_key_value_heads``."""
    sizes = {"hidden_size": 8 * heads, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 64}
    config = {**sizes, "num_attention_heads": heads, "model_type": kind}
    other = replace(make_model(), model_type=kind, config=config, decoder=None)
    return from_config(config, source="config.json") if kind in FAMILIES else other


def test_the_styles_are_those_of_the_installed_libraries() -> None:
    assert SUPPORTED_STYLES == AUTOTP_STYLES
    for kind in ("llama", "qwen3", "mixtral", "gpt_oss", "gpt2", "qwen3_5_text", "deepseek_v3", "unheard-of"):
        for parallel in ("tp", "ep"):
            known = kind in CONFIG_MAPPING
            plan = (getattr(CONFIG_MAPPING[kind], f"base_model_{parallel}_plan") if known else None) or {}
            assert parallel_styles(kind, parallel) == set(plan.values())


LEARNED = ("dpo", "kto", "reward")


@pytest.mark.parametrize(("run", "suitable"), [
    ({"optimizer": "adamw8bit"}, {"ddp", "zero1", "zero2", "zero3", "zero3-hpz"}),
    ({"method": "qlora"}, {"ddp", "zero1", "zero2", "fsdp"}), ({"method": "lora"}, set(STRATEGIES)),
    ({"loss": "chunked"}, {name for name in STRATEGIES if not name.startswith("fsdp")}), ({}, set(STRATEGIES)),
    *(({"objective": name}, set(STRATEGIES) - {"zero3-hpz", "zero3-nvme", "fsdp-hybrid"}) for name in LEARNED),
    *(({"objective": name, "method": "qlora"}, {"ddp", "zero1", "zero2", "fsdp"}) for name in LEARNED),
])  # fmt: skip
def test_strategies_that_a_run_can_use(run: dict[str, Any], suitable: set[str]) -> None:
    found = {name: unsuitable(make_run(**run), name) for name in STRATEGIES}
    assert {name for name, reason in found.items() if not reason} == suitable
    assert all("Take " in reason for reason in found.values() if reason)


FOUR_BITS = {
    "zero3-offload": r"zero3-offload, because transformers loads 4-bit weights without zero\.Init",
    "zero2-offload": "offloads the adapters' optimizer states alone",
    "fsdp-offload": "have not been trained and saved with this kind of FSDP",
}


@pytest.mark.parametrize("strategy", FOUR_BITS)
def test_4_bit_weights_with_offload_are_refused_with_the_reason(strategy: Any) -> None:
    words = f"method: qlora cannot train under .*{FOUR_BITS[strategy]}.*Take method: lora, or one of"
    assert re.match(words, unsuitable(make_run(method="qlora"), strategy))


CHUNKED, FUSED = ({"loss": "chunked"}, {"loss": "fused"})
HEAD = {"targets": ["lm_head"]}
QUERY_AND_HEAD = {"method": "lora", "lora": {"targets": ["q_proj", "lm_head"]}}


@pytest.mark.parametrize(("run", "family", "words"), [
    (CHUNKED, "llama", ""), (CHUNKED, "phi3", ""),
    ({**FUSED, "tensor_parallel": 2}, "llama",
     "loss: fused cannot be used: with tensor_parallel .* a part of the head"),
    # The other losses take the weights of the head alone, so that its adapter would get no gradient.
    (QUERY_AND_HEAD, "llama", ""), ({**FUSED, "method": "lora"}, "llama", ""),
    ({**CHUNKED, "method": "lora"}, "llama", ""), ({**FUSED, "lora": HEAD}, "llama", ""),
    ({**CHUNKED, "lora": HEAD}, "llama", ""),
    ({**FUSED, **QUERY_AND_HEAD}, "llama", r"loss: fused cannot be used with lm_head in lora\.targets"),
])  # fmt: skip
def test_losses_a_run_may_have(run: dict[str, Any], family: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan_in_this_process(monkeypatch)
    model = make_model(tie_word_embeddings=False, model_type=family, architectures=[], pad_token_id=0)
    found = next(wrong_loss(make_run(**run), model), "")
    assert re.match(words, found) and bool(words) == bool(found)


@pytest.mark.parametrize(("changes", "words"), [
    ({"global_batch_size": 7}, r"^global_batch_size 7 cannot be divided over 2 ranks \(1 node\)\. Use 6 or 8"),
    ({"global_batch_size": 1}, r"2 ranks \(1 node\)\. Use 2, or another"),
    ({"method": "qlora"}, "method: qlora needs a GPU, but the cluster file has accelerator: cpu"),
    ({"strategy": "fsdp"}, "strategy: fsdp needs GPUs, but the cluster file has accelerator: cpu"),
])  # fmt: skip
def test_what_run_and_cluster_decide_is_refused_before_anything_is_fetched(changes: dict[str, Any], words: str) -> None:
    refuse_before_fetch(make_run(), make_cluster(accelerator="cpu"))
    with pytest.raises(ConfigError, match=words):
        refuse_before_fetch(make_run(**changes), make_cluster(accelerator="cpu"))
