"""Encode the rows of a source in their order, by several processes, into Arrow files that a later start finds again.

Rows are read, encoded and written in batches, so memory does not depend on the size of the source. After
`_BATCHES_IN_PART` batches a file is complete; a stage that was killed and starts again with the same inputs encodes
only what follows. Neither changes a byte of the result.
"""

import logging
import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import chain, compress, groupby, islice
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardmake.core.run_folder import make_folder, rename
from shardmake.data.files import RawRow, raw_rows
from shardmake.data.sources import Source

if TYPE_CHECKING:
    import datasets
    import numpy as np
    import pyarrow

logger = logging.getLogger(__name__)
Batch = list[tuple[int, RawRow]]
"""Rows with their numbers in the source."""
Encode = Callable[[Batch], "pyarrow.RecordBatch"]
_ROWS_IN_BATCH = 100
_BATCHES_IN_PART = 100
_POOL_FROM_ROWS = 5_000
_encode: Encode | None = None
"""The function of a worker process."""


def encode_source(source: Source, chosen: "np.ndarray", encode: Encode, folder: Path, cpus: int) -> "datasets.Dataset":
    """Return what ``encode`` makes of the ``chosen`` rows, one boolean a row, in order, memory-mapped from ``folder``.

    Raises what ``encode`` raises.
    """
    import datasets

    make_folder(folder)
    total = int(chosen.sum())
    rows = compress(enumerate(raw_rows(source.paths)), chosen)
    batches = enumerate(_logged(iter(lambda: list(islice(rows, _ROWS_IN_BATCH)), []), str(source), total))
    numbered = ((folder / f"{number // _BATCHES_IN_PART:05d}.arrow", batch) for number, batch in batches)
    missing = ((path, batch) for path, batch in numbered if not path.exists())
    encoded = _encoded(missing, encode, cpus if total > _POOL_FROM_ROWS else 1)
    for path, part in groupby(encoded, key=itemgetter(0)):
        _write_part(path, (batch for _, batch in part))
    return datasets.concatenate_datasets(
        [datasets.Dataset.from_file(str(path)) for path in sorted(folder.glob("*.arrow"))]
    )


def _write_part(path: Path, batches: "Iterator[pyarrow.RecordBatch]") -> None:
    """Write ``batches`` to a file, which has its name only when it is complete."""
    import pyarrow

    unfinished, first = path.with_suffix(".part"), next(batches)
    with pyarrow.ipc.new_stream(str(unfinished), first.schema) as writer:
        for batch in chain([first], batches):
            writer.write_batch(batch)
    rename(unfinished, path)


def _encoded(
    batches: Iterable[tuple[Path, Batch]], encode: Encode, cpus: int
) -> "Iterator[tuple[Path, pyarrow.RecordBatch]]":
    """Yield the encoded batches in their order, by ``cpus`` processes; few are in memory at once."""
    if cpus == 1:
        yield from ((path, encode(batch)) for path, batch in batches)
        return
    waiting: deque[tuple[Path, Any]] = deque()
    with ProcessPoolExecutor(cpus, multiprocessing.get_context("fork"), _start_worker, (encode,)) as pool:
        for path, batch in batches:
            waiting.append((path, pool.submit(_encode_in_worker, batch)))
            if len(waiting) > 2 * cpus:
                done, future = waiting.popleft()
                yield done, future.result()
        yield from ((path, future.result()) for path, future in waiting)


def _start_worker(encode: Encode) -> None:
    global _encode
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes share the cores
    _encode = encode


def _encode_in_worker(batch: Batch) -> "pyarrow.RecordBatch":
    assert _encode is not None
    return _encode(batch)


def _logged(batches: Iterable[Batch], name: str, total: int) -> Iterator[Batch]:
    """Yield ``batches``, and log how far a large source is, one line for each tenth."""
    done = 0
    for batch in batches:
        yield batch
        before, done = done, done + len(batch)
        if total > _POOL_FROM_ROWS and 10 * before // total < 10 * done // total:
            logger.info(f"{name}: {done:,} of {total:,} examples ({done / total:.0%}).")
