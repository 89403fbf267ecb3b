"""Every row of the comparison's table, and every library's key of it, has a case for the real engine."""

import pytest

from shardmake.config.settings import SETTINGS, Setting
from shardmake.core.nested import leaves
from shardmake.render.comparison import LIBRARIES, Library, Settings
from tests.settings_cases import CASES
from tests.workflow.engine_cases import OBSERVED

SHARED = [setting for setting in SETTINGS.values() if setting.is_shared]


def keys(setting: Setting, library: Library) -> tuple[str, ...]:
    """Return the names that ``library`` has for ``setting``."""
    return setting.deepspeed_keys if library == "DeepSpeed" else getattr(setting, library.lower())


PAIRS: list[tuple[Setting, Library]] = [
    (setting, library) for setting in SHARED for library in LIBRARIES if keys(setting, library)
]


def writes(settings: Settings, setting: Setting, library: Library) -> bool:
    """Return whether the settings have the key of ``library`` for ``setting``."""
    written = {key for key, _ in leaves(getattr(settings, library.lower()) or {})}
    if library == "Accelerate":
        return setting.option in {key.rpartition(".")[2] for key in written}
    return bool(written.intersection(keys(setting, library)))


@pytest.mark.parametrize(("setting", "library"), PAIRS, ids=lambda value: getattr(value, "name", value))
def test_each_key_has_a_case(setting: Setting, library: Library) -> None:
    cases = [one for name, one in CASES.items() if name.startswith(f"{setting.name}:")]
    assert any(writes(one, setting, library) for one in cases), "Add a case to tests/settings_cases.py."


def test_each_row_is_read_from_the_engine() -> None:
    names = {"engine", *(setting.name for setting in SHARED)}
    assert OBSERVED.keys() == names == {name.partition(":")[0] for name in CASES}
