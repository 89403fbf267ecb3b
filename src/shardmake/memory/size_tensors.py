"""Tensors with sizes but no data, and an autograd over them: a training step simulated in Python.

A `SizeTensor` has a number of elements and an element size. A `Tape` records when its storage is created and when the
last reference to it ends, which CPython notices at once, as PyTorch does. Each operator below allocates and saves what
PyTorch's kernel does (``derivatives.yaml``). `backward` runs the nodes from the last to the first and drops what each
one saved, as the autograd engine does.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from itertools import count
from math import prod
from typing import Any

TensorEvent = tuple[Any, ...]


class Tape:
    """The events of a step in order, in the form of `shardmake.memory.ddp`."""

    def __init__(self) -> None:
        self.events: list[TensorEvent] = []
        self.nodes: list[GradNode] = []
        self.recording = True
        self.autocast: int | None = None
        self.casts: dict[str, SizeStorage] = {}
        self.finished: list[tuple[Parameter, SizeTensor]] = []
        self.holds_temporaries = False
        """Temporaries of a C++ expression exist until its end; without it, a norm's gradient has a tensor less."""
        self.runs_again = False  # the backward pass has begun: what runs forward is a checkpointed layer
        self.used_twice: dict[str, SizeTensor | None] = {}
        """Weights that get two gradients; autograd holds the first and adds the second to it in place."""
        self.numbers = count()

    def cast_weight(self, weight: "Parameter", item: int) -> "SizeStorage | None":
        """Return a copy of ``weight`` in ``item`` bytes if its type differs; copies of trained weights are cached."""
        if weight.item == item:
            return None
        made = self.casts.get(weight.name) or SizeStorage(self, weight.numel * item)
        if weight.trained:
            self.casts[weight.name] = made
        return made

    def mark_gradients(self) -> None:
        """Mark each finished gradient, in its parameter's type; the sharding decides whether it is kept.

        A second gradient that was added to the first is gone by then.
        """
        while self.finished:
            parameter, grad = self.finished.pop(0)
            final = _as(grad, parameter.item)
            del grad
            if parameter.name in self.used_twice:
                first = self.used_twice.pop(parameter.name)
                if first is None:
                    self.used_twice[parameter.name] = final
                    continue
                final = first
            self.mark("grad", final.storage.number, parameter.name)

    def mark(self, *event: object) -> None:
        """Add a marker to the events."""
        self.events.append(event)


class SizeStorage:
    """Memory that is allocated as long as something refers to it."""

    __slots__ = ("events", "number")

    def __init__(self, tape: Tape, size: int) -> None:
        self.events, self.number = tape.events, next(tape.numbers)
        self.events.append(("alloc", self.number, size))

    def __del__(self) -> None:
        self.events.append(("free", self.number))


NO_STORAGE = SizeStorage(Tape(), 0)
"""The storage of tensors that are never created."""


class SizeTensor:
    """A tensor of ``numel`` elements of ``item`` bytes; ``node`` created it if a gradient flows back."""

    __slots__ = ("item", "node", "numel", "storage", "tape")

    def __init__(self, tape: Tape, numel: int, item: int, storage: SizeStorage | None = None) -> None:
        self.tape, self.numel, self.item = tape, numel, item
        self.node: GradNode | None = None
        self.storage = storage if storage is not None else SizeStorage(tape, numel * item)


@dataclass(frozen=True)
class Parameter:
    """A weight: the sharding accounts for its memory, so only its gradient appears in the events."""

    name: str
    shape: tuple[int, ...]
    item: int
    trained: bool
    in_four_bits: bool = False
    """It is dequantized for each use (bitsandbytes' `MatMul4Bit`)."""
    sum: "SizeTensor | None" = None
    """The sum of it and its adapters, which the product saves, and which gets the gradient."""

    @cached_property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)


Backward = Callable[[SizeTensor], Sequence[SizeTensor | None]]


@dataclass(slots=True, eq=False)
class GradNode:
    """One operator of the graph: its inputs, the function from its output's gradient to theirs, and what it saved."""

    inputs: "Sequence[GradNode | None]"
    backward: Backward | None
    saved: Sequence[object] = ()
    grad: SizeTensor | None = None
    mark: tuple[object, ...] | None = None


def new(like: SizeTensor, numel: int | None = None, item: int | None = None, made: bool = True) -> SizeTensor:
    """Return a new tensor, by default of the size of ``like``; without ``made`` it has no storage."""
    storage = None if made else NO_STORAGE
    return SizeTensor(
        like.tape, like.numel if numel is None else numel, like.item if item is None else item, storage=storage
    )


def derive(
    out: SizeTensor,
    inputs: Sequence[SizeTensor],
    backward: Backward,
    saved: Sequence[object] = (),
    trained: bool = False,
) -> SizeTensor:
    """Make ``out`` the result of ``inputs`` if one of them has a graph, or if a weight is ``trained``.

    ``saved`` is kept until ``backward`` has run.
    """
    if out.tape.recording and (trained or any(tensor.node is not None for tensor in inputs)):
        out.node = GradNode([tensor.node for tensor in inputs], backward, saved)
        out.tape.nodes.append(out.node)
    return out


def root(tensor: SizeTensor) -> SizeTensor:
    """Start a graph at ``tensor``: it requires a gradient and has no inputs."""
    tensor.node = GradNode([], None)
    tensor.tape.nodes.append(tensor.node)
    return tensor


def backward(tape: Tape, loss: SizeTensor) -> None:
    """Run the whole graph backwards from ``loss``."""
    assert loss.node is not None
    loss.node.grad = new(loss)
    tape.runs_again = True
    run_backward(tape)


def run_backward(tape: Tape, first: int = 0) -> None:
    """Run the nodes from the last one down to ``first``; each drops what it saved."""
    while len(tape.nodes) > first:
        node = tape.nodes.pop()
        if node.mark is not None:
            tape.mark(*node.mark)
        if node.backward is None or node.grad is None:
            continue
        grad, node.grad = node.grad, None
        function, node.backward = node.backward, None
        grads = function(grad)
        node.saved = ()
        del grad, function
        tape.mark_gradients()
        for target, value in zip(node.inputs, grads, strict=True):
            if target is not None and target.grad is None:
                target.grad = value  # a second gradient is added in place
            del value
        del grads


# ---------------------------------------------------------------------------------------------------------------------
# Operators


def cast(tensor: SizeTensor, item: int, made: bool = True) -> SizeTensor:
    """Model ``tensor.to(dtype)``; nothing is allocated if the type is the same, or without ``made``."""
    source = tensor.item
    if source == item:
        return tensor
    return derive(new(tensor, item=item, made=made), [tensor], lambda grad: [new(grad, item=source)])


def copy(tensor: SizeTensor) -> SizeTensor:
    """Model ``contiguous()`` or ``reshape`` if the layout requires a copy."""
    return derive(new(tensor), [tensor], lambda grad: [grad])


def resized(tensor: SizeTensor, numel: int, saved: Sequence[object] = (), made: bool = True) -> SizeTensor:
    """Model a choice, a repetition or a sum of rows; the gradient has the size of ``tensor`` again."""
    before = tensor.numel
    if numel == before and not saved:
        return tensor
    return derive(new(tensor, numel, made=made), [tensor], lambda grad: [new(grad, before)], saved)


def _part(tensor: SizeTensor, numel: int) -> SizeTensor:
    return SizeTensor(tensor.tape, numel, tensor.item, storage=tensor.storage)


def view(tensor: SizeTensor, numel: int) -> SizeTensor:
    """Model a part of each row of ``tensor``; its gradient is padded."""
    before = tensor.numel
    return derive(_part(tensor, numel), [tensor], lambda grad: [new(grad, before)])


def join(left: SizeTensor, right: SizeTensor) -> SizeTensor:
    """Model ``cat`` of the rows of two tensors, whose gradients are views."""
    sizes = (left.numel, right.numel)
    return derive(new(left, sum(sizes)), [left, right], lambda grad: [_part(grad, size) for size in sizes])


def gather(part: SizeTensor, ranks: int, numel: int) -> SizeTensor:
    """Model DeepSpeed's ``GatherFromTensorParallelRegion``: the parts of all ranks in a buffer, then in their order."""
    buffer = SizeStorage(part.tape, ranks * part.numel * part.item)
    out = resized(part, numel)
    del buffer
    return out


def add(left: SizeTensor, right: SizeTensor, made: bool = True) -> SizeTensor:
    """Model a sum; both sides get the same gradient in their type. Without ``made`` only the graph is extended."""
    sides = (left.item, right.item)
    out = new(left, item=max(sides), made=made)
    return derive(out, [left, right], lambda grad: [_as(grad, side) for side in sides])


def _as(grad: SizeTensor, item: int) -> SizeTensor:
    return grad if grad.item == item else new(grad, item=item)


def multiply(left: SizeTensor, right: SizeTensor) -> SizeTensor:
    """Model a product, which saves both factors."""
    items, saved = (left.item, right.item), [left.storage, right.storage]
    out = new(left, item=max(items))
    return derive(out, [left, right], lambda grad: [new(grad, item=item) for item in items], saved)


def scale(tensor: SizeTensor, item: int | None = None, made: bool = True, saved: Sequence[object] = ()) -> SizeTensor:
    """Model a product with something that has no gradient."""
    source = tensor.item
    out = new(tensor, item=max(source, item or source), made=made)
    return derive(out, [tensor], lambda grad: [_as(new(grad), source)], saved)


def scale_in_place(tensor: SizeTensor) -> SizeTensor:
    """Model ``x *= c`` with a buffer in fp32, whose type the product for the gradient has."""
    return derive(_part(tensor, tensor.numel), [tensor], lambda grad: [_as(new(grad, item=4), grad.item)])


def activation(tensor: SizeTensor, *, saves_output: bool = False) -> SizeTensor:
    """Model SiLU, GELU or tanh, which saves its input or an output of the same size."""
    out = new(tensor)
    return derive(out, [tensor], lambda grad: [new(grad)], [(out if saves_output else tensor).storage])


SOFTCAP: Sequence[Callable[[SizeTensor], SizeTensor]] = (scale, partial(activation, saves_output=True), scale)
"""The operators that limit numbers: divided, tanh, multiplied."""


def gated(both: SizeTensor) -> SizeTensor:
    """Model the product of one half of each row and the activation of the other."""
    gate, other = split(both)
    gate = activation(gate)
    return multiply(gate, other)


def clamped_gated(both: SizeTensor) -> SizeTensor:
    """Model gpt-oss' ``(up + 1) * gate * sigmoid(alpha * gate)`` of clamped halves."""
    gate, up = split(both)
    gate, up = activation(gate), activation(up)
    product = multiply(gate, activation(scale(gate), saves_output=True))
    return multiply(copy(up), product)


def split(both: SizeTensor, left: int = 1, right: int = 1) -> tuple[SizeTensor, SizeTensor]:
    """Model views of two parts of each row, of widths in a ratio, whose gradients are joined when both exist."""
    waiting: list[SizeTensor] = []

    def function(grad: SizeTensor) -> list[SizeTensor | None]:
        waiting.append(grad)
        if len(waiting) == 1:
            return [None]
        joined = join(*waiting)
        waiting.clear()
        return [joined]

    numels = (both.numel * width // (left + right) for width in (left, right))
    one, other = (derive(_part(both, numel), [both], function) for numel in numels)
    return one, other


def grouped(tensor: SizeTensor, weight: Parameter, rows: int, columns: int, bias: Parameter | None) -> SizeTensor:
    """Model ``grouped_mm`` of rows that are sorted by expert, in the type of the ``weight`` of all experts.

    The product saves its rows for a trained weight. A ``bias`` is chosen for each row, and added in place; its copies
    are the caller's. Autocast does not cast it.
    """
    tensor = cast(tensor, weight.item)
    numel, wants = tensor.numel, tensor.node is not None

    def function(grad: SizeTensor) -> list[SizeTensor | None]:
        finish(bias, grad)
        input_grad = new(grad, numel) if wants else None
        finish(weight, grad)
        return [input_grad]

    saved = [tensor.storage, weight.sum] if weight.trained else []
    return derive(new(tensor, numel // columns * rows), [tensor], function, saved, weight.trained)


def adapted(tape: Tape, weights: Mapping[str, Parameter], name: str) -> Callable[[], Parameter]:
    """Model PEFT's ``ParamWrapper``: return a function that adds up the weight ``name`` and its adapters, once.

    Wrappers of several weights of a module contain each other. Their factors are added by ``baddbmm`` in the weight's
    type, which PyTorch's ``register_parametrization`` tries first; that of a router makes the small product apart.
    """
    weight, module = weights[name], name.rpartition(".")[0]
    wrappers = ([f"{owner}.lora_{part}.weight" for part in "BA"] for owner in (module, f"{module}.base_layer"))
    pairs = ([weights[one] for one in names] for names in wrappers if names[0] in weights)
    sides = {*weight.shape[-2:]}
    factors = next((pair for pair in pairs if {pair[0].shape[0], pair[1].shape[1]} == sides), None)
    if factors is None:
        return lambda: weight
    copies = [SizeStorage(tape, one.numel * weight.item) for one in factors if one.item != weight.item]

    def function(grad: SizeTensor) -> list[SizeTensor | None]:
        for factor in factors:
            _finish_gradient(factor, scale(new(grad, factor.numel)))
        return []

    def add_up() -> Parameter:
        total = derive(SizeTensor(tape, weight.numel, weight.item), [], function, copies, trained=True)
        return replace(weight, trained=True, sum=total)

    SizeStorage(tape, weight.numel * weight.item)
    return cache(add_up)


def linear(tensor: SizeTensor, weight: Parameter, bias: Parameter | None = None, made: bool = True) -> SizeTensor:
    """Model ``x W^T + b``, which saves x only for a trained weight; the weight's gradient is computed before x's.

    Under autocast the input is cast for this layer alone. The cast of a trained weight is kept for the whole forward
    pass; its gradient is computed in 16 bits and cast to the weight's type.
    """
    tape, (rows, columns), expanded = tensor.tape, weight.shape[-2:], weight.in_four_bits
    tensor = cast(tensor, tape.autocast or tensor.item)
    cast_weight = tape.cast_weight(weight, tensor.item)
    tokens, wants = tensor.numel // columns, tensor.node is not None
    whole = SizeStorage(tape, rows * columns * tensor.item) if expanded else None
    saved = [tensor.storage if weight.trained else None, cast_weight if wants else None, weight.sum]

    def function(grad: SizeTensor) -> list[SizeTensor | None]:
        whole = SizeStorage(tape, rows * columns * grad.item) if expanded and wants else None
        weight_grad = new(grad, rows * columns) if weight.trained else None
        bias_grad = _gradient_of(bias, grad)
        input_grad = new(grad, tokens * columns) if wants else None
        del whole
        _finish_gradient(bias, bias_grad)
        _finish_gradient(weight, weight_grad)
        return [input_grad]

    out = new(tensor, tokens * rows, made=made)
    del whole
    return derive(out, [tensor], function, saved, weight.trained)


def _gradient_of(parameter: Parameter | None, grad: SizeTensor, item: int | None = None) -> SizeTensor | None:
    """Return the gradient of ``parameter`` in ``item`` bytes, by default the type of ``grad``; None if not trained."""
    return new(grad, parameter.numel, item) if parameter is not None and parameter.trained else None


def _finish_gradient(parameter: Parameter | None, grad: SizeTensor | None) -> None:
    """Finish the gradient of ``parameter`` when this node is done; that of a sum is passed on."""
    if parameter is not None and parameter.sum and parameter.sum.node:
        parameter.sum.node.grad = grad
    elif parameter is not None and grad is not None:
        grad.tape.finished.append((parameter, grad))


def finish(parameter: Parameter | None, grad: SizeTensor, item: int | None = None) -> None:
    """Make and finish the gradient of ``parameter``, if it is trained, as `_gradient_of` does."""
    _finish_gradient(parameter, _gradient_of(parameter, grad, item))


def embedding(tape: Tape, weight: Parameter, tokens: int) -> SizeTensor:
    """Model a lookup in a table, whose gradient is dense."""

    def function(grad: SizeTensor) -> list[SizeTensor | None]:
        finish(weight, grad)
        return []

    return derive(SizeTensor(tape, tokens * weight.shape[1], weight.item), [], function, trained=weight.trained)


def square(tensor: SizeTensor) -> SizeTensor:
    """Model ``x.pow(2)``, which saves x; its gradient is ``grad * (2 * x.pow(1))`` in one expression of C++."""
    return derive(new(tensor), [tensor], _third_of_three, [tensor.storage])


def _third_of_three(grad: SizeTensor) -> list[SizeTensor]:
    """Return the last of three tensors, each computed from the one before."""
    first, second = new(grad), new(grad)
    if not grad.tape.holds_temporaries:
        del first
    third = new(grad)
    del second
    return [third]


def row_rsqrt(tensor: SizeTensor, *, saves_sum: bool = False) -> SizeTensor:
    """Model ``rsqrt(x + eps)``, which saves its result; the sum is a separate tensor, which ``pow`` saves instead."""
    shifted = derive(new(tensor), [tensor], lambda grad: [grad])
    out = new(tensor)
    return derive(out, [shifted], _third_of_three, [(shifted if saves_sum else out).storage])


def scale_rows(tensor: SizeTensor, factors: SizeTensor) -> SizeTensor:
    """Model each row times its factor; each side is saved if the other has a graph.

    A layer that runs again drops both before the gradient is cast.
    """
    rows, items = factors.numel, (tensor.item, factors.item)
    saved = [tensor.storage if factors.node else None, factors.storage if tensor.node else None]
    has_graph, drops = factors.node is not None, tensor.tape.runs_again and items[0] != items[1]

    def function(grad: SizeTensor) -> list[SizeTensor | None]:
        to_tensor, product = new(grad), new(grad) if has_graph else None
        if drops:
            saved.clear()
        to_tensor = _as(to_tensor, items[0])
        return [to_tensor, product and _as(new(product, rows), items[1])]

    return derive(new(tensor, item=max(items)), [tensor, factors], function, saved)


def scale_columns(tensor: SizeTensor, weight: Parameter, made: bool = True) -> SizeTensor:
    """Model each column times a weight, which saves the tensor for the weight's gradient."""
    item, source, wants = max(tensor.item, weight.item), tensor.item, tensor.node is not None

    def function(grad: SizeTensor) -> list[SizeTensor | None]:
        product = new(grad) if weight.trained else None
        weight_grad = _gradient_of(weight, grad)
        to_tensor = new(grad)
        del product
        to_tensor = _as(to_tensor, source)
        _finish_gradient(weight, weight_grad)
        return [to_tensor if wants else None]

    saved = [tensor.storage] if weight.trained else []
    return derive(new(tensor, item=item, made=made), [tensor], function, saved, weight.trained)


def dropout(tensor: SizeTensor, probability: float) -> SizeTensor:
    """Model dropout, which saves a mask of one byte per element."""
    if not probability:
        return tensor
    mask = [SizeStorage(tensor.tape, tensor.numel)] if tensor.tape.recording else []
    return derive(new(tensor), [tensor], lambda grad: [new(grad)], mask)


def rotate_half(tensor: SizeTensor) -> SizeTensor:
    """Model ``cat(-x2, x1)``: a negated half, then the whole; backward, two padded halves that are added."""

    def function(grad: SizeTensor) -> list[SizeTensor]:
        negated = new(grad, grad.numel // 2)
        first = new(grad)
        del negated
        second = new(grad)
        del second  # added to the first in place
        return [first]

    half = new(tensor, tensor.numel // 2)
    out = new(tensor)
    del half
    return derive(out, [tensor], function)


def turn_pairs(tensor: SizeTensor) -> SizeTensor:
    """Model ``cat(x0 cos - x1 sin, x1 cos + x0 sin)`` of neighbours; under autocast the result is fp32."""
    item, half = 4 if tensor.tape.autocast else tensor.item, tensor.numel // 2
    even, odd = view(tensor, half), view(tensor, half)
    first = add(scale(even, item), scale(odd, item))
    return join(first, add(scale(odd, item), scale(even, item)))


def filled(*parts: SizeTensor) -> SizeTensor:
    """Model copies of ``parts`` into an empty tensor in the type of the first; the gradient is copied for each."""
    out = new(parts[0], sum(part.numel for part in parts))
    for part in parts:
        out = _copied(out, part)
    return out


def _copied(whole: SizeTensor, part: SizeTensor) -> SizeTensor:
    numel, item, had_graph = part.numel, part.item, whole.node is not None

    def function(grad: SizeTensor) -> list[SizeTensor]:
        rest, own = new(grad), new(grad, numel)
        zeros = new(own) if had_graph else None
        to_part = _as(own, item)
        del zeros
        return [rest, to_part]

    return derive(_part(whole, whole.numel), [whole, part], function)


def fused_attention(
    query: SizeTensor, key: SizeTensor, value: SizeTensor, rows: int, mask: int, *, flash: bool
) -> SizeTensor:
    """Model FlashAttention-2, or the memory-efficient kernel with a ``mask`` of that many elements.

    Both save q, k, v, out, the mask and an fp32 log-sum-exp per row. The backward pass of FlashAttention has an fp32
    accumulator of dq and a row sum. It computes dk and dv per query head before they are summed over the group.
    """
    extra = SizeStorage(query.tape, mask * query.item) if mask else None
    out = new(query, query.numel * value.numel // key.numel)
    sums = SizeStorage(query.tape, 4 * rows) if query.tape.recording else None
    saved: list[object] = [query.storage, key.storage, value.storage, out.storage, extra, sums]
    numel, key_numel, value_numel, is_grouped = query.numel, key.numel, value.numel, key.numel != query.numel

    def function(grad: SizeTensor) -> list[SizeTensor]:
        delta = new(grad, rows, 4)
        to_query = new(grad, numel)
        accumulator = new(grad, numel, 4) if flash else None
        wide_key, wide_value = new(grad, numel), new(grad)
        to_key = new(grad, key_numel) if is_grouped else wide_key
        to_value = new(grad, value_numel) if is_grouped else wide_value
        del delta, accumulator, wide_key, wide_value
        return [to_query, to_key, to_value]

    return derive(out, [query, key, value], function, saved)


def eager_attention(
    query: SizeTensor,
    key: SizeTensor,
    value: SizeTensor,
    scores: int,
    mask: int,
    *,
    softcap: bool = False,
    sinks: Parameter | None = None,
    probability: float = 0.0,
) -> SizeTensor:
    """Model eager attention: scores, scaled and masked, an fp32 softmax and its cast, times the values.

    ``mask`` is the bytes per element of the mask; the sum with it has the wider type. Autocast casts both sides of the
    products. With ``sinks``, the score of each head's is joined and the largest one subtracted, and the softmax is in
    the type of the scores.
    """
    item, numel = query.tape.autocast or query.item, value.numel
    narrow = cast(query, item), cast(key, item)
    del query, key
    raw = matmul(*narrow, scores)
    del narrow
    scaled = scale(raw)
    del raw
    for step in SOFTCAP if softcap else ():
        scaled = step(scaled)
    masked = scale(scaled, max(item, mask))
    del scaled
    if sinks is not None:
        masked = _with_sinks(masked, sinks)
    probabilities = softmax(masked, 4 if sinks is None else masked.item)
    del masked
    return copy(matmul(dropout(cast(probabilities, item), probability), value, numel))


def _with_sinks(scores: SizeTensor, sinks: Parameter) -> SizeTensor:
    """Model the sinks' scores beside ``scores``, less the largest of each row."""

    def function(grad: SizeTensor) -> list[SizeTensor]:
        of_largest = new(grad)
        del of_largest
        finish(sinks, grad, sinks.item)
        return [grad]

    joined = new(scores)
    out = derive(new(scores), [scores], function)
    del joined
    return out


def matmul(left: SizeTensor, right: SizeTensor, numel: int) -> SizeTensor:
    """Model a batched product, which saves both sides."""
    sizes, saved = (left.numel, right.numel), [left.storage, right.storage]
    return derive(new(left, numel), [left, right], lambda grad: [new(grad, size) for size in sizes], saved)


def softmax(tensor: SizeTensor, item: int) -> SizeTensor:
    """Model a softmax that is computed and saved in ``item`` bytes; CUDA's kernel multiplies gradient and output."""
    source = tensor.item
    out = new(tensor, item=item)
    saved = [out.storage]

    def function(grad: SizeTensor) -> list[SizeTensor]:
        wide, product = new(grad), new(grad)
        del product, saved[:]  # before the cast
        return [_as(wide, source)]

    return derive(out, [tensor], function)


def fused_product(gate: SizeTensor, up: SizeTensor) -> SizeTensor:
    """Model Liger's SwiGLU, which saves gate and up and overwrites them with their gradients."""
    return derive(new(gate), [gate, up], lambda _: [_part(tensor, tensor.numel) for tensor in (gate, up)])


def fused_norm(tensor: SizeTensor, weight: Parameter, rows: int) -> SizeTensor:
    """Model Liger's RMSNorm, which saves its input and a factor per row; its gradient is computed in place."""
    factors = SizeStorage(tensor.tape, 4 * rows)

    def function(grad: SizeTensor) -> list[SizeTensor]:
        finish(weight, grad)
        return [grad]

    return derive(new(tensor), [tensor], function, [tensor.storage, factors])


def nll_of_log_softmax(logits: SizeTensor, rows: int) -> SizeTensor:
    """Model cross entropy, which saves the log-softmax; backward, nll's gradient and the result exist beside it."""
    tape, numel = logits.tape, logits.numel
    labels = SizeStorage(tape, 8 * rows)
    saved = [new(logits).storage, labels]

    def function(grad: SizeTensor) -> list[SizeTensor]:
        of_nll = new(grad, numel)
        out = new(grad, numel)
        del of_nll
        return [out]

    return derive(new(logits, 1), [logits], function, saved)


def vocab_parallel_loss(logits: SizeTensor, rows: int) -> SizeTensor:
    """Model DeepSpeed's ``_VocabParallelCrossEntropy`` of a rank's own logits; it saves their exponentials in fp32."""
    tape, numel, item = logits.tape, logits.numel, logits.item
    wide = None if item == 4 else SizeStorage(tape, 4 * numel)
    shifted, powers = SizeStorage(tape, 4 * numel), SizeStorage(tape, 4 * numel)
    del wide, shifted

    return derive(SizeTensor(tape, rows, 4), [logits], lambda _: [_as(SizeTensor(tape, numel, 4), item)], [powers])


def fused_loss(hidden: SizeTensor, head: Parameter, vocabulary: int) -> SizeTensor:
    """Model Liger's fused linear cross entropy: logits in chunks, gradients of x and head in the forward pass."""
    rows, width = _sides(hidden, head)
    head_grad = new(hidden, vocabulary * width, head.item) if head.trained else None
    to_hidden = new(hidden)
    _make_briefly(hidden, fused_chunk(rows, width, vocabulary) * vocabulary)

    def function(_: SizeTensor) -> list[SizeTensor | None]:
        _finish_gradient(head, head_grad)
        return [to_hidden]

    return derive(SizeTensor(hidden.tape, rows, 4), [hidden], function, trained=True)


def chunked_loss(hidden: SizeTensor, head: Parameter, vocabulary: int) -> SizeTensor:
    """Model torch's chunked linear cross entropy, which makes the logits of a chunk in both passes.

    On GPUs torch 2.13 takes half as many rows per chunk, so this is an upper bound.
    """
    tape, (rows, width) = hidden.tape, _sides(hidden, head)
    hidden = cast(hidden, tape.autocast or hidden.item)
    saved = [hidden.storage, tape.cast_weight(head, hidden.item)]
    chunk, item = fused_chunk(rows, width, vocabulary) * vocabulary, hidden.item

    def function(grad: SizeTensor) -> list[SizeTensor | None]:
        to_hidden = new(grad, rows * width, item)
        head_grad = new(grad, vocabulary * width, item) if head.trained else None
        _make_briefly(to_hidden, chunk)
        _finish_gradient(head, head_grad)
        return [to_hidden]

    _make_briefly(hidden, chunk)
    return derive(SizeTensor(tape, rows, 4), [hidden], function, saved, trained=True)


def _sides(hidden: SizeTensor, head: Parameter) -> tuple[int, int]:
    """Return the number of hidden states and their width."""
    return hidden.numel // head.shape[1], head.shape[1]


def _make_briefly(like: SizeTensor, logits: int) -> None:
    """Allocate ``logits`` in the type of ``like`` and in fp32, and free them."""
    narrow = new(like, logits)
    wide = new(like, logits, 4)
    del narrow, wide


def tiled_log_probs(hidden: SizeTensor, head: Parameter, vocabulary: int) -> SizeTensor:
    """Model TRL's log-probabilities of the answers, which make the logits of a tile in both passes.

    The rows of the answers are copied; here all of them, the upper bound. Gradients are added up in fp32. Source:
    ``ChunkedLogProbFunction`` of TRL 1.16's ``kernels/chunked_logprob.py`` with its Triton kernels.
    """
    tape, item, (rows, width) = hidden.tape, hidden.tape.autocast or hidden.item, _sides(hidden, head)
    chosen = copy(hidden)
    tile, row = min(rows, TILE_ROWS) * TILE_WIDTH, new(hidden, rows, 4)

    def function(grad: SizeTensor) -> list[SizeTensor | None]:
        to_hidden = new(grad, rows * width, 4) if chosen_is_trained else None
        head_grad = new(grad, vocabulary * width, 4) if head.trained else None
        logits = new(grad, tile, item)
        narrow = new(grad, min(TILE_WIDTH, vocabulary) * width, item) if head.item != item else None
        del narrow
        result, final = to_hidden and _as(to_hidden, wide), head_grad and _as(head_grad, head.item)
        del logits, to_hidden, head_grad
        _finish_gradient(head, final)
        return [result]

    wide, chosen_is_trained = hidden.item, chosen.node is not None
    logits = new(hidden, tile, item)
    narrow = new(hidden, min(TILE_WIDTH, vocabulary) * width, item) if head.item != item else None
    statistics = [new(hidden, rows, 4) for _ in range(7)]
    del logits, narrow, statistics
    return derive(SizeTensor(tape, rows, 4), [chosen], function, [chosen.storage, row], trained=head.trained)


HEAD_LOSSES = {"fused": fused_loss, "chunked": chunked_loss, "log_probs": tiled_log_probs}
"""Losses that take hidden states and the head."""
TILE_ROWS, TILE_WIDTH = 4096, 32768
"""Rows and columns of the logits that TRL makes at once."""


def fused_chunk(rows: int, width: int, vocabulary: int) -> int:
    """Return the rows of logits per chunk: as many chunks as the vocabulary is wider than x (Liger)."""
    chunks = -(-vocabulary // width)
    return 1 << (max(1, -(-rows // chunks)) - 1).bit_length()
