"""Encode examples as token ids and a loss mask: standardize, render, tokenize once, and find the learned tokens.

The mask marks the tokens that the model learns to produce. Its first entry is always False: nothing predicts the first
token, and in a packed sequence it would be predicted from the end of another example.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby, islice
from typing import Any, Final
from unicodedata import is_normalized

import numpy as np
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from shardmake.config.formats import DataFormat
from shardmake.config.models import Data
from shardmake.core.errors import DataError
from shardmake.core.private_names import private
from shardmake.data.chat import ChatTemplate
from shardmake.data.layout import Layout, is_learned
from shardmake.data.placeholders import Rendered, Span, common_length

Tokens = tuple[Any, Any]
"""Token ids, and which of them are learned: two lists, or arrays of int32 and bool, of equal length."""
_ANSWERS: Final = ("text", "messages", "completion", "chosen", "rejected")
"""Keys of a standard form that have what is learned, after the prompt if there is one."""
_KEEP: Final = (None, {"type": "NFC"}, {"type": "Sequence", "normalizers": []})
"""Normalizers that keep normalized text as it is."""
_BYTE: Final = re.compile("<0x..>")
_SPACES: Final = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}


def loss_on_assistant(data: Data, format: DataFormat) -> bool:
    """Return True if only the tokens of the assistant or the completion have loss."""
    if data.loss_on == "assistant" and format == "text":
        needed = "conversations, or prompts and completions"
        raise DataError(f"data.loss_on: 'assistant' needs {needed}, but the examples are text. Use all or auto.")
    return data.loss_on == "assistant" or (data.loss_on == "auto" and format != "text")


@dataclass(frozen=True)
class Encoder:
    """Tokenizes examples of one layout."""

    chat: ChatTemplate
    layout: Layout
    assistant_only: bool
    cuts: bool = True
    """Pairs of answers that are too long are cut; else they are dropped."""

    def __call__(self, example: Mapping[str, Any], place: str) -> list[Tokens]:
        """Return the tokens of ``example``, whose ``place`` is named in errors; the errors are those of `render`."""
        (found,) = self.tokenize([self.render(example, place)])
        return [(ids.tolist(), mask.tolist()) for ids, mask in found]

    def render(self, example: Mapping[str, Any], place: str) -> list[Rendered]:
        """Return the texts that ``example`` becomes: one, one for each turn, or the chosen and the rejected answer.

        Raises `DataError` if the example does not fit the layout, and `BadRowError` if it cannot be learned.
        """
        standard = self.layout.standardize(example, place)
        try:
            return [one for name in _ANSWERS if name in standard for one in self._answer(standard, standard[name])]
        except DataError as error:
            error.args = (*error.args[:-1], f"{place}: {error}")
            raise

    def tokenize(self, examples: Sequence[Sequence[Rendered]]) -> Iterator[list[Tokens]]:
        """Yield the tokens of each of ``examples``, which are tokenized together; the answers of a pair share a prompt.

        A token that only one of the answers has is not in the prompt. This is TRL's rule
        (`DPOTrainer._prepare_dataset`), with the prompt of inference.
        """
        tokens = iter(tokenize(self.chat.tokenizer, [text for example in examples for text in example]))
        for example in examples:
            found = list(islice(tokens, len(example)))
            if self.layout.format == "preference":
                start = min(int(mask.argmax()) if mask.any() else len(mask) for _, mask in found)
                wholes = [np.concatenate([found[0][0][:start], ids[start:]]) for ids, _ in found]
                found = [(ids, np.arange(len(ids)) >= start) for ids in wholes]
            yield found

    def _answer(self, standard: Mapping[str, Any], answer: Any) -> list[Rendered]:
        if isinstance(answer, str):
            prompt = standard.get("prompt", "")
            text, start = prompt + answer, len(prompt) if self._learns_answers else 0
            return [Rendered(text, ((start, len(text)),), is_plain=True)]
        prompt = standard.get("prompt", [])
        messages = [*prompt, *answer]
        if not self._learns_answers and any(m["role"] == "assistant" and not is_learned(m) for m in messages):
            raise DataError("a message has weight 0, but data.loss_on: all learns every message. Remove one of them.")
        learn_all, is_answer = not self._learns_answers, "preference" in self.layout.format
        return self.chat.examples(messages, standard, len(prompt), learn_all=learn_all, is_answer=is_answer)

    @property
    def _learns_answers(self) -> bool:
        return self.assistant_only or "preference" in self.layout.format


def tokenize(tokenizer: PreTrainedTokenizerBase, texts: Sequence[Rendered]) -> list[Tokens]:
    """Return the tokens of each of ``texts`` with a mask of those that are learned, of equal length."""
    found = list[Tokens]()
    for is_plain, group in groupby(texts, key=lambda text: text.is_plain):
        found += (_by_offsets if is_plain or _widths(tokenizer) is None else _by_bytes)(tokenizer, list(group))
    for _, mask in found:
        mask[:1] = False
    return found


def _by_offsets(tokenizer: PreTrainedTokenizerBase, texts: Sequence[Rendered]) -> Iterator[Tokens]:
    """Yield the tokens of ``texts``, of which all or none are plain."""
    is_plain = texts[0].is_plain
    asked = {"return_special_tokens_mask": is_plain, "return_attention_mask": False, "return_token_type_ids": False}
    batch = tokenizer([text.text for text in texts], add_special_tokens=is_plain, verbose=False, **asked)
    for number, text in enumerate(texts):
        ids, mask = batch["input_ids"][number], np.zeros(len(batch["input_ids"][number]), bool)
        if batch.encodings:
            offsets = np.array(batch.encodings[number].offsets, int).reshape(-1, 2)
            mask = _mask(tokenizer, text, text.learned, ids, _begins(offsets), offsets[:, 1])
        else:
            for start, end in text.learned:
                mask[_common(tokenizer, text, start, ids) : _common(tokenizer, text, end, ids)] = True
        if is_plain:
            ids, mask = _ended(tokenizer, ids, mask.tolist(), batch["special_tokens_mask"][number])
        yield np.array(ids, "int32"), np.array(mask, bool)


def _begins(offsets: np.ndarray) -> Any:
    """Return where each token begins; one without text, as a space that is trimmed, is at the end of those before."""
    begins, ends = offsets.T
    before = np.concatenate([[0], np.maximum.accumulate(ends)[:-1]]) if len(ends) else ends
    return np.maximum.accumulate(np.where(begins < ends, begins, before))


def _by_bytes(tokenizer: PreTrainedTokenizerBase, texts: Sequence[Rendered]) -> Iterator[Tokens]:
    """Yield the tokens of rendered ``texts`` as `_by_offsets` does, in less time: offsets are counted in bytes."""
    widths: Any = _widths(tokenizer)
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    batch = backend.encode_batch_fast([text.text for text in texts], add_special_tokens=False)
    for text, encoding in zip(texts, batch, strict=True):
        ids = np.array(encoding.ids, "int32")
        sizes = widths[ids]
        ends = sizes.cumsum()
        if (ends[-1] if len(ends) else 0) != _bytes(text.text) or not is_normalized("NFC", text.text):
            yield from _by_offsets(tokenizer, [text])
            continue
        learned: Sequence[Span] = text.learned
        if not text.text.isascii():
            learned = [(_bytes(text.text[:start]), _bytes(text.text[:end])) for start, end in learned]
        yield ids, _mask(tokenizer, text, learned, ids, ends - sizes, ends)


def _bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


def _mask(
    tokenizer: PreTrainedTokenizerBase, text: Rendered, learned: Sequence[Span], ids: Any, begins: Any, ends: Any
) -> Any:
    """Return which of ``ids`` are learned; ``learned`` has the spans in the unit of ``begins`` and ``ends`` of tokens.

    Where a token joins the end of a context with what follows, or the context alone has less space, the span begins at
    the first token that differs from those of the context. A token that also has what follows the span belongs to it,
    such as an end of a turn that takes the space after it (``rstrip``).
    """
    mask = np.zeros(len(ids), bool)
    for (start, _), span in zip(text.learned, learned, strict=True):
        first, last = begins.searchsorted(span)
        joins = (first > 0 and ends[first - 1] > span[0]) or _strips(tokenizer)
        mask[_common(tokenizer, text, start, ids) if joins else first : last] = True
    return mask


@lru_cache(1)
def _strips(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return True if a text loses the space at its end, so a context has less of it than the whole text."""
    one, other = (tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] for text in ("a", "a\n "))
    return bool(one == other)


@lru_cache(1)
def _widths(tokenizer: PreTrainedTokenizerBase) -> np.ndarray | None:
    """Return the bytes of text of each token, if tokens are pieces of the text as it is, and else None.

    That is so for byte-level tokenizers, and for Gemma's, which only replace spaces.
    """
    is_own = isinstance(tokenizer, PreTrainedTokenizerFast)
    if not is_own or private(type(tokenizer)).encode_plus is not private(PreTrainedTokenizerFast).encode_plus:
        return None
    backend, added = tokenizer.backend_tokenizer, tokenizer.added_tokens_decoder.values()
    parts = (backend.decoder, backend.normalizer, backend.pre_tokenizer)
    decoder, normalizer, splits = (json.loads("null" if part is None else part.__getstate__()) for part in parts)
    is_bytes = "'type': 'ByteLevel'" in str(decoder) and normalizer in _KEEP
    changes = "'add_prefix_space': True" in str(splits) or any(token.lstrip or token.rstrip for token in added)
    if changes or tokenizer.split_special_tokens or not (is_bytes or normalizer == _SPACES):
        return None
    vocabulary, special = tokenizer.get_vocab(), {token.content for token in added}
    widths = np.zeros(max(vocabulary.values()) + 1, int)
    if is_bytes:  # a character stands for a byte
        sizes = [_bytes(token) if token in special else len(token) for token in vocabulary]
    else:
        sizes = [1 if _BYTE.fullmatch(token) else _bytes(token.replace("▁", " ")) for token in vocabulary]
    widths[list(vocabulary.values())] = sizes
    return widths


def _ended(tokenizer: PreTrainedTokenizerBase, ids: list[int], mask: list[bool], added: list[int]) -> Tokens:
    """Return the tokens of a text with one start, and one end-of-sequence token before others that are appended.

    This is TRL's rule (``add_eos`` in `SFTTrainer._prepare_dataset`), except for a tokenizer that appends that token
    by itself, after which TRL has it twice.
    """
    size, end, begin = _without_appended(ids, added), tokenizer.eos_token_id, tokenizer.bos_token_id
    body, rest = ids[:size], ids[size:]
    if end is not None:
        rest = rest[1:] if rest[:1] == [end] else rest
        rest = rest if body[-1:] == [end] else [end, *rest]
    start = 1 if begin is not None and body[:2] == [begin, begin] else 0
    return [*body, *rest][start:], [*mask[:size], *([True] * len(rest))][start:]


def _without_appended(ids: list[int], added: list[int]) -> int:
    """Return the number of tokens before those that the tokenizer appends; text without a token has none of them."""
    return max((at for at, is_added in enumerate(added, start=1) if not is_added), default=len(ids))


def _common(tokenizer: PreTrainedTokenizerBase, text: Rendered, at: int, ids: Any) -> int:
    """Return the number of tokens that ``ids`` has in common with the beginning of ``text`` up to ``at``."""
    return common_length(encode_prompt(tokenizer, text.text[:at], is_plain=text.is_plain), ids)


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: str, *, is_plain: bool = True) -> list[int]:
    """Return the token ids of ``prompt`` without those that the tokenizer appends: an answer follows."""
    encoded = tokenizer(prompt, add_special_tokens=is_plain, return_special_tokens_mask=True, verbose=False)
    ids = list(encoded["input_ids"])
    return ids[: _without_appended(ids, encoded["special_tokens_mask"])]
