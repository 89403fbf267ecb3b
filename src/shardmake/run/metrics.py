"""The lines of ``metrics.jsonl``, which trainings and users' scripts append to."""

import json
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shardmake.core.run_folder import read_bytes
from shardmake.run.record import RunFile


class MetricsRecord(BaseModel):
    """A part of a line; fields that it does not know are ignored."""

    model_config = ConfigDict(frozen=True)


class DeviceMemory(MetricsRecord):
    """Peak bytes of the caching allocator on rank 0's GPU."""

    allocated: int = Field(description="Held by tensors.")
    reserved: int = Field(description="Held by the allocator.")
    device: int | None = Field(None, description="In use on the GPU by all programs when the line was written.")


class MeanRewards(MetricsRecord):
    """Means over the answers of a training on preferences, since the line before or of an evaluation.

    The reward of an answer is beta times the difference of its log-probability from the reference model's.
    """

    chosen: float = Field(description="Reward of the chosen or desirable answers.")
    rejected: float = Field(description="Reward of the rejected or undesirable answers.")
    margins: float = Field(description="Difference of the two.")


class Rewards(MeanRewards):
    """Means over pairs of answers."""

    accuracies: float = Field(description="Part of the pairs whose chosen answer has the larger reward, 0 to 1.")


class RewardScores(MetricsRecord):
    """Means over the batches of a reward model's training, since the line before or of an evaluation."""

    accuracy: float = Field(description="Part of the pairs whose chosen answer has the larger reward, 0 to 1.")
    margin: float = Field(description="Reward of the chosen answer less that of the rejected one.")
    min_reward: float = Field(description="Smallest reward of a batch.")
    mean_reward: float = Field(description="Mean reward.")
    max_reward: float = Field(description="Largest reward of a batch.")


class MetricsLine(MetricsRecord):
    """One line of metrics. A script need not write more than ``step``, and may write fields of its own."""

    step: int = Field(description="Optimizer steps done.")
    time: float | None = Field(None, description="Unix time.")
    attempt: int | None = Field(None, description="Number of the attempt.")
    loss: float | None = Field(None, description="Mean training loss since the line before.")
    learning_rate: float | None = Field(None, description="Learning rate of the step.")
    grad_norm: float | None = Field(None, description="Gradient norm before clipping.")
    eval_loss: float | None = Field(None, description="Evaluation loss after the step.")
    rewards: Rewards | MeanRewards | None = Field(None, description="Of the training, for the objectives dpo and kto.")
    eval_rewards: Rewards | MeanRewards | None = Field(None, description="Of the evaluation, for the same objectives.")
    kl: float | None = Field(
        None, description="Estimated KL divergence from the reference model in nats, for the objective kto."
    )
    reward_scores: RewardScores | None = Field(None, description="Of the training, for the objective reward.")
    eval_reward_scores: RewardScores | None = Field(None, description="Of the evaluation, for the objective reward.")
    tokens: int | None = Field(None, description="Tokens of all ranks since step 0, padding included.")
    tokens_per_second: float | None = Field(None, description="Rate of all ranks since the line before.")
    memory: DeviceMemory | None = Field(None, description="None on a CPU.")

    def as_text(self) -> str:
        """Return the line as it is appended to the file; JSON's numbers include NaN and Infinity here."""
        return json.dumps(self.model_dump(exclude_none=True)) + "\n"


def parse_metrics(text: str) -> list[MetricsLine]:
    """Return the valid lines of ``text``. A kill may cut a line short, so invalid lines are skipped."""
    return [line for line in map(parse_line, text.splitlines()) if line is not None]


def parse_line(text: str) -> MetricsLine | None:
    """Return a line of metrics, or None if it is invalid."""
    try:
        return MetricsLine.model_validate_json(text)
    except ValidationError:
        return None


def read_metrics(path: Path) -> list[MetricsLine]:
    """Return the valid lines of the file at ``path``; none if it does not exist."""
    return parse_metrics(read_bytes(path).decode(errors="replace")) if path.exists() else []


LOSS_WINDOW = "loss_window.json"


class LossWindow(RunFile):
    """The losses that were not logged yet when a checkpoint was saved."""

    logged_step: int = Field(description="Last step whose loss was logged, 0 before the first.")
    sums: list[float] = Field(description="Sum of the losses of the steps since then, by rank.")

    def own_sum(self, rank: int, world_size: int) -> float:
        """Return the sum of ``rank``; the mean of all ranks if another number of ranks saved the checkpoint."""
        return self.sums[rank] if world_size == len(self.sums) else sum(self.sums) / len(self.sums)
