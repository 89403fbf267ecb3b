"""The config of a small model of the same class, with which the plan tries what the class does."""

from collections.abc import Callable, Mapping
from functools import partial
from math import gcd
from typing import Any, Literal

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth", "encoder_layers")
_BY_LAYER, _SHARED = "per_layer_config", "num_kv_shared_layers"  # the last layers use the keys of earlier ones
_HEADS = (
    "num_attention_heads", "n_head", "n_heads", "num_heads", "linear_num_heads", "linear_num_key_heads",
    "linear_num_value_heads",
)  # fmt: skip
_KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
_OUTER = ("hidden_size", "n_embd", "d_model", "dim", "word_embed_proj_dim")
_INNER = (
    "intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "moe_intermediate_size",
    "shared_expert_intermediate_size", "block_multiple_of",
)  # fmt: skip
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts", "zero_expert_num")
_MOST = {
    **dict.fromkeys(("sliding_window", "attention_chunk_size", *_EXPERTS), 4),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group"), 1),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_k"), 2),
}
"""The largest value of a key in a small model."""
_LAYERS_LEFT, _VOCABULARY, _HEADS_LEFT, _INNER_LEFT = 2, 64, 4, 64
_ALIGNED = 4
"""Numbers in fp32 by which rows have to be aligned: torch's product of groups of matrices asks for 16 bytes."""


Narrow = Literal["all", "inner", "none"]


def shrunk(config: Mapping[str, Any], *, narrow: Narrow) -> dict[str, Any]:
    """Return ``config`` with two layers, or one of each kind, and a small vocabulary; ``narrow``: fewer heads as well.

    The size of a head stays. ``inner`` keeps the size of the hidden states, on which parts of a model have to agree.
    Attention windows get shorter than the sequences that run through the small model. A part with a config of its own
    is shrunk in the same way.
    """
    values = _fewer_layers(config)
    for name, value in values.items():
        if isinstance(value, Mapping) and value.get("model_type"):
            values[name] = shrunk(value, narrow=narrow)
        elif name.endswith("_token_id"):
            values[name] = _smaller(value, lambda token: token % _VOCABULARY)
        elif most := _VOCABULARY if name.startswith("vocab_size") else _MOST.get(name):
            values[name] = _smaller(value, partial(min, most))
    return values if narrow == "none" else _narrowed(values, keeps_hidden=narrow == "inner")


def _smaller(value: Any, change: Callable[[int], int]) -> Any:
    """Return ``value`` with ``change`` applied to its numbers from 0 on: itself, or those of a list."""
    if isinstance(value, list):
        return [_smaller(item, change) for item in value]
    return change(value) if isinstance(value, int) and value >= 0 else value


def _fewer_layers(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config with as few layers as there are kinds, at least two; lists of one item per layer follow."""
    name = next((name for name in _LAYERS if isinstance(config.get(name), int)), None)
    if name is None:
        return dict(config)
    count = config[name]
    lists = {key: value for key, value in config.items() if isinstance(value, list) and len(value) == count}
    apart = {int(index): values for index, values in (config.get(_BY_LAYER) or {}).items()}
    own = count - (config.get(_SHARED) or 0)
    kinds = [
        (*(value[n] for value in lists.values() if isinstance(value[n], str)), str(apart.get(n)), n < own)
        for n in range(count)
    ]
    chosen = sorted({kinds.index(kind) for kind in kinds})
    chosen += [index for index in range(count) if index not in chosen][: max(0, _LAYERS_LEFT - len(chosen))]
    kept = {**config, **{key: [value[index] for index in chosen] for key, value in lists.items()}, name: len(chosen)}
    if own < count:
        kept[_SHARED] = sum(index >= own for index in chosen)
    if apart:
        kept[_BY_LAYER] = {str(new): apart[old] for new, old in enumerate(chosen) if old in apart}
    return kept


def _narrowed(values: Mapping[str, Any], *, keeps_hidden: bool) -> dict[str, Any]:
    """Divide heads and widths by one factor, so that the size of a head stays.

    All kinds of heads have the same factor, as a class may require a ratio of their numbers.
    """
    heads = [values[name] for name in _HEADS if isinstance(values.get(name), int) and values[name]]
    if not heads:
        return dict(values)
    common = gcd(*heads)
    factors = (one for one in range(1, common) if common % one == 0 and heads[0] // one <= _HEADS_LEFT)
    factor = next(factors, common)
    own_size = isinstance(values.get("head_dim"), int)  # without it, the hidden states are divided among the heads
    keeps_heads = keeps_hidden and not own_size

    def divided(name: str, value: Any) -> Any:
        if not isinstance(value, int) or isinstance(value, bool):
            return value
        if name in _INNER and keeps_hidden:
            return min(value, _INNER_LEFT)
        if name in _KEY_HEADS and not keeps_heads:
            return gcd(max(1, value // factor), heads[0] // factor)
        is_divided = name in _INNER or (name in _HEADS and not keeps_heads) or (name in _OUTER and not keeps_hidden)
        unit = factor if name in _HEADS else factor * _ALIGNED
        return value // factor if is_divided and value % unit == 0 else value

    return {name: divided(name, value) for name, value in values.items()}
