"""The tensors of Llama and of families with small differences, written down so that no library is imported.

`tests/unit/memory/test_model.py` compares them with what transformers builds.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from math import ceil
from typing import Any, Literal

from shardmake.config.attention import KERNELS, Attention
from shardmake.memory import latent_attention
from shardmake.memory.decoder_sizes import Decoder, Style
from shardmake.memory.decoder_tensors import decoder_tensors
from shardmake.memory.layer_sizes import LayerSizes, gemma4, hybrid, of_full_attention
from shardmake.memory.linear_attention import LINEAR_SIZES
from shardmake.memory.model import EXPERTS, MODELS, SCORE_HEAD, Model, ParameterSpec, is_head


@dataclass(frozen=True)
class Family(Style):
    """Differences of a family from Llama."""

    name: str
    """Its name in transformers' classes."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of its transformers config class where they differ from Llama's."""
    biases: tuple[str | bool, str | bool, str] = ("attention_bias", "attention_bias", "")
    """Keys of the config that give a bias to queries, keys and values, to the output of attention, and to the MLP."""
    full_every: int = 0
    """Every so many layers, one attends to all tokens and the others to a window, unless the config lists them.

    Those of a family with `Style.projections` have linear attention.
    """
    lists_dense: bool = False  # layers without experts are those that mlp_layer_types lists, else the first
    rotates: Literal["all", "some", "windows"] = "all"
    """Layers with a rotary embedding: all, those that ``no_rope_layers`` marks, or those with a window."""
    table_of_each_kind: bool = False
    """Layers with a window have a rotary table of their own."""
    always_two_masks: bool = False
    layer: str = "DecoderLayer"
    """The rest of the name of its class of layers."""
    last_is_full: bool = False  # the last layer has no window, whatever the config lists
    layer_sizes: LayerSizes | None = None
    """Return the sizes with those of each layer, if they differ."""
    plain: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the config that make it another model if they are set, but to the value here."""
    expert_width: str = "moe_intermediate_size"
    """Key of the config with the features of an expert."""
    kernels: tuple[Attention, ...] = KERNELS
    mixing: tuple[Attention, ...] = ()
    """Kernels with which packed examples see each other."""
    varlen_limit: str = ""
    """Why it cannot train with varlen."""

    @property
    def architecture(self) -> str:
        """Return its class of a causal language model."""
        return f"{self.name}ForCausalLM"


_SCORES = "changes the attention scores ({})"
_AFTER = ("", "post_attention_layernorm", "", "post_feedforward_layernorm")
_BOTH_SIDES = (
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
)  # fmt: skip
_MLP_BIAS = ("attention_bias", "attention_bias", "mlp_bias")
_NO_BIAS = (False, False, "")
_GLM = ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")
_GEMMA: dict[str, Any] = {"wide_norm": True, "scaled_embedding": True}
_GEMMA2: dict[str, Any] = {**_GEMMA, "norms": _BOTH_SIDES, "always_two_masks": True}
_PLAIN_EXPERTS = dict.fromkeys(("output_router_logits", "router_jitter_noise"))
NOT_TAKEN = "does not take the attention functions that others register"
"""Why a class cannot train with varlen, which is the rest of a sentence about it."""
_HYBRID: dict[str, Any] = {
    "wide_norm": True, "qk_norm": "head", "joins_rotated": True, "gates": True,
    "full_every": 4, "layer_sizes": hybrid, "kernels": ("flash", "sdpa", "eager"), "mixing": ("sdpa", "eager"),
    "varlen_limit": NOT_TAKEN,
}  # fmt: skip
_EXPERT_WIDTHS = ("moe_intermediate_size", "shared_expert_intermediate_size")
_APART, _JOINED = ("qkv", "z", "b", "a"), ("qkvz", "ba")


def _defaults(kv_heads: int | None = None, head_dim: int | None = None, **more: Any) -> dict[str, Any]:
    given = {"num_key_value_heads": kv_heads, "head_dim": head_dim, **more}
    return {key: value for key, value in given.items() if value is not None}


def _tied(kv_heads: int, head_dim: int | None = None, **more: Any) -> dict[str, Any]:
    return _defaults(kv_heads, head_dim, tie_word_embeddings=True, **more)


_LATENT = {
    "head_dim": 64, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "rope_interleave": True,
}  # fmt: skip


def _hybrid(kv_heads: int, **more: Any) -> dict[str, Any]:
    """Return the defaults of a family with linear attention, which also have the sizes of its experts."""
    linear = dict(zip(LINEAR_SIZES, (16, 32, 128, 128, 4), strict=True))
    experts = dict.fromkeys((*_EXPERT_WIDTHS, "intermediate_size"), 512) if more else {}
    return _defaults(kv_heads, 256, partial_rotary_factor=0.25, **linear, **experts, **more)


FAMILIES: dict[str, Family] = {
    "llama": Family("Llama", {}, _MLP_BIAS, all_levers=True),
    "mistral": Family("Mistral", _defaults(8), _NO_BIAS, all_levers=True),
    "qwen2": Family("Qwen2", _defaults(32), (True, False, ""), all_levers=True),
    "qwen3": Family("Qwen3", _defaults(32, 128), qk_norm="head", all_levers=True),
    "gemma": Family("Gemma", _tied(16, 256), **_GEMMA, all_levers=True),
    "gemma2": Family(
        "Gemma2", _tied(4, 256), **_GEMMA2, full_every=2, softcaps=True, plain={"use_bidirectional_attention": None},
        kernels=("flash", "eager"), varlen_limit=_SCORES.format("softcap"),
    ),
    "gemma3_text": Family(
        "Gemma3", _tied(4, 256, num_attention_heads=8, vocab_size=262_208, max_position_embeddings=131_072), **_GEMMA2,
        qk_norm="head", full_every=6, table_of_each_kind=True,
        plain=dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention")),
    ),
    "gemma4_text": Family(
        "Gemma4", _tied(
            4, 256, num_attention_heads=8, vocab_size=262_144, max_position_embeddings=131_072, global_head_dim=512,
            hidden_size_per_layer_input=256,
        ),
        **_GEMMA2, qk_norm="head", full_every=6, layer_sizes=gemma4,
        value_norm=True, layer_scalar=True, layer="TextDecoderLayer", last_is_full=True,
        plain={"use_bidirectional_attention": "vision", "hidden_size_per_layer_input": 0, "sliding_window_pattern": 6}
        | dict.fromkeys(("num_kv_shared_layers", "enable_moe_block")),
    ),
    "granite": Family("Granite", {}, _MLP_BIAS, scaled_branches=True),
    "ministral": Family("Ministral", _defaults(8), _NO_BIAS, always_two_masks=True),
    "olmo2": Family("Olmo2", qk_norm="row", norms=_AFTER, wide_norm=True, wide_rotary=True),
    "olmo3": Family(
        "Olmo3", qk_norm="row", norms=_AFTER, wide_norm=True, wide_rotary=True, full_every=4, table_of_each_kind=True,
        always_two_masks=True,
    ),
    "exaone4": Family(
        "Exaone4", _defaults(32), _NO_BIAS, qk_norm="head", norms=_AFTER, full_every=4, rotates="windows"
    ),
    "smollm3": Family("SmolLM3", _tied(4), _MLP_BIAS, rotates="some"),
    "phi3": Family("Phi3", {}, _NO_BIAS, fused=("qkv", "gate"), joins_rotated=True, plain={"resid_pdrop": 0}),
    "glm4": Family(
        "Glm4", _defaults(2, 128, attention_bias=True, partial_rotary_factor=0.5), ("attention_bias", False, ""),
        fused=("gate",), joins_rotated=True, interleaved=True, norms=_GLM,
    ),
    "ernie4_5": Family("Ernie4_5", _tied(2, 128), ("use_bias",) * 3, wide_rotary=True, interleaved=True),
    "seed_oss": Family(
        "SeedOss", _defaults(8, 128, attention_bias=True, attention_dropout=0.1, residual_dropout=0.1),
        ("attention_bias", "attention_out_bias", "mlp_bias"),
    ),
    "mixtral": Family(
        "Mixtral", _defaults(8, num_local_experts=8, num_experts_per_tok=2), _NO_BIAS,
        experts="softmax first", expert_width="intermediate_size", wide_routing=True, plain=_PLAIN_EXPERTS,
    ),
    "qwen3_moe": Family(
        "Qwen3Moe", _defaults(4, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768), qk_norm="head",
        experts="softmax first", plain={**_PLAIN_EXPERTS, "decoder_sparse_step": 1, "mlp_only_layers": None},
    ),
    "glm4_moe": Family(
        "Glm4Moe",
        _defaults(
            8, n_routed_experts=128, num_experts_per_tok=8, moe_intermediate_size=1408, n_shared_experts=1,
            first_k_dense_replace=1, partial_rotary_factor=0.5, use_qk_norm=False,
        ),
        ("attention_bias", False, ""), qk_norm="head", joins_rotated=True, experts="sigmoid", plain=_PLAIN_EXPERTS,
    ),
    "dots1": Family(
        "Dots1", _defaults(32), qk_norm="head", full_every=1, experts="sigmoid",
        plain={**_PLAIN_EXPERTS, "sliding_window": None},
    ),
    "deepseek_v3": Family(
        "DeepseekV3",
        _LATENT | _defaults(
            n_routed_experts=256, num_experts_per_tok=8, moe_intermediate_size=2048, n_shared_experts=1,
            first_k_dense_replace=3, intermediate_size=18_432, num_attention_heads=128,
        ),
        experts="sigmoid", plain=_PLAIN_EXPERTS,
    ),
    "glm4_moe_lite": Family(
        "Glm4MoeLite",
        _LATENT | _defaults(
            q_lora_rank=768, qk_nope_head_dim=192, v_head_dim=256, n_routed_experts=64, num_experts_per_tok=4,
            moe_intermediate_size=1536, n_shared_experts=1,
        ),
        experts="sigmoid", plain=_PLAIN_EXPERTS, lists_dense=True,
    ),
    "youtu": Family("Youtu", _LATENT | {"tie_word_embeddings": True}),
    "gpt_oss": Family(
        "GptOss",
        _defaults(
            8, 64, attention_bias=True, num_local_experts=128, num_experts_per_tok=4, intermediate_size=2880,
            num_attention_heads=64,
        ),
        wide_norm=True,
        half_tables=True, sinks=True, full_every=2, always_two_masks=True, experts="softmax last",
        expert_width="intermediate_size", plain=_PLAIN_EXPERTS, kernels=("flash", "eager"), mixing=("eager",),
        varlen_limit=_SCORES.format("s_aux"),
    ),
    "qwen3_5_text": Family("Qwen3_5", _hybrid(4), **_HYBRID, projections=_APART),
    "qwen3_5_moe_text": Family(
        "Qwen3_5Moe", _hybrid(2, num_experts=256, num_experts_per_tok=8), **_HYBRID, projections=_APART,
        experts="softmax first", plain=_PLAIN_EXPERTS,
    ),
    "qwen3_next": Family(
        "Qwen3Next", _hybrid(2, num_experts=512, num_experts_per_tok=10), **_HYBRID, projections=_JOINED,
        experts="softmax first", plain={**_PLAIN_EXPERTS, "decoder_sparse_step": 1, "mlp_only_layers": None},
    ),
}  # fmt: skip


OPTIONAL_SIZES = (
    "num_key_value_heads", "head_dim", "max_position_embeddings", "global_head_dim", "num_global_key_value_heads",
)  # fmt: skip
MOST_LAYERS = 10_000  # each has its own weights and events
SIZE_FIELDS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
_NEVER_NULL = ("tie_word_embeddings", "attention_bias", "mlp_bias", "attention_dropout", "max_position_embeddings")
LISTED = ("layer_types", "no_rope_layers")
"""Keys of config.json with an item for each layer."""


def family_of(config: Mapping[str, Any]) -> Family | None:
    """Return the family of a config.json of text alone; None if it is not written down, or sizes do not follow."""
    family = FAMILIES.get(str(config.get("model_type")))
    values = _filled(family, config) if family else {}
    plain = {"per_layer_config": None, **family.plain} if family else {}
    if family is None or any(values.get(key) and values[key] != value for key, value in plain.items()):
        return None
    listed = [config[key] for key in LISTED if config.get(key) and (family.full_every or family.rotates != "all")]
    fits = all(isinstance(one, list) and len(one) == config.get("num_hidden_layers") for one in listed)
    # Null is not the default: the class has another value for it, or rejects it.
    nulls = any(config.get(key, 0) is None for key in {*_NEVER_NULL, *family.defaults} - {"q_lora_rank"})
    return family if fits and not nulls and _gives_sizes(family, config) else None


def written_down(family: Family, config: Mapping[str, Any], source: str, root: str = "model") -> Model:
    """Return the model of ``family`` that ``config`` describes, with its layers in the module ``root``."""
    decoder, values = _decoder(family, config, root), _filled(family, config)
    layers = [(kind, n in decoder.unrotated, n < decoder.dense) for n, kind in enumerate(_kinds(family, config))]
    corrections = 4 * decoder.count * max(0, decoder.layers - decoder.dense) if family.experts == "sigmoid" else 0
    rotary = 4 * (decoder.table_width // 2) * 2  # inv_freq and its original, fp32
    return Model(
        model_type=config["model_type"],
        architecture=family.architecture,
        tensors=_tensors(decoder, family, values),
        tied=bool(values.get("tie_word_embeddings")),
        buffer_bytes=rotary + 4 * (family.scaled_embedding + family.layer_scalar * decoder.layers) + corrections,
        block_classes=(f"{family.name}{family.layer}",),
        hidden_size=decoder.h,
        vocab_size=decoder.v,
        max_positions=values.get("max_position_embeddings"),
        decoder=decoder,
        config=config,
        source=source,
        kinds=tuple(map(layers.index, layers)),
    )


def _tensors(decoder: Decoder, family: Family, values: Mapping[str, Any]) -> tuple[ParameterSpec, ...]:
    biases = [key if isinstance(key, bool) else bool(values.get(key)) for key in family.biases]
    return tuple(decoder_tensors(decoder, biases, values["intermediate_size"], bool(values.get("tie_word_embeddings"))))


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
    family = FAMILIES[model.model_type]
    tensors = _tensors(decoder, family, _filled(family, model.config))
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


def _gives_sizes(family: Family, config: Mapping[str, Any]) -> bool:
    """Return True if all sizes follow from ``config`` and are possible."""
    values = _filled(family, config)
    sizes = [values.get(field) for field in SIZE_FIELDS] + [values[one] for one in OPTIONAL_SIZES if one in values]
    if family.experts:
        sizes += [_count(values), values.get("num_experts_per_tok"), values.get(family.expert_width)]
    sizes += [values.get("n_shared_experts")] if family.experts == "sigmoid" else []
    more = ("q_lora_rank", *latent_attention.SIZES, *LINEAR_SIZES, "shared_expert_intermediate_size")
    sizes += [values[name] for name in more if name in family.defaults]
    if not all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in sizes):
        return False
    layers, dense = values["num_hidden_layers"], _dense(family, values)
    listed = values.get("mlp_layer_types") if family.lists_dense else None
    if layers > MOST_LAYERS or not isinstance(dense, int):
        return False
    return listed is None or listed == ["dense"] * dense + ["sparse"] * (layers - dense)


def _dense(family: Family, values: Mapping[str, Any]) -> Any:
    """Return the number of first layers without experts."""
    if not family.lists_dense:
        return values.get("first_k_dense_replace", 0) if family.experts == "sigmoid" else 0
    listed = values.get("mlp_layer_types")
    return listed.count("dense") if isinstance(listed, list) else 1


def _count(values: Mapping[str, Any]) -> Any:
    return next((values[name] for name in EXPERTS if values.get(name)), 0)


def _filled(family: Family, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``config`` with the defaults of ``family`` for what it leaves open."""
    values = {**family.defaults, **{key: value for key, value in config.items() if value is not None}}
    by_layer = family.layer_sizes is gemma4 and "per_layer_config" in values
    return values | (of_full_attention(values) if by_layer else {})


def _decoder(family: Family, config: Mapping[str, Any], root: str) -> Decoder:
    values, kinds = _filled(family, config), _kinds(family, config)
    heads, rotary = values["num_attention_heads"], config.get("rope_parameters")
    width = values.get("head_dim") or values["hidden_size"] // heads
    share = {**values, **(rotary if isinstance(rotary, Mapping) else {})}.get("partial_rotary_factor", 1)
    style = {one.name: getattr(family, one.name) for one in fields(Style)}
    latent = latent_attention.read(values, config) if "kv_lora_rank" in family.defaults else None
    rotated = latent.rotated if latent else int(width * share)
    if not values.get("use_qk_norm", True):
        style["qk_norm"] = "none"
    decoder = Decoder(
        **{**style, "all_levers": family.all_levers and root == "model"},
        h=values["hidden_size"],
        f=values[family.expert_width] if family.experts else values["intermediate_size"],
        a=heads,
        k=(None if latent else values.get("num_key_value_heads")) or heads,
        d=latent.straight + latent.rotated if latent else width,
        layers=values["num_hidden_layers"],
        v=values["vocab_size"],
        root=root,
        rotated=rotated,
        unrotated=frozenset(_unrotated(family, config, kinds)),
        table_width=(latent and config.get("head_dim"))
        or rotated * (len({*kinds}) if family.table_of_each_kind else 1),
        caps_logits=family.softcaps,
        masks=2 if family.always_two_masks else 1 if family.projections else len({*kinds}),
        count=_count(values),
        chosen=values.get("num_experts_per_tok", 0),
        dense=_dense(family, values),
        shared=_shared(family, values),
        dropout=(values.get("attention_dropout", 0.0), values.get("residual_dropout", 0.0)),
        latent=latent,
    )
    return family.layer_sizes(decoder, values, kinds) if family.layer_sizes else decoder


def _shared(family: Family, values: Mapping[str, Any]) -> int:
    """Return the features of the experts that every token is sent to."""
    if family.gates:
        return int(values.get("shared_expert_intermediate_size", 0))
    return int(values.get("n_shared_experts", 0) * values.get(family.expert_width, 0))


def _kinds(family: Family, config: Mapping[str, Any]) -> list[str]:
    """Return the kind of attention of each layer, of a family that has several."""
    layers, every = config["num_hidden_layers"], family.full_every
    pattern = "full_attention_interval" if family.projections else "sliding_window_pattern"
    if every and isinstance(given := config.get(pattern), int):
        every = given
    other = "linear_attention" if family.projections else "sliding_attention"
    default = (other if every and (index + 1) % every else "full_attention" for index in range(layers))
    kinds = list((family.full_every and config.get("layer_types")) or default)[:layers]
    return [*kinds[:-1], "full_attention"] if family.last_is_full else kinds


def _unrotated(family: Family, config: Mapping[str, Any], kinds: list[str]) -> Iterator[int]:
    """Yield the layers without a rotary embedding."""
    every, marks = config.get("no_rope_layer_interval", 4), config.get("no_rope_layers")
    for index, kind in enumerate(kinds):
        if family.rotates == "windows" and kind != "sliding_attention" and config.get("sliding_window", 0) is not None:
            yield index
        if family.rotates == "some" and not (marks[index] if marks else (index + 1) % every):
            yield index
