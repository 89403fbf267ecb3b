"""Run a function when a module is imported for the first time, without importing the module here.

A user's script may set variables that libraries read at their import, so Shardmake must not import them first.
"""

import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

Install = Callable[[Any], None]


class ImportHooks(MetaPathFinder):
    """The functions that wait for the import of a module."""

    def __init__(self) -> None:
        self.waiting: dict[str, Install] = {}
        sys.meta_path.insert(0, self)

    def after(self, name: str, install: Install) -> None:
        """Call ``install`` with the module ``name`` once it has been imported; now if it already has."""
        if name in sys.modules:
            install(sys.modules[name])
        else:
            self.waiting[name] = install

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return the module's spec with a loader that calls its function; part of the import system."""
        install = self.waiting.pop(fullname, None)
        if install is None:
            return None
        spec = find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_install(module: ModuleType) -> None:
            execute(module)
            install(module)

        spec.loader.exec_module = execute_and_install  # type: ignore[method-assign]
        return spec

    def remove(self) -> None:
        """Stop waiting."""
        sys.meta_path.remove(self)
