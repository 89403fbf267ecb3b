import getpass
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardmake.core.errors import ShardmakeError
from shardmake.core.permissions import refuse_job_of_others, share, share_tree


@pytest.fixture(autouse=True)
def strict() -> Iterator[None]:
    """A umask that shares nothing, put back afterwards."""
    before = os.umask(0o077)
    yield
    os.umask(before)


def mode(path: Path) -> str:
    return stat.filemode(path.stat().st_mode)


def test_folders_are_the_groups_and_so_is_what_follows(tmp_path: Path) -> None:
    share(tmp_path / "runs" / "chat")
    assert mode(tmp_path / "runs" / "chat") == "drwxrwsr-x"
    (tmp_path / "runs" / "chat" / "plan.json").touch()
    assert mode(tmp_path / "runs" / "chat" / "plan.json") == "-rw-rw-r--"


def test_what_was_written_for_its_owner_only_is_opened(tmp_path: Path) -> None:
    (tmp_path / "cache/trees").mkdir(parents=True)
    (tmp_path / "cache/trees/a.json").touch(0o600)
    (tmp_path / "cache/run.sh").touch(0o700)
    (tmp_path / "outside").touch(0o600)
    (tmp_path / "cache/link").symlink_to(tmp_path / "outside")
    share_tree(tmp_path / "cache")
    assert mode(tmp_path / "cache/trees") == "drwxrws---"
    assert mode(tmp_path / "cache/trees/a.json") == "-rw-rw----"
    assert mode(tmp_path / "cache/run.sh") == "-rwxrw----"
    assert mode(tmp_path / "outside") == "-rw-------", "a link does not reach outside"


def test_my_own_job_may_be_adopted() -> None:
    refuse_job_of_others({}, "chat", "runs/chat/train/STOP")
    refuse_job_of_others({"7": getpass.getuser()}, "chat", "runs/chat/train/STOP")


def test_somebody_elses_job_may_not() -> None:
    with pytest.raises(ShardmakeError, match=r"Job 7 of ada is training chat.*touch runs/chat/train/STOP"):
        refuse_job_of_others({"7": "ada"}, "chat", "runs/chat/train/STOP")
