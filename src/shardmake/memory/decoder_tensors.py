"""The weights of a Llama-like decoder: names, shapes and kinds."""

from collections.abc import Iterator, Sequence

from shardmake.memory.decoder_sizes import Decoder
from shardmake.memory.model import Kind, ParameterSpec


def decoder_tensors(shape: Decoder, biases: Sequence[bool], dense_width: int, tied: bool) -> Iterator[ParameterSpec]:
    """Yield the weights: ``biases`` as in `families.Family`, an MLP beside no expert of this ``dense_width``."""
    yield ParameterSpec(f"{shape.root}.embed_tokens.weight", (shape.v, shape.h), "embedding")
    for block in range(shape.layers):
        sizes = shape.of_layers[block] if shape.of_layers else shape
        for name, size, kind in _block_tensors(sizes, biases, dense_width, block):
            yield ParameterSpec(f"{shape.root}.layers.{block}.{name}", size, kind, block)
    yield ParameterSpec(f"{shape.root}.norm.weight", (shape.h,), "norm")
    if not tied:
        yield ParameterSpec("lm_head.weight", (shape.v, shape.h), "linear")


def _block_tensors(
    shape: Decoder, biases: Sequence[bool], dense_width: int, block: int
) -> Iterator[tuple[str, tuple[int, ...], Kind]]:
    if shape.linear:
        yield from ((f"linear_attn.{name}", size, _kind(name, size)) for name, size in shape.linear.weights(shape.h))
    else:
        yield from ((f"self_attn.{name}", size, kind) for name, size, kind in _attention_tensors(shape, biases))
    mlp, width = "mlp", dense_width if shape.experts else shape.f
    if shape.experts and block >= shape.dense:
        yield from ((f"mlp.{name}", size, "other") for name, size in _mixture_tensors(shape))
        mlp, width = "mlp.shared_expert" if shape.gates else "mlp.shared_experts", shape.shared
        if shape.gates:
            yield f"{mlp}_gate.weight", (1, shape.h), "linear"
    if width:
        halves = {"gate_up": 2 * width} if "gate" in shape.fused else {"gate": width, "up": width}
        for name, rows in halves.items():
            yield from _linear(f"{mlp}.{name}_proj", rows, shape.h, biases[2])
        yield from _linear(f"{mlp}.down_proj", shape.h, width, biases[2])
    for name in filter(None, shape.norms):
        yield f"{name}.weight", (shape.h,), "norm"


def _attention_tensors(shape: Decoder, biases: Sequence[bool]) -> Iterator[tuple[str, tuple[int, ...], Kind]]:
    q, kv = shape.a * shape.d, shape.k * shape.d
    if shape.latent:
        for name, size in shape.latent.weights(shape.h, shape.a):
            yield f"{name}.weight", size, _kind(name, size)
            if biases[0] and "_a_proj" in name:
                yield f"{name}.bias", size[:1], "linear"
        q = shape.a * shape.latent.value
    else:
        parts = {"q": 2 * q if shape.gates else q, "k": kv} | ({} if shape.shares_keys else {"v": kv})
        for name, rows in {"qkv": q + 2 * kv}.items() if "qkv" in shape.fused else parts.items():
            yield from _linear(f"{name}_proj", rows, shape.h, biases[0])
    yield from _linear("o_proj", shape.h, q, biases[1])
    if shape.qk_norm != "none":
        widths = (q, kv) if shape.qk_norm == "row" else (shape.d, shape.d)
        for part, width in zip("qk", widths, strict=True):
            yield f"{part}_norm.weight", (width,), "norm"
    if shape.sinks:
        yield "sinks", (shape.a,), "other"


def _kind(name: str, size: tuple[int, ...]) -> Kind:
    return "linear" if len(size) > 1 else "norm" if "norm" in name else "other"


def _linear(name: str, rows: int, columns: int, bias: bool) -> Iterator[tuple[str, tuple[int, ...], Kind]]:
    yield f"{name}.weight", (rows, columns), "linear"
    if bias:
        yield f"{name}.bias", (rows,), "linear"


def _mixture_tensors(shape: Decoder) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the weights of a layer's router and experts."""
    has_biases = shape.experts == "softmax last"  # then the matrices are transposed, too
    router = "router" if has_biases else "gate"
    yield f"{router}.weight", (shape.count, shape.h)
    if has_biases:
        yield f"{router}.bias", (shape.count,)
    for name, sides in (("gate_up", (2 * shape.f, shape.h)), ("down", (shape.h, shape.f))):
        yield f"experts.{name}_proj", (shape.count, *(sides[::-1] if has_biases else sides))
        if has_biases:
            yield f"experts.{name}_proj_bias", (shape.count, sides[0])
