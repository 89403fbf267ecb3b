"""The errors with which CUDA and its libraries report a full GPU."""

import re
from typing import Final

FULL_GPU: Final = (
    r"OutOfMemoryError|(CUDA|HIP|driver)\]?( error)?:? out of memory|failure \d* ?'out of memory'"
    r"|Failed to CUDA (c|m)alloc|(CUBLAS|CUDNN|CUSOLVER|CUSPARSE)_STATUS_ALLOC_FAILED|NVML_SUCCESS == r"
    r"|_STATUS_\w+,? when calling .?cu[a-zA-Z]+Create\b|CUDNN_STATUS_NOT_INITIALIZED"
    r"|(CUDA|HIP)_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation|hipErrorOutOfMemory"
)
"""Regular expression that is searched in ``CLASS: message``."""


def is_full_gpu(error: BaseException) -> bool:
    """Return whether ``error`` reports that the memory of the GPU is full."""
    return re.search(FULL_GPU, f"{type(error).__name__}: {error}") is not None
