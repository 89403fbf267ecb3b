"""Answers of nvidia-smi, and none."""

from pathlib import Path

import pytest

from shardmake.core import process
from shardmake.core.process import ask_nvidia_smi, query_gpus
from tests.programs import install_programs


@pytest.mark.parametrize(
    ("script", "answer"),
    [
        ('echo "$@"', "--query-gpu=uuid --format=csv,noheader,nounits\n"),
        ("echo No devices were found; exit 6", ""),
        ("exec sleep 60", None),
        (None, None),
    ],
    ids=["answers", "fails", "hangs", "missing"],
)
def test_the_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str | None, answer: str | None) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    if script:
        install_programs(tmp_path, monkeypatch, {"nvidia-smi": script})
    monkeypatch.setattr(process, "SECONDS", 0.5 if answer is None else 30.0)
    assert query_gpus("uuid") == answer
    assert script != 'echo "$@"' or ask_nvidia_smi("-q", "-x") == "-q -x\n"
