"""The refusals of a configuration, by the rows of ``refusals.yaml``: changes of a valid one, and the whole message.

A value of "..." removes the key. A message begins with the key that it is about. After a change of the wording that is
meant: UPDATE_GOLDEN=1 pytest tests/unit/config/test_refusals.py
"""

from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from shardmake.config.accelerators import ACCELERATORS
from shardmake.config.load import load_cluster, load_config
from shardmake.config.models import STRATEGIES, Run, Schedule
from shardmake.config.script_file import SCRIPT_VARIABLES, SERVICE_VARIABLES
from shardmake.core.errors import ConfigError
from tests.unit.config.samples import CLUSTER, RUN, merged, write
from tests.unit.wording import expect_row, rows_of

LISTS = {
    "KEYS": Run.model_fields, "STRATEGIES": STRATEGIES, "SCHEDULES": get_args(Schedule), "ACCELERATORS": ACCELERATORS,
    "VARIABLES": (*SCRIPT_VARIABLES, *SERVICE_VARIABLES[:2]),
}  # fmt: skip
"""Lists in messages, which grow with the tables."""
FILE = Path(__file__).with_name("refusals.yaml")
TABLE: dict[str, list[Any]] = yaml.safe_load(FILE.read_text())


def refusal(kind: str, changes: dict[str, Any], path: Path) -> str:
    """Return the message about a cluster, a configuration, or its only run, without the name of the file."""
    changes = {key: ... if value == "..." else value for key, value in changes.items()}
    values = {"cluster": "c.yaml"}
    if kind == "cluster":
        values = merged(CLUSTER, changes)
    elif kind == "configuration":
        values = merged(values | {"defaults": RUN}, changes)
    else:
        values |= {"runs": {"chat": merged(RUN, changes)}}
    with pytest.raises(ConfigError) as error:
        (load_cluster if kind == "cluster" else load_config)(write(path, values))
    first, *lines = str(error.value).splitlines()
    assert first == f"{path} cannot be used:"
    text = "\n".join(line.strip() for line in lines)
    for name, listed in LISTS.items():
        text = text.replace(", ".join(listed), name)
    return text


@pytest.mark.parametrize(("kind", "number"), rows_of(TABLE))
def test_it_is_refused(kind: str, number: int, tmp_path: Path) -> None:
    expect_row(FILE, TABLE, kind, number, refusal(kind, TABLE[kind][number][0], tmp_path / "file.yaml"))
