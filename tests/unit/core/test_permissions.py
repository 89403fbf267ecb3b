import getpass
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardmake.core.errors import SlurmError
from shardmake.core.permissions import private_folder, refuse_job_of_others, share, share_tree


@pytest.fixture(autouse=True)
def strict() -> Iterator[None]:
    """Set a umask that shares nothing, and restore it afterwards."""
    before = os.umask(0o077)
    yield
    os.umask(before)


def mode(path: Path) -> str:
    return stat.filemode(path.stat().st_mode)


@pytest.mark.parametrize(("umask", "folder", "file"), [
    (0o077, "drwxrws---", "-rw-rw----"), (0o022, "drwxrwsr-x", "-rw-rw-r--"), (0o027, "drwxrws---", "-rw-rw----"),
    (0o002, "drwxrwsr-x", "-rw-rw-r--"),
])  # fmt: skip
def test_shared_folders_and_new_files_belong_to_the_group(tmp_path: Path, umask: int, folder: str, file: str) -> None:
    """The rights of others stay those of the umask."""
    os.umask(umask)
    share(tmp_path / "runs" / "chat")
    (tmp_path / "runs" / "chat" / "plan.json").touch()
    assert (mode(tmp_path / "runs" / "chat"), mode(tmp_path / "runs" / "chat" / "plan.json")) == (folder, file)


def test_a_private_folder_is_made_and_found_again(tmp_path: Path) -> None:
    folder = tmp_path / "shardmake-1"
    assert private_folder(folder) == folder and mode(folder) == "drwx------"
    private_folder.cache_clear()
    folder.chmod(0o775)
    assert private_folder(folder) == folder and mode(folder) == "drwx------"
    assert private_folder(tmp_path / "absent/shardmake-1") == tmp_path / "absent/shardmake-1"


@pytest.mark.parametrize("trap", ["link", "open", "file", pytest.param("foreign", marks=pytest.mark.root)])
def test_a_folder_that_others_can_fill_is_not_used(tmp_path: Path, trap: str, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "shardmake-1"
    if trap == "link":
        (tmp_path / "elsewhere").mkdir()
        folder.symlink_to(tmp_path / "elsewhere")
    elif trap == "file":
        folder.touch()
    else:
        folder.mkdir()
        folder.chmod(0o777 if trap == "open" else 0o700)
        if trap == "foreign":
            os.chown(folder, 12345, 12345)
    used = private_folder(folder)
    assert used.parent.parent == tmp_path and mode(used) == mode(used.parent) == "drwx------"
    assert not any(used.iterdir()) and "is not a folder of this user alone" in caplog.text


def test_private_files_become_accessible_to_the_group(tmp_path: Path) -> None:
    (tmp_path / "cache/trees").mkdir(parents=True)
    (tmp_path / "cache/trees/a.json").touch(0o600)
    (tmp_path / "cache/run.sh").touch(0o700)
    (tmp_path / "outside").touch(0o600)
    (tmp_path / "cache/link").symlink_to(tmp_path / "outside")
    share_tree(tmp_path / "cache")
    assert mode(tmp_path / "cache/trees") == "drwxrws---" and mode(tmp_path / "cache/trees/a.json") == "-rw-rw----"
    assert mode(tmp_path / "cache/run.sh") == "-rwxrw----"
    assert mode(tmp_path / "outside") == "-rw-------", "a link does not change files outside"


def test_a_job_of_another_user_is_rejected_and_one_of_the_same_user_accepted() -> None:
    refuse_job_of_others({}, "chat", "runs/chat/train/STOP")
    refuse_job_of_others({"7": getpass.getuser()}, "chat", "runs/chat/train/STOP")
    with pytest.raises(SlurmError, match=r"Run chat is being trained by job 7 of ada.*touch runs/chat/train/STOP"):
        refuse_job_of_others({"7": "ada"}, "chat", "runs/chat/train/STOP")
