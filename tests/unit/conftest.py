"""Isolation of unit tests that run commands in the process of the tests."""

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def same_environment() -> Iterator[None]:
    """Restore the environment after each test: a command sets variables that libraries read, such as HF_HUB_OFFLINE."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)
