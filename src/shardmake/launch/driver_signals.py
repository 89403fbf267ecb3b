"""Signals that end a driver and leave its job running."""

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class DriverStoppedError(KeyboardInterrupt):
    """Ctrl-C or a signal ended the driver; its text is the signal's name."""


@contextlib.contextmanager
def raise_on_signals() -> Iterator[None]:
    """Raise `DriverStoppedError` on each signal that ends a driver, unless the process ignores it (nohup)."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise DriverStoppedError(signal.Signals(number).name)

    handled = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, stop) for number in handled}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
