"""Each setting of adapter_config.json is merged as PEFT merges it, or refused by its name."""

import json
import math
import random
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from shardmake.checkpoint.formats import huggingface
from shardmake.checkpoint.formats.contents import StoredTensor
from shardmake.checkpoint.formats.registry import read_model
from shardmake.consolidate.merge import consolidate
from shardmake.consolidate.peft_check import compare_with_peft, merge_with_peft
from shardmake.consolidate.verify import verify
from shardmake.core.errors import CheckpointError, ShardmakeError
from shardmake.run.adapter_settings import KEEPS_BASE, NEVER_MERGED, UNMERGED, WITH_PEFT, AdapterSettings
from tests.workflow.consolidate_checkpoints import assert_equal, check_loading_in_process, load_weights

SMALL = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2,
}  # fmt: skip
TARGETS = {"target_modules": ["q_proj", "v_proj", "up_proj"]}


@pytest.fixture(autouse=True)
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    check_loading_in_process(monkeypatch)


def base_model(kind: str = "llama", **config: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    if kind == "gpt2":
        return GPT2LMHeadModel(GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=2, n_positions=16))
    return LlamaForCausalLM(LlamaConfig(**SMALL, **config))


def make_adapter(place: Path, model: PreTrainedModel, **settings: Any) -> PeftModel:
    """Save ``model`` and a trained adapter for it to ``base`` and ``adapter``; return the live trained model."""
    model.save_pretrained(place / "base")
    adapted = get_peft_model(model, LoraConfig(**{"task_type": "CAUSAL_LM", "r": 4, **TARGETS, **settings}))
    with torch.no_grad():
        for weight in adapted.parameters():
            if weight.requires_grad:
                weight.add_(torch.randn_like(weight) * 0.05)
    adapted.eval().save_pretrained(place / "adapter")
    return adapted


IDS = torch.tensor([[7, 3, 4, 9, 10, 3]])


def away(place: Path, trained: PreTrainedModel, **options: Any) -> float:
    """Merge, verify and return the largest difference of the logits from those of the trained model."""
    consolidate(place / "adapter", place / "merged", base=place / "base", overwrite=True, **options)
    verify(place / "merged", place / "adapter", base=place / "base")
    merged = type(trained.get_base_model()).from_pretrained(place / "merged").eval()
    return float((merged(input_ids=IDS).logits - trained(input_ids=IDS).logits).abs().max())


PROVED: dict[str, list[dict[str, Any]]] = {
    "peft_type": [{}],
    "r": [{"r": 1}, {"r": 16}],
    "lora_alpha": [{"lora_alpha": 24}],
    "use_rslora": [{"use_rslora": True}],
    "rank_pattern": [{"rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\.up_proj": 3}}],
    "alpha_pattern": [{"alpha_pattern": {"q_proj": 3, "^model.layers.0.self_attn.v_proj": 5, "up": 7}}],
    "fan_in_fan_out": [{"model": "gpt2", "target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}],
    "bias": [{"bias": "all", "attention_bias": True}, {"bias": "lora_only", "attention_bias": True}],
    "init_lora_weights": [{"init_lora_weights": value} for value in KEEPS_BASE if value != "eva"],
    "target_modules": [{"target_modules": r".*layers\.0.*_proj"}, {"target_modules": "all-linear"}, {
        "target_modules": ["embed_tokens", "q_proj"]}, {"target_modules": ["lm_head", "q_proj"]}],
    "target_parameters": [{"target_parameters": ["q_proj.weight", "1.mlp.up_proj.weight"], "target_modules": []}],
    "exclude_modules": [{"exclude_modules": ["v_proj"]}],
    "layers_to_transform": [{"layers_to_transform": [1]}, {"layers_to_transform": 0}],
    "layers_pattern": [{"layers_to_transform": [1], "layers_pattern": "layers"}],
    "modules_to_save": [{"modules_to_save": ["lm_head", "norm"]}, {"modules_to_save": ["embed_tokens"]}],
    "trainable_token_indices": [
        {"trainable_token_indices": [3, 4]}, {"trainable_token_indices": {"embed_tokens": [9, 3]}},
        {"trainable_token_indices": [3, 4], "tie_word_embeddings": True},
        {"trainable_token_indices": {"lm_head": [3], "embed_tokens": [9]}},
    ],
    "ensure_weight_tying": [
        {"ensure_weight_tying": True, "modules_to_save": ["embed_tokens"], "tie_word_embeddings": True},
        {"ensure_weight_tying": True, "trainable_token_indices": [3], "tie_word_embeddings": True},
        {"ensure_weight_tying": True, "target_modules": ["embed_tokens", "q_proj"], "tie_word_embeddings": True},
    ],
    "use_dora": [{"use_dora": True}, {"use_dora": True, "use_rslora": True, "alpha_pattern": {"q_proj": 3}}],
    "lora_dropout": [{"lora_dropout": 0.3}],
    "task_type": [{"task_type": None}],
    "auto_mapping": [{"task_type": None}],
    "revision": [{"revision": "main"}],
    "inference_mode": [{"inference_mode": False}],
    "megatron_core": [{"megatron_core": "other.core"}],
    "qalora_group_size": [{"qalora_group_size": 8}],
    **{name: [{}] for name in ("peft_version", "base_model_name_or_path", "runtime_config")},  # PEFT sets them
    **{name: [{}] for name in ("loftq_config", "eva_config", "corda_config", "lora_ga_config")},  # of a refused init
}  # fmt: skip


CASES = {str(values): (name, values) for name, held in PROVED.items() for values in held}


@pytest.mark.parametrize(("setting", "values"), CASES.values())
def test_setting_is_merged_as_by_peft(setting: str, values: dict[str, Any], tmp_path: Path) -> None:
    values = dict(values)
    config = {key: values.pop(key) for key in ("attention_bias", "tie_word_embeddings") if key in values}
    trained = make_adapter(tmp_path, base_model(values.pop("model", "llama"), **config), **values)
    untouched = float((base_logits(tmp_path, trained) - trained(input_ids=IDS).logits).abs().max())
    assert away(tmp_path, trained) < 1e-5 < 1e-3 < untouched
    consolidate(tmp_path / "adapter", tmp_path / "alone", base=tmp_path / "base", adapter=True)
    assert_equal(load_weights(tmp_path / "alone"), load_weights(tmp_path / "adapter"))


STATES: list[dict[str, Any]] = [
    {"use_dora": True, "modules_to_save": ["lm_head"]}, {"target_modules": ["embed_tokens", "q_proj"]},
    {"trainable_token_indices": [3, 4]}, {"trainable_token_indices": [3, 4], "tied": True},
    {"trainable_token_indices": {"embed_tokens": [9, 3]}, "tied": True},
    {"trainable_token_indices": {"embed_tokens": [3], "lm_head": [3]}, "tied": True},
    {"trainable_token_indices": {"embed_tokens": [3], "lm_head": [4]}, "tied": True, "allow": ["untied"]},
    {"trainable_token_indices": {"lm_head": [9, 3]}, "tied": True, "allow": ["untied"]},
    {"modules_to_save": ["embed_tokens"], "tied": True, "allow": ["untied"]},
    {"target_modules": ["q_proj", "lm_head"], "tied": True, "allow": ["untied"]},
    {"target_modules": ["q_proj", "lm_head", "embed_tokens"], "tied": True, "ensure_weight_tying": True},
]  # fmt: skip


@pytest.mark.parametrize("values", STATES)
def test_states_of_the_whole_model_are_merged_as_by_peft(values: dict[str, Any], tmp_path: Path) -> None:
    """FSDP and ZeRO save them, with each adapter's name in the names of its tensors."""
    values = dict(values)
    allow, tied = values.pop("allow", ()), values.pop("tied", False)
    trained = make_adapter(tmp_path, base_model(tie_word_embeddings=tied), **values)
    (tmp_path / "adapter" / "adapter_model.safetensors").unlink()
    states = {name: weight.contiguous() for name, weight in trained.state_dict().items()}
    torch.save(states, tmp_path / "adapter" / "pytorch_model_fsdp.bin")
    if allow:
        with pytest.raises(CheckpointError, match=r"ties lm_head\.weight to .* add --allow untied"):
            away(tmp_path, trained)
    assert away(tmp_path, trained, allow=allow) < 1e-5


@pytest.mark.parametrize("values", [
    {}, {"target_modules": ["q_proj", "lm_head"]}, {"modules_to_save": ["embed_tokens"]},
    {"target_modules": ["q_proj", "embed_tokens"]}, {"trainable_token_indices": [3, 4]},
], ids=str)  # fmt: skip
def test_a_head_that_the_base_models_files_untie_stays_apart(values: dict[str, Any], tmp_path: Path) -> None:
    base_model().save_pretrained(tmp_path / "apart")
    config = json.loads((tmp_path / "apart" / "config.json").read_text())
    (tmp_path / "apart" / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    trained = make_adapter(tmp_path, LlamaForCausalLM.from_pretrained(tmp_path / "apart"), **values)
    assert away(tmp_path, trained) < 1e-5
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["tie_word_embeddings"] is False


def test_an_adapted_head_that_gets_rows_of_the_embedding_is_refused(tmp_path: Path) -> None:
    model = base_model(tie_word_embeddings=True)
    trained = make_adapter(tmp_path, model, target_modules=["lm_head"], trainable_token_indices=[3])
    with pytest.raises(CheckpointError, match=r"changes lm_head\.weight, which also gets .* rows of model\.embed_tok"):
        away(tmp_path, trained, allow=["untied"])


def test_an_embedding_that_encoder_and_decoder_share_is_refused(tmp_path: Path) -> None:
    """No config of T5 unties them, so that --allow untied is not the advice."""
    sizes = {"d_model": 32, "d_ff": 64, "num_layers": 1, "num_heads": 2, "d_kv": 16}
    trained = make_adapter(
        tmp_path, transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=96, **sizes)),
        target_modules=["q"], modules_to_save=["shared"], task_type="SEQ_2_SEQ_LM",
    )  # fmt: skip
    for allow in ((), ["untied"]):
        with pytest.raises(CheckpointError, match=r"embed_tokens\.weight to shared.* use the adapter with PEFT\."):
            away(tmp_path, trained, allow=allow)


def base_logits(place: Path, trained: PeftModel) -> torch.Tensor:
    base = type(trained.get_base_model()).from_pretrained(place / "base").eval()
    logits: torch.Tensor = base(input_ids=IDS).logits
    return logits


REFUSED: dict[str, Any] = {
    "alora_invocation_tokens": [5, 6], "arrow_config": {"top_k": 1}, "use_qalora": True, "megatron_config": {"a": 1},
    "velora_config": {"num_groups": 4}, "monteclora_config": {"num_samples": 2}, "layer_replication": [[0, 2], [1, 2]],
    "lora_bias": True, "use_bdlora": {"nblocks": 2}, "kasa_config": {"beta": 0.1},
    "init_lora_weights": "pissa", "peft_type": "OFT", "invented_setting": 1,
}  # fmt: skip


@pytest.mark.parametrize(("setting", "value"), REFUSED.items())
def test_setting_is_refused_by_its_name(setting: str, value: Any, tmp_path: Path) -> None:
    make_adapter(tmp_path, base_model())
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {setting: value}))
    with pytest.raises(CheckpointError, match=rf"{setting}.* is not supported\. .*PEFT"):
        away(tmp_path, get_peft_model(base_model(), LoraConfig(**TARGETS)))
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize("target", ["c_proj", r".*attn\.c_proj"])
def test_dora_in_conv1d_layers_is_refused_by_its_name(target: str, tmp_path: Path) -> None:
    """The weights of one kind of them are square, so that no shape shows it."""
    settings = {"target_modules": [target] if target == "c_proj" else target, "fan_in_fan_out": True}
    trained = make_adapter(tmp_path, base_model("gpt2"), use_dora=True, **settings)
    with pytest.raises(CheckpointError, match=r"use_dora of \S+ is in a Conv1D layer\. Merge it with PEFT"):
        away(tmp_path, trained)


def test_every_setting_of_the_installed_peft_is_proved_or_refused() -> None:
    """A setting that a newer PEFT adds fails here until it has a row."""
    settings = set(LoraConfig.__dataclass_fields__)
    assert settings == set(AdapterSettings.model_fields) == PROVED.keys() | REFUSED.keys() - {"invented_setting"}
    default = AdapterSettings.parse(LoraConfig().to_dict())
    assert not default.refused(holds_base=False) and default.decisive() == {"peft_type": "LORA"}
    assert not AdapterSettings.parse({"peft_type": "LORA", "invented_setting": None}).refused(holds_base=False)


def test_kinds_that_peft_cannot_merge_either() -> None:
    """Their layers have no merge of their own, or they have no layers; PEFT forbids it for ShadowPEFT."""
    found = {"SHADOW"}
    for kind, tuner in peft.PEFT_TYPE_TO_TUNER_MAPPING.items():
        layers = subclasses(getattr(tuner, "tuner_layer_cls", None) or type)
        if all(layer.merge is BaseTunerLayer.merge for layer in layers):
            found.add(kind.value)
    assert found == {*NEVER_MERGED}
    for kind in ("PREFIX_TUNING", "IA3"):
        (advice,) = AdapterSettings.parse({"peft_type": kind}).refused(holds_base=False).values()
        assert advice == (UNMERGED if kind in found else WITH_PEFT)


def subclasses(kind: Any) -> list[Any]:
    """Return the class and all that inherit from it; none for `type`."""
    return [] if kind is type else [kind, *(found for child in kind.__subclasses__() for found in subclasses(child))]


ADVISED: dict[str, dict[str, Any]] = {
    "lora_bias": {"lora_bias": True, "target_modules": ["q_proj"]},
    "velora_config": {"velora_config": {"num_groups": 4}, "target_modules": ["q_proj"]},
    "kasa_config": {"kasa_config": {}}, "monteclora_config": {"monteclora_config": {"num_samples": 2}},
    "layer_replication": {"layer_replication": [[0, 2], [1, 2]]},
    "use_bdlora": {"use_bdlora": {"nblocks": 2, "target_modules_bd_a": ["q_proj"], "match_strict": False}},
    "alora_invocation_tokens": {"alora_invocation_tokens": [5, 6]},
}  # fmt: skip


@pytest.mark.parametrize("setting", ADVISED)
def test_advice_for_a_refused_setting_is_true(setting: str, tmp_path: Path) -> None:
    """PEFT's merge is the trained model if the refusal advises it, and is not in other cases."""
    trained = make_adapter(tmp_path, base_model(attention_bias=True), **ADVISED[setting])
    settings = AdapterSettings.read(tmp_path / "adapter" / "adapter_config.json")
    (advice,) = settings.refused(holds_base=False).values()
    base = LlamaForCausalLM.from_pretrained(tmp_path / "base")
    error = math.inf
    with suppress(Exception), torch.no_grad():
        merged: Any = PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload()
        error = float((merged.eval()(input_ids=IDS).logits - trained(input_ids=IDS).logits).abs().max())
    assert advice == (WITH_PEFT if error < 1e-4 else UNMERGED)


CHANGES_BASE = ["pissa", "pissa_niter_4", "olora"]


@pytest.mark.parametrize("init", CHANGES_BASE)
def test_adapter_of_residual_weights(init: str, tmp_path: Path) -> None:
    """It is right with the base weights of the training, and after PEFT's conversion; with the base alone it is not."""
    model, base = base_model(), tmp_path / "base"
    model.save_pretrained(base)
    trained = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=4, init_lora_weights=init, **TARGETS))
    trained.save_pretrained(tmp_path / "initial")
    for name, weight in trained.named_parameters():
        weight.data.add_(torch.randn_like(weight) * 0.05 * (".lora_" in name))
    trained.eval().save_pretrained(tmp_path / "adapter")
    for work in (lambda: away(tmp_path, trained), lambda: verify(base, tmp_path / "adapter", base=base)):
        with pytest.raises(CheckpointError, match=f"init_lora_weights {init} is not supported"):
            work()
    trained.save_pretrained(tmp_path / "adapter", path_initial_model_for_weight_conversion=str(tmp_path / "initial"))
    assert away(tmp_path, trained) < 1e-5
    whole = {name: weight.clone().contiguous() for name, weight in trained.state_dict().items()}
    (tmp_path / "adapter" / "adapter_model.safetensors").unlink()
    save_file(whole, tmp_path / "adapter" / "model.safetensors")
    trained.peft_config["default"].save_pretrained(tmp_path / "adapter")
    assert AdapterSettings.read(tmp_path / "adapter" / "adapter_config.json").init_lora_weights == init
    assert away(tmp_path, trained) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_that_are_not_pefts(dtype: torch.dtype, tmp_path: Path) -> None:
    """Such as those of the base model, whose update was lost, or another scale."""
    make_adapter(tmp_path, base_model().to(dtype))
    samples = merge_with_peft(read_model(tmp_path / "adapter", base=tmp_path / "base"), None)
    assert {sample.name.split(".")[-2] for sample in samples} == set(TARGETS["target_modules"])
    consolidate(tmp_path / "adapter", tmp_path / "merged", base=tmp_path / "base")
    assert compare_with_peft(samples, written(tmp_path / "merged")) == len(TARGETS["target_modules"])
    with pytest.raises(CheckpointError, match="is not PEFT's"):
        compare_with_peft(samples, written(tmp_path / "base"))
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"lora_alpha": 8.01}))
    with pytest.raises(CheckpointError, match="is not PEFT's"):
        compare_with_peft(
            merge_with_peft(read_model(path.parent, base=tmp_path / "base"), None), written(tmp_path / "merged")
        )


def written(model: Path) -> dict[str, StoredTensor]:
    return huggingface.read(model).tensors


TIES: list[dict[str, Any]] = [
    {"target_modules": ["q_proj", "lm_head"]}, {"target_modules": ["q_proj", "embed_tokens"]},
    {"modules_to_save": ["embed_tokens"]}, {"modules_to_save": ["lm_head"]},
    {"modules_to_save": ["embed_tokens", "lm_head"]},
    {"target_modules": [], "target_parameters": ["embed_tokens.weight"]},
    {"trainable_token_indices": {"embed_tokens": [3], "lm_head": [4]}},
]  # fmt: skip


@pytest.mark.parametrize(("values", "keep_embeddings"), [*((v, True) for v in TIES), *((v, False) for v in TIES[:-1])])
def test_one_side_of_a_tie(values: dict[str, Any], keep_embeddings: bool, tmp_path: Path) -> None:
    """It is refused; if asked, both weights are written, and the model no longer ties them."""
    trained = make_adapter(tmp_path, base_model(tie_word_embeddings=True), **values)
    trained.save_pretrained(tmp_path / "adapter", save_embedding_layers=keep_embeddings)
    with pytest.raises(CheckpointError, match=r"ties lm_head\.weight to .* add --allow untied"):
        away(tmp_path, trained)
    assert away(tmp_path, trained, allow=["untied"]) < 1e-5
    assert load_weights(tmp_path / "merged").keys() >= {"lm_head.weight", "model.embed_tokens.weight"}
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["tie_word_embeddings"] is False


def test_both_sides_of_a_tie_with_the_same_values(tmp_path: Path) -> None:
    """PEFT saves both if the vocabulary was resized, although neither was trained."""
    trained = make_adapter(tmp_path, base_model(tie_word_embeddings=True))
    trained.save_pretrained(tmp_path / "adapter", save_embedding_layers=True)
    assert away(tmp_path, trained) < 1e-5


DAMAGE: list[Any] = [
    None, True, -1, 0, 10**30, 1.5, float("inf"), "text", "(", [], [[]], {}, {"q_proj": "x"}, {"(": 1}, [1, "a"],
]  # fmt: skip


def test_no_damaged_adapter_ends_in_a_traceback(tmp_path: Path) -> None:
    """Keys, types and shapes of an adapter's two files, at random: merged or refused."""
    make_adapter(tmp_path, base_model())
    adapter, draw = tmp_path / "adapter", random.Random(0)
    config = json.loads((adapter / "adapter_config.json").read_text())
    tensors = load_file(adapter / "adapter_model.safetensors")
    refused = 0
    for _ in range(150):
        values, held = dict(config), dict(tensors)
        for _ in range(draw.randint(0, 2)):
            values[draw.choice([*config, "invented"])] = draw.choice(DAMAGE)
        if not draw.randrange(4):
            values.pop(draw.choice([*config]), None)
        name = draw.choice([*held])
        shape = draw.choice([(0,), (4,), (4, 0), (4, 32, 1, 1), (32, 4), (5, 32), (), (4, 32)])
        dtype = draw.choice([torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool])
        match draw.randrange(4):
            case 0:
                held[name] = torch.zeros(shape, dtype=dtype)
            case 1:
                held[name.replace(draw.choice(["lora_A", "lora_B", "q_proj", "base_model"]), "other")] = held.pop(name)
            case 2:
                del held[name]
        text = draw.choice([json.dumps(values)] * 8 + ["[1]", "", "null", json.dumps(values)[:-20]])
        (adapter / "adapter_config.json").write_text(text)
        save_file(held, adapter / "adapter_model.safetensors")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                consolidate(adapter, tmp_path / "merged", base=tmp_path / "base", overwrite=True)
        except ShardmakeError as error:
            assert "Traceback" not in str(error)
            refused += 1
    assert 60 < refused < 150
