"""Counts of the rows of one source by outcome, and the refusals and warnings that follow from them."""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from shardmake.core.errors import DataError
from shardmake.core.units import plural
from shardmake.data.encode import Encoder
from shardmake.data.examples import APART
from shardmake.data.packing import KEPT, OUTCOMES

if TYPE_CHECKING:
    import datasets
    import numpy as np

_NAMED: Final = 5
"""Dropped examples that are named."""
logger = logging.getLogger(__name__)
LEAST_SHARE: Final = 0.01
"""Smallest share of learned tokens in conversations without a warning."""
MOST_BAD: Final = 0.05
"""Largest part of the rows of a source that ``data.on_bad_row: drop`` leaves out."""


@dataclass(frozen=True)
class Encoded:
    """The encoded rows of one source in one split; ``name`` is that of the source, as in a mixture."""

    name: str
    encoder: Encoder
    table: "datasets.Dataset"
    kept: "np.ndarray"
    """Numbers of the rows of ``table`` that are in the split and have something to learn."""
    counts: dict[str, Any]

    @classmethod
    def of(cls, name: str, encoder: Encoder, table: "datasets.Dataset", chosen: "np.ndarray") -> "Encoded":
        """Return the rows of ``table`` that are ``chosen``, one boolean a row."""
        import numpy as np
        import pyarrow
        import pyarrow.compute as pc

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

    def column(self, name: str) -> "np.ndarray":
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
