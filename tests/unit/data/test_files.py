"""Finding and reading files: rows in order with their places, and messages that name the file and the line."""

import bz2
import csv
import gzip
import io
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.feather
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardmake.config.models import Data
from shardmake.core.errors import DataError, ShardmakeError
from shardmake.data import sources
from shardmake.data.files import open_row, raw_rows
from shardmake.data.sources import HubDataset, Source, count_rows, first_rows, identity, locate, locate_named
from tests.unit.wording import Wording

COMPRESSORS: dict[str, Callable[[bytes], Any]] = {
    "": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress,
    ".zst": lambda content: pyarrow.compress(content, "zstd", asbytes=True),
}  # fmt: skip
CELLS: list[dict[str, str]] = [{"prompt": 'a, "b"\n c', "completion": "ü\u2028😀"}, {"prompt": "", "completion": "007"}]


def as_csv(rows: list[dict[str, Any]], delimiter: str = ",") -> bytes:
    buffer = io.StringIO(newline="")
    writer = csv.DictWriter(buffer, list(rows[0]), delimiter=delimiter)
    writer.writeheader()
    writer.writerows(rows)
    return buffer.getvalue().encode()


CONTENTS: dict[str, bytes] = {
    "lines.jsonl": "".join(json.dumps(row) + "\n" for row in CELLS).encode(),
    "lines.json": "\n".join(json.dumps(row, ensure_ascii=False) for row in CELLS).encode(),
    "array.json": json.dumps(CELLS).encode(), "indented.json": json.dumps(CELLS, indent=2, ensure_ascii=False).encode(),
    "marked.json": b"\xef\xbb\xbf\n" + json.dumps(CELLS).encode(), "table.csv": as_csv(CELLS),
    "marked.csv": b"\xef\xbb\xbf" + as_csv(CELLS), "table.tsv": as_csv(CELLS, "\t"),
}  # fmt: skip


def rows_in(path: Path) -> list[Any]:
    return [json.loads(row) if isinstance(row, bytes) else row for _, row in raw_rows([path])]


@pytest.mark.parametrize("compression", COMPRESSORS)
@pytest.mark.parametrize("name", CONTENTS)
def test_the_same_rows_come_from_every_kind(tmp_path: Path, name: str, compression: str) -> None:
    path = tmp_path / f"{name}{compression}"
    path.write_bytes(COMPRESSORS[compression](CONTENTS[name]))
    assert rows_in(path) == CELLS
    if name == "lines.jsonl":  # as a program writes that compresses parts of a file
        path.write_bytes(COMPRESSORS[compression](CONTENTS[name]) * 3)
        assert rows_in(path) == CELLS * 3


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
    expected = "a.csv, line 2; a.csv, line 5; b.json, row 1; b.json, row 2; c.json, line 1; c.json, line 3"
    assert "; ".join(places) == expected


@pytest.mark.parametrize("compression", [".gz", ".bz2", ".xz", ".zst"])
@pytest.mark.parametrize("damage", ["cut", "other"])
def test_a_damaged_compressed_file_is_refused(tmp_path: Path, compression: str, damage: str) -> None:
    path = tmp_path / f"a.jsonl{compression}"
    whole = COMPRESSORS[compression](CONTENTS["lines.jsonl"])
    path.write_bytes(whole[:-12] if damage == "cut" else b'{"text": "not compressed at all"}')
    with pytest.raises(
        DataError, match=rf"(?s)^Cannot decompress {path}: .*is incomplete or damaged\. Copy it again\.$"
    ):
        rows_in(path)


ROWS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "name": "x"}]},
    {"messages": [{"role": "user", "content": "ü"}], "id": 7},
]


def write_jsonl(path: Path, rows: list[Any] = ROWS) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_parquet(path: Path, rows: list[Any] = ROWS) -> Path:
    keys = dict.fromkeys(key for row in rows for key in row)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([keys | row for row in rows]), path)
    return path


def examples(name: Path) -> list[Any]:
    source = locate(str(name), Data(train=str(name)), sources.TRAIN_SPLITS)
    assert count_rows(source) == len(list(raw_rows(source.paths)))
    found = [open_row(row).example for row in raw_rows(source.paths)]
    return [{key: value for key, value in one.items() if value is not None} for one in found]


def refusal(name: Path | str) -> str:
    with pytest.raises(ShardmakeError) as error:
        examples(Path(name))
    return str(error.value)


def test_json_lines_of_any_shape_come_back_as_written(tmp_path: Path) -> None:
    rows = [*ROWS, {"text": "a", "meta": 1}, {"text": "b", "meta": {"deep": [None]}}, {"text": "c", "meta": "s"}]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    path.write_text("\n" + path.read_text() + "\n")
    assert examples(path) == rows


def test_a_folder_is_read_in_the_order_of_its_names(tmp_path: Path) -> None:
    """Compressed and plain files of one kind may share it."""
    folder = tmp_path / "data" / "deeper"
    folder.mkdir(parents=True)
    for name, number in (("b", 2), ("a", 1)):
        write_jsonl(folder / f"{name}.jsonl", [{"text": number}])
    (folder.parent / "z.jsonl.gz").write_bytes(gzip.compress(b'{"text": 3}'))
    assert [row["text"] for row in examples(folder.parent)] == [1, 2, 3]


TWICE = ['{"text": "a"}', '{"text": "b", "meta": {"id": 1, "x": 2, "id": 3}}']
"""Python's json would silently take the last value of the key."""
UNREADABLE: dict[str, list[bytes]] = {
    "a.json": [
        b'[\n{"a": 1},\n{"b" 2}]', b'[{"a": 1},]', b'[{"a": 1}\n{"b": 2}]', b'[{"a": 1}\n', b'[{"a": "1', b"[] []",
        b'[{"a": "\xff"}]', b'{\n"a": 1\n}', f"[{','.join(TWICE)}]".encode(),
    ],
    "a.csv": [b"p,q\n1\n", b'p,q\n1,2\n1,"x\n', b'p,q\n1,"a"b\n', b"p,q,p\n", b"p,q\n1,\xff\n"],
    "a.jsonl": [
        b'{"a": 1}\n\n\n{"messages": [}\n', b'{"text": "a"}\n{"text": "\xff"}\n', b'{"text": ""}\n["a"]\n',
        b'{"text": ""}\n{"text": "b"\n', b'{"text": ""}\n{"text": "b\n', b"", b"\n\n", "\n".join(TWICE).encode(),
        '{"text": "a"}\n'.encode("utf-16"),
    ],
    **{name: [b"{}"] for name in ("a.arrow.gz", "a.parquet.gz", "a", "a.txt")},
}  # fmt: skip


@pytest.mark.parametrize(("name", "content"), [(name, one) for name, many in UNREADABLE.items() for one in many])
def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path, name: str, content: bytes, wording: Wording) -> None:
    (tmp_path / name).write_bytes(content)
    wording(refusal(tmp_path / name))


def test_parquet_rows_are_named_by_file_and_number(tmp_path: Path) -> None:
    paths = tuple(write_parquet(tmp_path / f"{name}.parquet") for name in "abc")
    source = Source(paths)
    expected = [f"{path}, row {number}" for path in paths for number in (1, 2)]
    assert [row.place for row in map(open_row, raw_rows(source.paths))] == expected
    assert [row.place for row in first_rows(source, 5)] == expected[:5]


def test_an_error_within_a_parquet_file_is_not_wrapped_by_the_library(tmp_path: Path) -> None:
    for content in (b"text", b"ARROW1"):
        (tmp_path / "a.arrow").write_bytes(content)
        assert refusal(tmp_path / "a.arrow").startswith(f"Cannot read {tmp_path}/a.arrow: ")
    damaged = tmp_path / "a.parquet"
    whole = write_parquet(damaged, [{"text": "a" * 100}] * 1000).read_bytes()
    for content in (b"text", whole[:40] + bytes(40) + whole[80:]):
        damaged.write_bytes(content)
        assert refusal(damaged).startswith(f"Cannot read {damaged}: ")
    with pytest.raises(ShardmakeError, match=f"^Cannot read {damaged}: .* Write it again, or name another one"):
        first_rows(Source((damaged,)), 2)


def test_maps_of_parquet_are_objects(tmp_path: Path) -> None:
    """Spark writes objects of unequal keys so."""
    message = pyarrow.map_(pyarrow.string(), pyarrow.string())
    rows = [[[("role", "user"), ("content", "a"), ("name", None)]], None]
    table = pyarrow.table({"messages": pyarrow.array(rows, pyarrow.list_(message))})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    found = [row.example["messages"] for row in map(open_row, raw_rows([tmp_path / "a.parquet"]))]
    assert found == [[{"role": "user", "content": "a", "name": None}], None]


def test_parquet_files_without_rows_are_left_out(tmp_path: Path) -> None:
    """Some programs write a part without rows for each process that had none, with columns of no type."""
    for name, columns in (("a", ["prompt", "completion"]), ("c", [])):
        empty = {column: pyarrow.array([], pyarrow.null()) for column in columns}
        pyarrow.parquet.write_table(pyarrow.table(empty), tmp_path / f"{name}.parquet")
    only_empty = Source((tmp_path / "a.parquet", tmp_path / "c.parquet"))
    for read in (count_rows, first_rows):
        with pytest.raises(ShardmakeError, match="No examples in"):
            read(only_empty)
    row = {"prompt": "a", "completion": "b"}
    write_parquet(tmp_path / "b.parquet", [row])
    assert examples(tmp_path) == [row]
    source = locate(str(tmp_path), Data(train=str(tmp_path)), sources.TRAIN_SPLITS)
    assert [row.place for row in map(open_row, raw_rows(source.paths))] == [f"{tmp_path}/b.parquet, row 1"]


TEXTS = pyarrow.array(["t"]), pyarrow.array(["t"], pyarrow.large_string()), pyarrow.array(["t"]).dictionary_encode()


@pytest.mark.parametrize(("tables", "rows"), [
    ([{"text": ["t"], "tools": pyarrow.array([None])}, {"text": ["t"], "tools": [["clock"]]}],
     [{"text": "t"}, {"text": "t", "tools": ["clock"]}]),
    ([{"chat": [[{"role": "user"}]]}, {"chat": [[{"role": "user", "name": "x"}]]}],
     [{"chat": [{"role": "user"}]}, {"chat": [{"role": "user", "name": "x"}]}]),
    ([{"text": text, "id": pyarrow.array([1], kind)} for text, kind in zip(TEXTS, ("int8", "int64", "int32"),
                                                                           strict=True)],
     [{"text": "t", "id": 1}] * 3),
], ids=["a column without values", "keys of another file", "types with the same values"])  # fmt: skip
def test_types_of_other_files_do_not_matter(tmp_path: Path, tables: list[Any], rows: list[Any]) -> None:
    for number, table in enumerate(tables):
        pyarrow.parquet.write_table(pyarrow.table(table), tmp_path / f"{number}.parquet")
    assert examples(tmp_path) == rows


def test_a_file_that_is_not_there_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wording: Wording) -> None:
    monkeypatch.chdir(tmp_path)
    wording(refusal("data/train.jsonl"))


@pytest.mark.parametrize("names", [
    ["dataset_info.json", ".hidden.jsonl", "README.md", ".cache/a.jsonl"], ["a.jsonl", "b.parquet"],
], ids=["no data", "two kinds"])  # fmt: skip
def test_a_folder_that_cannot_be_read_is_refused(tmp_path: Path, names: list[str], wording: Wording) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    wording(refusal(tmp_path))


@pytest.mark.parametrize(("name", "splits"), [
    ("org/name", sources.TRAIN_SPLITS), ("org/name:train_sft", ("train_sft",)), ("o.g/n-1", sources.TRAIN_SPLITS),
])  # fmt: skip
def test_other_names_are_hub_data_sets(tmp_path: Path, name: str, splits: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    data = Data(train=name, subset="main", revision="v1")
    assert locate_named(name, data, sources.TRAIN_SPLITS) == HubDataset(name.partition(":")[0], "main", "v1", splits)


def test_identity_follows_the_content(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl")
    before = identity((path,))
    assert before["files"][0]["bytes"] == path.stat().st_size
    write_jsonl(path, ROWS[:1])
    assert identity((path,)) != before
    write_jsonl(path)
    assert identity((path,)) == before


@pytest.mark.parametrize(("names", "trained", "evaluated"), [
    (["a", "b"], ["a", "b"], ["a", "b"]), (["train", "test"], ["train"], ["test"]),
    (["train", "validation", "test"], ["train"], ["validation"]),
    (["data/train-0", "data/train-1", "data/dev-0"], ["data/train-0", "data/train-1"], ["data/dev-0"]),
    (["train/x", "test/x"], ["train/x"], ["test/x"]),
    (["train", "extra"], ["train"], "has no split validation or test"), (["test"], ["test"], ["test"]),
    (["a", "my_eval"], "has no split train", ["my_eval"]),
])  # fmt: skip
def test_a_folder_follows_the_rules_of_the_hub(tmp_path: Path, names: list[str], trained: Any, evaluated: Any) -> None:
    """The split of a file is that of its name; a folder with files of one split alone is that split."""
    (tmp_path / "train.log").write_text("not data")
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write_jsonl(tmp_path / f"{name}.jsonl", [{"text": name}])
    for splits, expected in ((sources.TRAIN_SPLITS, trained), (sources.EVAL_SPLITS, evaluated)):
        if isinstance(expected, str):
            with pytest.raises(ShardmakeError, match=expected):
                locate(str(tmp_path), Data(train=str(tmp_path)), splits)
            continue
        source = locate(str(tmp_path), Data(train=str(tmp_path)), splits)
        assert [row.example["text"] for row in first_rows(source, 9)] == expected
        unused = sorted(f"{Path(name).name}.jsonl" for name in set(names) - set(expected))
        assert all(name in str(source).partition("; not used: ")[2] for name in unused)


def test_a_folder_of_files_follows_the_description_of_its_subsets(tmp_path: Path) -> None:
    subsets = "".join(f"- {{config_name: {name}, data_files: {name}_test.jsonl}}\n" for name in "ab")
    (tmp_path / "README.md").write_text(f"---\nconfigs:\n{subsets}---\n")
    for name in "ab":
        write_jsonl(tmp_path / f"{name}_test.jsonl", [{"text": name}])
    source = locate(str(tmp_path), Data(train=str(tmp_path), subset="b"), sources.TRAIN_SPLITS)
    assert [row.example for row in first_rows(source, 9)] == [{"text": "b"}]
    with pytest.raises(ShardmakeError, match=r"Config name is missing.*a.*b.*set data\.subset"):
        locate(str(tmp_path), Data(train=str(tmp_path)), sources.TRAIN_SPLITS)


ARGUMENTS = {"x": 1, "note": None}
CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": ARGUMENTS}}]}
LIBRARIES = ("datasets", "pyarrow")
SAME_ROWS: list[tuple[str, list[dict[str, Any]], tuple[str, ...]]] = [
    ("nulls in arguments", [{"messages": [{"role": "user", "content": str(i)}, CALL]} for i in range(3)], LIBRARIES),
    ("unequal keys", [{"id": 8}, *ROWS, {"messages": [CALL, {"role": "tool", "content": "1"}]}], LIBRARIES),
    ("a null column", [{"prompt": "a", "completion": "b", "tools": None}], LIBRARIES),
    ("dates", [{"prompt": "?", "completion": f"2024-01-0{day}"} for day in (1, 2)], ("pyarrow",)),
    ("several types", [{"prompt": "a", "completion": 7}, {"prompt": "b", "completion": "seven"}], ("datasets",)),
]
"""Rows, and who can write them as Parquet: `datasets` makes dates of texts, pyarrow has one type for a column."""


@pytest.mark.parametrize(("name", "rows", "writers"), SAME_ROWS)
def test_the_same_rows_come_from_parquet_and_arrow(
    tmp_path: Path, name: str, rows: list[Any], writers: tuple[str, ...]
) -> None:
    lines = write_jsonl(tmp_path / "a.jsonl", rows)
    expected = examples(lines)
    for writer in writers:
        path, saved = tmp_path / f"{writer}.parquet", tmp_path / f"{writer}.arrow"
        if writer == "datasets":
            made = datasets.Dataset.from_json(str(lines), cache_dir=str(tmp_path / "cache"))
            made.to_parquet(path)
            datasets.DatasetDict({"train": made, "test": made.select([0])}).save_to_disk(saved)
        else:
            pyarrow.feather.write_feather(pyarrow.parquet.read_table(write_parquet(path, rows)), saved)
        assert examples(path) == examples(saved) == expected, writer


def test_results_that_datasets_caches_are_not_read(tmp_path: Path) -> None:
    """`datasets` writes them beside the data of a folder that it loads."""
    rows = [{"text": text} for text in "abc"]
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path)
    loaded = datasets.load_from_disk(str(tmp_path))
    loaded.map(lambda row: {"text": row["text"] * 2})
    loaded.shuffle(seed=0)
    assert len(list(tmp_path.glob("cache-*.arrow"))) == 2
    assert examples(tmp_path) == rows


def test_a_file_whose_name_begins_as_that_of_a_description_is_read(tmp_path: Path) -> None:
    for name in ("dataset_info.json", "dataset_information.json"):
        (tmp_path / name).write_text(json.dumps([{"text": name}]))
    assert examples(tmp_path) == [{"text": "dataset_information.json"}]
