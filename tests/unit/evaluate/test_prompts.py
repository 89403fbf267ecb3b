"""The prompts of the evaluation go through the chat template at plan, and answers end at the last position."""

from pathlib import Path

import pytest
from transformers import GPT2Config, GPT2LMHeadModel

from shardmake.core.errors import ConfigError
from shardmake.evaluate.prompts import as_prompt, check_prompts, continue_prompt, question_in
from tests.finished_run import make_run
from tests.unit.data.test_chat import PARTS
from tests.unit.data.test_encode import MARKED, chat, encode, make_encoder, make_tokenizer

STRICT = "{% if messages[0]['role'] != 'system' %}{{ raise_exception('a system message is needed') }}{% endif %}"


def test_prompts_that_the_template_rejects_are_refused(tmp_path: Path) -> None:
    run = make_run(model=str(tmp_path), evaluation={"prompts": ["Who are you?"]})
    make_tokenizer(MARKED).save_pretrained(tmp_path)
    GPT2Config(n_positions=512).save_pretrained(tmp_path)
    check_prompts(run)
    make_tokenizer(STRICT).save_pretrained(tmp_path)
    check_prompts(make_run(model=str(tmp_path)))
    with pytest.raises(
        ConfigError, match=r"evaluation\.prompts, 'Who are you\?': .* rejects .*: a system message is needed"
    ):
        check_prompts(run)


@pytest.mark.parametrize("template", [MARKED, PARTS], ids=["text", "parts"])
def test_a_prompt_is_the_context_of_training(template: str) -> None:
    tokenizer = make_tokenizer(template)
    prompt = as_prompt(tokenizer, "Who?")
    ids, mask = encode(make_encoder(tokenizer, "chat"), {"messages": chat("u:Who?", "a:I")})
    assert prompt == ids[: mask.index(True)]
    assert question_in(tokenizer, prompt).replace(" ", "") == "Who?"


def test_a_prompt_is_shown_whole_if_the_template_needs_a_system_message() -> None:
    tokenizer = make_tokenizer(STRICT)
    prompt = tokenizer("Who?", add_special_tokens=False)["input_ids"]
    assert question_in(tokenizer, prompt) == tokenizer.decode(prompt)


def test_a_prompt_without_room_for_an_answer_is_refused(tmp_path: Path) -> None:
    make_tokenizer(MARKED).save_pretrained(tmp_path)
    GPT2Config(n_positions=8).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"'Who are you\?' has \d+ tokens, but the model has only 8 positions"):
        check_prompts(make_run(model=str(tmp_path), evaluation={"prompts": ["Who are you?"]}))


def test_an_answer_ends_at_the_last_position() -> None:
    """A model with learned positions fails beyond them."""
    model = GPT2LMHeadModel(GPT2Config(vocab_size=16, n_embd=8, n_layer=1, n_head=1, n_positions=8)).eval()
    model.generation_config.eos_token_id = None
    assert [len(continue_prompt(model, [1] * length, 64)) for length in (3, 7, 8)] == [5, 1, 0]
    assert len(continue_prompt(model, [1, 2], 4)) == 4
