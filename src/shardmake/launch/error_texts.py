"""The causes that the texts of GPU, NCCL and operating-system errors indicate, in the order in which they are tried."""

import re
from typing import NamedTuple

from shardmake.run.attempt import RankError
from shardmake.run.attempt_history import EndReason


class ErrorText(NamedTuple):
    """A kind of error text: what it indicates, and what a person can do about it."""

    end: EndReason
    pattern: str
    """Regular expression that is searched in ``CLASS: message``."""
    advice: str = ""
    """Advice if the training stops; empty for the advice of ``end``."""


_SETUP = {
    r"ibv_\w+.*(Cannot allocate memory|error 12)|fi_mr_reg|memlock|RLIMIT_MEMLOCK": (
        "The compute nodes limit locked memory, which InfiniBand and EFA need. `srun bash -c 'ulimit -l'` must print "
        "unlimited. Ask the administrators to set it for slurmd (LimitMEMLOCK=infinity)."
    ),
    r"NVIDIA driver on your system is too old|driver version is insufficient|Error 80[34]:": (
        "The NVIDIA driver of the nodes is too old for this build of torch. Install a build for an older CUDA "
        "(make install CUDA=cu126), or use nodes with a newer driver."
    ),
    r"no kernel image is available|unsupported toolchain|is not compatible with the current PyTorch": (
        "This build of torch has no code for the GPU. Install a build that supports it. torch.cuda.get_arch_list() "
        "lists the supported compute capabilities."
    ),
    r"not compiled with CUDA|doesn't have NCCL built in|assigned backend nccl is not available": (
        "torch is a build without CUDA. Install a CUDA build (make install CUDA=cu130)."
    ),
    r"invalid device ordinal|Duplicate GPU detected": (
        "A node has fewer visible GPUs than processes_per_node. Correct the cluster file. A process sees at most one "
        "MIG slice."
    ),
    r"/dev/shm|shared memory segment|insufficient shared memory|killed by signal: Bus error": (
        "/dev/shm of the nodes is too small. Increase it, or use fewer data loader workers."
    ),
    r"^ImportError: .*(undefined symbol|GLIBC|cannot open shared object)": (
        "A compiled package does not fit torch or the nodes' libraries. Reinstall it in this environment."
    ),
    r"MissingCUDAException|CUDAMismatchException|CUDA_HOME|Error building extension|Ninja is required": (
        "DeepSpeed compiles its kernels on the compute nodes. Load a compiler with C++20 (GCC 10 or newer) and, for "
        "NVMe, the CUDA toolkit and libaio, with slurm.setup in the cluster file."
    ),
}
"""Changes of the nodes or the installation, by the texts that require them."""

ERROR_TEXTS = (
    *(ErrorText(EndReason.SETUP, pattern, advice) for pattern, advice in _SETUP.items()),
    ErrorText(EndReason.DISK_FULL, r"^DiskFullError|No space left on device|Disk quota exceeded"),
    ErrorText(EndReason.PREFLIGHT, r"^NetworkCheckError: Rank"),
    ErrorText(EndReason.COMMUNICATION, r"^NetworkCheckError"),
    ErrorText(
        EndReason.GPU_OUT_OF_MEMORY,
        r"OutOfMemoryError|(CUDA|HIP|driver)( error:)? out of memory|failure \d* ?'out of memory'"
        r"|Failed to CUDA (c|m)alloc|(CUBLAS|CUDNN|CUSOLVER|CUSPARSE)_STATUS_ALLOC_FAILED|NVML_SUCCESS == r"
        r"|CUBLAS_STATUS_NOT_INITIALIZED when calling .?cublasCreate|(CUDA|HIP)_ERROR_OUT_OF_MEMORY"
        r"|cudaErrorMemoryAllocation|hipErrorOutOfMemory",
    ),
    ErrorText(
        EndReason.NODE_FAILURE,
        r"uncorrectable (ECC|NVLink)|GPU is lost|fallen off the bus|CUDA-capable device\(s\) is/are busy"
        r"|system not yet initialized|CUDA unknown error|no CUDA-capable device|No CUDA GPUs are available"
        r"|Driver/library version mismatch|Stale file handle|Input/output error|Remote I/O error"
        r"|Transport endpoint is not connected",
    ),
    ErrorText(
        EndReason.GPU_FAULT,
        r"unspecified launch failure|illegal memory access|illegal instruction|misaligned address|hardware stack error"
        r"|[Mm]emory error contained|Invalid access of peer GPU memory"
        r"|(CUBLAS|CUDNN)_STATUS_(EXECUTION_FAILED|INTERNAL_ERROR|MAPPING_ERROR)",
    ),
    ErrorText(
        EndReason.HOST_OUT_OF_MEMORY,
        r"^MemoryError|can't allocate memory|unable to mmap|bad_alloc|killed by signal: Killed"
        r"|^(?!.*(NCCL|nccl)).*Cannot allocate memory",
    ),
    ErrorText(EndReason.NON_FINITE, r"NonFinite"),
    ErrorText(
        EndReason.COMMUNICATION,
        r"DistNetworkError|DistBackendError|DistStoreError|NCCL|[Gg]loo|Connection (closed|reset)"
        r"|Broken pipe|recvValue failed|Timed out waiting|heartbeat|timed out after",
    ),
)


def find_error_text(error: RankError) -> ErrorText | None:
    """Return the first kind of text that ``error`` matches; None for an error of the training itself."""
    text = f"{error.kind}: {error.message}"
    return next((known for known in ERROR_TEXTS if re.search(known.pattern, text, re.DOTALL)), None)


def error_end(error: RankError) -> EndReason:
    """Return the end that a rank's exception indicates."""
    known = find_error_text(error)
    return known.end if known else EndReason.USER_ERROR


def error_advice(error: RankError) -> str:
    """Return what to do about the exception; empty if the text gives no more advice than its end."""
    known = find_error_text(error)
    return known.advice if known else ""
