"""One training step of any transformers model on fake tensors: every allocation and free, in order.

Run as a process by `shardmake.plan.memory.trace`. No weight and no activation takes memory. Fake tensors live on "cpu":
a torch without CUDA aborts on the first backward pass of a fake CUDA tensor. Where CPU kernels save something else than
the GPU's, the operator is replaced by one that saves what the GPU's does: attention (FlashAttention-2 or the
memory-efficient kernel), dropout (a mask of one byte an element), autocast's fp32 list.
"""

import gc
import json
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardmake.errors import UserError
from shardmake.plan.census import block_paths, build

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
Event = list[Any]
ORIGINALS = {name: getattr(nn.functional, name) for name in ("softmax", "log_softmax", "layer_norm", "cross_entropy")}
TORCH_SOFTMAX = torch.softmax


def main() -> int:
    """Read the requests on standard input, write the script of each step on standard output."""
    requests = json.load(sys.stdin)["requests"]
    try:
        json.dump([_trace_or_say_why(request) for request in requests], sys.stdout)
    except UserError as error:
        print(error)
        return 2
    return 0


def _trace_or_say_why(request: Mapping[str, Any]) -> list[Event]:
    try:
        return trace(request)
    except (RuntimeError, TypeError, AttributeError, ValueError) as error:
        model = request["config"]["model_type"]
        raise UserError(f"A training step of this {model} cannot be traced: {error}") from None


def trace(request: Mapping[str, Any]) -> list[Event]:
    """Events of the second of two identical micro steps, in the form of `shardmake.plan.memory.script`."""
    act_like_the_gpu(request["softmax_saves_input"])
    model = prepare(request)
    recorder = Recorder()
    with ExitStack() as stack:
        stack.enter_context(_without_collector())
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        _materialize(model, DTYPES[request["weights"]], DTYPES[request["frozen"]])
        inputs = _inputs(model, request["micro_batch"], request["sequence_length"], request["masked"])
        _watch_blocks(model, recorder)
        _watch_gradients(model, recorder)
        stack.enter_context(recorder)
        for _ in range(2):  # the first settles what is made once, such as autocast's and kernels' caches
            recorder.start()
            _micro_step(model, inputs, request, recorder)
    return recorder.events


def prepare(request: Mapping[str, Any]) -> nn.Module:
    """The model on the meta device, with adapters, checkpointing and the stand-in for its attention."""
    register_attention()
    model = build(request["config"], request["source"], request["trust_remote_code"])
    _set_attention(model, request["attention"], request["masked"])
    if request["method"] != "full":
        model = _with_adapters(model, request)
    model.train()
    if request["checkpointing"]:
        _enable_checkpointing(model, request["method"] != "full")
    return model


def _enable_checkpointing(model: Any, adapters: bool) -> None:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if adapters:
        model.enable_input_require_grads()


def _with_adapters(model: nn.Module, request: Mapping[str, Any]) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=request["rank"], target_modules=request["targets"], lora_dropout=request["dropout"], task_type=None
    )
    with torch.device("meta"):
        return get_peft_model(model, config)


def _set_attention(model: Any, attention: str, masked: bool) -> None:
    if attention == "eager":
        model.set_attn_implementation("eager")
    else:
        model.set_attn_implementation("shardmake_masked" if masked and attention == "sdpa" else "shardmake_fused")


def _micro_step(
    model: nn.Module, inputs: Mapping[str, torch.Tensor], request: Mapping[str, Any], recorder: "Recorder"
) -> None:
    with _autocast(request):
        output = model(**inputs)
    loss = output.loss
    if not request["keeps_output"]:
        del output
    recorder.mark("backward")
    loss.backward()


def _autocast(request: Mapping[str, Any]) -> AbstractContextManager[Any]:
    if not request["autocast"]:
        return nullcontext()
    return torch.autocast("cpu", DTYPES[request["precision"]])


@contextmanager
def _without_collector() -> Iterator[None]:
    """Frees must come when references end, as on the GPU, not when Python collects."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _materialize(model: nn.Module, trained: torch.dtype, frozen: torch.dtype) -> None:
    """Replace meta parameters by fake ones on "cpu"; shared parameters stay shared."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            if id(parameter) not in made:
                dtype = trained if parameter.requires_grad else frozen
                data = torch.empty(parameter.shape, dtype=dtype, device="cpu")
                made[id(parameter)] = nn.Parameter(data, requires_grad=parameter.requires_grad)
            module._parameters[name] = made[id(parameter)]
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu")


def _inputs(model: Any, batch: int, length: int, masked: bool) -> dict[str, torch.Tensor]:
    tokens = torch.zeros((batch, length), dtype=torch.long)
    classifies = "SequenceClassification" in type(model).__name__
    inputs = {"input_ids": tokens, "labels": torch.zeros(batch, dtype=torch.long) if classifies else tokens}
    if masked:
        inputs["attention_mask"] = torch.ones((batch, length), dtype=torch.long)
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = tokens
    return inputs


# ---------------------------------------------------------------------------------------------------------------------
# What is recorded


class Recorder(TorchDispatchMode):
    """Notes when a tensor's storage appears and when its last reference ends."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []
        self._next = 0
        self._known: dict[int, tuple[Any, int]] = {}

    def start(self) -> None:
        """Begin the script anew; frees of older storages are left out."""
        self.events = []
        self._first = self._next

    def mark(self, kind: str, *values: Any) -> None:
        """Put a marker between the events."""
        self.events.append([kind, *values])

    def known_id(self, tensor: torch.Tensor) -> int | None:
        """Number of the storage of ``tensor`` where it appeared in this script."""
        found = self._known.get(tensor.untyped_storage()._cdata)
        return found[1] if found and found[1] >= self._first else None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operator and note the storages of what it returns."""
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._note(leaf)
        return result

    def _note(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known or storage.nbytes() == 0:
            return
        number = self._next
        self._next += 1
        self._known[key] = (weakref.ref(storage, lambda _: self._forget(key, number)), number)
        self.events.append(["alloc", number, storage.nbytes()])

    def _forget(self, key: int, number: int) -> None:
        del self._known[key]
        if number >= self._first:
            self.events.append(["free", number])


def _watch_blocks(model: nn.Module, recorder: Recorder) -> None:
    """Markers where each layer's forward and backward pass begin and end."""
    for path, index in block_paths(_base(model)).items():
        block = _base(model).get_submodule(path)
        block.register_forward_pre_hook(_marker(recorder, "forward", index))
        block.register_forward_hook(_marker(recorder, "forward end", index))
        block.register_full_backward_pre_hook(_marker(recorder, "backward block", index))


def _base(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _marker(recorder: Recorder, kind: str, index: int) -> Callable[..., None]:
    def hook(*_: Any) -> None:
        recorder.mark(kind, index)

    return hook


def _watch_gradients(model: nn.Module, recorder: Recorder) -> None:
    """A marker when a parameter's gradient is whole; who runs the step decides what becomes of it."""

    def hook(name: str) -> Callable[[torch.Tensor], None]:
        def note(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            recorder.mark("grad", recorder.known_id(parameter.grad), name)
            parameter.grad = None

        return note

    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(hook(name))


# ---------------------------------------------------------------------------------------------------------------------
# What the GPU's kernels save


class _Flash(torch.autograd.Function):
    """FlashAttention-2: saves q, k, v, out and the fp32 log-sum-exp; its backward pass accumulates dq in fp32."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        batch, heads, length, _ = query.shape
        out = query.new_empty(batch, length, heads, value.shape[-1])
        ctx.save_for_backward(query, key, value, out, query.new_empty(batch, heads, length, dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        query, key, value, out, _lse = ctx.saved_tensors
        batch, heads, length, width = query.shape
        padded = (length + 127) // 128 * 128
        grad_q = query.new_empty(batch, length, heads, width)
        row_sums = query.new_empty(batch, heads, padded, dtype=torch.float32)
        accumulator = query.new_empty(batch, padded, heads, width, dtype=torch.float32)
        grads = [_grouped_grad(tensor, heads) for tensor in (key, value)]
        del row_sums, accumulator, out
        return grad_q.transpose(1, 2), *grads


def _grouped_grad(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Gradient of keys or values: made per query head, then summed over the group."""
    batch, groups, length, width = tensor.shape
    grad = tensor.new_empty(batch, length, heads, width)
    if groups != heads:
        grad = grad.view(batch, length, groups, heads // groups, width).sum(3)
    return grad.transpose(1, 2)


class _MemoryEfficient(torch.autograd.Function):
    """The memory-efficient kernel with an additive mask: saves q, k, v, mask, out and the fp32 log-sum-exp."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        batch, heads, length, _ = query.shape
        out = query.new_empty(batch, length, heads, value.shape[-1])
        sums = query.new_empty(batch, heads, (length + 31) // 32 * 32, dtype=torch.float32)
        ctx.save_for_backward(query, key, value, mask, out, sums)
        return out

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        query, key, value, *_rest = ctx.saved_tensors
        delta = query.new_empty(query.shape[:3], dtype=torch.float32)
        grads = [
            torch.empty_like(t.transpose(1, 2), memory_format=torch.contiguous_format) for t in (query, key, value)
        ]
        del delta
        return *(grad.transpose(1, 2) for grad in grads), None


def _autocast_attention(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Attention kernels are on autocast's 16-bit list."""
    if not torch.is_autocast_enabled("cpu"):
        return list(tensors)
    dtype = torch.get_autocast_dtype("cpu")
    return [tensor.to(dtype) for tensor in tensors]


def _fused_attention(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **_: Any) -> Any:
    return _Flash.apply(*_autocast_attention(query, key, value)), None


def _masked_attention(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **_: Any) -> Any:
    """As transformers' SDPA with a mask: keys and values repeated, the mask made additive in every layer."""
    query, key, value = _autocast_attention(query, key, value)
    key, value = (_repeated(tensor, query.shape[1]) for tensor in (key, value))
    batch, _, length, _ = query.shape
    mask = query.new_zeros(batch, 1, length, key.shape[2])
    return _MemoryEfficient.apply(query, key, value, mask), None


def _repeated(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    batch, groups, length, width = tensor.shape
    if groups == heads:
        return tensor
    return tensor[:, :, None].expand(batch, groups, heads // groups, length, width).reshape(batch, heads, length, width)


def register_attention() -> None:
    """Make the stand-ins known to transformers; their masks are made where they are used."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    for name, function in (("shardmake_fused", _fused_attention), ("shardmake_masked", _masked_attention)):
        AttentionInterface.register(name, function)
        AttentionMaskInterface.register(name, lambda *_, **__: None)


class _DropoutFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(torch.empty_like(tensor, dtype=torch.bool))
        return torch.empty_like(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(grads[0])


def _gpu_dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    """Dropout as on the GPU: an output and a mask of one byte an element."""
    return _DropoutFunction.apply(input) if training and p else input


class _OldSoftmax(torch.autograd.Function):
    """Softmax whose backward formula takes its input beside its result."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(tensor)
        ctx.save_for_backward(tensor, out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(grads[0])

    @staticmethod
    def run(tensor: torch.Tensor, dim: int = -1, dtype: torch.dtype | None = None, **_: Any) -> torch.Tensor:
        return _OldSoftmax.apply(tensor if dtype is None else tensor.to(dtype))


def _in_fp32(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """``function`` as CUDA's autocast runs it: in fp32. The CPU's leaves it as it comes."""

    def wrapped(*args: Any, **kwargs: Any) -> torch.Tensor:
        if torch.is_autocast_enabled("cpu"):
            args = tuple(a.float() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args)
        return function(*args, **kwargs)

    return wrapped


def act_like_the_gpu(softmax_saves_input: bool = False) -> None:
    """Replace the functions whose CPU versions save something else. Function modes would not do: they are off while the
    backward pass recomputes a checkpointed layer."""
    nn.functional.dropout = _gpu_dropout
    for name, original in ORIGINALS.items():
        old = name == "softmax" and softmax_saves_input
        setattr(nn.functional, name, _in_fp32(_OldSoftmax.run if old else original))
    torch.softmax = _in_fp32(TORCH_SOFTMAX)


if __name__ == "__main__":
    sys.exit(main())
