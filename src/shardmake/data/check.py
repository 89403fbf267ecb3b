"""Checks of the data at plan, before anything is queued."""

from pathlib import Path

from shardmake.config.models import Run
from shardmake.data.examples import (
    check_divisible,
    check_learned,
    check_vocabulary,
    encode_rows,
    first_of,
    load_tokenizer,
    locate_parts,
    make_encoder,
    recognize_layout,
)
from shardmake.data.layout import Layout
from shardmake.data.packing import NAMED, count_outcomes
from shardmake.data.raw import files_of_raw
from shardmake.data.sources import FIRST_ROWS, text_examples
from shardmake.data.tokenizer_file import compare_with_file


def check_sources(run: Run) -> None:
    """Check every example of the run's text files without a tokenizer, and the columns of its Parquet files.

    Raises `DataError` with file and line for content that cannot be read or does not fit the format.
    """
    if run.data.is_raw:
        files_of_raw(Path(run.data.sources[0].source))
    parts, layouts = locate_parts(run), list[Layout]()
    for part in parts:
        own = part.has_own_layout
        layouts.append(recognize_layout(part, first_of(part.source, FIRST_ROWS)) if own else layouts[0])
    for part, layout in zip(parts, layouts, strict=True):
        for row in text_examples(part.source):
            layout.standardize(row.example, row.place)


def check_first_rows(run: Run, limit: int = FIRST_ROWS) -> Layout:
    """Encode the first ``limit`` (two or more) rows of each source; return the layout of the first.

    The plan uses this, so that a wrong column, a message that the chat template rejects or a missing template is found
    before anything is queued. Raises `DataError` with file and line, and `ModelError` for the tokenizer.
    """
    tokenizer, parts = load_tokenizer(run), locate_parts(run)
    encoders, largest = [], 0
    for part in parts:
        rows = first_of(part.source, limit)
        if parts[-1].split == "train":
            check_divisible(len(rows), part.run)
        if part.has_own_layout:
            compare_with_file(tokenizer, run.model, rows)
            encoders.append(make_encoder(part, tokenizer, rows))
        encoded = encode_rows(rows, encoders[-1], run.sequence_length)
        token_lists = [ids for name in ("input_ids", "rejected_ids", "cut_ids") for ids in encoded.get(name, [])]
        largest = max([largest, *(max(ids) for ids in token_lists if ids)])
        dropped = [place for place in encoded["dropped"] if place]
        if len(rows) < limit or len(dropped) < limit:  # else later rows may have something to learn
            outcomes = count_outcomes(encoded["outcome"])
            check_learned(f"first rows of the {part.split}", outcomes, dropped[:NAMED], encoders[-1])
    check_vocabulary(run, largest)
    return encoders[0].layout
