"""``deepspeed.json``: DeepSpeed's settings for a plan, with every size that the memory estimate counts.

Sizes of buckets and buffers are in elements, as DeepSpeed counts them.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from shardmake.config.models import Cluster, Run
from shardmake.config.settings import ACCUMULATION, MICRO_BATCH, SETTINGS, TOTAL_BATCH
from shardmake.core.disk import swap_folder
from shardmake.core.nested import overlay
from shardmake.memory.buckets import auto_sizes, zero_optimization
from shardmake.memory.model import Model
from shardmake.run.plan import Plan

AIO: Final = {
    "block_size": 1 << 20, "queue_depth": 8, "intra_op_parallelism": 1, "single_submit": False, "overlap_events": True,
    "use_gds": False,
}  # fmt: skip
FP16: Final = {"loss_scale": 0, "initial_scale_power": 16, "loss_scale_window": 1000, "hysteresis": 2}


def deepspeed_config(plan: Plan, run: Run, cluster: Cluster, model: Model, folder: Path) -> dict[str, Any]:
    """Return DeepSpeed's file, empty for other libraries; ``folder`` is any folder inside the run's.

    The file has no optimizer and no scheduler. Trainer's own are the same for every strategy: their parameter groups
    exclude norms and biases from weight decay. DeepSpeed computes ``train_batch_size`` itself: on CPU it reads this
    file before the world size is known, and would refuse any value.
    """
    choice = plan.choice
    if not choice.is_deepspeed:
        return {}
    # The rows at the top of the file, and the sections of the precision.
    values = overlay({}, {
        key: value for row in SETTINGS.values() for key, value in row.values(choice, run).items()
        if key in row.deepspeed and key != TOTAL_BATCH and ("." not in key or row is SETTINGS["precision"])
    })  # fmt: skip
    if choice.precision == "fp16":
        values["fp16"] |= FP16
    swap = swap_folder(cluster.nvme_path, plan.run, folder)
    values["zero_optimization"] = zero_optimization(choice, model, cluster, swap)
    values |= {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    values["wall_clock_breakdown"] = False
    if choice.gradients != choice.precision:
        values |= {"communication_data_type": choice.gradients, "data_types": {"grad_accum_dtype": choice.gradients}}
    if choice.tensor_parallel > 1:
        values["tensor_parallel"] = {"autotp_size": choice.tensor_parallel}
    if choice.spec.uses_nvme:
        values["aio"] = AIO
    if run.script:  # its data loader and accumulation decide, and it may save gathered weights
        if choice.zero_stage == 3 or choice.tensor_parallel > 1:  # DeepSpeed reads the key for both
            values["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
        values |= {MICRO_BATCH: "auto", ACCUMULATION: "auto"}  # Accelerate and Trainer both fill these keys in
    return values


def with_numbers(values: Mapping[str, Any], arguments: Mapping[str, Any], hidden_size: int) -> dict[str, Any]:
    """Return ``values`` with a number for each "auto", for a program that gives the file to DeepSpeed itself.

    The numbers are those that Trainer would fill in from ``arguments``, the training arguments. A key for which they
    have no value is left out; DeepSpeed then uses its default.
    """
    filled = (item for row in SETTINGS.values() for item in row.filled.items())
    numbers = {key: arguments[name] for key, name in filled if name in arguments}
    numbers |= {f"zero_optimization.{name}": size for name, size in auto_sizes(hidden_size).items()}
    numbers[SETTINGS["betas"].unplanned[0]] = [arguments["adam_beta1"], arguments["adam_beta2"]]
    return replace_auto(values, numbers)


def replace_auto(values: Mapping[str, Any], numbers: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return ``values`` with those of ``numbers``, by dotted key, for each "auto"; without the others that are."""
    replaced: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping):
            replaced[name] = replace_auto(value, numbers, f"{key}.")
        elif value != "auto" or key in numbers:
            replaced[name] = numbers[key] if value == "auto" else value
    return replaced
