"""Configurations that cannot be estimated are rejected with the key."""

import json
from pathlib import Path

import pytest

from shardmake.core.errors import ModelError, ShardmakeError
from shardmake.memory.model import split
from shardmake.memory.read_config import from_config, read_model
from tests.unit.memory.test_parameter_inventory import SIZES

LLAMA = {"model_type": "llama", **SIZES}
PEFT = r"^Not a base model: .* holds {} adapters; .*Name their base model\.$"
UNREADABLE = {
    "empty": ("config.json", "{}", "no model_type"), "deep": ("config.json", "[" * 5000, "is not valid JSON"),
    "long": ("config.json", "1" * 5000, "is not valid JSON"), "open": ("config.json", "{", "is not valid JSON"),
    "surrogate": ("config.json", "\ud800", "is not valid JSON"),
    "17 MiB": ("config.json", " " * (17 << 20), "is larger than 16 MiB. A config.json is not."),
    "no sizes": ("config.json", '{"model_type": "gpt2", "n_embd": 64}', "num_layers or .* is missing"),
    "other adapters": ("adapter_config.json", '{"peft_type": "IA3"}', PEFT.format("IA3")),
    "open adapters": ("adapter_config.json", "{", PEFT.format("PEFT")),
    "a list of adapters": ("adapter_config.json", "[]", PEFT.format("PEFT")),
}  # fmt: skip


@pytest.mark.parametrize("name", UNREADABLE)
def test_files_that_hold_no_model_are_rejected(name: str, tmp_path: Path) -> None:
    file, text, sentence = UNREADABLE[name]
    (tmp_path / file).write_bytes(text.encode(errors="surrogatepass"))
    with pytest.raises(ModelError if "JSON" in sentence else ShardmakeError, match=sentence):
        read_model(str(tmp_path))


# What transformers' config takes of a rotary embedding, and the ranks would fail with.
ROTARY = [
    ({"rope_theta": "10000"}, "rope_theta is '10000'. It must be a number above 0"),
    ({"rope_theta": -1}, "rope_theta is -1"),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": "1e4"}}, "rope_theta is '1e4'"),
    ({"rope_scaling": {"rope_type": "linear", "factor": "2"}}, "factor is '2'"),
    ({"rope_parameters": {"full_attention": {"rope_theta": True}}}, "rope_theta is True"),
]
BAD = [
    ({"hidden_size": 0}, "hidden_size is 0"), ({"vocab_size": -5}, "vocab_size is -5"),
    ({"num_hidden_layers": 1 << 40}, "num_hidden_layers is"), ({"model_type": ["llama"]}, "has no model_type"),
    ({"hidden_size": [64]}, r"hidden_size is \[64\]"), ({"num_attention_heads": "4"}, "num_attention_heads is '4'"),
    ({"num_key_value_heads": 0}, "num_key_value_heads is 0"), ({"head_dim": "x"}, "head_dim is 'x'"),
    ({"hidden_size": 10**15}, "from 1 to 2,147,483,647"), ({"num_hidden_layers": 10**7}, "from 1 to 10,000"),
    ({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "num_hidden_layers": 10**12}},
     r"num_hidden_layers of text_config is 1000000000000\. It must be at most 10,000"),
    ({"max_position_embeddings": float("nan")}, "max_position_embeddings is nan"),
    ({"sliding_window": "abc"}, "sliding_window is 'abc'. It must be a whole number"),
    ({"sliding_window": True}, "sliding_window is True"),
    ({"model_type": "gpt2", "num_experts": 1e20}, r"num_experts is 1e\+20"),
    ({"model_type": "qwen3_moe", "num_experts": 10**30}, "num_experts is 1000"),
    ({"architectures": True}, "architectures is True. It must be a list"),
    ({"architectures": [1]}, r"architectures is \[1\]"),
    ({"model_type": "vit", "hidden_size": 64}, "no causal language model for the model type 'vit'"),
    ({"model_type": "llamma"}, "has no model type 'llamma'"),
    ({"model_type": "olmo3", "layer_types": ["full_attention"]}, "rejects this config: .* number of `layer_t"),
    ({"model_type": "own", "auto_map": {"AutoModelForCausalLM": "own.Model"}}, "needs its own Python code"),
    ({"model_type": "own", "auto_map": 1}, "auto_map is 1. It must be an object"),
    ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
    ({"num_attention_heads": 7, "num_key_value_heads": 7}, "hidden_size is not a multiple of 7"),
    ({"pad_token_id": 320}, "pad_token_id is 320, but vocab_size is 320"),
    ({"num_key_value_heads": 3}, "4 num_attention_heads cannot share 3"),
    ({"model_type": "olmo2", "vocab_size": None}, "vocab_size is missing"),
    ({"model_type": "mistral", "num_key_value_heads": None}, "rejects this config: .* 'num_key_value_heads'"),
    ({"model_type": "mistral", "num_key_value_heads": ...}, "4 .* share 8 num_key_value_heads, the default of mistral,"),
    *ROTARY, *(({"model_type": "olmo2", **change}, sentence) for change, sentence in ROTARY),
]  # fmt: skip


@pytest.mark.parametrize(("change", "sentence"), BAD, ids=lambda value: str(value)[:30])
def test_bad_configs_are_rejected(change: dict, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({key: value for key, value in {**LLAMA, **change}.items() if value is not ...}))
    with pytest.raises(ModelError, match=sentence):
        read_model(str(path))


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
        split(from_config(LLAMA), "lora", 8, ["q_prjo"])
    with pytest.raises(ShardmakeError, match="No adapter target is named"):
        split(from_config(LLAMA), "lora", 8, [])


@pytest.mark.parametrize("word", ["lm_head", "q_proj"])
def test_the_head_of_a_tied_model_gets_no_adapter(word: str) -> None:
    tied = from_config({**LLAMA, "tie_word_embeddings": True})
    if word == "lm_head":
        with pytest.raises(ShardmakeError, match="The head of this LlamaForCausalLM is its embedding"):
            split(tied, "lora", 8, [word])
    else:
        split(tied, "lora", 8, [word])
    split(from_config(LLAMA), "lora", 8, [word])
