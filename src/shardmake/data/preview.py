"""The first training examples as text, with the tokens marked that carry loss."""

from collections.abc import Iterator, Sequence
from datetime import date
from itertools import groupby
from typing import TYPE_CHECKING

from shardmake.config.models import Run
from shardmake.data.encode import Tokens, answer_tokens, split_pair
from shardmake.data.examples import load_tokenizer, make_encoder, open_chat_template, open_parts
from shardmake.data.sources import FIRST_ROWS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def preview(run: Run, count: int) -> Iterator[str]:
    """Yield a heading and the text of each of the first ``count`` training examples of each source; nothing is written.

    Loss tokens stand in ``[[ ]]``; of a pair, both answers are shown, and of turns that are apart, each with its
    context. ``[cut: N tokens]`` marks where ``sequence_length`` ends. Raises what the data stage raises for these
    examples.
    """
    tokenizer = load_tokenizer(run)
    chat = open_chat_template(run, tokenizer, date.today())
    parts = open_parts(run, max(count, FIRST_ROWS))  # of raw data, which has no examples, those of the evaluation
    for part in [part for part in parts if part.split == parts[0].split]:
        encoder = make_encoder(part, chat)
        cut = None if encoder.layout.format == "text" else run.sequence_length
        for row in part.rows[:count]:
            examples = encoder(row.example, row.place)
            titles = [f", turn {number} of {len(examples)}" for number in range(1, len(examples) + 1)]
            if encoder.layout.format == "preference":
                prompt, answers = split_pair(*examples)
                examples = [answer_tokens(prompt, answer) for answer in answers]
                titles = [", chosen", ", rejected"]
            for (ids, learned), title in zip(examples, titles if len(examples) > 1 else [""], strict=True):
                heading = f"{row.place}{title}: {len(ids):,} tokens, {sum(learned[:cut]):,} of them learned"
                yield f"{heading}\n{marked(tokenizer, (ids, learned), cut)}\n"


def marked(tokenizer: "PreTrainedTokenizerBase", tokens: Tokens, cut: int | None = None) -> str:
    """Return the text of ``tokens`` up to the ``cut``, with each run of loss tokens in ``[[ ]]``."""
    ids, learned = (part[:cut] for part in tokens)
    parts = [
        f"[[{_text(tokenizer, group)}]]" if has_loss else _text(tokenizer, group)
        for has_loss, pairs in groupby(zip(learned, ids, strict=True), key=lambda pair: pair[0])
        for group in [[token for _, token in pairs]]
    ]
    left = len(tokens[0]) - len(ids)
    return "".join(parts) + (f"[cut: {left:,} tokens]" if left else "")


def _text(tokenizer: "PreTrainedTokenizerBase", ids: Sequence[int]) -> str:
    return tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
