"""The command of ``notify``: when it runs, what it is given, and that its failure harms nothing."""

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest

from shardmake.config.models import Notify
from shardmake.core.errors import ShardmakeError, StopRequestedError
from shardmake.launch.monitor import DriverStoppedError
from shardmake.run import notification
from shardmake.run.notification import notified
from shardmake.run.paths import RunDir
from tests.unit.config.samples import make_run

RECORD = 'echo "$SHARDMAKE_RUN|$SHARDMAKE_EVENT|$SHARDMAKE_STAGE|$SHARDMAKE_MESSAGE" >> said'
End = Callable[[str, BaseException | None], None]


@pytest.fixture
def end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> End:
    """Ends a stage, with an error or without."""
    monkeypatch.chdir(tmp_path)
    run = make_run().model_copy(update={"notify": Notify(command=RECORD)})

    def end_stage(stage: str, error: BaseException | None) -> None:
        expected = pytest.raises(type(error)) if error else contextlib.nullcontext()
        with expected, notified(stage, run, RunDir(Path("runs/chat"))):
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
        "chat|failed|train|No token for https://host. Log in.",
        "chat|stopped|train|Stopped at step 5.",
        "chat|done|report|All stages of chat are done. The report is runs/chat/report.html.",
    ]


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
