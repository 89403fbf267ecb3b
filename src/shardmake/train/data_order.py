"""Keep the samples of every optimizer step the same for any number of ranks.

Trainer draws one order per epoch from the seed and distributes micro batches to the ranks in turn. So step k of an
epoch takes samples k G to (k + 1) G of that order, however a global batch of G is split. Only the end of an epoch would
depend on the split: Trainer fills the last samples up to full micro batches on all ranks, not to a global batch.
"""

from typing import Any

from torch.utils.data import Dataset


class WholeBatches(Dataset[Any]):
    """A data set that repeats samples from its start until an epoch has a whole number of global batches."""

    def __init__(self, data: Any, global_batch_size: int) -> None:
        self.data = data
        self.length = -(-len(data) // global_batch_size) * global_batch_size

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        """Return sample ``index`` of the repeated data."""
        return self.data[index % len(self.data)]
