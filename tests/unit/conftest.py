"""Isolation of unit tests that run commands in the process of the tests."""

import os
from collections.abc import Iterator

import pytest
from huggingface_hub.utils import logging as _hub_logging

_hub_logging.get_logger()  # keeps the standard error of its first call, which must not be that of one test


@pytest.fixture(autouse=True)
def same_environment() -> Iterator[None]:
    """Restore the environment after each test: a command sets variables that libraries read, such as HF_HUB_OFFLINE."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)
