"""The first training examples as text, with the tokens marked that carry loss."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from shardmake.config.models import Run
from shardmake.data.encode import Tokens, answer_tokens
from shardmake.data.examples import first_of, load_tokenizer, locate_parts, make_encoder
from shardmake.data.sources import FIRST_ROWS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def preview(run: Run, count: int) -> Iterator[str]:
    """Yield a heading and the text of each of the first ``count`` training examples of each source; nothing is written.

    Loss tokens stand in ``[[ ]]``; of a pair, both answers are shown. ``[cut: N tokens]`` marks where
    ``sequence_length`` ends. Raises what the data stage raises for these examples.
    """
    tokenizer = load_tokenizer(run)
    parts = locate_parts(run)  # of raw data, which has no examples, those of the evaluation
    for part in [part for part in parts if part.split == parts[0].split]:
        rows = first_of(part.source, max(count, FIRST_ROWS))
        encoder = make_encoder(part, tokenizer, rows)
        for row in rows[:count]:
            ids, learned = encoder(row.example, row.place)
            heading = f"{row.place}: {len(ids):,} tokens, {sum(learned[: run.sequence_length]):,} of them learned"
            cut = None if encoder.layout.format == "text" else run.sequence_length
            lines = [heading, marked(tokenizer, (ids, learned), cut)]
            if encoder.layout.format == "preference":
                pair = encoder.pair(row.example, row.place)
                lines += ["rejected:", marked(tokenizer, answer_tokens(pair.prompt, pair.rejected), cut)]
            yield "\n".join(lines) + "\n"


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
