"""How a model that is only run, not trained, is spread over GPUs and host memory, and how it is loaded.

A GPU that holds the model is fastest, and several share the sequences. A larger one is partitioned by ZeRO-3: every
rank keeps a part of each layer, in GPU memory, host memory or on NVMe, and gathers a layer when it comes to it.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import TYPE_CHECKING, Any

from shardmake.config.models import EvaluationBackend
from shardmake.config.strategies import PARTITIONED_INFERENCE
from shardmake.core.environment import leave_collectives_to_gloo
from shardmake.core.errors import ShardmakeError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_PARTITIONED_ON = {device: name for name, device in PARTITIONED_INFERENCE.items()}
# Of a GPU's memory, what weights may take beside activations; of the host's, beside everything else.
_GPU_SHARE, _HOST_SHARE = 0.7, 0.8


@dataclass(frozen=True)
class Machine:
    """What this job has: GPUs, bytes of one of them, bytes of host memory, a folder on NVMe."""

    gpus: int
    gpu_memory: int
    host_memory: int
    nvme: str | None = None


@dataclass(frozen=True)
class RankInfo:
    """The place of one rank; ``meeting`` is a file that the ranks find each other by, None where they need not."""

    rank: int
    world_size: int
    meeting: str | None = None


def this_machine(nvme: str | None) -> Machine:
    """What there is here."""
    import psutil
    import torch

    gpus = torch.cuda.device_count()
    memory = torch.cuda.get_device_properties(0).total_memory if gpus else 0
    return Machine(gpus, memory, psutil.virtual_memory().available, nvme)


def choose_backend(weights: int, machine: Machine) -> EvaluationBackend:
    """The fastest way to run a model of ``weights`` bytes."""
    room, host = _GPU_SHARE * machine.gpu_memory, _HOST_SHARE * machine.host_memory
    if not machine.gpus:  # where 16-bit weights are read as fp32
        return "whole" if 2 * weights < host else "device-map"
    if weights < room:
        return "whole"
    if weights < room * machine.gpus:
        return _PARTITIONED_ON[None]
    if weights < host or machine.nvme is None:
        return _PARTITIONED_ON["cpu"] if machine.gpus > 1 else "device-map"
    return _PARTITIONED_ON["nvme"]


def count_ranks(backend: EvaluationBackend, machine: Machine, wanted: int | None) -> int:
    """Processes to start: as many as asked for, else one a GPU; `device-map` fills all devices from one process."""
    if backend == "device-map":
        return 1
    return wanted or max(1, machine.gpus)


def weights_size(folder: Path) -> int:
    """Bytes of the weights in a model folder: of its safetensors, or of files that torch.load reads."""
    files = [*folder.glob("*.safetensors")] or [*folder.glob("pytorch_model*.bin")]
    return sum(path.stat().st_size for path in files)


@contextmanager
def rendezvous_of(backend: EvaluationBackend, world_size: int) -> Iterator[str | None]:
    """A file that ranks of one node find each other by, where ``backend`` needs them to."""
    if backend not in PARTITIONED_INFERENCE:
        yield None
        return
    with TemporaryDirectory() as folder:
        yield str(Path(folder) / f"meeting-of-{world_size}")


@contextmanager
def process_group(seat: RankInfo) -> Iterator[None]:
    """Take the seat: join the other ranks. A rank that fails leaves, which ends what the others wait for."""
    if seat.meeting is None:
        yield
        return
    import torch
    import torch.distributed as dist

    places = {"RANK": seat.rank, "LOCAL_RANK": seat.rank, "WORLD_SIZE": seat.world_size}
    os.environ.update({name: str(value) for name, value in places.items()})
    if torch.cuda.is_available():
        torch.cuda.set_device(seat.rank % torch.cuda.device_count())
    else:
        os.environ["DS_ACCELERATOR"] = "cpu"
        leave_collectives_to_gloo()
    dist.init_process_group(
        "nccl" if torch.cuda.is_available() else "gloo",
        init_method=f"file://{seat.meeting}",
        rank=seat.rank,
        world_size=seat.world_size,
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def load_model(
    model: str,
    backend: EvaluationBackend = "whole",
    seat: RankInfo = RankInfo(0, 1),
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    nvme: str | None = None,
) -> "PreTrainedModel":
    """``model`` in evaluation mode, as plain ``from_pretrained`` loads it; on CPUs in fp32.

    Raises `ShardmakeError` for a model that does not load whole.
    """
    import torch

    has_gpu = torch.cuda.is_available()
    options: dict[str, Any] = {
        "revision": revision or "main",
        "trust_remote_code": trust_remote_code,
        "dtype": "auto" if has_gpu else torch.float32,
    }
    if backend in PARTITIONED_INFERENCE:
        return _load_partitioned(model, options, _zero3_config(model, options, backend, nvme))
    if backend == "device-map":
        options |= _device_map(this_machine(nvme))
    elif has_gpu:
        options["device_map"] = {"": seat.rank % torch.cuda.device_count()}
    return _load_whole(model, options).eval()


def _device_map(machine: Machine) -> dict[str, Any]:
    """Fill the GPUs, then host memory; the layers behind those are read from the model's files at every pass."""
    room: dict[int | str, int] = {gpu: int(_GPU_SHARE * machine.gpu_memory) for gpu in range(machine.gpus)}
    room["cpu"] = int(_HOST_SHARE * machine.host_memory)
    return {"device_map": "auto", "max_memory": room, "offload_folder": machine.nvme or gettempdir()}


def _load_whole(model: str, options: dict[str, Any]) -> "PreTrainedModel":
    from transformers import AutoModelForCausalLM

    network, info = AutoModelForCausalLM.from_pretrained(model, output_loading_info=True, **options)
    if wrong := {kind: sorted(keys) for kind, keys in info.items() if keys}:
        raise ShardmakeError(
            f"{model} does not load whole: {'; '.join(f'{kind}: {keys[:3]}' for kind, keys in wrong.items())}. "
            "Make it again (shardmake consolidate), or check that the base model's files belong together."
        )
    return network


def _load_partitioned(model: str, options: dict[str, Any], config: dict[str, Any]) -> "PreTrainedModel":
    """Each rank keeps its part of every weight from the moment it is read; DeepSpeed's hooks gather layer by layer."""
    import deepspeed
    from transformers.integrations import HfDeepSpeedConfig

    partitioning = HfDeepSpeedConfig(config)  # from_pretrained partitions as long as this lives
    network = _load_whole(model, options)
    engine, *_ = deepspeed.initialize(model=network, config=config)
    del partitioning
    return engine.module.eval()


def _zero3_config(model: str, options: dict[str, Any], backend: EvaluationBackend, nvme: str | None) -> dict[str, Any]:
    """DeepSpeed's settings for inference: no optimizer, parameters partitioned and, where asked for, offloaded."""
    import torch
    from transformers import AutoConfig

    zero: dict[str, Any] = {"stage": 3}
    if device := PARTITIONED_INFERENCE[backend]:
        zero["offload_param"] = {"device": device, "pin_memory": torch.cuda.is_available()}
    if device == "nvme":
        if nvme is None:
            raise ShardmakeError(f"evaluation.backend {backend} needs nvme_path in the cluster file.")
        zero["offload_param"] |= {"nvme_path": nvme}
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}
    if torch.cuda.is_available():
        named = {key: options[key] for key in ("revision", "trust_remote_code")}
        dtype = AutoConfig.from_pretrained(model, **named).dtype
        config |= {"bf16": {"enabled": dtype == torch.bfloat16}, "fp16": {"enabled": dtype == torch.float16}}
    return config
