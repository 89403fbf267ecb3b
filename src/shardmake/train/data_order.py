"""The order of the data: the same samples in every optimizer step, whatever the number of ranks.

Trainer draws one order per epoch from the seed and deals micro batches out to the ranks in turn, so step k of an epoch
takes samples k G to (k + 1) G of that order for every way to split a global batch of G. Only the end of an epoch would
depend on the split: what is left over there is filled up to whole micro batches on all ranks, not to a global batch.
"""

from typing import Any

from torch.utils.data import Dataset


class WholeBatches(Dataset[Any]):
    """``data``, with samples from its start repeated at the end until an epoch is a number of whole global batches."""

    def __init__(self, data: Any, global_batch_size: int) -> None:
        self.data = data
        self.length = -(-len(data) // global_batch_size) * global_batch_size

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        """Sample ``index`` of the repeated data."""
        return self.data[index % len(self.data)]
