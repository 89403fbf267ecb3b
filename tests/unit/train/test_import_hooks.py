"""Functions that run when a module is imported."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardmake.train.script_hooks import ImportHooks


@pytest.fixture
def hooks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ImportHooks]:
    (tmp_path / "hooked_package").mkdir()
    (tmp_path / "hooked_package/__init__.py").write_text("value = 1\n")
    (tmp_path / "hooked_package/inner.py").write_text("value = 2\n")
    monkeypatch.syspath_prepend(tmp_path)
    hooks = ImportHooks()
    yield hooks
    hooks.remove()
    for name in [name for name in sys.modules if name.startswith("hooked_package")]:
        del sys.modules[name]


def test_functions_run_once_at_the_import_of_their_module(hooks: ImportHooks) -> None:
    seen = []
    hooks.after("hooked_package", lambda module: seen.append(("package", module.value)))
    hooks.after("hooked_package.inner", lambda module: seen.append(("inner", module.value)))
    assert seen == [] and "hooked_package" not in sys.modules
    importlib.import_module("hooked_package.inner")
    importlib.import_module("hooked_package.inner")
    assert seen == [("package", 1), ("inner", 2)]
    hooks.after("hooked_package", lambda module: seen.append(("later", module.value)))
    assert seen[-1] == ("later", 1)


def test_a_missing_module_stays_missing(hooks: ImportHooks) -> None:
    hooks.after("hooked_package.nowhere", lambda module: None)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("hooked_package.nowhere")
