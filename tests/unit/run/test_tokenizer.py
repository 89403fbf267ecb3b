"""Tokenizers that transformers changes, or that lack a token, are named at plan."""

import json
import logging
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer

from shardmake.core.errors import ModelError
from shardmake.run.tokenizer import compare_with_file, load_tokenizer
from tests.unit.data.test_encode import PLAIN, make_tokenizer
from tests.unit.plans import make_run

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
def test_a_text_with_other_tokens_is_a_warning_with_a_cure(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, model_type: str, *, differs: bool
) -> None:
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
