"""Destinations are checked at plan, before anything is queued."""

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardmake.config.models import Push
from shardmake.core.errors import ShardmakeError
from shardmake.push.check import check_destinations, check_push

NOBODY = 65534


def refusal(to: str | list[str], **more: Any) -> str:
    with pytest.raises(ShardmakeError) as caught:
        check_destinations(Push(to=to, **more))
    return str(caught.value)


def test_a_folder_that_can_be_made_is_accepted_and_left_alone(tmp_path: Path) -> None:
    check_destinations(None)
    check_destinations(Push(to=[f"file:{tmp_path}/published/by/me", "memory://bucket/model"]))
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    assert "no folder can be created in /proc" in refusal("file:/proc/x/y")
    file = tmp_path / "file"
    file.write_text("")
    assert f"no folder can be created in {file}: Not a directory" in refusal(f"file:{file}/below")
    assert f"{file} is a file" in refusal(f"file:{file}")


@pytest.fixture
def read_only() -> Iterator[Path]:
    """A folder in which this process may not write, also if the tests run as root."""
    folder, user = Path(tempfile.mkdtemp(prefix="shardmake-test-")), os.geteuid()
    folder.chmod(0o555)
    if user == 0:
        os.seteuid(NOBODY)
    yield folder
    os.seteuid(user)
    folder.rmdir()


def test_a_folder_without_permission_is_refused(read_only: Path) -> None:
    assert f"no folder can be created in {read_only}: Permission denied" in refusal(f"file:{read_only}/x")


def test_a_folder_with_the_files_of_others_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert "contains files that no push of Shardmake wrote (notes.txt)" in refusal(f"file:{tmp_path}")


def test_an_unknown_protocol_and_a_missing_package_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "fsspec does not know the protocol s4://. Use" in refusal("s4://x/y")
    assert "protocol sftpp://. Did you mean 'sftp'? Use" in refusal("sftpp://x/y")
    assert "hunter2" not in refusal("s4://me:hunter2@host/y")
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    assert "Install the package that fsspec needs for gs://" in refusal("gs://x/y")


def test_a_login_in_a_url_is_refused_where_the_store_reads_none() -> None:
    found = refusal("s3://ada:hunt/er2@bucket/y")
    assert found.startswith("Push to s3://bucket/y is not possible: s3:// takes no user or password in a URL. Remove")
    check_destinations(Push(to=["ftp://ada:hunter2@host/y", "s3://bucket/a@b"]))


def test_a_hub_destination_needs_a_token(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_of_a_test")
    check_destinations(Push(to="hub:lab/model"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "hub:lab/model is not possible while HF_HUB_OFFLINE" in refusal("hub:lab/model")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
    assert "needs a token with write permission" in refusal("hub:lab/model")


def test_a_secret_in_the_base_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    push = Push(to=f"file:{tmp_path}/out")
    check_push(push, tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"token": "hf_' + "a1" * 16 + '"}')
    check_push(None, tmp_path)
    with pytest.raises(ShardmakeError, match=r"tokenizer_config\.json contains what looks like a token"):
        check_push(push, tmp_path)
