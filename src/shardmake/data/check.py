"""Checks of the data at plan, before anything is queued."""

from shardmake.config.models import Run
from shardmake.data.examples import (
    FIRST_ROWS,
    check_divisible,
    check_learned,
    check_vocabulary,
    encode_rows,
    first_of,
    load_tokenizer,
    locate_sources,
    make_encoder,
    recognize_layout,
)
from shardmake.data.layout import Layout
from shardmake.data.packing import NAMED, count_outcomes
from shardmake.data.sources import text_examples


def check_sources(run: Run) -> None:
    """Check every example of the run's text files without a tokenizer, and the columns of its Parquet files.

    Raises `DataError` with file and line for content that cannot be read or does not fit the format.
    """
    sources = locate_sources(run)
    layout = recognize_layout(run, sources["train"], first_of(sources["train"], FIRST_ROWS))
    for source in sources.values():
        for example, place in text_examples(source):
            layout.standardize(example, place)


def check_first_rows(run: Run, limit: int = FIRST_ROWS) -> Layout:
    """Encode the first ``limit`` (two or more) rows of the training and the evaluation data; return their layout.

    The plan uses this, so that a wrong column, a message that the chat template rejects or a missing template is found
    before anything is queued. Raises `DataError` with file and line, and `ModelError` for the tokenizer.
    """
    tokenizer, sources = load_tokenizer(run), locate_sources(run)
    rows = {split: first_of(source, limit) for split, source in sources.items()}
    if "eval" not in rows:
        check_divisible(len(rows["train"]), run)
    encoder, largest = make_encoder(run, tokenizer, sources["train"], rows["train"]), 0
    for split, source in sources.items():
        encoded = encode_rows(rows[split], encoder, run.sequence_length, source)
        largest = max([largest, *(max(ids) for ids in encoded["input_ids"] if ids)])
        dropped = [place for place in encoded["dropped"] if place]
        if len(rows[split]) < limit or len(dropped) < limit:  # else later rows may have something to learn
            check_learned(f"first rows of the {split}", count_outcomes(encoded["outcome"]), dropped[:NAMED], encoder)
    check_vocabulary(run, largest)
    return encoder.layout
