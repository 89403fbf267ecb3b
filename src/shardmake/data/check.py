"""Checks of the data at plan, before anything is queued."""

import logging
import random
from collections import Counter
from collections.abc import Sequence
from datetime import date
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from shardmake.config.models import Run
from shardmake.core.errors import DataError
from shardmake.data.amount import Sampled
from shardmake.data.encode import Encoder
from shardmake.data.examples import (
    check_bad_rows,
    check_divisible,
    check_learned,
    check_shares,
    check_vocabulary,
    describe_apart,
    encode_rows,
    first_of,
    load_tokenizer,
    locate_parts,
    make_encoder,
    recognize_layout,
)
from shardmake.data.files import RawRow
from shardmake.data.layout import Layout
from shardmake.data.packing import NAMED, count_outcomes
from shardmake.data.raw import files_of_raw
from shardmake.data.sources import FIRST_ROWS, Row, Source, open_raw, raw_examples
from shardmake.data.tokenizer_file import compare_with_file

logger = logging.getLogger(__name__)


class FirstRows(NamedTuple):
    """The layout of the first source, and the lengths of the encoded examples of each."""

    layout: Layout
    sampled: list[Sampled]


def check_sources(run: Run) -> list[int]:
    """Check every example of the run's files without a tokenizer, and return the usable rows of each source.

    Raises `DataError` with file and line for content that cannot be read or does not fit the format; with
    ``data.on_bad_row: drop``, only for the first rows.
    """
    if run.data.is_raw:
        files_of_raw(Path(run.data.sources[0].source))
    parts, layouts, counts = locate_parts(run), list[Layout](), list[int]()
    for part in parts:
        own = part.has_own_layout
        layouts.append(recognize_layout(part, first_of(part.source, FIRST_ROWS)) if own else layouts[0])
    for part, layout in zip(parts, layouts, strict=True):
        counts.append(0)
        for raw in raw_examples(part.source):
            try:
                row = open_raw(raw)
                layout.standardize(row.example, row.place)
                counts[-1] += 1
            except DataError:
                if run.data.on_bad_row == "stop":
                    raise
    return counts


def check_first_rows(run: Run, limit: int = FIRST_ROWS) -> FirstRows:
    """Encode the first ``limit`` (two or more) rows of each source and as many of the others.

    The plan uses this, so that a wrong column, a message that the chat template rejects or a missing template is found
    before anything is queued. Raises `DataError` with file and line, and `ModelError` for the tokenizer.
    """
    tokenizer, parts = load_tokenizer(run), locate_parts(run)
    encoders, sampled, largest = [], list[Sampled](), 0
    for part in parts:
        rows = first_of(part.source, limit)
        if parts[-1].split == "train":
            check_divisible(len(rows), part.run)
        if part.has_own_layout:
            compare_with_file(tokenizer, run.model, rows)
            encoders.append(make_encoder(part, tokenizer, rows, date.today()))
        drop = run.data.on_bad_row == "drop"
        tried = [*islice(raw_examples(part.source), limit), *_sample(part.source, limit)]
        encoded = encode_rows(tried, encoders[-1], run.sequence_length, drop=drop)
        sampled.append(Sampled(len(tried), [len(ids) for ids in encoded["input_ids"] if ids]))
        token_lists = [ids for name in ("input_ids", "rejected_ids", "cut_ids") for ids in encoded.get(name, [])]
        largest = max([largest, *(max(ids) for ids in token_lists if ids)])
        dropped = [place for place in encoded["dropped"] if place]
        outcomes, name = count_outcomes(encoded["outcome"]), f"first rows of the {part.split}"
        notes = Counter(note for note in encoded["note"] if note)
        check_bad_rows(name, notes, outcomes, dropped[:NAMED])
        if len(rows) < limit or len(dropped) < len(encoded["dropped"]):  # else later rows may have something to learn
            check_learned(name, outcomes, dropped[:NAMED], encoders[-1])
        describe_apart(name, notes)
        _compare_marks(encoders[-1], rows)
        check_shares(name, sum(map(sum, encoded["loss_mask"])), sum(map(len, encoded["loss_mask"])), encoders[-1])
    check_vocabulary(run, largest)
    return FirstRows(encoders[0].layout, sampled)


def _compare_marks(encoder: Encoder, rows: Sequence[Row]) -> None:
    """Log a warning if `{% generation %}` marks of the template say other tokens than those that are learned."""
    from trl.chat_template_utils import has_generation_markers

    tokenizer = encoder.tokenizer
    if not encoder.assistant_only or not has_generation_markers(tokenizer.chat_template or ""):
        return
    try:
        ours = encoder(rows[0].example, rows[0].place)
        standard = encoder.layout.standardize(rows[0].example, rows[0].place)
    except DataError:  # a bad row, which was reported
        return
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
    """Return ``count`` rows from all of a source after its first ones, always the same."""
    draw, kept = random.Random(0), list[RawRow]()
    for number, row in enumerate(islice(raw_examples(source), count, None)):
        place = number if number < count else draw.randrange(number + 1)
        if place < count:
            kept[place : place + 1] = [row]
    return kept
