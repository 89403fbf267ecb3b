"""Prompts of an evaluation, and the models' answers to them."""

from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from shardmake.config.models import Run
from shardmake.core.errors import ConfigError
from shardmake.evaluate.scores import IGNORED, Example, Examples

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_PROMPTS = 3


def read_prompts(run: Run, tokenizer: "PreTrainedTokenizerBase", examples: Examples) -> list[list[int]]:
    """Return prompts as token ids: the configured ones in the chat template, or from the first examples."""
    if run.evaluation.prompts:
        return [as_prompt(tokenizer, prompt, run.data.template_arguments) for prompt in run.evaluation.prompts]
    return [_opening(examples[index]) for index in range(min(_PROMPTS, len(examples)))]


def check_prompts(run: Run) -> None:
    """Raise a `ConfigError` if a prompt of the run is too long for the base model, or its chat template rejects it."""
    if not run.evaluation.prompts:
        return
    from shardmake.run.tokenizer import load_config, load_tokenizer

    tokenizer, positions = load_tokenizer(run), _positions(load_config(run))
    for prompt in run.evaluation.prompts:
        length = len(as_prompt(tokenizer, prompt, run.data.template_arguments))
        if positions is not None and length >= positions:
            raise ConfigError(
                f"evaluation.prompts: {prompt[:40]!r} has {length} tokens, but the model has only {positions} "
                "positions. Shorten the prompt."
            )


def _positions(config: Any) -> int | None:
    """Return the number of positions of a model; None if there is no limit."""
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def as_prompt(
    tokenizer: "PreTrainedTokenizerBase", prompt: str, arguments: Mapping[str, Any] | None = None
) -> list[int]:
    """Return the tokens of a question in the chat template, which takes ``arguments``.

    Raises `ConfigError` if the template rejects it.
    """
    from shardmake.data.chat import ChatTemplate
    from shardmake.data.encode import encode_prompt
    from shardmake.data.placeholders import BadRowError

    if tokenizer.chat_template is None:
        return encode_prompt(tokenizer, prompt)
    try:
        text = ChatTemplate(tokenizer, frozenset(), arguments or {}).question(prompt)
    except BadRowError as error:
        raise ConfigError(f"evaluation.prompts, {prompt!r}: {error}") from None
    return encode_prompt(tokenizer, text, is_plain=False)


def _opening(example: Example) -> list[int]:
    """Return the tokens before the first loss token; for a text with loss from the start, the first tokens."""
    first = int((example["labels"] != IGNORED).nonzero()[0])
    return example["input_ids"][: first if first > 1 else 16].tolist()


def question_in(tokenizer: "PreTrainedTokenizerBase", prompt: list[int]) -> str:
    """Return the user's text of ``prompt`` without the chat template around it, or else all of its text."""
    from shardmake.data.chat import ChatTemplate
    from shardmake.data.placeholders import BadRowError

    if tokenizer.chat_template is not None:
        mark = "\N{OBJECT REPLACEMENT CHARACTER}"
        with suppress(BadRowError):  # of a template that needs more than a user's message
            before, _, after = ChatTemplate(tokenizer, frozenset()).question(mark).partition(mark)
            text = tokenizer.decode(prompt)
            if text.startswith(before) and text.endswith(after):
                return text[len(before) : len(text) - len(after)]
    return tokenizer.decode(prompt, skip_special_tokens=True).strip()


def continue_prompt(network: "PreTrainedModel", prompt: list[int], max_new_tokens: int) -> list[int]:
    """Return the greedy continuation of ``prompt`` as token ids, up to the last position of the model."""
    import torch

    positions = _positions(network.config)
    room = max_new_tokens if positions is None else min(max_new_tokens, positions - len(prompt))
    if room < 1:
        return []
    ids = torch.tensor([prompt], device=network.device)
    with torch.inference_mode():
        output = network.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=room,
            do_sample=False,
            pad_token_id=0,  # not used: one prompt at a time needs no padding
        )
    return output[0, len(prompt) :].tolist()
