"""The examples of a run: their sources, their layout, and their encoding; used by the data stage and by the plan."""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from shardmake.config.chat_template import read_template
from shardmake.config.models import Run
from shardmake.config.objectives import OBJECTIVES
from shardmake.core.atomic import digest
from shardmake.core.errors import DataError, ModelError
from shardmake.core.units import plural
from shardmake.data.chat import ChatTemplate
from shardmake.data.encode import Encoder, TokenPair, Tokens, answer_tokens, loss_on_assistant, tokenize
from shardmake.data.files import RawRow
from shardmake.data.layout import Layout, check_named, recognize
from shardmake.data.packing import KEPT, fit, fit_pair
from shardmake.data.placeholders import Rendered
from shardmake.data.sources import (
    EVAL_SPLITS,
    TRAIN_SPLITS,
    Row,
    Source,
    first_rows,
    locate,
    no_examples,
    open_raw,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)
Columns = dict[str, list[Any]]
APART: Final = "apart"
LEAST_SHARE: Final = 0.01
"""Smallest share of learned tokens in conversations without a warning."""
MOST_BAD: Final = 0.05
"""Largest part of the rows of a source that ``data.on_bad_row: drop`` leaves out."""
_EMPTY: Final[Mapping[str, Mapping[str, Any]]] = {
    "preference": {"rejected_ids": []},
    "unpaired-preference": {"label": False, "cut_ids": []},
}
"""Columns of a format for a row without tokens."""


@dataclass(frozen=True)
class Part:
    """One source of examples, and the run as if that were its only one."""

    split: str
    name: str
    """Name in a mixture; empty if the split has one source."""
    run: Run
    source: Source
    has_own_layout: bool
    """The layout is recognized from this source; else it is that of the training examples."""


def locate_parts(run: Run) -> list[Part]:
    """Return the sources of the training data, then those of the evaluation data (none if these are held out).

    Raw data has no examples, so it is not among them. A single source of evaluation examples has the layout of a single
    source of training examples.
    """
    data, parts = run.data, []
    read = data.model_copy(update={"format": "auto"}) if data.is_raw else data
    trained = [] if data.is_raw else data.sources
    for split, sources, splits, several in (
        ("train", trained, TRAIN_SPLITS, isinstance(data.train, list)),
        ("eval", data.eval_sources, EVAL_SPLITS, isinstance(data.eval, list)),
    ):
        for one in sources:
            view = run.model_copy(update={"data": read.only(one)})
            source = locate(one.source, view.data, splits)
            own = split == "train" or several or len(trained) != 1
            parts.append(Part(split, one.label if several else "", view, source, own))
    return parts


def load_tokenizer(run: Run) -> "PreTrainedTokenizerBase":
    """Return the tokenizer of the run's model, with the run's chat template if it has one.

    Raises `ModelError` if the tokenizer cannot be loaded or lacks a token that the objective needs, and `ConfigError`
    if the template cannot be loaded.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            run.model, revision=run.revision, trust_remote_code=run.trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise ModelError(f"Cannot load the tokenizer of {run.model!r}: {error}") from None
    except Exception:
        _load_config(run)  # transformers reads it first; its error has advice
        raise
    if OBJECTIVES[run.objective].new_head and tokenizer.pad_token is None and tokenizer.eos_token is None:
        raise ModelError(
            f"Cannot train {run.model!r} with objective: {run.objective}. A reward model finds the end of a sequence "
            "by its padding, and the tokenizer has neither a padding nor an end-of-sequence token. Set pad_token in "
            "tokenizer_config.json."
        )
    if run.data.chat_template is not None:
        tokenizer.chat_template = read_template(Path(run.data.chat_template))
    return tokenizer


def tokenizer_digest(tokenizer: "PreTrainedTokenizerBase") -> str:
    """Return a digest of all that determines token ids: vocabulary and rules, special tokens, chat template."""
    rules = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else tokenizer.get_vocab()
    return digest({"rules": rules, "special": tokenizer.special_tokens_map, "template": tokenizer.chat_template})


def first_of(source: Source, limit: int) -> list[Row]:
    """Return the first rows of ``source``; raise `DataError` if there is none."""
    rows = list(first_rows(source, limit))
    if not rows:
        raise no_examples(source)
    return rows


def open_chat_template(run: Run, tokenizer: "PreTrainedTokenizerBase", day: date) -> ChatTemplate:
    """Return the chat template of ``run``; ``day`` is for a template that reads the clock."""
    stops = [token for token in _stop_ids(run) | {tokenizer.eos_token_id} if token is not None]
    texts = frozenset(text for text in tokenizer.convert_ids_to_tokens(sorted(stops)) if text)
    return ChatTemplate(tokenizer, texts, run.data.template_arguments, run.data.turns, day)


def _stop_ids(run: Run) -> set[int]:
    """Return the tokens at which generation with the run's model stops, as far as its files state them."""
    from transformers import GenerationConfig

    try:
        found = GenerationConfig.from_pretrained(run.model, revision=run.revision).eos_token_id
    except (OSError, ValueError) as error:  # many base models have no such file
        if Path(run.model, "generation_config.json").exists():
            raise ModelError(f"Cannot read generation_config.json of {run.model!r}: {error}") from None
        return set()
    return set(found) if isinstance(found, list) else {found}


def make_encoder(part: Part, tokenizer: "PreTrainedTokenizerBase", rows: Sequence[Row], day: date) -> Encoder:
    """Return the encoder for the data of ``part`` that begin with ``rows``, and log what was recognized."""
    layout = recognize_layout(part, rows)
    unused = [column for column in _columns_of(rows) if column not in layout.columns.values()]
    rest = f" Columns that are not used: {', '.join(unused)}." if unused else ""
    logger.info(f"{part.source}: the examples are in the format {layout}.{rest}")
    run = part.run
    chat = open_chat_template(run, tokenizer, day)
    return Encoder(chat, layout, loss_on_assistant(run.data, layout.format), OBJECTIVES[run.objective].cuts)


def recognize_layout(part: Part, rows: Sequence[Row]) -> Layout:
    """Return the layout of the data of ``part`` that begin with ``rows``."""
    check_named(part.run.data, _columns_of(rows), str(part.source))
    first = rows[0]
    return recognize(part.run.data, part.run.objective, first.columns, first.example, first.place)


def _columns_of(rows: Sequence[Row]) -> list[str]:
    """Return all columns of ``rows``, each once."""
    return list(dict.fromkeys(column for row in rows for column in row.columns))


def encode_rows(rows: Iterable[RawRow], encoder: Encoder, length: int, *, drop: bool) -> Columns:
    """Return the pieces of ``rows``, which are opened here, as columns, each of at most ``length`` tokens.

    ``dropped`` has the place of a dropped example, and ``note`` why, with ``drop`` also for a bad row. A conversation
    of several examples has `APART` there. Pairs also have ``rejected_ids``. Completions with labels have ``label`` and
    ``cut_ids``: the tokens after the cut for which a prompt of one token has room, because the completion may also
    follow the prompt of another example.
    """
    opened, texts = list[tuple[Row | None, Any]](), list[Rendered]()
    for raw in rows:
        row = None
        try:
            row = open_raw(raw)
            rendered = encoder.render(row.example, row.place)
        except DataError as error:
            if not drop:
                raise
            opened.append((row, error))
        else:
            opened.append((row, len(rendered)))
            texts += rendered
    tokens = iter(tokenize(encoder.tokenizer, texts))
    pieces: list[dict[str, Any]] = []
    for row, found in opened:
        if row is None or isinstance(found, DataError):
            cause = getattr(found, "cause", "not in the format")
            bad = {"input_ids": [], "loss_mask": [], "seq_lengths": [0], "outcome": "dropped_bad", "note": cause}
            pieces.append({**bad, "dropped": str(found), **_EMPTY.get(encoder.layout.format, {})})
        else:
            pieces += _pieces(row, list(islice(tokens, found)), encoder, length)
    return {name: [piece[name] for piece in pieces] for name in pieces[0]}


def _pieces(row: Row, encoded: list[Tokens], encoder: Encoder, length: int) -> Iterator[dict[str, Any]]:
    format, others = encoder.layout.format, dict[str, Any]()
    fitted = [piece for tokens in encoded[:1] for piece in fit(tokens, length, split=format == "text")]
    if format == "preference":
        pair, outcome = fit_pair(TokenPair.of(*encoded), length, cuts=encoder.cuts)
        fitted, others["rejected_ids"] = [(answer_tokens(pair.prompt, pair.chosen), outcome)], pair.rejected
    elif format == "unpaired-preference":
        ids, mask = encoded[0]
        others["label"] = row.example[encoder.layout.columns["label"]]
        others["cut_ids"] = ids[length : mask.index(True) + length - 1] if any(mask) else []
    else:
        fitted += [piece for tokens in encoded[1:] for piece in fit(tokens, length, split=False)]
    is_apart = format != "preference" and len(encoded) > 1
    for number, ((ids, mask), outcome) in enumerate(fitted):
        place = "" if outcome in KEPT else row.place
        piece = {"input_ids": ids, "loss_mask": mask, "seq_lengths": [len(ids)], "outcome": outcome, "dropped": place}
        yield piece | others | {"note": APART if is_apart and number == 0 else ""}


def check_divisible(count: int, run: Run) -> None:
    """Raise `DataError` if ``count`` examples are too few to hold one out for evaluation."""
    if count < 2:
        raise DataError(
            f"Too little data: {run.data.names} has one example, and evaluation needs another one. Set data.eval "
            "or add data."
        )


def check_bad_rows(part: str, notes: Mapping[str, int], counts: Mapping[str, int], dropped: Sequence[str]) -> None:
    """Log the rows that were dropped by cause; raise `DataError` if they are more than `MOST_BAD` of the rows."""
    bad = {cause: count for cause, count in notes.items() if cause != APART}
    if not bad:
        return
    causes = "; ".join(f"{count:,} {cause}" for cause, count in sorted(bad.items()))
    message = f"Bad rows of the {part} data: {sum(bad.values()):,} of {counts['examples']:,} ({causes}). "
    message += f"The first: {' '.join(dropped)}"
    if sum(bad.values()) > max(1, MOST_BAD * counts["examples"]):  # one of few held-out rows is not many
        raise DataError(f"{message} data.on_bad_row: drop allows {MOST_BAD:.0%}. Correct the data.")
    logger.warning(message)


def describe_apart(part: str, notes: Mapping[str, int]) -> None:
    """Log how many conversations become several examples."""
    if notes.get(APART):
        logger.info(
            f"The chat template renders turns of the {part} data differently once others follow: of "
            f"{plural(notes[APART], 'conversation')} each turn is an example with its own context (data.turns)."
        )


def check_shares(part: str, learned: int, tokens: int, encoder: Encoder) -> None:
    """Log a warning if nearly none or all of the tokens of conversations are learned."""
    share = learned / max(1, tokens)
    is_chat = encoder.layout.format in ("chat", "sharegpt") and encoder.assistant_only
    if is_chat and tokens and (share < LEAST_SHARE or share == 1):
        logger.warning(
            f"{learned:,} of {tokens:,} tokens of the {part} data are learned ({share:.2%}). Look at examples with "
            "shardmake data NAME --show 3."
        )


def check_learned(part: str, counts: Mapping[str, int], dropped: Sequence[str], encoder: Encoder) -> None:
    """Raise `DataError` if all examples were dropped; log a warning that names the first if some were."""
    if not dropped:
        return
    roles = " Only messages with the role assistant are learned." if encoder.assistant_only else ""
    if encoder.layout.format == "preference":
        where = "before sequence_length" if encoder.cuts else "and are not longer than sequence_length"
        roles = f" Pairs are learned whose answers differ {where}."
    count = sum(number for outcome, number in counts.items() if outcome.startswith("dropped_"))
    if count < counts["examples"]:
        if unlearned := count - counts.get("dropped_bad", 0):
            logger.warning(
                f"Examples of the {part} data with nothing to learn are dropped: {unlearned:,} of "
                f"{counts['examples']:,}. The first: {'; '.join(dropped)}.{roles}"
            )
        return
    raise DataError(
        f"No example in the {part} data has a token to learn: {describe_outcomes(counts)}. "
        f"The first: {'; '.join(dropped)}.{roles} Check data.format and data.loss_on, or raise sequence_length."
    )


def _load_config(run: Run) -> Any:
    """Return the config of the run's model; raise `ModelError` if transformers rejects it."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(run.model, revision=run.revision, trust_remote_code=run.trust_remote_code)
    except OSError as error:
        raise ModelError(f"Cannot load the config.json of {run.model!r}: {error}") from None
    except Exception as error:  # a config class may raise anything for unusual values
        raise ModelError(
            f"transformers rejects the config.json of {run.model!r}: {' '.join(str(error).split())}. Use the "
            "config.json that came with the weights, or the version of transformers that wrote it."
        ) from None


def check_vocabulary(run: Run, largest: int) -> None:
    """Raise `ModelError` for token ids beyond the embedding: every rank would fail with an index error."""
    size = _load_config(run).get_text_config().vocab_size
    if largest >= size:
        raise ModelError(
            f"The tokenizer of {run.model!r} produces token id {largest}, but the model's vocab_size is {size}. "
            "Tokenizer and model do not match, or the embedding was not resized for added tokens. Fix the model folder."
        )


def describe_outcomes(counts: Mapping[str, Any]) -> str:
    """Return the number of examples, and of those that were cut or dropped."""
    parts = {
        "truncated": "truncated",
        "split": "split into pieces",
        "dropped_without_loss": "dropped, with nothing to learn",
        "dropped_loss_truncated": "dropped, with nothing to learn before the cut",
        "dropped_too_long": "dropped, longer than sequence_length",
        "dropped_bad": "dropped as bad rows",
    }
    parts_found = [f"{counts[key]:,} {words}" for key, words in parts.items() if counts[key]]
    return "; ".join([plural(counts["examples"], "example"), *parts_found])
