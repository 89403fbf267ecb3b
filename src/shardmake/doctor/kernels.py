"""Checks that use torch, each in a process of its own: ``python -m shardmake.doctor.kernels NAME REQUEST OUTPUT``.

A library may crash or hang its process. `run_check` reports that as a finding, and the other checks continue.
"""

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from itertools import permutations
from pathlib import Path
from typing import Any, Final

from pydantic import Field

from shardmake.config.accelerators import ACCELERATORS
from shardmake.config.attention import FLASH_CAPABILITY
from shardmake.config.methods import METHODS
from shardmake.config.optimizers import OPTIMIZERS
from shardmake.core.temporary import temporary_folder
from shardmake.core.units import GIB
from shardmake.doctor.records import MADE_BY, DoctorRequest, NodeFacts
from shardmake.launch.error_texts import ERROR_TEXTS
from shardmake.launch.gpu_status import list_gpus
from shardmake.launch.gpus import accelerator_of
from shardmake.run.findings import Finding, not_checked, ok, ok_if, stops, warning
from shardmake.run.record import RunRecord

DEVICE = "cuda"
MATRIX = 8192
_REPEATS = 20
_COPY_BYTES = 1 << 28
SLOW_MATMUL = 0.6
"""Part of the dense peak below which a GPU counts as slow."""
SLOW_COPY = 0.4
"""Part of the host link's rate below which a copy counts as slow."""
_TOLERANCE = 0.03
"""Relative error that bf16 kernels may have."""
CHECK_SECONDS = 120.0
BUILD_SECONDS = 600.0
BITSANDBYTES: Final = {
    **{f"`method: {name}`": name for name, spec in METHODS.items() if spec.package == "bitsandbytes"},
    **{f"`optimizer: {name}`": name for name, spec in OPTIMIZERS.items() if spec.package == "bitsandbytes"},
}
"""The settings that need bitsandbytes, with their values."""


class KernelResult(RunRecord):
    """The findings and values of one check."""

    made_by = MADE_BY
    findings: list[Finding] = Field(description="Findings of the check.")
    facts: NodeFacts = Field(NodeFacts(), description="Values for the cluster file.")


def check_cuda(request: DoctorRequest) -> KernelResult:
    """Start CUDA, and measure a matrix product and a copy from the host on the first GPU."""
    import torch

    torch.cuda.init()
    properties = torch.cuda.get_device_properties(0)
    accelerator = accelerator_of(properties.name, properties.total_memory / GIB)
    devices = range(torch.cuda.device_count())
    capabilities = {torch.cuda.get_device_capability(device) for device in devices}
    peers = {(a, b): torch.cuda.can_device_access_peer(a, b) for a, b in permutations(devices, 2)}
    source = torch.empty(_COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(source, device=DEVICE)
    copy_rate = _COPY_BYTES / _timed(lambda: target.copy_(source, non_blocking=True), 5) / 1e9
    findings = [
        judge_count(len(devices), request.cluster.processes_per_node),
        judge_architecture(capabilities, torch.cuda.get_arch_list()),
        judge_matmul(_matmul_rate(), accelerator),
        judge_copy(copy_rate, accelerator),
        judge_peers(peers),
    ]
    memory = int(properties.total_memory / GIB * 10) / 10
    driver, nccl = next((gpu.driver for gpu in list_gpus() or []), None), ".".join(map(str, torch.cuda.nccl.version()))
    facts = NodeFacts(
        gpu_name=properties.name, gpu_memory_gib=memory, driver=driver, cuda=torch.version.cuda, nccl=nccl
    )
    return KernelResult(findings=findings, facts=facts)


def judge_count(found: int, ranks: int) -> Finding:
    """Compare the GPUs that CUDA finds with the ranks of a node."""
    if found >= ranks:
        return ok("CUDA", f"it starts and finds {found} GPUs")
    return stops("CUDA", f"it finds {found} GPUs, and {ranks} ranks need one each", "Correct processes_per_node.")


def judge_architecture(capabilities: set[tuple[int, int]], built: list[str]) -> Finding:
    """Compare the compute capabilities of the GPUs with those that torch has code for."""
    missing = sorted(capability for capability in capabilities if not any(_runs(name, capability) for name in built))
    found = f"torch has code for {', '.join(built)}"
    if not missing:
        return ok("GPU architecture", found)
    found += f", not for {', '.join(f'sm_{major}{minor}' for major, minor in missing)}"
    advice = "Run `make install CUDA=...` with a build that supports this GPU; docs/get-started.md has a table."
    return stops("GPU architecture", found, advice)


def _runs(name: str, capability: tuple[int, int]) -> bool:
    """Return whether code runs: binary code of the same major version, or PTX of any older version."""
    kind, _, number = name.rstrip("af").partition("_")
    version = (int(number[:-1]), int(number[-1]))
    return version <= capability and (kind == "compute" or version[0] == capability[0])


def _timed(work: Callable[[], Any], repeats: int) -> float:
    import torch

    work()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(repeats):
        work()
    torch.cuda.synchronize()
    return (time.perf_counter() - started) / repeats


def _matmul_rate() -> float:
    import torch

    dtype = torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    left, right = (torch.randn(MATRIX, MATRIX, device=DEVICE, dtype=dtype) for _ in range(2))
    return 2 * MATRIX**3 / _timed(lambda: left @ right, _REPEATS) / 1e12


def judge_matmul(rate: float, accelerator: str | None) -> Finding:
    """Compare a matrix product in half precision with the peak of the GPU model."""
    found = f"{rate:.0f} TFLOP/s for {MATRIX} x {MATRIX} in half precision"
    if accelerator is None:
        return not_checked("matrix product", f"{found}; the catalogue has no peak for this GPU")
    peak = ACCELERATORS[accelerator].bf16 or ACCELERATORS[accelerator].fp16
    found += f", {rate / peak:.0%} of the peak of {accelerator}"
    advice = "Check power limit and clocks (`nvidia-smi -q -d POWER,CLOCK`), and that nothing else uses the GPU."
    return ok_if(rate >= SLOW_MATMUL * peak, "matrix product", found, advice)


def judge_copy(rate: float, accelerator: str | None) -> Finding:
    """Compare a copy from pinned host memory with the host link of the GPU model."""
    found = f"{rate:.1f} GB/s from pinned host memory"
    if accelerator is None:
        return not_checked("host to GPU", f"{found}; the catalogue has no rate for this GPU")
    if rate >= SLOW_COPY * ACCELERATORS[accelerator].host_link:
        return ok("host to GPU", found)
    found += f"; the link of {accelerator} has {ACCELERATORS[accelerator].host_link:g} GB/s"
    return warning("host to GPU", found, "Offload will be slow. Check the PCIe width and the binding of cores.")


def judge_peers(peers: Mapping[tuple[int, int], bool]) -> Finding:
    """Report the pairs of GPUs whose first cannot read the memory of the second."""
    if not peers:
        return not_checked("peer access", "there is one GPU")
    without = [f"{a}-{b}" for (a, b), access in peers.items() if not access]
    if not without:
        return ok("peer access", f"all {len(peers)} pairs of GPUs")
    advice = "NCCL copies through host memory between these. NVLink or PCIe peer access may be off (IOMMU, ACS)."
    return warning("peer access", f"{len(without)} of {len(peers)} pairs lack it: {', '.join(without[:8])}", advice)


_LENGTHS = (192, 320)
_Kernel = Callable[[Any, Any, Any, Any, int], Any]


def check_attention(request: DoctorRequest) -> KernelResult:
    """Compare forward and backward pass of the variable-length kernels with plain attention."""
    import torch

    major, minor = torch.cuda.get_device_capability()
    if major + minor / 10 < FLASH_CAPABILITY:
        reason = f"the GPU has compute capability {major}.{minor}, and the kernel starts at {FLASH_CAPABILITY}"
        return KernelResult(findings=[not_checked("varlen attention", reason, "`attention: auto` uses sdpa here.")])
    missing = not_checked("flash-attn", "flash-attn is not installed", "It is needed only for `attention: flash`.")
    flash = _compare_attention("flash-attn", _flash) if find_spec("flash_attn") else missing
    return KernelResult(findings=[_compare_attention("varlen attention", _varlen), flash])


def _varlen(query: Any, key: Any, value: Any, starts: Any, longest: int) -> Any:
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn(query, key, value, starts, starts, longest, longest, window_size=(-1, 0))


def _flash(query: Any, key: Any, value: Any, starts: Any, longest: int) -> Any:
    from flash_attn import flash_attn_varlen_func  # type: ignore[import-not-found]

    return flash_attn_varlen_func(query, key, value, starts, starts, longest, longest, causal=True)


def plain_attention(query: Any, key: Any, value: Any, starts: Any, longest: int) -> Any:
    """Return torch's causal attention within each sequence, from matrix products and a softmax in fp32."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    parts = (part.float().transpose(0, 1).split(starts.diff().tolist(), 1) for part in (query, key, value))
    attend = partial(torch.nn.functional.scaled_dot_product_attention, is_causal=True)
    with sdpa_kernel(SDPBackend.MATH):
        outputs = [attend(*heads) for heads in zip(*parts, strict=True)]
    return torch.cat(outputs, 1).transpose(0, 1).to(query.dtype)


def _compare_attention(name: str, kernel: _Kernel) -> Finding:
    import torch

    torch.manual_seed(0)
    starts = torch.tensor([0, _LENGTHS[0], sum(_LENGTHS)], dtype=torch.int32, device=DEVICE)
    shape = (sum(_LENGTHS), 8, 64)
    inputs = [torch.randn(shape, device=DEVICE, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    results = []
    query, key, value = inputs
    functions: tuple[_Kernel, ...] = (plain_attention, kernel)
    for function in functions:
        output = function(query, key, value, starts, max(_LENGTHS))
        results.append((output, *torch.autograd.grad(output.float().square().sum(), inputs)))
    error = max(relative_error(here, exact) for exact, here in zip(*results, strict=True))
    advice = "Use `attention: sdpa`, and report this with the JSON file."
    return judge_error(name, error, "output and gradients", advice)


def relative_error(found: Any, exact: Any) -> float:
    """Return the norm of the difference of two tensors, relative to ``exact``."""
    difference = (found.float() - exact.float()).norm() / exact.float().norm()
    return float(difference.item())


def judge_error(name: str, error: float, what: str, advice: str) -> Finding:
    """Report a kernel that computes something else than the plain formula; NaN counts as different."""
    return ok_if(error <= _TOLERANCE, name, f"{what} differ by {error:.2%} from the plain formula", advice, stops)


def check_liger(request: DoctorRequest) -> KernelResult:
    """Compare Liger's fused cross entropy with the plain one."""
    if find_spec("liger_kernel") is None:
        reason = "liger-kernel is not installed"
        return KernelResult(findings=[not_checked("Liger", reason, "It is needed only for `loss: fused`.")])
    import torch
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    torch.manual_seed(0)
    hidden, head = (torch.randn(rows, 256, device=DEVICE, dtype=torch.bfloat16) for rows in (128, 1024))
    labels = torch.randint(0, 1024, (128,), device=DEVICE)
    exact = torch.nn.functional.cross_entropy((hidden @ head.T).float(), labels)
    error = relative_error(LigerFusedLinearCrossEntropyLoss()(head, hidden, labels), exact)
    return KernelResult(findings=[judge_error("Liger", error, "the loss", "Use `loss: plain`.")])


def check_bitsandbytes(request: DoctorRequest) -> KernelResult:
    """Quantize a matrix to 4 bits and back, and take a step with the 8-bit optimizer."""
    if find_spec("bitsandbytes") is None:
        advice = f"It is needed only for {' and '.join(BITSANDBYTES)}."
        return KernelResult(findings=[not_checked("bitsandbytes", "bitsandbytes is not installed", advice)])
    import bitsandbytes
    import torch

    weight = torch.nn.Parameter(torch.randn(256, 256, device=DEVICE))
    functional = bitsandbytes.functional
    restored = functional.dequantize_4bit(*functional.quantize_4bit(weight.data, quant_type="nf4"))
    error = relative_error(restored, weight.data)
    before, weight.grad = weight.detach().clone(), torch.ones_like(weight)
    bitsandbytes.optim.AdamW8bit([weight], lr=0.1).step()
    moved = (before - weight).mean().item()
    found = f"4 bits keep a matrix up to {error:.0%}; an 8-bit AdamW step moves by {moved:.2f}"
    good = error < 0.2 and bool(torch.isfinite(weight).all()) and not torch.equal(before, weight)
    without = " and ".join(BITSANDBYTES.values())
    advice = f"Install the bitsandbytes of constraints.txt. Do without {without} until then."
    return KernelResult(findings=[ok_if(good, "bitsandbytes", found, advice, stops)])


def check_cpu_adam(request: DoctorRequest) -> KernelResult:
    """Compile DeepSpeed's Adam for CPUs in a temporary folder and compare one step with torch's."""
    import torch

    started = time.monotonic()
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    ours, theirs = (torch.nn.Parameter(torch.linspace(-1, 1, 4096)) for _ in range(2))
    ours.grad, theirs.grad = torch.ones(4096), torch.ones(4096)
    DeepSpeedCPUAdam([ours], lr=0.1, adamw_mode=True, weight_decay=0.0).step()
    torch.optim.AdamW([theirs], lr=0.1, weight_decay=0.0).step()
    error = relative_error(ours.detach(), theirs.detach())
    what = f"compiled in {time.monotonic() - started:.0f} s; the weights after one step"
    advice = "Do not use strategies with offload here, and report this with the JSON file."
    return KernelResult(findings=[judge_error("CPU Adam", error, what, advice)])


def check_nvme_io(request: DoctorRequest) -> KernelResult:
    """Compile and load DeepSpeed's asynchronous I/O."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    AsyncIOBuilder().load(verbose=False)
    return KernelResult(findings=[ok("NVMe I/O", "DeepSpeed's asynchronous I/O compiles and loads")])


ON_GPU = {"CUDA": check_cuda, "attention": check_attention, "Liger": check_liger, "bitsandbytes": check_bitsandbytes}
BUILDS = {"CPU Adam": check_cpu_adam, "NVMe I/O": check_nvme_io}


class RunningCheck:
    """One check in a process of its own, with an output folder ``folder`` and a build folder in ``scratch``."""

    def __init__(self, name: str, request: Path, folder: Path, scratch: Path, variables: Mapping[str, str]) -> None:
        stem = re.sub(r"\W+", "-", name.lower())
        self.name = name
        self.output, self.log = folder / f"{stem}.json", folder / f"{stem}.log"
        self._builds = contextlib.ExitStack()
        builds = self._builds.enter_context(temporary_folder("doctor", scratch))
        # A stale lock of an interrupted build blocks every later one, so training never uses this folder.
        environment = {**os.environ, **variables, "TORCH_EXTENSIONS_DIR": str(builds)}
        command = [sys.executable, "-m", "shardmake.doctor.kernels", name, str(request), str(self.output)]
        with self.log.open("w") as log:
            self.started = time.monotonic()
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)

    def result(self, seconds: float) -> KernelResult:
        """Return the result; a process that fails, or does not end ``seconds`` after its start, becomes a finding."""
        try:
            self.process.wait(max(0.0, self.started + seconds - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.process.terminate()
            advice = f"{self.log} has its output."
            return KernelResult(findings=[stops(self.name, f"it did not end within {seconds:.0f} s", advice)])
        finally:
            self._builds.close()
        found = KernelResult.read_if_exists(self.output)
        return found or KernelResult(findings=[describe_failure(self.name, self.process.returncode, self.log)])


_ERROR = re.compile(r"^(?:\[rank\d+\]: )?([\w.]*(?:Error|Exception)\b.*)", re.MULTILINE)


def describe_failure(name: str, returncode: int, log: Path, *, first: bool = False) -> Finding:
    """Return the finding about processes that ended without a result: an error of theirs, and what to do about it.

    It is the last error, or the ``first`` one of several ranks, whose failures cause each other.
    """
    text = log.read_text(errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    shown = _ERROR.findall(text) or lines[-1:] or [f"exit status {returncode}"]
    known = (entry.advice for entry in ERROR_TEXTS if entry.advice and re.search(entry.pattern, text, re.MULTILINE))
    advice = next((f"{advice} " for advice in known), "")
    return stops(name, shown[0 if first else -1][:300], f"{advice}{log} has the whole output.")


def main(name: str, request: str, output: str) -> None:
    """Run the check ``name`` and write its result."""
    check = (ON_GPU | BUILDS)[name]
    check(DoctorRequest.read(Path(request))).write(Path(output))


if __name__ == "__main__":
    main(*sys.argv[1:])
