"""The first training examples as text, with the tokens marked that carry loss."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from shardmake.config.models import Run
from shardmake.core.errors import DataError
from shardmake.data.chat import ChatTemplate
from shardmake.data.encode import Tokens
from shardmake.data.examples import Part, day_of, load_tokenizer, make_encoder, open_chat_template, open_parts
from shardmake.data.sources import FIRST_ROWS
from shardmake.run.paths import RunDir

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def preview(run: Run, count: int, rundir: RunDir) -> Iterator[str]:
    """Yield what `show` does of the first ``count`` training examples of each source; nothing is written."""
    chat = open_chat_template(run, load_tokenizer(run), day_of(rundir))
    return show(chat, open_parts(run, max(count, FIRST_ROWS)), count)


def show(chat: ChatTemplate, parts: Sequence[Part], count: int, *, log: bool = True) -> Iterator[str]:
    """Yield a heading and the text of each of the first ``count`` examples of each training source of ``parts``.

    Loss tokens stand in ``[[ ]]``; of a pair, both answers are shown, and of turns that are apart, each with its
    context. ``[cut: N tokens]`` marks where ``sequence_length`` ends. Raises what the data stage raises for these
    examples; a bad row that it drops is named instead.
    """
    for part in [part for part in parts if part.split == parts[0].split]:  # of raw data, those of the evaluation
        encoder = make_encoder(part, chat, log=log)
        cut = None if encoder.layout.format == "text" else part.run.sequence_length
        for row in part.rows[:count]:
            try:
                examples = encoder(row.example, row.place)
            except DataError as error:
                if not part.drops:
                    raise
                yield f"Dropped: {error}\n"
                continue
            titles = [f", turn {number} of {len(examples)}" for number in range(1, len(examples) + 1)]
            titles = [", chosen", ", rejected"] if encoder.layout.format == "preference" else titles
            for (ids, learned), title in zip(examples, titles if len(examples) > 1 else [""], strict=True):
                heading = f"{row.place}{title}: {len(ids):,} tokens, {sum(learned[:cut]):,} of them learned"
                yield f"{heading}\n{marked(chat.tokenizer, (ids, learned), cut)}\n"


def marked(tokenizer: "PreTrainedTokenizerBase", tokens: Tokens, cut: int | None = None) -> str:
    """Return the text of ``tokens`` up to the ``cut``, with each run of loss tokens in ``[[ ]]``."""
    parts = []
    for has_loss, pairs in groupby(zip(*(part[:cut] for part in tokens), strict=True), key=lambda pair: pair[1]):
        text = tokenizer.decode([token for token, _ in pairs], clean_up_tokenization_spaces=False)
        parts.append(f"[[{text}]]" if has_loss else text)
    left = len(tokens[0][cut:]) if cut else 0
    return "".join(parts) + (f"[cut: {left:,} tokens]" if left else "")
