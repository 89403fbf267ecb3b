"""Base models with new tokens, compared with what transformers makes of them when it resizes the whole model."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast

from shardmake.checkpoint.formats.huggingface import shard_names, weight_names
from shardmake.core.errors import ConfigError, ModelError
from shardmake.fetch import copied_base
from shardmake.fetch.add_tokens import SEED, add_tokens, named_tokens
from tests.composites import composite_config
from tests.mixtures import SIZES, mixture_configs

NEW = ["<call>", "w3", "<result>", "<call>"]
"""Two new tokens, one of them twice, and one that exists."""


def configs() -> dict[str, Any]:
    own = {"tied": ("qwen2", {"tie_word_embeddings": True}), "untied": ("llama", {}), "biased head": ("phi", {})}
    own["head apart"] = own["untied"]
    own |= {
        "other names": ("gpt_neox", {}),
        "wide": ("gemma3n_text", {"vocab_size_per_layer_input": 64, "num_kv_shared_layers": 0}),
    }
    found = {name: AutoConfig.for_model(kind, **(SIZES | more)) for name, (kind, more) in own.items()}
    return found | {name: composite_config(name) for name in ("gemma3", "mistral3", "qwen3_5")}


def save(folder: Path, config: Any, words: int = 64, dtype: torch.dtype = torch.bfloat16) -> Any:
    """Write a tiny model of two files with a tokenizer of so many words, and return its class."""
    name = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    names = transformers.models.auto.modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    kind = getattr(transformers, names.get(config.model_type) or str(name))
    torch.manual_seed(1)
    model = kind._from_config(config, dtype=dtype)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, mean=0.3)
    model.save_pretrained(folder, max_shard_size=model.num_parameters())
    assert len(shard_names(folder)) > 1
    tokenizer = Tokenizer(models.WordLevel({f"w{number}": number for number in range(words)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(folder)
    (folder / "LICENSE").write_text("free")
    return kind


@pytest.mark.parametrize("case", configs())
def test_the_model_is_that_of_transformers_resize(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copied_base, "_FILE_SIZE", 5_000)
    base, out = tmp_path / "base", tmp_path / "out"
    kind = save(base, configs()[case])
    expected, first = kind.from_pretrained(base, dtype="auto"), len(AutoTokenizer.from_pretrained(base))
    torch.manual_seed(SEED)
    expected.resize_token_embeddings(first + 2)
    if case == "head apart":
        config = json.loads((base / "config.json").read_text())
        (base / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    add_tokens(base, out, NEW, special=case == "tied")
    found, info = kind.from_pretrained(out, dtype="auto", output_loading_info=True)
    assert not any(info.values())
    theirs, ours = expected.state_dict(), found.state_dict()
    assert ours.keys() == theirs.keys() and [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    assert weight_names(out) == weight_names(base) and len(shard_names(out)) > 1
    assert found.config.to_dict() == {**expected.config.to_dict(), "_name_or_path": str(out)}
    assert found.get_input_embeddings().weight.shape[0] == first + 2 and (out / "LICENSE").is_file()
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer("<call><result>", add_special_tokens=False).input_ids == [first, first + 1]
    assert ("<call>" in tokenizer.decode([3, first], skip_special_tokens=True)) == (case != "tied")


@pytest.mark.parametrize("words", [62, 63])
def test_rows_of_padding_are_used_first(words: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "shardmake")
    base, out = tmp_path / "base", tmp_path / "out"
    kind = save(base, configs()["untied"], words)
    add_tokens(base, out, NEW)
    before, after = (kind.from_pretrained(folder, dtype="auto").state_dict() for folder in (base, out))
    rows = 64 if words == 62 else 65
    assert after["lm_head.weight"].shape[0] == AutoConfig.from_pretrained(out).vocab_size == rows
    assert all(torch.equal(after[name][: len(weight)], weight) for name, weight in before.items())
    assert ("those of padding stay as they are" in caplog.text) == (words == 62)
    assert "The tokenizer has 1 token already: w3." in caplog.text


def test_what_cannot_be_resized_is_refused(tmp_path: Path) -> None:
    base, out = tmp_path / "base", tmp_path / "out"
    save(base, mixture_configs()["deepseek_v3"])
    with pytest.raises(ConfigError, match="exists"):
        add_tokens(base, base, NEW)
    with pytest.raises(ConfigError, match="has all these tokens"):
        add_tokens(base, out, ["w1"])
    with pytest.raises(ModelError, match="are not safetensors"):
        add_tokens(tmp_path, out, NEW)
    file = base / shard_names(base)[0]
    weights = load_file(file) | {"model.layers.2.embed_tokens.weight": torch.ones(64, 16)}
    save_file(weights, file, {"format": "pt"})
    index = json.loads((base / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.layers.2.embed_tokens.weight"] = file.name
    (base / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"transformers does not resize model\.layers\.2\.embed_tokens"):
        add_tokens(base, out, NEW)
    assert not out.exists()


def test_options_name_tokens(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("<a>\n\n@b\n", "utf-8-sig")
    assert named_tokens(["<c>", f"@{tmp_path}/tokens"], tmp_path, special=True) == ["<c>", "<a>", "@b"]
    assert named_tokens(None, None, special=False) == []
    for given, out, special in ((["<c>"], None, False), (None, tmp_path, False), ([], None, True)):
        with pytest.raises(ConfigError, match="go together"):
            named_tokens(given, out, special=special)
    with pytest.raises(ConfigError, match="Name a file"):
        named_tokens(["@missing"], tmp_path, special=False)
