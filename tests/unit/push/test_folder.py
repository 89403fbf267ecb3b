import errno
import os
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from shardmake.core.errors import ShardmakeError
from shardmake.core.manifest import read_folder
from shardmake.push.stage import push
from shardmake.report.stage import write_report
from shardmake.run.paths import RunDir
from shardmake.run.receipts import PushedTo, PushReceipt
from tests.finished_run import MODEL, PLOTS, make_run, write_model


@pytest.fixture(autouse=True)
def in_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


RUN = make_run(push={"to": "file:published/chat"})


def test_the_folder_holds_model_card_and_checksums_and_nothing_else(tmp_path: Path, rundir: RunDir) -> None:
    write_report(RUN, rundir)
    assert (rundir.model / "README.md").read_text().startswith("---\n")
    receipt = push(RUN, rundir)
    published = tmp_path / "published" / "chat"
    assert "SHA256SUMS" in (published / "README.md").read_text()  # a card of its own
    assert read_folder(published).keys() == {*MODEL, "README.md", *PLOTS, "SHA256SUMS"}
    assert all((published / name).read_bytes() == content for name, content in MODEL.items())
    assert [path.name for path in published.parent.iterdir()] == ["chat"]
    assert receipt == PushReceipt.read(rundir.push_receipt)
    assert receipt.destinations == [PushedTo(to="file:published/chat")] and receipt.files == read_folder(published)
    subprocess.run(["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"], cwd=published, check=True)


def test_the_log_names_the_destination_and_the_result(rundir: RunDir, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "shardmake")
    push(RUN, rundir)
    assert re.fullmatch(r"Pushing 11 files, 0\.\d MB to file:published/chat\.", caplog.messages[0])
    assert caplog.messages[1:] == ["file:published/chat has the model; every file was read back and compared."]


def test_the_same_content_again_touches_nothing(rundir: RunDir) -> None:
    push(RUN, rundir)
    before = {path: path.stat() for path in [*Path("published/chat").rglob("*"), rundir.push_receipt]}
    push(RUN, rundir)
    assert {path: path.stat().st_ino for path in before} == {path: stat.st_ino for path, stat in before.items()}
    assert {path: path.stat().st_mtime_ns for path in before} == {path: s.st_mtime_ns for path, s in before.items()}


@pytest.mark.parametrize("supported", [True, False])
def test_a_push_over_an_old_model_leaves_it_in_place_until_the_new_one_is_there(
    rundir: RunDir, monkeypatch: pytest.MonkeyPatch, supported: bool
) -> None:
    renamed: list[str] = []
    rename = os.rename
    monkeypatch.setattr(os, "rename", lambda name, to, **at: [renamed.append(name), rename(name, to, **at)][1])
    if not supported:
        monkeypatch.setattr("shardmake.core.run_folder.exchange", lambda one, other: False)
    push(RUN, rundir)
    write_model(rundir, {"config.json": b"{}", "model.safetensors": b"new"})
    renamed.clear()
    push(RUN, rundir)
    new = {"config.json", "model.safetensors", "README.md", *PLOTS, "SHA256SUMS"}
    assert read_folder(Path("published/chat")).keys() == new, "nothing of the old model"
    assert Path("published/chat/model.safetensors").read_bytes() == b"new"
    assert [path.name for path in Path("published").iterdir()] == ["chat"]
    assert ("chat" in renamed) is not supported, "without the exchange there is a moment without a model"


@pytest.mark.parametrize("exists", [True, False])
def test_a_link_stays_and_the_folder_it_leads_to_gets_the_model(tmp_path: Path, rundir: RunDir, exists: bool) -> None:
    storage = tmp_path / "large-disk" / "chat"
    storage.mkdir(parents=True)
    if not exists:
        storage.rmdir()
    Path("published").mkdir()
    Path("published/chat").symlink_to(storage)
    push(RUN, rundir)
    write_model(rundir, {"config.json": b"{}", "model.safetensors": b"new"})
    push(RUN, rundir)
    assert Path("published/chat").is_symlink() and (storage / "model.safetensors").read_bytes() == b"new"
    assert [path.name for path in storage.parent.iterdir()] == ["chat"]


@pytest.mark.parametrize("foreign", ["notes.txt", "sub/results.csv", "config.json"])
def test_a_folder_with_other_files_is_refused_and_stays(tmp_path: Path, rundir: RunDir, foreign: str) -> None:
    file = tmp_path / "published" / "chat" / foreign
    file.parent.mkdir(parents=True)
    file.write_text("mine")
    with pytest.raises(
        ShardmakeError, match=rf"published/chat contains files .*{foreign}.*Choose another folder in push\.to"
    ):
        push(RUN, rundir)
    assert file.read_text() == "mine"


def test_a_file_added_to_a_published_model_is_not_lost(rundir: RunDir) -> None:
    push(RUN, rundir)
    Path("published/chat/notes.txt").write_text("mine")
    write_model(rundir, {"config.json": b"{}"})
    with pytest.raises(ShardmakeError, match=r"notes\.txt"):
        push(RUN, rundir)


def test_an_unwritable_place_says_so(tmp_path: Path, rundir: RunDir) -> None:
    (tmp_path / "published").write_text("a file where a folder should be")
    with pytest.raises(
        ShardmakeError, match=r"published/chat cannot be written: File exists \(published\)\. Make that folder"
    ):
        push(RUN, rundir)
    assert not rundir.push_receipt.exists()


@pytest.mark.root
def test_a_place_without_room_says_what_it_lacks(tmp_path: Path, rundir: RunDir) -> None:
    point = tmp_path / "published"
    point.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", point], check=True)
    try:
        with pytest.raises(
            ShardmakeError,
            match=r"the model needs \d+ KiB, and published has 300 KiB left \(free on the file system\)\. Free",
        ):
            push(RUN, rundir)
        assert not list(point.iterdir())
    finally:
        subprocess.run(["umount", "--lazy", point], check=True)


def test_a_quota_that_runs_out_in_the_middle_leaves_nothing(rundir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = shutil.copyfile

    def run_out(source: Path, target: Path) -> Path:
        if source.suffix == ".safetensors":
            raise OSError(errno.EDQUOT, "Disk quota exceeded", str(target))
        return copy(source, target)

    monkeypatch.setattr("shutil.copyfile", run_out)
    with pytest.raises(ShardmakeError, match=r"Disk quota exceeded .*\. Free some space there, or choose another"):
        push(RUN, rundir)
    assert not list(Path("published").iterdir())


def leftover(what: str, machine: str, process: int = 1, name: str = "chat") -> Path:
    """Return the name under which a push on ``machine`` keeps a copy."""
    return Path("published", f".{what}.{machine.replace('.', '-')}.{process}.{name}")


def make_old(folder: Path, hours: float) -> None:
    """Create a copy in ``folder``, whose newest file was written ``hours`` ago."""
    (folder / "sub").mkdir(parents=True)
    (folder / "sub/config.json").write_text("half")
    for path in (folder, folder / "sub"):
        os.utime(path, (0, 0))
    then = time.time() - 3600 * hours
    os.utime(folder / "sub/config.json", (then, then))


def test_what_a_push_killed_on_another_machine_left_is_settled(rundir: RunDir) -> None:
    push(RUN, rundir)
    Path("published/chat").rename(leftover("retired", "login2.cluster"))
    inode = leftover("retired", "login2.cluster").stat().st_ino
    make_old(leftover("pushing", "login2.cluster"), hours=25)
    push(RUN, rundir)
    assert [path.name for path in Path("published").iterdir()] == ["chat"]
    assert Path("published/chat").stat().st_ino == inode, "the old folder came back and needed no new copy"
    make_old(leftover("retired", "login2.cluster", 2), hours=25)
    push(RUN, rundir)
    assert [path.name for path in Path("published").iterdir()] == ["chat"], "after a kill behind the second rename"


def test_a_copy_that_another_push_may_still_write_stays(rundir: RunDir) -> None:
    push(RUN, rundir)
    here, process = os.uname().nodename, os.getpid()
    of_others = [leftover("retired", "login2", name="x.chat"), leftover("pushing", "login2", name="chat.x")]
    kept = [leftover("pushing", "login2"), leftover("pushing", here, process), leftover("retired", "login2")]
    for paths, hours in ((kept, 23), (of_others, 25)):
        for path in paths:
            make_old(path, hours)
    write_model(rundir, {"config.json": b"{}", "model.safetensors": b"new"})
    push(RUN, rundir)
    found = {path.name for path in Path("published").iterdir()}
    kept.remove(leftover("pushing", here, process))  # the name that this process uses as well
    assert found == {"chat", *(path.name for path in [*kept, *of_others])}


def test_two_pushes_at_once_end_with_one_model_and_the_cause(rundir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other push creates the folder between the copy and the rename of this one."""
    rename = os.rename

    def other_is_faster(name: str, to: str, **folders: int) -> None:
        if to == "chat":
            shutil.copytree(f"published/{name}", "published/chat")
        rename(name, to, **folders)

    monkeypatch.setattr(os, "rename", other_is_faster)
    with pytest.raises(ShardmakeError, match=r"Another push wrote there at the same time: wait .*, and push again"):
        push(RUN, rundir)
    monkeypatch.setattr(os, "rename", rename)
    push(RUN, rundir)
    assert [path.name for path in Path("published").iterdir()] == ["chat"]


def test_an_unverified_model_is_not_pushed(rundir: RunDir) -> None:
    rundir.model_receipt.write_text('{"format": 1, "files": {}}')
    with pytest.raises(ShardmakeError, match=r"Cannot read .*: checkpoint: Field required.*shardmake consolidate chat"):
        push(RUN, rundir)
    rundir.model_receipt.unlink()
    with pytest.raises(ShardmakeError, match="shardmake consolidate chat"):
        push(RUN, rundir)
    assert not Path("published").exists()


@pytest.mark.parametrize(("change", "message"), [
    (lambda model: (model / "config.json").unlink(), "config.json is missing"),
    (lambda model: (model / "config.json").write_text("x"), "config.json has 1 bytes instead of 24"),
    (lambda model: (model / "tokenizer.json").write_text("[]\n"), "tokenizer.json has other content"),
    (lambda model: (model / "extra.bin").write_text("x"), "extra.bin is not in the receipt"),
])  # fmt: skip
def test_a_model_that_is_not_the_verified_one_is_not_pushed(rundir: RunDir, change: object, message: str) -> None:
    assert callable(change)
    change(rundir.model)
    with pytest.raises(ShardmakeError, match=message):
        push(RUN, rundir)


def test_a_run_without_a_destination_says_what_to_add(rundir: RunDir) -> None:
    with pytest.raises(ShardmakeError, match=r"has no push\.to"):
        push(make_run(), rundir)
