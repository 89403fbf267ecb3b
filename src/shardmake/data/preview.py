"""The first training examples as text, with the tokens marked that carry loss."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from shardmake.config.models import Run
from shardmake.data.encode import Tokens
from shardmake.data.examples import FIRST_ROWS, Part, first_of, load_tokenizer, locate_parts, make_encoder
from shardmake.data.sources import example_in, place_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def preview(run: Run, count: int) -> Iterator[str]:
    """Yield a heading and the text of each of the first ``count`` training examples of each source; nothing is written.

    Loss tokens stand in ``[[ ]]``; of a pair, both answers are shown. ``[cut: N tokens]`` marks where
    ``sequence_length`` ends. Raises what the data stage raises for these examples.
    """
    tokenizer = load_tokenizer(run)
    for part in _shown(locate_parts(run)):
        rows = first_of(part.source, max(count, FIRST_ROWS))
        encoder = make_encoder(part.run, tokenizer, part.source, rows)
        for row in rows[:count]:
            place = place_of(row, part.source)
            ids, learned = encoder(example_in(row), place)
            heading = f"{place}: {len(ids):,} tokens, {sum(learned[: run.sequence_length]):,} of them learned"
            cut = None if encoder.layout.format == "text" else run.sequence_length
            lines = [heading, marked(tokenizer, (ids, learned), cut)]
            if encoder.layout.format == "preference":
                pair = encoder.pair(example_in(row), place)
                rejected = [*pair.prompt, *pair.rejected]
                mask = [False] * len(pair.prompt) + [True] * len(pair.rejected)
                lines += ["rejected:", marked(tokenizer, (rejected, mask), cut)]
            yield "\n".join(lines) + "\n"


def _shown(parts: Mapping[str, Sequence[Part]]) -> Sequence[Part]:
    """Return the sources of the training examples; of raw data, which has none, those of the evaluation."""
    return parts["train"] or parts["eval"]


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
