"""The causes that the texts of GPU, NCCL and operating-system errors indicate, in the order in which they are tried."""

import re
from typing import NamedTuple

from shardmake.core.failures import FULL_GPU
from shardmake.run.attempt import RankError
from shardmake.run.attempt_history import EndReason


class ErrorText(NamedTuple):
    """A kind of error text: what it indicates, and what a person can do about it."""

    end: EndReason
    pattern: str
    """Regular expression that is searched in ``CLASS: message``; `find_error_text` may add a line."""
    advice: str = ""
    """Advice if the training stops; empty for the advice of ``end``."""


_SETUP = {
    r"ibv_\w+.*(Cannot allocate memory|error 12)|fi_mr_reg|memlock|RLIMIT_MEMLOCK": (
        "The compute nodes limit locked memory, which InfiniBand and EFA need. `srun bash -c 'ulimit -l'` must print "
        "unlimited. Ask the administrators to set it for slurmd (LimitMEMLOCK=infinity)."
    ),
    r"NVIDIA driver on your system is too old|driver version is insufficient|Error 80[34]:"
    r"|unsupported display driver|forward compatibility was attempted|not supported in the installed CUDA driver": (
        "The NVIDIA driver of the nodes is too old for this build of torch. Install a build for an older CUDA "
        "(make install CUDA=cu126), or use nodes with a newer driver."
    ),
    r"no kernel image is available|unsupported toolchain|is not compatible with the current PyTorch"
    r"|invalid device function|kernel image is invalid|named symbol not found|is not defined for option 'gpu-name'"
    r"|only supports Ampere GPUs"
    r"|STATUS_ARCH_MISMATCH": (
        "torch, or another package with kernels, has no code for the GPU. Install a build that supports it, or use "
        "attention: sdpa and loss: plain. torch.cuda.get_arch_list() lists torch's compute capabilities."
    ),
    r"not compiled with CUDA|doesn't have NCCL built in|assigned backend nccl is not available": (
        "torch is a build without CUDA. Install one for CUDA that the nodes' driver can run: make install CUDA=cu130 "
        "from driver 580 on, else a CUDA build of an older version, CUDA=cu126."
    ),
    r"invalid device ordinal|Duplicate GPU detected": (
        "A node has fewer visible GPUs than processes_per_node. Correct the cluster file. A process sees at most one "
        "MIG slice."
    ),
    r"no socket interface found|is neither AF_INET|Unable to find address for": (
        "A node does not have the network interface. Correct network_interface in the cluster file, or "
        "NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME in its env."
    ),
    r"Too many open files|received 0 items of ancdata": (
        "The nodes limit open files. Increase the limit with slurm.setup (ulimit -n 65536), or use fewer data loader "
        "workers."
    ),
    r"can't start new thread|pthread_create|Thread creation failed": (
        "The nodes limit the threads of a user or a job (`ulimit -u`, or pids.max of the cgroup). Ask the "
        "administrators for more, or use fewer data loader workers."
    ),
    r"/dev/shm|</torch_|shared memory (segment|object)|insufficient shared memory|killed by signal: Bus error": (
        "/dev/shm of the nodes is too small. Increase it, or use fewer data loader workers."
    ),
    r"^(Import|OS|Runtime)Error: .*(undefined symbol|GLIBC|cannot open shared object)|STATUS_SUBLIBRARY|stub library"
    r"|cuDNN version incompatibility|CUDA Setup failed|CUDA binary not found|CUBLAS_STATUS_INVALID_VALUE": (
        "A compiled package does not fit torch or the nodes' libraries. Reinstall it in this environment."
    ),
    r"MissingCUDAException|CUDAMismatchException|CUDA_HOME|Error building extension|Ninja is required"
    r"|Unable to JIT load|detected CUDA version|/nvcc'|Failed to find C compiler|No working C\+\+ compiler"
    r"|libcuda\.so cannot found"
    r"|^CalledProcessError: .*(cc|\+\+|ninja)'": (
        "DeepSpeed and Triton compile kernels on the compute nodes. Load a compiler with C++20 (GCC 10 or newer) and, "
        "for NVMe, the CUDA toolkit and libaio, with slurm.setup in the cluster file."
    ),
}
"""Changes of the nodes or the installation, by the texts that require them."""

_FABRIC = (
    "NVLink SHARP of the node does not work. Report the node. Without NVLink SHARP (NCCL_NVLS_ENABLE: 0 in env of the "
    "cluster file) training works, with less bandwidth."
)
ERROR_TEXTS = (
    *(ErrorText(EndReason.SETUP, pattern, advice) for pattern, advice in _SETUP.items()),
    ErrorText(EndReason.DISK_FULL, r"^DiskFullError|No space left on device|Disk quota exceeded"),
    ErrorText(EndReason.PREFLIGHT, r"^NetworkCheckError: Rank"),
    ErrorText(EndReason.HOST_OUT_OF_MEMORY, r"CUDA error: out of memory.*\nin pin_memory$"),
    # In the network check no memory of the run is in use, so that a fallback to less memory would not help.
    ErrorText(EndReason.GPU_OUT_OF_MEMORY, rf"^(?!NetworkCheckError).*({FULL_GPU})"),
    ErrorText(EndReason.NODE_FAILURE, "Fabric Manager", _FABRIC),
    ErrorText(
        EndReason.NODE_FAILURE,
        r"uncorrectable (ECC|NVLink)|_UNCORRECTABLE|GPU is lost|fallen off the bus"
        r"|CUDA-capable device(s |\(s\) is/)are busy|system not yet initialized|SYSTEM_NOT_READY"
        r"|CUDA (error: )?unknown error|no CUDA-capable device|No CUDA GPUs are available|Found no NVIDIA driver"
        r"|Failed to initialize NVML|CUDA error: initialization error|cudaGetDeviceCount\(\).*Error [23]:"
        r"|Stale file handle|Input/output error|Remote I/O error|Transport endpoint is not connected"
        r"|transport endpoint shutdown|Read-only file system|is not visible on this node",
    ),
    ErrorText(
        EndReason.GPU_FAULT,
        r"unspecified launch failure|illegal memory access|illegal instruction|misaligned address|hardware stack error"
        r"|[Mm]emory error contained|Invalid access of peer GPU memory|launch timed out"
        r"|CUDA_ERROR_(LAUNCH_FAILED|ILLEGAL_\w+|MISALIGNED_ADDRESS|HARDWARE_STACK_ERROR)"
        r"|(CUBLAS|CUDNN)_STATUS_(EXECUTION_FAILED|INTERNAL_ERROR|MAPPING_ERROR)",
    ),
    ErrorText(EndReason.COMMUNICATION, r"^NetworkCheckError"),
    ErrorText(
        EndReason.HOST_OUT_OF_MEMORY,
        r"^MemoryError|DefaultCPUAllocator|unable to mmap|bad_alloc|killed by signal: Killed"
        r"|^(?!.*(NCCL|nccl)).*Cannot allocate memory",
    ),
    ErrorText(EndReason.NON_FINITE, r"NonFinite"),
    ErrorText(
        EndReason.COMMUNICATION,
        r"DistNetworkError|DistBackendError|DistStoreError|NCCL|[Gg]loo|Connection (closed|reset|refused|timed out)"
        r"|Broken pipe|recvValue failed|failed to recv|Socket Timeout|No route to host|Network is unreachable"
        r"|Timed out waiting|heartbeat|timed out after",
    ),
)


def find_error_text(error: RankError) -> ErrorText | None:
    """Return the first kind of text that ``error`` matches; None for an error of the training itself.

    CUDA reports host memory that cannot be pinned like a full GPU. Only the traceback distinguishes them.
    """
    pinned = "\nin pin_memory" if "pin_memory" in error.traceback.rpartition("  File ")[2] else ""
    return _find(f"{error.kind}: {error.message}{pinned}")


def _find(text: str) -> ErrorText | None:
    return next((known for known in ERROR_TEXTS if re.search(known.pattern, text, re.DOTALL)), None)


def text_end(line: str) -> EndReason | None:
    """Return the end that an exception in a log indicates, given its ``CLASS: message``; None if it is unknown."""
    kind, colon, message = line.partition(":")
    known = _find(f"{kind.rpartition('.')[2]}{colon}{message}")
    return known.end if known else None


def error_end(error: RankError) -> EndReason:
    """Return the end that a rank's exception indicates."""
    known = find_error_text(error)
    return known.end if known else EndReason.USER_ERROR


def error_advice(error: RankError) -> str:
    """Return what to do about the exception; empty if the text gives no more advice than its end."""
    known = find_error_text(error)
    return known.advice if known else ""
