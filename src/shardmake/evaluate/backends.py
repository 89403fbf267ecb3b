"""Load a model for inference on GPUs and host memory.

A model that fits one GPU is fastest there, and several GPUs share the sequences. ZeRO-3 partitions a larger model:
every rank keeps a part of each layer, in GPU memory, host memory or on NVMe, and gathers a layer when it is needed.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardmake.config.models import EvaluationBackend
from shardmake.config.settings import MICRO_BATCH
from shardmake.config.strategies import PARTITIONED_INFERENCE
from shardmake.core.environment import leave_collectives_to_gloo
from shardmake.core.errors import ConfigError
from shardmake.core.temporary import process_folder, temporary_folder
from shardmake.memory.host import INFERENCE_SHARE
from shardmake.run.model_class import ModelClass, load_complete

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_PARTITIONED_ON = {device: name for name, device in PARTITIONED_INFERENCE.items()}
_READING = timedelta(hours=4)  # in which rank 0 must read and join the weights; a rank that fails ends the others
_HOST_SHARE = 0.8  # of host memory, for weights next to everything else


@dataclass(frozen=True)
class Machine:
    """Hardware of this job: GPUs, bytes of one GPU, bytes of host memory, a folder on NVMe."""

    gpus: int
    gpu_memory: int
    host_memory: int
    nvme: str | None = None


@dataclass(frozen=True)
class RankInfo:
    """A rank's number and world size; ``rendezvous`` is a file for torch's ``file://`` store, None without a group."""

    number: int
    world_size: int
    rendezvous: str | None = None


def this_machine(nvme: str | None) -> Machine:
    """Return the hardware of this machine."""
    import psutil
    import torch

    gpus = torch.cuda.device_count()
    memory = torch.cuda.get_device_properties(0).total_memory if gpus else 0
    return Machine(gpus, memory, psutil.virtual_memory().available, nvme)


def check_backend(backend: str, nvme: str | None) -> None:
    """Raise a `ConfigError` if ``backend`` needs a folder on NVMe and the cluster names none."""
    if PARTITIONED_INFERENCE.get(backend) == "nvme" and nvme is None:
        raise ConfigError(
            f"evaluation.backend: {backend} needs node-local NVMe. Set nvme_path in the cluster file, or take another "
            "backend."
        )


def choose_backend(weights: int, machine: Machine) -> EvaluationBackend:
    """Return the fastest backend for a model of ``weights`` bytes."""
    gpu, host = INFERENCE_SHARE * machine.gpu_memory, _HOST_SHARE * machine.host_memory
    if not machine.gpus:  # CPUs read 16-bit weights as fp32
        return "whole" if 2 * weights < host else "device-map"
    if weights < gpu:
        return "whole"
    if weights < gpu * machine.gpus:
        return _PARTITIONED_ON[None]
    if weights < host or machine.nvme is None:
        return _PARTITIONED_ON["cpu"] if machine.gpus > 1 else "device-map"
    return _PARTITIONED_ON["nvme"]


def count_ranks(backend: EvaluationBackend, machine: Machine, wanted: int | None) -> int:
    """Return the number of ranks: ``wanted``, or one per GPU; `device-map` fills all devices from one process."""
    return 1 if backend == "device-map" else wanted or max(1, machine.gpus)


def weights_size(folder: Path) -> int:
    """Return the bytes of the weights in a model folder: safetensors, or else files for torch.load."""
    files = [*folder.glob("*.safetensors")] or [*folder.glob("pytorch_model*.bin")]
    return sum(path.stat().st_size for path in files)


@contextmanager
def rendezvous_of(backend: EvaluationBackend, world_size: int) -> Iterator[str | None]:
    """Yield the path of a file for the ranks' rendezvous; None if ``backend`` needs none."""
    if backend not in PARTITIONED_INFERENCE:
        yield None
        return
    with temporary_folder("rendezvous") as folder:
        yield str(folder / f"rendezvous-{world_size}")


@contextmanager
def process_group(rank: RankInfo) -> Iterator[None]:
    """Make the GPU of ``rank`` the current one; join its process group, if it has one, and leave it at the end.

    A failing rank does not leave it: under NCCL that could wait for the others.
    """
    import torch

    if torch.cuda.is_available():  # else kernels and libraries that take the current device would use GPU 0
        torch.cuda.set_device(rank.number % torch.cuda.device_count())
    if rank.rendezvous is None:
        yield
        return
    import torch.distributed as dist

    variables = {"RANK": rank.number, "LOCAL_RANK": rank.number, "WORLD_SIZE": rank.world_size}
    os.environ.update({name: str(value) for name, value in variables.items()})
    if not torch.cuda.is_available():
        os.environ["DS_ACCELERATOR"] = "cpu"
        leave_collectives_to_gloo()
    dist.init_process_group(
        "nccl" if torch.cuda.is_available() else "gloo",
        init_method=f"file://{rank.rendezvous}",
        rank=rank.number,
        world_size=rank.world_size,
        timeout=_READING,
    )
    yield
    dist.destroy_process_group()


def load_model(
    model: str,
    backend: EvaluationBackend = "whole",
    rank: RankInfo = RankInfo(0, 1),
    *,
    model_class: ModelClass | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    nvme: str | None = None,
) -> "PreTrainedModel":
    """Load ``model`` in evaluation mode with plain ``from_pretrained``; on CPUs in fp32.

    Without a ``model_class``, transformers chooses the causal language model of the config's type.
    Raises `ModelError` if weights are missing or unexpected.
    """
    import torch
    from transformers import AutoConfig

    has_gpu = torch.cuda.is_available()
    source = {"revision": revision or "main", "trust_remote_code": trust_remote_code}
    options: dict[str, Any] = {**source, "dtype": "auto" if has_gpu else torch.float32}
    if backend in PARTITIONED_INFERENCE:
        config = AutoConfig.from_pretrained(model, **source, **(model_class.config_changes if model_class else {}))
        options["dtype"] = (config.dtype if has_gpu else None) or torch.float32
        zero3 = _zero3_config(options["dtype"], backend, nvme)
        return _load_partitioned(model, model_class, options, config, zero3)
    if backend == "device-map":
        options |= _device_map(this_machine(nvme))
    elif has_gpu:
        options["device_map"] = {"": rank.number % torch.cuda.device_count()}
    return _load_whole(model, model_class, options).eval()


def _device_map(machine: Machine) -> dict[str, Any]:
    """Fill the GPUs, then host memory; further layers are read from the model's files in every pass."""
    limits: dict[int | str, int] = {gpu: int(INFERENCE_SHARE * machine.gpu_memory) for gpu in range(machine.gpus)}
    limits["cpu"] = int(_HOST_SHARE * machine.host_memory)
    return {"device_map": "auto", "max_memory": limits, "offload_folder": str(process_folder("offload", machine.nvme))}


def _load_whole(model: str, model_class: ModelClass | None, options: dict[str, Any]) -> "PreTrainedModel":
    from transformers import AutoModelForCausalLM

    return model_class.load(model, **options) if model_class else load_complete(AutoModelForCausalLM, model, **options)


def _load_partitioned(
    model: str, model_class: ModelClass | None, options: dict[str, Any], config: Any, zero3: dict[str, Any]
) -> "PreTrainedModel":
    """Load with ZeRO-3: each rank keeps its part of every weight; DeepSpeed's hooks gather layer by layer."""
    import deepspeed
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM
    from transformers.integrations import HfDeepSpeedConfig

    from shardmake.train.load_model import load_sharded

    own = partial(AutoModelForCausalLM.from_config, trust_remote_code=options["trust_remote_code"])
    build = partial(model_class.build if model_class else own, config, dtype=options["dtype"])
    load = partial(_load_whole, model, model_class, options)
    partitioning = HfDeepSpeedConfig(zero3)  # while this object exists, generate runs equally long on all ranks
    network = load_sharded(load, build, partitioning, options["dtype"])
    generation = [network.generation_config]
    dist.broadcast_object_list(generation)
    network.generation_config = generation[0]
    engine, *_ = deepspeed.initialize(model=network, config=zero3)
    engine.module.partitioning = partitioning
    return engine.module.eval()


def _zero3_config(dtype: Any, backend: EvaluationBackend, nvme: str | None) -> dict[str, Any]:
    """Return DeepSpeed's settings for inference: no optimizer, parameters partitioned and, for some, offloaded."""
    import torch

    zero: dict[str, Any] = {"stage": 3}
    if device := PARTITIONED_INFERENCE[backend]:
        zero["offload_param"] = {"device": device, "pin_memory": torch.cuda.is_available()}
    if device == "nvme":
        check_backend(backend, nvme)
        zero["offload_param"] |= {"nvme_path": str(process_folder("offload", nvme))}
    precision = {"bf16": {"enabled": dtype == torch.bfloat16}, "fp16": {"enabled": dtype == torch.float16}}
    return {MICRO_BATCH: 1, "zero_optimization": zero, **precision}
