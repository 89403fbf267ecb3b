"""``deepspeed.json``: DeepSpeed's settings for a plan, with every size that the memory estimate counts.

Sizes of buckets and buffers are in elements, as DeepSpeed counts them.
"""

import os
import shutil
from collections.abc import Mapping
from math import ceil
from pathlib import Path
from typing import Any, Final

from shardmake.config import Cluster, Run
from shardmake.plan.engine import Device, engine_of
from shardmake.plan.model import Model
from shardmake.plan.plan import Choice, Plan
from shardmake.receipt import digest

GIB: Final = 1 << 30
ADAM_STATES: Final = 4
"""What DeepSpeed swaps per element with Adam: parameter, gradient, momentum, variance."""
AIO: Final = {
    "block_size": 1 << 20,
    "queue_depth": 8,
    "intra_op_parallelism": 1,
    "single_submit": False,
    "overlap_events": True,
    "use_gds": False,
}
FP16: Final = {"loss_scale": 0, "initial_scale_power": 16, "loss_scale_window": 1000, "hysteresis": 2}
FILLED_BY_TRAINER: Final = (
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "bf16.enabled",
    "fp16.enabled",
    "zero_optimization.reduce_bucket_size",
    "zero_optimization.stage3_prefetch_bucket_size",
    "zero_optimization.stage3_param_persistence_threshold",
)
"""Keys for which transformers puts its own value in place of "auto" (`transformers.integrations.deepspeed`)."""
FILLED_BY_SCRIPT: Final = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
"""Keys that Accelerate takes from what a script prepares."""


def deepspeed_config(plan: Plan, run: Run, cluster: Cluster, model: Model, folder: Path) -> dict[str, Any]:
    """DeepSpeed's file, which will lie in ``folder``, or an empty dictionary for other engines.

    It has no optimizer and no scheduler: Trainer's own run on all engines, so that parameter groups (no weight decay
    on norms and biases) and learning rates are the same whatever the strategy. ``train_batch_size`` is left to
    DeepSpeed, which multiplies it: on CPU it reads this file before it knows the world size, and would refuse.
    """
    choice = plan.choice
    if not choice.is_deepspeed:
        return {}
    values = {
        "train_micro_batch_size_per_gpu": choice.micro_batch_size,
        "gradient_accumulation_steps": choice.gradient_accumulation_steps,
        "gradient_clipping": run.max_grad_norm,
        "bf16": {"enabled": choice.precision == "bf16"},
        "fp16": {"enabled": choice.precision == "fp16", **(FP16 if choice.precision == "fp16" else {})},
        "zero_optimization": zero_optimization(choice, model, cluster, swap_folder(cluster, plan.run, folder)),
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "wall_clock_breakdown": False,
    }
    if choice.tensor_parallel > 1:
        values["tensor_parallel"] = {"autotp_size": choice.tensor_parallel}
    if "nvme" in (engine_of(choice).offload_optimizer, engine_of(choice).offload_param):
        values["aio"] = AIO
    if run.deepspeed_values == "auto":
        return with_auto(values)
    # A script's own data loader and accumulation decide; Accelerate and Trainer both fill these in.
    return values | dict.fromkeys(FILLED_BY_SCRIPT, "auto") if run.script else values


def swap_folder(cluster: Cluster, run_name: str, folder: Path) -> str:
    """Folder of a run on the node-local NVMe, apart from other users' and other runs'; empty without NVMe.

    ``folder`` is one inside the run's, whose place tells runs of one name apart.
    """
    if not cluster.nvme_path:
        return ""
    run_folder = next((above for above in folder.absolute().parents if above.name == run_name), folder.absolute())
    name = f"{run_name}-{digest(str(run_folder))[:8]}"
    return str(Path(cluster.nvme_path, f"shardmake-{os.getuid()}", name))


def remove_swapped(deepspeed: Mapping[str, Any]) -> None:
    """Remove what a training left on this node's NVMe; DeepSpeed does not. Only a folder from `swap_folder`."""
    sections = deepspeed.get("zero_optimization", {})
    for section in (sections.get("offload_optimizer", {}), sections.get("offload_param", {})):
        folder = Path(section.get("nvme_path", ""))
        if folder.parent.name == f"shardmake-{os.getuid()}":
            shutil.rmtree(folder, ignore_errors=True)


def zero_optimization(choice: Choice, model: Model, cluster: Cluster, nvme_folder: str) -> dict[str, Any]:
    """The ``zero_optimization`` section: pure arithmetic on the model's and the node's sizes."""
    engine = engine_of(choice)
    values: dict[str, Any] = {
        "stage": engine.zero_stage,
        "overlap_comm": not cluster.is_cpu,
        "contiguous_gradients": True,
        "reduce_scatter": True,
        "reduce_bucket_size": reduce_bucket_size(model.hidden_size),
    }
    values |= _stage3(choice, model, cluster) if engine.zero_stage == 3 else {"allgather_bucket_size": 500_000_000}
    if engine.offload_optimizer:
        values["offload_optimizer"] = _offload_optimizer(engine.offload_optimizer, cluster, nvme_folder)
    if engine.offload_param:
        values["offload_param"] = _offload_param(engine.offload_param, choice, model, cluster, nvme_folder)
    return values


def reduce_bucket_size(hidden_size: int) -> int:
    """Elements reduced at once: h squared, as Trainer's "auto"; DeepSpeed's own default takes 1 GB in bf16."""
    return hidden_size * hidden_size


def prefetch_bucket_size(hidden_size: int) -> int:
    """Elements gathered ahead of their use in ZeRO-3: Trainer's "auto"."""
    return int(0.9 * hidden_size * hidden_size)


def param_persistence_threshold(hidden_size: int) -> int:
    """Tensors up to this size stay whole on every rank in ZeRO-3 (norms, biases): Trainer's "auto"."""
    return 10 * hidden_size


def _stage3(choice: Choice, model: Model, cluster: Cluster) -> dict[str, Any]:
    on_nvme = engine_of(choice).offload_optimizer == "nvme"
    return {
        "stage3_prefetch_bucket_size": prefetch_bucket_size(model.hidden_size),
        "stage3_param_persistence_threshold": param_persistence_threshold(model.hidden_size),
        "stage3_max_live_parameters": 1_000_000_000,
        "stage3_max_reuse_distance": 1_000_000_000,
        "sub_group_size": swapped_sub_group_size(choice, cluster) if on_nvme else 1_000_000_000,
        "stage3_gather_16bit_weights_on_model_save": False,
    }


def swapped_sub_group_size(choice: Choice, cluster: Cluster) -> int:
    """Elements that the optimizer steps at once, so that its fp32 swap buffers take at most an eighth of the RAM.

    DeepSpeed holds `ADAM_STATES` buffers of one sub-group per rank. Beyond 1e8 a larger group reads no faster.
    """
    share = ram_per_rank(choice, cluster) // 8
    return max(1_000_000, min(100_000_000, share // (4 * ADAM_STATES)))


def ram_per_rank(choice: Choice, cluster: Cluster) -> int:
    """Host RAM of a node shared out between its ranks, bytes."""
    return int(cluster.memory_gib_per_node * GIB) // choice.processes_per_node


def _offload_optimizer(device: Device, cluster: Cluster, nvme_folder: str) -> dict[str, Any]:
    values: dict[str, Any] = {"device": device, "pin_memory": not cluster.is_cpu}
    if device == "nvme":
        values |= {
            "nvme_path": nvme_folder,
            "buffer_count": ADAM_STATES,
            "pipeline_read": False,
            "pipeline_write": False,
            "fast_init": False,
        }
    return values


def _offload_param(device: Device, choice: Choice, model: Model, cluster: Cluster, nvme_folder: str) -> dict[str, Any]:
    values: dict[str, Any] = {"device": device, "pin_memory": not cluster.is_cpu}
    if device == "nvme":
        values |= {
            "nvme_path": nvme_folder,
            "buffer_count": 5,
            "buffer_size": param_buffer_size(choice, model),
            "max_in_cpu": params_in_cpu(choice, cluster),
        }
    return values


def param_buffer_size(choice: Choice, model: Model) -> int:
    """Elements of one swap buffer: it must hold a rank's part of the largest tensor (DeepSpeed asserts it)."""
    part = ceil(model.largest_tensor / choice.world_size)
    return ceil(part / 4096) * 4096


def params_in_cpu(choice: Choice, cluster: Cluster) -> int:
    """Parameters kept in RAM rather than on NVMe, in 16 bits: at most an eighth of a rank's RAM."""
    return min(1_000_000_000, ram_per_rank(choice, cluster) // 8 // 2)


def with_auto(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """``values`` with "auto" wherever Trainer fills in its own value."""
    return {
        key: with_auto(value, f"{prefix}{key}.")
        if isinstance(value, dict)
        else "auto"
        if f"{prefix}{key}" in FILLED_BY_TRAINER
        else value
        for key, value in values.items()
    }
