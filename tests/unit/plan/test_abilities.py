"""The abilities of models are found out at plan: tiny configs of each kind, asked of transformers' own classes."""

import json
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from shardmake.commands.estimate import EstimateRequest, resolve_request
from shardmake.config.models import Run
from shardmake.core.errors import ShardmakeError
from shardmake.memory import cache
from shardmake.memory.families import FAMILIES
from shardmake.plan import abilities, inspect_model, resolve
from shardmake.plan.abilities import Abilities
from shardmake.plan.candidates import choices
from shardmake.plan.shrink import shrunk
from tests.unit.plans import make_cluster, make_run

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 320,
}
GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 3, "n_head": 8, "vocab_size": 320}
GEMMA2 = {"model_type": "gemma2", **SIZES, "head_dim": 8}
BLOOM = {"model_type": "bloom", "hidden_size": 64, "n_layer": 3, "n_head": 8, "vocab_size": 320}
OPT = {"model_type": "opt", **SIZES, "ffn_dim": 112, "word_embed_proj_dim": 64, "max_position_embeddings": 64}
T5 = {
    "model_type": "t5",
    "d_model": 64,
    "d_ff": 96,
    "num_layers": 2,
    "num_heads": 4,
    "d_kv": 16,
    "vocab_size": 320,
    "is_encoder_decoder": True,
    "architectures": ["T5ForConditionalGeneration"],
}
MIXTRAL = {"model_type": "mixtral", **SIZES, "num_local_experts": 4}
ALL, NO_SDPA = ["flash", "sdpa", "eager"], ["flash", "eager"]


@pytest.fixture(autouse=True)
def helpers_in_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answer the helpers' requests here: a process of its own imports torch, which takes longer than the answer."""

    def run_helper(module: str, request: Mapping[str, Any]) -> Any:
        return json.loads(json.dumps(import_module(module).answer(json.loads(json.dumps(request)))))

    monkeypatch.setattr(cache, "run_helper", run_helper)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def resolved(run: Run) -> resolve.ResolvedRun:
    settings = resolve.resolve(run, make_cluster())
    resolve.check(settings)
    return settings


def answer(config: dict[str, Any], targets: str | list[str] | None = None) -> dict[str, Any]:
    adapters = {"rank": 4, "targets": targets} if targets else None
    request = {"config": config, "source": "config.json", "trust_remote_code": False, "adapters": adapters}
    return inspect_model.answer(request)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_families_that_are_written_down_can_do_everything(family: str) -> None:
    found = answer({"model_type": family, **SIZES}, "all-linear")
    found = {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}
    assert Abilities(**found) == Abilities(FAMILIES[family].architecture)


@pytest.mark.parametrize(
    ("config", "attention", "mixing"),
    [
        (GPT2, ALL, []),
        (GEMMA2, NO_SDPA, []),
        (BLOOM, ["eager"], ["eager"]),
        (OPT, ALL, ["sdpa", "eager"]),
        (MIXTRAL, ALL, []),
        ({"model_type": "mamba", "hidden_size": 64, "num_hidden_layers": 3, "vocab_size": 320}, ["eager"], ["eager"]),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else ",".join(value) or "none",
)
def test_attention_and_packing_are_those_of_the_class(
    config: dict[str, Any], attention: list[str], mixing: list[str]
) -> None:
    found = answer(config)
    assert (found["attention"], found["mixing"]) == (attention, mixing)


def make_folder(tmp_path: Path, config: dict[str, Any]) -> str:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


REFUSED = [
    (BLOOM, {}, r"packing: true cannot be used: BloomForCausalLM mixes .* attention eager.* Set packing: false\.$"),
    (BLOOM, {"attention": "sdpa"}, r"attention: sdpa cannot be used: BloomForCausalLM .*Use eager, or auto\."),
    (GEMMA2, {"attention": "sdpa"}, r"Gemma2ForCausalLM does not support it .*Use flash or eager, or auto\."),
    (OPT, {}, r"packing: true cannot be used: OPTForCausalLM mixes"),
    (T5, {}, r"config\.json is an encoder-decoder model \(t5\)\. Shardmake trains causal"),
    (T5, {"script": "train.py"}, "encoder-decoder model"),
    (MIXTRAL, {"method": "lora"}, r"lora\.targets all-linear cannot be merged for MixtralForCausalLM.*target_param"),
    ({"model_type": "vit", **SIZES}, {}, "no causal language model for the model type 'vit'"),
    ({"model_type": "llama", **SIZES, "architectures": ["LlamaForSequenceClassification"]}, {},
     "names the class LlamaForSequenceClassification, but causal language models of this type are LlamaForCausalLM"),
    ({"model_type": "bert", **SIZES, "architectures": ["BertForMaskedLM"]}, {}, "names the class BertForMaskedLM"),
    ({"model_type": "llama", **SIZES}, {"method": "lora", "lora": {"targets": ["c_attn"]}}, "target not found"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("config", "settings", "sentence"), REFUSED, ids=[f"{c['model_type']}-{'-'.join(s)}" for c, s, _ in REFUSED]
)
def test_what_the_model_cannot_do_is_refused_at_plan(
    config: dict[str, Any], settings: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(ShardmakeError, match=sentence):
        resolved(make_run(model=make_folder(tmp_path, config), **settings))


ACCEPTED = [
    (GEMMA2, {}, "eager"),
    (BLOOM, {"packing": False}, "eager"),
    (OPT, {"packing": False}, "sdpa"),
    (GPT2, {"method": "lora"}, "sdpa"),
    (MIXTRAL, {"method": "lora", "lora": {"targets": ["q_proj", "v_proj"]}}, "sdpa"),
    (BLOOM, {"script": "train.py"}, "eager"),
]


@pytest.mark.parametrize(
    ("config", "settings", "attention"), ACCEPTED, ids=[f"{c['model_type']}-{'-'.join(s)}" for c, s, _ in ACCEPTED]
)
def test_auto_takes_what_the_model_supports(
    config: dict[str, Any], settings: dict[str, Any], attention: str, tmp_path: Path
) -> None:
    run = make_run(model=make_folder(tmp_path, config), **settings)
    assert resolved(run).attention == attention


def test_estimate_refuses_the_same_models(tmp_path: Path) -> None:
    with pytest.raises(ShardmakeError, match="encoder-decoder model"):
        resolve_request(EstimateRequest(make_folder(tmp_path, T5)))
    with pytest.raises(ShardmakeError, match="attention: sdpa cannot be used"):
        resolve_request(EstimateRequest(make_folder(tmp_path, GEMMA2), attention="sdpa"))
    with pytest.raises(ShardmakeError, match="has only 512 positions"):
        resolve_request(EstimateRequest(make_folder(tmp_path, {**GPT2, "n_positions": 512}), sequence_length=999_999))
    assert resolve_request(EstimateRequest(make_folder(tmp_path, BLOOM), sequence_length=64)).attention == "eager"
    assert resolve_request(EstimateRequest(make_folder(tmp_path, OPT), sequence_length=64)).attention == "flash"


def test_best_attention_prefers_a_kernel_that_can_pack() -> None:
    own = Abilities("Own", attention=("sdpa", "eager"), mixing=("sdpa",))
    assert own.best_attention(("flash", "sdpa", "eager"), packing=True) == "eager"
    assert own.best_attention(("flash", "sdpa", "eager"), packing=False) == "sdpa"
    assert Abilities("Own", attention=("flash",)).best_attention(("sdpa",), packing=True) == "eager"


def test_a_model_without_gradient_checkpointing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve, "find_abilities", lambda model, run: Abilities("Own", gradient_checkpointing=False))
    model = make_folder(tmp_path, {"model_type": "llama", **SIZES})
    with pytest.raises(ShardmakeError, match=r"gradient_checkpointing: true cannot be used: Own does not support it"):
        resolved(make_run(model=model, gradient_checkpointing=True))
    found = list(choices(resolved(make_run(model=model))))
    assert found and not any(choice.gradient_checkpointing for choice in found)


def test_the_helper_answers_as_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    run = make_run(model=make_folder(tmp_path, {"model_type": "llama", **SIZES, **own}), trust_remote_code=True)
    found = resolve.resolve(run, make_cluster()).abilities
    assert found == Abilities("OwnForCausalLM", ("sdpa", "eager"), ("sdpa", "eager"), gradient_checkpointing=False)


def test_a_fused_loss_that_the_installed_liger_does_not_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site/liger_kernel"
    (package / "transformers").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    table = 'MODEL_TYPE_TO_APPLY_LIGER_FN = {"llama": apply_to_llama, "qwen2": apply_to_qwen2}'
    (package / "transformers/monkey_patch.py").write_text(f"import no_such_package\n{table}\n")
    (package.parent / "liger_kernel-0.7.0.dist-info").mkdir()
    (package.parent / "liger_kernel-0.7.0.dist-info/METADATA").write_text("Name: liger-kernel\nVersion: 0.7.0\n")
    monkeypatch.syspath_prepend(str(package.parent))
    abilities.check_loss(make_run(loss="fused"), "llama")
    abilities.check_loss(make_run(), "bloom")
    with pytest.raises(ShardmakeError, match=r"liger-kernel 0\.7\.0 has no kernels for .*'bloom'.*llama, qwen2"):
        abilities.check_loss(make_run(loss="fused"), "bloom")


def test_a_shrunken_config_keeps_each_kind_of_layer_and_the_size_of_a_head() -> None:
    kinds = ["sliding"] * 5 + ["full"] + ["sliding"] * 5 + ["full"]
    large = {
        "num_hidden_layers": 12,
        "layer_types": kinds,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 128_256,
        "eos_token_id": [128_001, 128_009],
        "text": {"model_type": "part", "num_layers": 40, "num_heads": 71, "d_model": 71 * 64},
    }
    small = shrunk(large, narrow=True)
    assert small["layer_types"] == ["sliding", "full"] and small["num_hidden_layers"] == 2
    assert small["hidden_size"] / small["num_attention_heads"] == 128 and small["num_key_value_heads"] == 1
    assert small["vocab_size"] == 64 and all(token < 64 for token in small["eos_token_id"])
    assert small["text"] == {"model_type": "part", "num_layers": 2, "num_heads": 1, "d_model": 64}
    assert shrunk(large, narrow=False)["hidden_size"] == 4096
