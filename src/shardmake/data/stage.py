"""The data stage: write packed, memory-mapped token sequences to ``runs/NAME/data``.

Tokenizing is a separate stage because it can exceed the process group's timeouts. The sequences are written to a
temporary folder and renamed. The receipt is written last.
"""

import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardmake.config.models import Run
from shardmake.core.atomic import digest, fsync_directory
from shardmake.core.errors import DataError, ModelError, ShardmakeError
from shardmake.core.units import plural
from shardmake.data.encode import Encoder, loss_on_assistant
from shardmake.data.layout import Layout, check_named, recognize
from shardmake.data.packing import (
    KEPT,
    NAMED,
    columns_of,
    count_outcomes,
    count_tokens,
    first_dropped,
    fit,
    pack,
)
from shardmake.data.sources import (
    EVAL_SPLITS,
    TRAIN_SPLITS,
    Source,
    columns_in,
    example_in,
    file_record,
    first_rows,
    identity,
    locate,
    no_examples,
    place_of,
    read,
    text_examples,
)
from shardmake.run.paths import RunDir
from shardmake.run.receipts import DataReceipt, SplitReceipt

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedTokenizerBase

_LAYOUT = 1
_POOL_FROM_ROWS = 5_000
FIRST_ROWS = 64
logger = logging.getLogger(__name__)


def prepare(run: Run, rundir: RunDir, cpus: int = 1) -> DataReceipt:
    """Write the tokenized training and evaluation sequences of ``run`` and return their receipt.

    Do nothing if the receipt has the same sources, tokenizer and settings. ``cpus`` is the number of tokenizing
    processes; it does not change the result. The receipt's ``digest`` identifies the training data. Raises `DataError`
    for data that cannot be used.
    """
    sources = _locate(run)
    tokenizer = _load_tokenizer(run)
    inputs = {
        "layout": _LAYOUT,
        "tokenizer": tokenizer_digest(tokenizer),
        "sources": {split: identity(source) for split, source in sources.items()},
        "settings": run.data.model_dump(include={"format", "loss_on", "eval_fraction"})
        | {"columns": run.data.columns.named}
        | run.model_dump(include={"sequence_length", "packing", "seed"}),
    }
    receipt = _current(rundir, inputs)
    if receipt is not None:
        logger.info(f"{rundir.data} is up to date.")
        return receipt
    with _workspace(rundir) as work:
        results = _build(run, tokenizer, sources, work, cpus)
        trained_on = digest({"files": results["train"]["files"], "length": run.sequence_length})
        receipt = DataReceipt(digest=trained_on, **inputs, pad_token_id=_pad_token_id(tokenizer), **results)
        _publish(work, rundir, receipt)
    for split, counts in {"train": receipt.train, "eval": receipt.eval}.items():
        logger.info(f"{rundir.data / split}: {_summary(counts, run.sequence_length)}.")
    return receipt


def check_sources(run: Run) -> None:
    """Check every example of the run's text files without a tokenizer, and the columns of its Parquet files.

    Raises `DataError` with file and line for content that cannot be read or does not fit the format.
    """
    sources = _locate(run)
    layout = _recognize(run, sources["train"], _first(sources["train"], FIRST_ROWS))
    for source in sources.values():
        for example, place in text_examples(source):
            layout.standardize(example, place)


def check_first_rows(run: Run, limit: int = FIRST_ROWS) -> Layout:
    """Encode the first ``limit`` (two or more) rows of the training and the evaluation data; return their layout.

    The plan uses this, so that a wrong column, a message that the chat template rejects or a missing template is found
    before anything is queued. Raises `DataError` with file and line, and `ModelError` for the tokenizer.
    """
    tokenizer, sources = _load_tokenizer(run), _locate(run)
    rows = {split: _first(source, limit) for split, source in sources.items()}
    if "eval" not in rows:
        _check_divisible(len(rows["train"]), run)
    encoder, largest = _make_encoder(run, tokenizer, sources["train"], rows["train"]), 0
    for split, source in sources.items():
        encoded = _encode_rows(rows[split], encoder, run.sequence_length, source)
        largest = max([largest, *(max(ids) for ids in encoded["input_ids"] if ids)])
        dropped = [place for place in encoded["dropped"] if place]
        if len(rows[split]) < limit or len(dropped) < limit:  # else later rows may have something to learn
            _check_learned(f"first rows of the {split}", count_outcomes(encoded["outcome"]), dropped[:NAMED], encoder)
    _check_vocabulary(run, largest)
    return encoder.layout


def _first(source: Source, limit: int) -> list[Mapping[str, Any]]:
    """Return the first rows of ``source``; raise `DataError` if there is none."""
    rows = list(first_rows(source, limit))
    if not rows:
        raise no_examples(source)
    return rows


def _locate(run: Run) -> dict[str, Source]:
    sources = {"train": locate(run.data.train, run.data, TRAIN_SPLITS)}
    if run.data.eval is not None:
        sources["eval"] = locate(run.data.eval, run.data, EVAL_SPLITS)
    return sources


def _load_tokenizer(run: Run) -> "PreTrainedTokenizerBase":
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(run.model, revision=run.revision, trust_remote_code=run.trust_remote_code)
    except (OSError, ValueError) as error:
        raise ModelError(f"Cannot load the tokenizer of {run.model!r}: {error}") from None


def tokenizer_digest(tokenizer: "PreTrainedTokenizerBase") -> str:
    """Return a digest of all that determines token ids: vocabulary and rules, special tokens, chat template."""
    rules = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else tokenizer.get_vocab()
    return digest({"rules": rules, "special": tokenizer.special_tokens_map, "template": tokenizer.chat_template})


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
    encoder = _make_encoder(run, tokenizer, sources["train"], first)
    if "eval" not in rows:
        sources = dict.fromkeys(("train", "eval"), sources["train"])
        rows = _split_off_evaluation(rows["train"], run)
    results = {
        split: _build_split(split, rows[split], sources[split], encoder, run, work, cpus) for split in ("train", "eval")
    }
    _check_vocabulary(run, max(result.pop("largest_token_id") for result in results.values()))
    layout = {"format": encoder.layout.format, "columns": dict(encoder.layout.columns)}
    return {**layout, "loss_on_assistant": encoder.assistant_only, **results}


def _make_encoder(
    run: Run, tokenizer: "PreTrainedTokenizerBase", source: Source, rows: Sequence[Mapping[str, Any]]
) -> Encoder:
    """Return the encoder for the data of ``source`` that begin with ``rows``, and log what was recognized."""
    layout = _recognize(run, source, rows)
    unused = [column for column in _columns_of(rows) if column not in layout.columns.values()]
    rest = f" Columns that are not used: {', '.join(unused)}." if unused else ""
    logger.info(f"{source}: the examples are in the format {layout}.{rest}")
    return Encoder(tokenizer, layout, loss_on_assistant(run.data, layout.format))


def _recognize(run: Run, source: Source, rows: Sequence[Mapping[str, Any]]) -> Layout:
    """Return the layout of the data of ``source`` that begin with ``rows``."""
    check_named(run.data, _columns_of(rows), str(source))
    first = rows[0]
    return recognize(run.data, run.objective, columns_in(first), example_in(first), place_of(first, source))


def _columns_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return all columns of ``rows``, each once."""
    return list(dict.fromkeys(column for row in rows for column in columns_in(row)))


def _split_off_evaluation(rows: "datasets.Dataset", run: Run) -> dict[str, "datasets.Dataset"]:
    """Split off part of the training rows, at least one, for evaluation."""
    _check_divisible(len(rows), run)
    count = max(1, round(len(rows) * run.data.eval_fraction))
    shuffled = rows.shuffle(seed=run.seed, keep_in_memory=True)
    return {"train": shuffled.select(range(count, len(rows))), "eval": shuffled.select(range(count))}


def _check_divisible(count: int, run: Run) -> None:
    if count < 2:
        raise DataError(
            f"Too little data: {run.data.train} has one example, and evaluation needs another one. Set data.eval "
            "or add data."
        )


def _build_split(
    split: str, rows: "datasets.Dataset", source: Source, encoder: Encoder, run: Run, work: Path, cpus: int
) -> dict[str, Any]:
    settings = {"encoder": encoder, "length": run.sequence_length, "source": source}
    encoded = _encode(rows, settings, work / "cache" / f"{split}-encoded.arrow", cpus)
    counts, dropped = count_outcomes(encoded["outcome"]), first_dropped(encoded)
    _check_learned(split, counts, dropped, encoder)
    kept = encoded.filter(lambda outcome: outcome in KEPT, input_columns="outcome", keep_in_memory=True)
    kept = kept.remove_columns(["outcome", "dropped"]).shuffle(seed=run.seed, keep_in_memory=True)
    if run.packing:
        kept = kept.remove_columns("seq_lengths")
        kept = pack(kept, run.sequence_length, work / "cache" / f"{split}-packed.arrow", split)
    return {**counts, "first_dropped": dropped, **_save(split, kept, work)}


def _check_learned(part: str, counts: Mapping[str, int], dropped: Sequence[str], encoder: Encoder) -> None:
    """Raise `DataError` if all examples were dropped; log a warning that names the first if some were."""
    if not dropped:
        return
    roles = " Only messages with the role assistant are learned." if encoder.assistant_only else ""
    count = counts["dropped_without_loss"] + counts["dropped_loss_truncated"]
    if count < counts["examples"]:
        logger.warning(
            f"Examples of the {part} data with nothing to learn are dropped: {count:,} of {counts['examples']:,}. "
            f"The first: {'; '.join(dropped)}.{roles}"
        )
        return
    raise DataError(
        f"No example in the {part} data has a token to learn: {_outcomes(counts)}. The first: {'; '.join(dropped)}."
        f"{roles} Check data.format and data.loss_on, or raise sequence_length."
    )


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
    return _encode_rows(rows, **settings)


def _encode_rows(
    rows: Sequence[Mapping[str, Any]], encoder: Encoder, length: int, source: Source
) -> dict[str, list[Any]]:
    pieces, places = [], []
    for row in rows:
        place = place_of(row, source)
        found = fit(encoder(example_in(row), place), length, split=encoder.layout.format == "text")
        pieces += found
        places += [place] * len(found)
    return columns_of(pieces, places)


def _save(split: str, sequences: "datasets.Dataset", work: Path) -> dict[str, Any]:
    import datasets

    folder = work / split
    sequences.save_to_disk(str(folder))
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    counts = count_tokens(datasets.load_from_disk(str(folder)))
    return {**counts, "files": [file_record(path, work) for path in sorted(folder.glob("*.arrow"))]}


def _check_vocabulary(run: Run, largest: int) -> None:
    """Raise `ModelError` for token ids beyond the embedding: every rank would fail with an index error."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(run.model, revision=run.revision, trust_remote_code=run.trust_remote_code)
    size = config.get_text_config().vocab_size
    if largest >= size:
        raise ModelError(
            f"The tokenizer of {run.model!r} produces token id {largest}, but the model's vocab_size is {size}. "
            "Tokenizer and model do not match, or the embedding was not resized for added tokens. Fix the model folder."
        )


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
        f"{_outcomes(dict(counts))} in {plural(counts.sequences, 'sequence')} of {length:,} tokens ({full:.0%} full), "
        f"{counts.loss_tokens:,} of {counts.tokens:,} tokens learned"
    )


def _outcomes(counts: Mapping[str, Any]) -> str:
    parts = {
        "truncated": "truncated",
        "split": "split into pieces",
        "dropped_without_loss": "dropped, with nothing to learn",
        "dropped_loss_truncated": "dropped, with nothing to learn before the cut",
    }
    parts_found = [f"{counts[key]:,} {words}" for key, words in parts.items() if counts[key]]
    return "; ".join([plural(counts["examples"], "example"), *parts_found])
