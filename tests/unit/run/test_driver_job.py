"""Records of driver jobs: the runs that later driver jobs leave as they are."""

from pathlib import Path

import pytest

from shardmake.core.errors import ShardmakeError, StopRequestedError
from shardmake.run.driver_job import VARIABLE, DriverState, driver_dirs, new_driver_dir, refuse_ended
from shardmake.run.notification import notified
from shardmake.run.paths import RunDir
from tests.unit.config.samples import make_run


def end(run: str, error: Exception) -> None:
    with pytest.raises(type(error)), notified("train", make_run(), RunDir(Path("runs", run))):
        raise error


def test_a_run_that_needs_a_person_is_not_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    end("outside", ShardmakeError("Wrong."))
    refuse_ended("outside")
    folder = new_driver_dir(tmp_path)
    monkeypatch.setenv(VARIABLE, str(folder.root))
    refuse_ended("chat")
    end("chat", StopRequestedError("Saved and stopped at step 5."))
    end("code", ShardmakeError("No token for https://ada:hunter2@host. Log in."))
    with pytest.raises(StopRequestedError, match=r"^chat stays stopped\. .* shardmake submit\.$"):
        refuse_ended("chat")
    with pytest.raises(ShardmakeError, match=r"^code is left as it is, because its stage train failed: No token"):
        refuse_ended("code")
    assert "hunter2" not in folder.ended_run("code").read_text()


def test_the_newest_workflow_comes_first_and_one_that_slurm_rejected_does_not_count(tmp_path: Path) -> None:
    first, second, _ = (new_driver_dir(tmp_path) for _ in range(3))
    for folder in (first, second):
        DriverState(jobs=[]).write(folder.state)
    assert list(driver_dirs(tmp_path)) == [second, first]
    assert first.root.name == "001"
