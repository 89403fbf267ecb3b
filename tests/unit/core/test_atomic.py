"""Atomic writes: files are complete, durable, and unchanged if the content is equal."""

import errno
import json
import multiprocessing
import os
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmake.core.atomic import digest, read_json, write_json, write_text
from shardmake.core.errors import ShardmakeError

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def test_an_unchanged_file_keeps_its_time(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "file"
    assert write_text(path, "ü") and [*path.parent.iterdir()] == [path]
    os.utime(path, (1, 1))
    assert not write_text(path, "ü") and path.stat().st_mtime == 1 and write_text(path, "u")
    assert path.read_text() == "u" and path.stat().st_mtime != 1


def test_a_failed_write_leaves_the_old_file_and_names_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_text(path := tmp_path / "file", "old")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
        with pytest.raises(OSError, match="No space left on device") as found:
            write_text(path, "new")
    assert found.value.filename == str(path) and list(tmp_path.iterdir()) == [path] and path.read_text() == "old"
    assert write_text(path, "new") and path.read_text() == "new"


def _write_often(path: Path, letter: str) -> None:
    for _ in range(200):
        write_text(path, letter * 50_000)


def test_concurrent_writers_never_mix_their_content(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_text(path, "a" * 50_000)
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write_often, args=(path, letter)) for letter in "ab"]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        text = path.read_text()
        assert text in ("a" * 50_000, "b" * 50_000)
    assert [writer.exitcode for writer in writers] == [0, 0] and list(tmp_path.iterdir()) == [path]


@given(value=json_values)
def test_json_is_equal_after_writing_and_reading(value: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "round-trip.json"
    write_json(path, value)
    assert read_json(path, "nobody") == value
    write_json(path, {"b": 1, "a": [2]})
    assert path.read_text() == '{\n  "b": 1,\n  "a": [\n    2\n  ]\n}\n', "readable, in the given order"


def test_a_missing_file_and_invalid_json_name_the_command_that_writes_it(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    with pytest.raises(ShardmakeError) as missing:
        read_json(path, "shardmake plan chat")
    assert str(missing.value) == f"{path} does not exist yet. Write it with: shardmake plan chat"
    path.write_text('{"a": ')
    with pytest.raises(ShardmakeError) as invalid:
        read_json(path, "shardmake plan chat")
    reason = "it is not valid JSON (Expecting value: line 1 column 7 (char 6))"
    assert str(invalid.value) == f"Cannot read {path}: {reason}. Write it again with: shardmake plan chat"


@given(value=st.dictionaries(st.text(), json_values, min_size=2, max_size=5))
def test_the_digest_does_not_depend_on_the_order_of_keys(value: dict[str, Any]) -> None:
    assert digest(value) == digest(dict(reversed(value.items()))) == digest(json.loads(json.dumps(value)))


@given(a=json_values, b=json_values)
def test_different_values_have_different_digests(a: Any, b: Any) -> None:
    assert (digest(a) == digest(b)) == (json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True))
