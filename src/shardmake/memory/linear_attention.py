"""Layers of linear attention, as Qwen3-Next has them: a causal convolution, then the gated delta rule, simulated.

It follows ``torch_chunk_gated_delta_rule`` of transformers 5, which runs if the kernels of flash-linear-attention are
not installed. Its loop over chunks of tokens is one operator here: what all chunks save is one allocation.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Final

from shardmake.memory import size_tensors as ops
from shardmake.memory.size_tensors import Parameter, SizeStorage, SizeTensor, Tape, derive, new

CHUNK: Final = 64
"""Tokens of a chunk."""
LINEAR_SIZES = (
    "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim",
    "linear_conv_kernel_dim",
)  # fmt: skip
"""Keys of the config with the numbers of `LinearAttention`, in its order."""


@dataclass(frozen=True)
class LinearAttention:
    """The sizes of a layer of linear attention."""

    projections: tuple[str, ...]
    """Products of the hidden states: each is named after its parts, queries and keys to the gates b and a."""
    key_heads: int
    value_heads: int
    key_width: int
    value_width: int
    kernel: int
    """Tokens of the convolution."""

    @property
    def values(self) -> int:
        """Features of the values of a token."""
        return self.value_heads * self.value_width

    @property
    def mixed(self) -> int:
        """Features of the queries, keys and values of a token."""
        return 2 * self.key_heads * self.key_width + self.values

    def weights(self, hidden: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the name and shape of each weight of a layer."""
        keys, heads = self.key_heads * self.key_width, self.value_heads
        rows = {"q": keys, "k": keys, "v": self.values, "z": self.values, "b": heads, "a": heads}
        for name in self.projections:
            yield f"in_proj_{name}.weight", (sum(rows[part] for part in name), hidden)
        yield "out_proj.weight", (hidden, self.values)
        yield "conv1d.weight", (self.mixed, 1, self.kernel)
        yield "norm.weight", (self.value_width,)
        yield "dt_bias", (heads,)
        yield "A_log", (heads,)


def attend(
    shape: LinearAttention,
    hidden: SizeTensor,
    rows: tuple[int, int],
    weights: Mapping[str, Parameter],
    prefix: str,
    linear: Callable[[SizeTensor, str], SizeTensor],
) -> SizeTensor:
    """Return what the layer ``prefix`` adds for ``rows``, a number and their tokens; ``linear`` runs a product."""
    tokens, heads = prod(rows), shape.value_heads
    made = {name: linear(hidden, f"{prefix}.in_proj_{name}") for name in shape.projections}
    sizes = {"qkv": shape.mixed, "z": shape.values, "b": heads, "a": heads}
    parts = {
        name: made.pop(name) if name in made else ops.copy(ops.view(whole, tokens * size))
        for name, size in sizes.items()
        for whole in [one for key, one in made.items() if name in key]
    }
    mixed = _convolved(parts.pop("qkv"), weights[f"{prefix}.conv1d.weight"], rows[0] * shape.mixed)
    beta = ops.activation(parts["b"], saves_output=True)
    decay = ops.activation(_shifted(ops.cast(parts["a"], 4), weights[f"{prefix}.dt_bias"]))
    decay = ops.scale_columns(decay, weights[f"{prefix}.A_log"])
    core = _delta_rule(rows, shape, mixed, decay, beta)
    core = _gated_norm(core, parts["z"], weights[f"{prefix}.norm.weight"], tokens * heads)
    return linear(core, f"{prefix}.out_proj")


def _convolved(mixed: SizeTensor, weight: Parameter, columns: int) -> SizeTensor:
    """Model the causal convolution with SiLU; it computes some tokens more than the sequence has, and cuts them off."""
    item, numel = mixed.item, mixed.numel
    mixed = ops.cast(ops.cast(mixed, weight.item), mixed.tape.autocast or weight.item)

    def function(grad: SizeTensor) -> list[SizeTensor]:
        to_input = new(grad, numel)
        ops.finish(weight, grad)
        return [to_input]

    padded = new(mixed, numel + columns * (weight.shape[-1] - 1))
    padded = derive(padded, [mixed], function, [mixed.storage], weight.trained)
    return ops.cast(ops.activation(ops.view(padded, numel)), item)


def _shifted(tensor: SizeTensor, bias: Parameter) -> SizeTensor:
    """Model the sum with a number for each column."""

    def function(grad: SizeTensor) -> list[SizeTensor]:
        ops.finish(bias, grad)
        return [grad]

    return derive(new(tensor), [tensor], function, trained=bias.trained)


def _gated_norm(core: SizeTensor, gate: SizeTensor, weight: Parameter, rows: int) -> SizeTensor:
    wide = ops.cast(core, 4)
    factors = ops.row_rsqrt(ops.resized(ops.square(wide), rows))
    normed = ops.scale_columns(ops.cast(ops.scale_rows(wide, factors), core.item), weight)
    return ops.cast(ops.multiply(normed, ops.activation(ops.cast(gate, 4))), core.item)


def _delta_rule(
    sequences: tuple[int, int], shape: LinearAttention, mixed: SizeTensor, decay: SizeTensor, beta: SizeTensor
) -> SizeTensor:
    """Run the delta rule in fp32, on tokens that are padded to whole chunks."""
    heads, keys, tokens = shape.value_heads, shape.key_heads * shape.key_width, prod(sequences)
    chunks = sequences[0] * -(-sequences[1] // CHUNK)
    rows = chunks * CHUNK * heads
    query, key = (ops.resized(ops.view(mixed, tokens * keys), tokens * heads * shape.key_width) for _ in range(2))
    query, key, value, beta = (ops.cast(one, 4) for one in (query, key, ops.view(mixed, tokens * shape.values), beta))
    query, key = (_unit(one, tokens * heads) for one in (query, key))
    query, key = (_changed(one, rows * shape.key_width) for one in (ops.scale(query), key))
    value, beta, decay = _changed(value, rows * shape.value_width), _changed(beta, rows), _changed(decay, rows)
    v_beta, k_beta = (_product([one, beta], one.numel) for one in (value, key))
    total = _changed(decay, rows)
    pairwise = ops.activation(ops.scale(ops.resized(total, rows * CHUNK)), saves_output=True)
    turned = mixed.item == 4  # no cast made the features of a head contiguous
    system, inside = (
        _product([_matrix_product([one, key], rows * CHUNK, turned), pairwise], rows * CHUNK) for one in (k_beta, query)
    )
    decayed = _product([k_beta, ops.activation(total, saves_output=True)], k_beta.numel)
    values, reads = (_product([system, one], one.numel, solves=True) for one in (v_beta, decayed))
    query, key = (_product([one, ops.activation(total, saves_output=True)], one.numel) for one in (query, key))
    state = heads * shape.key_width * shape.value_width * sequences[0]
    core = _scan([values, reads, inside, query, key], state, chunks // sequences[0], turned)
    return ops.cast(_changed(core, tokens * shape.values), mixed.item)


def _unit(tensor: SizeTensor, rows: int) -> SizeTensor:
    """Model each row divided by its length."""
    squares = _product([tensor, tensor], tensor.numel)
    return ops.scale_rows(tensor, ops.row_rsqrt(ops.resized(squares, rows)))


def _changed(tensor: SizeTensor, numel: int) -> SizeTensor:
    """Model padded rows, or their sums up to each: a new tensor in both passes."""
    before = tensor.numel
    return derive(new(tensor, numel), [tensor], lambda grad: [new(grad, before)])


def _product(inputs: Sequence[SizeTensor], numel: int, *, solves: bool = False) -> SizeTensor:
    """Model a product by element or of matrices, which saves both; `solve_triangular` saves its result instead."""
    function = partial(_gradients, [(one.numel, one.item) for one in inputs])
    out = new(inputs[0], numel, max(one.item for one in inputs))
    return derive(out, inputs, function, [one.storage for one in (inputs[0], out if solves else inputs[1])])


def _gradients(sizes: Sequence[tuple[int, int]], grad: SizeTensor) -> list[SizeTensor]:
    """Return the gradients of a product, of which one is computed in the size of the largest input before its sum."""
    largest = new(grad, max(numel for numel, _ in sizes))
    found = [new(grad, numel, item) for numel, item in sizes]
    del largest
    return found


def _matrix_product(inputs: Sequence[SizeTensor], numel: int, turned: bool) -> SizeTensor:
    """Model a product that autocast computes in 16 bits; it copies inputs that are ``turned``."""
    item = inputs[0].tape.autocast or 4
    return _product([ops.copy(one) if turned else ops.cast(one, item) for one in inputs], numel)


def _scan(inputs: Sequence[SizeTensor], state: int, chunks: int, turned: bool) -> SizeTensor:
    """Model the loop over chunks, which saves the ``state`` before each and the values that the chunk corrects.

    The inputs are those values, the keys that read the state, the scores inside of chunks, queries and keys. Backward,
    each chunk makes a gradient of the whole input, which is added to that of the other chunks in place. Each product
    saves a copy of its chunks if they are ``turned``, and in 16 bits under autocast.
    """
    tape: Tape = inputs[0].tape
    values, reads, inside, query, key = sizes = [one.numel for one in inputs]
    most = (chunks - 1) / chunks  # the first state has no gradient, the last one no use
    block, kept = 4 * (chunks * state + values), [one.storage for one in inputs[1:]]
    if turned:
        block, kept = block + int(4 * most * (query + key)), kept[:2]
    elif tape.autocast:
        copies = int(inside + values + most * (values + reads + query + key)) + 2 * chunks * state
        block, kept = tape.autocast * copies + 4 * (chunks - 1) * state, []
    saved = [SizeStorage(tape, block * tape.recording), *kept]

    def function(grad: SizeTensor) -> list[SizeTensor]:
        return _gradients([(size, 4) for size in sizes], grad)

    return derive(new(inputs[0]), inputs, function, saved)
