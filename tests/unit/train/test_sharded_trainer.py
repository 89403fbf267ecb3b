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

from shardmake.train.sharded_trainer import WholeBatches, _NextEpoch

GLOBAL_BATCH = 12
SPLITS = [(1, 12, 1), (1, 1, 12), (2, 3, 2), (3, 2, 2), (4, 3, 1), (4, 1, 3), (6, 2, 1)]


def steps(data: Any, ranks: int, micro: int, passes: int, epochs: int = 2, strategy: str = "random") -> list[list[int]]:
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
        for at in range(0, len(batches_of_ranks[0]), passes):
            taken = [batch for rank in batches_of_ranks for batch in rank[at : at + passes]]
            found.append(sorted(n for batch in taken for n in batch))
    return found


@pytest.mark.parametrize("length", [5, 36, 41, 47])
def test_every_split_gets_the_same_samples(length: int) -> None:
    data = WholeBatches(range(length), GLOBAL_BATCH)
    reference = steps(data, *SPLITS[0])
    assert [len(step) for step in reference] == [GLOBAL_BATCH] * (2 * len(data) // GLOBAL_BATCH)
    once = [n for step in reference[: len(reference) // 2] for n in step]
    assert len(set(once)) == min(length, GLOBAL_BATCH * (length // GLOBAL_BATCH) or length)
    assert length < GLOBAL_BATCH or reference[0] != reference[len(reference) // 2], "each epoch has its own order"
    for split in SPLITS[1:]:
        assert steps(data, *split) == reference, split


def test_without_it_an_epochs_end_depends_on_the_split() -> None:
    assert len({str(steps(range(41), *split)) for split in SPLITS}) > 1


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("length", [36, 41])
def test_the_order_of_the_data_is_that_of_the_steps_for_every_split(length: int, split: tuple[int, int, int]) -> None:
    """Step k takes samples k G to (k + 1) G; an epoch leaves out those that fill no batch, the next one others."""
    data = WholeBatches(range(length), GLOBAL_BATCH)
    rest = length % GLOBAL_BATCH
    epochs = [[*range(length - rest)], [*range(rest, length)]] if rest else [[*range(length)]] * 2
    expected = [epoch[at : at + GLOBAL_BATCH] for epoch in epochs for at in range(0, length - rest, GLOBAL_BATCH)]
    assert steps(data, *split, strategy="sequential") == expected


@pytest.mark.parametrize(("length", "batch", "uses"), [(5, 3, 3), (5, 7, 7), (6, 3, 5)])
def test_over_the_epochs_each_sample_is_used_equally_often(length: int, batch: int, uses: int) -> None:
    """Also after a resume in the middle of an epoch."""
    data = WholeBatches(range(length), batch)
    seen = Counter[int]()
    callback = _NextEpoch(SimpleNamespace(train_dataset=data))
    for epoch in range(5):
        callback.on_epoch_begin(None, SimpleNamespace(global_step=data.steps * (epoch + 1) - 1), None)
        assert data.epoch == epoch
        samples = [data[i] for i in range(len(data))]
        assert batch > length or samples == sorted(set(samples)), "in the order of the data, none twice"
        seen.update(samples)
    assert seen == dict.fromkeys(range(length), uses)


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
    arguments |= {"num_train_epochs": 3, "per_device_train_batch_size": 2}
    model, settings = Numbers(), TrainingArguments(folder, report_to="none", use_cpu=True, **arguments)
    trainer = Trainer(model, settings, train_dataset=data, data_collator=default_data_collator)
    trainer.add_callback(_NextEpoch(trainer))
    trainer.train(resume_from_checkpoint=resume_from and str(resume_from))
    return model.seen


def test_trainer_leaves_out_other_samples_in_each_epoch_and_the_same_after_a_resume(tmp_path: Path) -> None:
    whole = trained(tmp_path, save_steps=3)
    assert [{*range(5)} - {*whole[at : at + 4]} for at in (0, 4, 8)] == [{4}, {0}, {1}]
    assert trained(tmp_path / "again", tmp_path / "checkpoint-3", save_strategy="no") == whole[6:]
