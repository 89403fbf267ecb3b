"""The result of an evaluation, ``evaluation.json``."""

from typing import ClassVar

from pydantic import Field

from shardmake.run.metrics import MeanRewards, Rewards
from shardmake.run.record import RunFile, RunRecord, optional


def format_perplexity(value: float | None, decimals: int = 2) -> str:
    """Return a perplexity for a reader: a large one in scientific notation, None as ``above 1e+308``."""
    if value is None:
        return "above 1e+308"
    return f"{value:,.{decimals}f}" if value < 10**9 else f"{value:.2e}"


class LossScore(RunRecord):
    """Scores of some held-out examples."""

    loss: float = Field(description="Mean loss, nats per token with loss.")
    perplexity: float | None = Field(
        description="Its exponential; null for a loss above 709.78, whose exponential is not a floating-point number."
    )
    tokens: int = Field(description="Tokens with loss.")
    exact: float = Field(description="Share of the examples that greedy decoding answers word for word.")

    def perplexity_text(self, decimals: int = 2) -> str:
        """Return the perplexity for a reader."""
        return format_perplexity(self.perplexity, decimals)


class LengthScore(LossScore):
    """Scores of the examples of similar length."""

    up_to: int | None = Field(description="Most tokens of an example; None: no limit.")


class SourceScore(LossScore):
    """Scores of the held-out examples of one of several sources."""

    name: str = Field(description="Name of the source.")


class ModelScore(LossScore):
    """Scores of one model."""

    by_length: list[LengthScore] = Field(description="The same by the length of the example.")
    by_source: list[SourceScore] = optional([], "The same by the source of the examples, if there are several.")


class Sample(RunRecord):
    """One prompt and the models' answers."""

    prompt: str = Field(description="The prompt.")
    base: str = Field(description="Answer of the base model.")
    tuned: str = Field(description="Answer of the tuned model.")


class TaskScore(RunRecord):
    """One metric of a task of lm_eval."""

    task: str = Field(description="Name of the task.")
    metric: str = Field(description="Name of the metric.")
    base: float | None = Field(description="Value of the base model; null if it is not a finite number.")
    tuned: float | None = Field(description="Value of the tuned model; null if it is not a finite number.")

    def texts(self) -> tuple[str, str]:
        """Return the values of the base and the tuned model for a reader."""
        base, tuned = ("not finite" if value is None else f"{value:.4f}" for value in (self.base, self.tuned))
        return base, tuned


class PreferenceScore(RunRecord):
    """Scores of held-out pairs of a training on preferences."""

    pairs: int = Field(description="Pairs of answers.")
    base_accuracy: float = Field(
        description="Part of the pairs whose chosen answer the base model finds likelier, 0 to 1."
    )
    tuned_accuracy: float = Field(description="The same for the tuned model.")
    rewards: Rewards = Field(description="Means over the pairs; the reference is the base model.")


class CompletionScore(RunRecord):
    """Scores of held-out completions of a training on completions with labels."""

    desirable: int = Field(description="Desirable completions.")
    undesirable: int = Field(description="Undesirable completions.")
    rewards: MeanRewards = Field(description="Means over the completions; the reference is the base model.")
    accuracy: float = Field(
        description="Part of all pairs of a desirable and an undesirable completion in which the desirable one has the "
        "larger reward, 0 to 1."
    )


class RewardModelScore(RunRecord):
    """Rewards that a reward model gives to held-out pairs. Its base model has no head for rewards, so it gives none."""

    pairs: int = Field(description="Pairs of answers.")
    accuracy: float = Field(description="Part of the pairs whose chosen answer has the larger reward, 0 to 1.")
    margin: float = Field(description="Mean reward of the chosen answers less that of the rejected ones.")
    chosen: float = Field(description="Mean reward of the chosen answers.")
    rejected: float = Field(description="Mean reward of the rejected answers.")
    smallest: float = Field(description="Smallest reward.")
    largest: float = Field(description="Largest reward.")


class EvaluationResult(RunFile):
    """``evaluation.json``: the base and the tuned model on the evaluation split."""

    made_by: ClassVar[str] = "shardmake evaluate NAME"
    sequences: int = Field(description="Evaluation sequences.")
    tokens: int = Field(description="Tokens with loss; for a reward model, tokens that it read.")
    backend: str = Field(description="How the models were run.")
    ranks: int = Field(description="Processes that shared the sequences.")
    base: ModelScore | None = Field(description="Scores of the base model; None if the tuned one is a reward model.")
    tuned: ModelScore | None = Field(description="Scores of the tuned model; None for a reward model.")
    preferences: PreferenceScore | None = optional(None, "Scores of the pairs, for the objective dpo.")
    completions: CompletionScore | None = optional(
        None, "Scores of the completions, for the objective kto; None if all have the same label."
    )
    reward_model: RewardModelScore | None = optional(None, "Scores of a reward model.")
    samples: list[Sample] = Field(description="Prompts with both answers.")
    tasks: list[TaskScore] = Field(description="Tasks of lm_eval.")

    @property
    def scores(self) -> tuple[ModelScore, ModelScore] | None:
        """Return the scores of the base and the tuned model as language models; None for a reward model."""
        return None if self.base is None or self.tuned is None else (self.base, self.tuned)

    @property
    def has_exact(self) -> bool:
        """Return if a model answers an example word for word; with long answers, none does."""
        return max((score.exact for score in self.scores or ()), default=0) > 0

    @property
    def margin(self) -> float | None:
        """Return the mean difference of the rewards of right and wrong answers."""
        rewards = self.preferences or self.completions
        return self.reward_model.margin if self.reward_model else rewards.rewards.margins if rewards else None

    @property
    def shares(self) -> dict[str, float | None]:
        """Return the part, 0 to 1, of the held-out examples or pairs that the tuned model gets right, by its name."""
        rewards = self.preferences.rewards.accuracies if self.preferences else None
        return {
            "exact answers": self.tuned.exact if self.tuned and self.has_exact else None,
            "preference accuracy": self.reward_model.accuracy if self.reward_model else None,
            "reward accuracy": self.completions.accuracy if self.completions and rewards is None else rewards,
        }
