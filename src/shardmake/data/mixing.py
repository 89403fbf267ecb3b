"""Mixtures of several sources of training examples: limits, repetition, weights, and the shares that result."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from shardmake.config.models import TrainSource

if TYPE_CHECKING:
    import datasets

SOURCE: Final = "source"
"""Column with the number of an example's source, until the shares are counted."""


def limited(rows: "datasets.Dataset", limit: int | None, seed: int) -> "datasets.Dataset":
    """Return at most ``limit`` of ``rows``, chosen at random by ``seed``, in their order."""
    import numpy as np

    if limit is None or limit >= len(rows):
        return rows
    chosen = np.random.default_rng(seed).permutation(len(rows))[:limit]
    return rows.select(np.sort(chosen), keep_in_memory=True)


def mix(sources: Sequence[TrainSource], examples: Sequence["datasets.Dataset"], seed: int) -> "datasets.Dataset":
    """Return the ``examples`` of all ``sources`` as one data set with the column `SOURCE`.

    With weights, `datasets.interleave_datasets` draws each example's source at random by ``seed`` until every source
    was read once; a source that ends earlier starts again. Without weights, each example is there ``repeat`` times.
    """
    import datasets

    numbered = [_numbered(part, number) for number, part in enumerate(examples)]
    weights = [source.weight for source in sources if source.weight is not None]
    if not weights:
        copies = [part for part, source in zip(numbered, sources, strict=True) for _ in range(source.repeat)]
        return datasets.concatenate_datasets(copies)
    shares = [weight / sum(weights) for weight in weights]
    return datasets.interleave_datasets(numbered, shares, seed=seed, stopping_strategy="all_exhausted")


def in_order(examples: Sequence["datasets.Dataset"]) -> "datasets.Dataset":
    """Return the ``examples`` source by source, with the column `SOURCE`."""
    import datasets

    return datasets.concatenate_datasets([_numbered(part, number) for number, part in enumerate(examples)])


def _numbered(examples: "datasets.Dataset", number: int) -> "datasets.Dataset":
    import numpy as np

    return examples.add_column(SOURCE, np.full(len(examples), number, dtype=np.int32))


def shares_of(examples: "datasets.Dataset", count: int) -> list[dict[str, Any]]:
    """Return examples, tokens, loss tokens and the share of all loss tokens for each of ``count`` sources."""
    import numpy as np
    import pyarrow.compute as pc

    totals = np.zeros((3, count), dtype=np.int64)
    for batch in examples.select_columns([SOURCE, "loss_mask"]).with_format("arrow").iter(1000):
        masks = batch.column("loss_mask").combine_chunks()
        lengths = pc.list_value_length(masks).to_numpy()
        starts = np.cumsum(lengths) - lengths
        learned = np.add.reduceat(masks.flatten().to_numpy(zero_copy_only=False).astype(np.int64), starts)
        for row, values in enumerate((np.ones(len(lengths)), lengths, learned)):
            source = batch.column(SOURCE).to_numpy()
            totals[row] += np.bincount(source, weights=values, minlength=count).astype(np.int64)
    whole = max(1, int(totals[2].sum()))
    return [
        {"examples": int(seen), "tokens": int(tokens), "loss_tokens": int(loss), "share": int(loss) / whole}
        for seen, tokens, loss in totals.T
    ]
