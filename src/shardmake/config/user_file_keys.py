"""The keys of a run's own DeepSpeed and Accelerate files, and the effect of each.

A key that is not in these tables is refused, because Shardmake does not know its effect.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, Final, Literal

from shardmake.config.user_files import Kind, UserFile
from shardmake.core.nested import leaves, same

Use = Literal["planned", "estimated", "result", "inert", "unused", "refused"]
"""``planned``: the plan or the run decides it; ``estimated``: taken, and the memory estimate counts it; ``result``:
taken, and the receipt and the card state it; ``inert``: taken, and the result is the same; ``unused``: left out,
because it has no effect in a file; ``refused``: refused, except a value that has no effect."""


@dataclass(frozen=True)
class KeyRule:
    """The use of one key; ``effect`` is a sentence, ``idle`` are values that have no effect."""

    use: Use
    effect: str
    idle: tuple[Any, ...] = ()


@dataclass(frozen=True)
class JudgedKey:
    """A key of a user's file, its value and its rule; ``is_idle`` if the value has no effect."""

    key: str
    value: Any
    rule: KeyRule
    is_idle: bool = False


def _planned(effect: str, *keys: str) -> dict[str, KeyRule]:
    return dict.fromkeys(keys, KeyRule("planned", effect))


def _taken(use: Use, effect: str, *keys: str) -> dict[str, KeyRule]:
    return dict.fromkeys(keys, KeyRule(use, effect))


def _refused(effect: str, **idle: Any) -> dict[str, KeyRule]:
    """Return rules that refuse keys, each except for its value without effect; ``__`` stands for a dot."""
    return {key.replace("__", "."): KeyRule("refused", effect, (value,)) for key, value in idle.items()}


STOPS: Final = "Transformers would have stopped, once the model is loaded on every rank."
FILE_WINS: Final = "Your file would have won, and another training than the planned one would have run."
ARGUMENTS_WIN: Final = "The training arguments would have won."
ACCELERATE_STOPS: Final = "Accelerate would have stopped: it refuses this key beside a DeepSpeed file."
_COUNTED: Final = "The memory estimate counts it."
_SAME: Final = "The result is the same."
_NOT_COUNTED: Final = "The memory estimate does not know this setting, so the plan would be wrong."
_STORE: Final = "Shardmake writes, keeps and merges the checkpoints, and could not use them with this setting."
_SCRIPT: Final = "The script decides whether it uses this section."

_OPTIMIZER: Final = (
    "The run decides it (optimizer, learning_rate, weight_decay). DeepSpeed's own would decay norms and biases too, "
    "and engine: loop fails with it."
)
_SCHEDULER: Final = "The run decides it (scheduler, warmup_ratio). DeepSpeed's own would have won, silently."

DEEPSPEED_KEYS: Final[dict[str, KeyRule]] = {
    **_planned(
        STOPS,
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "gradient_clipping",
        "bf16.enabled",
        "fp16.enabled",
    ),
    **_planned("DeepSpeed would have stopped on the product of the others.", "train_batch_size"),
    **_planned(
        FILE_WINS,
        "zero_optimization.stage",
        "zero_optimization.offload_optimizer.device",
        "zero_optimization.offload_optimizer.nvme_path",
        "zero_optimization.offload_param.device",
        "zero_optimization.offload_param.nvme_path",
        "tensor_parallel.autotp_size",
    ),
    **_planned(_NOT_COUNTED, "zero_optimization.contiguous_gradients", "zero_optimization.reduce_scatter"),
    **_planned(
        "DeepSpeed would have stopped on the run's optimizer.",
        "zero_allow_untested_optimizer",
        "zero_force_ds_cpu_optimizer",
    ),
    **_taken(
        "estimated",
        _COUNTED,
        "zero_optimization.reduce_bucket_size",
        "zero_optimization.allgather_bucket_size",
        "zero_optimization.overlap_comm",
        "zero_optimization.sub_group_size",
        "zero_optimization.stage3_prefetch_bucket_size",
        "zero_optimization.stage3_param_persistence_threshold",
        "zero_optimization.stage3_max_live_parameters",
        "zero_optimization.stage3_max_reuse_distance",
        "zero_optimization.offload_optimizer.pin_memory",
        "zero_optimization.offload_optimizer.buffer_count",
        "zero_optimization.offload_param.pin_memory",
        "zero_optimization.offload_param.buffer_count",
        "zero_optimization.offload_param.buffer_size",
        "zero_optimization.offload_param.max_in_cpu",
    ),
    **_taken("result", "Gradients are averaged in this data type.", "communication_data_type"),
    **_taken(
        "result",
        "It scales the loss under fp16 and has no effect otherwise.",
        "fp16.loss_scale",
        "fp16.initial_scale_power",
        "fp16.loss_scale_window",
        "fp16.hysteresis",
        "fp16.consecutive_hysteresis",
        "fp16.min_loss_scale",
    ),
    **_taken(
        "inert",
        _SAME,
        "wall_clock_breakdown",
        "memory_breakdown",
        "dump_state",
        "comms_logger.*",
        "aio.*",
        "zero_optimization.round_robin_gradients",
        "zero_optimization.ignore_unused_parameters",
        "zero_optimization.log_trace_cache_warnings",
        "zero_optimization.enable_sanity_checks",
        "zero_optimization.stage3_gather_16bit_weights_on_model_save",
        "zero_optimization.offload_optimizer.fast_init",
    ),
    **_taken("unused", "Accelerate always turns these lines off.", "steps_per_print"),
    **_refused(
        _NOT_COUNTED,
        zero_optimization__allgather_partitions=True,
        zero_optimization__use_multi_rank_bucket_allreduce=True,
        zero_optimization__memory_efficient_linear=True,
        zero_optimization__compute_grad_norm=True,
        zero_optimization__parameter_alignment=False,
        zero_optimization__stage3_module_granularity_threshold=0,
        zero_optimization__stage3_use_all_reduce_for_fetch_params=False,
        zero_optimization__stage3_allgather_sequential=False,
        zero_optimization__zero_hpz_partition_size=1,
        zero_optimization__zero_quantized_weights=False,
        zero_optimization__zero_quantized_nontrainable_weights=False,
        zero_optimization__zero_quantized_gradients=False,
        zero_optimization__offload_optimizer__pipeline_read=False,
        zero_optimization__offload_optimizer__pipeline_write=False,
        zero_optimization__offload_optimizer__ratio=1.0,
        zero_optimization__offload_optimizer__super_offload=False,
        fp16__fp16_master_weights_and_grads=False,
        bf16__bf16_master_weights_and_grads=False,
        bf16__bf16_optimizer_states=False,
        bf16__immediate_grad_update=False,
        data_types__grad_accum_dtype=None,
    ),
    **_refused(
        "The name is deprecated. Use offload_optimizer and offload_param with a device, as the strategy has them.",
        zero_optimization__cpu_offload=False,
        zero_optimization__cpu_offload_param=False,
        zero_optimization__cpu_offload_use_pin_memory=False,
    ),
    **_refused(
        _STORE,
        zero_optimization__elastic_checkpoint=False,
        zero_optimization__legacy_stage1=False,
        zero_optimization__load_from_fp32_weights=True,
        zero_optimization__pipeline_loading_checkpoint=False,
        zero_optimization__stage3_gather_fp16_weights_on_model_save=False,
        checkpoint__use_node_local_storage=False,
        checkpoint__load_universal=False,
        checkpoint__tag_validation="Warn",
        checkpoint__parallel_write=None,
    ),
    **_refused(
        "The run's precision decides the data type; your file would have trained in another one.",
        torch_autocast__enabled=False,
        amp__enabled=False,
        fp16__auto_cast=False,
    ),
    **_refused("Set torch_compile in the run instead.", compile__enabled=False),
    **_refused(
        "Transformers does not use it. Set gradient_checkpointing in the run instead.",
        activation_checkpointing__partition_activations=False,
        activation_checkpointing__cpu_checkpointing=False,
        activation_checkpointing__contiguous_memory_optimization=False,
        activation_checkpointing__number_checkpoints=None,
        activation_checkpointing__synchronize_checkpoint_boundary=False,
        activation_checkpointing__profile=False,
    ),
    **_refused(
        "It changes what is trained, and neither the plan nor the card would say so.",
        prescale_gradients=False,
        gradient_predivide_factor=1.0,
        gradient_allreduce_op="avg",
        sparse_gradients=False,
        dataloader_drop_last=False,
        disable_allgather=False,
        bf16__check_grad_overflow=True,
        curriculum_learning__enabled=False,
        data_efficiency__enabled=False,
        compression_training__enabled=False,
        progressive_layer_drop__enabled=False,
        quantize_training__enabled=False,
    ),
    **_refused(
        "The cluster file and the driver decide the number of ranks.",
        elasticity__enabled=False,
        autotuning__enabled=False,
        hybrid_engine__enabled=False,
    ),
    **_refused(
        "Set report_to in the run instead.",
        tensorboard__enabled=False,
        wandb__enabled=False,
        comet__enabled=False,
        csv_monitor__enabled=False,
    ),
    **_refused("It measures a step in a training of its own.", flops_profiler__enabled=False),
    "optimizer.*": KeyRule("refused", _OPTIMIZER),
    "scheduler.*": KeyRule("refused", _SCHEDULER),
}

_FSDP1: Final = "Only FSDP1 has this setting; the run decides the version (fsdp_version)."
_WRAPPED: Final = "The memory estimate counts the blocks of the model as units."

ACCELERATE_KEYS: Final[dict[str, KeyRule]] = {
    **_planned(
        FILE_WINS,
        "compute_environment",
        "distributed_type",
        "num_machines",
        "num_processes",
        "main_training_function",
        "deepspeed_config.deepspeed_multinode_launcher",
        "deepspeed_config.zero3_init_flag",
        "parallelism_config.*",
    ),
    **_planned("The launcher ignores it for the planned engine; the training arguments have it.", "use_cpu"),
    **_planned(
        "The training arguments would have won where they ask for bf16 or fp16, else your file.", "mixed_precision"
    ),
    **_planned(
        "The command line would have won. To use that file, name it in the run.",
        "deepspeed_config.deepspeed_config_file",
    ),
    **_planned(
        ACCELERATE_STOPS,
        "deepspeed_config.gradient_accumulation_steps",
        "deepspeed_config.gradient_clipping",
        "deepspeed_config.zero_stage",
        "deepspeed_config.offload_optimizer_device",
        "deepspeed_config.offload_param_device",
        "deepspeed_config.offload_param_nvme_path",
        "deepspeed_config.offload_optimizer_nvme_path",
        "deepspeed_config.zero3_save_16bit_model",
    ),
    **_planned(
        ARGUMENTS_WIN,
        "fsdp_config.fsdp_version",
        "fsdp_config.fsdp_reshard_after_forward",
        "fsdp_config.fsdp_sharding_strategy",
        "fsdp_config.fsdp_offload_params",
        "fsdp_config.fsdp_state_dict_type",
        "fsdp_config.fsdp_cpu_ram_efficient_loading",
        "fsdp_config.fsdp_activation_checkpointing",
    ),
    **_planned(_WRAPPED, "fsdp_config.fsdp_auto_wrap_policy", "fsdp_config.fsdp_transformer_layer_cls_to_wrap"),
    **_planned(
        _FSDP1,
        "fsdp_config.fsdp_backward_prefetch",
        "fsdp_config.fsdp_forward_prefetch",
        "fsdp_config.fsdp_use_orig_params",
        "fsdp_config.fsdp_sync_module_states",
    ),
    **_planned(
        "The run decides it (torch_compile).",
        "dynamo_backend",
        "dynamo_config.dynamo_backend",
    ),
    **_taken(
        "unused",
        "The command line of the launch sets it.",
        "machine_rank",
        "main_process_ip",
        "main_process_port",
    ),
    **_taken("inert", "Accelerate checks the shapes of collectives.", "debug"),
    "rdzv_backend": KeyRule("refused", "Shardmake always uses a static rendezvous.", ("static",)),
    "same_network": KeyRule("refused", "Shardmake always uses one network for all nodes.", (True,)),
    "downcast_bf16": KeyRule("refused", "It is for TPUs only.", (False, "no")),
    "enable_cpu_affinity": KeyRule(
        "refused", "Accelerate ignores it in a file, and the launch does not set it.", (False,)
    ),
    "gpu_ids": KeyRule("refused", "Slurm or the cluster file decides the GPUs of a node.", ("all",)),
    "fsdp_config.fsdp_min_num_params": KeyRule("refused", _WRAPPED, (0,)),
    "fsdp_config.fsdp_ignored_modules": KeyRule("refused", _WRAPPED),
    "tpu_use_cluster": KeyRule("refused", "Shardmake does not use TPUs.", (False,)),
    "tpu_use_sudo": KeyRule("refused", "Shardmake does not use TPUs.", (False,)),
    "tpu_env": KeyRule("refused", "Shardmake does not use TPUs.", ([],)),
}

TABLES: Final[dict[Kind, dict[str, KeyRule]]] = {"deepspeed": DEEPSPEED_KEYS, "accelerate": ACCELERATE_KEYS}
_FLAGS: Final = frozenset(
    f"zero_optimization.{key}" for key in ("overlap_comm", "offload_optimizer.pin_memory", "offload_param.pin_memory")
)
"""Keys for the memory estimate that are true or false; the others are sizes."""


def judge(file: UserFile, is_script: bool) -> Iterator[JudgedKey]:
    """Yield every key of ``file`` with its rule. A script may use a DeepSpeed file's optimizer and scheduler."""
    off = _sections_that_are_off(file)
    for key, value in leaves(file.values):
        rule = _rule(file.kind, key, is_script)
        section = key.partition(".")[0]
        is_off = section in off and rule.use != "planned"
        unset = value is None and rule.use != "planned"
        yield JudgedKey(key, value, rule, is_idle=is_off or unset or any(same(value, idle) for idle in rule.idle))


def refusals(file: UserFile, is_script: bool) -> dict[str, str]:
    """Return the keys of ``file`` that no plan can take, each with the reason."""
    found = {}
    for one in judge(file, is_script):
        if one.rule.use == "refused" and not one.is_idle:
            found[one.key] = one.rule.effect
        elif one.rule.use == "estimated" and not one.is_idle and (reason := _wrong_size(one)):
            found[one.key] = reason
    return found


def estimated_values(file: UserFile) -> dict[str, Any]:
    """Return the values of ``file`` that the memory estimate counts, by dotted key."""
    return {
        one.key: one.value for one in judge(file, is_script=True) if one.rule.use == "estimated" and not one.is_idle
    }


def changes_result(key: str) -> bool:
    """Return True if a value of ``key`` that was taken from a run's own file can change the result."""
    return any(_rule(kind, key, is_script=True).use == "result" for kind in TABLES)


def _rule(kind: Kind, key: str, is_script: bool) -> KeyRule:
    table = TABLES[kind]
    if is_script and kind == "deepspeed" and key.startswith(("optimizer.", "scheduler.")):
        return KeyRule("result", _SCRIPT)
    if key in table:
        return table[key]
    for pattern, rule in table.items():
        if "*" in pattern and fnmatchcase(key, pattern):
            return rule
    return KeyRule("refused", _unknown(kind, key))


def _unknown(kind: Kind, key: str) -> str:
    if any(name.startswith(f"{key}.") for name in TABLES[kind]):
        return "A section with keys is needed here." + (
            " To use a DeepSpeed file, name it under deepspeed_config of the run." if key == "deepspeed_config" else ""
        )
    section, dot, name = key.rpartition(".")
    siblings = [known.rpartition(".")[2] for known in TABLES[kind] if known.rpartition(".")[0] == section]
    alike = get_close_matches(name, siblings, 1)
    return "Shardmake does not know its effect." + (f" Did you mean '{section}{dot}{alike[0]}'?" if alike else "")


def _sections_that_are_off(file: UserFile) -> set[str]:
    """Return the sections that switch themselves off with ``enabled: false``."""
    return {
        key
        for key, section in file.values.items()
        if isinstance(section, Mapping) and section.get("enabled") is False and f"{key}.enabled" in TABLES[file.kind]
    }


def _wrong_size(one: JudgedKey) -> str:
    if one.value == "auto":
        return ""
    if one.key in _FLAGS:
        return "" if isinstance(one.value, bool) else "It must be true or false."
    is_size = isinstance(one.value, int | float) and not isinstance(one.value, bool) and math.isfinite(one.value)
    return "" if is_size and one.value >= 0 else "It must be a number that is not negative."


def contradictions(file: UserFile, planned: Mapping[str, Any], is_script: bool) -> dict[str, KeyRule]:
    """Return the keys that the plan decides and whose value in ``file`` is not the one in ``planned``."""
    return {
        one.key: one.rule
        for one in judge(file, is_script)
        if one.rule.use == "planned"
        and one.value != "auto"
        and not (one.key in planned and same(one.value, planned[one.key]))
    }
