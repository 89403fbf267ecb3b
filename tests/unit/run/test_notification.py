"""The end of a stage runs the command of ``notify``, and is recorded for driver jobs if a person is needed."""

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest

from shardmake.config.models import Notify
from shardmake.core.errors import ShardmakeError, StopRequestedError
from shardmake.launch.monitor import DriverStoppedError
from shardmake.run import notification
from shardmake.run.driver_job import VARIABLE, DriverState, driver_dirs, new_driver_dir, refuse_ended
from shardmake.run.notification import notified
from shardmake.run.paths import RunDir
from tests.unit.config.samples import make_run

RECORD = 'echo "$SHARDMAKE_RUN|$SHARDMAKE_EVENT|$SHARDMAKE_STAGE|$SHARDMAKE_MESSAGE" >> said'
End = Callable[..., None]


@pytest.fixture
def end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> End:
    """Ends a stage, with an error or without."""
    monkeypatch.chdir(tmp_path)
    run = make_run().model_copy(update={"notify": Notify(command=RECORD)})

    def end_stage(stage: str, error: BaseException | None, name: str = "chat") -> None:
        expected = pytest.raises(type(error)) if error else contextlib.nullcontext()
        with expected, notified(stage, run, RunDir(Path("runs", name))):
            if error:
                raise error

    return end_stage


def said() -> list[str]:
    return Path("said").read_text().splitlines() if Path("said").exists() else []


def test_a_person_is_notified_of_errors_stops_and_the_end(end: End) -> None:
    end("train", None)
    end("train", DriverStoppedError("SIGTERM"))
    assert said() == [], "the run continues, or its job does"
    end("train", ShardmakeError("No token for https://ada:hunter2@host. Log in."))
    end("train", StopRequestedError("Stopped at step 5."))
    end("report", None)
    assert said() == [
        "chat|failed|train|No token for https://host. Log in.", "chat|stopped|train|Stopped at step 5.",
        "chat|done|report|All stages of chat are done. The report is runs/chat/report.html.",
    ]  # fmt: skip


@pytest.mark.parametrize(("command", "warning"), [
    ("echo no mailer >&2; exit 3", "ended with exit status 3: no mailer. "), ("sleep 5", "timed out after 0.2 "),
])  # fmt: skip
def test_a_command_that_fails_or_hangs_is_a_warning(
    command: str, warning: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(notification, "SECONDS", 0.2)
    run = make_run().model_copy(update={"notify": Notify(command=command)})
    with notified("report", run, RunDir(Path("runs/chat"))):
        pass
    assert warning in caplog.text and "Nobody was notified that chat is done." in caplog.text


def test_a_run_that_needs_a_person_is_left(end: End, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    end("train", ShardmakeError("Wrong."), "outside")
    refuse_ended("outside")
    folder = new_driver_dir(tmp_path)
    monkeypatch.setenv(VARIABLE, str(folder.root))
    refuse_ended("chat")
    end("train", StopRequestedError("Saved and stopped at step 5."))
    end("train", ShardmakeError("No token for https://ada:hunter2@host. Log in."), "code")
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
