"""The configurations of the section "You have, you write" are valid, and name variables that scripts get."""

from typing import Any

import pytest

from shardmake.config.models import Run
from shardmake.config.script_file import PREFIX, SCRIPT_VARIABLES
from tests.replaced_commands import COMMON, RUNS


@pytest.mark.parametrize("values", RUNS.values(), ids=RUNS.keys())
def test_every_configuration_on_the_page_is_valid(values: dict[str, Any]) -> None:
    run = Run(**COMMON | values)
    used = {word.removeprefix("$") for word in run.script_args if word.startswith(f"${PREFIX}")}
    assert run.script and used <= set(SCRIPT_VARIABLES)
