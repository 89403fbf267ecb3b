"""The tensors of Llama and of families with small differences, written down so that no library is imported.

`tests/unit/memory/test_model.py` compares them with what transformers builds.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil
from typing import Any, Literal

from shardmake.memory.model import MODELS, SCORE_HEAD, Decoder, Model, ParameterSpec, QueryNorm, is_head


@dataclass(frozen=True)
class Family:
    """Differences of a family from Llama; defaults are those of its transformers config class."""

    architecture: str
    block_class: str
    tied: bool = False
    qkv_bias: bool = False
    qk_norm: QueryNorm = "none"
    head_dim: int | None = None
    kv_heads: int | None = None
    wide_norm: bool = False
    scaled_embedding: bool = False
    wide_rotary: bool = False
    norms: tuple[str, ...] = Decoder.norms
    scaled_branches: bool = False
    full_every: int = 0
    """Every so many layers, one attends to all tokens and the others to a window, unless the config lists them."""
    rotates: Literal["all", "some", "windows"] = "all"
    """Layers with a rotary embedding: all, those that ``no_rope_layers`` marks, or those with a window."""
    table_of_each_kind: bool = False
    """Layers with a window have a rotary table of their own."""
    always_two_masks: bool = False
    all_levers: bool = False
    unless: tuple[str, ...] = ()
    """Keys of the config that make it another model if they are set."""


_AFTER = ("", "post_attention_layernorm", "", "post_feedforward_layernorm")
_BOTH_SIDES = (
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
)  # fmt: skip
FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM", "LlamaDecoderLayer", all_levers=True),
    "mistral": Family("MistralForCausalLM", "MistralDecoderLayer", kv_heads=8, all_levers=True),
    "qwen2": Family("Qwen2ForCausalLM", "Qwen2DecoderLayer", qkv_bias=True, kv_heads=32, all_levers=True),
    "qwen3": Family(
        "Qwen3ForCausalLM", "Qwen3DecoderLayer", qk_norm="head", head_dim=128, kv_heads=32, all_levers=True
    ),
    "gemma": Family(
        "GemmaForCausalLM", "GemmaDecoderLayer", tied=True, head_dim=256, kv_heads=16, wide_norm=True,
        scaled_embedding=True, all_levers=True,
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM", "Gemma3DecoderLayer", tied=True, qk_norm="head", head_dim=256, kv_heads=4,
        wide_norm=True, scaled_embedding=True, norms=_BOTH_SIDES, full_every=6, table_of_each_kind=True,
        always_two_masks=True,
        unless=("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"),
    ),
    "granite": Family("GraniteForCausalLM", "GraniteDecoderLayer", scaled_branches=True),
    "ministral": Family("MinistralForCausalLM", "MinistralDecoderLayer", kv_heads=8, always_two_masks=True),
    "olmo2": Family(
        "Olmo2ForCausalLM", "Olmo2DecoderLayer", qk_norm="row", norms=_AFTER, wide_norm=True, wide_rotary=True
    ),
    "olmo3": Family(
        "Olmo3ForCausalLM", "Olmo3DecoderLayer", qk_norm="row", norms=_AFTER, wide_norm=True, wide_rotary=True,
        full_every=4, table_of_each_kind=True, always_two_masks=True,
    ),
    "exaone4": Family(
        "Exaone4ForCausalLM", "Exaone4DecoderLayer", qk_norm="head", kv_heads=32, norms=_AFTER, full_every=4,
        rotates="windows",
    ),
    "smollm3": Family("SmolLM3ForCausalLM", "SmolLM3DecoderLayer", tied=True, kv_heads=4, rotates="some"),
}  # fmt: skip


LISTED = ("layer_types", "no_rope_layers")
"""Keys of config.json with an item for each layer."""


def family_of(config: Mapping[str, Any]) -> Family | None:
    """Return the family of a config.json; None if it is not written down."""
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None or any(config.get(key) for key in family.unless):
        return None
    listed = [config[key] for key in LISTED if config.get(key) and (family.full_every or family.rotates != "all")]
    layers = config.get("num_hidden_layers")
    return family if all(isinstance(one, list) and len(one) == layers for one in listed) else None


def written_down(family: Family, config: Mapping[str, Any], source: str) -> Model:
    """Return the model of ``family`` that ``config`` describes."""
    decoder = _decoder(family, config)
    tensors = tuple(_decoder_tensors(decoder, family, config))
    layers = [(kind, index in decoder.unrotated) for index, kind in enumerate(_kinds(family, config))]
    rotary = decoder.rotary_tables * 4 * (decoder.d // 2) * 2  # inv_freq and its original, fp32
    return Model(
        model_type=config["model_type"],
        architecture=family.architecture,
        tensors=tensors,
        tied=_tied(family, config),
        buffer_bytes=rotary + (4 if family.scaled_embedding else 0),
        block_classes=(family.block_class,),
        hidden_size=decoder.h,
        vocab_size=decoder.v,
        max_positions=config.get("max_position_embeddings"),
        decoder=decoder,
        config=config,
        source=source,
        kinds=tuple(map(layers.index, layers)),
    )


@lru_cache(maxsize=MODELS)
def part_of(model: Model, ranks: int) -> Model:
    """Return the part of ``model``, which is of a family, that each of ``ranks`` tensor-parallel ranks holds.

    DeepSpeed's AutoTP divides the matrices of the layers, by heads and by intermediate features, and the head by rows,
    with the embedding if they are tied, unless that scales its output. All else is whole on every rank: norms, biases
    of ``o_proj`` and ``down_proj``, and an embedding that is not tied.
    """
    assert model.decoder is not None
    shape = model.decoder
    decoder = replace(shape, a=shape.a // ranks, k=shape.k // ranks, f=ceil(shape.f / ranks))
    tensors = _decoder_tensors(decoder, FAMILIES[model.model_type], model.config)
    rows = (ceil(shape.v / ranks), shape.h)
    divides_embedding = model.tied and not shape.scaled_embedding
    parts = tuple(
        replace(t, shape=rows) if is_head(t) or (t.kind == "embedding" and divides_embedding) else t for t in tensors
    )
    return replace(model, tensors=parts, decoder=decoder, whole=model.parameters)


def as_classifier(model: Model) -> Model:
    """Return ``model`` of a family as transformers' sequence classifier with one output.

    The layer `SCORE_HEAD` is in place of the head over the vocabulary, and the embedding is not tied to it.
    """
    architecture = model.architecture.replace("ForCausalLM", "ForSequenceClassification")
    kept = (tensor for tensor in model.tensors if not is_head(tensor))
    return replace(
        model,
        architecture=architecture,
        tensors=(*kept, ParameterSpec(f"{SCORE_HEAD}.weight", (1, model.hidden_size), "linear")),
        tied=False,
        config={**model.config, "architectures": [architecture], "num_labels": 1},
    )


def _tied(family: Family, config: Mapping[str, Any]) -> bool:
    return bool(config.get("tie_word_embeddings", family.tied))


def _decoder(family: Family, config: Mapping[str, Any]) -> Decoder:
    heads, kinds = config["num_attention_heads"], _kinds(family, config)
    return Decoder(
        h=config["hidden_size"],
        f=config["intermediate_size"],
        a=heads,
        k=config.get("num_key_value_heads") or family.kv_heads or heads,
        d=config.get("head_dim") or family.head_dim or config["hidden_size"] // heads,
        layers=config["num_hidden_layers"],
        v=config["vocab_size"],
        norms=family.norms,
        qk_norm=family.qk_norm,
        wide_norm=family.wide_norm,
        wide_rotary=family.wide_rotary,
        scaled_embedding=family.scaled_embedding,
        scaled_branches=family.scaled_branches,
        unrotated=frozenset(_unrotated(family, config, kinds)),
        rotary_tables=len({*kinds}) if family.table_of_each_kind else 1,
        masks=2 if family.always_two_masks else len({*kinds}),
        all_levers=family.all_levers,
    )


def _kinds(family: Family, config: Mapping[str, Any]) -> list[str]:
    """Return the kind of attention of each layer, of a family that has several."""
    layers = config["num_hidden_layers"]
    listed = config.get("layer_types") if family.full_every else None
    every = config.get("sliding_window_pattern")
    every = every if isinstance(every, int) and family.full_every else family.full_every
    default = ("sliding_attention" if every and (index + 1) % every else "full_attention" for index in range(layers))
    return list(listed or default)[:layers]


def _unrotated(family: Family, config: Mapping[str, Any], kinds: list[str]) -> Iterator[int]:
    """Yield the layers without a rotary embedding."""
    every, marks = config.get("no_rope_layer_interval", 4), config.get("no_rope_layers")
    for index, kind in enumerate(kinds):
        if family.rotates == "windows":
            is_rotated = kind == "sliding_attention" or config.get("sliding_window", 0) is None
        else:
            is_rotated = family.rotates == "all" or bool(marks[index] if marks else (index + 1) % every)
        if not is_rotated:
            yield index


def _decoder_tensors(shape: Decoder, family: Family, config: Mapping[str, Any]) -> Iterator[ParameterSpec]:
    yield ParameterSpec("model.embed_tokens.weight", (shape.v, shape.h), "embedding")
    for block in range(shape.layers):
        yield from _block_tensors(shape, family, config, block)
    yield ParameterSpec("model.norm.weight", (shape.h,), "norm")
    if not _tied(family, config):
        yield ParameterSpec("lm_head.weight", (shape.v, shape.h), "linear")


def _block_tensors(shape: Decoder, family: Family, config: Mapping[str, Any], block: int) -> Iterator[ParameterSpec]:
    prefix = f"model.layers.{block}"
    out_bias = bool(config.get("attention_bias", False)) and not family.qkv_bias
    qkv_bias, mlp_bias = out_bias or family.qkv_bias, bool(config.get("mlp_bias", False))
    q, kv = shape.a * shape.d, shape.k * shape.d
    linears = [
        ("self_attn.q_proj", q, shape.h, qkv_bias),
        ("self_attn.k_proj", kv, shape.h, qkv_bias),
        ("self_attn.v_proj", kv, shape.h, qkv_bias),
        ("self_attn.o_proj", shape.h, q, out_bias),
        ("mlp.gate_proj", shape.f, shape.h, mlp_bias),
        ("mlp.up_proj", shape.f, shape.h, mlp_bias),
        ("mlp.down_proj", shape.h, shape.f, mlp_bias),
    ]
    for name, rows, columns, bias in linears:
        yield ParameterSpec(f"{prefix}.{name}.weight", (rows, columns), "linear", block)
        if bias:
            yield ParameterSpec(f"{prefix}.{name}.bias", (rows,), "linear", block)
        if name == "self_attn.o_proj" and shape.qk_norm != "none":
            widths = (q, kv) if shape.qk_norm == "row" else (shape.d, shape.d)
            for part, width in zip("qk", widths, strict=True):
                yield ParameterSpec(f"{prefix}.self_attn.{part}_norm.weight", (width,), "norm", block)
    for name in filter(None, shape.norms):
        yield ParameterSpec(f"{prefix}.{name}.weight", (shape.h,), "norm", block)
