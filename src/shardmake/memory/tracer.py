"""Trace one training step of any transformers model on fake tensors: every allocation and free, in order.

`shardmake.memory.trace` runs this module as a process. No weight and no activation takes memory. Fake tensors are on
"cpu", because a torch without CUDA aborts on the first backward pass of a fake CUDA tensor. If CPU kernels save other
tensors than the GPU's, `shardmake.memory.gpu_kernels` replaces them.
"""

import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from shardmake.config.methods import METHODS
from shardmake.config.models import TORCH_DTYPES
from shardmake.core.errors import ModelError, ShardmakeError
from shardmake.core.private_names import private, private_module
from shardmake.memory import token_loops
from shardmake.memory.gpu_kernels import emulate_gpu_kernels, register_attention
from shardmake.memory.model import HEADS, SCORE_HEAD
from shardmake.memory.parameter_inventory import block_paths, build, in_one_line, plain_name

_FAKE, _PYTREE = private_module("fake_tensor"), private_module("pytree")
_DispatchMode: Any = private_module("python_dispatch").TorchDispatchMode

# Linear layers in 4 bits for a trace on fake tensors: bitsandbytes' ``Linear4bit`` and ``MatMul4Bit``.
#
# A layer casts its input to the type of the computation, dequantizes its weight for each product, also in the backward
# pass, saves no input, and returns its input's type.


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight)
        whole = torch.empty_like(weight)
        out = tensor.new_empty(*tensor.shape[:-1], weight.shape[0])
        del whole
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (weight,) = ctx.saved_tensors
        whole = torch.empty_like(weight)
        grad = grads[0].new_empty(*grads[0].shape[:-1], weight.shape[1])
        del whole
        return grad, None


class FourBitLinear(nn.Linear):
    """A linear layer whose weight is dequantized for each use; the weight has the type of the computation."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the input's type."""
        out = _Product.apply(input.to(self.weight.dtype), self.weight)
        if self.bias is not None:
            out = out + self.bias.to(out.dtype)
        return out.to(input.dtype)


def set_four_bit_layers(model: nn.Module) -> None:
    """Make all linear layers but the head 4-bit ones, as QLoRA quantizes them."""
    for name, module in model.named_modules():
        if type(module) is nn.Linear and not (name.endswith(HEADS) or name == SCORE_HEAD):
            module.__class__ = FourBitLinear


def holds_four_bits(module: nn.Module) -> bool:
    """Return True if the weight of ``module`` is in 4 bits."""
    return isinstance(module, FourBitLinear)


DTYPES = {str(precision): getattr(torch, name) for precision, name in TORCH_DTYPES.items()}
Event = list[Any]


def answer(request: Mapping[str, Any]) -> list[list[Event]]:
    """Return the events of each requested step."""
    return [_trace_or_explain(step) for step in request["requests"]]


def _trace_or_explain(request: Mapping[str, Any]) -> list[Event]:
    try:
        return trace(request)
    except ShardmakeError:
        raise
    except Exception as error:  # a model's code may raise anything for unusual values
        raise _explained(error, request) from None


def _explained(error: Exception, request: Mapping[str, Any]) -> ModelError:
    """Return ``error`` of a model's code as a message with what to do."""
    failed = f"Cannot trace a training step of this {request['config']['model_type']} model: {request['source']}."
    text = in_one_line(error)
    if isinstance(error, _FAKE.DataDependentOutputException | _FAKE.DynamicOutputShapeException):
        return ModelError(
            f"{failed} Its code takes sizes from the values of tensors ({text}), which a trace without memory does not "
            "have. The memory of this model cannot be estimated; name another model."
        )
    return ModelError(
        f"{failed} Its code raised {type(error).__name__}: {text}. Training would most likely fail alike. Use the "
        "complete config.json that came with the weights; if it is that one, take another strategy or precision."
    )


def trace(request: Mapping[str, Any]) -> list[Event]:
    """Return the events of the second of two identical micro steps, in the form of `shardmake.memory.ddp`.

    A step whose layers loop over their tokens is traced with few tokens and scaled (`shardmake.memory.token_loops`).
    """
    try:
        return _trace(request, token_loops.MOST_ALIKE)
    except _TokenLoopError:
        return scaled_trace(request) or _trace(request)


def scaled_trace(request: Mapping[str, Any]) -> list[Event] | None:
    """Return the events of the step as they follow from short ones; None if these do not match each other."""
    return token_loops.scaled_to(request["sequence_length"], _steps(request, token_loops.LENGTHS))


class _TokenLoopError(Exception):
    """A layer loops over its tokens."""


def _trace(request: Mapping[str, Any], most_alike: int | None = None) -> list[Event]:
    """Return the events; raise `_TokenLoopError` if a layer's forward pass allocates a size more than ``most_alike``
    times.
    """
    (events,) = _steps(request, [request["sequence_length"]], most_alike)
    return [event[:3] if event[0] == "alloc" else event for event in events]


def _steps(request: Mapping[str, Any], lengths: Sequence[int], most_alike: int | None = None) -> list[list[Event]]:
    """Return the events of a micro step of each of ``lengths``, with the operator of each allocation as fourth item."""
    emulate_gpu_kernels()
    model = prepare(request)
    recorder = Recorder(most_alike)
    found = []
    with ExitStack() as stack:
        stack.enter_context(_without_collector())
        stack.enter_context(_FAKE.FakeTensorMode(allow_non_fake_inputs=True))
        materialize(model, *(DTYPES[request[which]] for which in ("weights", "frozen", "widened", "norms")))
        inputs = [_inputs(model, request["micro_batch"], length, request["masked"]) for length in lengths]
        _mark_blocks(model, recorder)
        _mark_gradients(model, recorder)
        stack.enter_context(recorder)
        for one in (inputs[0], *inputs):  # the first step fills caches, such as those of autocast and of kernels
            recorder.start()
            _micro_step(model, one, request, recorder)
            found.append(recorder.events)
    return found[1:]


def prepare(request: Mapping[str, Any]) -> Any:
    """Return the model on the meta device, with adapters, checkpointing and the replacement of its attention."""
    register_attention()
    model: Any = build(request["config"], request["source"], request["trust_remote_code"])
    model.config.get_text_config().use_cache = False  # as in training
    if request["layers"]:
        _keep_layers(model, request["layers"])
    _set_attention(model, request["attention"], request["masked"])
    if request["in_four_bits"]:
        set_four_bit_layers(model)
    if METHODS[request["method"]].has_adapters:
        model = _with_adapters(model, request)
    model.train()
    if request["checkpointing"]:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if METHODS[request["method"]].has_adapters:
            model.enable_input_require_grads()
    return model


def _keep_layers(model: nn.Module, count: int) -> None:
    """Keep the first ``count`` layers of the list of layers."""
    (path,) = {path.rpartition(".")[0] for path in block_paths(model)}
    parent, _, name = path.rpartition(".")
    layers = model.get_submodule(path)
    assert isinstance(layers, nn.ModuleList)
    setattr(model.get_submodule(parent), name, layers[:count])


def _with_adapters(model: nn.Module, request: Mapping[str, Any]) -> nn.Module:
    from peft import get_peft_model

    adapters = {key: request[key] for key in ("rank", "targets", "dropout")}
    task = "SEQ_CLS" if _is_classifier(model) else None
    config = METHODS[request["method"]].peft_config(task, **adapters)
    with torch.device("meta"):
        return get_peft_model(model, config)


def _set_attention(model: Any, attention: str, masked: bool) -> None:
    if attention == "eager":
        model.set_attn_implementation("eager")
    elif masked and attention == "sdpa":
        model.set_attn_implementation("shardmake_masked")
    else:
        model.set_attn_implementation("shardmake_fused")


def _micro_step(
    model: nn.Module, inputs: Mapping[str, torch.Tensor], request: Mapping[str, Any], recorder: "Recorder"
) -> None:
    with _autocast(request):
        output = model(**inputs)
    loss = output.loss
    del output
    recorder.mark("backward")
    loss.backward()


def _autocast(request: Mapping[str, Any]) -> AbstractContextManager[Any]:
    if not request["autocast"]:
        return nullcontext()
    return torch.autocast("cpu", DTYPES[request["precision"]])


@contextmanager
def _without_collector() -> Iterator[None]:
    """Disable garbage collection, so that frees come when references end, as on the GPU."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def materialize(
    model: nn.Module, trained: torch.dtype, frozen: torch.dtype, widened: torch.dtype, norms: torch.dtype
) -> None:
    """Replace meta parameters by fake ones on "cpu"; shared parameters stay shared.

    Frozen parameters get the type ``frozen``; of a model with 4-bit layers, those outside them get ``widened``, or
    ``norms`` if they have one dimension.
    """
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(private(module).parameters.items()):
            if parameter is None:
                continue
            if id(parameter) not in made:
                narrow = holds_four_bits(module) and name == "weight"
                outside = norms if parameter.dim() == 1 else widened
                dtype = trained if parameter.requires_grad else frozen if narrow else outside
                data = torch.empty(parameter.shape, dtype=dtype, device="cpu")
                made[id(parameter)] = nn.Parameter(data, requires_grad=parameter.requires_grad)
            private(module).parameters[name] = made[id(parameter)]
        for name, buffer in list(private(module).buffers.items()):
            if buffer is not None:
                private(module).buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu")


def _inputs(model: Any, batch: int, length: int, masked: bool) -> dict[str, torch.Tensor]:
    tokens = torch.zeros((batch, length), dtype=torch.long)
    labels = torch.zeros(batch, dtype=torch.long) if _is_classifier(model) else tokens
    inputs = {"input_ids": tokens, "labels": labels}
    if masked:
        inputs["attention_mask"] = torch.ones((batch, length), dtype=torch.long)
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = tokens
    return inputs


def _is_classifier(model: Any) -> bool:
    return "SequenceClassification" in type(_base(model)).__name__


# ---------------------------------------------------------------------------------------------------------------------
# Recording


class Recorder(_DispatchMode):
    """A dispatch mode that records when a tensor's storage appears and when its last reference ends."""

    def __init__(self, most_alike: int | None = None) -> None:
        super().__init__()
        self.events: list[Event] = []
        self._next = 0
        self._most = most_alike
        self._in_layer: Counter[int] = Counter()
        self._known: dict[int, tuple[Any, int]] = {}

    def start(self) -> None:
        """Start a new list of events; frees of older storages are left out."""
        self.events = []
        self._first = self._next
        self._backward = False
        self._in_layer.clear()  # of the backward pass before, which is no loop over the tokens
        self._begun: set[int] = set()

    def mark(self, kind: str, *values: Any) -> None:
        """Put a marker between the events."""
        self._backward = self._backward or kind == "backward"
        self.events.append([kind, *values])

    def mark_block(self, kind: str, index: int) -> None:
        """Mark a layer; in the backward pass, its recomputation is the begin of its backward pass."""
        if not self._backward:
            self._in_layer.clear()
            self.mark(kind, index)
        elif kind != "forward end" and index not in self._begun:
            self._begun.add(index)
            self.mark("backward block", index)

    def known_id(self, tensor: torch.Tensor) -> int | None:
        """Number of the storage of ``tensor`` where it appeared in this events."""
        found = self._known.get(private(tensor.untyped_storage()).cdata)
        return found[1] if found and found[1] >= self._first else None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operator and record the storages of its results."""
        result = func(*args, **(kwargs or {}))
        for leaf in _PYTREE.tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._record(leaf, str(func))
        return result

    def _record(self, tensor: torch.Tensor, operator: str) -> None:
        storage = tensor.untyped_storage()
        key = private(storage).cdata
        if key in self._known or storage.nbytes() == 0:
            return
        number = self._next
        self._next += 1
        self._known[key] = (weakref.ref(storage, lambda _: self._forget(key, number)), number)
        self.events.append(["alloc", number, storage.nbytes(), operator])
        self._in_layer[storage.nbytes()] += 1
        if self._most is not None and self._in_layer[storage.nbytes()] > self._most and not self._backward:
            raise _TokenLoopError

    def _forget(self, key: int, number: int) -> None:
        del self._known[key]
        if number >= self._first:
            self.events.append(["free", number])


def _mark_blocks(model: nn.Module, recorder: Recorder) -> None:
    """Mark the begin and end of each layer's forward and backward pass."""
    for path, index in block_paths(_base(model)).items():
        block = _base(model).get_submodule(path)
        block.register_forward_pre_hook(_marker(recorder, "forward", index))
        block.register_forward_hook(_marker(recorder, "forward end", index))
        block.register_full_backward_pre_hook(_marker(recorder, "backward block", index))


def _base(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _marker(recorder: Recorder, kind: str, index: int) -> Callable[..., None]:
    def hook(*_: Any) -> None:
        recorder.mark_block(kind, index)

    return hook


def _mark_gradients(model: nn.Module, recorder: Recorder) -> None:
    """Mark each complete gradient and drop it; the replay decides whether it is kept."""

    def hook(name: str) -> Callable[[torch.Tensor], None]:
        def note(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            recorder.mark("grad", recorder.known_id(parameter.grad), name)
            parameter.grad = None

        return note

    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(hook(plain_name(name)))
