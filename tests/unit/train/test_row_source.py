"""Ranks that each shuffle all rows are recognised by what their data loaders draw from."""

import random
from typing import Any

import numpy
import pytest
import torch
from accelerate import skip_first_batches
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, TensorDataset

from shardmake.train.row_source import digest_source, find_shared_source

ROWS: list[Any] = [{"input_ids": [row, row + 1], "text": str(row)} for row in range(20)]


def shuffled(rows: Any, **options: Any) -> str:
    return digest_source(DataLoader(rows, batch_size=2, shuffle=True, **options))


def test_the_same_rows_have_one_digest_in_any_order() -> None:
    orders = [torch.Generator().manual_seed(seed) for seed in (1, 2)]
    assert len({shuffled(ROWS, generator=order) for order in orders}) == 1
    assert shuffled(ROWS, num_workers=2, drop_last=True) == shuffled(list(ROWS)) != ""
    assert digest_source(skip_first_batches(DataLoader(ROWS, batch_size=2, shuffle=True), 1)) == shuffled(ROWS)
    array = numpy.arange(40).reshape(20, 2)
    assert shuffled(array) == shuffled(array.copy()) != ""


@pytest.mark.parametrize(
    "others",
    [ROWS[:-1], ROWS[10:] + ROWS[:10], [*ROWS[:-1], {}], TensorDataset(torch.arange(20))],
    ids=["fewer", "another part", "another row", "another kind"],
)
def test_other_rows_have_another_digest(others: Any) -> None:
    assert shuffled(others) not in ("", shuffled(ROWS))


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(ROWS)


class Broken(list[Any]):
    def __getitem__(self, index: Any) -> Any:
        raise OSError("only a worker can read this")


@pytest.mark.parametrize(
    "loader",
    [
        None,
        DataLoader(ROWS),
        DataLoader(ROWS, sampler=DistributedSampler(ROWS, 2, 0)),  # type: ignore[arg-type]
        DataLoader(ROWS, sampler=RandomSampler(ROWS, replacement=True)),
        DataLoader(Stream()),
        DataLoader(Broken(ROWS), shuffle=True),
    ],
    ids=["none", "in order", "distributed", "with replacement", "stream", "unreadable"],
)
def test_a_loader_that_may_share_the_rows_has_no_digest(loader: Any) -> None:
    assert digest_source(loader) == ""


def test_the_random_numbers_of_the_script_stay_the_same() -> None:
    class Noisy(list[Any]):
        def __getitem__(self, index: Any) -> Any:
            return torch.rand(1), numpy.random.rand(), random.random()

    loader = DataLoader(Noisy(ROWS), shuffle=True)
    torch.manual_seed(0), numpy.random.seed(0), random.seed(0)
    expected = torch.rand(1).item(), numpy.random.rand(), random.random()
    torch.manual_seed(0), numpy.random.seed(0), random.seed(0)
    assert digest_source(loader)
    assert (torch.rand(1).item(), numpy.random.rand(), random.random()) == expected


def test_ranks_of_one_group_may_share_their_source() -> None:
    assert find_shared_source(["a", "b", "a"], 1) == (0, 2)
    assert find_shared_source(["a", "a", "b", "b"], 2) is None
    assert find_shared_source(["a", "a", "a", "a"], 2) == (0, 2)
    assert find_shared_source(["", ""], 1) is None
