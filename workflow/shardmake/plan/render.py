"""The files that run a plan: ``accelerate.yaml``, ``deepspeed.json`` and ``training.json``, all from one source.

Every number stands in one place, the plan or the run, and is written from there into each file that wants a copy.
The functions here are pure (settings in, dictionaries out) and import no training library.
"""

import math
import sys
from pathlib import Path
from typing import Any, Final

import yaml

from shardmake.config import Cluster, Run, Strategy
from shardmake.errors import UserError
from shardmake.plan.check import Files, check_rendered
from shardmake.plan.plan import Choice, Plan
from shardmake.receipt import write_json, write_text

ACCELERATE, DEEPSPEED, TRAINING = "accelerate.yaml", "deepspeed.json", "training.json"
TORCH_DTYPES: Final = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
ATTENTION: Final = {"flash": "flash_attention_2", "sdpa": "sdpa", "eager": "eager"}
OPTIMIZERS: Final = {"adamw": "adamw_torch", "adamw8bit": "adamw_bnb_8bit", "adafactor": "adafactor", "sgd": "sgd"}
OFFLOAD_OPTIMIZER: Final[dict[Strategy, str]] = {
    "zero2-offload": "cpu",
    "zero3-offload-optimizer": "cpu",
    "zero3-offload": "cpu",
    "zero3-nvme": "nvme",
}
OFFLOAD_PARAM: Final[dict[Strategy, str]] = {"zero3-offload": "cpu", "zero3-nvme": "nvme", "fsdp-offload": "cpu"}

# `accelerate launch` takes these from its command line alone: their defaults there are not None, so that the value in
# the file never gets through (tests/unit/test_check.py compares this with the installed version).
IGNORED_IN_ACCELERATE_FILE: Final = ("rdzv_backend", "same_network", "enable_cpu_affinity", "downcast_bf16")


def render(plan: Plan, run: Run, cluster: Cluster, folder: Path) -> None:
    """Write the three files of ``plan`` into ``folder``, each only if its content changed.

    Before that the libraries' own parsers read them (`shardmake.plan.check`). Raises `UserError` where run and plan
    contradict each other or a library would refuse a file.
    """
    _check_batch(plan.choice, run)
    files = Files(
        accelerate=accelerate_config(plan, cluster, folder / DEEPSPEED),
        deepspeed=deepspeed_config(plan, run, cluster),
        training=training_config(plan, run, cluster),
    )
    check_rendered(files, plan.choice, launch_flags(plan, machine_rank=0, address="localhost", port=1), cluster.scratch)
    write_text(folder / ACCELERATE, as_yaml(files.accelerate))
    write_json(folder / DEEPSPEED, files.deepspeed)
    write_json(folder / TRAINING, files.training)


def as_yaml(values: dict[str, Any]) -> str:
    """YAML with the keys in their order."""
    return yaml.safe_dump(values, sort_keys=False)


def is_cpu(cluster: Cluster) -> bool:
    """Whether the ranks run without a GPU."""
    return cluster.accelerator == "cpu"


# --- accelerate.yaml --------------------------------------------------------------------------------------------------


def accelerate_config(plan: Plan, cluster: Cluster, deepspeed_file: Path) -> dict[str, Any]:
    """Accelerate's file: what is launched, where, and with which engine.

    The node's rank and the address of node 0 are known only at launch; they come with `launch_command`. ``use_cpu`` is
    false also on CPU: with true, the launcher drops DeepSpeed without a word and starts one process only. That ranks
    run on the CPU is said in the training arguments.
    """
    choice = plan.choice
    values: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": _distributed_type(choice),
        "num_machines": choice.nodes,
        "num_processes": choice.world_size,
        "use_cpu": False,
        "main_training_function": "main",
    }
    if choice.is_deepspeed:
        values["deepspeed_config"] = _accelerate_deepspeed(choice, deepspeed_file)
    else:
        # With a DeepSpeed file, accelerate refuses this key: the precision stands in that file.
        values["mixed_precision"] = "no" if choice.precision == "fp32" else choice.precision
    if choice.is_fsdp:
        values["fsdp_config"] = {f"fsdp_{key}": value for key, value in fsdp_settings(choice).items()}
    return values


def _distributed_type(choice: Choice) -> str:
    """Accelerate's name for the engine. MULTI_GPU starts the ranks through torchrun, on CPU as well."""
    if choice.is_deepspeed:
        return "DEEPSPEED"
    return "FSDP" if choice.is_fsdp else "MULTI_GPU"


def _accelerate_deepspeed(choice: Choice, deepspeed_file: Path) -> dict[str, Any]:
    return {
        "deepspeed_config_file": str(deepspeed_file.absolute()),
        "deepspeed_multinode_launcher": "standard",
        "zero3_init_flag": choice.zero_stage == 3,
    }


def fsdp_settings(choice: Choice) -> dict[str, Any]:
    """FSDP's settings, by the names that accelerate (with a prefix ``fsdp_``) and transformers share."""
    return {
        "version": 2,
        "reshard_after_forward": choice.strategy != "fsdp-grad-op",
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "state_dict_type": "SHARDED_STATE_DICT",
        "cpu_ram_efficient_loading": True,
        "offload_params": choice.strategy == "fsdp-offload",
        "activation_checkpointing": choice.gradient_checkpointing,
    }


# --- deepspeed.json ---------------------------------------------------------------------------------------------------


def deepspeed_config(plan: Plan, run: Run, cluster: Cluster) -> dict[str, Any]:
    """DeepSpeed's file, or an empty dictionary for other engines.

    It has no optimizer and no scheduler: Trainer's own run on all engines, so that parameter groups (no weight decay
    on norms and biases) and learning rates are the same whatever the strategy. ``train_batch_size`` is left to
    DeepSpeed, which multiplies it: on CPU it reads this file before it knows the world size, and would refuse.
    """
    choice = plan.choice
    if not choice.is_deepspeed:
        return {}
    return {
        "train_micro_batch_size_per_gpu": choice.micro_batch_size,
        "gradient_accumulation_steps": choice.gradient_accumulation_steps,
        "gradient_clipping": run.max_grad_norm,
        "bf16": {"enabled": choice.precision == "bf16"},
        "fp16": {"enabled": choice.precision == "fp16"},
        "zero_optimization": _zero_optimization(choice, cluster),
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "wall_clock_breakdown": False,
    }


def _zero_optimization(choice: Choice, cluster: Cluster) -> dict[str, Any]:
    values: dict[str, Any] = {
        "stage": choice.zero_stage,
        "overlap_comm": not is_cpu(cluster),
        "contiguous_gradients": True,
        "reduce_scatter": True,
        "reduce_bucket_size": "auto",
    }
    if choice.zero_stage == 3:
        values |= {
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
            "stage3_gather_16bit_weights_on_model_save": False,
        }
    for key, devices in (("offload_optimizer", OFFLOAD_OPTIMIZER), ("offload_param", OFFLOAD_PARAM)):
        if device := devices.get(choice.strategy):
            values[key] = _offload(device, cluster)
    return values


def _offload(device: str, cluster: Cluster) -> dict[str, Any]:
    values: dict[str, Any] = {"device": device, "pin_memory": not is_cpu(cluster)}
    if device == "nvme":
        if cluster.nvme_path is None:
            raise UserError("Strategy zero3-nvme needs node-local NVMe; set nvme_path in the cluster file.")
        values["nvme_path"] = cluster.nvme_path
    return values


# --- training.json ----------------------------------------------------------------------------------------------------


def training_config(plan: Plan, run: Run, cluster: Cluster) -> dict[str, Any]:
    """What the ranks need: model, method, training arguments, and what they must find before they may train."""
    choice = plan.choice
    return {
        "model": {
            "path": run.model,
            "revision": run.revision,
            "trust_remote_code": run.trust_remote_code,
            "dtype": load_dtype(choice, run),
            "attention": ATTENTION[plan.workload.attention],
            "gradient_checkpointing": choice.gradient_checkpointing,
        },
        "method": _method(run),
        "arguments": training_arguments(plan, run, cluster),
        "expected": expected_engine(choice),
        "loss": run.loss,
        "keep_checkpoints": run.checkpoints.keep,
    }


def load_dtype(choice: Choice, run: Run) -> str:
    """Data type in which the weights are loaded, by torch's name.

    DDP and FSDP train fp32 master weights under autocast or a mixed-precision policy, so full fine-tuning loads fp32
    there. DeepSpeed keeps the masters itself, and a frozen base needs none.
    """
    if run.method == "full" and not choice.is_deepspeed:
        return "float32"
    return TORCH_DTYPES[choice.precision]


def _method(run: Run) -> dict[str, Any]:
    if run.method == "full":
        return {"kind": "full"}
    return {"kind": run.method, **run.lora.model_dump()}


def expected_engine(choice: Choice) -> dict[str, Any]:
    """What the ranks compare with the engine they got, and refuse to train otherwise."""
    engine = "deepspeed" if choice.is_deepspeed else "fsdp" if choice.is_fsdp else "ddp"
    return {
        "engine": engine,
        "zero_stage": choice.zero_stage,
        "world_size": choice.world_size,
        "dtype": TORCH_DTYPES[choice.precision],
        "offload_optimizer": OFFLOAD_OPTIMIZER.get(choice.strategy),
        "offload_param": OFFLOAD_PARAM.get(choice.strategy),
    }


def training_arguments(plan: Plan, run: Run, cluster: Cluster) -> dict[str, Any]:
    """Keyword arguments of `transformers.TrainingArguments`, without paths; the trainer adds those.

    Checkpoints are kept and removed by Shardmake's ledger, so ``save_total_limit`` is not among them.
    """
    choice = plan.choice
    return {
        **_device_arguments(choice, cluster),
        **_batch_arguments(choice),
        **_schedule_arguments(run),
        **_optimizer_arguments(run, cluster),
        **_precision_arguments(choice),
        **_memory_arguments(choice),
        **_interval_arguments(run),
        "seed": run.seed,
        "data_seed": run.seed,
        "remove_unused_columns": False,
        "dataloader_num_workers": 0,
        "prediction_loss_only": True,
        "report_to": "none",
        "disable_tqdm": True,
    }


def _device_arguments(choice: Choice, cluster: Cluster) -> dict[str, Any]:
    values: dict[str, Any] = {"use_cpu": is_cpu(cluster), "ddp_backend": "gloo" if is_cpu(cluster) else "nccl"}
    if not (choice.is_deepspeed or choice.is_fsdp):
        values["ddp_find_unused_parameters"] = False
    return values


def _batch_arguments(choice: Choice) -> dict[str, Any]:
    return {
        "per_device_train_batch_size": choice.micro_batch_size,
        "per_device_eval_batch_size": choice.micro_batch_size,
        "gradient_accumulation_steps": choice.gradient_accumulation_steps,
        "average_tokens_across_devices": True,
    }


def _schedule_arguments(run: Run) -> dict[str, Any]:
    length = {"num_train_epochs": run.epochs} if run.max_steps is None else {"max_steps": run.max_steps}
    return {
        **length,
        "learning_rate": run.learning_rate,
        "lr_scheduler_type": run.scheduler,
        "warmup_steps": _warmup_steps(run),
    }


def _warmup_steps(run: Run) -> int | float:
    """Steps where their number is known; else the ratio, which transformers reads as one only below 1."""
    if run.max_steps is None:
        return min(run.warmup_ratio, math.nextafter(1.0, 0.0))
    return math.ceil(run.max_steps * run.warmup_ratio)


def _optimizer_arguments(run: Run, cluster: Cluster) -> dict[str, Any]:
    fused = run.optimizer == "adamw" and not is_cpu(cluster)
    return {
        "optim": "adamw_torch_fused" if fused else OPTIMIZERS[run.optimizer],
        "weight_decay": run.weight_decay,
        "max_grad_norm": run.max_grad_norm,
    }


def _precision_arguments(choice: Choice) -> dict[str, Any]:
    return {"bf16": choice.precision == "bf16", "fp16": choice.precision == "fp16"}


def _memory_arguments(choice: Choice) -> dict[str, Any]:
    """FSDP checkpoints activations itself, block by block; the other engines leave it to the model."""
    if choice.is_fsdp:
        settings = fsdp_settings(choice)
        settings["cpu_offload"] = settings.pop("offload_params")
        return {"fsdp": True, "fsdp_config": settings}
    if not choice.gradient_checkpointing:
        return {"activation_checkpointing": False}
    return {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": False}}


def _interval_arguments(run: Run) -> dict[str, Any]:
    """When to log, save and evaluate, in steps; a fraction below 1 is a part of all steps."""
    known = run.max_steps
    every = run.checkpoints.every_steps or (0.1 if known is None else math.ceil(known / 10))
    values: dict[str, Any] = {
        "logging_strategy": "steps",
        "logging_steps": 10 if known is None else max(1, min(10, known // 50)),
        "logging_first_step": True,
        "logging_nan_inf_filter": False,
        "save_strategy": "steps",
        "save_steps": every,
        "eval_strategy": "no",
    }
    if run.eval_every_steps is not None:
        values |= {"eval_strategy": "steps", "eval_steps": run.eval_every_steps}
    return values


# --- launch -----------------------------------------------------------------------------------------------------------


def launch_command(plan: Plan, attempt: Path, machine_rank: int, address: str, port: int) -> list[str]:
    """The command that starts the ranks of node ``machine_rank``; it can be typed by hand just so.

    ``attempt`` is the attempt's folder with its rendered files; ``address`` and ``port`` are node 0's. Keys that
    accelerate would ignore in its file are given here.
    """
    return [
        *(sys.executable, "-m", "accelerate.commands.launch"),
        *("--config_file", str(attempt / ACCELERATE)),
        *launch_flags(plan, machine_rank, address, port),
        *("-m", "shardmake.train", str(attempt)),
    ]


def launch_flags(plan: Plan, machine_rank: int, address: str, port: int) -> list[str]:
    """Options of `accelerate launch` beside its file: what only the node knows, and what the file cannot say."""
    return [
        *("--machine_rank", str(machine_rank)),
        *("--main_process_ip", address),
        *("--main_process_port", str(port)),
        *("--rdzv_backend", "static", "--same_network"),
        *("--max_restarts", "0"),
        *("--num_cpu_threads_per_process", str(threads_per_process(plan))),
    ]


def threads_per_process(plan: Plan) -> int:
    """Cores of a node shared out between its ranks; DeepSpeed's CPU optimizer lives on them."""
    return max(1, plan.resources["train"].cpus // plan.choice.processes_per_node)


def _check_batch(choice: Choice, run: Run) -> None:
    if choice.global_batch_size != run.global_batch_size:
        raise UserError(
            f"global_batch_size is {run.global_batch_size}, but the plan makes {choice.global_batch_size}: "
            f"{choice.world_size} ranks x {choice.micro_batch_size} sequences x "
            f"{choice.gradient_accumulation_steps} accumulation steps. Run `shardmake plan` again, or choose a "
            f"global_batch_size that {choice.world_size} ranks can divide."
        )
