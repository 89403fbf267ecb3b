"""SIGKILL at every write of a save, from its first byte to the removal of the previous checkpoint."""

import os
import shutil
from pathlib import Path

import torch

from shardmake.checkpoint import store
from shardmake.checkpoint.record import find_problems
from shardmake.run.training_settings import Retention
from shardmake.train.checkpoint_saver import Saver
from tests.checkpoint_record import describe
from tests.kill_at_write import Killer, points


def save(folder: Path, step: int) -> None:
    """Save weights that hold their step, in the layout of DeepSpeed: folders, tensors, and a file that names them."""
    with Saver(folder, describe, Retention(keep=1)).saving(step, required=True) as staged:
        assert staged is not None
        (staged / f"global_step{step}").mkdir(parents=True)
        for rank in (0, 1):
            torch.save({"step": step, "w": torch.full((1000,), float(step))}, staged / f"global_step{step}/{rank}.pt")
        (staged / "latest").write_text(f"global_step{step}")


def save_until_killed(folder: Path, log: Path, at: int, mode: str) -> int:
    """Save step 4 in a process that is killed at write ``at``; return its exit status."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        Killer(folder, log, at, mode).install()
        save(folder, 4)
        os._exit(0)
    finally:
        os._exit(1)


def test_newest_committed_checkpoint_is_valid_after_a_kill_at_any_write(tmp_path: Path) -> None:
    started = tmp_path / "started"
    save(started, 2)
    shutil.copytree(started, tmp_path / "finished")
    assert save_until_killed(tmp_path / "finished", tmp_path / "writes", -1, "before") == 0
    places = points(tmp_path / "writes")
    kinds = {what.split()[0] for _, _, what in places}
    assert kinds == {"open", "torch.save", "fsync", "os.rename", "os.remove", "os.rmdir"} and len(places) > 25
    steps = []
    for at, mode, what in places:
        folder = tmp_path / f"{at}-{mode}"
        shutil.copytree(started, folder)
        assert save_until_killed(folder, tmp_path / f"{at}-{mode}.log", at, mode) == -9, what
        found = store.recover(folder)
        assert found is not None, what
        record, path = found
        step = (path / "latest").read_text().removeprefix("global_step")
        assert [torch.load(path / f"global_step{step}/{rank}.pt")["step"] for rank in (0, 1)] == [record.step] * 2, what
        assert all(not find_problems(path) for path in folder.iterdir()), "every remaining checkpoint is valid"
        steps.append(record.step)
        save(folder, 6)
        assert [path.name for path in folder.iterdir()] == ["checkpoint-6"], what
    assert steps == sorted(steps) and {2, 4} == set(steps), "one write commits the checkpoint"
