"""The demo's files: loadable with plain transformers, the same every time, left alone when nothing changes."""

import json
import os
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from shardmake.data.chat import ChatTemplate
from shardmake.data.encode import tokenize
from shardmake.demo import make_inputs


@pytest.fixture(scope="module", name="inputs")
def unchanged_inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's files as its users get them; those of the other tests have a larger vocabulary."""
    folder = tmp_path_factory.mktemp("inputs") / "demo"
    make_inputs(folder)
    return folder


def test_the_model_loads_as_its_users_load_it(inputs: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(inputs / "base")
    model, info = AutoModelForCausalLM.from_pretrained(inputs / "base", output_loading_info=True)
    assert not any(info.values())
    assert len(tokenizer) <= model.config.vocab_size == 704
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == model.config.eos_token_id
    assert model.generation_config.pad_token_id == tokenizer.pad_token_id == model.config.pad_token_id


def test_conversations_survive_the_tokenizer_and_answers_are_marked(inputs: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(inputs / "base")
    lines = (inputs / "eval.jsonl").read_text().splitlines()
    for line in lines[:50]:
        question, answer = json.loads(line)["messages"]
        template = ChatTemplate(tokenizer, frozenset({tokenizer.eos_token}))
        ((ids, mask),) = tokenize(
            tokenizer, template.examples([question, answer], {}, 0, learn_all=False, is_answer=False)
        )
        learned = [i for i, m in zip(ids, mask, strict=True) if m]
        assert tokenizer.decode(learned) == f"{answer['content']}<|im_end|>"
        turns = f"<|im_start|>user\n{question['content']}<|im_end|>\n<|im_start|>assistant\n"
        assert tokenizer.decode(ids) == f"{turns}{answer['content']}<|im_end|>\n"
        assert len(ids) <= 64


def test_files_are_the_same_every_time_and_are_left_alone(inputs: Path) -> None:
    """A file with one other byte would be written again and get a new time."""
    files = [path for path in inputs.rglob("*") if path.is_file()]
    assert len(files) == 8
    for file in files:
        os.utime(file, (1, 1))
    make_inputs(inputs)
    assert {file.stat().st_mtime for file in files} == {1}
