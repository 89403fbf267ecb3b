"""Isolation of unit tests that run commands in the process of the tests."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.utils import logging as _hub_logging

from shardmake.core import process
from tests.module_server import ModuleServer

_hub_logging.get_logger()  # keeps the standard error of its first call, which must not be that of one test


@pytest.fixture(autouse=True)
def same_environment() -> Iterator[None]:
    """Restore the environment after each test: a command sets variables that libraries read, such as HF_HUB_OFFLINE."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(scope="session")
def module_server() -> Iterator[ModuleServer]:
    """The process that helper modules of this package are forked from."""
    server = ModuleServer()
    yield server
    server.close()


@pytest.fixture(autouse=True)
def helpers_are_forked(module_server: ModuleServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork helper modules of this package from a process that has imported the libraries."""
    start = process._run

    def run(module: str, text: str, environment: Mapping[str, str], folder: Path | None) -> Any:
        own = module.startswith("shardmake.") and environment["PYTHONPATH"] == process.absolute_python_path({})
        return (module_server.run if own else start)(module, text, environment, folder)

    monkeypatch.setattr(process, "_run", run)
