"""Rows of text files: their order and places, and what is said of a file that cannot be read."""

import bz2
import csv
import gzip
import io
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardmake.core.errors import DataError
from shardmake.data.files import raw_rows

COMPRESSORS: dict[str, Callable[[bytes], Any]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": lambda content: pyarrow.compress(content, "zstd", asbytes=True),
}
ROWS: list[dict[str, str]] = [{"prompt": 'a, "b"\n c', "completion": "ü\u2028😀"}, {"prompt": "", "completion": "007"}]


def as_csv(rows: list[dict[str, Any]], delimiter: str = ",") -> bytes:
    buffer = io.StringIO(newline="")
    writer = csv.DictWriter(buffer, list(rows[0]), delimiter=delimiter)
    writer.writeheader()
    writer.writerows(rows)
    return buffer.getvalue().encode()


CONTENTS: dict[str, bytes] = {
    "lines.jsonl": "".join(json.dumps(row) + "\n" for row in ROWS).encode(),
    "lines.json": "\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS).encode(),
    "array.json": json.dumps(ROWS).encode(),
    "indented.json": json.dumps(ROWS, indent=2, ensure_ascii=False).encode(),
    "marked.json": b"\xef\xbb\xbf\n" + json.dumps(ROWS).encode(),
    "table.csv": as_csv(ROWS),
    "marked.csv": b"\xef\xbb\xbf" + as_csv(ROWS),
    "table.tsv": as_csv(ROWS, "\t"),
}


def rows_in(path: Path) -> list[Any]:
    return [json.loads(row) if isinstance(row, bytes) else row for _, row in raw_rows([path])]


@pytest.mark.parametrize("compression", COMPRESSORS)
@pytest.mark.parametrize("name", CONTENTS)
def test_the_same_rows_come_from_every_kind(tmp_path: Path, name: str, compression: str) -> None:
    path = tmp_path / f"{name}{compression}"
    path.write_bytes(COMPRESSORS[compression](CONTENTS[name]))
    assert rows_in(path) == ROWS


@pytest.mark.parametrize("compression", [".gz", ".bz2", ".xz", ".zst"])
def test_all_parts_of_a_file_that_was_compressed_in_parts_are_read(tmp_path: Path, compression: str) -> None:
    path = tmp_path / f"a.jsonl{compression}"
    path.write_bytes(COMPRESSORS[compression](CONTENTS["lines.jsonl"]) * 3)
    assert rows_in(path) == ROWS * 3


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(array=st.lists(values, max_size=5), indent=st.sampled_from([None, 0, 2]))
def test_rows_of_an_array_are_its_values(array: list[Any], indent: int | None, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(array, indent=indent))
    assert rows_in(path) == array


cells = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=12)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(table=st.lists(st.tuples(cells, cells), min_size=1, max_size=5))
def test_cells_come_back_as_text(table: list[tuple[str, str]], tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    rows = [{"prompt": prompt, "completion": completion} for prompt, completion in table]
    path.write_bytes(as_csv(rows))
    assert rows_in(path) == rows


def test_places_name_the_line_or_the_row(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('p,q\n1,"a\nb"\n\n3,4\n')
    (tmp_path / "b.json").write_text('[{"text": 1},\n {"text": 2}]')
    (tmp_path / "c.json").write_text('{"text": 1}\n\n{"text": 2}')
    paths = [tmp_path / name for name in ("a.csv", "b.json", "c.json")]
    places = [place.removeprefix(f"{tmp_path}/") for place, _ in raw_rows(paths)]
    assert places == [
        "a.csv, line 2",
        "a.csv, line 5",
        "b.json, row 1",
        "b.json, row 2",
        "c.json, line 1",
        "c.json, line 3",
    ]


BROKEN: list[tuple[str, bytes, str]] = [
    ("a.json", b'[\n{"a": 1},\n{"b" 2}]', "a.json, line 3, after row 1, is not valid JSON: Expecting ':' delimiter."),
    ("a.json", b'[{"a": 1},]', "a.json, line 1, after row 1, is not valid JSON: Expecting value."),
    ("a.json", b'[{"a": 1}\n{"b": 2}]', "a.json, line 2, after row 1, is not valid JSON: Expecting ','."),
    ("a.json", b'[{"a": 1}\n', "a.json, line 2, after row 1, is not valid JSON: Expecting ','."),
    ("a.json", b'[{"a": "1', "a.json, line 1, after row 0, is not valid JSON: Unterminated string."),
    ("a.json", b"[] []", "a.json, line 1, after row 0, is not valid JSON: Extra data after the array."),
    ("a.json", b'[{"a": "\xff"}]', "a.json is not UTF-8 text: 'utf-8' codec can't decode byte 0xff in position 8: "
     "invalid start byte. Save it as UTF-8."),
    ("a.json", b'{\n"a": 1\n}', "a.json is neither a JSON array of examples nor one JSON object per line: Expecting "
     "property name enclosed in double quotes. Write one of the two."),
    ("a.csv", b"p,q\n1\n", "a.csv, line 2: the header has 2 columns, and this row 1. Put cells with commas or "
     "line breaks in quotes."),
    ("a.csv", b'p,q\n1,2\n1,"x\n', "a.csv, line 3 is not valid CSV: unexpected end of data. Put cells with commas, quotes "
     "or line breaks in quotes, and double the quotes in them."),
    ("a.csv", b'p,q\n1,"a"b\n', "a.csv, line 2 is not valid CSV: ',' expected after '\"'. Put cells with commas, quotes "
     "or line breaks in quotes, and double the quotes in them."),
    ("a.csv", b"p,q,p\n", "a.csv, line 1: the header has 'p' twice. Rename a column."),
    ("a.csv", b"p,q\n1,\xff\n", "a.csv is not UTF-8 text: 'utf-8' codec can't decode byte 0xff in position 6: invalid "
     "start byte. Save it as UTF-8."),
]  # fmt: skip


@pytest.mark.parametrize(("name", "content", "message"), BROKEN)
def test_a_broken_file_is_refused_with_its_line(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as error:
        rows_in(tmp_path / name)
    assert str(error.value) == f"{tmp_path}/{message}"


@pytest.mark.parametrize("compression", [".gz", ".bz2", ".xz", ".zst"])
@pytest.mark.parametrize("damage", ["cut", "other"])
def test_a_damaged_compressed_file_is_refused(tmp_path: Path, compression: str, damage: str) -> None:
    path = tmp_path / f"a.jsonl{compression}"
    whole = COMPRESSORS[compression](CONTENTS["lines.jsonl"])
    path.write_bytes(whole[:-12] if damage == "cut" else b'{"text": "not compressed at all"}')
    with pytest.raises(DataError) as error:
        rows_in(path)
    assert str(error.value).startswith(f"Cannot decompress {path}: ")
    assert str(error.value).endswith("The file is incomplete or damaged. Copy it again.")
