"""Error texts as users of torch, NCCL, DeepSpeed and Slurm report them, and the decision that follows each."""

import pytest

from shardmake.launch.error_texts import ERROR_TEXTS, error_advice, error_end, find_error_text
from shardmake.launch.outcome import Action, classify, decide
from shardmake.run.attempt import RankError
from shardmake.run.attempt_history import EndReason
from tests.unit.launch.test_outcome import evidence, state

GPU, HOST, SETUP = EndReason.GPU_OUT_OF_MEMORY, EndReason.HOST_OUT_OF_MEMORY, EndReason.SETUP
FAULT, NODE, PEERS = EndReason.GPU_FAULT, EndReason.NODE_FAILURE, EndReason.COMMUNICATION
NCCL = "NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:3690, unhandled {} error, NCCL version 2.29.7\n{}: {}"
FABRIC = (
    "Last error:\nFailed to bind NVLink SHARP (NVLS) Multicast memory of size 2097152 : CUDA error 401 'the operation cannot "
    "be performed in the present state'.\nThis is usually caused by a system or configuration error in the Fabric Manager"
)
CASES = [
    ("OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB", GPU),
    ("OutOfMemoryError", "HIP out of memory. Tried to allocate 20.00 MiB", GPU),
    ("RuntimeError", "CUDA out of memory. Tried to allocate 256.00 MiB (GPU 3; 39.59 GiB total capacity)", GPU),
    ("AcceleratorError", "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported", GPU),
    ("RuntimeError", "CUDA driver error: out of memory", GPU),
    ("RuntimeError", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", GPU),
    ("RuntimeError", "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`", GPU),
    ("RuntimeError", "cuDNN error: CUDNN_STATUS_ALLOC_FAILED", GPU),
    ("RuntimeError", 'NVML_SUCCESS == r INTERNAL ASSERT FAILED at "../c10/cuda/CUDACachingAllocator.cpp":838', GPU),
    ("DistBackendError", NCCL.format("cuda", "ncclUnhandledCudaError", "Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'"), GPU),
    ("DistBackendError", NCCL.format("cuda", "ncclUnhandledCudaError", "Last error:\nFailed to CUDA calloc async 608 bytes"), GPU),
    ("RuntimeError", "Triton Error [CUDA]: CUDA_ERROR_OUT_OF_MEMORY", GPU),
    ("RuntimeError", "[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory: you tried to allocate 536870912 bytes", HOST),
    ("MemoryError", "", HOST),
    ("MemoryError", "std::bad_alloc", HOST),
    ("RuntimeError", "std::bad_alloc", HOST),
    ("OSError", "[Errno 12] Cannot allocate memory", HOST),
    ("RuntimeError", "unable to mmap 4949453456 bytes from file <model.safetensors>: Cannot allocate memory (12)", HOST),
    ("RuntimeError", "DataLoader worker (pid 4177) is killed by signal: Killed.", HOST),
    ("DistBackendError", NCCL.format("system", "ncclSystemError", "Last error:\nCall to ibv_reg_mr_iova2 failed with error Cannot allocate memory"), SETUP),
    ("DistBackendError", NCCL.format("system", "ncclSystemError", "Last error:\nCall to ibv_create_qp failed with error Cannot allocate memory"), SETUP),
    ("NetworkCheckError", "All ranks joined, but the network check failed: DistBackendError: ncclSystemError: ibv_reg_mr failed with error Cannot allocate memory", SETUP),
    ("RuntimeError", "fi_mr_reg failed, ret is:-12, Cannot allocate memory", SETUP),
    ("RuntimeError", "The NVIDIA driver on your system is too old (found version 12040). Please update your GPU driver", SETUP),
    ("NetworkCheckError", "Rank 0 cannot use its GPU: The NVIDIA driver on your system is too old (found version 12020).", SETUP),
    ("RuntimeError", "CUDA driver version is insufficient for CUDA runtime version", SETUP),
    ("RuntimeError", "Unexpected error from cudaGetDeviceCount(). Error 804: forward compatibility was attempted on non supported HW", SETUP),
    ("AcceleratorError", "CUDA error: no kernel image is available for execution on the device", SETUP),
    ("NetworkCheckError", "Rank 3 cannot use its GPU: CUDA error: no kernel image is available for execution on the device", SETUP),
    ("AcceleratorError", "CUDA error: the provided PTX was compiled with an unsupported toolchain.", SETUP),
    ("AcceleratorError", "CUDA error: invalid device ordinal", SETUP),
    ("DistBackendError", NCCL.format("cuda", "ncclInvalidUsage", "Last error:\nDuplicate GPU detected : rank 1 and rank 0 both on CUDA device 1b000"), SETUP),
    ("AssertionError", "Torch not compiled with CUDA enabled", SETUP),
    ("RuntimeError", "Distributed package doesn't have NCCL built in", SETUP),
    ("ValueError", "Your assigned backend nccl is not available", SETUP),
    ("RuntimeError", "DataLoader worker (pid 9) is killed by signal: Bus error. It is possible that dataloader's workers are out of shared memory.", SETUP),
    ("DistBackendError", NCCL.format("system", "ncclSystemError", "Last error:\nError while creating shared memory segment /dev/shm/nccl-Xy3kQm (size 9637888), error: No space left on device (28)"), SETUP),
    ("ImportError", "flash_attn_2_cuda.cpython-311-x86_64-linux-gnu.so: undefined symbol: _ZN3c105ErrorC2ENS_14SourceLocationE", SETUP),
    ("ImportError", "/lib64/libstdc++.so.6: version `GLIBCXX_3.4.29' not found", SETUP),
    ("ImportError", "libcudart.so.12: cannot open shared object file: No such file or directory", SETUP),
    ("MissingCUDAException", "CUDA_HOME does not exist, unable to compile CUDA op(s)", SETUP),
    ("RuntimeError", "Error building extension 'cpu_adam'", SETUP),
    ("RuntimeError", "Ninja is required to load C++ extensions", SETUP),
    ("AcceleratorError", "CUDA error: unspecified launch failure", FAULT),
    ("AcceleratorError", "CUDA error: an illegal memory access was encountered", FAULT),
    ("AcceleratorError", "CUDA error: misaligned address", FAULT),
    ("AcceleratorError", "CUDA error: an illegal instruction was encountered", FAULT),
    ("AcceleratorError", "CUDA error: hardware stack error", FAULT),
    ("AcceleratorError", "CUDA error: Memory error contained: the error is contained to the faulting process", FAULT),
    ("AcceleratorError", "CUDA error: Invalid access of peer GPU memory over nvlink or a hardware error", FAULT),
    ("RuntimeError", "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx(handle, opa, opb)`", FAULT),
    ("DistBackendError", NCCL.format("cuda", "ncclUnhandledCudaError", "Last error:\nCuda failure 700 'an illegal memory access was encountered'"), FAULT),
    ("AcceleratorError", "CUDA error: uncorrectable ECC error encountered", NODE),
    ("AcceleratorError", "CUDA error: uncorrectable NVLink error detected during the execution", NODE),
    ("RuntimeError", "Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized", NODE),
    ("RuntimeError", "CUDA unknown error - this may be due to an incorrectly set up environment", NODE),
    ("RuntimeError", "No CUDA GPUs are available", NODE),
    ("AcceleratorError", "CUDA error: CUDA-capable device(s) is/are busy or unavailable", NODE),
    ("RuntimeError", "Unable to determine the device handle for GPU 0000:3B:00.0: GPU is lost. Reboot the system to recover this GPU", NODE),
    ("RuntimeError", "Failed to initialize NVML: Driver/library version mismatch", NODE),
    ("OSError", "[Errno 116] Stale file handle: 'train.bin'", NODE),
    ("OSError", "[Errno 5] Input/output error", NODE),
    ("DiskFullError", "The next checkpoint needs 18 MiB, and /shared/runs has 2 MiB left.", EndReason.DISK_FULL),
    ("OSError", "[Errno 28] No space left on device: '/shared/runs/demo/x'", EndReason.DISK_FULL),
    ("OSError", "[Errno 122] Disk quota exceeded", EndReason.DISK_FULL),
    ("NetworkCheckError", "Rank 2 cannot use its GPU: CUDA error: uncorrectable ECC error encountered", EndReason.PREFLIGHT),
    ("NetworkCheckError", "Rank 2 found no free memory on its GPU", EndReason.PREFLIGHT),
    ("NetworkCheckError", "All ranks joined, but the network check failed: Cuda failure 2 'out of memory'", PEERS),
    ("DistBackendError", NCCL.format("system", "ncclRemoteError", "A call failed possibly due to a network error or a remote process exiting prematurely.\nLast error:\nsocketProgress: Connection closed by remote peer"), PEERS),
    ("DistBackendError", NCCL.format("internal", "ncclInternalError", "Internal check failed."), PEERS),
    ("DistBackendError", NCCL.format("system", "ncclSystemError", "Last error:\nCannot allocate memory"), PEERS),
    ("DistBackendError", "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=42, OpType=ALLREDUCE, Timeout(ms)=600000)", PEERS),
    ("RuntimeError", "[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:40321", PEERS),
    ("DistNetworkError", "The client socket has timed out after 300000ms while trying to connect to (c1, 29500).", PEERS),
    ("BrokenPipeError", "[Errno 32] Broken pipe", PEERS),
    ("OutOfMemoryError", "Allocation on device 0 would exceed allowed memory. (out of memory)", GPU),
    ("RuntimeError", "Triton Error [CUDA]: out of memory", GPU),
    ("AcceleratorError", "HIP error: out of memory", GPU),
    ("RuntimeError", "cuDNN error: CUDNN_STATUS_NOT_INITIALIZED", GPU),
    ("RuntimeError", "CUDA error: CUBLAS_STATUS_INTERNAL_ERROR when calling `cublasCreate(handle)`", GPU),
    ("RuntimeError", "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasLtCreate(&handle)`", GPU),
    ("RuntimeError", "cusolver error: CUSOLVER_STATUS_INTERNAL_ERROR, when calling `cusolverDnCreate(handle)`", GPU),
    ("RuntimeError", "bad_alloc: cudaErrorMemoryAllocation: out of memory", GPU),
    ("RuntimeError", "DefaultCPUAllocator: not enough memory: you tried to allocate 3552510976 bytes.", HOST),
    ("AcceleratorError", "CUDA error: system has unsupported display driver / cuda driver combination", SETUP),
    ("AcceleratorError", "CUDA error: forward compatibility was attempted on non supported HW", SETUP),
    ("AcceleratorError", "CUDA error: API call is not supported in the installed CUDA driver", SETUP),
    ("AcceleratorError", "CUDA error: device kernel image is invalid", SETUP),
    ("AcceleratorError", "CUDA error: invalid device function", SETUP),
    ("AcceleratorError", "CUDA error: named symbol not found", SETUP),
    ("RuntimeError", "Internal Triton PTX codegen error\nptxas fatal   : Value 'sm_121a' is not defined for option 'gpu-name'", SETUP),
    ("RuntimeError", "FlashAttention only supports Ampere GPUs or newer.", SETUP),
    ("RuntimeError", "CUDA error (/build/source/flash-attn/flash_fwd_launch_template.h:191): no kernel image is available for execution on the device", SETUP),
    ("RuntimeError", "CUDA error: CUBLAS_STATUS_ARCH_MISMATCH when calling `cublasGemmEx( handle, opa, opb, m, n, k`", SETUP),
    ("RuntimeError", "CUDA Setup failed despite GPU being available. Please run the following command to get more information", SETUP),
    ("RuntimeError", "Configured CUDA binary not found at /venv/bitsandbytes/libbitsandbytes_cuda130.so", SETUP),
    ("OSError", "libcusparse.so.12: cannot open shared object file: No such file or directory", SETUP),
    ("OSError", "/lib64/libc.so.6: version `GLIBC_2.32' not found (required by /venv/flash_attn_2_cuda.so)", SETUP),
    ("RuntimeError", "Failed to import transformers.models.llama.modeling_llama because of the following error:\nflash_attn_2_cuda.so: undefined symbol: _ZN2at4_ops9_pad_enum4callE", SETUP),
    ("RuntimeError", "cuDNN version incompatibility: PyTorch was compiled  against (9, 1, 0) but found runtime version (8, 9, 7).", SETUP),
    ("RuntimeError", "cuDNN error: CUDNN_STATUS_SUBLIBRARY_VERSION_MISMATCH", SETUP),
    ("RuntimeError", "CUDA error: CUBLAS_STATUS_INVALID_VALUE when calling `cublasGemmEx( handle, opa, opb, m, n, k`", SETUP),
    ("AcceleratorError", "CUDA error: CUDA driver is a stub library", SETUP),
    ("RuntimeError", "Unable to JIT load the cpu_adam op due to it not being compatible due to hardware/software issue. None", SETUP),
    ("RuntimeError", "The detected CUDA version (11.8) mismatches the version that was used to compile PyTorch (12.1).", SETUP),
    ("FileNotFoundError", "[Errno 2] No such file or directory: '/usr/local/cuda/bin/nvcc'", SETUP),
    ("RuntimeError", "Failed to find C compiler. Please specify via CC environment variable or set triton.knobs.build.impl.", SETUP),
    ("AssertionError", "libcuda.so cannot found!\nPossible files are located at ['/usr/lib64/libcuda.so.1'].", SETUP),
    ("CalledProcessError", "Command '['/usr/bin/gcc', '/tmp/tmpx/main.c', '-O3', '-shared', '-fPIC', '-lcuda']' returned non-zero exit status 1.", SETUP),
    ("RuntimeError", "[enforce fail at gloo/transport/tcp/device.cc:83] ifa != nullptr. Unable to find address for: bond1", SETUP),
    ("OSError", "[Errno 24] Too many open files: 'train.bin'", SETUP),
    ("RuntimeError", "unable to open shared memory object </torch_2276740_2849291446> in read-write mode: Too many open files (24)", SETUP),
    ("RuntimeError", "received 0 items of ancdata", SETUP),
    ("RuntimeError", "can't start new thread", SETUP),
    ("RuntimeError", "unable to write to file </torch_31911_952036340_6686>: No space left on device (28)", SETUP),
    ("RuntimeError", "unable to allocate shared memory(shm) for file </torch_4196_1_2>: Resource temporarily unavailable (11)", SETUP),
    ("RuntimeError", "unable to mmap 4196 bytes from file </torch_4196_1_2>: Cannot allocate memory (12)", SETUP),
    ("AcceleratorError", "CUDA error: the launch timed out and was terminated", FAULT),
    ("RuntimeError", "Triton Error [CUDA]: an illegal memory access was encountered", FAULT),
    ("RuntimeError", "CUDA driver error: CUDA_ERROR_ILLEGAL_ADDRESS", FAULT),
    ("RuntimeError", "CUDA error: all CUDA-capable devices are busy or unavailable", NODE),
    ("AcceleratorError", "CUDA error: unknown error", NODE),
    ("AcceleratorError", "CUDA error: initialization error", NODE),
    ("RuntimeError", "Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before? Error 3: initialization error", NODE),
    ("RuntimeError", "Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before? Error 2: out of memory", NODE),
    ("RuntimeError", "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU and installed a driver", NODE),
    ("NVMLError_Unknown", "Failed to initialize NVML: Unknown Error", NODE),
    ("RuntimeError", "failed call to cuDevicePrimaryCtxRetain: CUDA_ERROR_ECC_UNCORRECTABLE", NODE),
    ("RuntimeError", "cuInit(0) failed: CUDA_ERROR_SYSTEM_NOT_READY", NODE),
    ("OSError", "[Errno 108] Cannot send after transport endpoint shutdown: '/lustre/runs'", NODE),
    ("RuntimeError", "failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown or crash?", PEERS),
    ("RuntimeError", "Socket Timeout", PEERS),
    ("ConnectionRefusedError", "[Errno 111] Connection refused", PEERS),
    ("OSError", "[Errno 113] No route to host", PEERS),
    ("OSError", "[Errno 110] Connection timed out: '/lustre/train.bin'", PEERS),
    ("DistBackendError", NCCL.format("cuda", "ncclUnhandledCudaError", "Last error:\nCuda failure 'out of memory'"), GPU),
    ("DistBackendError", NCCL.format("internal", "ncclInternalError", "Last error:\nBootstrap : no socket interface found"), SETUP),
    ("DistBackendError", NCCL.format("internal", "ncclInternalError", "Last error:\nncclSocketInit: connecting to address  with family 59936 is neither AF_INET(2) nor AF_INET6(10)"), SETUP),
    ("DistBackendError", NCCL.format("cuda", "ncclUnhandledCudaError", FABRIC), NODE),
    ("NetworkCheckError", f"All ranks joined, but the network check failed: DistBackendError: {FABRIC}", NODE),
    ("NetworkCheckError", "All ranks joined, but the network check failed: CUDA error: uncorrectable NVLink error detected", NODE),
    ("NetworkCheckError", "All ranks joined, but the network check failed: CUDA error: unspecified launch failure", FAULT),
    ("DistBackendError", NCCL.format("system", "ncclRemoteError", "Last error:\nNET/IB: Got completion from peer 10.10.10.7<38866> with status=IBV_WC_RETRY_EXC_ERR(12) opcode=IBV_WC_SEND(0)"), PEERS),
    ("DistBackendError", NCCL.format("system", "ncclRemoteError", "Last error:\nNET/IB : Got completion from peer 10.0.0.5<44444> with error 12, opcode 32601, len 0, vendor err 129"), PEERS),
    ("DistBackendError", NCCL.format("system", "ncclSystemError", "Last error:\nCall to ibv_modify_qp failed with error Connection timed out"), PEERS),
    ("NonFiniteError", "Step 7: the loss of rank 1 is nan.", EndReason.NON_FINITE),
    ("AcceleratorError", "CUDA error: device-side assert triggered", EndReason.USER_ERROR),
    ("OutOfResources", "out of resource: shared memory, Required: 262144, Hardware limit: 232448.", EndReason.USER_ERROR),
    ("RuntimeError", "mat1 and mat2 shapes cannot be multiplied (8x4096 and 2048x4096)", EndReason.USER_ERROR),
    ("ValueError", "labels are missing", EndReason.USER_ERROR),
]  # fmt: skip


def error(kind: str, message: str, traceback: str = "Traceback ...") -> RankError:
    return RankError(rank=0, host="c1", culprit="c1", time=1.0, kind=kind, message=message, traceback=traceback)


PINNED = error(
    "AcceleratorError",
    "CUDA error: out of memory",
    'Traceback:\n  File "stage3.py", line 9, in __init__\n  File "cuda_accelerator.py", line 296, in pin_memory\n    return ...',
)
"""DeepSpeed pins host memory for offload."""


def test_every_pattern_has_a_case() -> None:
    errors = [error(kind, message) for kind, message, _ in CASES]
    assert {known for one in (*errors, PINNED) if (known := find_error_text(one))} == set(ERROR_TEXTS)


def test_memory_that_cannot_be_pinned_is_host_memory() -> None:
    assert error_end(PINNED) is HOST
    assert error_end(PINNED.model_copy(update={"traceback": 'File "pin_memory.py"\n  File "x.py"'})) is GPU


def test_an_unsuitable_setup_comes_with_advice_of_its_own() -> None:
    advice = {known.advice for known in ERROR_TEXTS if known.end is SETUP}
    assert "" not in advice and len(advice) == sum(known.end is SETUP for known in ERROR_TEXTS)
    assert "ulimit -l" in error_advice(error("RuntimeError", "fi_mr_reg failed, ret is:-12, Cannot allocate memory"))
    assert error_advice(error("ValueError", "labels are missing")) == ""


ACTIONS = {
    GPU: (Action.NEXT_FALLBACK, Action.NEXT_FALLBACK),
    HOST: (Action.NEXT_FALLBACK, Action.NEXT_FALLBACK),
    SETUP: (Action.STOP, Action.STOP),
    FAULT: (Action.RESUME, Action.EXCLUDE_AND_RESUME),
    NODE: (Action.EXCLUDE_AND_RESUME, Action.EXCLUDE_AND_RESUME),
    PEERS: (Action.RESUME, Action.RESUME),
    EndReason.PREFLIGHT: (Action.EXCLUDE_AND_RESUME, Action.EXCLUDE_AND_RESUME),
    EndReason.DISK_FULL: (Action.RESUME, Action.RESUME),
    EndReason.NON_FINITE: (Action.STOP, Action.STOP),
    EndReason.USER_ERROR: (Action.STOP, Action.STOP),
}
"""Actions after a text: for the first time, and for the second time on the same node."""


@pytest.mark.parametrize(("kind", "message", "end"), CASES, ids=lambda value: str(value)[:40])
def test_a_text_indicates_its_cause_and_the_driver_answers_it(kind: str, message: str, end: EndReason) -> None:
    assert error_end(error(kind, message)) is end
    outcome = classify(evidence(errors=[error(kind, message)]))
    assert outcome.end is end
    for failed_alike, action in zip((False, True), ACTIONS[end], strict=True):
        before = state(has_fallback=True, failing_nodes=1, host_failed_alike=failed_alike)
        assert decide(outcome, before) is action
