"""No two runs push to one place, however it is written."""

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


@pytest.mark.parametrize(("first", "second"), [
    ("file:published/x", "file:published/x"), ("file:published/x", "file:published/x/"),
    ("file:published/x", "file:./published//y/../x"), ("file:published/x", ["hub:lab/x", "file:link/x"]),
    ("file:published", "file:published/x"), ("hub:lab/x", "hub:Lab/X"),
    ("hub:lab/x", {"to": "hub:lab/x", "revision": "main"}), ("s3://bucket/x", "s3://bucket/x/"),
    ("s3://bucket/x", "s3://bucket//./x"),
])  # fmt: skip
def test_one_destination_of_two_runs_is_rejected(
    first: Any, second: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "published").mkdir()
    (tmp_path / "link").symlink_to("published")
    with pytest.raises(
        ConfigError, match=r"runs: run 'a' pushes to '.*', 'b' to '.*'\. One would replace the other\. Write "
    ):
        runs(a=first, b=second)


@pytest.mark.parametrize(("first", "second"), [
    ("file:published/x", "file:published/xy"), ("file:published/{run}", "file:published/{run}"),
    ("hub:lab/x", "file:lab/x"), ("hub:lab/x", {"to": "hub:lab/x", "revision": "second"}),
    ({"to": "hub:lab/x", "pull_request": True}, {"to": "hub:lab/x", "pull_request": True}),
    ("s3://bucket/x", "gs://bucket/x"),
])  # fmt: skip
def test_separate_destinations_are_accepted(first: Any, second: Any) -> None:
    assert list(runs(a=first, b=second).runs) == ["a", "b"]
