"""Encode one example as token ids and a loss mask.

The mask marks the tokens that the model learns to produce. Its first entry is always False: nothing predicts the first
token, and in a packed sequence it would be predicted from the end of another example.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardmake.config.formats import DataFormat
from shardmake.config.models import Data
from shardmake.core.errors import DataError, ModelError
from shardmake.data.layout import Layout, Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Tokens = tuple[list[int], list[bool]]
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


def loss_on_assistant(data: Data, format: DataFormat) -> bool:
    """Return True if only the tokens of the assistant or the completion have loss."""
    if data.loss_on == "assistant" and format == "text":
        raise DataError(
            "data.loss_on: 'assistant' needs conversations, or prompts and completions, but the examples are text. "
            "Use all or auto."
        )
    return data.loss_on == "assistant" or (data.loss_on == "auto" and format != "text")


@dataclass(frozen=True)
class Encoder:
    """Tokenizes examples of one layout."""

    tokenizer: "PreTrainedTokenizerBase"
    layout: Layout
    assistant_only: bool
    cuts: bool = True
    """Pairs of answers that are too long are cut; else they are dropped."""

    def __call__(self, example: Mapping[str, Any], place: str) -> Tokens:
        """Return token ids and loss mask of ``example``, of equal length; ``place`` names it in errors.

        Raises `DataError` if the example does not fit the layout or the tokenizer's chat template rejects it.
        """
        ids, mask = self._encode(self.layout.standardize(example, place), place)
        if not self.assistant_only:
            mask = [True] * len(ids)
        return ids, [False, *mask[1:]] if mask else []

    def _encode(self, example: Mapping[str, Any], place: str) -> Tokens:
        if "text" in example:
            return encode_text(self.tokenizer, example["text"])
        if "messages" in example:
            return self._chat(example["messages"], 0, example.get("tools"), place)
        if "chosen" in example:
            start, (answer, _) = self._answered(example, ["chosen", "rejected"], place)
            return answer_tokens(start, answer)
        if "label" in example:
            start, (answer,) = self._answered(example, ["completion"], place)
            return answer_tokens(start, answer)
        prompt, completion = example["prompt"], example["completion"]
        if isinstance(prompt, str):
            return encode_completion(self.tokenizer, prompt, completion)
        return self._chat([*prompt, *completion], len(prompt), example.get("tools"), place)

    def pair(self, example: Mapping[str, Any], place: str) -> "TokenPair":
        """Return the tokens of an example of the format preference; the errors are those of a call."""
        standard = self.layout.standardize(example, place)
        prompt, (chosen, rejected) = self._answered(standard, ["chosen", "rejected"], place)
        return TokenPair(prompt, chosen, rejected)

    def _answered(
        self, example: Mapping[str, Any], answers: Sequence[str], place: str
    ) -> tuple[list[int], list[list[int]]]:
        """Return the tokens of the prompt, and of each of the columns ``answers``."""
        prompt = example["prompt"]
        if isinstance(prompt, str):
            start = encode_prompt(self.tokenizer, prompt)
            whole = [encode_text(self.tokenizer, prompt + example[answer])[0] for answer in answers]
            return split_answers(start, whole, place)
        tools = example.get("tools")
        with _naming(place):
            start = apply_template(self.tokenizer, prompt, tools, header=True)
            whole = [apply_template(self.tokenizer, [*prompt, *example[answer]], tools) for answer in answers]
        return split_answers(start, whole, place)

    def _chat(self, messages: list[Message], learn_from: int, tools: Any, place: str) -> Tokens:
        with _naming(place):
            if self.assistant_only:
                return encode_chat(self.tokenizer, messages, learn_from, tools)
            if any(is_unlearned(message) for message in messages):
                raise DataError(
                    "a message has weight 0, but data.loss_on: all learns every message. Remove one of them."
                )
            ids = apply_template(self.tokenizer, messages, tools)
            return ids, [True] * len(ids)


@contextmanager
def _naming(place: str) -> Iterator[None]:
    """Raise the errors of a chat template as a `DataError` that names the example at ``place``."""
    from jinja2 import TemplateError

    try:
        yield
    except (TemplateError, TypeError) as error:
        raise DataError(f"{place}: the tokenizer's chat template rejects this conversation: {error}") from None
    except DataError as error:
        raise DataError(f"{place}: {error}") from None


@dataclass(frozen=True)
class TokenPair:
    """Token ids of a prompt and of two answers to it."""

    prompt: list[int]
    chosen: list[int]
    rejected: list[int]


def answer_tokens(prompt: list[int], answer: list[int]) -> Tokens:
    """Return a prompt with an answer to it, which alone is learned."""
    return [*prompt, *answer], [False] * len(prompt) + [True] * len(answer)


def split_answers(prompt: list[int], answered: Sequence[list[int]], place: str) -> tuple[list[int], list[list[int]]]:
    """Split those in ``answered``, which begin with ``prompt``, where the first of them differs from it.

    This is TRL's rule (`DPOTrainer._prepare_dataset`). Raises `DataError` if no token of the prompt is left.
    """
    from trl.data_utils import common_prefix_length

    start = min(common_prefix_length(prompt, ids) for ids in answered)
    if start == 0:
        raise DataError(
            f"{place}: the prompt has no tokens that each answer follows. Write a prompt, or take a chat template "
            "that renders it in the same way when an answer follows."
        )
    return prompt[:start], [ids[start:] for ids in answered]


def encode_text(tokenizer: "PreTrainedTokenizerBase", text: str) -> Tokens:
    """Encode ``text`` with special tokens and one end-of-sequence token; all of it is learned.

    This is TRL's rule (``add_eos`` in `SFTTrainer._prepare_dataset`), except for a tokenizer that appends that token
    by itself, after which TRL has it twice.
    """
    ids, appended = _tokenize(tokenizer, text)
    end = tokenizer.eos_token_id
    if end is not None:
        ids += [end] if ids[-1:] != [end] else []
        appended = appended[1:] if appended[:1] == [end] else appended
    return [*ids, *appended], [True] * (len(ids) + len(appended))


def encode_prompt(tokenizer: "PreTrainedTokenizerBase", prompt: str) -> list[int]:
    """Return the token ids of ``prompt`` without those that the tokenizer appends: an answer follows."""
    return _tokenize(tokenizer, prompt)[0]


def _tokenize(tokenizer: "PreTrainedTokenizerBase", text: str) -> tuple[list[int], list[int]]:
    """Return the token ids of ``text`` after the special tokens before it, and the special tokens that are appended.

    Text without a token has all of them before it.
    """
    encoded = tokenizer(text, verbose=False, return_special_tokens_mask=True)
    ids, added = list(encoded["input_ids"]), encoded["special_tokens_mask"]
    end = max((at for at, is_added in enumerate(added, start=1) if not is_added), default=len(ids))
    return ids[:end], ids[end:]


def encode_completion(tokenizer: "PreTrainedTokenizerBase", prompt: str, completion: str) -> Tokens:
    """Encode prompt and completion as one text, with loss from the first token that the prompt alone does not have.

    A token across the boundary (a prompt that ends in a space) contains part of the completion and is learned.
    """
    from trl.data_utils import common_prefix_length

    ids, _ = encode_text(tokenizer, prompt + completion)
    start = common_prefix_length(encode_prompt(tokenizer, prompt), ids)
    return ids, [False] * start + [True] * (len(ids) - start)


def encode_chat(
    tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Message], learn_from: int = 0, tools: Any = None
) -> Tokens:
    """Encode a conversation with the tokenizer's chat template; the assistant's tokens are learned.

    ``learn_from`` is the index of the first message that may be learned. If the template marks the assistant's tokens
    (`{% generation %}`), the marks decide. Otherwise, the learned tokens are those that each assistant message adds to
    the conversation before it and the assistant's header. Raises `DataError` if there is no template, or if it renders
    earlier messages differently when later ones follow, because a difference then has no meaning. A message with weight
    0 is not learned.
    """
    if tokenizer.is_fast and _GENERATION.search(_template(tokenizer, tools)):
        ids, mask = _encode_marked(tokenizer, messages, learn_from, tools)
        changed = [index for index, message in enumerate(messages) if is_unlearned(message)]
    else:
        ids = apply_template(tokenizer, messages, tools)
        mask = [False] * len(ids)
        answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        changed = [index for index in answers if index >= learn_from and not is_unlearned(messages[index])]
    for index in changed:
        start = _prefix_length(tokenizer, messages[:index], tools, ids, header=True)
        end = _prefix_length(tokenizer, messages[: index + 1], tools, ids, header=False)
        mask[start:end] = [not is_unlearned(messages[index])] * (end - start)
    return ids, mask


def is_unlearned(message: Message) -> bool:
    """Return True for a message of the assistant with weight 0, as in OpenAI's format."""
    return message["role"] == "assistant" and message.get("weight") == 0


def _encode_marked(
    tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Message], learn_from: int, tools: Any
) -> Tokens:
    encoded = tokenizer.apply_chat_template(
        list(messages), tools=tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    ids, marks = list(encoded["input_ids"]), encoded["assistant_masks"]
    prompt = messages[:learn_from]
    prompt_has_assistant = any(message["role"] == "assistant" for message in prompt)
    start = _prefix_length(tokenizer, prompt, tools, ids, header=True) if prompt_has_assistant else 0
    return ids, [bool(mark) and position >= start for position, mark in enumerate(marks)]


def _prefix_length(
    tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Message], tools: Any, ids: list[int], *, header: bool
) -> int:
    """Return the number of tokens of ``messages`` (and the assistant header), which are a prefix of ``ids``."""
    if not messages:
        return 0
    prefix = apply_template(tokenizer, messages, tools, header=header)
    if ids[: len(prefix)] != prefix:
        raise DataError(
            "the chat template renders the first messages differently when others follow, so the assistant's tokens "
            "cannot be determined. Give the tokenizer a template with {% generation %} marks, split the conversation "
            "so that it ends with its only assistant message, or set data.loss_on: all."
        )
    return len(prefix)


def apply_template(
    tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Message], tools: Any = None, *, header: bool = False
) -> list[int]:
    """Return the token ids of a conversation, with ``header`` followed by the header of an assistant's turn."""
    settings = {"tools": tools, "chat_template": _template(tokenizer, tools), "add_generation_prompt": header}
    return list(tokenizer.apply_chat_template(list(messages), tokenize=True, return_dict=False, **settings))


def _template(tokenizer: "PreTrainedTokenizerBase", tools: Any) -> str:
    if tokenizer.chat_template is None:
        raise ModelError(
            f"The tokenizer of {tokenizer.name_or_path!r} has no chat template, and the data are conversations. Name "
            "a template with data.chat_template, use an instruction-tuned model, or provide the data as prompt and "
            "completion text."
        )
    return tokenizer.get_chat_template(tools=tools)
