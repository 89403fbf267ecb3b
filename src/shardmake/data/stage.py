"""The data stage: write packed, memory-mapped token sequences to ``runs/NAME/data``.

Tokenizing is a separate stage because it can exceed the process group's timeouts. The sequences are written to a
temporary folder and renamed. The receipt is written last.
"""

import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardmake.config.models import Run
from shardmake.core.atomic import digest, fsync_directory
from shardmake.core.errors import ShardmakeError
from shardmake.core.units import plural
from shardmake.data.encode import Encoder
from shardmake.data.examples import (
    FIRST_ROWS,
    check_divisible,
    check_learned,
    check_vocabulary,
    describe_outcomes,
    encode_rows,
    load_tokenizer,
    locate_sources,
    make_encoder,
    tokenizer_digest,
)
from shardmake.data.packing import (
    KEPT,
    count_outcomes,
    count_repeated,
    count_tokens,
    first_dropped,
    pack,
    token_digests,
)
from shardmake.data.sharing import one_at_a_time, take_same_data
from shardmake.data.sources import Source, file_record, identity, read
from shardmake.run.paths import RunDir
from shardmake.run.receipts import DataReceipt, SplitReceipt

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedTokenizerBase

_LAYOUT = 1
_POOL_FROM_ROWS = 5_000
logger = logging.getLogger(__name__)


def prepare(run: Run, rundir: RunDir, cpus: int = 1) -> DataReceipt:
    """Write the tokenized training and evaluation sequences of ``run`` and return their receipt.

    Do nothing if the receipt has the same sources, tokenizer and settings. If the receipt of another run has them, take
    the files of that run. ``cpus`` is the number of tokenizing processes; it does not change the result. The receipt's
    ``digest`` identifies the training data. Raises `DataError` for data that cannot be used.
    """
    sources = locate_sources(run)
    tokenizer = load_tokenizer(run)
    inputs = {
        "layout": _LAYOUT,
        "tokenizer": tokenizer_digest(tokenizer),
        "sources": {split: identity(source) for split, source in sources.items()},
        "settings": run.data.model_dump(include={"format", "loss_on", "eval_fraction", "order"})
        | {"columns": run.data.columns.named}
        | run.model_dump(include={"sequence_length", "packing", "seed"}),
    }
    receipt = _current(rundir, inputs)
    if receipt is not None:
        logger.info(f"{rundir.data} is up to date.")
        return receipt
    with one_at_a_time(rundir, inputs), _workspace(rundir) as work:
        receipt = take_same_data(rundir, inputs, work)
        if receipt is None:
            shutil.rmtree(work)
            work.mkdir()
            results = _build(run, tokenizer, sources, work, cpus)
            trained_on = digest({"files": results["train"]["files"], "length": run.sequence_length})
            receipt = DataReceipt(digest=trained_on, **inputs, pad_token_id=_pad_token_id(tokenizer), **results)
        _publish(work, rundir, receipt)
    for split, counts in {"train": receipt.train, "eval": receipt.eval}.items():
        logger.info(f"{rundir.data / split}: {_summary(counts, run.sequence_length)}.")
    if receipt.repeated:
        logger.warning(
            f"Evaluation examples with the same tokens as a training example: {receipt.repeated:,}. Their loss does "
            "not show how the model does on new examples. Remove the duplicates from data.train or data.eval."
        )
    return receipt


def _pad_token_id(tokenizer: "PreTrainedTokenizerBase") -> int:
    """Return the padding id; padding is never learned or attended to, so any id is valid without a pad token."""
    return next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0)


def _current(rundir: RunDir, inputs: Mapping[str, Any]) -> DataReceipt | None:
    """Return the receipt if it has the same ``inputs`` and its files exist, else None."""
    try:
        receipt = DataReceipt.read(rundir.data_receipt)
    except ShardmakeError:  # missing, or of another layout
        return None
    same = inputs == receipt.model_dump(include=set(inputs), mode="json")
    return receipt if same and all(_files_exist(rundir.data, one) for one in (receipt.train, receipt.eval)) else None


def _files_exist(folder: Path, split: SplitReceipt) -> bool:
    files = [(folder / file.path, file.bytes) for file in split.files]
    return all(path.is_file() and path.stat().st_size == size for path, size in files)


@contextmanager
def _workspace(rundir: RunDir) -> Iterator[Path]:
    """Yield an empty folder on the run's file system; remove it afterwards."""
    work = rundir.data.with_name(".data.tmp")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _build(
    run: Run, tokenizer: "PreTrainedTokenizerBase", sources: Mapping[str, Source], work: Path, cpus: int
) -> dict[str, Any]:
    """Write both splits into ``work`` and return their entries of the receipt."""
    rows = {split: read(source, work / "cache" / split) for split, source in sources.items()}
    first = [rows["train"][i] for i in range(min(FIRST_ROWS, len(rows["train"])))]
    encoder = make_encoder(run, tokenizer, sources["train"], first)
    if "eval" not in rows:
        sources = dict.fromkeys(("train", "eval"), sources["train"])
        rows = _split_off_evaluation(rows["train"], run)
    results = {
        split: _build_split(split, rows[split], sources[split], encoder, run, work, cpus) for split in ("train", "eval")
    }
    check_vocabulary(run, max(result.pop("largest_token_id") for result in results.values()))
    repeated = count_repeated(*(results[split].pop("token_digests") for split in ("eval", "train")))
    layout = {"format": encoder.layout.format, "columns": dict(encoder.layout.columns)}
    return {**layout, "loss_on_assistant": encoder.assistant_only, "repeated": repeated, **results}


def _split_off_evaluation(rows: "datasets.Dataset", run: Run) -> dict[str, "datasets.Dataset"]:
    """Split off a random part of the training rows, at least one, for evaluation."""
    import numpy as np

    check_divisible(len(rows), run)
    count = max(1, round(len(rows) * run.data.eval_fraction))
    order = np.random.default_rng(run.seed).permutation(len(rows))
    trained = order[count:] if run.data.order == "shuffled" else np.sort(order[count:])
    return {"train": rows.select(trained, keep_in_memory=True), "eval": rows.select(order[:count], keep_in_memory=True)}


def _build_split(
    split: str, rows: "datasets.Dataset", source: Source, encoder: Encoder, run: Run, work: Path, cpus: int
) -> dict[str, Any]:
    settings = {"encoder": encoder, "length": run.sequence_length, "source": source}
    encoded = _encode(rows, settings, work / "cache" / f"{split}-encoded.arrow", cpus)
    counts, dropped = count_outcomes(encoded["outcome"]), first_dropped(encoded)
    check_learned(split, counts, dropped, encoder)
    kept = encoded.filter(lambda outcome: outcome in KEPT, input_columns="outcome", keep_in_memory=True)
    kept = kept.remove_columns(["outcome", "dropped"])
    kept = put_in_order(kept, run.data.order if split == "train" else "shuffled", run.seed)
    digests = token_digests(kept)
    if run.packing:
        kept = kept.remove_columns("seq_lengths")
        kept = pack(kept, run.sequence_length, work / "cache" / f"{split}-packed.arrow", split)
    return {**counts, "first_dropped": dropped, "token_digests": digests, **_save(split, kept, work)}


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


def _encode(rows: "datasets.Dataset", settings: Mapping[str, Any], cache_file: Path, cpus: int) -> "datasets.Dataset":
    import datasets

    features = {
        "input_ids": datasets.List(datasets.Value("int32")),
        "loss_mask": datasets.List(datasets.Value("bool")),
        "seq_lengths": datasets.List(datasets.Value("int32")),
        "outcome": datasets.Value("string"),
        "dropped": datasets.Value("string"),
    }
    return rows.map(
        _encode_batch,
        batched=True,
        batch_size=100,
        fn_kwargs=dict(settings),
        remove_columns=rows.column_names,
        features=datasets.Features(features),
        num_proc=cpus if cpus > 1 and len(rows) > _POOL_FROM_ROWS else None,
        cache_file_name=str(cache_file),
        load_from_cache_file=False,
        new_fingerprint="encoded",
        desc="tokenize",
    )


def _encode_batch(batch: Mapping[str, list[Any]], **settings: Any) -> dict[str, list[Any]]:
    rows = [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]
    return encode_rows(rows, **settings)


def _save(split: str, sequences: "datasets.Dataset", work: Path) -> dict[str, Any]:
    import datasets

    folder = work / split
    sequences.save_to_disk(str(folder))
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    counts = count_tokens(datasets.load_from_disk(str(folder)))
    return {**counts, "files": [file_record(path, work) for path in sorted(folder.glob("*.arrow"))]}


def _publish(work: Path, rundir: RunDir, receipt: DataReceipt) -> None:
    """Rename the splits into place, then write the receipt; remove an outdated receipt first."""
    rundir.data.mkdir(parents=True, exist_ok=True)
    if rundir.data_receipt.is_file() and json.loads(rundir.data_receipt.read_bytes()) != receipt.as_json():
        rundir.data_receipt.unlink()
    for split in ("train", "eval"):
        shutil.rmtree(rundir.data / split, ignore_errors=True)
        (work / split).rename(rundir.data / split)
    fsync_directory(rundir.data)
    receipt.write(rundir.data_receipt)


def _summary(counts: SplitReceipt, length: int) -> str:
    full = counts.tokens / (counts.sequences * length)
    return (
        f"{describe_outcomes(dict(counts))} in {plural(counts.sequences, 'sequence')} of {length:,} tokens "
        f"({full:.0%} full), {counts.loss_tokens:,} of {counts.tokens:,} tokens learned"
    )
