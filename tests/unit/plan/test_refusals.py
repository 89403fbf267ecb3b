"""Refusals of a plan: tensor parallelism, strategies, TF32, losses, activations on the host."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from deepspeed.module_inject.tp_plan_converter import SUPPORTED_STYLES
from transformers import CONFIG_MAPPING

from shardmake.config.models import STRATEGIES
from shardmake.config.strategies import STRATEGY_SPECS
from shardmake.core.errors import ConfigError, ShardmakeError
from shardmake.memory.families import FAMILIES
from shardmake.memory.hardware import from_cluster
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
from tests.unit.wording import expect_row, rows_of

FILE = Path(__file__).with_name("refusals.yaml")
"""Changes of the run, the cluster and the model's config, and the message."""
TABLE = yaml.safe_load(FILE.read_text())


@pytest.mark.parametrize(("kind", "number"), rows_of(TABLE))
def test_a_plan_is_refused(kind: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, cluster, model, _ = TABLE[kind][number]
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
    expect_row(FILE, TABLE, kind, number, str(error.value).replace(str(tmp_path), "FOLDER"))


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


@pytest.mark.parametrize(("kind", "style"), [
    ("mixtral", "moe_tp_experts, packed_colwise"), ("olmo2", "rowwise_split_input"),
])  # fmt: skip
def test_autotp_is_refused_for_layers_at_which_it_stops(kind: str, style: str) -> None:
    model = replace(make_model(), model_type=kind)
    with pytest.raises(ShardmakeError, match=f"plan for {kind} has .*{style}, at which DeepSpeed's AutoTP stops"):
        refuse(wrong_tensor_parallel(make_run(tensor_parallel=2, strategy="zero1"), make_cluster(), model))
    with pytest.raises(ShardmakeError, match="AutoTP stops"):
        refuse(wrong_tensor_parallel(make_run(tensor_parallel=2), make_cluster(), model))
    refuse(wrong_tensor_parallel(make_run(tensor_parallel=2, strategy="fsdp", script="x.py"), make_cluster(), model))


@pytest.mark.parametrize(("kind", "heads", "default"), [("mistral", 32, 8), ("qwen2", 64, 32), ("mixtral", 32, 8)])
def test_key_value_heads_that_a_config_leaves_out_are_the_default(kind: str, heads: int, default: int) -> None:
    sizes = {"hidden_size": 8 * heads, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 64}
    config = {**sizes, "num_attention_heads": heads, "model_type": kind}
    other = replace(make_model(), model_type=kind, config=config, decoder=None)
    model = from_config(config, source="config.json") if kind in FAMILIES else other
    assert CONFIG_MAPPING[kind]().num_key_value_heads == default
    assert attention_heads(model) == {"attention": heads, "key-value": default}
    run, cluster = make_run(tensor_parallel=default * 2, strategy="zero1"), make_cluster(processes_per_node=default * 2)
    with pytest.raises(ShardmakeError, match=f"has {default} key-value heads, which {default * 2} ranks cannot"):
        refuse(wrong_tensor_parallel(run, cluster, model))


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
