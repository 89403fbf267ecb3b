"""The examples of a run: their sources, their layout, and their encoding; used by the data stage and by the plan."""

import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from functools import cache
from hashlib import blake2b
from itertools import chain, compress
from typing import Any, Final

import numpy as np
import pyarrow
from datasets import Features, List, Value
from transformers import PreTrainedTokenizerBase

from shardmake.config.formats import FORMATS, DataFormat
from shardmake.config.models import Data, Run
from shardmake.config.objectives import OBJECTIVES
from shardmake.core.errors import ConfigError, DataError, ShardmakeError, nearest
from shardmake.data.chat import ChatTemplate
from shardmake.data.encode import Encoder, Tokens, loss_on_assistant
from shardmake.data.files import RawRow, Row, open_row
from shardmake.data.layout import ELSEWHERE, HISTORY, MASK, MESSAGE_KEYS, Layout, label_of, recognize
from shardmake.data.packing import APART, KEPT, fit, fit_pair
from shardmake.data.placeholders import BadRowError, Rendered
from shardmake.data.sources import EVAL_SPLITS, FIRST_ROWS, TRAIN_SPLITS, Source, first_rows, locate
from shardmake.run.paths import RunDir
from shardmake.run.receipts import DataReceipt
from shardmake.run.tokenizer import load_tokenizer, stop_ids

logger = logging.getLogger(__name__)
NOTED: Final = {
    "row": "int64", "tokens": "int32", "learned": "int32", "largest": "int32", "digest": "uint64", "outcome": "string",
    "dropped": "string", "note": "string",
}  # fmt: skip
"""Columns of encoded rows that are not trained on, with their types."""
_MORE: Final = {"preference": ("rejected_ids",), "unpaired-preference": ("label", "cut_ids")}
"""Further columns of a format."""


@dataclass(frozen=True)
class Part:
    """One source of examples with its first rows and their layout, and the run as if that were its only source."""

    split: str
    name: str
    """Name in a mixture; empty if the split has one source."""
    run: Run
    source: Source
    rows: list[Row]
    layout: Layout
    drops: bool
    """Bad rows are left out."""


def open_parts(run: Run, limit: int = FIRST_ROWS) -> list[Part]:
    """Return the sources of the training data, then those of the evaluation data (none if these are held out).

    Raw data is not among them. A single source of evaluation examples has the layout of a single source of training
    examples. Raises `DataError` if the first ``limit`` rows of a source cannot be read.
    """
    data, parts, drops = run.data, list[Part](), run.data.on_bad_row == "drop"
    read = data.model_copy(update={"format": "auto"}) if data.is_raw else data
    trained = [] if data.is_raw else data.sources
    for split, sources, splits, several in (
        ("train", trained, TRAIN_SPLITS, isinstance(data.train, list)),
        ("eval", data.eval_sources, EVAL_SPLITS, isinstance(data.eval, list)),
    ):
        for one in sources:
            view = run.model_copy(update={"data": read.only(one)})
            source = locate(one.source, view.data, splits)
            rows = first_rows(source, limit, drop=drops)
            is_own = split == "train" or several or len(trained) != 1
            layout = _recognize(view, source, rows) if is_own else parts[0].layout
            parts.append(Part(split, one.label if several else "", view, source, rows, layout, drops))
    return parts


def _recognize(run: Run, source: Source, rows: Sequence[Row]) -> Layout:
    """Return the layout of data that begin with ``rows``; with ``data.on_bad_row: drop``, of the first that has one."""
    check_named(run.data, list(dict.fromkeys(column for row in rows for column in row.example)), str(source))
    *others, last = rows if run.data.on_bad_row == "drop" else rows[:1]
    for row in others:
        with suppress(DataError):
            return recognize(run.data, run.objective, row.example, row.place)
    return recognize(run.data, run.objective, last.example, last.place)


def check_named(data: Data, columns: Sequence[str], source: str) -> None:
    """Raise `DataError` if ``data.columns`` names a column that is not among ``columns``, those of ``source``."""
    for column, name in data.columns.named.items():
        is_key = any(column in spec.turn for spec in FORMATS.values())
        if not is_key and name not in columns:
            raise DataError(
                f"data.columns.{column}: {name!r} is not a column of {source}.{nearest(name, columns)} "
                f"The columns are {', '.join(columns)}."
            )


def read_receipt(rundir: RunDir) -> DataReceipt | None:
    """Return the receipt of the run's data; None if it is missing, damaged or of another layout."""
    with suppress(ShardmakeError):
        return DataReceipt.read(rundir.data_receipt)
    return None


def day_of(rundir: RunDir | None) -> date:
    """Return the day that the run's data has recorded for a template that reads the clock; today without one."""
    receipt = read_receipt(rundir) if rundir else None
    return date.fromisoformat(receipt.settings.day) if receipt and receipt.settings.day else date.today()


def open_chat_template(run: Run, rundir: RunDir | None = None) -> ChatTemplate:
    """Return the chat template of ``run`` with its tokenizer; the data of ``rundir`` may have recorded a day for it.

    Raises what `load_tokenizer` raises, and `ConfigError` for an argument that the template does not read.
    """
    tokenizer = load_tokenizer(run)
    for name in run.data.template_arguments if tokenizer.chat_template is not None else ():
        if not _reads(tokenizer, name):
            raise ConfigError(
                f"data.template_arguments.{name}: the chat template does not read it. Correct or remove it."
            )
    stops = [token for token in stop_ids(run) | {tokenizer.eos_token_id} if token is not None]
    texts = frozenset(text for text in tokenizer.convert_ids_to_tokens(sorted(stops)) if text)
    return ChatTemplate(tokenizer, texts, run.data.template_arguments, run.data.turns, day_of(rundir))


def make_encoder(part: Part, chat: ChatTemplate, *, log: bool = True) -> Encoder:
    """Return the encoder for the data of ``part``, and log what was recognized."""
    layout, run = part.layout, part.run
    columns = list(dict.fromkeys(column for row in part.rows for column in row.example))
    read = {MASK, *layout.columns.values(), *([HISTORY] if layout.format == "alpaca" else [])}
    unused = [column for column in columns if column not in read]
    rest = f" Columns that are not used: {', '.join(unused)}." if unused else ""
    if layout.format == "chat" and (name := layout.columns["system"]) in columns:
        rest += f" Text in the column {name} is the system message of conversations without one."
    if written := dict.fromkeys(name for row in part.rows for name in layout.written(row.example)):
        rest += f" JSON text in {', '.join(written)} is read as messages."
    if keys := sorted(_unread_keys(part, chat)):
        rest += f" Keys of messages that are not used: {', '.join(keys)}."
    logger.log(logging.INFO if log else logging.DEBUG, f"{part.source}: the examples are in the format {layout}.{rest}")
    said = {column: "what is learned" for column in unused if any(_is_mask(row, column, layout) for row in part.rows)}
    said |= {column: ELSEWHERE[column] for column in unused if column in ELSEWHERE}
    for column, words in said.items() if log else ():
        logger.warning(
            f"{part.source}: the column {column} is not used, from which other tools take {words}. Name it "
            "with data.columns if the format has a column for it. Otherwise, write it into the examples or remove it."
        )
    return Encoder(chat, layout, loss_on_assistant(run.data, layout.format), OBJECTIVES[run.objective].cuts)


def _is_mask(row: Row, column: str, layout: Layout) -> bool:
    """Return True if ``column`` has 0 or 1 for each message of ``row``."""
    value, messages = row.example.get(column), row.example.get(layout.columns.get("messages", ""))
    if not isinstance(value, list) or not isinstance(messages, list):
        return False
    return len(value) == len(messages) and all(entry in (0, 1) for entry in value)


def _unread_keys(part: Part, chat: ChatTemplate) -> set[str]:
    """Return the keys of messages with a value that neither the layout nor the chat template reads."""
    lists = (value for row in part.rows for value in row.example.values() if isinstance(value, list))
    role = part.layout.columns.get("role")
    messages = (one for one in chain.from_iterable(lists) if isinstance(one, dict) and role in one)
    keys = {key for one in messages for key, value in one.items() if value not in (None, "", [])}
    return {key for key in keys - {*MESSAGE_KEYS, *part.layout.columns.values()} if not _reads(chat.tokenizer, key)}


def _reads(tokenizer: PreTrainedTokenizerBase, name: str) -> bool:
    """Return True if the chat template of ``tokenizer`` has the word ``name``."""
    return bool(re.search(rf"\b{re.escape(name)}\b", str(tokenizer.chat_template)))


@cache
def _schema_of(format: DataFormat) -> pyarrow.Schema:
    ids, marks = List(Value("int32")), List(Value("bool"))
    columns = {"input_ids": ids, "loss_mask": marks, "seq_lengths": ids}
    columns |= {name: Value("bool") if name == "label" else ids for name in _MORE.get(format, ())}
    return Features({**{name: Value(kind) for name, kind in NOTED.items()}, **columns}).arrow_schema


def encode_rows(
    rows: Iterable[tuple[int, RawRow]], encoder: Encoder, length: int, *, drop: bool
) -> pyarrow.RecordBatch:
    """Return the pieces of numbered ``rows``, which are opened here, each of at most ``length`` tokens.

    ``dropped`` has the place of a dropped example, and ``note`` why (``drop``: also of a bad row), or `APART`. Pairs
    also have ``rejected_ids``. Completions with labels have ``label`` and ``cut_ids``: the tokens after the cut for
    which a prompt of one token has room, because the completion may also follow the prompt of another example.
    """
    opened, rendered = list[tuple[int, Row | DataError]](), list[list[Rendered]]()
    for number, raw in rows:
        try:
            row = open_row(raw)
            rendered.append(encoder.render(row.example, row.place))
            opened.append((number, row))
        except DataError as error:
            if not drop:
                raise
            opened.append((number, error))
    tokens, pieces = encoder.tokenize(rendered), list[dict[str, Any]]()
    for number, found in opened:
        if isinstance(found, DataError):
            cause = found.args[0] if isinstance(found, BadRowError) else "not in the format"
            bad = {"row": number, "outcome": "dropped_bad", "note": cause, "dropped": str(found)}
            pieces.append({**bad, "input_ids": [], "loss_mask": []})
        else:
            pieces += [{"row": number, **piece} for piece in _pieces(found, next(tokens), encoder, length)]
    for piece in pieces:
        ids, more = np.asarray(piece["input_ids"], "int32"), (piece.get("rejected_ids", ()), piece.get("cut_ids", ()))
        piece["seq_lengths"], piece["tokens"] = [len(ids)], len(ids)
        piece["learned"] = int(np.count_nonzero(piece["loss_mask"]))
        piece["largest"] = max((int(np.max(one)) for one in (ids, *more) if len(one)), default=0)
        piece["digest"] = int.from_bytes(blake2b(ids.tobytes(), digest_size=8).digest(), "little")
    return pyarrow.RecordBatch.from_pylist(pieces, _schema_of(encoder.layout.format))


def _pieces(row: Row, encoded: list[Tokens], encoder: Encoder, length: int) -> Iterator[dict[str, Any]]:
    format, others = encoder.layout.format, dict[str, Any]()
    if format == "preference":
        pair = [(ids.tolist(), mask.tolist()) for ids, mask in encoded]
        (chosen, rejected), outcome = fit_pair(pair, length, cuts=encoder.cuts)
        fitted, others["rejected_ids"] = [(chosen, outcome)], list(compress(*rejected))
    else:
        fitted = [piece for tokens in encoded for piece in fit(tokens, length, split=format == "text")]
    if format == "unpaired-preference":
        ids, mask = encoded[0]
        others["label"] = label_of(row.example[encoder.layout.columns["label"]])
        others["cut_ids"] = ids[length : mask.argmax() + length - 1] if mask.any() else []
    is_apart = format != "preference" and len(encoded) > 1
    for number, ((ids, mask), outcome) in enumerate(fitted):
        note, dropped = APART if is_apart and not number else "", "" if outcome in KEPT else row.place
        yield {"input_ids": ids, "loss_mask": mask, "outcome": outcome, "note": note, "dropped": dropped, **others}
