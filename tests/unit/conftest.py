"""Isolation of unit tests that run commands in the process of the tests."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import pytest
from huggingface_hub.utils import logging as _hub_logging

from shardmake.core import library_process
from tests.any_environment import AnyEnvironment
from tests.unit.wording import wording

__all__ = ["wording"]

_hub_logging.get_logger()  # keeps the standard error of its first call, which must not be that of one test


@pytest.fixture(autouse=True)
def same_environment() -> Iterator[None]:
    """Restore the environment after each test: a command sets variables that libraries read, such as HF_HUB_OFFLINE."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(autouse=True)
def same_signal_handlers() -> Iterator[None]:
    """Restore the handlers after each test: a command catches the signals that end it."""
    caught = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
    before = {number: signal.getsignal(number) for number in caught}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True, scope="module")
def same_functions_of_torch() -> Iterator[None]:
    """Fail if the tests of a file leave a function of torch replaced: other tests would then measure the replacement."""
    before = _functions_of_torch()
    yield
    after = _functions_of_torch()
    assert {name for name in before if after.get(name) is not before[name]} == set()


def _functions_of_torch() -> dict[str, Callable[..., Any]]:
    """Return the functions by name; ``torch.manual_seed`` only once `torch._dynamo` has wrapped it at its import."""
    modules = [sys.modules[name] for name in ("torch", "torch.nn.functional") if name in sys.modules]
    return {
        f"{module.__name__}.{name}": value
        for module in modules
        for name, value in vars(module).items()
        if callable(value) and (name != "manual_seed" or "torch._dynamo" in sys.modules)
    }


@pytest.fixture(scope="session")
def any_environment() -> Iterator[AnyEnvironment]:
    """The process that helper modules of this package are forked from."""
    process = AnyEnvironment()
    yield process
    process.close()


@pytest.fixture(autouse=True)
def helpers_share_a_process(any_environment: AnyEnvironment, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the helpers of all threads share a process that has imported the libraries."""
    shared: ContextVar[Any] = ContextVar("shared", default=any_environment)
    monkeypatch.setattr(library_process, "_shared", shared)
