"""The sizes of layers that differ within a model, from the keys of their family's config.json."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from shardmake.memory.decoder_sizes import Decoder
from shardmake.memory.linear_attention import LINEAR_SIZES, LinearAttention

_HEADS, _FULL_HEADS = "num_key_value_heads", "num_global_key_value_heads"
LayerSizes = Callable[[Decoder, Mapping[str, Any], Sequence[str]], Decoder]
"""A function from the sizes of a model, its config and each layer's kind of attention to the sizes with all layers."""


def gemma4(decoder: Decoder, values: Mapping[str, Any], kinds: Sequence[str]) -> Decoder:
    """Return ``decoder`` with wider heads in layers that attend to all tokens, whose keys may be their values, too."""
    width, shares = values["global_head_dim"], bool(values.get("attention_k_eq_v"))
    decoder = replace(decoder, caps_logits=values.get("final_logit_softcapping") is not None)
    heads = (shares and values.get(_FULL_HEADS)) or decoder.k
    full = replace(decoder, k=heads, d=width, rotated=width, shares_keys=shares)
    of_kinds = {kind: decoder if kind == "sliding_attention" else full for kind in kinds}
    tables = sum(one.rotated for one in of_kinds.values())
    return replace(decoder, of_layers=tuple(map(of_kinds.__getitem__, kinds)), table_width=tables)


def hybrid(decoder: Decoder, values: Mapping[str, Any], kinds: Sequence[str]) -> Decoder:
    """Return ``decoder`` with linear attention in all layers but those that attend to all tokens."""
    linear = replace(decoder, linear=LinearAttention(decoder.projections, *(values[key] for key in LINEAR_SIZES)))
    return replace(linear, of_layers=tuple(decoder if kind == "full_attention" else linear for kind in kinds))


def of_full_attention(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sizes of Gemma 4's full attention, which transformers 5.23 saves for each layer with other sizes.

    Empty if ``per_layer_config`` has sizes of other layers or parts.
    """
    layers, kinds = values["per_layer_config"], values.get("layer_types")
    names = {"head_dim": "global_head_dim"} | ({_HEADS: _FULL_HEADS} if values.get("attention_k_eq_v") else {})
    sizes: Any = next(iter(layers.values()), {}) if isinstance(layers, Mapping) else None
    listed = enumerate(kinds if isinstance(kinds, list) and sizes else ())
    full = {str(index): sizes for index, kind in listed if kind == "full_attention"}
    if layers != full or not isinstance(sizes, Mapping) or not sizes.keys() <= names.keys():
        return {}
    return {"per_layer_config": None, **{names[name]: sizes.get(name, values.get(name)) for name in names}}
