"""No check of these tests asks the hub: tests/unit/core/test_hub_access.py does, on the loopback interface."""

import pytest


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
