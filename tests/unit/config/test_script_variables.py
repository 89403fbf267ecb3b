"""Variables in ``script_args`` are checked when the configuration is read."""

import pytest

from shardmake.config.load import parse_config
from shardmake.core.errors import ConfigError


def read(*words: str) -> None:
    run = {
        "model": "base",
        "data": {"train": "t.jsonl"},
        "sequence_length": 8,
        "global_batch_size": 8,
        "max_steps": 1,
        "learning_rate": 1e-3,
        "script": "train.py",
        "script_args": list(words),
    }
    parse_config({"cluster": "c.yaml", "runs": {"ours": run}}, "config.yaml")


@pytest.mark.parametrize(
    "word", ["$SHARDMAKE_LEARNIG_RATE", "--lr=${SHARDMAKE_LEARNIG_RATE}", "a$SHARDMAKE_LEARNIG_RATE"]
)
def test_an_unknown_variable_is_refused_with_the_nearest_one(word: str) -> None:
    with pytest.raises(ConfigError, match=r"(?s)runs\.ours.*LEARNIG_RATE.*Did you mean 'SHARDMAKE_LEARNING_RATE'\?"):
        read(word)


def test_known_variables_those_of_the_nodes_and_dollars_are_accepted() -> None:
    read("--lr=$SHARDMAKE_LEARNING_RATE", "${SHARDMAKE_OUTPUT}/x", "$HOME", "$$SHARDMAKE_X", "5$", "$1")
