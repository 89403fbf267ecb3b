"""Configurations that cannot be estimated are rejected with the key."""

import json
from pathlib import Path

import pytest

from shardmake.core.errors import ModelError, ShardmakeError
from shardmake.memory.model import split
from shardmake.memory.read_config import from_config, read_model

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
}


BAD = [
    ({}, "no model_type"),
    ({**SIZES, "model_type": "llama", "hidden_size": 0}, "hidden_size is 0"),
    ({**SIZES, "model_type": "llama", "vocab_size": -5}, "vocab_size is -5"),
    ({**SIZES, "model_type": "llama", "num_hidden_layers": 1 << 40}, "num_hidden_layers is"),
    ({**SIZES, "model_type": ["llama"]}, "has no model_type"),
    ({**SIZES, "model_type": "llama", "hidden_size": [64]}, r"hidden_size is \[64\]"),
    ({**SIZES, "model_type": "llama", "num_attention_heads": "4"}, "num_attention_heads is '4'"),
    ({**SIZES, "model_type": "llama", "num_key_value_heads": 0}, "num_key_value_heads is 0"),
    ({**SIZES, "model_type": "llama", "head_dim": "x"}, "head_dim is 'x'"),
    ({**SIZES, "model_type": "llama", "hidden_size": 10**15}, "from 1 to 2,147,483,647"),
    ({**SIZES, "model_type": "llama", "num_hidden_layers": 10**7}, "from 1 to 10,000"),
    ({**SIZES, "model_type": "llama", "max_position_embeddings": float("nan")}, "max_position_embeddings is nan"),
    ({**SIZES, "model_type": "llama", "sliding_window": "abc"}, "sliding_window is 'abc'. It must be a whole number"),
    ({**SIZES, "model_type": "llama", "sliding_window": True}, "sliding_window is True"),
    ({**SIZES, "model_type": "gpt2", "num_experts": 1e20}, r"num_experts is 1e\+20"),
    ({**SIZES, "model_type": "qwen3_moe", "num_experts": 10**30}, "num_experts is 1000"),
    ({**SIZES, "model_type": "llama", "architectures": True}, "architectures is True. It must be a list"),
    ({**SIZES, "model_type": "llama", "architectures": [1]}, r"architectures is \[1\]"),
    ({"model_type": "vit", "hidden_size": 64}, "no causal language model for the model type 'vit'"),
    ({"model_type": "gpt2", "n_embd": 64}, "num_layers or .* is missing"),
    ({**SIZES, "model_type": "llamma"}, "has no model type 'llamma'"),
    ({**SIZES, "model_type": "olmo3", "layer_types": ["full_attention"]}, "rejects this config: .* number of `layer_t"),
    ({**SIZES, "model_type": "own", "auto_map": {"AutoModelForCausalLM": "own.Model"}}, "needs its own Python code"),
    ({**SIZES, "model_type": "own", "auto_map": 1}, "auto_map is 1. It must be an object"),
]


@pytest.mark.parametrize(("config", "sentence"), BAD, ids=lambda value: str(value)[:30])
def test_bad_configs_are_rejected(config: dict, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    with pytest.raises(ShardmakeError, match=sentence):
        read_model(str(path))


@pytest.mark.parametrize("text", ["[" * 5000, "1" * 5000, "{", "\ud800"], ids=["deep", "long", "open", "surrogate"])
def test_files_that_are_not_json_are_rejected(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(text.encode(errors="surrogatepass"))
    with pytest.raises(ModelError, match="is not valid JSON"):
        read_model(str(tmp_path))


def test_a_config_with_an_infinite_number_is_read_as_transformers_writes_it(tmp_path: Path) -> None:
    from transformers import LlamaConfig

    LlamaConfig(**SIZES, time_step_limit=[0.0, float("inf")]).save_pretrained(tmp_path)
    assert "__float__" in (tmp_path / "config.json").read_text()
    assert read_model(str(tmp_path)).config["time_step_limit"] == [0.0, float("inf")]


def test_a_config_that_lists_its_layers_needs_no_number_of_them() -> None:
    """As transformers saves Nemotron-H."""
    sizes = {**SIZES, "head_dim": 16, "ssm_state_size": 16, "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2}
    del sizes["num_hidden_layers"]
    assert len(from_config({**sizes, "model_type": "nemotron_h", "layers_block_type": ["mamba", "moe"]}).blocks) == 2


def test_code_beside_a_model_that_transformers_knows_is_not_needed() -> None:
    """Phi-3 and others were published with code before transformers had it; transformers' own then loads them."""
    code = {"AutoConfig": "configuration_olmo2.Olmo2Config", "AutoModelForCausalLM": "modeling_olmo2.Olmo2ForCausalLM"}
    config = {**SIZES, "model_type": "olmo2", "pad_token_id": 1}
    assert from_config({**config, "auto_map": code}).parameters == from_config(config).parameters


def test_code_that_cannot_be_loaded_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**SIZES, "model_type": "own", "auto_map": {"AutoConfig": "missing.Config"}}))
    with pytest.raises(ShardmakeError, match="own code cannot be loaded"):
        read_model(str(path), trust_remote_code=True)


@pytest.mark.parametrize(("text", "kind"), [('{"peft_type": "IA3"}', "IA3"), ("{", "PEFT"), ("[]", "PEFT")])
def test_adapters_are_refused_by_the_name_of_their_kind(text: str, kind: str, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(text)
    with pytest.raises(
        ShardmakeError, match=rf"^Not a base model: .* holds {kind} adapters; .*Name their base model\.$"
    ):
        read_model(str(tmp_path))


def test_an_error_of_a_library_is_one_line() -> None:
    config = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 320, "n_positions": "x"}
    with pytest.raises(ModelError, match=r"rejects this config: .*n_positions") as raised:
        from_config(config, source="config.json")
    assert "\n" not in str(raised.value)


def test_missing_models_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(ShardmakeError, match=r"no config\.json"):
        read_model(str(tmp_path))
    with pytest.raises(ShardmakeError, match="no model at"):
        read_model("./nowhere")
    with pytest.raises(ShardmakeError, match="Adapter target not found"):
        split(from_config({**SIZES, "model_type": "llama"}), "lora", 8, ["q_prjo"])
    with pytest.raises(ShardmakeError, match="No adapter target is named"):
        split(from_config({**SIZES, "model_type": "llama"}), "lora", 8, [])


@pytest.mark.parametrize("word", ["lm_head", "q_proj"])
def test_the_head_of_a_tied_model_gets_no_adapter(word: str) -> None:
    tied = from_config({**SIZES, "model_type": "llama", "tie_word_embeddings": True})
    if word == "lm_head":
        with pytest.raises(ShardmakeError, match="The head of this LlamaForCausalLM is its embedding"):
            split(tied, "lora", 8, [word])
    else:
        split(tied, "lora", 8, [word])
    split(from_config({**SIZES, "model_type": "llama"}), "lora", 8, [word])


@pytest.mark.parametrize("kind", ["llama", "olmo2"])
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"rope_theta": "10000"}, "rope_theta is '10000'. It must be a number above 0"),
        ({"rope_theta": -1}, "rope_theta is -1"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": "1e4"}}, "rope_theta is '1e4'"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "2"}}, "factor is '2'"),
        ({"rope_parameters": {"full_attention": {"rope_theta": True}}}, "rope_theta is True"),
    ],
    ids=str,
)
def test_text_in_place_of_a_number_of_the_rotary_embedding_is_refused(kind: str, change: dict, sentence: str) -> None:
    """transformers' config takes it, and the ranks would fail."""
    with pytest.raises(ModelError, match=sentence):
        from_config({**SIZES, "model_type": kind, **change})


BAD_SIZES = [
    ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
    ({"num_attention_heads": 7, "num_key_value_heads": 7}, "hidden_size is not a multiple of 7"),
    ({"pad_token_id": 320}, "pad_token_id is 320, but vocab_size is 320"),
    ({"num_key_value_heads": 3}, "4 num_attention_heads cannot share 3"),
    ({"model_type": "olmo2", "vocab_size": None}, "vocab_size is missing"),
    (
        {"model_type": "mistral", "num_key_value_heads": None},
        "4 num_attention_heads cannot share 8 num_key_value_heads, the default of mistral,",
    ),
]


@pytest.mark.parametrize(("change", "sentence"), BAD_SIZES, ids=str)
def test_missing_or_contradictory_sizes_are_rejected(change: dict, sentence: str) -> None:
    with pytest.raises(ShardmakeError, match=sentence):
        from_config({"model_type": "llama", **SIZES, **change}, source="config.json")
