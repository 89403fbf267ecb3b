"""Log-probabilities of both answers of a pair against the model's own logits, and the scores made from them."""

import math
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForSequenceClassification

from shardmake.core.errors import ModelError
from shardmake.evaluate.preferences import (
    Answers,
    compare_answers,
    compare_completions,
    rate_answers,
    score_answers,
    score_rewards,
)
from shardmake.evaluate.scores import plan_passes
from tests.unit.evaluate.test_losses import make_network

PAIRS = [
    {"prompt_ids": [5, 6, 7], "chosen_ids": [8, 9], "rejected_ids": [10, 11, 12, 13]},
    {"prompt_ids": [20, 21], "chosen_ids": [22, 23, 24, 25, 26, 27], "rejected_ids": [28]},
    {"prompt_ids": [30, 31, 32, 33], "chosen_ids": [34], "rejected_ids": [35, 36]},
]
LENGTH = 7


def test_answers_alternate_and_are_cut_as_in_training() -> None:
    answers = Answers(PAIRS, LENGTH)
    assert len(answers) == 6 and answers.lengths() == [5, 7, 7, 3, 5, 6]
    assert answers[2]["input_ids"].tolist() == [20, 21, 22, 23, 24, 25, 26]
    assert answers[3]["labels"].tolist() == [-100, -100, 28]
    completions = Answers([{"prompt_ids": [5, 6], "completion_ids": [7, 8, 9], "label": [True]}], 4)
    assert completions.lengths() == [4] and completions[0]["labels"].tolist() == [-100, -100, 7, 8]


def log_probability(network: Any, ids: torch.Tensor, labels: torch.Tensor) -> float:
    probable = network(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
    return float(probable.gather(1, ids[1:, None])[:, 0][labels[1:] != -100].sum())


def make_reward_model() -> Any:
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    torch.manual_seed(0)
    config = LlamaConfig(**sizes, num_attention_heads=2, pad_token_id=0, num_labels=1)
    return LlamaForSequenceClassification(config).eval()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("measure", "make", "alone"), [
    (score_answers, make_network, log_probability),
    (rate_answers, make_reward_model, lambda network, ids, _: network(input_ids=ids[None]).logits.item()),
])  # fmt: skip
def test_what_is_measured_is_that_of_each_answer_alone(ranks: int, measure: Any, make: Any, alone: Any) -> None:
    network, answers = make(), Answers(PAIRS, LENGTH)
    passes = plan_passes(answers.lengths(), 16, ranks)
    found: dict[int, float] = {}
    for rank in range(ranks):
        found |= measure(network, answers, [*passes[rank::ranks], []])
    assert sorted(found) == list(range(6))
    for number in range(6):
        with torch.inference_mode():
            expected = alone(network, answers[number]["input_ids"], answers[number]["labels"])
        assert found[number] == pytest.approx(expected, abs=1e-4 if measure is score_answers else 1e-5)


def test_scores_of_pairs() -> None:
    base = {0: -4.0, 1: -3.0, 2: -5.0, 3: -6.0}
    tuned = {0: -2.0, 1: -5.0, 2: -7.0, 3: -7.0}
    score = compare_answers(base, tuned, beta=0.5)
    assert (score.pairs, score.base_accuracy, score.tuned_accuracy) == (2, 0.5, 0.5)
    assert score.rewards.model_dump() == {"chosen": 0.0, "rejected": -0.75, "margins": 0.75, "accuracies": 0.5}


def test_scores_of_completions_with_labels() -> None:
    """Of the four pairs of a desirable and an undesirable completion, three have the larger reward first."""
    base = {0: -4.0, 1: -3.0, 2: -5.0, 3: -6.0}
    tuned = {0: -2.0, 1: -5.0, 2: -5.5, 3: -6.2}
    score = compare_completions(base, tuned, [True, False, True, False], beta=0.5)
    assert score is not None and (score.desirable, score.undesirable, score.accuracy) == (2, 2, 0.75)
    assert score.rewards.model_dump() == pytest.approx({"chosen": 0.375, "rejected": -0.55, "margins": 0.925})
    assert compare_completions(base, tuned, [True] * 4, beta=0.5) is None


def test_scores_of_a_reward_model() -> None:
    found = score_rewards({0: 2.0, 1: 1.0, 2: -1.0, 3: 0.5})
    assert found.model_dump() == {
        "pairs": 2, "accuracy": 0.5, "margin": -0.25, "chosen": 0.5, "rejected": 0.75, "smallest": -1.0, "largest": 2.0,
    }  # fmt: skip


@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_rewards_that_are_not_finite_are_an_error(reward: float) -> None:
    with pytest.raises(ModelError, match=r"1 of 2 rewards are not finite, such as .*lower learning_rate"):
        score_rewards({0: 1.0, 1: reward})
