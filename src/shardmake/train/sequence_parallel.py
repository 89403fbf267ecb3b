"""Sequence parallelism after Ulysses: ranks of a group hold parts of each sequence, in attention parts of the heads.

DeepSpeed's `UlyssesSPAttentionHF` exchanges the parts around an attention kernel of transformers. Only its exchange is
used here. Accelerate's ``sp_size`` would make the groups known to DeepSpeed and take over loss and data: with
DeepSpeed 0.19.8 the gradients of ZeRO-1 and ZeRO-2 then are ``sp_size`` times too large, and the loss of a step weights
micro batches alike instead of tokens. Here DeepSpeed and FSDP see data parallelism over all ranks. A rank's loss is its
part of the mean over the tokens of the global batch, as under DDP, so that the mean of the gradients over all ranks is
right, and checkpoints are those of ZeRO or FSDP on as many ranks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import pad

from shardmake.core.errors import ModelError
from shardmake.core.private_names import private
from shardmake.data.dataset import IGNORED, Collator, Item
from shardmake.train.library_patches import import_deepspeed

Kernel = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]
_TOKENS_PER_RANK = 8
_TOLERANCE = 1e-3
_TOLERANCE_16_BITS = 5e-2


@dataclass(frozen=True)
class PartCollator:
    """Makes the batch of ``whole`` and keeps part ``index`` of ``count`` of each row, for ranks that share sequences.

    ``input_ids``, ``labels``, ``shift_labels`` and ``position_ids`` have the shape [batch, tokens of a row / count].
    Labels are shifted before the cut, because the label of a part's last token stands in the next part. Position ids
    and boundaries of packed examples (``cu_seq_lens``) are those of the whole row. There are no masks: they would
    belong to the part, and the kernels attend over the whole row.
    """

    whole: Collator
    index: int
    count: int

    def __call__(self, items: Sequence[Item]) -> dict[str, Any]:
        """Return this rank's part of the batch of ``items``, whose rows can be divided by ``count``."""
        batch = self.whole(items)
        ids, labels = batch["input_ids"], batch["labels"]
        rows, tokens = ids.shape
        assert tokens % self.count == 0, f"{tokens} tokens cannot be divided by {self.count}"
        by_token = {
            "input_ids": ids,
            "labels": labels,
            "shift_labels": pad(labels, (0, 1), value=IGNORED)[:, 1:],
            "position_ids": batch.get("position_ids", torch.arange(tokens).expand(rows, tokens)),
        }
        parts = {name: whole.chunk(self.count, 1)[self.index].contiguous() for name, whole in by_token.items()}
        others = {name: value for name, value in batch.items() if name not in by_token and name != "attention_mask"}
        return {**others, **parts}

    def with_length(self, tokens: int) -> "PartCollator":
        """Return the collator of rows of ``tokens``."""
        return replace(self, whole=replace(self.whole, sequence_length=tokens))


def share_sequences(
    model: torch.nn.Module, collator: PartCollator, group: dist.ProcessGroup, micro_batch: int, device: torch.device
) -> None:
    """Let the attention kernel of ``model`` exchange parts of sequences and heads within ``group``, and check it.

    All ranks must take part, after the engine exists and before the first forward pass. Raise `ModelError` if the
    logits of the parts are not those of whole sequences.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    import_deepspeed()
    from deepspeed import init_distributed

    init_distributed(verbose=False)  # under FSDP it does not have torch's process group yet
    inner: Any = model.module if hasattr(model, "module") else model
    config = inner.config.get_text_config()
    name = private(config).attn_implementation
    whole = ALL_ATTENTION_FUNCTIONS[name]
    items = [_item(collator.count * _TOKENS_PER_RANK)] * micro_batch
    short = collator.with_length(collator.count * _TOKENS_PER_RANK)
    expected = _logits(model, short.whole(items), device)
    shared = shared_kernel(whole, config, group, rows=1 if collator.whole.flat else micro_batch)
    ALL_ATTENTION_FUNCTIONS[name] = shared
    parts = _logits(model, short(items), device)
    check_parts(parts, expected.chunk(collator.count, dim=1)[collator.index])


def shared_kernel(whole: Kernel, config: Any, group: dist.ProcessGroup, *, rows: int) -> Kernel:
    """Return the kernel ``whole`` on parts of ``rows`` sequences, which the ranks of ``group`` hold.

    It takes and returns parts [rows, heads, tokens / ranks, width], as transformers calls its kernels. In between,
    ``whole`` gets all tokens of the group and a part of the heads, without a mask: it is causal.
    """
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    heads = config.num_attention_heads
    exchange = UlyssesSPAttentionHF(
        attn=whole,
        batch_size=rows,
        attn_head_count=heads,
        attn_head_size=getattr(config, "head_dim", None) or config.hidden_size // heads,
        kv_head_count=config.num_key_value_heads,
        num_hidden_layers=config.num_hidden_layers,
        process_group=group,
        seq_length_is_variable=True,
    )

    def shared(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **others: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return exchange(module, query, key, value, None, **others)

    return shared


def check_parts(parts: torch.Tensor, expected: torch.Tensor) -> None:
    """Raise a `ModelError` if the logits of this rank's parts are not the ``expected`` ones of whole sequences."""
    is_narrow = expected.dtype in (torch.bfloat16, torch.float16)
    limit = (_TOLERANCE_16_BITS if is_narrow else _TOLERANCE) * expected.abs().max()
    if (parts - expected).abs().max() > limit:
        raise ModelError(
            "Sequence parallelism is not possible: this model computes other logits on parts of a sequence than on the "
            "whole sequence. Set sequence_parallel: 1, or try another `attention`."
        )


def _item(tokens: int) -> Item:
    """Return a sequence of two packed examples, of which the first ends within a part."""
    first = tokens // 2 - 3
    ids = torch.arange(tokens) % 50 + 3
    positions = torch.cat([torch.arange(first), torch.arange(tokens - first)])
    return {"input_ids": ids, "labels": ids, "position_ids": positions}


@torch.no_grad()
def _logits(model: torch.nn.Module, batch: dict[str, Any], device: torch.device) -> torch.Tensor:
    """Return the logits of a batch without dropout."""
    inputs = {key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in batch.items()}
    labels = {"labels", "shift_labels"}
    was_training = model.training
    model.eval()
    logits: torch.Tensor = model(**{key: value for key, value in inputs.items() if key not in labels}).logits
    model.train(was_training)
    return logits
