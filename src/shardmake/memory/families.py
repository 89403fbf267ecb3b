"""The tensors of the Llama, Mistral, Qwen and Gemma families, written down so that no library is imported.

`tests/unit/memory/test_model.py` compares them with what transformers builds.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil
from typing import Any

from shardmake.memory.model import MODELS, SCORE_HEAD, Decoder, Model, ParameterSpec, is_head


@dataclass(frozen=True)
class Family:
    """Differences of a family from Llama; defaults are those of its transformers config class."""

    architecture: str
    block_class: str
    tied: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    head_dim: int | None = None
    kv_heads: int | None = None
    plus_one_norm: bool = False


FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM", "LlamaDecoderLayer"),
    "mistral": Family("MistralForCausalLM", "MistralDecoderLayer", kv_heads=8),
    "qwen2": Family("Qwen2ForCausalLM", "Qwen2DecoderLayer", qkv_bias=True, kv_heads=32),
    "qwen3": Family("Qwen3ForCausalLM", "Qwen3DecoderLayer", qk_norm=True, head_dim=128, kv_heads=32),
    "gemma": Family("GemmaForCausalLM", "GemmaDecoderLayer", tied=True, head_dim=256, kv_heads=16, plus_one_norm=True),
}


def written_down(family: Family, config: Mapping[str, Any], source: str) -> Model:
    """Return the model of ``family`` that ``config`` describes."""
    decoder = _decoder(family, config)
    tensors = tuple(_decoder_tensors(decoder, family, config))
    rotary = 4 * (decoder.d // 2) * 2  # inv_freq and its original, fp32
    return Model(
        model_type=config["model_type"],
        architecture=family.architecture,
        tensors=tensors,
        tied=_tied(family, config),
        buffer_bytes=rotary + (4 if family.plus_one_norm else 0),
        block_classes=(family.block_class,),
        hidden_size=decoder.h,
        vocab_size=decoder.v,
        max_positions=config.get("max_position_embeddings"),
        decoder=decoder,
        config=config,
        source=source,
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
    heads = config["num_attention_heads"]
    default_kv = heads if family.architecture.startswith("Llama") else family.kv_heads
    return Decoder(
        h=config["hidden_size"],
        f=config["intermediate_size"],
        a=heads,
        k=config.get("num_key_value_heads") or default_kv or heads,
        d=config.get("head_dim") or family.head_dim or config["hidden_size"] // heads,
        layers=config["num_hidden_layers"],
        v=config["vocab_size"],
        qk_norm=family.qk_norm,
        plus_one_norm=family.plus_one_norm,
        scaled_embedding=family.plus_one_norm,
    )


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
        if name == "self_attn.o_proj" and shape.qk_norm:
            yield ParameterSpec(f"{prefix}.self_attn.q_norm.weight", (shape.d,), "norm", block)
            yield ParameterSpec(f"{prefix}.self_attn.k_norm.weight", (shape.d,), "norm", block)
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield ParameterSpec(f"{prefix}.{name}.weight", (shape.h,), "norm", block)
