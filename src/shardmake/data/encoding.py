"""Encode the rows of a source in their order, by several processes, into Arrow files that a later start finds again.

Rows are read, encoded and written in batches, so memory does not depend on the size of the source. A batch has rows of
one split. After `_BATCHES_IN_PART` batches the file of each split is complete; a stage that was killed and starts again
with the same inputs encodes only what follows. Neither changes a byte of the result.
"""

import logging
import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardmake.data.files import RawRow
from shardmake.data.sources import Source, raw_examples

if TYPE_CHECKING:
    import datasets
    import numpy as np
    import pyarrow

logger = logging.getLogger(__name__)
Encode = Callable[[list[RawRow]], Mapping[str, list[Any]]]
_ROWS_IN_BATCH = 100
_BATCHES_IN_PART = 100
_POOL_FROM_ROWS = 5_000
_job: "tuple[Encode, pyarrow.Schema] | None" = None
"""The function and the result's columns of a worker process."""


def encode_source(
    source: Source,
    splits: "Mapping[str, np.ndarray]",
    encode: Encode,
    features: "datasets.Features",
    folder: Path,
    cpus: int,
) -> "dict[str, datasets.Dataset]":
    """Return what ``encode`` makes of the rows of each split, in their order, memory-mapped from ``folder``.

    ``splits`` has for each split which rows of ``source`` belong to it, one boolean a row. Raises what ``encode``
    raises.
    """
    import datasets

    folder.mkdir(parents=True, exist_ok=True)
    batches = _batches(source, splits)
    parts: dict[str, list[datasets.Dataset]] = {split: [] for split in splits}
    total = sum(int(chosen.sum()) for chosen in splits.values())
    progress = _Progress(str(source), total)
    with _Workers(encode, features.arrow_schema, cpus if total > _POOL_FROM_ROWS else 1) as workers:
        for number, first in enumerate(batches):
            files = {split: folder / f"{split}-{number:05d}.arrow" for split in splits}
            part = progress.count(chain([first], islice(batches, _BATCHES_IN_PART - 1)))
            if all(path.exists() for path in files.values()):
                deque(part, maxlen=0)
            else:
                _write_part(workers.encode(part), files, features.arrow_schema)
            for split, path in files.items():
                parts[split].append(datasets.Dataset.from_file(str(path)))
    return {split: datasets.concatenate_datasets(found) for split, found in parts.items()}


def _batches(source: Source, splits: "Mapping[str, np.ndarray]") -> Iterator[tuple[str, list[RawRow]]]:
    waiting: dict[str, list[RawRow]] = {split: [] for split in splits}
    for number, row in enumerate(raw_examples(source)):
        for split, chosen in splits.items():
            if chosen[number]:
                waiting[split].append(row)
                if len(waiting[split]) == _ROWS_IN_BATCH:
                    yield split, waiting[split]
                    waiting[split] = []
    yield from ((split, rows) for split, rows in waiting.items() if rows)


def _write_part(
    encoded: "Iterable[tuple[str, pyarrow.RecordBatch]]", files: Mapping[str, Path], schema: "pyarrow.Schema"
) -> None:
    """Write the batches of each split to its file, which has its name only when all files are complete."""
    import pyarrow

    unfinished = {split: path.with_suffix(".part") for split, path in files.items()}
    with ExitStack() as stack:
        writers = {
            split: stack.enter_context(pyarrow.ipc.new_stream(str(path), schema)) for split, path in unfinished.items()
        }
        for split, batch in encoded:
            writers[split].write_batch(batch)
    for split, path in files.items():
        unfinished[split].rename(path)


class _Workers:
    """Processes that encode batches; with one CPU, this process."""

    def __init__(self, encode: Encode, schema: "pyarrow.Schema", cpus: int) -> None:
        self.job, self.cpus = (encode, schema), cpus
        fork = multiprocessing.get_context("fork")
        self.pool = ProcessPoolExecutor(cpus, fork, _start_worker, self.job) if cpus > 1 else None

    def __enter__(self) -> "_Workers":
        return self

    def __exit__(self, *_: object) -> None:
        if self.pool is not None:
            self.pool.shutdown(cancel_futures=True)

    def encode(self, batches: Iterable[tuple[str, list[RawRow]]]) -> "Iterator[tuple[str, pyarrow.RecordBatch]]":
        """Yield the encoded batches in their order; few are in memory at once."""
        if self.pool is None:
            yield from ((split, _encoded(rows, *self.job)) for split, rows in batches)
            return
        waiting: deque[tuple[str, Any]] = deque()
        for split, rows in batches:
            waiting.append((split, self.pool.submit(_encode_in_worker, rows)))
            if len(waiting) > 2 * self.cpus:
                done, future = waiting.popleft()
                yield done, future.result()
        yield from ((split, future.result()) for split, future in waiting)


def _start_worker(encode: Encode, schema: "pyarrow.Schema") -> None:
    global _job
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes share the cores
    _job = encode, schema


def _encode_in_worker(rows: list[RawRow]) -> "pyarrow.RecordBatch":
    assert _job is not None
    return _encoded(rows, *_job)


def _encoded(rows: list[RawRow], encode: Encode, schema: "pyarrow.Schema") -> "pyarrow.RecordBatch":
    import pyarrow

    columns = encode(rows)
    return pyarrow.record_batch([pyarrow.array(columns[field.name], field.type) for field in schema], schema=schema)


class _Progress:
    """Logs how far a large source is, one line for each tenth."""

    def __init__(self, name: str, total: int) -> None:
        self.name, self.total, self.rows = name, total, 0

    def count(self, batches: Iterable[tuple[str, list[RawRow]]]) -> Iterator[tuple[str, list[RawRow]]]:
        """Yield ``batches`` and count their rows."""
        for split, rows in batches:
            yield split, rows
            before, self.rows = self.rows, self.rows + len(rows)
            if self.total > _POOL_FROM_ROWS and 10 * before // self.total < 10 * self.rows // self.total:
                logger.info(f"{self.name}: {self.rows:,} of {self.total:,} examples ({self.rows / self.total:.0%}).")
