"""Rows of files: JSON lines, JSON arrays, CSV and TSV, plain or compressed, Parquet and Arrow.

A row of a text file is the bytes of one JSON object, which `open_row` reads in another process. The readers of
`datasets` name no line in errors, turn cells such as ``NA`` and ``007`` into other values, and some texts into dates.
"""

import bz2
import codecs
import csv
import gzip
import io
import json
import lzma
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

import pyarrow
import pyarrow.parquet

from shardmake.config.formats import BINARY_SUFFIXES, data_kind
from shardmake.core.errors import DataError
from shardmake.core.units import plural

RawRow = tuple[str, bytes | dict[str, Any]]
"""The place of a row, and its line, or its columns if the file has types."""
_CHUNK = 2**20
_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"[ \t\n\r]*")


class Row(NamedTuple):
    """One example of a source, and its place for messages: the file with the line, or with the row counted from 1."""

    place: str
    example: dict[str, Any]


def open_row(row: RawRow) -> Row:
    """Return the example of a raw row; raise `DataError` with its place if it is not a JSON object."""
    place, content = row
    if isinstance(content, dict):
        return Row(place, content)
    try:
        line = content.rstrip()
        example = _ROW_DECODER.decode(line.decode("utf-8-sig", "surrogatepass"))
    except UnicodeDecodeError as error:
        raise DataError(f"{place} is not UTF-8 text: {error}. Save the file as UTF-8.") from None
    except KeyError as error:
        raise DataError(f"{place} has the key {error.args[0]!r} twice in one object. Remove one.") from None
    except json.JSONDecodeError as error:
        where = f"at character {error.pos + 1}" if error.pos < len(error.doc) else "at the end of the line"
        raise DataError(f"{place} is not valid JSON: {error.msg.removesuffix(' at')} {where}.") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place} is not valid JSON: {error}.") from None
    if not isinstance(example, dict):
        raise DataError(f"{place} is not a JSON object but {type(example).__name__}.")
    return Row(place, example)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object as a dictionary; raise `KeyError` for a key that is there twice, as that loses a value."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise KeyError(next(key for at, (key, _) in enumerate(pairs) if key in dict(pairs[:at])))
    return found


_ROW_DECODER: Final = json.JSONDecoder(object_pairs_hook=_unique)


def raw_rows(paths: Iterable[Path]) -> Iterator[RawRow]:
    """Yield the rows of files; raise `DataError` with file and line for content that cannot be read."""
    for path in map(str, paths):
        opener = _OPENERS.get(Path(path).suffix, partial(open, mode="rb"))
        with _reading_errors(path), opener(path) as file:
            yield from _READERS[data_kind(path) or ""](path, file)


@contextmanager
def _reading_errors(path: str) -> Iterator[None]:
    try:
        yield
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {error}. Save it as UTF-8.") from None
    except (EOFError, OSError, zlib.error, lzma.LZMAError, pyarrow.ArrowException) as error:
        if getattr(error, "errno", None) is not None:  # the file system's, not the decompressor's
            raise
        if data_kind(path) in BINARY_SUFFIXES:
            problem = " ".join(str(error).split()).rstrip(".")
            raise DataError(f"Cannot read {path}: {problem}. Write it again, or name another one.") from None
        raise DataError(
            f"Cannot decompress {path}: {error}. The file is incomplete or damaged. Copy it again."
        ) from None


_OPENERS: Final[Mapping[str, Callable[[str], Any]]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": lambda path: io.BufferedReader(pyarrow.input_stream(path, compression="zstd"), _CHUNK),
}


def _json_lines(path: str, file: IO[bytes]) -> Iterator[tuple[str, bytes]]:
    for number, line in enumerate(file, start=1):
        if line.strip():
            yield f"{path}, line {number}", line


def _json(path: str, file: Any) -> Iterator[tuple[str, bytes]]:
    """Read an array of examples, or lines with one example each."""
    if file.peek(_CHUNK).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
        yield from _json_array(path, file)
        return
    for index, (place, line) in enumerate(_json_lines(path, file)):
        try:
            _ = index or json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(
                f"{path} is neither a JSON array of examples nor one JSON object per line: {error.msg}. Write one "
                "of the two."
            ) from None
        yield place, line


def _json_array(path: str, file: IO[bytes]) -> Iterator[tuple[str, bytes]]:
    """Read an array, whose text is in memory as a whole; data of many GB are better JSON lines."""
    text, rows = io.TextIOWrapper(file, "utf-8-sig").read(), 0
    at = _next(text, text.index("[") + 1)
    more = text[at : at + 1] != "]"
    try:
        while more:
            start, (_, end) = at, _DECODER.raw_decode(text, at)
            rows, at = rows + 1, _next(text, end)
            yield f"{path}, row {rows}", text[start:end].encode()
            if more := text[at : at + 1] == ",":
                at = _next(text, at + 1)
        if text[at : at + 1] != "]":
            raise json.JSONDecodeError("Expecting ','", text, at)
        if (at := _next(text, at + 1)) < len(text):
            raise json.JSONDecodeError("Extra data after the array", text, at)
    except json.JSONDecodeError as error:
        problem = error.msg.removesuffix(" at").removesuffix(" starting")
        raise DataError(f"{path}, line {error.lineno}, after row {rows}, is not valid JSON: {problem}.") from None


def _next(text: str, at: int) -> int:
    """Return the position of the first character from ``at`` on that is not space."""
    return _SPACE.match(text, at).end()  # type: ignore[union-attr]  # it matches everywhere


def _csv(path: str, file: IO[bytes]) -> Iterator[RawRow]:
    csv.field_size_limit(sys.maxsize)
    delimiter = "\t" if data_kind(path) == ".tsv" else ","
    rows = csv.reader(io.TextIOWrapper(file, "utf-8-sig", newline=""), strict=True, delimiter=delimiter)
    names: list[str] = []
    start = 1
    try:
        for cells in rows:
            place, start = f"{path}, line {start}", rows.line_num + 1
            if cells and not names:
                names = cells
                if twice := sorted({name for name in names if names.count(name) > 1}):
                    raise DataError(f"{place}: the header has {', '.join(map(repr, twice))} twice. Rename a column.")
            elif cells and len(cells) != len(names):
                raise DataError(
                    f"{place}: the header has {plural(len(names), 'column')}, and this row {len(cells)}. Put cells "
                    "with commas or line breaks in quotes."
                )
            elif cells:
                yield place, dict(zip(names, cells, strict=True))
    except csv.Error as error:
        raise DataError(
            f"{path}, line {start} is not valid CSV: {error}. Put cells with commas, quotes or line breaks "
            "in quotes, and double the quotes in them."
        ) from None


def _parquet(path: str, file: Any) -> Iterator[RawRow]:
    """Yield place and columns of each row of the open ``file``, with the values of JSON lines of the same examples.

    Arrow gives all rows the same keys. A key that only other rows have comes back as null, so nulls are left out,
    except those of a key that has no value in any row: it would not be in the file if no row had it. Columns of the
    type JSON (`datasets` writes them for messages with unequal keys) keep every null.
    """
    with pyarrow.parquet.ParquetFile(file) as table:
        yield from _decoded(path, table.schema_arrow, table.iter_batches(256))


def _arrow(path: str, file: Any) -> Iterator[RawRow]:
    """Yield the same of a file that `datasets` saved, whose format is a stream, or of Arrow's format with an index."""
    if file.peek(6).startswith(b"ARROW1"):
        table = pyarrow.ipc.open_file(file)
        yield from _decoded(path, table.schema, map(table.get_batch, range(table.num_record_batches)))
    else:
        table = pyarrow.ipc.open_stream(file)
        yield from _decoded(path, table.schema, table)


def _decoded(path: str, schema: pyarrow.Schema, batches: Iterable[pyarrow.RecordBatch]) -> Iterator[RawRow]:
    decode = {field.name: _decoder(field.type) for field in schema}
    rows = (row for batch in batches for row in batch.to_pylist())
    for number, row in enumerate(rows, start=1):
        yield f"{path}, row {number}", {key: decode[key](value) for key, value in row.items()}


def count_parquet_rows(path: Path) -> int:
    """Return the number of rows of a file, which its end states."""
    with _reading_errors(str(path)):
        return int(pyarrow.parquet.read_metadata(path).num_rows)


def _decoder(kind: pyarrow.DataType) -> Callable[[Any], Any]:
    """Return the function from a value of a column of type ``kind``, as Arrow gives it, to that of JSON lines."""
    if isinstance(kind, pyarrow.JsonType):
        return lambda value: None if value is None else json.loads(value)
    if pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind) or pyarrow.types.is_fixed_size_list(kind):
        item = _decoder(kind.value_type)
        return lambda values: None if values is None else [item(value) for value in values]
    if pyarrow.types.is_struct(kind):
        fields = {field.name: _decoder(field.type) for field in kind}
        always = {field.name for field in kind if pyarrow.types.is_null(field.type)}

        def decode(value: Any) -> Any:
            if value is None:
                return None
            return {key: fields[key](part) for key, part in value.items() if part is not None or key in always}

        return decode
    if pyarrow.types.is_map(kind):
        item = _decoder(kind.item_type)
        return lambda pairs: None if pairs is None else {key: item(value) for key, value in pairs}
    return lambda value: value


_READERS: Final[Mapping[str, Callable[[str, Any], Iterator[RawRow]]]] = {
    ".jsonl": _json_lines, ".json": _json, ".csv": _csv, ".tsv": _csv, ".parquet": _parquet, ".arrow": _arrow,
}  # fmt: skip
