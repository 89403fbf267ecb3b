"""Tell a training's progress on the terminal from its metrics file."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardmake.run.metrics import parse_metrics

SECONDS_BETWEEN_LINES = 3.0


class ProgressPrinter:
    """Reads what was appended to ``metrics.jsonl`` since the last look, and tells it at a readable pace.

    A resumed attempt writes the file anew; where it has grown again since the last look, reading starts in a line.
    """

    def __init__(self, metrics: Path, tell: Callable[[str], None]) -> None:
        self.metrics = metrics
        self.tell = tell
        self.told_step = 0
        self.told_at = 0.0
        self.offset = metrics.stat().st_size if metrics.exists() else 0

    def tell_news(self) -> None:
        """Tell the newest line if enough time has passed; evaluations always."""
        lines = self._new_lines()
        for line in lines:
            if "eval_loss" in line:
                self.tell(f"step {line['step']:>6}  evaluation loss {line['eval_loss']:.4f}")
        steps = [line for line in lines if "loss" in line]
        if steps and time.monotonic() - self.told_at >= SECONDS_BETWEEN_LINES:
            self.told_at = time.monotonic()
            self.tell(describe_step(steps[-1]))

    def _new_lines(self) -> list[dict[str, Any]]:
        """Complete lines since the last call. A resumed attempt shortens the file; then reading starts at its end."""
        if not self.metrics.exists():
            return []
        if self.metrics.stat().st_size < self.offset:
            self.offset = self.metrics.stat().st_size
        with self.metrics.open("rb") as file:
            file.seek(self.offset)
            complete, newline, _ = file.read().rpartition(b"\n")
        self.offset += len(complete) + len(newline)
        return parse_metrics(complete.decode(errors="replace"))


def describe_step(line: dict[str, Any]) -> str:
    """One line of metrics for people."""
    rate = f"  {line['tokens_per_second']:,.0f} tokens/s" if "tokens_per_second" in line else ""
    pace = f"  learning rate {line['learning_rate']:.2e}" if "learning_rate" in line else ""
    return f"step {line['step']:>6}  loss {line['loss']:.4f}{pace}{rate}"
