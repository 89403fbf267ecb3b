"""``loss: chunked``: torch's linear cross entropy, which holds the logits of some tokens at a time.

`torch.nn.functional.linear_cross_entropy` multiplies a part of the hidden states by the head, and does so again in the
backward pass. It gives one loss per token in the type of the hidden states. They are added up in fp32: torch's own sum
of 16-bit losses has 8 bits.
"""

from typing import Any

import torch
from torch.nn import LinearCrossEntropyOptions
from torch.nn.functional import linear_cross_entropy, pad
from transformers.modeling_outputs import CausalLMOutputWithPast

from shardmake.data.dataset import IGNORED


def use_chunked_loss(model: Any) -> None:
    """Let ``model``, a decoder whose head is ``lm_head``, compute its loss in chunks and return no logits with it.

    Without labels, the model returns logits as before. The loss is computed in the head's own forward pass, because
    ZeRO-3 gathers a module's weights for that pass and for its backward pass only.
    """
    whole, head = model.forward, model.lm_head
    logits = head.forward

    def head_forward(hidden: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        return logits(hidden) if targets is None else token_losses(hidden, head.weight, targets)

    def forward(
        *arguments: Any,
        labels: torch.Tensor | None = None,
        shift_labels: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        **inputs: Any,
    ) -> CausalLMOutputWithPast:
        if labels is None:
            return whole(*arguments, **inputs)
        outputs = model.model(*arguments, **inputs)
        targets = pad(labels, (0, 1), value=IGNORED)[:, 1:] if shift_labels is None else shift_labels
        losses = head(outputs.last_hidden_state, targets)
        count = (targets != IGNORED).sum() if num_items_in_batch is None else num_items_in_batch
        return CausalLMOutputWithPast(loss=losses.float().sum() / count)

    head.forward = head_forward
    model.forward = forward


def token_losses(hidden: torch.Tensor, head: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the cross entropy of each token, [batch x tokens]; zero where ``targets`` is -100.

    ``hidden`` has the shape [batch, tokens, width], ``head`` [vocabulary, width] and ``targets`` [batch, tokens].
    """
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        hidden, head = hidden.to(dtype), head.to(dtype)
    rows = hidden.flatten(0, 1).to(head.dtype)
    return linear_cross_entropy(
        rows, head, targets.flatten(), reduction="none", ignore_index=IGNORED, options=LinearCrossEntropyOptions()
    )
