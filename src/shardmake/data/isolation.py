"""Check with the model and the attention kernel in use that packed examples do not attend to each other.

Models treat restarting position ids differently: most build a mask from them, some have layers that carry a state along
the sequence, some ignore them. No attribute of a model states this, so the check runs the model.
"""

from dataclasses import replace

import torch

from shardmake.core.errors import ModelError
from shardmake.data.dataset import Collator

_LENGTH = 16
_BOUNDARY = 7
_TOLERANCE = 1e-3


def check_isolation(model: torch.nn.Module, collator: Collator, device: torch.device) -> None:
    """Raise `ModelError` if an example changes the logits of the next one in its sequence.

    It takes two forward passes of two short sequences. All ranks of a sharded model must take part.
    """
    if not collator.packing:
        return
    was_training = model.training
    model.eval()
    one, other = (_logits_of_second(model, collator, first, device) for first in (1, 2))
    model.train(was_training)
    if (one - other).abs().max() > _TOLERANCE * one.abs().max():
        raise ModelError(
            "Packing is not possible: this model mixes packed examples with this attention kernel. "
            "Set packing: false, or try another `attention`."
        )


@torch.no_grad()
def _logits_of_second(model: torch.nn.Module, collator: Collator, first: int, device: torch.device) -> torch.Tensor:
    """Return the logits of the second example in a sequence whose first example repeats the token ``first``."""
    ids = torch.tensor([first] * _BOUNDARY + list(range(3, 3 + _LENGTH - _BOUNDARY)))
    positions = torch.cat([torch.arange(_BOUNDARY), torch.arange(_LENGTH - _BOUNDARY)])
    item = {"input_ids": ids, "labels": ids, "position_ids": positions}
    batch = replace(collator, sequence_length=_LENGTH)([item, item])
    inputs = {key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in batch.items()}
    del inputs["labels"]
    logits = model(**inputs).logits.float()
    return logits.reshape(2, _LENGTH, -1)[:, _BOUNDARY:]
