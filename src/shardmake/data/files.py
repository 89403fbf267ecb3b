"""Rows of text files: JSON lines, JSON arrays, CSV and TSV, plain or compressed.

Every row is the bytes of one JSON object with its place in the file. The readers of `datasets` do not serve here: they
name no line in errors, load a JSON array whole, and turn cells such as ``NA`` and ``007`` into other values. The rows
become a memory-mapped data set through ``datasets.Dataset.from_generator``.
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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Final, TextIO

from shardmake.config.formats import data_kind
from shardmake.core.errors import DataError
from shardmake.core.units import plural

LINE, PLACE = "__line__", "__place__"
_CHUNK = 2**20
_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"[ \t\n\r]*")
_COMPLETE = re.compile(r'["}\]]|.[,\]\s]', re.DOTALL)
"""The last character of a complete value, or with the next one that of a number, which may be cut."""
_LONGEST_TOKEN = 16
"""Characters from the end of a piece within which an error may only mean that a literal or an escape is cut."""


def text_rows(paths: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows of text files; raise `DataError` with file and line for content that cannot be read."""
    for path in paths:
        with _reading_errors(path), _open(path) as file:
            for place, line in _READERS[data_kind(path) or ""](path, file):
                yield {PLACE: place, LINE: line}


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
        yield from _json_array(path, io.TextIOWrapper(file, "utf-8-sig"))
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


def _json_array(path: str, file: TextIO) -> Iterator[tuple[str, bytes]]:
    text = _JsonText(path, file)
    text.skip("[")
    while text.next_character() != "]" or text.values:
        yield f"{path}, row {text.values + 1}", text.skip_value().encode()
        if text.next_character() == "]":
            break
        text.skip(",")
    text.skip("]")
    if text.next_character():
        raise text.error("Extra data after the array", text.at)


class _JsonText:
    """JSON text that is read in pieces, so that memory holds one value and one piece."""

    def __init__(self, path: str, file: TextIO) -> None:
        self.path, self.file = path, file
        self.text, self.at, self.lines_before, self.values = "", 0, 0, 0

    def next_character(self) -> str:
        """Return the next character that is not space, empty at the end."""
        while True:
            self.at = _SPACE.match(self.text, self.at).end()  # type: ignore[union-attr]  # it matches everywhere
            if self.at < len(self.text) or not self._read_more():
                return self.text[self.at : self.at + 1]

    def skip(self, character: str) -> None:
        """Step over ``character``; raise `DataError` if another one is next."""
        if self.next_character() != character:
            raise self.error(f"Expecting {character!r}", self.at)
        self.at += 1

    def skip_value(self) -> str:
        """Step over one JSON value and return its text."""
        self.next_character()
        while True:
            try:
                _, end = _DECODER.raw_decode(self.text, self.at)
            except json.JSONDecodeError as error:
                is_cut = error.msg.startswith("Unterminated") or error.pos > len(self.text) - _LONGEST_TOKEN
                if not (is_cut and self._read_more()):
                    raise self.error(error.msg.removesuffix(" at").removesuffix(" starting"), error.pos) from None
            else:
                if _COMPLETE.match(self.text, end - 1) or not self._read_more():
                    value, self.at = self.text[self.at : end], end
                    self.values += 1
                    return value

    def _read_more(self) -> bool:
        """Read as much as there is, so that a long value takes few attempts; return False at the end."""
        piece = self.file.read(max(_CHUNK, len(self.text) - self.at))
        if piece:
            self.lines_before += self.text.count("\n", 0, self.at)
            self.text, self.at = self.text[self.at :] + piece, 0
        return bool(piece)

    def error(self, problem: str, position: int) -> DataError:
        """Return the error for a ``problem`` at a position of the text."""
        line = self.lines_before + self.text.count("\n", 0, position) + 1
        return DataError(f"{self.path}, line {line}, after row {self.values}, is not valid JSON: {problem}.")


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


_READERS: Final[Mapping[str, Callable[[str, Any], Iterator[tuple[str, bytes]]]]] = {
    ".jsonl": _json_lines,
    ".json": _json,
    ".csv": _csv,
    ".tsv": _csv,
}
