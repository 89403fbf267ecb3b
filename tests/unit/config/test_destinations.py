"""No two runs push to one place, however it is written."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from shardmake.config.load import parse_config
from shardmake.config.models import Config
from shardmake.core.errors import ConfigError
from tests.unit.config.samples import RUN


def runs(**pushes: Any) -> Config:
    values = {name: {**RUN, "push": push if isinstance(push, dict) else {"to": push}} for name, push in pushes.items()}
    return parse_config({"cluster": "c", "runs": values}, "c")


@pytest.mark.parametrize(("first", "second", "same"), [
    ("file:published/x", "file:published/x", True), ("file:published/x", "file:published/x/", True),
    ("file:published/x", "file:./published//y/../x", True), ("file:published/x", ["hub:lab/x", "file:link/x"], True),
    ("file:published", "file:published/x", True), ("hub:lab/x", "hub:Lab/X", True),
    ("hub:lab/x", {"to": "hub:lab/x", "revision": "main"}, True), ("s3://bucket/x", "s3://bucket/x/", True),
    ("s3://bucket/x", "s3://bucket//./x", True), ("file:published/x", "file:published/xy", False),
    ("file:published/{run}", "file:published/{run}", False), ("hub:lab/x", "file:lab/x", False),
    ("hub:lab/x", {"to": "hub:lab/x", "revision": "second"}, False), ("s3://bucket/x", "gs://bucket/x", False),
    ({"to": "hub:lab/x", "pull_request": True}, {"to": "hub:lab/x", "pull_request": True}, False),
])  # fmt: skip
def test_same_destination(first: Any, second: Any, same: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "published").mkdir()
    (tmp_path / "link").symlink_to("published")
    message = r"runs: run 'a' pushes to '.*', 'b' to '.*'\. One would replace the other\. Write "
    with pytest.raises(ConfigError, match=message) if same else nullcontext():
        assert list(runs(a=first, b=second).runs) == ["a", "b"]
