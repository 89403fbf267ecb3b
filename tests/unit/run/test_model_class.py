"""The class of a model as the plan names it, loading with every weight, and tokenizers that transformers changes."""

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from shardmake.core.errors import ModelError
from shardmake.run.model_class import ModelClass
from shardmake.run.tokenizer import compare_with_file, load_tokenizer
from tests.unit.data.test_encode import PLAIN, make_tokenizer
from tests.unit.plans import make_run

LLAMA = ModelClass(name="LlamaForCausalLM")
WEIGHT = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_llama(tmp_path, tied=True)
    return tmp_path


def make_llama(folder: Path, tied: bool) -> None:
    config = LlamaConfig(
        vocab_size=32, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        tie_word_embeddings=tied, pad_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)


def test_the_planned_class_loads_or_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert type(LLAMA.load(str(folder), dtype=torch.float32)) is LlamaForCausalLM
    with pytest.raises(ModelError, match=r"class not found: NoSuchForCausalLM\. .* plan it again"):
        ModelClass(name="NoSuchForCausalLM").find()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelError, match="of the class LlamaForCausalLM, and the plan is for OwnForCausalLM"):
        ModelClass(name="OwnForCausalLM", own_code=True).load(str(folder))


@pytest.mark.parametrize(("change", "message"), [
    (lambda held: held.pop(WEIGHT), rf"completely: missing keys: {WEIGHT}\. If it is a merged model"),
    (lambda held: held.update(extra=torch.ones(2)), "completely: unexpected keys: extra"),
    (lambda held: held.update({WEIGHT: torch.ones(2, 2)}), f"completely: mismatched keys: {WEIGHT}"),
])  # fmt: skip
def test_weights_that_are_missing_or_left_over_are_refused(folder: Path, change, message: str) -> None:  # type: ignore[no-untyped-def]
    held = load_file(folder / "model.safetensors")
    change(held)
    save_file(held, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=message):
        LLAMA.load(str(folder))


CLASSIFIER = ModelClass(name="LlamaForSequenceClassification", new_head="score")


@pytest.mark.parametrize("tied", [True, False])
def test_a_new_head_replaces_that_of_the_base_model(tmp_path: Path, tied: bool) -> None:
    make_llama(tmp_path / "base", tied)
    model = CLASSIFIER.load_base(str(tmp_path / "base"), dtype=torch.float32)
    assert model.score.weight.shape == (1, 8) and model.config.num_labels == 1
    assert model.config.architectures == ["LlamaForSequenceClassification"]
    model.save_pretrained(tmp_path / "tuned")
    assert CLASSIFIER.load(str(tmp_path / "tuned")).score.weight.equal(model.score.weight)
    with pytest.raises(ModelError, match=r"completely: missing keys: score\.weight"):
        CLASSIFIER.load_base(str(tmp_path / "tuned"))  # it has the head already


def test_only_the_heads_may_differ_from_the_base_model(tmp_path: Path) -> None:
    make_llama(tmp_path, tied=False)
    held = load_file(tmp_path / "model.safetensors")
    save_file({**held, "extra": torch.ones(2)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match="completely: unexpected keys: extra"):
        CLASSIFIER.load_base(str(tmp_path))
    del held[WEIGHT]
    save_file(held, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=f"completely: missing keys: {WEIGHT}"):
        CLASSIFIER.load_base(str(tmp_path))


TEXT = "the year 2024 was 2024 and not 1999"
TEXTS = [("a.jsonl, line 1", text) for text in ("the year", TEXT)]


def write_tokenizer(folder: Path, model_type: str) -> None:
    """Write a byte-level BPE with GPT-2's rule, which joins digits; that of Qwen 2 does not."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<end>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator([TEXT] * 100, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))


@pytest.mark.parametrize(("model_type", "differs"), [("llama", False), ("gpt2", False), ("qwen2", True)])
def test_other_tokens_warn(tmp_path: Path, caplog: pytest.LogCaptureFixture, model_type: str, *, differs: bool) -> None:
    write_tokenizer(tmp_path, model_type)
    with caplog.at_level(logging.WARNING):
        compare_with_file(AutoTokenizer.from_pretrained(tmp_path), str(tmp_path), TEXTS)
    found = [record.getMessage() for record in caplog.records if "tokenizer.json" in record.getMessage()]
    assert [("a.jsonl, line 1: a text has 20 tokens" in line, "8 by the file" in line) for line in found] == [
        (True, True)
    ] * differs
    AutoTokenizer.from_pretrained(tmp_path).save_pretrained(tmp_path)
    caplog.clear()
    compare_with_file(AutoTokenizer.from_pretrained(tmp_path), str(tmp_path), TEXTS)
    assert "tokenizer.json" not in caplog.text


def test_a_reward_model_needs_a_padding_token(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(PLAIN)
    tokenizer.save_pretrained(tmp_path)
    run = make_run(model=str(tmp_path), objective="reward", packing=False)
    assert load_tokenizer(run).eos_token is not None
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="neither a padding nor an end-of-sequence token"):
        load_tokenizer(run)
    assert load_tokenizer(run.model_copy(update={"objective": "dpo"})).pad_token is None
