"""Multi-head latent attention: weights and operators of ``modeling_deepseek_v3.py`` of transformers 5.

Queries, and keys with values, are products of narrow rows. A part of each head is rotated; that of a key is the same in
all heads.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from shardmake.memory import size_tensors as ops
from shardmake.memory.size_tensors import SizeTensor

SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
"""Keys of the config with the first numbers of a `Latent`."""
Run = Callable[[SizeTensor, str], SizeTensor]
Turn = Callable[[SizeTensor], SizeTensor]


@dataclass(frozen=True)
class Latent:
    """The widths of the narrow rows and of the parts of a head."""

    rank: int
    straight: int
    rotated: int
    value: int
    query_rank: int
    """0 if one matrix makes the queries."""
    pairs: bool
    """Pairs of neighbours are rotated."""

    def weights(self, hidden: int, heads: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the name and shape of each weight before attention."""
        if self.query_rank:
            yield "q_a_proj", (self.query_rank, hidden)
            yield "q_a_layernorm", (self.query_rank,)
        rows = heads * (self.straight + self.rotated)
        yield "q_b_proj" if self.query_rank else "q_proj", (rows, self.query_rank or hidden)
        yield "kv_a_proj_with_mqa", (self.rank + self.rotated, hidden)
        yield "kv_a_layernorm", (self.rank,)
        yield "kv_b_proj", (heads * (self.straight + self.value), self.rank)


def read(values: Mapping[str, Any], config: Mapping[str, Any]) -> Latent:
    """Return the widths that ``values`` give, those of ``config`` with defaults; a rank of null has no default."""
    query_rank = 0 if config.get("q_lora_rank", 0) is None else values["q_lora_rank"]
    rank, straight, rotated, value = (values[name] for name in SIZES)
    return Latent(rank, straight, rotated, value, query_rank, values["rope_interleave"])


def project(
    sizes: Latent, hidden: SizeTensor, prefix: str, linear: Run, norm: Run, turn: Turn
) -> tuple[SizeTensor, SizeTensor, SizeTensor, object]:
    """Return queries, keys and values of ``hidden``, and what else exists until the layer's function ends."""
    if sizes.query_rank:
        narrow = norm(linear(hidden, f"{prefix}.q_a_proj"), f"{prefix}.q_a_layernorm.weight")
        query = linear(narrow, f"{prefix}.q_b_proj")
        del narrow
    else:
        query = linear(hidden, f"{prefix}.q_proj")
    straight, turning = ops.split(query, sizes.straight, sizes.rotated)
    both = linear(hidden, f"{prefix}.kv_a_proj_with_mqa")
    compressed, shared = ops.split(both, sizes.rank, sizes.rotated)
    compressed = norm(compressed, f"{prefix}.kv_a_layernorm.weight")
    turning, shared = turn(turning), turn(shared)
    joined = ops.join(ops.cast(straight, turning.item), turning)
    key, value = ops.split(linear(compressed, f"{prefix}.kv_b_proj"), sizes.straight, sizes.value)
    key = ops.filled(key, ops.view(shared, turning.numel))
    return joined, key, value, (query, turning, both, compressed, shared)
