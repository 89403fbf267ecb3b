"""Ranks that read the same rows in orders of their own are found; rows that are in the data twice are no fault."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from datasets import Dataset
from datasets.distributed import split_dataset_by_node
from torch.utils.data import DataLoader, IterableDataset

from shardmake.train.row_overlap import MAX_ROWS, Overlap, RowExchange, find_overlap, rows_until_repeats

Ranks = list[np.ndarray[Any, Any]]
SEEDS = range(10)


def rows(count: int) -> np.ndarray[Any, Any]:
    """Return digests of different rows."""
    return np.random.default_rng(7).permutation(count).astype(np.uint64)


def strided(data: np.ndarray[Any, Any], ranks: int = 2) -> Ranks:
    """Return the part of each rank as DistributedSampler gives it."""
    return [data[rank::ranks] for rank in range(ranks)]


def shuffled(data: np.ndarray[Any, Any], seed: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).permutation(data)


def in_buffer(data: np.ndarray[Any, Any], seed: int, size: int = 100) -> np.ndarray[Any, Any]:
    """Return ``data`` as a stream with a shuffle buffer yields it."""
    random, buffer, found = np.random.default_rng(seed), list(data[:size]), []
    for row in data[size:]:
        place = random.integers(size)
        found.append(buffer[place])
        buffer[place] = row
    return np.array(found, np.uint64)


@pytest.mark.parametrize(
    ("count", "ranks", "part"), [(600, 2, 300), (2000, 4, 500), (20_000, 2, 1458), (200_000, 8, 7373)]
)
def test_ranks_that_shuffle_all_rows_are_found(count: int, ranks: int, part: int) -> None:
    for seed in SEEDS:
        found = find_overlap([shuffled(rows(count), 100 * seed + rank)[:part] for rank in range(ranks)])
        assert found and found.rows == part and found.shared >= 48, seed


def test_a_stream_that_every_rank_shuffles_is_found() -> None:
    found = find_overlap([in_buffer(rows(5000), rank)[:1000] for rank in (0, 1)])
    assert found and (found.one, found.other) == (0, 1) and found.shared > 700


def test_only_the_ranks_that_share_are_named() -> None:
    data = rows(4000)
    parts = [shuffled(data[:2000], 1), data[2000:3000], shuffled(data[:2000], 2), data[3000:]]
    found = find_overlap([part[:700] for part in parts])
    assert found and (found.one, found.other) == (0, 2)


def test_the_same_rows_at_the_same_time_are_found() -> None:
    data = rows(500)
    other = data.copy()
    other[:4] = rows(10**6)[-4:]
    assert find_overlap([data, other]) == Overlap(0, 1, int(np.isin(data, other).sum()), 500)


SOUND: dict[str, Any] = {
    "each row once": lambda seed: strided(shuffled(rows(4000), seed)),
    "all rows twice": lambda seed: strided(shuffled(np.tile(rows(1000), 2), seed)),
    "some rows often": lambda seed: strided(shuffled(np.concatenate([rows(2000), np.tile(rows(30), 20)]), seed)),
    "drawn with replacement": lambda seed: [
        np.random.default_rng(100 * seed + rank).choice(rows(1000), 800) for rank in (0, 1)
    ],
    "weighted with replacement": lambda seed: [
        np.random.default_rng(100 * seed + rank).choice(rows(1000), 800, p=np.arange(1000) / np.arange(1000).sum())
        for rank in (0, 1)
    ],
    "many ranks, all rows twice": lambda seed: strided(shuffled(np.tile(rows(8000), 2), seed), 16),
    "two epochs": lambda seed: [
        np.concatenate(parts)
        for parts in zip(strided(shuffled(rows(1000), seed)), strided(shuffled(rows(1000), seed + 99)), strict=True)
    ],
    "an odd number of rows, again and again in order": lambda seed: strided(np.tile(rows(501), 4)),
    "three copies in order": lambda seed: strided(np.tile(rows(1001), 3)),
    "one copy after the other, in parts": lambda seed: [np.tile(part, 2) for part in np.split(rows(1000), 2)],
    "few different rows": lambda seed: strided(shuffled(np.tile(rows(3), 700), seed)),
}  # fmt: skip


@pytest.mark.parametrize("case", SOUND)
def test_rows_that_are_shared_out_are_no_fault(case: str) -> None:
    for seed in SEEDS:
        ranks = SOUND[case](seed)
        for size in (128, 192, 288, 432, 648, 972, 1458):
            assert find_overlap([part[:size] for part in ranks]) is None, (seed, size)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(9))


def test_rows_are_compared_until_others_may_rightly_have_them() -> None:
    stream = Dataset.from_dict({"row": list(range(100))}).to_iterable_dataset()
    assert rows_until_repeats(DataLoader(list(range(100))), 4) == 25  # type: ignore[arg-type]
    assert rows_until_repeats(DataLoader(stream.shuffle(seed=1)), 4) == MAX_ROWS  # type: ignore[arg-type]
    assert rows_until_repeats(DataLoader(split_dataset_by_node(stream, 0, 4)), 4) is None  # type: ignore[arg-type]
    assert rows_until_repeats(DataLoader(Stream()), 4) is None
    assert rows_until_repeats(None, 4) is None


@pytest.mark.usefixtures("one_rank")
def test_a_rank_sends_its_rows_once_they_are_enough() -> None:
    """The rows of rank 1 are put into the store as that rank would."""
    exchange = RowExchange(1, 200)
    exchange.senders, data = range(2), rows(400)
    assert (exchange.sizes, exchange.collects, exchange.is_done) == ([128, 192], True, False)
    for start in range(0, 240, 4):
        if exchange.collects:
            exchange.add(",".join(f"{row:016x}" for row in data[start : start + 4]))
        assert exchange.compare() is None
    assert exchange.sent == 2 and not exchange.collects
    exchange.store.set("0/1", data[200:328].tobytes())  # type: ignore[arg-type]
    assert exchange.compare() is None and exchange.compared == 1
    exchange.store.set("1/1", shuffled(data[:192], 1).tobytes())  # type: ignore[arg-type]
    assert exchange.compare() == Overlap(0, 1, 192, 192) and exchange.is_done


@pytest.mark.usefixtures("one_rank")
def test_few_rows_and_the_second_rank_of_a_group_send_nothing() -> None:
    assert RowExchange(1, 127).is_done
    exchange = RowExchange(1, MAX_ROWS)
    assert exchange.sizes[0] == 128 and MAX_ROWS * 2 / 3 < exchange.sizes[-1] <= MAX_ROWS
