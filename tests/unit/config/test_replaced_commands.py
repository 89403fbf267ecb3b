"""The configurations on the page "You have, you write" are valid, and name variables that scripts get."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardmake.config.models import Run
from shardmake.config.script_variables import PREFIX, SCRIPT_VARIABLES

PAGE = Path(__file__).resolve().parents[3] / "docs/how-to/you-have-you-write.md"
COMMON, *BLOCKS = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)


def values_of(block: str) -> dict[str, Any]:
    """Return the keys of the run in a block, which may name the run."""
    values = yaml.safe_load(block)
    return next(iter(values["runs"].values())) if "runs" in values else values


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_every_configuration_on_the_page_is_valid(block: str) -> None:
    run = Run(**{**values_of(COMMON), **values_of(block)})
    used = {word.removeprefix("$") for word in run.script_args if word.startswith(f"${PREFIX}")}
    assert run.script and used <= set(SCRIPT_VARIABLES)


def test_every_command_of_the_table_has_a_section() -> None:
    links = re.findall(r"\]\(#([^)]+)\)", PAGE.read_text())
    titles = [
        re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-")
        for title in re.findall(r"^## (.+)$", PAGE.read_text(), re.M)
    ]
    assert sorted(links) == sorted(titles)
    assert len(BLOCKS) == len(titles)
