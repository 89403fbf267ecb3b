"""Cut and pack examples into sequences of at most a given length, and count the results."""

import heapq
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from shardmake.data.encode import TokenPair, Tokens

if TYPE_CHECKING:
    import datasets
    import numpy as np

Outcome = Literal[
    "whole", "truncated", "split", "continued", "dropped_without_loss", "dropped_loss_truncated", "dropped_too_long",
    "dropped_bad",
]  # fmt: skip
KEPT: tuple[Outcome, ...] = ("whole", "truncated", "split", "continued")
_TOKENS_PACKED_AT_ONCE = 2**25
NAMED = 5


def fit(tokens: Tokens, length: int, *, split: bool) -> list[tuple[Tokens, Outcome]]:
    """Cut an example to at most ``length`` tokens: its beginning, or with ``split`` all of it in pieces.

    The first token of each piece has no loss, since nothing in the piece predicts it. A piece without loss tokens has
    an outcome with the reason: there were none, or they were after the cut.
    """
    ids, mask = tokens
    starts = list(range(0, len(ids), length)) if split else [0][: len(ids)]
    if len(starts) > 1 and starts[-1] == len(ids) - 1:
        starts[-1] -= 1  # a single token would have nothing before it
    pieces = [(ids[i : i + length], [False, *mask[i + 1 : i + length]]) for i in starts]
    if not any(mask[1:]):
        return [(([], []), "dropped_without_loss")]
    if len(ids) <= length:
        return [(pieces[0], "whole")]
    if split:
        return [(piece, "continued" if i else "split") for i, piece in enumerate(pieces) if any(piece[1])]
    return [(pieces[0], "truncated") if any(pieces[0][1]) else (([], []), "dropped_loss_truncated")]


def fit_pair(pair: TokenPair, length: int, *, cuts: bool = True) -> tuple[TokenPair, Outcome]:
    """Cut both answers so that each is at most ``length`` tokens long with the prompt; without ``cuts``, drop the pair.

    Pairs with equal answers, from the start or after the cut, have nothing to learn. TRL cuts and drops in the same way
    but keeps equal answers, whose gradient is zero.
    """
    room = length - len(pair.prompt)
    cut = TokenPair(pair.prompt, pair.chosen[: max(room, 0)], pair.rejected[: max(room, 0)])
    empty = TokenPair([], [], [])
    if pair.chosen == pair.rejected:
        return empty, "dropped_without_loss"
    if not cuts and cut != pair:
        return empty, "dropped_too_long"
    if room <= 0 or cut.chosen == cut.rejected:
        return empty, "dropped_loss_truncated"
    return cut, "whole" if cut == pair else "truncated"


def pack(examples: "datasets.Dataset", length: int, cache_file: Path, fingerprint: str) -> "datasets.Dataset":
    """Pack examples (``input_ids``, ``loss_mask``) into sequences of at most ``length`` tokens.

    Best fit decreasing, in blocks of examples that fit in memory; ``seq_lengths`` has the length of each example.
    """
    from trl.data_utils import pack_dataset

    block = max(1, min(10_000, _TOKENS_PACKED_AT_ONCE // length))
    settings = {"batch_size": block, "cache_file_name": str(cache_file), "load_from_cache_file": False}
    settings["new_fingerprint"] = fingerprint
    return pack_dataset(examples, length, strategy="bfd", map_kwargs=settings)


def count_outcomes(outcomes: Iterable[Outcome]) -> dict[str, int]:
    """Count examples by outcome; ``truncated``, ``split`` and ``dropped_*`` are parts of ``examples``."""
    counts: Mapping[str, int] = Counter(outcomes)
    reported = (
        "truncated",
        "split",
        "dropped_without_loss",
        "dropped_loss_truncated",
        "dropped_too_long",
        "dropped_bad",
    )
    return {
        "examples": sum(counts.values()) - counts["continued"],
        **{outcome: counts[outcome] for outcome in reported},
    }


def count_tokens(sequences: "datasets.Dataset") -> dict[str, int]:
    """Return the numbers of sequences, tokens (without padding) and loss tokens, and the largest token id."""
    import pyarrow.compute as pc

    totals: Counter[str] = Counter(sequences=len(sequences), tokens=0, loss_tokens=0)
    largest = 0
    for batch in sequences.data.to_batches():
        ids, mask = batch.column("input_ids").flatten(), batch.column("loss_mask").flatten()
        totals.update(tokens=len(ids), loss_tokens=pc.sum(mask).as_py() or 0)
        largest = max(largest, pc.max(ids).as_py() or 0)
        for name in {"rejected_ids", "cut_ids"}.intersection(batch.schema.names):
            largest = max(largest, pc.max(batch.column(name).flatten()).as_py() or 0)
    return {**totals, "largest_token_id": largest}


def token_digests(examples: "datasets.Dataset") -> "np.ndarray":
    """Return a 64-bit digest of the tokens of each example."""
    import numpy as np

    digests, at = np.empty(len(examples), np.uint64), 0
    for table in examples.select_columns("input_ids").with_format("arrow").iter(1000):
        for chunk in table.column(0).chunks:
            tokens, offsets = chunk.values.to_numpy(), chunk.offsets.to_numpy()
            for a, b in pairwise(offsets):
                digests[at] = int.from_bytes(blake2b(tokens[a:b].tobytes(), digest_size=8).digest(), "little")
                at += 1
    return digests


def count_repeated(examples: "np.ndarray", others: "np.ndarray") -> int:
    """Return how many of the ``examples`` are also among the ``others``, by their digests."""
    import numpy as np

    return int(np.isin(examples, others).sum())


def first_dropped(encoded: "datasets.Dataset") -> list[str]:
    """Return the places of the first dropped examples, in the order of the files."""
    import pyarrow.compute as pc

    places = encoded.data.column("dropped")
    return sort_places(place.as_py() for place in places.filter(pc.not_equal(places, "")))


def sort_places(places: Iterable[str]) -> list[str]:
    """Return the first of ``places``, in the order of files and lines."""
    return heapq.nsmallest(NAMED, places, key=_natural)


def _natural(place: str) -> list[tuple[int, str]]:
    """Return a key that sorts line 9 before line 10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", place)]
