"""Compare both answers of each held-out pair: by their log-probabilities under two models, or by their rewards."""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import isfinite
from statistics import fmean
from typing import TYPE_CHECKING

import torch
from torch.nn.utils.rnn import pad_sequence

from shardmake.core.errors import ModelError
from shardmake.evaluate.losses import LossPerToken
from shardmake.evaluate.scores import IGNORED, Example, pad_examples, smaller_after_out_of_memory
from shardmake.run.evaluation import CompletionScore, PreferenceScore, RewardModelScore
from shardmake.run.metrics import MeanRewards, Rewards

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Answers:
    """Each answer as an example: number 2n is the chosen answer of pair n, number 2n + 1 the rejected one.

    Of completions with labels, each is an example.
    """

    def __init__(self, examples: Iterable[Mapping[str, list[int]]], sequence_length: int) -> None:
        """Cut prompt and answer to ``sequence_length`` tokens, as the training does."""
        self._examples = [
            (example["prompt_ids"], example[answer][: max(0, sequence_length - len(example["prompt_ids"]))])
            for example in examples
            for answer in ("chosen_ids", "rejected_ids", "completion_ids")
            if answer in example
        ]

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, number: int) -> Example:
        """Return prompt and answer; the tokens of the answer have labels."""
        prompt, answer = self._examples[number]
        ids = torch.tensor([*prompt, *answer])
        labels = torch.tensor([*[IGNORED] * len(prompt), *answer])
        return {"input_ids": ids, "labels": labels, "position_ids": torch.arange(len(ids))}

    def lengths(self) -> list[int]:
        """Return the tokens of each prompt with its answer."""
        return [len(prompt) + len(answer) for prompt, answer in self._examples]


def score_answers(network: "PreTrainedModel", answers: Answers, passes: Sequence[Sequence[int]]) -> dict[int, float]:
    """Return the log-probability of each answer in ``passes``, in nats and by number, summed over its tokens.

    Passes without answers and errors are those of `shardmake.evaluate.scores.score`.
    """
    with torch.inference_mode():
        measure = LossPerToken(network, answers[0]["input_ids"])

    def log_probabilities(rows: Sequence[Example]) -> torch.Tensor:
        batch = pad_examples(rows)
        labels = batch.pop("labels")
        losses = measure({name: tensor.to(network.device) for name, tensor in batch.items()}, labels).losses
        return torch.bincount((labels[:, 1:] != IGNORED).nonzero()[:, 0], losses.double().cpu(), len(rows)).neg()

    return _measure(log_probabilities, answers, passes)


def rate_answers(network: "PreTrainedModel", answers: Answers, passes: Sequence[Sequence[int]]) -> dict[int, float]:
    """Return the reward of each answer in ``passes`` by number, from a model with one output.

    The model reads it at the last token that is not padding. Passes without answers and errors are those of
    `shardmake.evaluate.scores.score`.
    """
    padding = network.config.get_text_config().pad_token_id

    def rewards(rows: Sequence[Example]) -> torch.Tensor:
        texts = [row["input_ids"] for row in rows]
        ids = pad_sequence(texts, batch_first=True, padding_value=padding).to(network.device)
        mask = pad_sequence([torch.ones_like(text) for text in texts], batch_first=True).to(network.device)
        return network(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, 0].double().cpu()

    return _measure(rewards, answers, passes)


def _measure(
    function: Callable[[Sequence[Example]], torch.Tensor], answers: Answers, passes: Sequence[Sequence[int]]
) -> dict[int, float]:
    found: dict[int, float] = {}
    for numbers in passes:
        rows = [answers[number] for number in numbers or [0]]
        longest = max(len(row["input_ids"]) for row in rows)
        with torch.inference_mode(), smaller_after_out_of_memory(len(rows), longest):
            found.update(zip(numbers, function(rows).tolist(), strict=False))  # a pass without answers has a stand-in
    return found


def score_rewards(rewards: Mapping[int, float]) -> RewardModelScore:
    """Return the scores of pairs from the rewards of their answers, by number.

    Raises `ModelError` if a reward is not finite.
    """
    if bad := [reward for reward in rewards.values() if not isfinite(reward)]:
        raise ModelError(
            f"Evaluation failed: {len(bad):,} of {len(rewards):,} rewards are not finite, such as {bad[0]}. The "
            "model's weights are damaged or the training diverged. Look at the losses with shardmake status NAME, and "
            "train again with a lower learning_rate."
        )
    chosen, rejected, margin = _means(rewards)
    return RewardModelScore(
        pairs=len(rewards) // 2,
        accuracy=_accuracy(rewards),
        margin=margin,
        chosen=chosen,
        rejected=rejected,
        smallest=min(rewards.values()),
        largest=max(rewards.values()),
    )


def compare_answers(base: Mapping[int, float], tuned: Mapping[int, float], beta: float) -> PreferenceScore:
    """Return the scores of pairs from the log-probabilities of their answers under both models.

    A reward is ``beta * (tuned - base)``, that of Rafailov et al. (2023), with the base model as the reference.
    """
    rewards = {number: beta * (value - base[number]) for number, value in tuned.items()}
    chosen, rejected, margins = _means(rewards)
    accuracies = _accuracy(rewards)
    return PreferenceScore(
        pairs=len(rewards) // 2,
        base_accuracy=_accuracy(base),
        tuned_accuracy=_accuracy(tuned),
        rewards=Rewards(chosen=chosen, rejected=rejected, margins=margins, accuracies=accuracies),
    )


def compare_completions(
    base: Mapping[int, float], tuned: Mapping[int, float], labels: Sequence[bool], beta: float
) -> CompletionScore | None:
    """Return the scores of completions from their log-probabilities under both models; None without both labels.

    Rewards are those of `compare_answers`.
    """
    rewards = [beta * (tuned[number] - base[number]) for number in range(len(labels))]
    desirable = [reward for reward, label in zip(rewards, labels, strict=True) if label]
    undesirable = sorted(reward for reward, label in zip(rewards, labels, strict=True) if not label)
    if not (desirable and undesirable):
        return None
    smaller = sum(bisect_left(undesirable, reward) for reward in desirable)
    chosen, rejected = fmean(desirable), fmean(undesirable)
    return CompletionScore(
        desirable=len(desirable),
        undesirable=len(undesirable),
        rewards=MeanRewards(chosen=chosen, rejected=rejected, margins=chosen - rejected),
        accuracy=smaller / (len(desirable) * len(undesirable)),
    )


def _means(values: Mapping[int, float]) -> tuple[float, float, float]:
    """Return the means of all chosen and of all rejected answers, and their difference."""
    chosen, rejected = (fmean(values[number] for number in range(first, len(values), 2)) for first in (0, 1))
    return chosen, rejected, chosen - rejected


def _accuracy(values: Mapping[int, float]) -> float:
    """Return the part of the pairs whose chosen answer has the larger value."""
    return fmean(values[number] > values[number + 1] for number in range(0, len(values), 2))
