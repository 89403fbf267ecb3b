"""The file with the log-probabilities of the reference model: when it is used, computed again, and demanded."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from shardmake.core.errors import CheckpointError
from shardmake.train.preferences import WithReference, read_log_probs

NAMES = ("ref_chosen_logps", "ref_rejected_logps")
STORED = {"train": torch.tensor([[-1.0, -2.5], [-3.0, -4.0]]), "eval": torch.tensor([[-5.0, -6.0]])}


def splits(train: int = 2) -> dict[str, WithReference]:
    return {
        "train": WithReference([{"prompt_ids": [n]} for n in range(train)], NAMES),
        "eval": WithReference([{"prompt_ids": [9]}], NAMES),
    }


@pytest.mark.parametrize("step", [0, 4])
def test_what_was_computed_is_read_and_each_example_has_that_of_its_answers(tmp_path: Path, step: int) -> None:
    save_file(STORED, tmp_path / "r.safetensors")
    found = read_log_probs(tmp_path / "r.safetensors", splits(), step)
    assert found is not None and found.keys() == STORED.keys()
    assert all(torch.equal(found[name], values) for name, values in STORED.items())
    split = splits()["train"]
    split.log_probs = STORED["train"]
    assert split[0] == {"prompt_ids": [0], "ref_chosen_logps": -1.0, "ref_rejected_logps": -2.5}


@pytest.mark.parametrize(("damage", "train", "message"), [
    (lambda file: file.unlink(), 2, "No such file"), (lambda file: file.write_bytes(file.read_bytes()[:-3]), 2, r"\w+"),
    (lambda file: None, 3, "belongs to other data"),
], ids=["missing", "cut", "other data"])  # fmt: skip
def test_without_a_whole_file_only_step_1_may_follow(tmp_path: Path, damage: object, train: int, message: str) -> None:
    """Later the trained model is not the reference any more."""
    file = tmp_path / "r.safetensors"
    save_file(STORED, file)
    assert callable(damage)
    damage(file)
    assert read_log_probs(file, splits(train), 0) is None
    with pytest.raises(CheckpointError, match=rf"r\.safetensors\. .*{message}.*has 4 steps\. Restore the file"):
        read_log_probs(file, splits(train), 4)
