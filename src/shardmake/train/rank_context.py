"""The settings that one rank reads before it trains."""

import os
from dataclasses import dataclass
from pathlib import Path

from shardmake.run.attempt import Attempt, AttemptDir
from shardmake.run.plan import Plan
from shardmake.run.training_settings import TrainingSettings


@dataclass(frozen=True)
class RankContext:
    """An attempt as one of its ranks sees it."""

    folder: AttemptDir
    attempt: Attempt
    plan: Plan
    settings: TrainingSettings
    rank: int

    @classmethod
    def load(cls, attempt_folder: Path) -> "RankContext":
        """Read the files of the attempt in ``attempt_folder``."""
        folder = AttemptDir(attempt_folder)
        settings = TrainingSettings.read(folder.training, "shardmake train NAME")
        return cls(folder, folder.read(), Plan.read(folder.plan), settings, rank=int(os.environ.get("RANK", "0")))
