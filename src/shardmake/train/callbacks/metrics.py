"""Append the metrics of a training to ``metrics.jsonl``."""

import errno
import os
import time
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState

from shardmake.core.run_folder import open_file
from shardmake.run.metrics import DeviceMemory, MeanRewards, MetricsLine, Rewards, RewardScores, parse_line
from shardmake.train.callbacks.best_effort import BestEffortWriter


class MetricsCallback(TrainerCallback):
    """Write one JSON object per line on rank 0; all attempts of a run append to one file, ordered by step.

    ``tokens`` counts the tokens of all ranks since step 0, padding included. ``tokens_per_second`` is the rate since
    the line before. Both are left out if ``tokens_per_step`` is None.
    """

    def __init__(self, path: Path, tokens_per_step: int | None, attempt: int) -> None:
        self.path = path
        self.tokens_per_step = tokens_per_step
        self.attempt = attempt
        self.last = (time.time(), 0)
        self.writer = BestEffortWriter("Metrics")

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Remove the lines of steps that will be repeated."""
        self.last = (time.time(), state.global_step)
        if state.is_world_process_zero and self.path.exists():
            lines = self.path.read_text().splitlines(keepends=True)
            kept = [line for line in lines if (found := parse_line(line)) and found.step <= state.global_step]
            with open_file(self.path, "w") as file:
                file.writelines(kept)

    def on_log(
        self, args: Any, state: TrainerState, control: TrainerControl, logs: dict[str, float] | None = None, **_: Any
    ) -> None:
        """Append what the Trainer logged."""
        if not state.is_world_process_zero or not logs or "train_runtime" in logs:
            return
        now, step = time.time(), state.global_step
        rate = None
        if "loss" in logs and self.tokens_per_step is not None:
            last_time, last_step = self.last
            rate = (step - last_step) * self.tokens_per_step / max(now - last_time, 1e-9)
            self.last = (now, step)
        line = MetricsLine(
            step=step,
            time=now,
            attempt=self.attempt,
            loss=logs.get("loss"),
            learning_rate=logs.get("learning_rate"),
            grad_norm=logs.get("grad_norm"),
            eval_loss=logs.get("eval_loss"),
            rewards=_rewards(logs, "rewards/"),
            eval_rewards=_rewards(logs, "eval_rewards/"),
            kl=logs.get("kl"),
            reward_scores=_reward_scores(logs, ""),
            eval_reward_scores=_reward_scores(logs, "eval_"),
            tokens=None if self.tokens_per_step is None else step * self.tokens_per_step,
            tokens_per_second=rate,
            memory=_device_memory(),
        )
        with self.writer.write():
            _append(self.path, line.as_text())


def _rewards(logs: dict[str, float], start: str) -> MeanRewards | None:
    """Return the values of ``logs`` whose names begin with ``start``, as TRL's trainers log them.

    There are none if all examples since the line before had the same label.
    """
    found = {name: logs[start + name] for name in Rewards.model_fields if start + name in logs}
    if "margins" not in found:
        return None
    return (Rewards if "accuracies" in found else MeanRewards).model_validate(found)


def _reward_scores(logs: dict[str, float], start: str) -> RewardScores | None:
    """Return the values of ``logs`` of a reward model, whose names begin with ``start``, as TRL logs them."""
    found = {name: logs.get(start + name) for name in RewardScores.model_fields}
    return None if None in found.values() else RewardScores.model_validate(found)


def _append(path: Path, text: str) -> None:
    """Append all of ``text`` or nothing."""
    with open_file(path, "ab", buffering=0) as file:
        size = file.tell()
        try:
            if file.write(text.encode()) < len(text.encode()):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            file.truncate(size)
            raise


def _device_memory() -> DeviceMemory | None:
    """Return the peak bytes of the caching allocator on this rank's GPU, or None on a CPU."""
    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info()
    allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return DeviceMemory(allocated=allocated, reserved=reserved, device=total - free)
