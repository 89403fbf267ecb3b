"""Report a training's progress from its metrics file."""

import logging
import time
from pathlib import Path

from shardmake.run.metrics import MetricsLine, parse_metrics

SECONDS_BETWEEN_LINES = 3.0
logger = logging.getLogger(__name__)


class ProgressPrinter:
    """Reads what was appended to ``metrics.jsonl`` since the last poll, and logs it at a readable pace.

    A resumed attempt rewrites the file. If the file has grown again by the next poll, reading starts inside a line.
    """

    def __init__(self, metrics: Path) -> None:
        self.metrics = metrics
        self.logged_at = 0.0
        self.offset = metrics.stat().st_size if metrics.exists() else 0

    def poll(self) -> None:
        """Log new evaluations, and the newest step if enough time has passed."""
        lines = self._new_lines()
        for line in lines:
            if line.eval_loss is not None:
                logger.info("step %6s  evaluation loss %.4f", line.step, line.eval_loss)
        steps = [line for line in lines if line.loss is not None]
        if steps and time.monotonic() - self.logged_at >= SECONDS_BETWEEN_LINES:
            self.logged_at = time.monotonic()
            logger.info(describe_step(steps[-1]))

    def _new_lines(self) -> list[MetricsLine]:
        """Return the complete lines since the last call. After the file was shortened, reading starts at its end."""
        if not self.metrics.exists():
            return []
        if self.metrics.stat().st_size < self.offset:
            self.offset = self.metrics.stat().st_size
        with self.metrics.open("rb") as file:
            file.seek(self.offset)
            complete, newline, _ = file.read().rpartition(b"\n")
        self.offset += len(complete) + len(newline)
        return parse_metrics(complete.decode(errors="replace"))


def describe_step(line: MetricsLine) -> str:
    """Return one line of metrics as text."""
    speed = "" if line.tokens_per_second is None else f"  {line.tokens_per_second:,.0f} tokens/s"
    rate = "" if line.learning_rate is None else f"  learning rate {line.learning_rate:.2e}"
    return f"step {line.step:>6}  loss {line.loss:.4f}{rate}{speed}"
