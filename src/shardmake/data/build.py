"""The splits of a run's data: encoded, mixed if there are several sources, ordered, packed and written.

The rows of a source are encoded in their order, by several processes, into Arrow files that a later start finds again.
They are read, encoded and written in batches, so memory does not depend on the size of the source. After
`_BATCHES_IN_PART` batches a file is complete; a stage that was killed and starts again with the same inputs encodes
only what follows. Neither changes a byte of the result. Splits, mixtures and orders are numbers of these rows.
"""

import logging
import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import chain, compress, groupby, islice
from operator import itemgetter
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow

from shardmake.config.models import Run, TrainSource
from shardmake.core.errors import DataError
from shardmake.core.run_folder import make_folder, remove, rename
from shardmake.data.chat import ChatTemplate
from shardmake.data.examples import NOTED, Part, encode_rows, make_encoder
from shardmake.data.files import RawRow, raw_rows
from shardmake.data.packing import Encoded, pack, sum_of
from shardmake.data.sources import Source, count_rows, file_record
from shardmake.run.tokenizer import check_vocabulary

logger = logging.getLogger(__name__)
Batch = list[tuple[int, RawRow]]
"""Rows with their numbers in the source."""
Encode = Callable[[Batch], pyarrow.RecordBatch]
_ROWS_IN_BATCH = 100
_PARTS = 50
"""A kill loses at most what follows the last complete file, of this many or more."""
_BATCHES_IN_PART = 100
_POOL_FROM_ROWS = 5_000
_encode: Encode
"""The function of the worker processes, which are forks."""


def build(run: Run, chat: ChatTemplate, parts: Sequence[Part], work: Path, cpus: int) -> dict[str, Any]:
    """Write both splits into ``work`` and return their entries of the receipt; ``parts`` are those of `open_parts`.

    Without parts for training, only the evaluation split is written. Raises `DataError` for an example that cannot be
    used, and if a split has nothing to learn.
    """
    datasets.disable_progress_bars()  # the log has a line for each tenth
    found: dict[str, list[Encoded]] = {"eval": [], "train": []}
    for number, part in enumerate(parts):
        encoder, splits = make_encoder(part, chat), _splits(run, part, parts, number)
        encode = partial(encode_rows, encoder=encoder, length=run.sequence_length, drop=part.drops)
        chosen = np.logical_or.reduce(list(splits.values()))
        table = encode_source(part.source, chosen, encode, work / "cache" / f"{part.split}-{number}", cpus)
        rows = table.data.column("row").to_numpy()
        for split, own in splits.items():
            one = Encoded.of(part.name, encoder, table, own[rows])
            found[split].append(one.check(f"{part.name} {split}".lstrip()))
    largest = (int(one.column("largest").max(initial=0)) for encoded in found.values() for one in encoded)
    check_vocabulary(run, max(largest))
    results = {split: _write(split, encoded, run, work) for split, encoded in found.items() if encoded}
    encoder = (found["train"] or found["eval"])[0].encoder
    none = np.empty(0, "uint64")
    digests = [np.concatenate([none, *(one.column("digest") for one in encoded)]) for encoded in found.values()]
    return {
        "train": {**sum_of([]), "sequences": 0, "tokens": 0, "loss_tokens": 0, "files": []},
        "data_format": encoder.layout.format,
        "columns": dict(encoder.layout.columns),
        "loss_on_assistant": encoder.assistant_only,
        "repeated": int(np.isin(digests[0], digests[1]).sum()),
        **results,
    }


def _splits(run: Run, part: Part, parts: Sequence[Part], number: int) -> dict[str, np.ndarray]:
    """Return which rows of ``part`` are in each split, one boolean a row; a random part is for evaluation."""
    count, splits = count_rows(part.source), {}
    evaluated = np.zeros(count, bool)
    if parts[-1].split == "train":
        check_divisible(count, part.run)
        held_out = max(1, round(count * run.data.eval_fraction))
        evaluated[np.random.default_rng(run.seed).permutation(count)[:held_out]] = True
        splits["eval"] = evaluated
    rows, chosen = np.flatnonzero(~evaluated), np.zeros(count, bool)
    limit = run.data.sources[number].limit if part.split == "train" else None
    chosen[rows[np.random.default_rng(run.seed).permutation(len(rows))[:limit]]] = True
    return {part.split: chosen, **splits}


def check_divisible(count: int, run: Run) -> None:
    """Raise `DataError` if ``count`` examples are too few to hold one out for evaluation."""
    needed = "has one example, and evaluation needs another one. Set data.eval or add data."
    if count < 2:
        raise DataError(f"Too little data: {run.data.names} {needed}")


def _write(split: str, parts: Sequence[Encoded], run: Run, work: Path) -> dict[str, Any]:
    """Write a split, packed or not, and return its entry of the receipt; evaluation lies source by source."""
    examples = datasets.concatenate_datasets([part.table for part in parts])
    starts = np.cumsum([0, *(len(part.table) for part in parts)])
    groups = [part.kept + start for part, start in zip(parts, starts, strict=False)]
    if split == "train":
        groups = [_mixed(run.data.sources, groups, run.seed)]
    tokens, learned = (examples.data.column(name).to_numpy() for name in ("tokens", "learned"))
    order = run.data.order if split == "train" else "shuffled"
    groups = [_in_order(rows, order, run.seed, tokens) for rows in groups]
    kept = examples.remove_columns([*NOTED, *(["seq_lengths"] if run.packing else [])])
    written = [kept.select(rows, keep_in_memory=True) for rows in groups]
    if run.packing:
        names = [split] if split == "train" else [f"{number}-{split}" for number in range(len(groups))]
        files = [work / "cache" / f"{name}.packed" for name in names]
        written = [pack(one, run.sequence_length, file) for one, file in zip(written, files, strict=True)]
    rows = np.concatenate(groups)
    result = {**sum_of(parts), **_save(split, datasets.concatenate_datasets(written), work)}
    result |= {"sequences": sum(map(len, written)), "tokens": int(tokens[rows].sum())}
    result["loss_tokens"] = int(learned[rows].sum())
    if not parts[0].name:
        return result
    source = np.searchsorted(starts, rows, side="right") - 1
    counts = [np.bincount(source, of, len(parts)) for of in (None, tokens[rows], learned[rows])]
    result["sources"] = [
        {"name": part.name, "format": str(part.encoder.layout), "examples": int(seen), "tokens": int(whole)}
        | {"loss_tokens": int(loss), "share": int(loss) / max(1, int(counts[2].sum()))}
        | ({"sequences": len(written[number])} if split == "eval" else {})
        for number, (part, seen, whole, loss) in enumerate(zip(parts, *counts, strict=True))
    ]
    return result


def _mixed(sources: Sequence[TrainSource], groups: Sequence[np.ndarray], seed: int) -> np.ndarray:
    """Return the rows of all ``sources`` in the mixture.

    With weights, `datasets.interleave_datasets` draws each example's source at random by ``seed`` until every source
    was read once; a source that ends earlier starts again. Without weights, each example is there ``repeat`` times.
    """
    weights = [source.weight for source in sources if source.weight is not None]
    if not weights:
        return np.concatenate([np.tile(rows, source.repeat) for source, rows in zip(sources, groups, strict=True)])
    shares = [weight / sum(weights) for weight in weights]
    numbered = [datasets.Dataset.from_dict({"row": rows}) for rows in groups]
    drawn = datasets.interleave_datasets(numbered, shares, seed=seed, stopping_strategy="all_exhausted")
    return drawn.with_format("numpy")["row"][:]


def _in_order(rows: np.ndarray, order: str, seed: int, tokens: np.ndarray) -> np.ndarray:
    """Return ``rows`` in the order of `data.order`; those with as many ``tokens`` are shuffled.

    Training then takes them one after another unless the order is ``shuffled``.
    """
    if order == "given":
        return rows
    shuffled = rows[np.random.default_rng(seed).permutation(len(rows))]
    return shuffled[np.argsort(tokens[shuffled], kind="stable")] if order == "length" else shuffled


def _save(split: str, sequences: datasets.Dataset, work: Path) -> dict[str, Any]:
    folder = work / split
    remove(folder)  # a killed process may have left links to files of another run
    packed = [Path(file["filename"]) for file in sequences.cache_files if file["filename"].endswith(f"{split}.packed")]
    if len(packed) == 1:  # the file is complete: it becomes the split instead of a copy
        sequences.select(range(1)).save_to_disk(str(folder))
        (written,) = folder.glob("*.arrow")
        rename(packed[0], written)
    else:
        sequences.save_to_disk(str(folder))
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    return {"files": [file_record(path, work) for path in sorted(folder.glob("*.arrow"))]}


def encode_source(source: Source, chosen: np.ndarray, encode: Encode, folder: Path, cpus: int) -> datasets.Dataset:
    """Return what ``encode`` makes of the ``chosen`` rows, one boolean a row, in order, mapped from ``folder``."""
    make_folder(folder)
    total = int(chosen.sum())
    rows = compress(enumerate(raw_rows(source.paths)), chosen)
    batches = enumerate(_logged(iter(lambda: list(islice(rows, _ROWS_IN_BATCH)), []), str(source), total))
    size = min(total // (_PARTS * _ROWS_IN_BATCH) or 1, _BATCHES_IN_PART)
    numbered = ((folder / f"{number // size:05d}.arrow", batch) for number, batch in batches)
    missing = ((path, batch) for path, batch in numbered if not path.exists())
    encoded = _encoded(missing, encode, cpus if total > _POOL_FROM_ROWS else 1)
    for path, part in groupby(encoded, key=itemgetter(0)):
        _write_part(path, (batch for _, batch in part))
    files = map(str, sorted(folder.glob("*.arrow")))
    return datasets.concatenate_datasets([datasets.Dataset.from_file(file) for file in files])


def _write_part(path: Path, batches: Iterator[pyarrow.RecordBatch]) -> None:
    """Write ``batches`` to a file, which has its name only when it is complete."""
    unfinished, first = path.with_suffix(".part"), next(batches)
    with pyarrow.ipc.new_stream(str(unfinished), first.schema) as writer:
        for batch in chain([first], batches):
            writer.write_batch(batch)
    rename(unfinished, path)


def _encoded(
    batches: Iterable[tuple[Path, Batch]], encode: Encode, cpus: int
) -> Iterator[tuple[Path, pyarrow.RecordBatch]]:
    """Yield the encoded batches in their order, by ``cpus`` processes; few are in memory at once."""
    if cpus == 1:
        yield from ((path, encode(batch)) for path, batch in batches)
        return
    global _encode
    _encode, waiting = encode, deque[tuple[Path, Any]]()
    alone = ({"TOKENIZERS_PARALLELISM": "false"},)  # the processes share the cores
    with ProcessPoolExecutor(cpus, multiprocessing.get_context("fork"), os.environ.update, alone) as pool:
        for path, batch in batches:
            waiting.append((path, pool.submit(_encode_in_worker, batch)))
            if len(waiting) > 2 * cpus:
                done, future = waiting.popleft()
                yield done, future.result()
        yield from ((path, future.result()) for path, future in waiting)


def _encode_in_worker(batch: Batch) -> pyarrow.RecordBatch:
    return _encode(batch)


def _logged(batches: Iterable[Batch], name: str, total: int) -> Iterator[Batch]:
    """Yield ``batches``, and log how far a large source is, one line for each tenth."""
    done = 0
    for batch in batches:
        yield batch
        before, done = done, done + len(batch)
        if total > _POOL_FROM_ROWS and 10 * before // total < 10 * done // total:
            logger.info(f"{name}: {done:,} of {total:,} examples ({done / total:.0%}).")
