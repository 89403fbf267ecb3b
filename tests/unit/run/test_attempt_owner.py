"""The one job that an attempt belongs to."""

from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from shardmake.run.attempt import AttemptDir
from shardmake.run.attempt_owner import attempt_of_script, claim


def test_of_many_claims_at_once_one_succeeds_and_all_see_it(tmp_path: Path) -> None:
    with ProcessPoolExecutor(8) as pool:
        owners = set(pool.map(partial(claim, AttemptDir(tmp_path)), map(str, range(64))))
    assert len(owners) == 1 and owners == {claim(AttemptDir(tmp_path), "later")}
    assert [path.name for path in tmp_path.iterdir()] == ["owner"], "no other traces"


def test_a_claimed_attempt_is_only_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that starts while the disk is full gets as far as its worker, which reports the disk."""
    claim(AttemptDir(tmp_path), "7")
    monkeypatch.setattr(Path, "mkdir", lambda *_, **__: pytest.fail("it writes"))
    assert claim(AttemptDir(tmp_path), "8") == "7"


@pytest.mark.parametrize("left", [[], [".nfs0001"]])
def test_what_a_file_server_left_is_no_owner(tmp_path: Path, left: list[str]) -> None:
    folder = AttemptDir(tmp_path)
    folder.owner.mkdir()
    for name in left:
        (folder.owner / name).touch()
    assert [claim(folder, job) for job in ("7", "8")] == ["7", "7"]


def test_the_attempt_of_a_batch_script() -> None:
    slurm = Path("/shared/runs/a/train/attempts/003/slurm")
    assert attempt_of_script(slurm / ".submission_file_1.sh") == AttemptDir(slurm.parent)
    assert attempt_of_script(Path("/shared/runs/a/script.sh")) is None
    assert attempt_of_script(Path("(null)")) is None
