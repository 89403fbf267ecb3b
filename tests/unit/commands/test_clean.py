import shutil
from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest

from shardmake.checkpoint import store
from shardmake.checkpoint.store import committed
from shardmake.commands.clean import clean, clean_named
from shardmake.core.errors import ConfigError
from shardmake.core.temporary import take_lock
from shardmake.launch.driver import hold_driver_lock
from shardmake.push.stage import push
from shardmake.run.paths import RunDir
from shardmake.run.receipts import PushedTo, PushReceipt
from tests.checkpoint_record import commit_checkpoint, flip
from tests.finished_run import make_run, make_rundir, write_model
from tests.unit.plans import make_training_settings

RUN = make_run(push={"to": "file:published/chat"})


@pytest.fixture
def rundir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A run with three committed checkpoints and an incomplete one."""
    monkeypatch.chdir(tmp_path)
    rundir = make_rundir(tmp_path)
    configure(rundir)
    for step in (10, 20, 30, 40):
        make_checkpoint(rundir, step, finished=step != 20)
    return rundir


def configure(rundir: RunDir, *, best: bool = False, every_steps: int | None = None) -> None:
    checkpoints = {"keep": 2, "keep_best": best, "keep_every_steps": every_steps}
    make_training_settings(checkpoints=checkpoints).write(rundir.training)


def make_checkpoint(rundir: RunDir, step: int, *, finished: bool, eval_loss: float | None = None) -> None:
    folder = rundir.checkpoints / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    (folder / "shard.bin").write_bytes(bytes(1000))
    if finished:
        commit_checkpoint(folder, step, eval_loss=eval_loss)


def names(rundir: RunDir) -> set[str]:
    return {path.name for path in rundir.checkpoints.iterdir()}


def listed(runs: Path, *, remove: bool = False) -> set[str]:
    return {item.path.name for item in clean(runs, remove=remove)}


def test_nothing_is_removed_before_the_push_or_by_default(rundir: RunDir, caplog: pytest.LogCaptureFixture) -> None:
    assert listed(rundir.root.parent, remove=True) == set() and len(names(rundir)) == 4
    push(RUN, rundir)
    caplog.set_level("INFO", "shardmake")
    assert listed(rundir.root.parent) == {"checkpoint-10", "checkpoint-20", "checkpoint-30"}
    assert "Nothing was removed. Use --remove" in caplog.text and "the save was interrupted" in caplog.text
    folder = rundir.root.parent
    assert clean(folder, remove=True, names={"another"}) == []
    assert {item.path.name for item in clean(folder, remove=False, names={rundir.root.name})} >= {"checkpoint-10"}
    (rundir.checkpoints / "checkpoint-10/shardmake.json").write_text("{")
    assert listed(folder) == {"checkpoint-20", "checkpoint-30"} and len(names(rundir)) == 4


def test_the_newest_checkpoint_and_the_model_are_kept(rundir: RunDir) -> None:
    push(RUN, rundir)
    (rundir.root / ".model.partial").mkdir()
    (rundir.fetched / "cache").mkdir(parents=True)
    (rundir.fetched / "train.parquet").touch()
    model = sorted(rundir.model.iterdir())
    listed(rundir.root.parent, remove=True)
    assert names(rundir) == {"checkpoint-40"} and [record.step for record, _ in committed(rundir.checkpoints)] == [40]
    assert sorted(rundir.model.iterdir()) == model and not (rundir.root / ".model.partial").exists()
    assert [path.name for path in rundir.fetched.iterdir()] == ["train.parquet"] and listed(rundir.root.parent) == set()


def test_a_link_and_what_it_leads_to_stay(rundir: RunDir, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    push(RUN, rundir)
    archived = tmp_path / "archive/checkpoint-10"
    archived.parent.mkdir()
    (rundir.checkpoints / "checkpoint-10").rename(archived)
    (rundir.checkpoints / "checkpoint-10").symlink_to(archived)
    files = sorted(archived.iterdir())
    assert "checkpoint-10" not in listed(rundir.root.parent, remove=True)
    assert "checkpoint-10" in names(rundir) and sorted(archived.iterdir()) == files
    assert "is a link, or below one, and stays" in caplog.text


def test_a_link_that_takes_the_place_of_a_checkpoint_is_not_followed(
    rundir: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The checkpoint moves to the archive after everything was verified, before its removal."""
    push(RUN, rundir)
    checkpoint, archived = rundir.checkpoints / "checkpoint-10", tmp_path / "archive"

    def swap(path: Path) -> bool:
        if path == checkpoint:
            checkpoint.rename(archived)
            checkpoint.symlink_to(archived)
        return remove(path)

    remove = store.remove
    monkeypatch.setattr(store, "remove", swap)
    caplog.set_level("INFO", "shardmake")
    clean(rundir.root.parent, remove=True)
    assert names(rundir) == {"checkpoint-10", "checkpoint-40"} and (archived / "shardmake.json").exists()
    assert "1 folder of them could not be removed" in caplog.text and f"{checkpoint} is a link to" in caplog.text


def test_nothing_is_removed_while_a_driver_trains_the_run(rundir: RunDir, caplog: pytest.LogCaptureFixture) -> None:
    push(RUN, rundir)
    before = names(rundir)
    with hold_driver_lock(rundir):
        assert listed(rundir.root.parent, remove=True) == set() and names(rundir) == before
    assert "Another driver is already watching" in caplog.text
    assert listed(rundir.root.parent, remove=True) == {"checkpoint-10", "checkpoint-20", "checkpoint-30"}


def test_nothing_is_removed_if_a_pushed_prefix_is_not_whole(rundir: RunDir, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "shardmake")
    run = make_run(push={"to": ["file:published/chat", "memory://cleaned/chat"]})
    push(run, rundir)
    before = names(rundir)
    files, root = fsspec.core.url_to_fs("memory://cleaned/chat")
    files.pipe_file(f"{root}/config.json", b"shorter")
    assert listed(rundir.root.parent, remove=True) == set() and names(rundir) == before
    assert "memory://cleaned/chat: config.json is missing or different" in caplog.text
    push(run, rundir)
    assert "checkpoint-10" in listed(rundir.root.parent, remove=True)
    assert "by its list of checksums; they were not read again" in caplog.text


def test_a_copy_on_the_hub_is_said_not_to_be_compared_again(rundir: RunDir, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "shardmake")
    push(RUN, rundir)
    keep_elsewhere(rundir, "hub:lab/chat", "0f1e2d")
    assert "checkpoint-10" in listed(rundir.root.parent, remove=True)
    assert "hub:lab/chat was compared when it was pushed (commit 0f1e2d), not now." in caplog.text


def keep_elsewhere(rundir: RunDir, to: str, commit: str | None = None) -> None:
    receipt = PushReceipt.read(rundir.push_receipt)
    receipt.model_copy(update={"destinations": [PushedTo(to=to, commit=commit)]}).write(rundir.push_receipt)


PUSHED, SHARD = Path("published/chat"), "model-00001-of-00002.safetensors"
NOT_WHOLE = "is removed: file:published/chat: "
DOUBTS: dict[str, tuple[Callable[[RunDir], object], str]] = {
    "a removed copy": (lambda _: shutil.rmtree(PUSHED), f"{NOT_WHOLE}the folder published/chat is missing or empty"),
    "a copy without a file": (lambda _: (PUSHED / "config.json").unlink(), f"{NOT_WHOLE}config.json is missing"),
    "a copy of another model": (lambda _: flip(PUSHED / SHARD), f"{NOT_WHOLE}{SHARD} has other content"),
    "a store that cannot be read": (lambda run: keep_elsewhere(run, "s4://lab/chat"), "Reading s4://lab/chat failed"),
    "a damaged newest checkpoint": (lambda run: flip(run.checkpoints / "checkpoint-40/shard.bin"), "Nothing of"),
    "a damaged one that is kept": (lambda run: flip(run.checkpoints / "checkpoint-30/shard.bin"), "Nothing of"),
    "a damaged model": (lambda run: flip(next(run.model.glob("*.safetensors"))), "Nothing of"),
    "a model that changed": (lambda run: write_model(run, {"config.json": b"new"}), ""),
    "no committed checkpoint": (lambda run: [one.unlink() for one in run.checkpoints.glob("*/shardmake.json")], ""),
}


@pytest.mark.parametrize("doubt", DOUBTS)
def test_nothing_is_removed_in_doubt(rundir: RunDir, doubt: str, caplog: pytest.LogCaptureFixture) -> None:
    configure(rundir, every_steps=30)
    push(RUN, rundir)
    before = names(rundir)
    arrange, message = DOUBTS[doubt]
    arrange(rundir)
    assert listed(rundir.root.parent, remove=True) == set() and names(rundir) == before and message in caplog.text
    if message.startswith(NOT_WHOLE):
        push(RUN, rundir)
        assert "checkpoint-10" in listed(rundir.root.parent, remove=True)


def test_permanent_checkpoints_and_the_best_are_kept(rundir: RunDir) -> None:
    configure(rundir, best=True, every_steps=10)
    make_checkpoint(rundir, 14, finished=True, eval_loss=1.0)
    make_checkpoint(rundir, 16, finished=True, eval_loss=2.0)
    push(RUN, rundir)
    assert listed(rundir.root.parent, remove=True) == {"checkpoint-16", "checkpoint-20"}
    assert names(rundir) == {f"checkpoint-{step}" for step in (10, 14, 30, 40)}


def test_runs_without_anything_to_remove_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "demo").mkdir()
    caplog.set_level("INFO", "shardmake")
    assert clean(tmp_path, remove=False) == [] and f"Nothing to remove: no pushed run in {tmp_path}" in caplog.text


def test_a_named_run_and_what_is_set_aside_go_after_asking(rundir: RunDir, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "shardmake")
    runs = rundir.root.parent
    other = RunDir(runs / "dpo")
    other.base_model.mkdir(parents=True)
    (other.base_model / "model.safetensors").symlink_to(next(rundir.model.glob("*.safetensors")))
    aside = [rundir.train / "checkpoints-of-0f1e", runs / "dpo/train-before-1"]
    for folder in aside:
        folder.mkdir()

    def cleaned(*names: str, answer: bool | None) -> None:
        clean_named(runs, names, set_aside=not names, confirm=None if answer is None else lambda _: bool(answer))

    for answer in (None, False):
        cleaned(rundir.name, answer=answer)
        cleaned(answer=answer)
    assert all(folder.exists() for folder in (rundir.model, *aside))
    assert "not pushed: the only copy of its model; dpo starts from its model" in caplog.text
    with hold_driver_lock(rundir):
        cleaned(rundir.name, answer=True)
    rundir.settings.mkdir(exist_ok=True)
    with rundir.stage_lock.open("a") as lock:
        assert take_lock(lock.fileno(), without_locks=False, shared=True)
        cleaned(rundir.name, answer=True)
    assert "A stage of it runs" in caplog.text
    rundir.job.touch()
    cleaned(rundir.name, answer=True)
    assert rundir.model.exists() and "Cancel it first: shardmake cancel" in caplog.text
    rundir.job.unlink()
    cleaned(answer=True)
    assert not any(folder.exists() for folder in aside) and rundir.model.exists()
    cleaned(rundir.name, answer=True)
    assert [path.name for path in runs.iterdir()] == ["dpo"]
    broken = RunDir(runs / "broken")
    for receipt in (broken.train_receipt, broken.model_receipt, broken.push_receipt):
        receipt.parent.mkdir(parents=True)
        receipt.write_text("{broken")
    cleaned("broken", "broken", answer=True)
    assert "its receipts cannot be read" in caplog.text and [path.name for path in runs.iterdir()] == ["dpo"]
    for name in (rundir.name, "..", ".", "../runs/dpo", str(runs.absolute() / "dpo")):
        with pytest.raises(ConfigError, match="No folder of a run"):
            cleaned(name, answer=True)
