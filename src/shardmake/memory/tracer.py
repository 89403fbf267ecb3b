"""Trace one training step of any transformers model on fake tensors: every allocation and free, in order.

`shardmake.memory.trace` runs this module as a process. No weight and no activation takes memory. Fake tensors are on
"cpu", because a torch without CUDA aborts on the first backward pass of a fake CUDA tensor. If CPU kernels save other
tensors than the GPU's, `shardmake.memory.gpu_kernels` replaces them.
"""

import gc
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import modeling_utils

from shardmake.config.choices import TORCH_DTYPES
from shardmake.config.methods import METHODS
from shardmake.core.atomic import write_json
from shardmake.core.errors import ShardmakeError
from shardmake.core.private_names import private, private_module
from shardmake.memory import token_loops
from shardmake.memory.gpu_kernels import FourBitLinear, emulate_gpu_kernels, head_loss, register_attention
from shardmake.memory.model import HEADS, SCORE_HEAD
from shardmake.memory.parameter_inventory import block_paths, build, in_one_line, plain_name

_FAKE, _PYTREE = private_module("fake_tensor"), private_module("pytree")
_DispatchMode: Any = private_module("python_dispatch").TorchDispatchMode

DTYPES = {str(precision): getattr(torch, name) for precision, name in TORCH_DTYPES.items()}
Event = list[Any]
SHORT = 64
"""Tokens of a step that only shows whether a kernel runs."""


def answer(request: Mapping[str, Any]) -> None:
    """Write a tape of each requested step to its file; each is there as soon as it is done."""
    for step in request["requests"]:
        made = _tape_or_failure(step)
        if not made["lengths"]:
            write_json(Path(step["exact"]), made)
        write_json(Path(step["general"]), made if made["lengths"] else {"lengths": []})


def _tape_or_failure(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tape of a step; if the model's code fails, its error, and kernels with which a short step runs."""
    try:
        return tape(request)
    except ShardmakeError:
        raise
    except Exception as error:  # a model's code may raise anything for unusual values
        text = f"{type(error).__name__}: {in_one_line(error)}"
        without = (
            f"its code takes sizes from the values of tensors, which a trace without memory does not have ({text})"
        )
        needs_values = isinstance(error, _FAKE.DataDependentOutputException | _FAKE.DynamicOutputShapeException)
        failed = without if needs_values else f"its code raised {text}"
    short = {**request, "sequence_length": min(request["sequence_length"], SHORT * request["sequence_parallel"])}
    tried = [{**short, "attention": kernel, "masked": kernel == "sdpa"} for kernel in ("sdpa", "eager")]
    works = [one["attention"] for one in tried if one["attention"] != request["attention"] and _runs(one)]
    return {"lengths": [], "scaled": None, "events": [], "failed": failed, "works": works}


def _runs(request: Mapping[str, Any]) -> bool:
    with suppress(Exception):  # the same model may fail with every kernel
        return bool(trace(request))
    return False


def trace(request: Mapping[str, Any]) -> list[Event]:
    """Return the events of a micro step, in the form of `shardmake.memory.ddp`."""
    (events,) = _steps(request, [(request["micro_batch"], request["sequence_length"])])
    return [event[:3] for event in events]


def tape(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the events of a micro step of the requested size, and of others for which they are the same.

    An allocation has a list of its bytes if they differ, as `shardmake.memory.trace.size_at` takes them. There are no
    ``lengths`` if the tape is for the requested size alone.
    A step whose layers loop over their tokens is traced with few tokens and scaled (`shardmake.memory.token_loops`).
    """
    rows, length, ranks = (request[key] for key in ("micro_batch", "sequence_length", "sequence_parallel"))
    several = request["lengths"] > 1 and length >= 8 * ranks
    lengths = [_part_of(length, ranks, part) for part in (4, 2, 1)] if several else [length]
    sizes = [(min(rows, 2), one) for one in lengths] + ([(3, length)] if rows > 1 else [])
    sizes = sizes if request["lengths"] else [(rows, length)]
    try:
        steps = _steps(request, sizes, token_loops.MOST_ALIKE)
    except _TokenLoopError:
        short = [(rows, one) for one in token_loops.LENGTHS]
        # A loop over chunks of tokens has as many iterations in each short forward pass, so the rest is not run.
        is_loop = token_loops.found_in(_steps(request, short, forward_only=True))
        if is_loop and (scaled := token_loops.scaled_to(length, _steps(request, short))):
            return {"lengths": [], "scaled": token_loops.LENGTHS[-1], "events": scaled}
        steps = _steps(request, sizes)
    shortest = min(map(len, steps))  # the last frees of a step may come with the next one
    common, ends = [events[:shortest] for events in steps], [event for events in steps for event in events[shortest:]]
    without_sizes = {tuple((one[0], one[0] != "alloc" and one[-1]) for one in events) for events in common}
    if len(without_sizes) == 1 and all(event[0] == "free" for event in ends):
        merged = list(map(_with_sizes, zip(*common, strict=True)))
        return {"lengths": lengths if request["lengths"] else [], "scaled": None, "events": merged}
    return {"lengths": [], "scaled": None, "events": trace(request)}


def _part_of(length: int, ranks: int, part: int) -> int:
    """Return about a ``part`` of ``length`` that ``ranks`` can share; kernels pad to multiples of 128."""
    step = ranks * (128 if length // part >= 128 * ranks else 1)
    return length if part == 1 else length // part // step * step


def _with_sizes(events: tuple[Event, ...]) -> Event:
    """Return the event of all sizes; an allocation has a list of bytes if they differ."""
    event, sizes = events[0], [one[2] for one in events if one[0] == "alloc"]
    return ["alloc", event[1], sizes if len({*sizes}) > 1 else sizes[0]] if sizes else event


class _TokenLoopError(Exception):
    """A layer loops over its tokens."""


def _steps(
    request: Mapping[str, Any],
    sizes: Sequence[tuple[int, int]],
    most_alike: int | None = None,
    forward_only: bool = False,
) -> list[list[Event]]:
    """Return the events of a micro step of each of ``sizes``, with the operator of each allocation as fourth item.

    A size is a number of sequences and their length. Numbers of storages start from 0 in each step. Raises
    `_TokenLoopError` if a layer's forward pass allocates a size more than ``most_alike`` times.
    """
    emulate_gpu_kernels()
    model = prepare(request)
    recorder = Recorder(most_alike)
    found: list[list[Event]] = []
    with ExitStack() as stack:
        stack.enter_context(_without_collector())
        stack.enter_context(_FAKE.FakeTensorMode(allow_non_fake_inputs=True))
        materialize(model, request)
        inputs = [
            _inputs(model, rows, length // request["sequence_parallel"], request["masked"]) for rows, length in sizes
        ]
        _mark(model, recorder)
        stack.enter_context(recorder)
        recorder.start([*model.parameters(), *model.buffers()])
        for one in inputs:
            _micro_step(model, one, request, recorder, forward_only)
            if not found and recorder.holds_some():  # weights or tables that a model makes in its first step alone
                _micro_step(model, one, request, recorder, forward_only)
            found.append(recorder.events)
    return list(map(_in_order, found))


def _in_order(events: list[Event]) -> list[Event]:
    """Return ``events`` with frees that follow each other in the order of their numbers: autocast's come at random.

    The last ones stay, as those of another size may end elsewhere.
    """
    runs = [list(run) for _, run in groupby(events, lambda event: event[0] == "free")]
    return [event for run in runs[:-1] for event in (sorted(run) if run[0][0] == "free" else run)] + runs[-1]


def prepare(request: Mapping[str, Any]) -> Any:
    """Return the model on the meta device, with adapters, checkpointing and the replacement of its attention."""
    register_attention()
    model: Any = build(request["config"], request["source"], request["trust_remote_code"])
    model.config.get_text_config().use_cache = False  # as in training
    if request["layers"]:
        _keep_layers(model, request["layers"])
    fused = "shardmake_shared" if request["sequence_parallel"] > 1 else "shardmake_fused"
    sdpa = "shardmake_masked" if request["masked"] else fused
    model.set_attn_implementation({"eager": "eager", "sdpa": sdpa}.get(request["attention"], fused))
    if request["in_four_bits"]:
        for name, module in model.named_modules():
            if type(module) is nn.Linear and not (name.endswith(HEADS) or name == SCORE_HEAD):
                module.__class__ = FourBitLinear  # all but the head, as QLoRA quantizes them
    if METHODS[request["method"]].has_adapters:
        model = _with_adapters(model, request)
    model.train()
    modeling_utils.save_on_cpu = _OnHost
    if request["checkpointing"]:
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False}, **({"offload": True} if request["activation_offload"] else {}))
    if request["checkpointing"] and METHODS[request["method"]].has_adapters:
        model.enable_input_require_grads()
    return model


class _OnHost(torch.autograd.graph.saved_tensors_hooks):
    """torch's ``save_on_cpu`` as a GPU sees it: what is saved leaves the device, and a copy of it comes back."""

    def __init__(self, **_: Any) -> None:
        super().__init__(lambda tensor: (tensor.shape, tensor.dtype), lambda kept: torch.empty(kept[0], dtype=kept[1]))


def _keep_layers(model: Any, kept: Sequence[int]) -> None:
    """Keep these of the layers, and the items of the config's lists that belong to them."""
    paths = block_paths(model)
    (path,) = {path.rpartition(".")[0] for path in paths}
    parent, _, name = path.rpartition(".")
    layers = model.get_submodule(path)
    assert isinstance(layers, nn.ModuleList)
    setattr(model.get_submodule(parent), name, nn.ModuleList(layers[index] for index in kept))
    config = model.config.get_text_config()
    for key, value in list(vars(config).items()):
        if isinstance(value, list) and len(value) == len(paths):
            vars(config)[key] = [value[index] for index in kept]
    if hasattr(config, "num_hidden_layers"):
        config.num_hidden_layers = len(kept)


def _with_adapters(model: nn.Module, request: Mapping[str, Any]) -> nn.Module:
    from peft import get_peft_model

    adapters = {key: request[key] for key in ("rank", "targets", "dropout")}
    task = "SEQ_CLS" if _is_classifier(model) else None
    config = METHODS[request["method"]].peft_config(task, model, range(request["rows"]), **adapters)
    with torch.device("meta"):
        return get_peft_model(model, config)


def _micro_step(
    model: Any, inputs: dict[str, torch.Tensor], request: Mapping[str, Any], recorder: "Recorder", forward_only: bool
) -> None:
    recorder.start(inputs.values())
    with _autocast(request):
        loss = _loss(model, inputs, request)
        if request["extra_forwards"]:
            without = model.disable_adapter() if hasattr(model, "disable_adapter") else nullcontext()
            with torch.no_grad(), without:
                _loss(model, inputs, request)
    if not forward_only:
        recorder.mark("backward")
        loss.backward()


def _loss(model: Any, inputs: dict[str, torch.Tensor], request: Mapping[str, Any]) -> torch.Tensor:
    if request["loss"] == "plain":
        loss: torch.Tensor = model(**inputs).loss
        return loss
    base = _base(model)
    hidden = base.model(**{name: value for name, value in inputs.items() if name != "labels"}).last_hidden_state
    return head_loss(hidden, base.get_output_embeddings().weight, request["loss"])


def _autocast(request: Mapping[str, Any]) -> AbstractContextManager[Any]:
    return torch.autocast("cpu", DTYPES[request["precision"]]) if request["autocast"] else nullcontext()


@contextmanager
def _without_collector() -> Iterator[None]:
    """Disable garbage collection, so that frees come when references end, as on the GPU."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def materialize(model: nn.Module, request: Mapping[str, Any]) -> None:
    """Replace meta parameters by fake ones on "cpu"; shared parameters stay shared.

    Frozen parameters get the type ``frozen``; of a model with 4-bit layers, those outside them get ``widened``, or
    ``norms`` if they have one dimension.
    """
    trained, frozen, widened, norms = (DTYPES[request[which]] for which in ("weights", "frozen", "widened", "norms"))
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(private(module).parameters.items()):
            if parameter is None:
                continue
            if id(parameter) not in made:
                narrow = isinstance(module, FourBitLinear) and name == "weight"
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
        self._next = self._first = 0
        self._backward = False
        self._most = most_alike
        self._in_layer: Counter[int] = Counter()
        self._known: dict[int, tuple[Any, int]] = {}

    def start(self, inputs: Iterable[torch.Tensor] = ()) -> None:
        """Start a new list of events; ``inputs`` exist before, and frees of older storages are left out."""
        self.events = []  # those of the step before are complete
        for tensor in inputs:
            self._record(tensor, "input")
        self.events.clear()
        self._first = self._next
        self._backward = False
        self._in_layer.clear()  # of the backward pass before, which is not a loop over the tokens
        self._begun: set[int] = set()

    def mark(self, kind: str, *values: Any) -> None:
        """Put a marker between the events."""
        self._backward = self._backward or kind == "backward"
        self.events.append([kind, *values])

    def mark_block(self, kind: str, index: int, *_: Any) -> None:
        """Mark a layer; in the backward pass, its recomputation is the begin of its backward pass."""
        if not self._backward:
            self._in_layer.clear()
            self.mark(kind, index)
        elif kind != "forward end" and index not in self._begun:
            self._begun.add(index)
            self.mark("backward block", index)

    def holds_some(self) -> bool:
        """Return True if a storage that appeared in these events is still there."""
        return any(number >= self._first for _, number in self._known.values())

    def known_id(self, tensor: torch.Tensor) -> int | None:
        """Number of the storage of ``tensor`` where it appeared in these events."""
        found = self._known.get(private(tensor.untyped_storage()).cdata)
        return found[1] - self._first if found and found[1] >= self._first else None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operator and record the storages of its results, and the product that CUDA's softmax makes."""
        if func is torch.ops.prim.device.default:  # two of three calls: torch asks for the device of each tensor
            return args[0].fake_device
        result = func(*args, **(kwargs or {}))
        if str(func) == "aten.index_put.default":
            self._write_in_place(args[0], result)
        made = (result, args[0] * args[1]) if str(func) == "aten._softmax_backward_data.default" else result
        for leaf in _PYTREE.tree_leaves(made):
            if isinstance(leaf, torch.Tensor):
                self._record(leaf, str(func))
        return result

    def _write_in_place(self, zeros: torch.Tensor, result: torch.Tensor) -> None:
        """Let ``result`` be the storage of ``zeros``: a choice's gradient is written in place, but not a fake one."""
        old, new = (private(tensor.untyped_storage()).cdata for tensor in (zeros, result))
        if old in self._known:
            self._follow(result.untyped_storage(), new, self._known.pop(old)[1])

    def _record(self, tensor: torch.Tensor, operator: str) -> None:
        storage = tensor.untyped_storage()
        key = private(storage).cdata
        if key in self._known or storage.nbytes() == 0:
            return
        number, self._next = self._next, self._next + 1
        self._follow(storage, key, number)
        self.events.append(["alloc", number - self._first, storage.nbytes(), operator])
        self._in_layer[storage.nbytes()] += 1
        if self._most is not None and self._in_layer[storage.nbytes()] > self._most and not self._backward:
            raise _TokenLoopError

    def _follow(self, storage: Any, key: int, number: int) -> None:
        def forget(_: Any) -> None:
            del self._known[key]
            if number >= self._first:
                self.events.append(["free", number - self._first])

        self._known[key] = (weakref.ref(storage, forget), number)


def _mark(model: nn.Module, recorder: Recorder) -> None:
    """Mark the begin and end of each layer's forward and backward pass, and each complete gradient, and drop it.

    The replay decides whether a gradient is kept.
    """
    for path, index in block_paths(_base(model)).items():
        block = _base(model).get_submodule(path)
        block.register_forward_pre_hook(partial(recorder.mark_block, "forward", index))
        block.register_forward_hook(partial(recorder.mark_block, "forward end", index))
        block.register_full_backward_pre_hook(partial(recorder.mark_block, "backward block", index))

    def note(name: str, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        recorder.mark("grad", recorder.known_id(parameter.grad), name)
        parameter.grad = None

    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(partial(note, plain_name(name)))


def _base(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model
