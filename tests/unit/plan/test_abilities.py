"""The abilities of models are found out at plan: tiny configs of each kind, asked of transformers' own classes."""

import json
import re
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM
from transformers.core_model_loading import WeightConverter
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING
from transformers.quantizers.base import HfQuantizer

from shardmake.checkpoint.formats.contents import are_apart
from shardmake.checkpoint.formats.hub_layout import HubWeight, Part
from shardmake.commands.estimate import resolve_request
from shardmake.commands.estimate_request import EstimateRequest
from shardmake.config.models import Run
from shardmake.consolidate import loading
from shardmake.core.errors import ModelError, ShardmakeError
from shardmake.fetch import dequantize
from shardmake.memory.composites import COMPOSITES
from shardmake.memory.families import FAMILIES
from shardmake.memory.model import is_head
from shardmake.memory.read_config import from_config, read_model
from shardmake.plan import abilities, inspect_model, resolve
from shardmake.plan.abilities import Abilities, describe_quantized_base, find_abilities
from shardmake.plan.candidates import choices
from shardmake.plan.refusals import refuse, wrong_loss
from shardmake.plan.small_config import shrunk
from tests.plan_in_process import plan_in_this_process
from tests.unit.checkpoint.formats.test_hub_layout import Doubled, convert_by
from tests.unit.plans import make_cluster, make_model, make_run

Patch = pytest.MonkeyPatch

Values = dict[str, Any]

SIZES = {
    "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 3, "num_attention_heads": 8,
    "num_key_value_heads": 2, "vocab_size": 320,
}  # fmt: skip
LLAMA = {"model_type": "llama", **SIZES}
GEMMA3 = {
    "model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"],
    "text_config": {"model_type": "gemma3_text", **SIZES},
    "vision_config": {"model_type": "siglip_vision_model", "num_hidden_layers": 1},
}  # fmt: skip
QWEN3_5 = {
    "model_type": "qwen3_5", "architectures": ["Qwen3_5ForConditionalGeneration"],
    "text_config": {"model_type": "qwen3_5_text", **SIZES, "layer_types": [*["linear_attention"] * 2, "full_attention"]},
    "vision_config": {"model_type": "qwen3_5", "depth": 1},
}  # fmt: skip
VISION = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
LLAVA_NEXT = {
    "model_type": "llava_next", "text_config": LLAMA, "vision_config": {"model_type": "clip_vision_model", **VISION},
}  # fmt: skip
GRANITE_SPEECH = {
    "model_type": "granite_speech", "text_config": {"model_type": "granite", **SIZES},
    "encoder_config": {"num_layers": 1, "hidden_dim": 16},
    "projector_config": {"model_type": "blip_2_qformer", **VISION, "encoder_hidden_size": 16},
}  # fmt: skip
BLIP = {
    "model_type": "blip", "architectures": ["BlipForConditionalGeneration"],
    "text_config": {**VISION, "vocab_size": 64}, "vision_config": VISION,
}  # fmt: skip
GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 3, "n_head": 8, "vocab_size": 320}
GEMMA2 = {"model_type": "gemma2", **SIZES, "head_dim": 8}
BLOOM = {"model_type": "bloom", "hidden_size": 64, "n_layer": 3, "n_head": 8, "vocab_size": 320}
OPT = {"model_type": "opt", **SIZES, "ffn_dim": 112, "word_embed_proj_dim": 64, "max_position_embeddings": 64}
T5 = {
    "model_type": "t5", "d_model": 64, "d_ff": 96, "num_layers": 2, "num_heads": 4, "d_kv": 16, "vocab_size": 320,
    "is_encoder_decoder": True, "architectures": ["T5ForConditionalGeneration"],
}  # fmt: skip
MIXTRAL = {"model_type": "mixtral", **SIZES, "num_local_experts": 4}
ALL = ["varlen", "flash", "sdpa", "eager"]
GPT_OSS = {"model_type": "gpt_oss", **SIZES, "head_dim": 8, "num_local_experts": 4}
MAMBA = {"model_type": "mamba", "hidden_size": 64, "num_hidden_layers": 3, "vocab_size": 320}
LLAMA4 = {"model_type": "llama4_text", **SIZES, "head_dim": 8, "num_local_experts": 2, "intermediate_size_mlp": 64}
DEEPSEEK = {
    "model_type": "deepseek_v3", **SIZES, "num_key_value_heads": 8, "kv_lora_rank": 16, "q_lora_rank": 16,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "n_group": 1, "topk_group": 1,
    "n_routed_experts": 4, "first_k_dense_replace": 1, "moe_intermediate_size": 16,
}  # fmt: skip


@pytest.fixture(autouse=True)
def helpers_in_this_process(tmp_path: Path, monkeypatch: Patch) -> None:
    plan_in_this_process(monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def resolved(run: Run, cluster: resolve.Cluster | None = None) -> resolve.ResolvedRun:
    settings = resolve.resolve(run, cluster or make_cluster())
    resolve.check(settings)
    return settings


def ask(config: Values, about: str, **more: Any) -> Values:
    request = {"config": config, "source": "config.json", "trust_remote_code": False, "about": about, **more}
    return {name: tuple(v) if isinstance(v, list) else v for name, v in inspect_model.answer(request).items()}


def answer(config: Values, targets: str | list[str] | None = None, method: str = "lora") -> Abilities:
    adapters = {"method": method, "rank": 4, "dropout": 0.0, "targets": targets}
    return Abilities(**ask(config, "class"), **(ask(config, "adapters", adapters=adapters) if targets else {}))


@pytest.mark.parametrize("family", [*FAMILIES, *COMPOSITES])
def test_what_is_written_down_of_a_family_is_what_its_class_answers(family: str) -> None:
    config = {**SIZES, "head_dim": 8, "pad_token_id": 0, "logits_scaling": 8.0, "model_type": family}
    config |= {"global_head_dim": 8, "hidden_size_per_layer_input": 0}
    config |= {"full_attention_interval": 3}  # so that one layer of Qwen3-Next has full attention
    if family in ("dots1", "deepseek_v3", "glm4_moe_lite", "youtu", "kimi_k25"):
        config |= {**DEEPSEEK, "n_shared_experts": 1, "num_experts_per_tok": 2, "model_type": family}
    if family in COMPOSITES:
        types = {"kimi_k25": "deepseek_v3", "mistral3": "mistral"}
        text = {**config, "model_type": types.get(family, f"{family}_text")}
        config = {"model_type": family, "text_config": text, "vision_config": {"num_hidden_layers": 1}}
    model = from_config(config, source="config.json")
    assert model.decoder is not None
    asked = answer(config, None if model.decoder.experts else "all-linear")
    written = find_abilities(model, make_run())
    assert written.varlen_limit.startswith(asked.varlen_limit)
    assert replace(written, varlen_limit="") == replace(asked, varlen_limit="")
    assert abilities.has_plain_head(model) == ask(config, "head")["plain"]
    assert abilities.attends_in_kernel(model) == ask(config, "tokens")["in_kernel"]


GEMMA4 = {
    "model_type": "gemma4", "vision_config": {"num_hidden_layers": 1}, "audio_config": {"num_hidden_layers": 1},
    "text_config": {"model_type": "gemma4_text", **SIZES, "hidden_size_per_layer_input": 0, "head_dim": 8},
}  # fmt: skip


@pytest.mark.parametrize(
    "changes", [{}, {"audio_config": None}, {"vision_config": None, "audio_config": None}], ids=str
)
def test_of_a_known_composite_only_the_source_is_read(changes: Values, monkeypatch: Patch) -> None:
    config = {**GEMMA4, **changes}
    wanted = answer(config)
    monkeypatch.setattr(abilities, "cached_helper", None)
    assert find_abilities(from_config(config, source="config.json"), make_run()) == wanted


@pytest.mark.parametrize("config", [
    {**GEMMA4, "video_config": {"depth": 1}}, {**GEMMA3, "vision_config": {"model_type": "clip_vision_model"}},
], ids=["another tower", "another type of tower"])  # fmt: skip
def test_the_class_of_a_composite_with_an_unknown_tower_is_asked(config: Values, monkeypatch: Patch) -> None:
    found = {"model_class": "Other", "text_part": True, "absent": ("model.other",)}
    monkeypatch.setattr(abilities, "_ask", lambda *_, **__: found)
    model = from_config(config, source="config.json")
    assert model.decoder is not None and find_abilities(model, make_run()).absent == ("model.other",)


def test_a_composite_whose_class_refuses_flash_keeps_the_other_kernels(tmp_path: Path, monkeypatch: Patch) -> None:
    """transformers 5.24 refuses it for Gemma 3 and 4, whose tokens of images see each other."""
    folder = tmp_path / "models" / "gemma4"
    folder.mkdir(parents=True)
    lines = (
        "\nclass Gemma4ForConditionalGeneration(Base):\n    _supports_flash_attn = False\n\n\nclass Other:\n    pass\n"
    )
    (folder / "modeling_gemma4.py").write_text(lines)
    monkeypatch.setattr(abilities, "_folder", lambda _: tmp_path)
    monkeypatch.setattr(abilities, "cached_helper", None)
    found = find_abilities(from_config(GEMMA4, source="config.json"), make_run())
    assert found.attention == ("sdpa", "eager") and found.varlen_limit.startswith("does not take")


def test_ranks_cannot_share_heads_of_two_widths() -> None:
    config = {**SIZES, "model_type": "gemma4_text", "hidden_size_per_layer_input": 0, "head_dim": 8}
    models = [from_config({**config, "global_head_dim": width}, source="config.json") for width in (8, 16)]
    assert [abilities.attends_in_kernel(model) for model in models] == [True, False]


def test_the_files_of_a_mixture_must_have_a_layout_of_a_merge(tmp_path: Path, monkeypatch: Patch) -> None:
    mixture = MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=2))
    mixture.save_pretrained(tmp_path / "usual")
    assert find_abilities(read_model(str(tmp_path / "usual")), make_run()).attention
    convert_by(monkeypatch, WeightConverter("twice", "self_attn.o_proj.weight", operations=[Doubled()]))
    mixture.save_pretrained(tmp_path / "other")
    model = read_model(str(tmp_path / "other"))
    assert model.decoder is not None
    with pytest.raises(ModelError, match=r"its files hold model\.layers\.0\.twice, model\.layers\.1\.twice"):
        find_abilities(model, make_run())


@pytest.mark.parametrize(("prefix", "kind"), [("", "llama"), ("language_model.", "mistral3")])
def test_a_head_in_the_files_that_is_not_the_embedding_is_untied(
    prefix: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mistral Small 3.1 has no ``tie_word_embeddings``, and in its class that is true by default."""
    monkeypatch.setattr(abilities, "_ask", lambda *_, **__: {})
    compare = Mock(wraps=are_apart)
    monkeypatch.setattr("shardmake.checkpoint.formats.contents.are_apart", compare)
    text = {**SIZES, "model_type": "mistral"}
    whole = {"model_type": "mistral3", "text_config": text, "vision_config": {"model_type": "pixtral"}}
    config = whole if kind == "mistral3" else {**LLAMA, "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    names = f"{prefix}lm_head.weight", f"{prefix}model.embed_tokens.weight"
    for values, kinds, apart in (
        (torch.ones(2), (torch.float32,) * 2, False), (torch.arange(2), (torch.float32,) * 2, True),
        (torch.arange(2), (torch.float32, torch.bfloat16), False),  # values of two types are not compared
    ):  # fmt: skip
        weights = values.float()[:, None, None].expand(2, 320, 64).contiguous().unbind()
        held = {name: one.to(kind) for name, one, kind in zip(names, weights, kinds, strict=True)}
        save_file({name: weight.clone() for name, weight in held.items()}, tmp_path / "model.safetensors")
        model = read_model(str(tmp_path))
        assert model.untied is apart and model.tied is not apart
        assert sum(is_head(tensor) for tensor in model.tensors) == apart
        assert resolved(make_run(model=str(tmp_path))).workload.model_class.untied is apart
    assert compare.call_count == 3, (
        "the two weights are read once, although an estimate reads the model again and again"
    )


def test_another_spelling_of_the_class(tmp_path: Path) -> None:
    """The authors of Phi-3.5-MoE call it PhiMoEForCausalLM, transformers PhimoeForCausalLM."""
    config = {"model_type": "phimoe", **SIZES, "num_local_experts": 2, "architectures": ["PhiMoEForCausalLM"]}
    assert answer(config).model_class == "PhimoeForCausalLM"
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert loading.empty_model(tmp_path).config.architectures == ["PhiMoEForCausalLM"]


@pytest.mark.parametrize("prefix", ["", "language_model."])
def test_files_of_a_hybrid_with_names_of_its_class_stay(prefix: str, tmp_path: Path, monkeypatch: Patch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(abilities, "_ask", lambda *request: asked.append(request[2]))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_5_text", **SIZES}))
    model = read_model(str(tmp_path))
    save_file({prefix + tensor.name: torch.zeros(1) for tensor in model.tensors}, tmp_path / "model.safetensors")
    assert find_abilities(model, make_run()).model_class == "Qwen3_5ForCausalLM" and asked == ["layout"] * bool(prefix)


@pytest.mark.parametrize(("config", "towers"), [
    (GEMMA3, ["model.vision_tower", "model.multi_modal_projector"]), (QWEN3_5, ["model.visual"]),
    (LLAVA_NEXT, ["model.vision_tower", "model.multi_modal_projector", "model.image_newline"]),
], ids=lambda value: value["model_type"] if isinstance(value, dict) else None)  # fmt: skip
def test_the_towers_of_a_composite_are_absent(config: Values, towers: list[str], tmp_path: Path) -> None:
    settings = resolved(make_run(model=make_folder(tmp_path, config), packing=False))
    assert list(settings.abilities.absent) == towers and settings.workload.model_class.text_part
    assert settings.model.parameters == sum(
        tensor.numel for tensor in settings.model.tensors if not any(name in tensor.name for name in towers)
    )
    (line,) = settings.abilities.describe_absent()
    assert line.startswith(f"towers: absent ({', '.join(towers)}): they take no memory")
    with pytest.raises(ShardmakeError, match=r"lora\.adapter: it is not tested with the text part of a composite"):
        resolved(make_run(model=make_folder(tmp_path, config), packing=False, method="lora", lora={"adapter": "a"}))


@pytest.mark.parametrize(("config", "attention", "mixing", "limit"), [
    (GPT2, ALL[1:], [], "dropout in its attention"), ({**GPT2, "attn_pdrop": 0.0}, ALL, [], ""),
    (BLOOM, ["eager"], ["eager"], "does not take"), (OPT, ALL, ["sdpa", "eager"], ""), (DEEPSEEK, ALL, [], ""),
    ({"model_type": "qwen2_moe", **SIZES, "hidden_size": 96}, ALL[1:], [], "heads of 12 numbers"),
    (LLAMA4, ["sdpa", "eager"], [], "does not take"), (MAMBA, ["eager"], ["eager"], "does not take"),
], ids=lambda value: value["model_type"] if isinstance(value, dict) else None)  # fmt: skip
def test_attention_and_packing_of_a_class(config: Values, attention: list[str], mixing: list[str], limit: str) -> None:
    found = answer(config)
    assert ([*found.attention], [*found.mixing]) == (attention, mixing)
    assert re.search(limit, found.varlen_limit) and bool(limit) == bool(found.varlen_limit)


def make_folder(tmp_path: Path, config: Values) -> str:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


REFUSED = [
    (BLOOM, {}, r"packing: true cannot be used: BloomForCausalLM mixes .* attention eager.* Set packing: false\.$"),
    (BLOOM, {"attention": "sdpa"}, r"attention: sdpa cannot be used: BloomForCausalLM .*Use eager, or auto\."),
    (GEMMA2, {"attention": "sdpa"}, r"Gemma2ForCausalLM does not support it .*Use flash or eager, or auto\."),
    (OPT, {}, r"packing: true cannot be used: OPTForCausalLM mixes"),
    (T5, {}, r"config\.json is an encoder-decoder model \(t5\)\. Shardmake trains causal"),
    (T5, {"script": "train.py"}, "encoder-decoder model"),
    (GEMMA3, {"script": "train.py"},
     r"script cannot be used for .*config\.json, a composite model: of its towers \(model\.vision_tower"),
    ({**GEMMA3, "architectures": ["Gemma3ForCausalLM"]}, {}, "names the class Gemma3ForCausalLM, but .* are Gemma3ForC"),
    (GRANITE_SPEECH, {}, r"without its towers: its loss does not take the number of tokens of all ranks\."),
    (BLIP, {}, r"without its towers: it does not take text alone \(.*pixel_values"),
    ({**GPT_OSS, "quantization_config": {"quant_method": "mxfp4"}}, {},
     r"quantized weights \(quantization_config: mxfp4\)\. Name the same model in 16 or 32 bits, or write them "
     r"once, for all runs: shardmake fetch NAME --dequantize FOLDER, then set model: FOLDER\."),
    ({**LLAMA, "quantization_config": {"quant_method": "fp8"}}, {"method": "lora"}, "fp8"),
    ({**LLAMA, "quantization_config": {"quant_method": "gptq"}}, {},
     r"\(quantization_config: gptq\)\. Name the same model in 16 or 32 bits\. For adapters on a base in 4 bits name that"),
    ({**LLAMA, "quantization_config": {"quant_method": "modelopt"}}, {}, r"modelopt\)\. Name the same model in 16 or 32 bits\. F"),
    ({**LLAMA, "quantization_config": {"quant_method": "fbgemm_fp8"}}, {}, r"fbgemm_fp8\)\. Name the same model in 16 or 32 bits\. F"),
    ({**LLAMA, "quantization_config": {"quant_method": "bitsandbytes"}}, {"method": "lora"},
     r"or save one: load it with transformers, call the model's dequantize\(\) and save_pretrained\."),
    ({**LLAMA, "compression_config": {"quant_method": "compressed-tensors"}}, {},
     r"\(compression_config: compressed-tensors\)"),
    (MIXTRAL, {"method": "lora", "lora": {"dropout": 0.1}}, r"PEFT cannot adapt .*lora_dropout != 0\. Change the section"),
    (MIXTRAL, {"method": "lora", "lora": {"targets": ["gate_up"]}}, r"PEFT cannot adapt .*'gate_up'\} not found"),
    ({"model_type": "vit", **SIZES}, {}, "no causal language model for the model type 'vit'"),
    ({**LLAMA, "architectures": ["LlamaForSequenceClassification"]}, {},
     "names the class LlamaForSequenceClassification, but causal language models of this type are LlamaForCausalLM"),
    ({**LLAMA, "hidden_act": "sillu"}, {},
     r"has the hidden_act 'sillu', which transformers .* does not know\. .* It knows gelu, .*, silu, "),
    ({**LLAMA, "rope_scaling": {"type": "yarm", "factor": 2.0}}, {}, r"has the rope_type 'yarm', which .* yarn\."),
    ({**LLAMA, "rope_scaling": {"type": "longrope", "factor": 2.0}}, {},
     r"has the rope_type 'longrope' without long_factor, short_factor, which transformers .* requires\."),
    ({**LLAMA, "hidden_act": ["silu"]}, {}, r"has the hidden_act \['silu'\], which transformers"),
    ({"model_type": "bert", **SIZES, "architectures": ["BertForMaskedLM"]}, {}, "names the class BertForMaskedLM"),
    (LLAMA, {"method": "lora", "lora": {"targets": ["c_attn"]}}, "target not found"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("config", "settings", "sentence"), REFUSED, ids=[f"{c['model_type']}-{'-'.join(s)}" for c, s, _ in REFUSED]
)
def test_what_the_model_cannot_do_is_refused(config: Values, settings: Values, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ShardmakeError, match=sentence):
        resolved(make_run(model=make_folder(tmp_path, config), **settings))


def test_the_ways_to_dequantize_are_those_of_transformers() -> None:
    """Without GGUF, which config.json does not declare."""
    assert set(dequantize.METHODS) == abilities.DEQUANTIZED_BY_FETCH
    kinds = AUTO_QUANTIZATION_CONFIG_MAPPING.items()
    loading = {name for name, kind in kinds if "dequantize" in signature(kind).parameters}
    assert loading - {"gguf"} == abilities.DEQUANTIZED_BY_LOADING
    after = {name for name, kind in AUTO_QUANTIZER_MAPPING.items() if kind._dequantize is not HfQuantizer._dequantize}
    assert {name.removesuffix("_4bit").removesuffix("_8bit") for name in after} == abilities.DEQUANTIZED_AFTER_LOADING


def test_a_script_may_load_a_quantized_base_and_the_plan_states_what_it_counts(tmp_path: Path) -> None:
    config = {**LLAMA, "quantization_config": {"quant_method": "gptq"}}
    for method, counted in (("lora", "16 or 32 bits, as if it were"), ("qlora", "4 bits")):
        run = make_run(model=make_folder(tmp_path, config), script="train.py", method=method, attention="sdpa")
        (line,) = describe_quantized_base(read_model(run.model), run)
        assert counted in line and line.endswith("its files hold quantized weights (quantization_config: gptq)")
    assert describe_quantized_base(read_model(make_folder(tmp_path, LLAMA)), run) == []


def test_estimate_refuses_the_same_models(tmp_path: Path) -> None:
    with pytest.raises(ShardmakeError, match="encoder-decoder model"):
        resolve_request(EstimateRequest(make_folder(tmp_path, T5)))
    with pytest.raises(ShardmakeError, match="attention: sdpa cannot be used"):
        resolve_request(EstimateRequest(make_folder(tmp_path, GEMMA2), attention="sdpa"))
    with pytest.raises(ShardmakeError, match="has only 512 positions"):
        resolve_request(EstimateRequest(make_folder(tmp_path, {**GPT2, "n_positions": 512}), sequence_length=999_999))
    assert resolve_request(EstimateRequest(make_folder(tmp_path, BLOOM), sequence_length=64)).attention == "eager"
    assert resolve_request(EstimateRequest(make_folder(tmp_path, OPT), sequence_length=64)).attention == "varlen"
    assert resolve_request(EstimateRequest(make_folder(tmp_path, GEMMA2), sequence_length=64)).attention == "flash"


def gpus(**changes: Any) -> resolve.Cluster:
    return make_cluster(accelerator="a100-80gb", intra_node_gbps=None, memory_gib_per_node=1000, **changes)


SOFTCAP = r"Gemma2ForCausalLM changes the attention scores \(softcap\)"
TAKEN: list[tuple[Values, dict[str, str] | None, Values, str, str]] = [
    (GEMMA2, None, {}, "eager", ""), (BLOOM, None, {"packing": False}, "eager", ""),
    (OPT, None, {"packing": False}, "sdpa", ""), (GPT2, None, {"method": "lora"}, "sdpa", ""),
    (MIXTRAL, None, {"method": "lora", "lora": {"targets": ["q_proj", "gate_up_proj"]}}, "sdpa", ""),
    (BLOOM, None, {"script": "train.py"}, "eager", ""), (LLAMA, {}, {}, "varlen", ""),
    (LLAMA, {"accelerator": "t4"}, {}, "sdpa", "varlen needs Ampere or later, and t4 is older"),
    (LLAMA, {}, {"precision": "fp32"}, "sdpa", "varlen needs precision bf16 or fp16, .*fp32"),
    (LLAMA, {}, {"attention": "sdpa"}, "sdpa", ""), (LLAMA, {}, {"script": "train.py"}, "sdpa", ""),
    ({**LLAMA, "attention_dropout": 0.1}, {}, {}, "sdpa", "LlamaForCausalLM has dropout"),
    ({"model_type": "gemma", **SIZES, "head_dim": 512}, {}, {}, "sdpa", "has heads of 512 numbers"),
    ({**GPT2, "n_positions": 4096}, {}, {}, "sdpa", "GPT2LMHeadModel has dropout in its attention"),
    (GEMMA2, {}, {}, "eager", SOFTCAP), (OPT, {}, {}, "varlen", ""),
]  # fmt: skip


@pytest.mark.parametrize(
    ("config", "gpu", "settings", "attention", "reason"), TAKEN,
    ids=["-".join([c["model_type"], "cpu" * (g is None), *(g or {}).values(), *s]) for c, g, s, _, _ in TAKEN],
)  # fmt: skip
def test_auto_takes_what_the_model_supports_or_says_why_not_varlen(
    config: Values, gpu: dict[str, str] | None, settings: Values, attention: str, reason: str,
    tmp_path: Path,
) -> None:  # fmt: skip
    run = make_run(model=make_folder(tmp_path, config), **settings)
    found = resolved(run, make_cluster() if gpu is None else gpus().model_copy(update=gpu))
    assert found.attention == attention
    assert re.search(reason, found.attention_reason) and bool(reason) == bool(found.attention_reason)


def test_varlen_is_refused_for_models_that_cannot_take_it(tmp_path: Path) -> None:
    run = make_run(model=make_folder(tmp_path, GEMMA2), attention="varlen", sequence_length=64)
    with pytest.raises(ShardmakeError, match=r"changes the attention scores \(softcap\)\. Use flash or eager"):
        resolve.resolve(run, gpus())


def install(package: Path, name: str, version: str) -> None:
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    metadata = package.with_name(f"{name.replace('-', '_')}-{version}.dist-info") / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Name: {name}\nVersion: {version}\n")


@pytest.mark.parametrize(("name", "version", "accepted"), [
    ("flash-attn", "2.8.3", True), ("flash-attn", "2.2.0", False), ("flash-attn-4", "4.0.0", False),
])  # fmt: skip
def test_flash_is_flash_attn_2(name: str, version: str, accepted: bool, tmp_path: Path, monkeypatch: Patch) -> None:
    """flash-attn-4 has the same import name, and transformers runs it under another name."""
    install(tmp_path / "site/flash_attn", name, version)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    run = make_run(model=make_folder(tmp_path, LLAMA), attention="flash", sequence_length=64)
    settings = resolve.resolve(run, gpus())
    if accepted:
        resolve.check(settings)
    else:
        with pytest.raises(ShardmakeError, match=r"needs the package flash-attn 2 .* Take attention: varlen"):
            resolve.check(settings)


def test_best_attention_prefers_a_kernel_that_can_pack() -> None:
    own = Abilities("Own", attention=("sdpa", "eager"), mixing=("sdpa",))
    assert own.best_attention(("flash", "sdpa", "eager"), packing=True) == "eager"
    assert own.best_attention(("flash", "sdpa", "eager"), packing=False) == "sdpa"
    assert Abilities("Own", attention=("flash",)).best_attention(("sdpa",), packing=True) == "eager"


def test_a_model_without_gradient_checkpointing(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(resolve, "find_abilities", lambda model, run: Abilities("Own", gradient_checkpointing=False))
    model = make_folder(tmp_path, LLAMA)
    with pytest.raises(ShardmakeError, match=r"gradient_checkpointing: true cannot be used: Own does not support it"):
        resolved(make_run(model=model, gradient_checkpointing=True))
    found = list(choices(resolved(make_run(model=model))))
    assert found and not any(choice.gradient_checkpointing for choice in found)


def test_the_helper_answers_as_a_process(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run = make_run(model=make_folder(tmp_path, BLOOM), packing=False)
    assert resolved(run).abilities.attention == ("eager",)
    with pytest.raises(ShardmakeError, match="mixes packed examples"):
        resolved(run.model_copy(update={"packing": True}))


def test_a_model_with_its_own_code_is_asked_itself(tmp_path: Path) -> None:
    """Its model type may be that of a family, but its class is another one."""
    (tmp_path / "own.py").write_text(
        "from transformers import LlamaForCausalLM\n"
        "class OwnForCausalLM(LlamaForCausalLM):\n"
        "    _supports_flash_attn = False\n"
        "    supports_gradient_checkpointing = False\n"
        "    def forward(self, input_ids, position_ids=None, **rest):\n"
        "        return super().forward(input_ids, **rest)\n"
    )
    own = {"architectures": ["OwnForCausalLM"], "auto_map": {"AutoModelForCausalLM": "own.OwnForCausalLM"}}
    run = make_run(model=make_folder(tmp_path, {**LLAMA, **own}), trust_remote_code=True)
    found = resolve.resolve(run, make_cluster()).abilities
    limit, kernels = "does not take the attention functions that others register", ("sdpa", "eager")
    assert found == Abilities("OwnForCausalLM", kernels, kernels, limit, gradient_checkpointing=False)


def test_a_fused_loss_that_the_installed_liger_does_not_have(tmp_path: Path, monkeypatch: Patch) -> None:
    package = tmp_path / "site/liger_kernel"
    install(package, "liger-kernel", "0.7.0")
    (package / "transformers").mkdir()
    table = 'MODEL_TYPE_TO_APPLY_LIGER_FN = {"llama": apply_to_llama, "qwen2": apply_to_qwen2}'
    (package / "transformers/monkey_patch.py").write_text(f"import no_such_package\n{table}\n")
    monkeypatch.syspath_prepend(str(package.parent))
    llama, bloom = make_model(), replace(make_model(), model_type="bloom", decoder=None)
    refuse(wrong_loss(make_run(loss="fused"), llama))
    refuse(wrong_loss(make_run(), bloom))
    with pytest.raises(ShardmakeError, match=r"liger-kernel 0\.7\.0 has no kernels for .*'bloom'.*llama, qwen2"):
        refuse(wrong_loss(make_run(loss="fused"), bloom))


def test_a_shrunken_config_keeps_each_kind_of_layer_and_the_size_of_a_head() -> None:
    kinds = ["sliding"] * 5 + ["full"] + ["sliding"] * 5 + ["full"]
    large = {
        "num_hidden_layers": 12, "layer_types": kinds, "hidden_size": 4096, "num_attention_heads": 32,
        "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128_256, "eos_token_id": [128_001, 128_009],
        "text": {"model_type": "part", "num_layers": 40, "num_heads": 71, "d_model": 71 * 64},
    }  # fmt: skip
    small = shrunk(large, narrow="all")
    assert small["layer_types"] == ["sliding", "full"] and small["num_hidden_layers"] == 2
    assert small["hidden_size"] / small["num_attention_heads"] == 128 and small["num_key_value_heads"] == 1
    assert small["vocab_size"] == 64 and all(token < 64 for token in small["eos_token_id"])
    assert small["text"] == {"model_type": "part", "num_layers": 2, "num_heads": 1, "d_model": 64}
    assert shrunk(large, narrow="none")["hidden_size"] == 4096


@pytest.mark.parametrize("kind", ["gemma4_text", "gemma3n_text"])
def test_a_small_model_whose_last_layers_share_keys_runs(kind: str) -> None:
    """Each kind of layer that shares keys needs one of its kind before it, as in E2B and E4B."""
    kinds = (["sliding_attention"] * 4 + ["full_attention"]) * 4
    large = AutoConfig.for_model(kind, num_hidden_layers=20, num_kv_shared_layers=10, layer_types=kinds)
    small = type(large).from_dict(shrunk(large.to_dict(), narrow="all"))
    assert (small.num_hidden_layers, small.num_kv_shared_layers) == (4, 2)
    AutoModelForCausalLM.from_config(small)(torch.arange(8)[None])


@pytest.mark.parametrize("kind", [*ROPE_INIT_FUNCTIONS, "default", "mrope"])
def test_the_keys_that_a_kind_of_rope_requires_are_those_of_transformers(kind: str) -> None:
    required = {key: [2.0] if key in ("short_factor", "long_factor") else 2.0 for key in abilities._required(kind)}
    rope = {"rope_type": kind, "rope_theta": 1e4, **required}
    AutoConfig.for_model(**LLAMA, rope_parameters={**rope})
    for missing in required:
        with pytest.raises(KeyError, match=missing):
            AutoConfig.for_model(**LLAMA, rope_parameters={key: rope[key] for key in rope if key != missing})


HYBRIDS = {
    "qwen3_5_text": (24, 4, 16, 48), "qwen3_5_moe_text": (32, 2, 16, 64), "qwen3_next": (40, 8, 16, 48),
}  # fmt: skip
"""Heads of attention, and of its keys; those of linear attention, whose values have a multiple of its keys'."""


@pytest.mark.parametrize("kind", HYBRIDS)
def test_a_small_model_with_several_kinds_of_heads_runs(kind: str) -> None:
    names = ("num_attention_heads", "num_key_value_heads", "linear_num_key_heads", "linear_num_value_heads")
    heads = dict(zip(names, HYBRIDS[kind], strict=True))
    config = {"model_type": kind, "hidden_size": 5120, "head_dim": 256, "intermediate_size": 17_408, **heads}
    assert ask(config, "head") == {"plain": True}  # only of a small model that runs


def test_adapters_of_weights_that_the_files_store_in_parts(monkeypatch: Patch) -> None:
    """A weight of another name alone is found; the adapter of one whose rows are apart would be trained, not merged."""
    module = "model.layers.0.self_attn"
    query = f"{module}.q_proj.weight"
    parts = [
        HubWeight(f"q.{part}", (32, 64), (Part(query, part * 1024, 1024), Part(query, 2048 + part * 1024, 1024, 1024)))
        for part in (0, 1)
    ]
    renamed = HubWeight("v.weight", (64, 64), (Part(f"{module}.v_proj.weight", 0, 4096),))
    monkeypatch.setattr(inspect_model, "hub_weights", lambda *_: [*parts, renamed])
    config = {"model_type": "qwen3_moe", **SIZES}
    assert answer(config, ["q_proj"]).unmergeable == (f"{module}.q_proj, which its files store in parts",)
    assert answer(config, ["v_proj"]).unmergeable == ()


@pytest.mark.parametrize(("config", "targets"), [
    (MIXTRAL, ["q_proj", "k_proj", "v_proj", "o_proj"]),
    ({"model_type": "olmoe", **SIZES, "num_experts": 4}, ["q_proj", "k_proj", "v_proj", "o_proj"]),
    (DEEPSEEK, ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]),
], ids=lambda value: value["model_type"] if isinstance(value, dict) else None)  # fmt: skip
def test_a_refused_mixture_names_the_targets_that_can_be_merged(config: Values, targets: list[str]) -> None:
    """Of a base in 4 bits, adapters of the experts are not proved."""
    refused = answer(config, "all-linear", "qlora")
    assert [*refused.mergeable_targets] == targets and len(refused.unmergeable) == 2
    accepted = answer(config, "all-linear")
    assert not accepted.unmergeable and accepted.adapted_experts == ("down_proj", "gate_up_proj")


@pytest.mark.parametrize(("config", "targets", "words"), [
    (MIXTRAL, "all-linear", "each has its own adapters of down_proj, gate_up_proj"),
    (GPT_OSS, ["q_proj", "experts.down_proj"], "each has its own adapters of down_proj; gate_up_proj stay as they"),
    (GPT_OSS, "all-linear", r"down_proj, gate_up_proj stay as they are \(to adapt them, name them in lora\.targets"),
    ({"model_type": "qwen2_moe", **SIZES, "num_experts": 4}, "all-linear", r"down_proj, gate_up_proj stay as they are"),
])  # fmt: skip
def test_the_plan_says_which_experts_get_adapters(config: Values, targets: str | list[str], words: str) -> None:
    found = answer(config, targets)
    (line,) = found.describe_experts()
    assert re.search(rf"^experts: {words}", line) and not found.unmergeable
