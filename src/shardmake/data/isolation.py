"""Proof, on the model and the attention kernel in use, that packed examples do not see each other.

Models differ in what they do with position ids that restart: most build a mask from them, some have layers that carry a
state along the sequence, some ignore them. None of them says so, so the question is put to the model itself.
"""

from dataclasses import replace

import torch

from shardmake.core.errors import ShardmakeError
from shardmake.data.dataset import Collator

_LENGTH = 16
_SEAM = 7
_TOLERANCE = 1e-3


def check_isolation(model: torch.nn.Module, collator: Collator, device: torch.device) -> None:
    """Raise `ShardmakeError` if an example changes what ``model`` says of the next one in its sequence.

    Two forward passes of two short sequences; every rank has to take part where the model is sharded.
    """
    if not collator.packing:
        return
    was_training = model.training
    model.eval()
    one, other = (_logits_of_second(model, collator, first, device) for first in (1, 2))
    model.train(was_training)
    if (one - other).abs().max() > _TOLERANCE * one.abs().max():
        raise ShardmakeError(
            "packing: this model does not keep packed examples apart with this attention kernel. "
            "Set packing: false, or try another `attention`."
        )


@torch.no_grad()
def _logits_of_second(model: torch.nn.Module, collator: Collator, first: int, device: torch.device) -> torch.Tensor:
    """Logits of the second of two examples in a sequence, the first consisting of the token ``first`` alone."""
    ids = torch.tensor([first] * _SEAM + list(range(3, 3 + _LENGTH - _SEAM)))
    positions = torch.cat([torch.arange(_SEAM), torch.arange(_LENGTH - _SEAM)])
    item = {"input_ids": ids, "labels": ids, "position_ids": positions}
    batch = replace(collator, sequence_length=_LENGTH)([item, item])
    inputs = {key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in batch.items()}
    del inputs["labels"]
    logits = model(**inputs).logits.float()
    return logits.reshape(2, _LENGTH, -1)[:, _SEAM:]
