"""Rows of files: JSON lines, JSON arrays, CSV and TSV, plain or compressed, and Parquet.

Every row of a text file is the bytes of one JSON object with its place in the file. The readers of `datasets` do not
serve here: they name no line in errors, turn cells such as ``NA`` and ``007`` into other values, and texts that look
like dates into dates.
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
from pathlib import Path
from typing import IO, Any, Final

from shardmake.config.formats import data_kind
from shardmake.core.errors import DataError
from shardmake.core.units import plural
from shardmake.data.parquet import parquet_rows

RawRow = tuple[str, bytes | dict[str, Any]]
"""The place of a row, and its line, or its columns if the file has types."""
_CHUNK = 2**20
_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"[ \t\n\r]*")


def raw_rows(paths: Iterable[Path]) -> Iterator[RawRow]:
    """Yield the rows of files; raise `DataError` with file and line for content that cannot be read."""
    for path in map(str, paths):
        with _reading_errors(path), _open(path) as file:
            yield from _READERS[data_kind(path) or ""](path, file)


@contextmanager
def _reading_errors(path: str) -> Iterator[None]:
    try:
        yield
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {error}. Save it as UTF-8.") from None
    except (EOFError, OSError, zlib.error, lzma.LZMAError) as error:
        if getattr(error, "errno", None) is not None:  # the file system's, not the decompressor's
            raise
        raise DataError(
            f"Cannot decompress {path}: {error}. The file is incomplete or damaged. Copy it again."
        ) from None


def _open_zstd(path: str) -> IO[bytes]:
    import pyarrow

    return io.BufferedReader(pyarrow.input_stream(path, compression="zstd"), _CHUNK)


_OPENERS: Final[Mapping[str, Callable[[str], Any]]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": _open_zstd,
}


def _open(path: str) -> IO[bytes]:
    opener = _OPENERS.get(Path(path).suffix)
    return opener(path) if opener else Path(path).open("rb")


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
        if index == 0:
            _check_first_line(path, line)
        yield place, line


def _check_first_line(path: str, line: bytes) -> None:
    try:
        json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{path} is neither a JSON array of examples nor one JSON object per line: {error.msg}. Write one "
            "of the two."
        ) from None


def _json_array(path: str, file: IO[bytes]) -> Iterator[tuple[str, bytes]]:
    """Read an array, whose text is in memory as a whole; data of many GB are better JSON lines."""
    text = io.TextIOWrapper(file, "utf-8-sig").read()
    at, rows = _next(text, text.index("[") + 1), 0
    more = text[at : at + 1] != "]"
    while more:
        try:
            _, end = _DECODER.raw_decode(text, at)
        except json.JSONDecodeError as error:
            problem = error.msg.removesuffix(" at").removesuffix(" starting")
            raise _invalid_array(path, text, error.pos, rows, problem) from None
        rows += 1
        yield f"{path}, row {rows}", text[at:end].encode()
        at = _next(text, end)
        if more := text[at : at + 1] == ",":
            at = _next(text, at + 1)
    if text[at : at + 1] != "]":
        raise _invalid_array(path, text, at, rows, "Expecting ','")
    if (at := _next(text, at + 1)) < len(text):
        raise _invalid_array(path, text, at, rows, "Extra data after the array")


def _next(text: str, at: int) -> int:
    """Return the position of the first character from ``at`` on that is not space."""
    return _SPACE.match(text, at).end()  # type: ignore[union-attr]  # it matches everywhere


def _invalid_array(path: str, text: str, at: int, rows: int, problem: str) -> DataError:
    line = text.count("\n", 0, at) + 1
    return DataError(f"{path}, line {line}, after row {rows}, is not valid JSON: {problem}.")


def _csv(path: str, file: IO[bytes]) -> Iterator[tuple[str, bytes]]:
    csv.field_size_limit(sys.maxsize)
    delimiter = "\t" if data_kind(path) == ".tsv" else ","
    rows = csv.reader(io.TextIOWrapper(file, "utf-8-sig", newline=""), strict=True, delimiter=delimiter)
    names: list[str] = []
    start = 1
    try:
        for cells in rows:
            place, start = f"{path}, line {start}", rows.line_num + 1
            if cells and not names:
                names = _header(cells, place)
            elif cells:
                yield place, _csv_row(names, cells, place)
    except csv.Error as error:
        raise DataError(
            f"{path}, line {start} is not valid CSV: {error}. Put cells with commas, quotes or line breaks "
            "in quotes, and double the quotes in them."
        ) from None


def _header(cells: list[str], place: str) -> list[str]:
    twice = sorted({name for name in cells if cells.count(name) > 1})
    if twice:
        raise DataError(f"{place}: the header has {', '.join(map(repr, twice))} twice. Rename a column.")
    return cells


def _csv_row(names: list[str], cells: list[str], place: str) -> bytes:
    if len(cells) != len(names):
        raise DataError(
            f"{place}: the header has {plural(len(names), 'column')}, and this row {len(cells)}. Put cells with "
            "commas or line breaks in quotes."
        )
    return json.dumps(dict(zip(names, cells, strict=True))).encode()


_READERS: Final[Mapping[str, Callable[[str, Any], Iterator[RawRow]]]] = {
    ".jsonl": _json_lines,
    ".json": _json,
    ".csv": _csv,
    ".tsv": _csv,
    ".parquet": parquet_rows,
}
