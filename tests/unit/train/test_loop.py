"""The plain loop sets up the same optimizer and model as Trainer."""

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Trainer, TrainingArguments

from shardmake.train.loop import make_optimizer, prepare_model
from tests.unit.plans import make_training_settings


@pytest.fixture
def model() -> LlamaForCausalLM:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=32, attention_bias=True))


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(WordLevel({"a": 0, "<pad>": 7, "</s>": 9}, unk_token="a"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="</s>")


def make_arguments(folder: Path, **changes: Any) -> TrainingArguments:
    return TrainingArguments(output_dir=str(folder), use_cpu=True, report_to="none", weight_decay=0.1, **changes)


def test_optimizer_equals_trainers(model: LlamaForCausalLM, tmp_path: Path) -> None:
    """Biases and norms are not decayed. The order of parameters is the same, so that states can be exchanged."""
    arguments = make_arguments(tmp_path, optim="adamw_torch", learning_rate=1e-3, adam_epsilon=1e-6)
    ours = make_optimizer(model, arguments, make_training_settings())
    theirs = Trainer(model=model, args=arguments).create_optimizer()
    assert type(ours) is type(theirs)
    for own, other in zip(ours.param_groups, theirs.param_groups, strict=True):
        assert [id(parameter) for parameter in own["params"]] == [id(parameter) for parameter in other["params"]]
        assert {k: v for k, v in own.items() if k != "params"} == {k: v for k, v in other.items() if k != "params"}


def test_activation_checkpointing_and_special_tokens(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    assert not prepare_model(model, tokenizer, make_arguments(tmp_path)).is_activation_checkpointing
    assert (model.config.pad_token_id, model.config.eos_token_id) == (7, 9)
    kwargs = {"use_reentrant": False}
    arguments = make_arguments(tmp_path, activation_checkpointing=True, activation_checkpointing_kwargs=kwargs)
    assert prepare_model(model, tokenizer, arguments).is_activation_checkpointing
