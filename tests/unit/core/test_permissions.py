import getpass
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardmake.core.errors import SlurmError
from shardmake.core.permissions import refuse_job_of_others, share, share_tree


@pytest.fixture(autouse=True)
def strict() -> Iterator[None]:
    """Set a umask that shares nothing, and restore it afterwards."""
    before = os.umask(0o077)
    yield
    os.umask(before)


def mode(path: Path) -> str:
    return stat.filemode(path.stat().st_mode)


def test_shared_folders_and_new_files_belong_to_the_group(tmp_path: Path) -> None:
    share(tmp_path / "runs" / "chat")
    assert mode(tmp_path / "runs" / "chat") == "drwxrwsr-x"
    (tmp_path / "runs" / "chat" / "plan.json").touch()
    assert mode(tmp_path / "runs" / "chat" / "plan.json") == "-rw-rw-r--"


def test_private_files_become_accessible_to_the_group(tmp_path: Path) -> None:
    (tmp_path / "cache/trees").mkdir(parents=True)
    (tmp_path / "cache/trees/a.json").touch(0o600)
    (tmp_path / "cache/run.sh").touch(0o700)
    (tmp_path / "outside").touch(0o600)
    (tmp_path / "cache/link").symlink_to(tmp_path / "outside")
    share_tree(tmp_path / "cache")
    assert mode(tmp_path / "cache/trees") == "drwxrws---"
    assert mode(tmp_path / "cache/trees/a.json") == "-rw-rw----"
    assert mode(tmp_path / "cache/run.sh") == "-rwxrw----"
    assert mode(tmp_path / "outside") == "-rw-------", "a link does not change files outside"


def test_a_job_of_the_same_user_is_accepted() -> None:
    refuse_job_of_others({}, "chat", "runs/chat/train/STOP")
    refuse_job_of_others({"7": getpass.getuser()}, "chat", "runs/chat/train/STOP")


def test_a_job_of_another_user_is_rejected() -> None:
    with pytest.raises(SlurmError, match=r"Run chat is being trained by job 7 of ada.*touch runs/chat/train/STOP"):
        refuse_job_of_others({"7": "ada"}, "chat", "runs/chat/train/STOP")
