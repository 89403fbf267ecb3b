"""A merge replaces its own earlier result and nothing else."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from shardmake.consolidate import merge, merge_plan
from shardmake.consolidate.loading import LoadingReport
from shardmake.consolidate.merge import consolidate
from shardmake.core import run_folder
from shardmake.core.errors import ConfigError, ModelError

pytestmark = pytest.mark.usefixtures("tiny")


def content(folder: Path = Path()) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def run(out: str | Path, checkpoint: str = "run", *, overwrite: bool = False) -> None:
    assert consolidate(Path(checkpoint), Path(out), base=Path("base"), overwrite=overwrite) is not None


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("out", [
    "run", "run/checkpoint-2", "run/checkpoint-2/model", "run/checkpoint-2/deep/er", ".", "..", "/", "base",
    "base/model", "run/../base", "to-run", "to-base/model", "~",
])  # fmt: skip
def test_checkpoint_and_base_are_never_replaced(out: str, overwrite: bool) -> None:
    Path("to-run").symlink_to("run")
    Path("to-base").symlink_to(Path("base").absolute())
    before = content()
    with pytest.raises(ConfigError, match=r"Cannot write the model to .* (is|contains|is in|is or contains) "):
        run(Path(out).expanduser(), overwrite=overwrite)
    assert content() == before


def test_inner_folder_of_a_checkpoint_protects_the_checkpoint() -> None:
    step = Path("ds/checkpoint-3/global_step3")
    step.mkdir(parents=True)
    import torch

    state = {"module": {"w": torch.ones(2, 3)}, "param_shapes": [], "buffer_names": [], "shared_params": {}}
    torch.save({**state, "global_steps": 3}, step / "mp_rank_00_model_states.pt")
    (step.parent / "latest").write_text("global_step3")
    for checkpoint in ("ds", "ds/checkpoint-3", "ds/checkpoint-3/global_step3"):
        with pytest.raises(ConfigError, match="It is in the checkpoint"):
            run("ds/checkpoint-3/model", checkpoint)
        run(Path("out", checkpoint.replace("/", "-")), checkpoint)


def test_foreign_folder_is_kept() -> None:
    Path("thesis").mkdir()
    Path("thesis/chapter.txt").write_text("text")
    with pytest.raises(ConfigError, match=r"chapter\.txt\. Name a new folder, or add --overwrite"):
        run("thesis")
    assert content(Path("thesis")) == {"thesis/chapter.txt": b"text"}
    run("thesis", overwrite=True)
    assert not Path("thesis/chapter.txt").exists()


def test_own_result_is_replaced_and_an_empty_folder_filled() -> None:
    Path("model").mkdir()
    run("model")
    run("model")
    assert json.loads(Path("model/receipt.json").read_text())["written_by"] == "Hugging Face folder"


@pytest.mark.parametrize("name", ["notes.txt", ".hidden", "sub/notes.txt", "config.json", "link"])
def test_own_result_with_other_files_is_kept(name: str) -> None:
    run("model")
    Path("model", name).parent.mkdir(exist_ok=True)
    if name == "link":
        Path("model/link").symlink_to("receipt.json")
    else:
        Path("model", name).write_text('{"changed": true}')
    before = content()
    with pytest.raises(ConfigError, match=name):
        run("model")
    assert content() == before


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"verification": 3}', "\x00"])
def test_foreign_receipt_is_not_a_result(text: str) -> None:
    Path("model").mkdir()
    Path("model/receipt.json").write_text(text)
    with pytest.raises(ConfigError, match=r"receipt\.json"):
        run("model")


def test_file_loop_and_linked_staging_folder() -> None:
    Path("file").write_text("x")
    Path("loop").symlink_to("loop")
    Path(".linked.partial").symlink_to("base")
    for out, message in (("file", "not a folder"), ("loop", "loop"), ("linked", "where the base model is")):
        with pytest.raises(ConfigError, match=message):
            run(out, overwrite=True)
    Path(".other.partial").write_text("x")
    with pytest.raises(ConfigError, match=r"other\.partial first, which is not a folder"):
        run("other")


def test_folder_that_appears_during_the_copy_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(*_: object) -> LoadingReport:
        Path("model").mkdir()
        Path("model/notes.txt").write_text("x")
        return LoadingReport("Tiny")

    monkeypatch.setattr(merge_plan, "check_loading", check)
    with pytest.raises(ConfigError, match=r"notes\.txt"):
        run("model")
    assert content(Path("model")) == {"model/notes.txt": b"x"} and not Path(".model.partial").exists()


def test_files_are_read_back_while_the_check_is_in_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also then, the files of the check are not part of the model."""
    read = threading.Event()
    original = merge.scan

    def scan(*arguments: Any) -> Any:
        scans = original(*arguments)
        read.set()
        return scans

    monkeypatch.setattr(merge, "scan", scan)
    monkeypatch.setattr(merge_plan, "check_loading", lambda *_: LoadingReport("Tiny" if read.wait(60) else "late"))
    run("model")
    receipt = json.loads(Path("model/receipt.json").read_text())["verification"]
    assert receipt["architecture"] == "Tiny" and receipt["files"].keys() == {"config.json", "model.safetensors"}
    assert sorted(path.name for path in Path("model").iterdir()) == ["config.json", "model.safetensors", "receipt.json"]


@pytest.mark.parametrize("error", [ModelError("no"), KeyError("bug"), MemoryError(), RecursionError()])
def test_no_error_leaves_the_staging_folder(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> LoadingReport:
        raise error

    monkeypatch.setattr(merge_plan, "check_loading", fail)
    with pytest.raises(type(error)):
        run("model")
    assert sorted(path.name for path in Path().iterdir()) == ["base", "run"]


def test_interrupted_merge_names_its_folder(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def interrupt(*_: object) -> LoadingReport:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(merge, "scan", interrupt)
        with caplog.at_level("WARNING", "shardmake"), pytest.raises(KeyboardInterrupt):
            run("model")
    assert "the same command resumes there" in caplog.text and Path(".model.partial/model.safetensors").exists()
    run("model")
    assert sorted(path.name for path in Path().iterdir()) == ["base", "model", "run"]


@pytest.mark.parametrize("killed", ["before", "after"])
def test_file_system_without_exchange(monkeypatch: pytest.MonkeyPatch, killed: str) -> None:
    """As on NFS: the merge renames twice. The next merge finishes what a kill between or after them left."""
    monkeypatch.setattr(run_folder, "exchange", lambda *_: False)
    run("model")
    complete = content(Path("model"))
    Path("model").rename(".model.replaced")
    if killed == "after":
        Path("model").mkdir()
    Path("run/checkpoint-2/config.json").unlink()
    run("model")
    assert content(Path("model")).keys() == complete.keys()
    assert sorted(path.name for path in Path().iterdir()) == ["base", "model", "run"]
