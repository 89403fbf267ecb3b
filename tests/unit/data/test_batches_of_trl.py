"""Batches of examples that are longer than a sequence equal those that TRL makes of the same rows."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from transformers import LlamaConfig
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, RewardConfig, RewardTrainer
from trl.trainer import dpo_trainer, kto_trainer, reward_trainer

from shardmake.data import prepare
from shardmake.data.dataset import PreferenceCollator, Preferences, WithMismatched
from shardmake.run.paths import RunDir
from tests.unit.data.test_encode import PLAIN, chat, make_tokenizer
from tests.unit.plans import make_run

BATCH, PAD = 4, 3
CONFIGS: dict[str, Any] = {"dpo": DPOConfig, "kto": KTOConfig, "reward": RewardConfig}
TRAINERS: dict[str, Any] = {"dpo": DPOTrainer, "kto": KTOTrainer, "reward": RewardTrainer}
THEIR_COLLATORS: dict[str, Callable[[int], Any]] = {
    "dpo": lambda length: dpo_trainer.DataCollatorForPreference(PAD, length),
    "kto": lambda length: kto_trainer.DataCollatorForUnpairedPreference(PAD, length),
    "reward": lambda length: reward_trainer.DataCollatorForPreference(PAD),
}


@pytest.mark.parametrize("as_chat", [False, True], ids=["text", "chat"])
@pytest.mark.parametrize("length", [9, 19])
@pytest.mark.parametrize("objective", ["dpo", "kto", "reward"])
def test_batches_equal_those_of_trl(tmp_path: Path, objective: str, length: int, as_chat: bool) -> None:
    """Many rows are longer than a sequence. TRL cuts what its collators put together, or drops the row of a reward."""
    rows = [_row(number, objective, length, as_chat=as_chat) for number in range(62)]
    theirs, ours = _of_trl(rows, objective, length), _of_stage(rows, objective, length, tmp_path)
    assert 1 < len(ours) == len(theirs), "with a remainder of a batch, and without the rows that are dropped"
    for batch, expected in zip(ours, theirs, strict=True):
        assert sorted(batch) == sorted(expected)
        for name, values in expected.items():
            assert torch.equal(batch[name], values), name


def _row(number: int, objective: str, length: int, *, as_chat: bool) -> dict[str, Any]:
    """Return an example. Two answers differ from their first token on, because pairs of equal ones are dropped."""
    draw, most = random.Random(f"{number} {length}"), length // 2 + 1 if objective == "reward" else length

    def words(role: str, first: str = "") -> Any:
        text = first + "".join(draw.choices("abcdef", k=draw.randint(1, most)))
        return chat(f"{role}:{text}") if as_chat else text

    if objective == "kto":
        return {"prompt": words("u"), "completion": words("a"), "label": draw.random() < 0.5}
    return {"prompt": words("u"), "chosen": words("a", "x"), "rejected": words("a", "y")}


def _of_trl(rows: list[dict[str, Any]], objective: str, length: int) -> list[dict[str, Any]]:
    tokenizer, kind = make_tokenizer(PLAIN), TRAINERS[objective]
    trainer: Any = kind.__new__(kind)
    trainer.calculate_KL, trainer._tokenizer, trainer.desirable_weight, trainer.undesirable_weight = (
        True,
        tokenizer,
        1,
        1,
    )
    arguments = CONFIGS[objective](
        output_dir="unused", per_device_train_batch_size=BATCH, max_length=length, use_cpu=True, bf16=False
    )
    found = trainer._prepare_dataset(datasets.Dataset.from_list(rows), tokenizer, arguments, "train")
    return _batches([found[number] for number in range(len(found))], THEIR_COLLATORS[objective](length))


def _of_stage(rows: list[dict[str, Any]], objective: str, length: int, folder: Path) -> list[dict[str, Any]]:
    tokenizer, file = make_tokenizer(PLAIN), folder / "rows.jsonl"
    tokenizer.save_pretrained(folder / "model")
    LlamaConfig(vocab_size=len(tokenizer)).save_pretrained(folder / "model")
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"train": str(file), "eval": str(file), "order": "given"}
    run = make_run(model=str(folder / "model"), data=data, objective=objective, packing=False, sequence_length=length)
    prepare(run, rundir := RunDir(folder / "run"))
    examples = Preferences(rundir.data, "train")
    collate = PreferenceCollator(objective, length, PAD)
    return _batches(WithMismatched(examples, BATCH) if objective == "kto" else examples, collate)


def _batches(examples: Any, collate: Callable[[Any], dict[str, Any]]) -> list[dict[str, Any]]:
    rows = [examples[number] for number in range(len(examples))]
    return [collate(rows[start : start + BATCH]) for start in range(0, len(rows), BATCH)]
