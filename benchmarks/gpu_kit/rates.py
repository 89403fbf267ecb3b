"""Rates for models of a step: ``python -m benchmarks.gpu_kit.rates CASE WORK``; on a CPU with small sizes.

Copies, attention by length and kernel, the cross entropy of one sequence in three ways, AdamW on GPU and host. The unit
is at the end of each name. A part that fails is left out, and its error is printed.
"""

import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from shardmake.data.varlen import varlen_attention
from shardmake.run.turns import wait_for_turn

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
DTYPE = torch.bfloat16
BYTES = 1 << 30 if ON_GPU else 1 << 20
LENGTHS = (2048, 8192, 32768) if ON_GPU else (64,)
WEIGHTS = 300_000_000 if ON_GPU else 100_000
TOKENS, WIDTH, VOCABULARY = (4096, 2048, 128_256) if ON_GPU else (64, 64, 1024)
Rates = Iterator[tuple[str, float]]


def timed(work: Callable[[], Any], repeats: int = 5) -> float:
    """Return the median seconds of ``work`` until the device has ended it."""
    spent = []
    for _ in range(repeats + 2):
        started = time.perf_counter()
        work()
        if ON_GPU:
            torch.cuda.synchronize()
        spent.append(time.perf_counter() - started)
    return median(spent[2:])


def copies() -> Rates:
    """Measure copies on the device and to and from the host, pinned and not."""
    there, other = (torch.empty(BYTES, dtype=torch.uint8, device=DEVICE) for _ in range(2))
    yield "device copy, GB/s", 2 * BYTES / timed(lambda: other.copy_(there)) / 1e9
    for kind in ("pinned", "pageable") if ON_GPU else ("pageable",):
        here = torch.empty(BYTES, dtype=torch.uint8, pin_memory=kind == "pinned")
        yield f"to the GPU, {kind}, GB/s", BYTES / timed(partial(there.copy_, here, non_blocking=True)) / 1e9
        yield f"from the GPU, {kind}, GB/s", BYTES / timed(partial(here.copy_, there, non_blocking=True)) / 1e9


def attention() -> Rates:
    """Measure forward and backward pass of causal attention, 32 heads and 8 pairs of keys and values."""
    kernels = {
        "varlen": None, "flash": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION, "math": SDPBackend.MATH,
    }  # fmt: skip
    chosen = [name for name in kernels if name != "math"] if ON_GPU else ["math"]
    for width in (64, 128):
        for length in LENGTHS:
            q = torch.randn(1, 32, length, width, device=DEVICE, dtype=DTYPE, requires_grad=True)
            k, v = (torch.randn(1, 8, length, width, device=DEVICE, dtype=DTYPE, requires_grad=True) for _ in "kv")
            for name in chosen:
                try:
                    seconds = timed(partial(_attend, q, k, v, kernels[name]))
                except RuntimeError as error:
                    print(f"{name} at {length} x {width}: {error}")
                    continue
                yield f"{name}, {width} wide, {length} tokens, TFLOP/s", 7 * 32 * width * length**2 / seconds / 1e12


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, backend: SDPBackend | None) -> None:
    if backend is None:
        found = varlen_attention(torch.nn.Module(), q, k, v, None)[0]
    else:
        with sdpa_kernel(backend):
            found = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    found.sum().backward()


def losses() -> Rates:
    """Measure head and cross entropy of one sequence: plain in fp32, chunked by torch, fused by Liger."""
    from shardmake.train.load_model import token_losses

    hidden = torch.randn(1, TOKENS, WIDTH, device=DEVICE, dtype=DTYPE, requires_grad=True)
    head = torch.randn(VOCABULARY, WIDTH, device=DEVICE, dtype=DTYPE, requires_grad=True)
    targets = torch.randint(0, VOCABULARY, (1, TOKENS), device=DEVICE)
    kinds: dict[str, Callable[[], torch.Tensor]] = {
        "plain": lambda: cross_entropy((hidden @ head.T).float()[0], targets[0]),
        "chunked": lambda: token_losses(hidden, head, targets).float().mean(),
    }
    if ON_GPU:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        kinds["fused"] = lambda: LigerFusedLinearCrossEntropyLoss()(head, hidden[0], targets[0])
    for name, loss in kinds.items():
        seconds = timed(partial(_differentiate, loss))
        if ON_GPU:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            _differentiate(loss)
            yield f"{name} loss, GiB", (torch.cuda.max_memory_allocated() - before) / 2**30
        yield f"{name} loss, ms", 1e3 * seconds


def _differentiate(loss: Callable[[], torch.Tensor]) -> None:
    loss().backward()


def adam() -> Rates:
    """Measure AdamW in fp32: torch's kernels on the device and on the host, DeepSpeed's on the host."""
    for place in dict.fromkeys((DEVICE, "cpu")):
        weight = torch.nn.Parameter(torch.zeros(WEIGHTS, device=place))
        weight.grad = torch.ones_like(weight)
        for kind in ("fused", "foreach"):
            step = torch.optim.AdamW([weight], **{kind: True}).step  # type: ignore[arg-type]
            yield f"AdamW of torch, {kind}, {place}, G weights/s", WEIGHTS / timed(step, 3) / 1e9
    if ON_GPU:  # DeepSpeed compiles it first, which a rehearsal does not wait for
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        step = DeepSpeedCPUAdam([weight], lr=1e-4).step
        yield "AdamW of DeepSpeed, cpu, G weights/s", WEIGHTS / timed(step, 3) / 1e9


def main(name: str) -> None:
    """Measure, and print all rates as the last line."""
    wait_for_turn(name)
    found: dict[str, float] = {}
    for part in (copies, attention, losses, adam):
        try:
            for rate, value in part():
                found[rate] = round(value, 4)
        except Exception:  # the other parts count as well
            traceback.print_exc()
            found[f"{part.__name__} failed"] = 1.0
    print(json.dumps({"rates": found}))


if __name__ == "__main__":
    main(sys.argv[1])
