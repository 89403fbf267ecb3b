"""Helper processes: their results are kept, and a slow one says what it does."""

from functools import partial
from pathlib import Path

import pytest

from shardmake.memory import cache
from shardmake.memory.cache import cached_helper

HELPER = "def answer(request):\n    return [*request, 2]\n"


def test_a_slow_helper_says_what_it_does_and_its_result_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "appends_two.py").write_text(HELPER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "_LIBRARIES", ())
    monkeypatch.setattr(cache, "warn_while_slow", partial(cache.warn_while_slow, first=0.0, later=3600))
    assert cached_helper("appends_two", {"a": 1}, "Appending") == ["a", 2]
    (line,) = caplog.messages
    assert line.startswith("Appending. The result is kept for the next time. (")
    assert cached_helper("appends_two", {"a": 1}, "Appending") == ["a", 2] and len(caplog.messages) == 1
