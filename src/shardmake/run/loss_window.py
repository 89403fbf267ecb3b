"""The losses since the last logged step, in each checkpoint, so that a resumed training logs the same means."""

from pathlib import Path

from pydantic import Field

from shardmake.run.record import RunRecord

LOSS_WINDOW = "loss_window.json"


class LossWindow(RunRecord):
    """The losses that were not logged yet when a checkpoint was saved."""

    logged_step: int = Field(description="Last step whose loss was logged, 0 before the first.")
    sums: list[float] = Field(description="Sum of the losses of the steps since then, by rank.")

    def own_sum(self, rank: int, world_size: int) -> float:
        """Return the sum of ``rank``; the mean of all ranks if another number of ranks saved the checkpoint."""
        return self.sums[rank] if world_size == len(self.sums) else sum(self.sums) / len(self.sums)


def read_loss_window(checkpoint: Path) -> LossWindow | None:
    """Return the window in ``checkpoint``; None for a checkpoint without one."""
    return LossWindow.read_if_exists(checkpoint / LOSS_WINDOW)
