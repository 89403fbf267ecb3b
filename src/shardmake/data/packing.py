"""Cut and pack examples into sequences of at most a given length."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from shardmake.data.encode import Tokens

if TYPE_CHECKING:
    import datasets

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
    cut = [(ids[:length], mask[:length]) for ids, mask in pair]
    if pair[0] == pair[1]:
        return [([], []), ([], [])], "dropped_without_loss"
    if not cuts and cut != pair:
        return [([], []), ([], [])], "dropped_too_long"
    if cut[0] == cut[1]:
        return [([], []), ([], [])], "dropped_loss_truncated"
    return cut, "whole" if cut == pair else "truncated"


def pack(examples: "datasets.Dataset", length: int, cache_file: Path) -> "datasets.Dataset":
    """Pack examples (``input_ids``, ``loss_mask``) into sequences of at most ``length`` tokens.

    Best fit decreasing, in blocks of examples that fit in memory; ``seq_lengths`` has the length of each example.
    """
    from trl.data_utils import pack_dataset

    block = max(1, min(10_000, _TOKENS_PACKED_AT_ONCE // length))
    settings = {"batch_size": block, "cache_file_name": str(cache_file), "load_from_cache_file": False}
    settings["new_fingerprint"] = cache_file.stem
    return pack_dataset(examples, length, strategy="bfd", map_kwargs=settings)
