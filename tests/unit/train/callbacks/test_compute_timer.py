"""The time that a rank computes, without its waits."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from shardmake.run.usage import WINDOW_STEPS, WINDOWS
from shardmake.train.callbacks import heartbeat
from shardmake.train.callbacks.heartbeat import ComputeTimer


class Clock:
    """A clock of seconds, and of the events in a GPU's stream."""

    now = 0.0

    def __call__(self) -> float:
        return self.now

    def event(self, **_: bool) -> Any:
        """Return an event, whose time can be read once it is synchronized."""
        made: Any = SimpleNamespace(is_done=False)
        made.record = lambda: setattr(made, "time", self.now)
        made.synchronize = lambda: setattr(made, "is_done", True)
        made.elapsed_time = lambda end: 1000 * (end.time - made.time) if end.is_done else None
        return made


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for name in ("perf_counter", "monotonic"):
        monkeypatch.setattr(heartbeat.time, name, clock)
    monkeypatch.setattr(torch.cuda, "Event", clock.event)
    return clock


class Engine(nn.Module):
    """Waits for 100 s around its linear layer, in the hooks of an engine, whose pass takes 2 s."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.layer.register_forward_pre_hook(lambda *_: setattr(clock, "now", clock.now + 100))
        self.layer.register_forward_hook(lambda *_: setattr(clock, "now", clock.now + 100))
        compute, self.clock = self.layer.forward, clock
        self.layer.forward = lambda values: (setattr(clock, "now", clock.now + 2), compute(values))[1]

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        self.clock.now += 5
        return self.layer(values)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_only_the_layers_of_a_training_model_count(clock: Clock, device: str) -> None:
    model, timer = Engine(clock), ComputeTimer()
    for _ in range(2):
        timer.attach(model, torch.device(device))
    for step in range(WINDOWS * WINDOW_STEPS + 2 * WINDOW_STEPS):
        assert len(timer.windows) == min(WINDOWS, max(0, step - 1) // WINDOW_STEPS)
        for training in (True, False, True):
            model.train(training)(torch.ones(2))
        timer.end_step()
    assert [*timer.windows] == pytest.approx([4.0] * WINDOWS)


def test_the_layers_are_spread_over_a_large_model(clock: Clock) -> None:
    model, timer = nn.Sequential(*[nn.Linear(1, 1) for _ in range(100)]), ComputeTimer()
    timer.attach(model, torch.device("cpu"))
    timed = [number for number, layer in enumerate(model) if layer._forward_hooks]
    assert timed == [*range(0, 100, 4)]
