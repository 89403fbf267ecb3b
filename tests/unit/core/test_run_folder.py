"""Nothing is opened, replaced or removed through a link inside a run's folder, or above it."""

import os
import re
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

import shardmake
from shardmake.core import run_folder
from shardmake.core.atomic import write_text
from shardmake.core.errors import LinkError
from shardmake.run.attempt import AttemptDir
from shardmake.run.paths import BelowRoot, RunDir
from tests.users import VICTIM, as_user

SOURCES = Path(shardmake.__file__).parent
PATHS = [
    *(value.path for value in vars(RunDir).values() if isinstance(value, BelowRoot)),
    *(f"train/attempts/001/{value.path}" for value in vars(AttemptDir).values() if isinstance(value, BelowRoot)),
    "train/attempts/001", "train/checkpoints/.saving/001", "train/checkpoints/checkpoint-5", "data/train",
    "plan/fallbacks/1", ".",
]  # fmt: skip
OPERATIONS: dict[str, Callable[[Path], object]] = {
    "write": lambda path: write_text(path / "notes", "overwritten"),
    "open": lambda path: run_folder.open_file(path / "notes", "w").close(),
    "read": lambda path: run_folder.read_bytes(path / "notes"),
    "append": lambda path: run_folder.open_file(path / "notes", "a").close(),
    "make a folder": lambda path: run_folder.make_folder(path / "new"),
    "make the folder": lambda path: run_folder.make_folder(path),
    "rename from": lambda path: run_folder.rename(path / "notes", path.parent / "taken"),
    "rename to": lambda path: run_folder.rename(own_file(path), path / "notes"),
    "exchange": lambda path: run_folder.exchange(path / "notes", own_file(path)),
    "remove in": lambda path: run_folder.remove(path / "notes"),
    "unlink in": lambda path: run_folder.unlink(path / "notes"),
    "remove strictly": lambda path: run_folder.remove(path, strict=True),
    "remove empty": lambda path: run_folder.remove_empty(path / "empty"),
    "link": lambda path: run_folder.make_link(path / "link", "notes"),
}

WRITES = re.compile(
    r"shutil\.(rmtree|move)|(?<!run_folder)\.(unlink|rename|mkdir|write_text|write_bytes|touch|symlink_to|rmdir)\(|"
    r"\.open\(\"[wax]|os\.(remove|replace|truncate)\("
)
ELSEWHERE = {
    "consolidate/peft_check.py", "data/sources.py", "fetch/copied_base.py", "fetch/model.py", "fetch/store.py",
    "launch/compilers.py", "launch/driver_script.py", "launch/submission.py", "push/folder.py",
    "render/launcher_settings.py", "report/comparison.py", "run/driver_job.py", "run/turns.py", "train/async_saver.py",
}  # fmt: skip
"""Files of stages that write to caches, temporary folders, node-local folders, or where a user says, by path."""
OTHERS = ("commands/", "config/", "core/", "demo/", "doctor/", "memory/")
"""Packages without a stage."""


def own_file(path: Path) -> Path:
    """Return a file of a run beside the one of ``path``."""
    file = next(above for above in path.parents if above.name == "runs") / "other/file"
    file.parent.mkdir(exist_ok=True)
    file.write_text("own")
    return file


def test_stages_write_to_a_run_through_this_layer_only() -> None:
    files = {str(path.relative_to(SOURCES)): path.read_text() for path in SOURCES.glob("*/**/*.py")}
    found = {name for name, text in files.items() if WRITES.search(text) and not name.startswith(OTHERS)}
    assert found == ELSEWHERE


@pytest.mark.parametrize("name", PATHS)
def test_no_operation_follows_a_link_in_the_place_of_a_path(name: str, tmp_path: Path) -> None:
    theirs, path = tmp_path / "theirs", RunDir(tmp_path / "runs/chat").root / name
    (theirs / "empty").mkdir(parents=True)
    (theirs / "notes").write_text("years of work")
    path.parent.mkdir(parents=True)
    path.symlink_to(theirs)
    for work in OPERATIONS.values():
        with pytest.raises(LinkError, match="is a link to"):
            work(path)
        assert sorted(it.name for it in theirs.iterdir()) == ["empty", "notes"]
        assert (theirs / "notes").read_text() == "years of work" and path.is_symlink()
    run_folder.rename(own_file(path), path) if name != "." else path.unlink()
    assert not path.is_symlink() and (theirs / "notes").read_text() == "years of work"
    path.unlink(missing_ok=True)
    path.symlink_to(theirs)
    run_folder.remove(path)
    assert not path.is_symlink() and (theirs / "notes").read_text() == "years of work"


def test_a_link_to_a_file_and_a_second_name_of_one_are_not_written_through(tmp_path: Path) -> None:
    """A member of a lab may give a file of another one a second name, where the kernel lets them."""
    theirs, log = tmp_path / "theirs", RunDir(tmp_path / "runs/chat").driver_lock
    theirs.write_text("years of work")
    log.parent.mkdir(parents=True)
    for place, problem in ((log.symlink_to, "is a link to"), (log.hardlink_to, "has 2 names")):
        place(theirs)
        for mode in ("a", "w", "r+"):
            with pytest.raises(LinkError, match=problem):
                run_folder.open_file(log, mode)
        write_text(log, "replaced")
        assert theirs.read_text() == "years of work" and log.read_text() == "replaced"
        log.unlink()


def test_the_folder_of_all_runs_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "storage").mkdir()
    (tmp_path / "runs").symlink_to("storage")
    rundir = RunDir(tmp_path / "runs/chat")
    write_text(rundir.metrics, "line")
    assert (tmp_path / "storage/chat/train/metrics.jsonl").read_text() == "line"
    (theirs := tmp_path / "theirs").mkdir()
    (tmp_path / "storage/chat/model").symlink_to(theirs)
    assert run_folder.real_path(rundir.model) == tmp_path / "storage/chat/model"
    with pytest.raises(LinkError):
        write_text(run_folder.real_path(rundir.model) / "config.json", "{}")


@pytest.mark.root
def test_a_private_folder_is_of_this_user_alone(tmp_path: Path) -> None:
    folder = tmp_path / "a/b"
    for _ in range(2):
        run_folder.make_folder(folder, private=True)
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.chmod(0o770)
    with pytest.raises(LinkError, match="is not a folder of this user alone"):
        run_folder.make_folder(folder, private=True)
    folder.chmod(0o700)
    os.chown(folder, 12345, -1)  # another member's command left it
    run_folder.make_folder(folder, private=True)
    (aside,) = tmp_path.glob("a/.b.of-12345-*")
    assert aside.stat().st_uid == 12345 and folder.stat().st_uid == os.geteuid()


@pytest.mark.root
def test_a_folder_that_others_may_enter_but_not_list_is_enough() -> None:
    with tempfile.TemporaryDirectory() as above:
        Path(above).chmod(0o711)
        (home := Path(above, "me")).mkdir()
        os.chown(home, VICTIM, -1)
        as_user(VICTIM, lambda: write_text(home / "page.html", "page"))
        assert (home / "page.html").read_text() == "page"


def test_outside_a_run_a_folder_may_be_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "scratch").mkdir()
    (tmp_path / "cache").symlink_to("scratch")
    write_text(tmp_path / "cache/file", "kept")
    assert (tmp_path / "scratch/file").read_text() == "kept"
    monkeypatch.chdir(tmp_path / "scratch")
    rundir = RunDir(Path("../runs/chat"))
    assert run_folder.real_path(rundir.model) == tmp_path / "runs/chat/model"


def test_errors_name_the_whole_path_and_a_missing_one_is_removed_already(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as found:
        run_folder.open_file(tmp_path / "none/file", "r")
    assert found.value.filename == str(tmp_path / "none/file") or found.value.filename == str(tmp_path / "none")
    run_folder.remove(tmp_path / "none/file")
