"""Every optimizer step gets the same samples for any number of ranks and any micro batch size."""

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.data_loader import prepare_data_loader
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler
from transformers import Trainer, TrainingArguments, default_data_collator

from shardmake.train.sharded_trainer import WholeBatches, _NextRepeated

GLOBAL_BATCH = 12
SPLITS = [(1, 12, 1), (1, 1, 12), (2, 3, 2), (3, 2, 2), (4, 3, 1), (4, 1, 3), (6, 2, 1)]


def steps(
    data: Any, ranks: int, micro: int, accumulation: int, epochs: int = 2, strategy: str = "random"
) -> list[list[int]]:
    """Return the samples of each optimizer step, as Trainer and accelerate distribute them."""
    sampler = SequentialSampler if strategy == "sequential" else RandomSampler
    loaders = [
        prepare_data_loader(
            DataLoader(data, batch_size=micro, sampler=sampler(data)), num_processes=ranks, process_index=rank,
            put_on_device=False, use_seedable_sampler=True, data_seed=7, device="cpu",
        )
        for rank in range(ranks)
    ]  # fmt: skip
    found = []
    for epoch in range(epochs):
        for loader in loaders:
            loader.set_epoch(epoch)
        if isinstance(data, WholeBatches):
            data.epoch = epoch
        batches_of_ranks = [[batch.tolist() for batch in loader.base_dataloader] for loader in loaders]
        for at in range(0, len(batches_of_ranks[0]), accumulation):
            found.append(
                sorted(n for rank in batches_of_ranks for batch in rank[at : at + accumulation] for n in batch)
            )
    return found


@pytest.mark.parametrize("length", [5, 36, 41, 47])
def test_every_split_gets_the_same_samples(length: int) -> None:
    data = WholeBatches(range(length), GLOBAL_BATCH)
    reference = steps(data, *SPLITS[0])
    assert [len(step) for step in reference] == [GLOBAL_BATCH] * (2 * len(data) // GLOBAL_BATCH)
    assert set(range(length)) == {n for step in reference[: len(reference) // 2] for n in step}
    assert length < GLOBAL_BATCH or reference[0] != reference[len(reference) // 2], "each epoch has its own order"
    for split in SPLITS[1:]:
        assert steps(data, *split) == reference, split


def test_without_it_an_epochs_end_depends_on_the_split() -> None:
    assert len({str(steps(range(41), *split)) for split in SPLITS}) > 1


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("length", [36, 41])
def test_the_order_of_the_data_is_that_of_the_steps_for_every_split(length: int, split: tuple[int, int, int]) -> None:
    """Step k takes samples k G to (k + 1) G, in every epoch; the last one is filled, from the start and then on."""
    data = WholeBatches(range(length), GLOBAL_BATCH)
    whole = [list(range(at, min(at + GLOBAL_BATCH, length))) for at in range(0, length, GLOBAL_BATCH)]
    missing = GLOBAL_BATCH * len(whole) - length
    expected = [*whole[:-1], sorted([*whole[-1], *range(missing)])]
    expected += [*whole[:-1], sorted([*whole[-1], *range(missing, 2 * missing)])]
    assert steps(data, *split, strategy="sequential") == expected


def test_over_the_epochs_each_sample_is_repeated_equally_often() -> None:
    """Also after a resume in the middle of an epoch."""
    data = WholeBatches(range(5), 3)
    seen = Counter[int]()
    callback = _NextRepeated(SimpleNamespace(train_dataset=data))
    for step in (0, 2, 4, 7, 9):
        callback.on_epoch_begin(None, SimpleNamespace(global_step=step), None)
        assert data.epoch == step // 2
        seen.update(data[i] for i in range(len(data)))
    assert seen == dict.fromkeys(range(5), 6)


class Numbers(torch.nn.Module):
    """A model that records the numbers that it gets in training."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen: list[int] = []

    def forward(self, number: torch.Tensor) -> dict[str, torch.Tensor]:
        self.seen += number.tolist()
        return {"loss": (self.weight * number).float().mean()}


def trained(folder: Path, resume_from: Path | None = None, **arguments: Any) -> list[int]:
    """Return the numbers that Trainer takes in three epochs of 5 with global batches of 2."""
    data = WholeBatches([{"number": number} for number in range(5)], 2)
    settings = TrainingArguments(
        folder, num_train_epochs=3, per_device_train_batch_size=2, report_to="none", use_cpu=True, **arguments
    )
    model = Numbers()
    trainer = Trainer(model, settings, train_dataset=data, data_collator=default_data_collator)
    trainer.add_callback(_NextRepeated(trainer))
    trainer.train(resume_from_checkpoint=resume_from and str(resume_from))
    return model.seen


def test_trainer_repeats_other_samples_in_each_epoch_and_the_same_after_a_resume(tmp_path: Path) -> None:
    whole = trained(tmp_path, save_steps=4)
    assert [sorted(whole[at : at + 6]) for at in (0, 6, 12)] == [sorted([*range(5), extra]) for extra in (0, 1, 2)]
    assert trained(tmp_path / "again", tmp_path / "checkpoint-4", save_strategy="no") == whole[8:]
