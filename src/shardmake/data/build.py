"""The splits of a run's data: encoded, mixed if there are several sources, ordered, packed and written."""

import os
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from shardmake.config.models import Run, TrainSource
from shardmake.data.encode import Encoder
from shardmake.data.encoding import encode_source
from shardmake.data.examples import (
    APART,
    Part,
    check_bad_rows,
    check_divisible,
    check_learned,
    check_shares,
    check_vocabulary,
    describe_apart,
    encode_rows,
    first_of,
    make_encoder,
)
from shardmake.data.packing import (
    KEPT,
    count_outcomes,
    count_repeated,
    count_tokens,
    first_dropped,
    pack,
    sort_places,
    token_digests,
)
from shardmake.data.sources import FIRST_ROWS, count_rows, file_record

if TYPE_CHECKING:
    import datasets
    import numpy as np
    import pyarrow
    from transformers import PreTrainedTokenizerBase


SOURCE: Final = "source"
"""Column with the number of an example's source, until the shares are counted."""


def limited(chosen: "np.ndarray", limit: int | None, seed: int) -> "np.ndarray":
    """Return ``chosen``, one boolean a row, with at most ``limit`` of them, taken at random by ``seed``."""
    import numpy as np

    rows = np.flatnonzero(chosen)
    if limit is None or limit >= len(rows):
        return chosen
    kept = np.zeros_like(chosen)
    kept[rows[np.random.default_rng(seed).permutation(len(rows))[:limit]]] = True
    return kept


def mix(sources: Sequence[TrainSource], examples: Sequence["datasets.Dataset"], seed: int) -> "datasets.Dataset":
    """Return the ``examples`` of all ``sources`` as one data set with the column `SOURCE`.

    With weights, `datasets.interleave_datasets` draws each example's source at random by ``seed`` until every source
    was read once; a source that ends earlier starts again. Without weights, each example is there ``repeat`` times.
    """
    import datasets

    numbered = [_numbered(part, number) for number, part in enumerate(examples)]
    weights = [source.weight for source in sources if source.weight is not None]
    if not weights:
        copies = [part for part, source in zip(numbered, sources, strict=True) for _ in range(source.repeat)]
        return datasets.concatenate_datasets(copies)
    shares = [weight / sum(weights) for weight in weights]
    return datasets.interleave_datasets(numbered, shares, seed=seed, stopping_strategy="all_exhausted")


def in_order(examples: Sequence["datasets.Dataset"]) -> "datasets.Dataset":
    """Return the ``examples`` source by source, with the column `SOURCE`."""
    import datasets

    return datasets.concatenate_datasets([_numbered(part, number) for number, part in enumerate(examples)])


def _numbered(examples: "datasets.Dataset", number: int) -> "datasets.Dataset":
    import numpy as np

    return examples.add_column(SOURCE, np.full(len(examples), number, dtype=np.int32))


def shares_of(examples: "datasets.Dataset", count: int) -> list[dict[str, Any]]:
    """Return examples, tokens, loss tokens and the share of all loss tokens for each of ``count`` sources."""
    import numpy as np
    import pyarrow.compute as pc

    totals = np.zeros((3, count), dtype=np.int64)
    for batch in examples.select_columns([SOURCE, "loss_mask"]).with_format("arrow").iter(1000):
        masks = batch.column("loss_mask").combine_chunks()
        lengths = pc.list_value_length(masks).to_numpy()
        starts = np.cumsum(lengths) - lengths
        learned = np.add.reduceat(masks.flatten().to_numpy(zero_copy_only=False).astype(np.int64), starts)
        for row, values in enumerate((np.ones(len(lengths)), lengths, learned)):
            source = batch.column(SOURCE).to_numpy()
            totals[row] += np.bincount(source, weights=values, minlength=count).astype(np.int64)
    whole = max(1, int(totals[2].sum()))
    return [
        {"examples": int(seen), "tokens": int(tokens), "loss_tokens": int(loss), "share": int(loss) / whole}
        for seen, tokens, loss in totals.T
    ]


NO_SEQUENCES: Final[Mapping[str, Any]] = {
    **count_outcomes([]), "apart": 0, "bad": {}, "first_dropped": [],
    "sequences": 0, "tokens": 0, "loss_tokens": 0, "files": [],
}  # fmt: skip
"""Entry of the receipt for a split that was not written."""


@dataclass(frozen=True)
class _Encoded:
    """The examples of one source in one split."""

    name: str
    encoder: Encoder
    examples: "datasets.Dataset"
    """``input_ids``, ``loss_mask`` and ``seq_lengths`` of those with something to learn."""
    counts: dict[str, int]
    notes: Counter[str]
    dropped: list[str]


def build(
    run: Run, tokenizer: "PreTrainedTokenizerBase", parts: Sequence[Part], work: Path, cpus: int, day: date
) -> dict[str, Any]:
    """Write both splits into ``work`` and return their entries of the receipt; ``parts`` are those of `locate_parts`.

    ``day`` is for a chat template that reads the clock. Without parts for training, only the evaluation split is
    written.

    Raises `DataError` for an example that cannot be used, and if a split has nothing to learn.
    """
    import datasets

    datasets.disable_progress_bars()  # the log has a line for each tenth
    encoded = _encode_all(run, tokenizer, parts, work, cpus, day)
    sequences = {"eval": _evaluation_sequences(run, encoded["eval"], work)}
    if encoded["train"]:
        sequences["train"] = _training_sequences(run, encoded["train"], work)
    results = {
        split: {**_outcomes(encoded[split]), **_save(split, rows, work), "sources": shares}
        for split, (rows, shares) in sequences.items()
    }
    check_vocabulary(run, max(result.pop("largest_token_id") for result in results.values()))
    encoder = (encoded["train"] or encoded["eval"])[0].encoder
    for split, result in results.items():
        check_shares(split, result["loss_tokens"], result["tokens"], encoder)
    return {
        "train": dict(NO_SEQUENCES),
        "data_format": encoder.layout.format,
        "columns": dict(encoder.layout.columns),
        "loss_on_assistant": encoder.assistant_only,
        "repeated": count_repeated(_digests(encoded["eval"]), _digests(encoded["train"])),
        **results,
    }


def _encode_all(
    run: Run, tokenizer: "PreTrainedTokenizerBase", parts: Sequence[Part], work: Path, cpus: int, day: date
) -> dict[str, list[_Encoded]]:
    import numpy as np

    found: dict[str, list[_Encoded]] = {"train": [], "eval": []}
    encoders: list[Encoder] = []
    for number, part in enumerate(parts):
        if part.has_own_layout:
            encoders.append(make_encoder(part, tokenizer, first_of(part.source, FIRST_ROWS), day))
        encoder, count = encoders[-1], count_rows(part.source)
        splits = {part.split: np.ones(count, bool)} if parts[-1].split == "eval" else _split_off(count, part.run)
        if "train" in splits:
            splits["train"] = limited(splits["train"], run.data.sources[number].limit, run.seed)
        drop = part.run.data.on_bad_row == "drop"
        encode = partial(encode_rows, encoder=encoder, length=run.sequence_length, drop=drop)
        folder = work / "cache" / f"{part.split}-{number}"
        for name, examples in encode_source(part.source, splits, encode, _features(encoder), folder, cpus).items():
            found[name].append(_checked(name, examples, part, encoder))
    return found


def _split_off(count: int, run: Run) -> "dict[str, np.ndarray]":
    """Choose a random part of ``count`` training rows, at least one, for evaluation."""
    import numpy as np

    check_divisible(count, run)
    evaluated = np.zeros(count, bool)
    held_out = max(1, round(count * run.data.eval_fraction))
    evaluated[np.random.default_rng(run.seed).permutation(count)[:held_out]] = True
    return {"train": ~evaluated, "eval": evaluated}


def _checked(split: str, encoded: "datasets.Dataset", part: Part, encoder: Encoder) -> _Encoded:
    """Return the examples with something to learn; raise `DataError` if there is none, or if many rows are bad."""
    import numpy as np
    import pyarrow.compute

    outcomes = encoded.data.column("outcome")
    counts, dropped = count_outcomes(_values(outcomes)), first_dropped(encoded)
    notes = Counter(note for note in _values(encoded.data.column("note")) if note)
    name = f"{part.name} {split}".lstrip()
    check_bad_rows(name, notes, counts, dropped)
    describe_apart(name, notes)
    check_learned(name, counts, dropped, encoder)
    is_kept = pyarrow.compute.is_in(outcomes, pyarrow.array(KEPT))
    kept = encoded.remove_columns(["outcome", "dropped", "note"])
    if not pyarrow.compute.all(is_kept).as_py():
        kept = kept.select(np.flatnonzero(is_kept.to_numpy()), keep_in_memory=True)
    return _Encoded(part.name, encoder, kept, counts, notes, dropped)


def _values(column: "pyarrow.ChunkedArray") -> Iterator[Any]:
    return (value for chunk in column.chunks for value in chunk.to_pylist())


def _features(encoder: Encoder) -> "datasets.Features":
    import datasets

    features = {
        "input_ids": datasets.List(datasets.Value("int32")),
        "loss_mask": datasets.List(datasets.Value("bool")),
        "seq_lengths": datasets.List(datasets.Value("int32")),
        "outcome": datasets.Value("string"),
        "dropped": datasets.Value("string"),
        "note": datasets.Value("string"),
    }
    if encoder.layout.format == "preference":
        features["rejected_ids"] = datasets.List(datasets.Value("int32"))
    if encoder.layout.format == "unpaired-preference":
        features["label"] = datasets.Value("bool")
        features["cut_ids"] = datasets.List(datasets.Value("int32"))
    return datasets.Features(features)


def _outcomes(parts: Sequence[_Encoded]) -> dict[str, Any]:
    """Return the summed counts of all sources, and the first dropped examples."""
    counts = {key: sum(part.counts[key] for part in parts) for key in parts[0].counts}
    notes = sum((part.notes for part in parts), Counter[str]())
    counts["apart"] = notes.pop(APART, 0)
    return {
        **counts,
        "bad": dict(sorted(notes.items())),
        "first_dropped": sort_places(place for part in parts for place in part.dropped),
    }


def _digests(parts: Sequence[_Encoded]) -> "np.ndarray":
    import numpy as np

    return np.concatenate([np.empty(0, np.uint64), *(token_digests(part.examples) for part in parts)])


def _training_sequences(
    run: Run, parts: Sequence[_Encoded], work: Path
) -> tuple["datasets.Dataset", list[dict[str, Any]]]:
    """Return the training sequences and the shares of the sources, which are empty for a single source."""
    examples, shares = parts[0].examples, []
    if isinstance(run.data.train, list):
        examples = mix(run.data.train, [part.examples for part in parts], run.seed)
        shares = _named(parts, shares_of(examples, len(parts)))
        examples = examples.remove_columns(SOURCE)
    examples = put_in_order(examples, run.data.order, run.seed)
    return _packed(examples, run, work / "cache" / "train.packed"), shares


def _evaluation_sequences(
    run: Run, parts: Sequence[_Encoded], work: Path
) -> tuple["datasets.Dataset", list[dict[str, Any]]]:
    """Return the evaluation sequences source by source, and the shares as for training."""
    import datasets

    packed = [
        _packed(put_in_order(part.examples, "shuffled", run.seed), run, work / "cache" / f"{number}-eval.packed")
        for number, part in enumerate(parts)
    ]
    if not parts[0].name:
        return packed[0], []
    shares = _named(parts, shares_of(in_order([part.examples for part in parts]), len(parts)))
    counted = [share | {"sequences": len(sequences)} for share, sequences in zip(shares, packed, strict=True)]
    return datasets.concatenate_datasets(packed), counted


def _named(parts: Sequence[_Encoded], shares: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {"name": part.name, "format": str(part.encoder.layout), **share}
        for part, share in zip(parts, shares, strict=True)
    ]


def _packed(examples: "datasets.Dataset", run: Run, cache_file: Path) -> "datasets.Dataset":
    if not run.packing:
        return examples
    return pack(examples.remove_columns("seq_lengths"), run.sequence_length, cache_file, cache_file.stem)


def put_in_order(examples: "datasets.Dataset", order: str, seed: int) -> "datasets.Dataset":
    """Return ``examples`` (``seq_lengths``) in the order of `data.order`; those of one length are shuffled.

    Training then takes them one after another unless the order is ``shuffled``.
    """
    import numpy as np

    if order == "given":
        return examples
    shuffled = examples.shuffle(seed=seed, keep_in_memory=True)
    if order == "shuffled":
        return shuffled
    lengths = [sum(parts) for parts in shuffled["seq_lengths"]]
    return shuffled.select(np.argsort(lengths, kind="stable"), keep_in_memory=True)


def _save(split: str, sequences: "datasets.Dataset", work: Path) -> dict[str, Any]:
    import datasets

    folder = work / split
    shutil.rmtree(folder, ignore_errors=True)  # a killed process may have left links to files of another run
    packed = [Path(file["filename"]) for file in sequences.cache_files if file["filename"].endswith(f"{split}.packed")]
    if len(packed) == 1:  # the file is complete: it becomes the split instead of a copy
        sequences.select(range(1)).save_to_disk(str(folder))
        (written,) = folder.glob("*.arrow")
        packed[0].replace(written)
    else:
        sequences.save_to_disk(str(folder))
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    counts = count_tokens(datasets.load_from_disk(str(folder)))
    return {**counts, "files": [file_record(path, work) for path in sorted(folder.glob("*.arrow"))]}
