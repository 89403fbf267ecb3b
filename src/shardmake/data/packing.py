"""Cut and pack examples into sequences of at most a given length, and count their outcomes; some are refused."""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import datasets
import numpy as np
import pyarrow
import pyarrow.compute as pc

from shardmake.core.errors import DataError
from shardmake.core.units import plural
from shardmake.data.encode import Encoder, Tokens

APART: Final = "apart"
"""Note of the first example of a conversation of which each turn is an example."""
KEPT: Final = ("whole", "truncated", "split", "continued")
OUTCOMES: Final[Mapping[str, str]] = {
    "truncated": "truncated",
    "split": "split into pieces",
    "dropped_without_loss": "dropped, with nothing to learn",
    "dropped_loss_truncated": "dropped, with nothing to learn before the cut",
    "dropped_too_long": "dropped, longer than sequence_length",
    "dropped_bad": "dropped as bad rows",
}
"""The outcomes that are counted, in words."""
_NAMED: Final = 5
"""Dropped examples that are named."""
logger = logging.getLogger(__name__)
LEAST_SHARE: Final = 0.01
"""Smallest share of learned tokens in conversations without a warning."""
MOST_BAD: Final = 0.05
"""Largest part of the rows of a source that ``data.on_bad_row: drop`` leaves out."""
_TOKENS_PACKED_AT_ONCE = 2**25


def fit(tokens: Tokens, length: int, *, split: bool) -> list[tuple[Tokens, str]]:
    """Cut an example to at most ``length`` tokens: its beginning, or with ``split`` all of it in pieces, with outcomes.

    The first token of each piece has no loss, since nothing in the piece predicts it. A piece without loss tokens has
    an outcome with the reason: there were none, or they were after the cut.
    """
    ids, mask = tokens
    starts = list(range(0, len(ids), length)) if split else [0][: len(ids)]
    if len(starts) > 1 and starts[-1] == len(ids) - 1:
        starts[-1] -= 1  # a single token would have nothing before it
    pieces = [(ids[i : i + length], mask[i : i + length].copy()) for i in starts]
    for _, learned in pieces:
        learned[0] = False
    if True not in mask[1:]:
        return [(([], []), "dropped_without_loss")]
    if len(ids) <= length:
        return [(pieces[0], "whole")]
    if split:
        return [(piece, "continued" if i else "split") for i, piece in enumerate(pieces) if True in piece[1]]
    return [(pieces[0], "truncated") if True in pieces[0][1] else (([], []), "dropped_loss_truncated")]


def fit_pair(pair: list[Tokens], length: int, *, cuts: bool = True) -> tuple[list[Tokens], str]:
    """Cut both answers so that each is at most ``length`` tokens long with the prompt; without ``cuts``, drop the pair.

    Pairs with equal answers, from the start or after the cut, have nothing to learn. TRL cuts and drops in the same way
    but keeps equal answers, whose gradient is zero.
    """
    cut, nothing = [(ids[:length], mask[:length]) for ids, mask in pair], list[Tokens]([([], []), ([], [])])
    if pair[0] == pair[1]:
        return nothing, "dropped_without_loss"
    if not cuts and cut != pair:
        return nothing, "dropped_too_long"
    if cut[0] == cut[1]:
        return nothing, "dropped_loss_truncated"
    return cut, "whole" if cut == pair else "truncated"


def pack(examples: datasets.Dataset, length: int, cache_file: Path) -> datasets.Dataset:
    """Pack examples (``input_ids``, ``loss_mask``) into sequences of at most ``length`` tokens.

    Best fit decreasing, in blocks of examples that fit in memory; ``seq_lengths`` has the length of each example.
    """
    from trl.data_utils import pack_dataset

    block = max(1, min(10_000, _TOKENS_PACKED_AT_ONCE // length))
    named = {"cache_file_name": str(cache_file), "new_fingerprint": cache_file.stem, "load_from_cache_file": False}
    return pack_dataset(examples, length, strategy="bfd", map_kwargs={"batch_size": block, **named})


@dataclass(frozen=True)
class Encoded:
    """The encoded rows of one source in one split; ``name`` is that of the source, as in a mixture."""

    name: str
    encoder: Encoder
    table: datasets.Dataset
    kept: np.ndarray
    """Numbers of the rows of ``table`` that are in the split and have something to learn."""
    counts: dict[str, Any]

    @classmethod
    def of(cls, name: str, encoder: Encoder, table: datasets.Dataset, chosen: np.ndarray) -> "Encoded":
        """Return the rows of ``table`` that are ``chosen``, one boolean a row."""
        own = table.data.table.select(["outcome", "note", "dropped"]).filter(pyarrow.array(chosen))  # a copy
        found = (pc.value_counts(own.column(name)).to_pylist() for name in ("outcome", "note"))
        outcomes, notes = ({one["values"]: one["counts"] for one in values if one["values"]} for values in found)
        counts = {"examples": sum(outcomes.values()) - outcomes.get("continued", 0)}
        counts |= {outcome: outcomes.get(outcome, 0) for outcome in OUTCOMES}
        places = own.column("dropped").filter(pc.not_equal(own.column("dropped"), ""))
        more = {"apart": notes.pop(APART, 0), "bad": dict(sorted(notes.items()))}
        more["first_dropped"] = places.slice(0, _NAMED).to_pylist()
        is_kept = pc.is_in(table.data.column("outcome"), pyarrow.array(KEPT)).to_numpy()
        return cls(name, encoder, table, np.flatnonzero(chosen & is_kept), counts | more)

    def column(self, name: str) -> np.ndarray:
        """Return the numbers of a column of the kept rows."""
        return self.table.data.column(name).to_numpy()[self.kept]

    def check(self, title: str, *, is_all: bool = True) -> "Encoded":
        """Log what ``title``, the name of these examples, is unusual in; raise `DataError` for what cannot be learned.

        Without ``is_all``, other rows may have something to learn.
        """
        counts = self.counts
        if counts["bad"]:
            self._check_bad(title)
        if counts["apart"]:
            logger.info(
                f"The chat template renders turns of the {title} data differently once others follow: of "
                f"{plural(counts['apart'], 'conversation')} each turn is an example with its own context (data.turns)."
            )
        if counts["first_dropped"] and (is_all or len(self.kept)):
            self._check_learned(title)
        tokens, learned = (int(self.column(name).sum()) for name in ("tokens", "learned"))
        is_chat = self.encoder.layout.format in ("chat", "sharegpt") and self.encoder.assistant_only
        if is_chat and tokens and (learned < LEAST_SHARE * tokens or learned == tokens):
            logger.warning(
                f"{learned:,} of {tokens:,} tokens of the {title} data are learned ({learned / tokens:.2%}). Look at "
                "examples with shardmake data NAME --show 3."
            )
        return self

    def _check_bad(self, title: str) -> None:
        bad, examples = self.counts["bad"], self.counts["examples"]
        causes = "; ".join(f"{count:,} {cause}" for cause, count in bad.items())
        message = f"Bad rows of the {title} data: {sum(bad.values()):,} of {examples:,} ({causes}). "
        message += f"The first: {' '.join(self.counts['first_dropped'])}"
        if sum(bad.values()) > max(1, MOST_BAD * examples):  # one of few held-out rows is not many
            raise DataError(f"{message} data.on_bad_row: drop allows {MOST_BAD:.0%}. Correct the data.")
        logger.warning(message)

    def _check_learned(self, title: str) -> None:
        """Raise `DataError` if all examples were dropped; log a warning that names the first if some were."""
        encoder, counts, first = self.encoder, self.counts, "; ".join(self.counts["first_dropped"])
        roles = " Only messages with the role assistant are learned." if encoder.assistant_only else ""
        if encoder.layout.format == "preference":
            where = "before sequence_length" if encoder.cuts else "and are not longer than sequence_length"
            roles = f" Pairs are learned whose answers differ {where}."
        if not len(self.kept):
            raise DataError(
                f"No example in the {title} data has a token to learn: {describe_outcomes(counts)}. "
                f"The first: {first}.{roles} Check data.format and data.loss_on, or raise sequence_length."
            )
        unlearned = sum(counts[outcome] for outcome in OUTCOMES if outcome.startswith("dropped_"))
        if unlearned := unlearned - counts["dropped_bad"]:
            logger.warning(
                f"Examples of the {title} data with nothing to learn are dropped: {unlearned:,} of "
                f"{counts['examples']:,}. The first: {first}.{roles}"
            )


def sum_of(parts: Sequence[Encoded]) -> dict[str, Any]:
    """Return the counts of all ``parts`` together, and their first dropped examples."""
    total: dict[str, Any] = {key: sum(part.counts[key] for part in parts) for key in ("examples", *OUTCOMES, "apart")}
    bad = sum((Counter(part.counts["bad"]) for part in parts), Counter[str]())
    first = [place for part in parts for place in part.counts["first_dropped"]]
    return total | {"bad": dict(sorted(bad.items())), "first_dropped": first[:_NAMED]}


def describe_outcomes(counts: Mapping[str, Any]) -> str:
    """Return the number of examples, and of those that were cut or dropped."""
    parts_found = [f"{counts[key]:,} {words}" for key, words in OUTCOMES.items() if counts[key]]
    return "; ".join([plural(counts["examples"], "example"), *parts_found])
