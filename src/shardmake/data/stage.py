"""The data stage: write packed, memory-mapped token sequences to ``runs/NAME/data``.

Tokenizing is a separate stage because it can exceed the process group's timeouts. The sequences are written to a
temporary folder and renamed. The receipt is written last. A run takes the files of another run that were made from the
same content: links, or copies where links are impossible, so each run can be removed alone.
"""

import logging
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import groupby, islice
from operator import itemgetter
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from shardmake.config.formats import RAW
from shardmake.config.models import Run
from shardmake.core.atomic import digest, sha256
from shardmake.core.errors import DataError, ShardmakeError
from shardmake.core.run_folder import fsync_directory, link_or_copy, locked, make_folder, remove, rename, unlink
from shardmake.core.units import plural
from shardmake.data.build import build
from shardmake.data.chat import ChatTemplate
from shardmake.data.check import marks_agree
from shardmake.data.encode import Tokens
from shardmake.data.examples import Part, make_encoder, open_chat_template, open_parts, read_receipt
from shardmake.data.packing import describe_outcomes
from shardmake.data.sources import FIRST_ROWS, are_linked, identity, identity_of_raw, link_raw
from shardmake.run.paths import RunDir
from shardmake.run.receipts import DataReceipt, DataSettings, SplitReceipt, content_of
from shardmake.run.tokenizer import tokenizer_digest

_LAYOUT = 3
ENCODING = 5
"""Version of the rules that make tokens of an example: one more for each change of them."""
_SHOWN = 2
_SHOWN_TEXT = 2_000
logger = logging.getLogger(__name__)


def prepare(run: Run, rundir: RunDir, cpus: int = 1) -> DataReceipt:
    """Write the tokenized training and evaluation sequences of ``run`` and return their receipt.

    Raw data is not tokenized: the script's files are hashed and linked. Do nothing if the receipt has the same sources,
    tokenizer and settings. If the receipt of another run has them, take the files of that run. ``cpus`` processes
    tokenize, which does not change the result. Raises `DataError` for data that cannot be used.
    """
    parts = open_parts(run)
    raw_source = Path(run.data.sources[0].source)
    raw: dict[str, dict[str, Any]] = {"train": identity_of_raw(raw_source)} if run.data.is_raw else {}
    chat = open_chat_template(run, rundir)
    tokenizer, has_clock = chat.tokenizer, "strftime_now" in str(chat.tokenizer.chat_template)
    settings = run.data.model_dump(include=set(DataSettings.model_fields) - {"columns"})
    settings |= run.model_dump(include={"sequence_length", "packing", "seed"}) | _mix_settings(run)
    settings |= {"columns": run.data.columns.named, "stops": sorted(chat.stops)}
    settings["objective"] = None if run.objective == "sft" else run.objective
    settings["day"] = chat.day.isoformat() if chat.day and has_clock else None
    inputs = {
        "layout": _LAYOUT,
        "tokenizer": tokenizer_digest(tokenizer),
        "sources": raw | {f"{part.split}/{part.name}".rstrip("/"): identity(part.source.paths) for part in parts},
        "settings": DataSettings(**settings).model_dump(mode="json"),
    }
    receipt = _current(rundir, inputs)
    if receipt is not None and (not raw or are_linked(raw_source, raw["train"], rundir.raw_data)):
        logger.info(f"{rundir.data} is up to date.")
        return receipt
    lock = locked(rundir.root.parent, f"data-{digest(content_of(inputs))}")  # other runs may prepare the same
    with lock, _workspace(rundir, digest(inputs)) as work:
        receipt = None if raw else _take_same_data(rundir, inputs, work)
        if receipt is None:
            results = build(run, chat, parts, work, cpus)
            sequences = {"files": results["train"]["files"], "length": run.sequence_length}
            results["shown"] = [_excerpt(text) for text in islice(show(chat, parts, _SHOWN, log=False), _SHOWN)]
            agree = [marks_agree(make_encoder(part, chat, log=False), part.rows[0]) for part in parts]
            results["marks_agree"] = None if set(agree) <= {None} else False not in agree
            pads = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)  # padding is neither learned nor attended to
            results |= {"encoding": ENCODING, "pad_token_id": next(token for token in pads if token is not None)}
            receipt = DataReceipt(digest=digest(raw or sequences), **inputs, **results)
        if raw:
            link_raw(raw_source, raw["train"], work / RAW)
        _publish(work, rundir, receipt)
    if raw:
        logger.info(f"{rundir.raw_data}: {plural(len(raw['train']['files']), 'file')} for the script.")
    for split in ("eval",) if raw else ("train", "eval"):
        counts = getattr(receipt, split)
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
    receipt = read_receipt(rundir)
    if receipt is None or inputs != receipt.model_dump(include=set(inputs), mode="json"):
        return None
    files = [(rundir.data / file.path, file.bytes) for file in (*receipt.train.files, *receipt.eval.files)]
    return receipt if all(path.is_file() and path.stat().st_size == size for path, size in files) else None


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
        make_folder(work / inputs)
    try:
        yield work
    finally:
        remove(work)


def _take_same_data(rundir: RunDir, inputs: Mapping[str, Any], work: Path) -> DataReceipt | None:
    """Put the splits of another run with the same content into ``work``, and return their receipt for this run.

    Return None if no run has them, or if their files are not those of their receipt.
    """
    wanted = content_of(inputs)
    for path in sorted(rundir.root.parent.glob("*/data/receipt.json")):
        if path == rundir.data_receipt:
            continue
        with suppress(ShardmakeError, OSError):  # removed or renewed at this moment, or of another version
            receipt = DataReceipt.read(path)
            found = receipt.model_dump(include=set(inputs), mode="json")
            is_same = receipt.encoding == ENCODING and content_of(found) == wanted
            if is_same and _take_splits(path.parent, receipt, work):
                logger.info("Took the data of %s, which has the same content.", path.parents[1].name)
                return DataReceipt(**(receipt.model_dump() | dict(inputs)))
    return None


def _take_splits(folder: Path, receipt: DataReceipt, work: Path) -> bool:
    for split in ("train", "eval"):
        remove(work / split)
        shutil.copytree(folder / split, work / split, copy_function=link_or_copy)
    return all(sha256(work / file.path) == file.sha256 for part in (receipt.train, receipt.eval) for file in part.files)


def _publish(work: Path, rundir: RunDir, receipt: DataReceipt) -> None:
    """Rename the splits into place, then write the receipt; remove an outdated receipt first."""
    make_folder(rundir.data)
    if read_receipt(rundir) != receipt:
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
    return show(open_chat_template(run, rundir), open_parts(run, max(count, FIRST_ROWS)), count)


def show(chat: ChatTemplate, parts: Sequence[Part], count: int, *, log: bool = True) -> Iterator[str]:
    """Yield a heading and the text of each of the first ``count`` examples of each training source of ``parts``.

    Both answers of a pair are shown, and each of turns that are apart. Raises what the data stage raises for these
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


def marked(tokenizer: PreTrainedTokenizerBase, tokens: Tokens, cut: int | None = None) -> str:
    """Return the text of ``tokens`` up to the ``cut``, with loss tokens in ``[[ ]]``, and how many tokens follow it."""
    shown, left = "", len(tokens[0][cut:]) if cut else 0
    for has_loss, pairs in groupby(zip(*(part[:cut] for part in tokens), strict=True), key=itemgetter(1)):
        text = tokenizer.decode([token for token, _ in pairs], clean_up_tokenization_spaces=False)
        shown += f"[[{text}]]" if has_loss else text
    return shown + (f"[cut: {left:,} tokens]" if left else "")
