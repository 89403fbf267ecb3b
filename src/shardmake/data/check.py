"""Checks of the data at plan, before anything is queued, and the amount of data, estimated from some of its rows."""

import logging
import random
import re
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from datetime import date
from heapq import nsmallest
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from shardmake.config.models import Run
from shardmake.core.errors import DataError
from shardmake.data.build import check_divisible
from shardmake.data.encode import Encoder
from shardmake.data.examples import (
    check_vocabulary,
    day_of,
    encode_rows,
    load_tokenizer,
    make_encoder,
    open_chat_template,
    open_parts,
)
from shardmake.data.files import RawRow, Row, open_row, raw_rows
from shardmake.data.packing import Encoded
from shardmake.data.sources import FIRST_ROWS, Source, files_of_raw
from shardmake.run.length import Length
from shardmake.run.paths import RunDir

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)
_PACKED: Final = 1000
"""Examples that are packed for the estimate of the amount of data."""
_MARKS = re.compile(r"\{%[-+]?\s*generation\b")


class Sampled(NamedTuple):
    """The encoded rows of one source: the number of ``rows``, and the ``lengths`` of their examples in tokens."""

    rows: int
    lengths: list[int]


def check_sources(run: Run) -> list[int]:
    """Check every example of the run's files without a tokenizer, and return the usable rows of each source.

    Raises `DataError` with file and line for content that cannot be read or does not fit the format; with
    ``data.on_bad_row: drop``, only if that is so for all of the first rows.
    """
    if run.data.is_raw:
        files_of_raw(Path(run.data.sources[0].source))
    parts, counts = open_parts(run), list[int]()
    trained = {path.resolve(): part for part in parts if part.split == "train" for path in part.source.paths}
    for part in parts:
        if part.split == "eval" and (twice := [path for path in part.source.paths if path.resolve() in trained]):
            raise DataError(
                f"data.eval: {twice[0]} has the examples of data.train ({trained[twice[0].resolve()].source}). It "
                "would measure examples that training has seen. Name other examples, or remove eval: eval_fraction of "
                "train is then held out."
            )
        counts.append(0)
        for raw in raw_rows(part.source.paths):
            try:
                part.layout.standardize(*reversed(open_row(raw)))
                counts[-1] += 1
            except DataError:
                if not part.drops:
                    raise
    return counts


def check_first_rows(run: Run, limit: int = FIRST_ROWS, *, rundir: RunDir | None = None) -> list[Sampled]:
    """Return the encoded first ``limit`` (two or more) rows of each source, and as many of its others.

    The plan uses this, so that a wrong column, a message that the chat template rejects or a missing template is found
    before anything is queued. Raises `DataError` with file and line, and `ModelError` for the tokenizer.
    """
    import datasets
    import numpy as np
    import pyarrow

    tokenizer, parts, sampled, largest = load_tokenizer(run), open_parts(run, limit), list[Sampled](), 0
    chat = open_chat_template(run, tokenizer, day_of(rundir) if rundir else date.today())
    for part in parts:
        if parts[-1].split == "train":
            check_divisible(len(part.rows), part.run)
        compare_with_file(tokenizer, run.model, part.rows)
        encoder, tried = make_encoder(part, chat), _sample(part.source, limit)
        batch = encode_rows(enumerate(tried), encoder, run.sequence_length, drop=part.drops)
        table = datasets.Dataset(pyarrow.Table.from_batches([batch]))
        found = Encoded.of(part.name, encoder, table, np.ones(len(table), bool))
        found.check(f"first rows of the {part.split}", is_all=len(tried) < limit)
        sampled.append(Sampled(len(tried), found.column("tokens").tolist()))
        largest = max([largest, *table["largest"]])
        _compare_marks(encoder, part.rows[0])
    check_vocabulary(run, largest)
    return sampled


def _compare_marks(encoder: Encoder, row: Row) -> None:
    """Log a warning if `{% generation %}` marks of the template say other tokens than those that are learned."""
    tokenizer = encoder.chat.tokenizer
    if not encoder.assistant_only or not _MARKS.search(str(tokenizer.chat_template)):
        return
    try:
        ours = encoder(row.example, row.place)
        standard = encoder.layout.standardize(row.example, row.place)
    except DataError:  # a bad row, which was reported
        standard = {}
    if "messages" not in standard:
        return
    marked = tokenizer.apply_chat_template(
        standard["messages"], tools=standard.get("tools"), return_dict=True, return_assistant_tokens_mask=True
    )
    texts = [
        tokenizer.decode([token for token, on in zip(ids, mask, strict=True) if on]).strip()
        for ids, mask in (ours[-1], (marked["input_ids"], marked["assistant_masks"]))
    ]
    if len(ours) > 1 or texts[0] != texts[1]:
        logger.warning(
            "The {%% generation %%} marks of the chat template are not followed. They say %r, and what the model must "
            "say after the context of inference is learned: %r.",
            texts[1][:200],
            texts[0][:200],
        )


def _sample(source: Source, count: int) -> list[RawRow]:
    """Return the first ``count`` rows of a source and as many from all of its others, always the same."""
    rows, draw = raw_rows(source.paths), random.Random(0)
    return [*islice(rows, count), *nsmallest(count, rows, key=lambda _: draw.random())]


def compare_with_file(tokenizer: "PreTrainedTokenizerBase", model: str, rows: Sequence[Row]) -> None:
    """Log a warning if a text of ``rows`` has other tokens by the file of ``model`` than by ``tokenizer``.

    For some types of models transformers replaces the file's rules. Servers that read the file then differ from the
    training, and so does the base model if its own training read the file.
    """
    from tokenizers import Tokenizer

    path = Path(model, "tokenizer.json")
    if not path.is_file():
        return
    file = Tokenizer.from_file(str(path))
    file.no_truncation()
    file.no_padding()
    for row in rows:
        for text in _texts(row.example):
            by_file = file.encode(text, add_special_tokens=False)
            loaded = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
            if by_file.ids != loaded:
                logger.warning(
                    f"The tokenizer of {model} is not that of its tokenizer.json. {row.place}: a text has "
                    f"{len(loaded):,} tokens as transformers loads it ({type(tokenizer).__name__}), and "
                    f"{len(by_file.ids):,} by the file. Training, evaluation and servers with transformers use the "
                    "former; llama.cpp and others read the file. If the base was trained with the former, save it "
                    "into a copy of the base (AutoTokenizer.from_pretrained, save_pretrained) and name the copy. "
                    "Otherwise take a base whose tokenizer transformers loads unchanged."
                )
                return


def _texts(value: Any) -> Iterator[str]:
    """Yield every text in ``value``, without keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _texts(part)


def estimate_length(run: Run, counts: Sequence[int], sampled: Sequence[Sampled], ranks: int) -> Length | None:
    """Return the length of a training on sources of ``counts`` rows, of which ``sampled`` were encoded.

    Both begin with the sources of training examples. None if nothing would be left, and for raw data.
    """
    sources = run.data.sources
    if run.data.is_raw:
        return None
    held_out = [0 if run.data.eval is not None else max(1, round(count * run.data.eval_fraction)) for count in counts]
    examples = [
        min(count - evaluated, source.limit or count) * len(part.lengths) / part.rows
        for source, count, evaluated, part in zip(sources, counts, held_out, sampled, strict=False)
    ]
    used = [count * source.repeat for source, count in zip(sources, examples, strict=True)]
    weights = [source.weight for source in sources if source.weight is not None]
    if weights:  # drawn by weight until each source was read once
        total = max(count / weight for count, weight in zip(examples, weights, strict=True))
        used = [total * weight for weight in weights]
    if not sum(used) or not all(part.lengths for part in sampled[: len(sources)]):
        return None
    lengths = [
        length
        for part, count in zip(sampled, used, strict=False)
        for length in islice(cycle(part.lengths), max(1, round(count * min(1, _PACKED / sum(used)))))
    ]
    scale = sum(used) / len(lengths)
    sequences = count_packed(lengths, run.sequence_length) if run.packing else len(lengths)
    return Length(
        run,
        examples=round(sum(used)),
        tokens=round(scale * sum(lengths)),
        sequences=max(1, round(scale * sequences)),
        ranks=ranks,
        is_estimate=True,
    )


def count_packed(lengths: Sequence[int], room: int) -> int:
    """Return the number of sequences of ``room`` tokens that hold examples of ``lengths``, packed by best fit."""
    rooms: list[int] = []
    count = 0
    for length in sorted(lengths, reverse=True):
        place = bisect_left(rooms, length)
        left = rooms.pop(place) if place < len(rooms) else room
        count += left == room
        insort(rooms, left - length)
    return count
