"""Record the collectives that Shardmake itself adds to a training: ``python -m tests.collectives`` writes their page.

A rank records every call of `torch.distributed` that a module of Shardmake makes, directly or through Accelerate's
`gather`. Those of DeepSpeed, FSDP and Trainer have one of their own modules in between.
"""

import ast
import json
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import shardmake
from shardmake.config.models import Strategy
from shardmake.run.attempt import AttemptDir
from shardmake.run.paths import RunDir
from tests.workflow.checkout import REPOSITORY
from tests.workflow.forked import Forked, log

PAGE = REPOSITORY / "docs/reference/collectives.md"
STRATEGIES: Sequence[Strategy] = ("ddp", "zero1", "zero2", "zero3", "fsdp")
CALLS = (
    "all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all", "all_to_all_single",
    "barrier", "batch_isend_irecv", "broadcast", "broadcast_object_list", "gather", "gather_object", "irecv", "isend",
    "monitored_barrier", "new_group", "new_subgroups", "recv", "reduce", "reduce_scatter", "reduce_scatter_tensor",
    "scatter", "scatter_object_list", "send",
)  # fmt: skip
SOURCE = Path(shardmake.__file__).parent
OTHERS = "Other functions with collectives, which these trainings do not reach: "
_THROUGH = ("torch.distributed.distributed_c10d", "torch.distributed.c10d_logger", "torch.distributed.device_mesh")
_THROUGH_ACCELERATE = ("accelerate.utils.operations", "accelerate.accelerator", "accelerate.state", "contextlib")
_HELPERS = "shardmake.train.collectives"
_RECORDS = "collectives.jsonl"


class Call(NamedTuple):
    """A collective: its name, the function that calls it, and on what it ran."""

    name: str
    place: str
    backend: str
    device: str
    waits: bool
    """The call returns when the current stream waits for the result; False if the host polls for it."""


def record(folder: Path, rank: int) -> None:
    """Run a rank of the attempt in ``folder``, with its check of the network, and record its collectives."""
    from shardmake.train.__main__ import _check_network
    from tests.fork_server import run_rank

    watch(folder / _RECORDS)
    _check_network(AttemptDir(folder), rank)
    run_rank(folder, rank, None)


def watch(file: Path) -> None:
    """Append each collective of Shardmake to ``file``, also those of forked processes."""
    nested: list[list[Any]] = []

    def watched(name: str, call: Any) -> Any:
        @wraps(call)
        def run(*args: Any, **kwargs: Any) -> Any:
            tensor = next(_tensors([*args, *kwargs.values()]), None)
            if nested:  # objects are sent as tensors
                nested[-1][0] = nested[-1][0] or tensor
                return call(*args, **kwargs)
            nested.append([tensor])
            try:
                return call(*args, **kwargs)
            finally:
                (found,) = nested.pop()
                if place := _place(sys._getframe(1)):
                    device = "-" if found is None else found.device.type
                    made = Call(name, place, dist.get_backend(), device, not kwargs.get("async_op"))
                    with file.open("a") as stream:
                        stream.write(json.dumps(made) + "\n")

        return run

    for name in CALLS:
        wrapper = watched(name, getattr(dist, name))
        for module in (dist, dist.distributed_c10d):
            if hasattr(module, name):
                setattr(module, name, wrapper)


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
        elif isinstance(value, dist.P2POp):
            yield value.tensor


def _place(frame: Any) -> str | None:
    """Return Shardmake's function below ``frame``, the caller of a collective; None if a library calls it."""
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith("shardmake.") and module != _HELPERS:
            return f"{module.removeprefix('shardmake.')}.{frame.f_code.co_qualname}".replace(".<locals>", "")
        if module != _HELPERS and not module.startswith((*_THROUGH, *_THROUGH_ACCELERATE, __name__)):
            return None
        frame = frame.f_back
    return None


def record_training(forked: Forked, folder: Path, strategy: Strategy) -> set[Call]:
    """Return Shardmake's collectives of a training of two ranks with asynchronous saves, and of its resume without."""
    rundir, found = RunDir(folder), set()
    for resume in (None, rundir.checkpoints / "checkpoint-2"):
        planned = forked.plan(strategy, 2, checkpoints={"every_steps": 2, "asynchronous": resume is None})
        codes = forked.train(rundir, planned, resume_from=resume, program="tests.collectives:record")
        assert codes == [0, 0], log(rundir)
        newest = max(rundir.attempts.iterdir())
        found |= {Call(*json.loads(line)) for line in (newest / _RECORDS).read_text().splitlines()}
    return found


def places() -> set[str]:
    """Return every function of the ranks that calls a collective or one of `shardmake.train.collectives`."""
    found = set()
    for path in (SOURCE / "train").rglob("*.py"):
        module = ".".join(path.relative_to(SOURCE).with_suffix("").parts)
        if module != _HELPERS.removeprefix("shardmake."):
            found |= {f"{module}.{name}" for name in _callers(ast.parse(path.read_text()), "")}
    return found


def _callers(node: ast.AST, inside: str) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            yield from _callers(child, f"{inside}.{child.name}".strip("."))
        else:
            if isinstance(child, ast.Call) and _is_collective(child.func):
                yield inside
            yield from _callers(child, inside)


def _is_collective(function: ast.expr) -> bool:
    if isinstance(function, ast.Name):
        return function.id in ("barrier", "first_found", "gather", "init_device_mesh", "largest", "run_on_first_rank")
    if not isinstance(function, ast.Attribute):
        return False
    named = {"dist": CALLS, "accelerator": ("gather", "wait_for_everyone")}
    return function.attr in named.get(ast.unparse(function.value).rpartition(".")[2], ())


def page(calls: dict[Strategy, set[Call]]) -> str:
    lines = [
        "# Collectives that Shardmake adds",
        "",
        "DeepSpeed, FSDP, DDP and Trainer have theirs; these are Shardmake's own, recorded in trainings of two ranks on CPUs with saves and",
        "a resume. No rank may be alone in calling one. With GPUs, the training's group has the backend NCCL, and each tensor is on the rank's",
        "GPU. NCCL runs a collective on a stream of its own: either the current stream waits for it, or the host polls for its end, which can",
        "time out. Where gloo gathers with `all_gather`, Accelerate takes `all_gather_into_tensor` over NCCL. This page is made by",
        "`python -m tests.collectives`; a test fails at a call that is not here.",
        "",
        "| collective | place | recorded | with GPUs | strategies |",
        "|---|---|---|---|---|",
    ]
    for call in sorted(set().union(*calls.values())):
        names = [strategy for strategy in STRATEGIES if call in calls[strategy]]
        who = "all" if len(names) == len(STRATEGIES) else ", ".join(names)
        lines.append(f"| {row(call)} | {who} |")
    others = sorted(places() - {call.place for found in calls.values() for call in found})
    lines += ["", f"{OTHERS}{', '.join(f'`{place}`' for place in others)}.", ""]
    return "\n".join(lines)


def row(call: Call) -> str:
    """Return the first cells of a call's row."""
    stream = "current stream waits" if call.waits else "host polls"
    if "object" in call.name:
        stream = "the object's bytes are copied to the GPU; host waits"
    elif call.name in ("barrier", "new_group", "new_subgroups"):
        stream = "host waits"
    gpu = "NCCL, GPU" if call.device != "-" else "NCCL"
    return f"`{call.name}` | `{call.place}` | {call.backend}, {call.device} | {gpu}; {stream}"


if __name__ == "__main__":
    from shardmake.demo import make_inputs
    from tests.fork_server import ForkServer
    from tests.workflow.checkout import Checkout

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_inputs(folder / "inputs")
        checkout = Checkout.create(folder / "checkout", folder / "inputs")
        checkout("shardmake", "data", "demo")
        server = ForkServer()
        forked = Forked(checkout, server)
        found = {strategy: record_training(forked, folder / strategy, strategy) for strategy in STRATEGIES}
        server.close()
        PAGE.write_text(page(found))
    os._exit(0)
