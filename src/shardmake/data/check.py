"""Checks of the data at plan, before anything is queued."""

import logging
import random
import re
from collections.abc import Iterator
from heapq import nsmallest
from itertools import compress, islice
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow

from shardmake.config.models import Run
from shardmake.core.errors import DataError
from shardmake.data.build import check_divisible
from shardmake.data.encode import Encoder
from shardmake.data.examples import encode_rows, make_encoder, open_chat_template, open_parts
from shardmake.data.files import RawRow, Row, open_row, raw_rows
from shardmake.data.layout import is_learned
from shardmake.data.packing import Encoded
from shardmake.data.sources import FIRST_ROWS, Source, files_of_raw
from shardmake.run.length import Sampled
from shardmake.run.paths import RunDir
from shardmake.run.tokenizer import check_vocabulary, compare_with_file

logger = logging.getLogger(__name__)
_MARKS = re.compile(r"\{%[-+]?\s*generation\b")


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
        silent = 0
        for raw in raw_rows(part.source.paths):
            try:
                silent += _is_silent(part.layout.standardize(*reversed(open_row(raw))))
                counts[-1] += 1
            except DataError:
                if not part.drops:
                    raise
        if silent:
            logger.warning(
                f"{part.source}: examples with an answer without text: {silent:,}. The model learns to end it at once. "
                "Remove these examples; for sft, weight: 0 in a message without text leaves it out of the loss."
            )
    return counts


def _is_silent(standard: dict[str, Any]) -> bool:
    """Return True if an answer that is learned has no text, no reasoning and no call of a tool."""
    answer: Any = next((standard[name] for name in ("messages", "completion", "chosen") if name in standard), [])
    if isinstance(answer, str):
        return not answer.strip()
    keys = ("content", "reasoning_content", "tool_calls")
    return any(not any(str(one.get(key) or "").strip() for key in keys) for one in filter(is_learned, answer))


def check_first_rows(run: Run, limit: int = FIRST_ROWS, *, rundir: RunDir | None = None) -> list[Sampled]:
    """Return the encoded first ``limit`` (two or more) rows of each source, and as many of its others.

    Raises `DataError` with file and line for rows that cannot be learned, and `ModelError` for the tokenizer.
    """
    chat, parts, sampled, largest = open_chat_template(run, rundir), open_parts(run, limit), list[Sampled](), 0
    for part in parts:
        if parts[-1].split == "train":
            check_divisible(len(part.rows), part.run)
        texts = ((row.place, text) for row in part.rows for text in _texts(row.example))
        compare_with_file(chat.tokenizer, run.model, texts)
        encoder, tried = make_encoder(part, chat), _sample(part.source, limit)
        batch = encode_rows(enumerate(tried), encoder, run.sequence_length, drop=part.drops)
        table = datasets.Dataset(pyarrow.Table.from_batches([batch]))
        found = Encoded.of(part.name, encoder, table, np.ones(len(table), bool))
        found.check(f"first rows of the {part.split}", is_all=len(tried) < limit)
        sampled.append(Sampled(len(tried), found.column("tokens").tolist()))
        largest = max([largest, *table["largest"]])
        marks_agree(encoder, part.rows[0])
    check_vocabulary(run, largest)
    return sampled


def marks_agree(encoder: Encoder, row: Row) -> bool | None:
    """Return whether `{% generation %}` marks, if any, say the learned tokens of ``row``; if not, log a warning."""
    tokenizer = encoder.chat.tokenizer
    if not encoder.assistant_only or not _MARKS.search(str(tokenizer.chat_template)):
        return None
    try:
        ours, standard = encoder(row.example, row.place), encoder.layout.standardize(row.example, row.place)
    except DataError:  # a bad row, which was reported
        standard = {}
    if "messages" not in standard:
        return None
    settings: Any = {"tools": standard.get("tools"), "return_dict": True, "return_assistant_tokens_mask": True}
    marked = tokenizer.apply_chat_template(standard["messages"], **settings)
    both = (ours[-1], (marked["input_ids"], marked["assistant_masks"]))
    learned, said = (tokenizer.decode(list(compress(ids, mask))).strip() for ids, mask in both)
    agree = len(ours) == 1 and learned == said
    if not agree:
        logger.warning(
            f"The {{% generation %}} marks of the chat template are not followed. They say {said[:200]!r}, and what "
            f"the model must say after the context of inference is learned: {learned[:200]!r}."
        )
    return agree


def _sample(source: Source, count: int) -> list[RawRow]:
    """Return the first ``count`` rows of a source and as many from all of its others, always the same."""
    rows, draw = raw_rows(source.paths), random.Random(0)
    return [*islice(rows, count), *nsmallest(count, rows, key=lambda _: draw.random())]


def _texts(value: Any) -> Iterator[str]:
    """Yield every text in ``value``, without keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _texts(part)
