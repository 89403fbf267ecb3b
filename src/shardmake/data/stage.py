"""The data stage: examples to packed, memory-mapped token sequences, in ``runs/NAME/data``.

Tokenizing is a stage of its own because inside the process group it runs into the group's time-outs. The sequences are
written to a temporary folder and renamed; the receipt is written last.
"""

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardmake.config.models import Run
from shardmake.core.atomic import digest, fsync_directory, read_json, write_json
from shardmake.core.errors import ShardmakeError
from shardmake.data.encode import Encoder, detect_format, loss_on_assistant
from shardmake.data.packing import KEPT, columns_of, count_outcomes, count_tokens, fit, pack
from shardmake.data.sources import (
    EVAL_SPLITS,
    TRAIN_SPLITS,
    Source,
    check,
    example_in,
    file_record,
    identity,
    locate,
    place_of,
    read,
)
from shardmake.run.paths import RunDir

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedTokenizerBase

_LAYOUT = 1
_WORTH_A_POOL = 5_000


def prepare(run: Run, rundir: RunDir, cpus: int = 1, tell: Callable[[str], None] = print) -> dict[str, Any]:
    """Write the tokenized training and evaluation sequences of ``run`` and return their receipt.

    Does nothing where the receipt stands for the same sources, tokenizer and settings. ``cpus`` is the number of
    processes that tokenize; it does not change the result. The receipt's ``digest`` stands for what is trained on.
    Raises `ShardmakeError` for data that cannot be used.
    """
    sources = _locate(run)
    tokenizer = _load_tokenizer(run)
    inputs = {
        "layout": _LAYOUT,
        "tokenizer": tokenizer_digest(tokenizer),
        "sources": {split: identity(source) for split, source in sources.items()},
        "settings": _settings(run),
    }
    receipt = _current(rundir, inputs)
    if receipt is not None:
        tell(f"{rundir.data} is up to date.")
        return receipt
    with _workspace(rundir) as work:
        results = _build(run, tokenizer, sources, work, cpus)
        trained_on = digest({"files": results["train"]["files"], "length": run.sequence_length})
        receipt = {"digest": trained_on, **inputs, "pad_token_id": _pad_token_id(tokenizer), **results}
        _publish(work, rundir, receipt)
    for split in ("train", "eval"):
        tell(f"{rundir.data / split}: {_summary(receipt[split], run.sequence_length)}.")
    return receipt


def check_sources(run: Run) -> None:
    """Read the run's local files to their end; `ShardmakeError` with file and line for what cannot be read."""
    for source in _locate(run).values():
        check(source)


def _locate(run: Run) -> dict[str, Source]:
    sources = {"train": locate(run.data.train, run.data, TRAIN_SPLITS)}
    if run.data.eval is not None:
        sources["eval"] = locate(run.data.eval, run.data, EVAL_SPLITS)
    return sources


def _settings(run: Run) -> dict[str, Any]:
    data = run.data.model_dump(include={"format", "loss_on", "eval_fraction"})
    return {**data, **run.model_dump(include={"sequence_length", "packing", "seed"})}


def _load_tokenizer(run: Run) -> "PreTrainedTokenizerBase":
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(run.model, revision=run.revision, trust_remote_code=run.trust_remote_code)
    except (OSError, ValueError) as error:
        raise ShardmakeError(f"model {run.model!r} gives no tokenizer: {error}") from None


def tokenizer_digest(tokenizer: "PreTrainedTokenizerBase") -> str:
    """Digest of what decides the ids of a text: vocabulary and rules, special tokens, chat template."""
    rules = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else tokenizer.get_vocab()
    return digest({"rules": rules, "special": tokenizer.special_tokens_map, "template": tokenizer.chat_template})


def _pad_token_id(tokenizer: "PreTrainedTokenizerBase") -> int:
    """Id that fills sequences up; it is never learned or attended to, so any id does where there is none for it."""
    return next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0)


def _current(rundir: RunDir, inputs: Mapping[str, Any]) -> dict[str, Any] | None:
    """The receipt, if it stands for ``inputs`` and the files that it lists are there."""
    if not rundir.data_receipt.is_file():
        return None
    receipt = read_json(rundir.data_receipt, f"shardmake data {rundir.name}")
    same = all(receipt.get(key) == value for key, value in inputs.items())
    return receipt if same and all(_is_there(rundir.data, receipt[split]) for split in ("train", "eval")) else None


def _is_there(folder: Path, split: Mapping[str, Any]) -> bool:
    files = [(folder / file["path"], file["bytes"]) for file in split["files"]]
    return all(path.is_file() and path.stat().st_size == size for path, size in files)


@contextmanager
def _workspace(rundir: RunDir) -> Iterator[Path]:
    """An empty folder on the run's file system, gone afterwards."""
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
    """Write both splits into ``work`` and return what the receipt says of them."""
    rows = {split: read(source, work / "cache" / split) for split, source in sources.items()}
    if "eval" not in rows:
        rows = _set_aside(rows["train"], run)
    first = rows["train"][0]
    format = detect_format(run.data, run.objective, example_in(first), place_of(first))
    encoder = Encoder(tokenizer, format, loss_on_assistant(run.data, format))
    results = {split: _build_split(split, rows[split], encoder, run, work, cpus) for split in ("train", "eval")}
    _check_vocabulary(run, max(result.pop("largest_token_id") for result in results.values()))
    return {"format": format, "loss_on_assistant": encoder.assistant_only, **results}


def _set_aside(rows: "datasets.Dataset", run: Run) -> dict[str, "datasets.Dataset"]:
    """Part of the training rows, at least one, for evaluation."""
    if len(rows) < 2:
        raise ShardmakeError(
            f"{run.data.train} holds one example; evaluation needs another. Give data.eval or more data."
        )
    count = max(1, round(len(rows) * run.data.eval_fraction))
    shuffled = rows.shuffle(seed=run.seed, keep_in_memory=True)
    return {"train": shuffled.select(range(count, len(rows))), "eval": shuffled.select(range(count))}


def _build_split(
    split: str, rows: "datasets.Dataset", encoder: Encoder, run: Run, work: Path, cpus: int
) -> dict[str, Any]:
    encoded = _encode(rows, encoder, run.sequence_length, work / "cache" / f"{split}-encoded.arrow", cpus)
    kept = encoded.filter(lambda outcome: outcome in KEPT, input_columns="outcome", keep_in_memory=True)
    if not len(kept):
        raise ShardmakeError(
            f"no example of the {split} data has a token to learn: {_outcomes(count_outcomes(encoded))}."
        )
    kept = kept.remove_columns("outcome").shuffle(seed=run.seed, keep_in_memory=True)
    if run.packing:
        kept = kept.remove_columns("seq_lengths")
        kept = pack(kept, run.sequence_length, work / "cache" / f"{split}-packed.arrow", split)
    return {**count_outcomes(encoded), **_save(split, kept, work)}


def _encode(rows: "datasets.Dataset", encoder: Encoder, length: int, cache_file: Path, cpus: int) -> "datasets.Dataset":
    import datasets

    features = {
        "input_ids": datasets.List(datasets.Value("int32")),
        "loss_mask": datasets.List(datasets.Value("bool")),
        "seq_lengths": datasets.List(datasets.Value("int32")),
        "outcome": datasets.Value("string"),
    }
    return rows.map(
        _encode_rows,
        batched=True,
        batch_size=100,
        fn_kwargs={"encoder": encoder, "length": length},
        remove_columns=rows.column_names,
        features=datasets.Features(features),
        num_proc=cpus if cpus > 1 and len(rows) > _WORTH_A_POOL else None,
        cache_file_name=str(cache_file),
        load_from_cache_file=False,
        new_fingerprint="encoded",
        desc="tokenize",
    )


def _encode_rows(batch: Mapping[str, list[Any]], encoder: Encoder, length: int) -> dict[str, list[Any]]:
    pieces = []
    for values in zip(*batch.values(), strict=True):
        row = dict(zip(batch, values, strict=True))
        pieces += fit(encoder(example_in(row), place_of(row)), length, split=encoder.format == "text")
    return columns_of(pieces)


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
    """Refuse token ids beyond the model's embedding: training would end in an index error on every rank."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(run.model, revision=run.revision, trust_remote_code=run.trust_remote_code)
    size = config.get_text_config().vocab_size
    if largest >= size:
        raise ShardmakeError(
            f"the tokenizer of {run.model!r} gives token id {largest}, but the model's vocab_size is {size}. "
            "Tokenizer and model do not belong together, or the embedding was not resized for added tokens."
        )


def _publish(work: Path, rundir: RunDir, receipt: Mapping[str, Any]) -> None:
    """Put the splits in place, then the receipt; an old receipt that says something else goes first."""
    rundir.data.mkdir(parents=True, exist_ok=True)
    if rundir.data_receipt.is_file() and read_json(rundir.data_receipt, "shardmake data") != receipt:
        rundir.data_receipt.unlink()
    for split in ("train", "eval"):
        shutil.rmtree(rundir.data / split, ignore_errors=True)
        (work / split).rename(rundir.data / split)
    fsync_directory(rundir.data)
    write_json(rundir.data_receipt, receipt)


def _summary(counts: Mapping[str, Any], length: int) -> str:
    full = counts["tokens"] / (counts["sequences"] * length)
    return (
        f"{_outcomes(counts)} in {counts['sequences']:,} sequences of {length:,} tokens ({full:.0%} full), "
        f"{counts['loss_tokens']:,} of {counts['tokens']:,} tokens learned"
    )


def _outcomes(counts: Mapping[str, Any]) -> str:
    parts = {
        "truncated": "truncated",
        "split": "split into pieces",
        "dropped_without_loss": "dropped, with nothing to learn",
        "dropped_loss_truncated": "dropped, with nothing to learn before the cut",
    }
    said = [f"{counts[key]:,} {words}" for key, words in parts.items() if counts[key]]
    return "; ".join([f"{counts['examples']:,} examples", *said])
