"""Shrink a model's config to a size that runs in milliseconds, with the same kinds of layers."""

from collections.abc import Mapping
from typing import Any

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
_WIDTHS = (
    "hidden_size", "n_embd", "d_model", "dim", "word_embed_proj_dim", "intermediate_size", "ffn_dim", "n_inner",
    "ffn_hidden_size", "moe_intermediate_size", "shared_expert_intermediate_size", "block_multiple_of",
)  # fmt: skip
_WINDOWS = ("sliding_window", "attention_chunk_size")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_LAYERS_LEFT, _VOCABULARY, _HEADS_LEFT, _MOST_EXPERTS, _WINDOW = 2, 64, 4, 4, 4


def shrunk(config: Mapping[str, Any], *, narrow: bool) -> dict[str, Any]:
    """Return ``config`` with two layers, or one of each kind, and a small vocabulary; ``narrow``: few heads as well.

    The size of a head stays. Attention windows get shorter than the sequences that run through the small model. A part
    with a config of its own is shrunk in the same way.
    """
    values = _fewer_layers(config)
    for name, value in values.items():
        if isinstance(value, Mapping) and value.get("model_type"):
            values[name] = shrunk(value, narrow=narrow)
        elif name.endswith("_token_id") or name == "vocab_size":
            values[name] = _small_token(value) if name != "vocab_size" else min(value, _VOCABULARY)
        elif name in _WINDOWS and isinstance(value, int):
            values[name] = min(value, _WINDOW)
        elif name in _EXPERTS and isinstance(value, int):
            values[name] = min(value, _MOST_EXPERTS)
        elif name == "num_experts_per_tok" and isinstance(value, int):
            values[name] = min(value, 2)
    return _narrowed(values) if narrow else values


def _small_token(value: Any) -> Any:
    if isinstance(value, list):
        return [_small_token(item) for item in value]
    return value % _VOCABULARY if isinstance(value, int) and value >= 0 else value


def _fewer_layers(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config with as few layers as there are kinds, at least two; lists of one item per layer follow."""
    name = next((name for name in _LAYERS if isinstance(config.get(name), int)), None)
    if name is None:
        return dict(config)
    count = config[name]
    kinds = config.get("layer_types")
    first_of_kind = (kinds.index(kind) for kind in kinds) if isinstance(kinds, list) and len(kinds) == count else ()
    chosen = sorted({*first_of_kind} or {0})
    chosen += [index for index in range(count) if index not in chosen][: max(0, _LAYERS_LEFT - len(chosen))]
    kept = {
        key: [value[index] for index in chosen] if isinstance(value, list) and len(value) == count else value
        for key, value in config.items()
    }
    return {**kept, name: len(chosen)}


def _narrowed(values: Mapping[str, Any]) -> dict[str, Any]:
    """Divide heads and widths by one factor, so that the size of a head stays."""
    heads = next((values[name] for name in _HEADS if isinstance(values.get(name), int)), None)
    if not heads:
        return dict(values)
    factor = heads // max(count for count in range(1, _HEADS_LEFT + 1) if heads % count == 0)

    def divided(name: str, value: Any) -> Any:
        if not isinstance(value, int) or name not in (*_HEADS, *_KEY_HEADS, *_WIDTHS):
            return value
        if name in _KEY_HEADS:
            return max(1, value // factor)
        return value // factor if value % factor == 0 else value

    return {name: divided(name, value) for name, value in values.items()}
