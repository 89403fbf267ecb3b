"""The data stage: write packed, memory-mapped token sequences to ``runs/NAME/data``.

Tokenizing is a separate stage because it can exceed the process group's timeouts. The sequences are written to a
temporary folder and renamed. The receipt is written last.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardmake.config.formats import RAW
from shardmake.config.models import Run
from shardmake.core.atomic import digest
from shardmake.core.errors import DataError, ShardmakeError
from shardmake.core.run_folder import fsync_directory, make_folder, open_file, remove, rename, unlink
from shardmake.core.units import plural
from shardmake.data.build import build
from shardmake.data.chat import ChatTemplate
from shardmake.data.encode import Tokens
from shardmake.data.examples import (
    Part,
    day_of,
    load_tokenizer,
    make_encoder,
    open_chat_template,
    open_parts,
    tokenizer_digest,
)
from shardmake.data.packing import describe_outcomes
from shardmake.data.sharing import ENCODING, content_of, locked, take_same_data
from shardmake.data.sources import FIRST_ROWS, are_linked, identity, identity_of_raw, link_raw
from shardmake.run.paths import RunDir
from shardmake.run.receipts import DataReceipt, DataSettings, SplitReceipt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_LAYOUT = 3
_SHOWN = 2
_SHOWN_TEXT = 2_000
logger = logging.getLogger(__name__)


def prepare(run: Run, rundir: RunDir, cpus: int = 1) -> DataReceipt:
    """Write the tokenized training and evaluation sequences of ``run`` and return their receipt.

    Raw data is not tokenized: the script's files are hashed and linked.

    Do nothing if the receipt has the same sources, tokenizer and settings. If the receipt of another run has them, take
    the files of that run. ``cpus`` is the number of tokenizing processes; it does not change the result. The receipt's
    ``digest`` identifies the training data. Raises `DataError` for data that cannot be used.
    """
    parts = open_parts(run)
    raw_source = Path(run.data.sources[0].source)
    raw: dict[str, dict[str, Any]] = {"train": identity_of_raw(raw_source)} if run.data.is_raw else {}
    tokenizer = load_tokenizer(run)
    day = day_of(rundir)
    chat = open_chat_template(run, tokenizer, day)
    settings = run.data.model_dump(include=set(DataSettings.model_fields) - {"columns"})
    settings |= run.model_dump(include={"sequence_length", "packing", "seed"}) | _mix_settings(run)
    settings |= {"columns": run.data.columns.named, "stops": sorted(chat.stops)}
    settings["objective"] = None if run.objective == "sft" else run.objective
    settings["day"] = day.isoformat() if "strftime_now" in str(tokenizer.chat_template) else None
    inputs = {
        "layout": _LAYOUT,
        "tokenizer": tokenizer_digest(tokenizer),
        "sources": raw | {f"{part.split}/{part.name}".rstrip("/"): identity(part.source) for part in parts},
        "settings": DataSettings(**settings).model_dump(mode="json"),
    }
    receipt = _current(rundir, inputs)
    if receipt is not None and (not raw or are_linked(raw_source, raw["train"], rundir.raw_data)):
        logger.info(f"{rundir.data} is up to date.")
        return receipt
    lock = locked(rundir.root.parent, f"data-{digest(content_of(inputs))}")  # other runs may prepare the same
    with lock, _workspace(rundir, digest(inputs)) as work:
        receipt = None if raw else take_same_data(rundir, inputs, work)
        if receipt is None:
            results = build(run, chat, parts, work, cpus)
            sequences = {"files": results["train"]["files"], "length": run.sequence_length}
            results["shown"] = [_excerpt(text) for text in islice(show(chat, parts, _SHOWN, log=False), _SHOWN)]
            pads = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)  # padding is neither learned nor attended to
            results |= {"encoding": ENCODING, "pad_token_id": next(token for token in pads if token is not None)}
            receipt = DataReceipt(digest=digest(raw or sequences), **inputs, **results)
        if raw:
            link_raw(raw_source, raw["train"], work / RAW)
        _publish(work, rundir, receipt)
    if raw:
        logger.info(f"{rundir.raw_data}: {plural(len(raw['train']['files']), 'file')} for the script.")
    splits = {"eval": receipt.eval} if raw else {"train": receipt.train, "eval": receipt.eval}
    for split, counts in splits.items():
        logger.info(f"{rundir.data / split}: {_summary(counts, run.sequence_length)}.")
        for source in counts.sources:
            logger.info(f"  {source.name}: {source.describe()}")
    if receipt.repeated:
        logger.warning(
            f"Evaluation examples with the same tokens as a training example: {receipt.repeated:,}. Their loss does "
            "not show how the model does on new examples. Remove the duplicates from data.train or data.eval."
        )
    return receipt


def _excerpt(text: str) -> str:
    return text if len(text) <= 2 * _SHOWN_TEXT else f"{text[:_SHOWN_TEXT]}\n...\n{text[-_SHOWN_TEXT:]}"


def _mix_settings(run: Run) -> dict[str, Any]:
    """Return what the data depend on if they have several sources, besides the content of these."""
    reading, lists = {"source", "subset", "revision", "name"}, {"mix": run.data.train, "evaluated": run.data.eval}
    return {
        key: [{"name": one.label} | one.model_dump(exclude=reading, exclude_none=True) for one in sources]
        for key, sources in lists.items()
        if isinstance(sources, list)
    }


def _current(rundir: RunDir, inputs: Mapping[str, Any]) -> DataReceipt | None:
    """Return the receipt if it has the same ``inputs`` and its files exist, else None."""
    receipt = _read(rundir)
    if receipt is None or inputs != receipt.model_dump(include=set(inputs), mode="json"):
        return None
    files = [(rundir.data / file.path, file.bytes) for one in (receipt.train, receipt.eval) for file in one.files]
    return receipt if all(path.is_file() and path.stat().st_size == size for path, size in files) else None


def _read(rundir: RunDir) -> DataReceipt | None:
    """Return the receipt; None if it is missing, damaged or of another layout."""
    with suppress(ShardmakeError):
        return DataReceipt.read(rundir.data_receipt)
    return None


@contextmanager
def _workspace(rundir: RunDir, inputs: str) -> Iterator[Path]:
    """Yield a folder on the run's file system, and remove it afterwards.

    A process that was killed leaves it. It is then kept if it was for the same ``inputs``, a digest.
    """
    work = rundir.data.with_name(".data.tmp")
    try:
        begun = (work / inputs).exists()
    except PermissionError:  # another member's, whose command was killed
        begun = False
    if not begun:
        remove(work)
        make_folder(work, private=True)
        open_file(work / inputs, "a").close()
    try:
        yield work
    finally:
        remove(work)


def _publish(work: Path, rundir: RunDir, receipt: DataReceipt) -> None:
    """Rename the splits into place, then write the receipt; remove an outdated receipt first."""
    make_folder(rundir.data)
    if _read(rundir) != receipt:
        unlink(rundir.data_receipt)
    for part in ("train", "eval", RAW):
        remove(rundir.data / part)
        if (work / part).exists():
            rename(work / part, rundir.data / part)
    fsync_directory(rundir.data)
    receipt.write(rundir.data_receipt)


def _summary(counts: SplitReceipt, length: int) -> str:
    full = counts.tokens / (counts.sequences * length)
    return (
        f"{describe_outcomes(dict(counts))} in {plural(counts.sequences, 'sequence')} of {length:,} tokens "
        f"({full:.0%} full), {counts.loss_tokens:,} of {counts.tokens:,} tokens learned"
    )


def preview(run: Run, count: int, rundir: RunDir) -> Iterator[str]:
    """Yield what `show` does of the first ``count`` training examples of each source; nothing is written."""
    chat = open_chat_template(run, load_tokenizer(run), day_of(rundir))
    return show(chat, open_parts(run, max(count, FIRST_ROWS)), count)


def show(chat: ChatTemplate, parts: Sequence[Part], count: int, *, log: bool = True) -> Iterator[str]:
    """Yield a heading and the text of each of the first ``count`` examples of each training source of ``parts``.

    Loss tokens stand in ``[[ ]]``; of a pair, both answers are shown, and of turns that are apart, each with its
    context. ``[cut: N tokens]`` marks where ``sequence_length`` ends. Raises what the data stage raises for these
    examples; a bad row that it drops is named instead.
    """
    for part in [part for part in parts if part.split == parts[0].split]:  # of raw data, those of the evaluation
        encoder = make_encoder(part, chat, log=log)
        cut = None if encoder.layout.format == "text" else part.run.sequence_length
        for row in part.rows[:count]:
            try:
                examples = encoder(row.example, row.place)
            except DataError as error:
                if not part.drops:
                    raise
                yield f"Dropped: {error}\n"
                continue
            titles = [f", turn {number} of {len(examples)}" for number in range(1, len(examples) + 1)]
            titles = [", chosen", ", rejected"] if encoder.layout.format == "preference" else titles
            for (ids, learned), title in zip(examples, titles if len(examples) > 1 else [""], strict=True):
                heading = f"{row.place}{title}: {len(ids):,} tokens, {sum(learned[:cut]):,} of them learned"
                yield f"{heading}\n{marked(chat.tokenizer, (ids, learned), cut)}\n"


def marked(tokenizer: "PreTrainedTokenizerBase", tokens: Tokens, cut: int | None = None) -> str:
    """Return the text of ``tokens`` up to the ``cut``, with each run of loss tokens in ``[[ ]]``."""
    parts = []
    for has_loss, pairs in groupby(zip(*(part[:cut] for part in tokens), strict=True), key=lambda pair: pair[1]):
        text = tokenizer.decode([token for token, _ in pairs], clean_up_tokenization_spaces=False)
        parts.append(f"[[{text}]]" if has_loss else text)
    left = len(tokens[0][cut:]) if cut else 0
    return "".join(parts) + (f"[cut: {left:,} tokens]" if left else "")
