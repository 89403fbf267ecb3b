"""The page of model types is true for the installed transformers."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from shardmake.consolidate import loading
from tests.model_types import in_this_process, try_type
from tools.model_types_page import ROWS, page

KNOWN: dict[str, Any] = json.loads(ROWS.read_text())
PAGE = ROWS.parents[1] / "docs/reference/model-types.md"


def test_the_page_is_that_of_the_rows_and_names_every_type() -> None:
    """If this fails: python -m tools.model_types_page > docs/reference/model-types.md"""
    text = PAGE.read_text()
    assert page() == text and set(KNOWN) <= set(re.findall(r"[\w.-]+", text.replace("**", "")))


@pytest.mark.models
@pytest.mark.parametrize("kind", KNOWN)
def test_a_step_and_a_merge_of_every_type(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(loading, "run_module", in_this_process)
    assert try_type(kind, tmp_path) == KNOWN[kind]
