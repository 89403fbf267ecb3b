"""Steps with an optimizer of transformers that the table lacks; `optimizer_spec` runs this module as a process.

A small model answers what a list would have to know: whether the optimizer is installed and steps, the bytes of its
states, whether it resumes from its checkpoint, and whether it computes the same on ZeRO's flat vectors and on the
sharded tensors of FSDP2 as on whole weights.
"""

import copy
import io
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, Final

from shardmake.config.optimizers import OPTIMIZERS, OptimizerSpec, find_built
from shardmake.core.atomic import digest
from shardmake.core.errors import ShardmakeError
from shardmake.memory.cache import cached_helper

_OTHER: Final = "Take optimizer: adamw, or one of the strategies {others}."
_TOLERANCE: Final = 1e-5
"""Difference of weights after `_STEPS` of size 1e-3 that is rounding."""
_QUANTIZED_TOLERANCE: Final = 3e-4
"""The same if states are stored in blocks of 8 or 4 bits, which a vector cuts elsewhere."""
_STEPS: Final = (1, 2, 3)
_OF_THE_MACHINE: Final = (OSError, MemoryError)
"""Errors that say nothing about an optimizer."""


@cache
def optimizer_spec(name: str) -> OptimizerSpec:
    """Return the row of the optimizer ``name``, or what steps with it on this machine show."""
    if name in OPTIMIZERS:
        return OPTIMIZERS[name]
    packages = digest(sorted(f"{one.name} {one.version}" for one in distributions()))
    found = cached_helper(__name__, {"optim": name, "packages": packages}, f"Taking steps with optimizer: {name}")
    return replace(find_built(name), **found)


def answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the optimizer's `OptimizerSpec`; raise a `ShardmakeError` if this machine cannot try it."""
    name = request["optim"]
    try:
        return _try(name)
    except _OF_THE_MACHINE as error:
        raise ShardmakeError(
            f"Steps with optimizer: {name} could not be tried here: {_first_line(error)}. Look at the memory and the "
            "temporary folder of this machine, or take another optimizer."
        ) from None
    except Exception as error:  # an optimizer may raise anything
        return {"fails": f"its step raises {_first_line(error)}"}


def _try(name: str) -> dict[str, Any]:
    import torch

    model = _model()
    optimizer = _make(model, name)
    found: dict[str, Any] = {"class_name": type(optimizer).__name__}
    if callable(getattr(optimizer, "eval", None)):
        why = "it evaluates other weights than those that it trains, and a checkpoint has the latter"
        return found | {"fails": why}
    whole = _train(model, optimizer, _STEPS)
    states = list(_tensors(list(optimizer.state.values())))
    found["state_bytes"] = sum(one.numel() * one.element_size() for one in states) / whole.numel()
    saved = io.BytesIO()
    torch.save(optimizer.state_dict(), saved)
    again = copy.deepcopy(model)
    resumed = _make(again, name)
    saved.seek(0)
    try:
        resumed.load_state_dict(torch.load(saved, weights_only=True))
        differs = (_train(model, optimizer, [4]) - _train(again, resumed, [4])).abs().max() > _TOLERANCE
    except Exception as error:
        return found | {"fails": f"it cannot resume from its checkpoint: {_first_line(error)}"}
    if differs:
        return found | {"fails": "it does not resume with the states of its checkpoint"}
    tolerance = _QUANTIZED_TOLERANCE if any(one.dtype == torch.uint8 for one in states) else _TOLERANCE
    flat = _outcome(lambda: _flat(name), whole, tolerance)
    sharded = _outcome(lambda: _sharded(name), whole, tolerance)
    return found | {
        "fails_flat": f"{{strategy}}, on flat vectors: {flat}. {_OTHER}" if flat else "",
        "fails_sharded": f"{{strategy}}, on sharded tensors: {sharded}. {_OTHER}" if sharded else "",
    }


def _first_line(error: Exception) -> str:
    if isinstance(error, KeyError):
        return "KeyError: it looks for the states of weights that the engine replaced"
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:120] if str(error).strip() else 'no reason'}"


def _outcome(train: Callable[[], Any], whole: Any, tolerance: float) -> str:
    """Return why ``train`` fails or gives other weights than ``whole``; empty if it does not."""
    try:
        found = train()
    except _OF_THE_MACHINE:
        raise
    except Exception as error:
        return f"its step raises {_first_line(error)}"
    return "it computes something else" if (found - whole).abs().max() > tolerance else ""


def _model() -> Any:
    from torch import manual_seed, nn

    manual_seed(0)
    return nn.Sequential(nn.Embedding(4, 96), nn.Linear(96, 160, bias=False), nn.LayerNorm(160))


def _make(model: Any, name: str) -> Any:
    from transformers import Trainer, TrainingArguments

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(folder, optim=name, learning_rate=1e-3, use_cpu=True, report_to="none")
        return Trainer(model=model, args=arguments).create_optimizer()


def _gradients(model: Any, step: int) -> Iterator[tuple[Any, Any]]:
    """Yield each parameter with its whole gradient, of another size for each tensor and step."""
    import torch

    for number, parameter in enumerate(model.parameters()):
        source = torch.Generator().manual_seed(10 * step + number)
        yield parameter, torch.randn(parameter.shape, generator=source) * 10.0 ** ((step + number) % 3)


def _train(model: Any, optimizer: Any, steps: Sequence[int]) -> Any:
    """Return all weights as a vector after ``steps``."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    for step in steps:
        for parameter, gradient in _gradients(model, step):
            is_sharded = isinstance(parameter, DTensor)
            mesh = (parameter.device_mesh, parameter.placements) if is_sharded else ()
            parameter.grad = distribute_tensor(gradient, *mesh) if is_sharded else gradient
        optimizer.step()
        optimizer.zero_grad()
    return _vector(p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters())


def _vector(tensors: Any) -> Any:
    import torch

    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def _flat(name: str) -> Any:
    """Train as ZeRO does on two ranks: each group is one vector, of which a rank has a half."""
    model = _model()
    optimizer, order = _make(model, name), {id(p): number for number, p in enumerate(model.parameters())}
    groups = [(group, list(group["params"])) for group in optimizer.param_groups]
    for group, parts in groups:
        group["params"] = [half.clone().requires_grad_() for half in _halves(parts)]
    for step in _STEPS:
        gradients = [gradient for _, gradient in _gradients(model, step)]
        for group, parts in groups:
            for half, part in zip(group["params"], _halves(gradients[order[id(p)]] for p in parts), strict=True):
                half.grad = part.clone()
        optimizer.step()
    optimizer.state_dict()  # fails with states that it made before the weights were replaced
    trained: dict[int, Any] = {}
    for group, parts in groups:
        pieces = _vector(group["params"]).split([p.numel() for p in parts])
        trained |= {order[id(p)]: piece for p, piece in zip(parts, pieces, strict=True)}
    return _vector(trained[number] for number in sorted(trained))


def _halves(tensors: Any) -> Any:
    vector = _vector(tensors)
    return vector.split(-(-len(vector) // 2))


def _sharded(name: str) -> Any:
    """Train under FSDP2 on two ranks, which are forked."""
    import torch
    from torch.multiprocessing.spawn import start_processes

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with tempfile.TemporaryDirectory() as folder:
        start_processes(_rank, (name, folder), nprocs=2, start_method="fork")
        found = torch.load(Path(folder, "found"))
    if isinstance(found, str):
        raise RuntimeError(found)
    return found


def _rank(rank: int, name: str, folder: str) -> None:
    import torch
    from torch import distributed
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    distributed.init_process_group("gloo", store=distributed.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    try:
        model = _model()
        optimizer, whole = _make(model, name), list(model.parameters())
        fully_shard(model)
        sharded = dict(zip(map(id, whole), model.parameters(), strict=True))
        for group in optimizer.param_groups:  # as Accelerate, which gets the optimizer of the whole weights
            group["params"] = [sharded[id(parameter)] for parameter in group["params"]]
        found: Any = _train(model, optimizer, _STEPS)
        optimizer.state_dict()
    except Exception as error:
        found = _first_line(error)
    if rank == 0:
        torch.save(found, f"{folder}/found")


def _tensors(value: Any) -> Iterator[Any]:
    """Yield all tensors in ``value`` but scalars, those inside of quantized tensors included."""
    import torch

    if isinstance(value, torch.Tensor):
        if hasattr(value, "__tensor_flatten__"):
            for inner in value.__tensor_flatten__()[0]:
                yield from _tensors(getattr(value, inner))
        elif value.numel() > 1:
            yield value
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ():
        yield from _tensors(part)
