"""The table of DeepSpeed keys: what each does in the installed libraries, and what Shardmake does with it.

`render` and `plan` use it for a run's own DeepSpeed file, `shardmake check` for files that people start by hand. The
unit tests compare it with the installed DeepSpeed, so that a new, a removed and a revived key each fail a test.
"""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Final, Literal

from shardmake.config.settings import SETTINGS

Use = Literal["planned", "estimated", "result", "neutral", "unused", "refused"]
"""``planned``: the plan or the run decides it; ``estimated``: taken, and the memory estimate counts it; ``result``:
taken, and the receipt and the card state it; ``neutral``: taken, and the result is the same; ``unused``: left out,
because it has no effect in a file; ``refused``: refused, except a value that has no effect."""
Fate = Literal["effective", "memory", "numbers", "ignored", "unmergeable", "removed"]
"""Effect of a key in the installed libraries: ``effective``: what it says; ``memory``, ``numbers``: it changes the
memory or the trained numbers; ``ignored``: neither Trainer nor Accelerate uses it; ``unmergeable``: it changes how
checkpoints are written or read, and Shardmake could not use or merge them; ``removed``: DeepSpeed stops when it reads
the key, whatever its value is."""


@dataclass(frozen=True)
class KeyRule:
    """One row: the use of a key by Shardmake and its fate in the libraries.

    ``fact`` is a sentence about the libraries, which `shardmake check` reports, empty if the key does what it says.
    ``effect`` is a sentence about a run of Shardmake. ``idle`` are values that have no effect.
    """

    use: Use
    effect: str
    idle: tuple[Any, ...] = ()
    fate: Fate = "effective"
    fact: str = ""

    @property
    def reason(self) -> str:
        """Return why a run refuses the key: the fact about the libraries, then what to do."""
        return f"{self.fact} {self.effect}".strip()


_FATES: Final[dict[Use, Fate]] = {"estimated": "memory", "result": "numbers"}


def taken(use: Use, effect: str, *keys: str) -> dict[str, KeyRule]:
    """Return rules of keys that the plan decides, or that are taken over."""
    return dict.fromkeys(keys, KeyRule(use, effect, fate=_FATES.get(use, "effective")))


def _refused(fate: Fate, effect: str, fact: str = "", *sections: str, **idle: Any) -> dict[str, KeyRule]:
    """Return rules that refuse sections, and keys except for their value without effect; ``__`` stands for a dot."""
    keys = {key.replace("__", "."): (value,) for key, value in idle.items()} | {f"{name}.*": () for name in sections}
    return {key: KeyRule("refused", effect, values, fate, fact) for key, values in keys.items()}


def _section(fate: Fate, effect: str, fact: str, *names: str) -> dict[str, KeyRule]:
    """Return rules that refuse whole sections, except those with ``enabled: false``."""
    return _refused(fate, effect, fact, *names, **{f"{name}.enabled": False for name in names})


def _removed(instead: str, advice: str, *keys: str) -> dict[str, KeyRule]:
    """Return the rules of keys at which DeepSpeed stops: what replaced them, and what a run sets instead.

    A section has ``.*`` behind its name.
    """
    fact = f"DeepSpeed has removed it and stops. {instead}"
    return {key: KeyRule("refused", advice, () if key.endswith("*") else (False,), "removed", fact) for key in keys}


_COUNTED: Final = "The memory estimate counts it."
_SAME: Final = "The result is the same."
_NOT_COUNTED: Final = "The memory estimate does not know this setting, so the plan would be wrong."
_STORE: Final = "Shardmake writes, keeps and merges the checkpoints, and could not use them with this setting."
_CHANGES: Final = "It changes what is trained, and neither the plan nor the card would say so."
_LEAVE_OUT: Final = "Leave it out."
_CREATES_LOADER: Final = (
    "Trainer and Accelerate create the data loader themselves and give DeepSpeed none, so the key has no effect."
)
_QUANTIZE: Final = "Quantize the trained model: llm-compressor and torchao do."
_QUANTIZED_BY: Final = "It needs DeepSpeed's quantizer kernel, which exists for CUDA and NPU only."

_OPTIMIZER: Final = (
    "The run decides it (optimizer, learning_rate, weight_decay). DeepSpeed's own would decay norms and biases too."
)
_SCHEDULER: Final = "The run decides it (scheduler, warmup_ratio). DeepSpeed's own would have won, silently."
_PIPELINE: Final = (
    "Pipeline parallelism is not for fine-tuning with Trainer: the model must be rewritten as a list of layers, with a "
    "training loop of DeepSpeed's own. The dimensions that work are data (strategy, nodes), tensor "
    "(tensor_parallel) and sequence (sequence_parallel)."
)
_AUTOEP: Final = (
    "Experts are spread over the ranks (AutoEP). DeepSpeed stops for Mixtral, Qwen2-MoE and Qwen3-MoE of transformers "
    "5.23, and for DeepSeek-V3 under ZeRO-1 and 2 with Trainer's optimizer; it ignores gpt-oss. "
    "Where it trains, `shardmake consolidate` does not merge the checkpoints."
)

DEEPSPEED_KEYS: Final[dict[str, KeyRule]] = {
    **taken("planned", "The plan names the blocks with experts.", "zero_optimization.leaf_module.classes"),
    **taken("planned", _NOT_COUNTED, "zero_optimization.contiguous_gradients", "zero_optimization.reduce_scatter"),
    **taken(
        "planned", "DeepSpeed would have stopped on the run's optimizer.", "zero_allow_untested_optimizer",
        "zero_force_ds_cpu_optimizer",
    ),
    **taken(
        "estimated", _COUNTED, "zero_optimization.reduce_bucket_size", "zero_optimization.allgather_bucket_size",
        "zero_optimization.overlap_comm", "zero_optimization.sub_group_size",
        "zero_optimization.stage3_prefetch_bucket_size", "zero_optimization.stage3_param_persistence_threshold",
        "zero_optimization.stage3_max_live_parameters", "zero_optimization.stage3_max_reuse_distance",
        "zero_optimization.offload_optimizer.pin_memory", "zero_optimization.offload_optimizer.buffer_count",
        "zero_optimization.offload_param.pin_memory", "zero_optimization.offload_param.buffer_count",
        "zero_optimization.offload_param.buffer_size", "zero_optimization.offload_param.max_in_cpu",
    ),
    **taken("result", "Gradients are averaged in this data type.", "communication_data_type"),
    **taken(
        "result", "It scales the loss under fp16 and has no effect otherwise.", "fp16.loss_scale",
        "fp16.initial_scale_power", "fp16.loss_scale_window", "fp16.hysteresis", "fp16.consecutive_hysteresis",
        "fp16.min_loss_scale",
    ),
    **taken(
        "neutral", _SAME, "wall_clock_breakdown", "memory_breakdown", "dump_state", "log_level", "vocabulary_size",
        "comms_logger.*", "timers.*", "aio.*", "zero_optimization.round_robin_gradients",
        "zero_optimization.ignore_unused_parameters", "zero_optimization.log_trace_cache_warnings",
        "zero_optimization.enable_sanity_checks", *SETTINGS["16-bit weights on save"].unplanned,
        "zero_optimization.offload_optimizer.fast_init",
    ),
    **taken("unused", "Accelerate always turns these lines off.", "steps_per_print"),
    # --- it changes the memory ---
    **_refused(
        "memory", _NOT_COUNTED, zero_optimization__allgather_partitions=True,
        zero_optimization__use_multi_rank_bucket_allreduce=True, zero_optimization__memory_efficient_linear=True,
        zero_optimization__compute_grad_norm=True, zero_optimization__parameter_alignment=False,
        zero_optimization__stage3_module_granularity_threshold=0,
        zero_optimization__stage3_model_persistence_threshold=sys.maxsize,
        zero_optimization__stage3_use_all_reduce_for_fetch_params=False,
        zero_optimization__stage3_allgather_sequential=False, zero_optimization__override_module_apply=True,
        zero_optimization__save_muon_momentum_buffer_in_memory=False,
        zero_optimization__offload_optimizer__pipeline_read=False,
        zero_optimization__offload_optimizer__pipeline_write=False, zero_optimization__offload_optimizer__ratio=1.0,
        zero_optimization__offload_optimizer__super_offload=False,
        zero_optimization__offload_optimizer__cpuadam_cores_perc=0.8, disable_python_gc=False,
    ),
    **_refused("memory", _NOT_COUNTED, "", "zero_optimization.leaf_module"),
    **_refused(
        "memory", "Use offload_optimizer and offload_param with a device, as the strategy has them.",
        "The name is deprecated.", zero_optimization__cpu_offload=False, zero_optimization__cpu_offload_param=False,
        zero_optimization__cpu_offload_use_pin_memory=False,
    ),
    # --- it changes the numbers ---
    **_refused(
        "numbers", f"{_NOT_COUNTED} {_CHANGES}",
        f"Weights or gradients are rounded to 8 or 4 bits for communication. {_QUANTIZED_BY}",
        zero_optimization__zero_quantized_weights=False, zero_optimization__zero_quantized_nontrainable_weights=False,
        zero_optimization__zero_quantized_gradients=False,
    ),
    **_refused(
        "numbers", _NOT_COUNTED, "The optimizer has no fp32 copy of the weights, or no fp32 states.",
        fp16__fp16_master_weights_and_grads=False, bf16__bf16_master_weights_and_grads=False,
        bf16__bf16_optimizer_states=False, bf16__immediate_grad_update=False,
    ),
    **_refused(
        "numbers", _CHANGES, "Most of each update is applied steps later, on the CPU.", "zero_optimization.zenflow",
    ),
    **_refused(
        "numbers", "Set method: qlora in the run instead.", "Weights are quantized when they are loaded.",
        "weight_quantization",
    ),
    **_refused(
        "numbers", "The run's precision decides the data type; your file would have trained in another one.",
        data_types__param_dtype=None, data_types__buffer_dtype=None, data_types__keep_in_fp32_modules="auto",
        torch_autocast__enabled=False, torch_autocast__dtype=None, torch_autocast__lower_precision_safe_modules=None,
        fp16__auto_cast=False,
    ),
    **_refused(
        "numbers", _CHANGES, prescale_gradients=False, gradient_predivide_factor=1.0, gradient_allreduce_op="mean",
        managed_gradient_accumulation=True, bf16__check_grad_overflow=True,
    ),
    **_refused(
        "numbers", "Set sequence_parallel in the run instead; DeepSpeed then needs no key for it.",
        sequence_parallel_size=1, seq_parallel_communication_data_type="fp32",
    ),
    **_refused("numbers", "Set torch_compile in the run instead.", "", "compile"),
    **_refused(
        "numbers", "The plan sets the size of the groups (tensor_parallel) and leaves the rest.", "", "tensor_parallel",
    ),
    **_refused("numbers", _OPTIMIZER, "", "optimizer"),
    **_refused("numbers", _SCHEDULER, "", "scheduler"),
    # --- Trainer and Accelerate do not use it ---
    **_section(
        "ignored", "Set data.order in the run instead: length trains the short examples first.",
        f"It is about curriculum and random-LTD. {_CREATES_LOADER}", "data_efficiency",
    ),
    **_refused("ignored", "The run decides which examples are trained.", _CREATES_LOADER, dataloader_drop_last=False),
    **_refused("ignored", _LEAVE_OUT, "Nothing in DeepSpeed reads it any more.", disable_allgather=False),
    **_refused(
        "ignored", _PIPELINE, "Only DeepSpeed's PipelineEngine reads it, which Trainer never creates.", "pipeline",
    ),
    **_refused(
        "ignored", "Set gradient_checkpointing in the run instead.",
        "Models of transformers do not use it; Trainer has gradient_checkpointing.",
        activation_checkpointing__partition_activations=False, activation_checkpointing__cpu_checkpointing=False,
        activation_checkpointing__contiguous_memory_optimization=False,
        activation_checkpointing__number_checkpoints=None,
        activation_checkpointing__synchronize_checkpoint_boundary=False, activation_checkpointing__profile=False,
    ),
    **_refused(
        "ignored", _LEAVE_OUT,
        "It orders the groups of DeepSpeed's own MoE layers, which models of transformers do not have.",
        use_data_before_expert_parallelism=False,
    ),
    # --- it does something else than training ---
    **_section(
        "effective", "`shardmake plan` chooses batch size and strategy without a run.",
        "DeepSpeed's tuner sets it. In a training of your own, DeepSpeed ends the process after the profiled steps.",
        "autotuning",
    ),
    **_section(
        "effective", "Shardmake trains with Trainer's engine.",
        "DeepSpeed creates an engine of another class, which also generates text, for RLHF.", "hybrid_engine",
    ),
    **_section("effective", "Set report_to in the run instead.", "", "tensorboard", "wandb", "comet", "csv_monitor"),
    **_section(
        "effective", "It measures a step in a training of its own. The report of a run has FLOPs and MFU.", "",
        "flops_profiler",
    ),
    # --- the checkpoints cannot be merged ---
    **_refused(
        "unmergeable", _STORE, "", "checkpoint.parallel_write", "checkpoint.writer",
        zero_optimization__elastic_checkpoint=False, zero_optimization__legacy_stage1=False,
        zero_optimization__load_from_fp32_weights=True, zero_optimization__pipeline_loading_checkpoint=False,
        zero_optimization__stage3_gather_fp16_weights_on_model_save=False, checkpoint__load_universal=False,
        checkpoint__tag_validation="Warn", checkpoint__parallel_write=None, checkpoint__checkpoint_serialization=True,
    ),
    **_refused(
        "unmergeable", _STORE, "Each node keeps its files on its own disk; a merge needs those of all nodes.",
        checkpoint__use_node_local_storage=False,
    ),
    **_section(
        "unmergeable", _STORE,
        "Another engine writes the checkpoints, in a format that `shardmake consolidate` does not read.",
        "datastates_ckpt",
    ),
    **_section(
        "unmergeable",
        "Train a mixture of experts with a strategy: ZeRO and FSDP shard its experts like other weights.", _AUTOEP,
        "expert_parallel",
    ),
    # --- DeepSpeed has removed it ---
    **_removed(
        "bf16, fp16 and torch_autocast replaced NVIDIA Apex.", "Set precision in the run instead.", "amp.*",
    ),
    **_removed(
        _QUANTIZE, "Merge the run, then quantize the merged model.", "compression_training.*", "quantize_training.*",
        "eigenvalue.*",
    ),
    **_removed(
        "data_efficiency replaced it, which has no effect with Trainer and Accelerate.",
        "Set data.order in the run instead: length trains the short examples first.", "curriculum_learning.*",
    ),
    **_removed("Nothing replaced it.", _LEAVE_OUT, "progressive_layer_drop.*"),
    **_removed(
        "Nothing replaced it: set the batch sizes, and restart with another number of ranks.",
        "A run continues on another number of nodes with the same global batch; set nodes.", "elasticity.*",
    ),
    **_removed(
        "FlashAttention and sequence parallelism replaced it.", "Set attention in the run instead.",
        "sparse_attention.*",
    ),
    **_removed("Asynchronous saving replaced it.", "Set checkpoints.asynchronous in the run instead.", "nebula.*"),
    **_removed("torch.compile replaced it.", "Set torch_compile in the run instead.", "graph_harvesting"),
    **_removed("Gradients of an embedding with sparse=True need no key.", _LEAVE_OUT, "sparse_gradients"),
    **_removed(
        "zero_hpz_partition_size and FSDP's hybrid sharding replaced MiCS.",
        "Set strategy: fsdp-hybrid in the run instead.", "zero_optimization.mics_shard_size",
        "zero_optimization.mics_hierarchical_params_gather",
    ),
    **_removed("Nothing replaced it.", _LEAVE_OUT, "zero_optimization.zeropp_loco_param.*"),
    **_refused(
        "removed", "Set torch_compile in the run instead.",
        "DeepSpeed stops: it does not know the key. The model's or Trainer's torch_compile replaced it.",
        compile__enabled=False,
    ),
    **{key: KeyRule("planned", row.effect) for row in SETTINGS.values() for key in row.deepspeed},
    SETTINGS["second shard of the weights"].deepspeed[0]: KeyRule(
        "planned", "strategy: zero3-hpz sets it to the ranks of a node.", (1,), "memory",
        "Each group of so many ranks keeps a second copy of the weights, sharded over its ranks.",
    ),
}  # fmt: skip

REMOVED_OPTIMIZERS: Final = ("OneBitAdam", "OneBitLamb", "ZeroOneAdam")
"""Values of ``optimizer.type`` that DeepSpeed has removed; it compared them without regard to case."""
OPTIMIZER_REMOVED: Final = (
    "DeepSpeed has removed the 1-bit optimizers and stops. Use AdamW; over a slow network, accumulate more gradients "
    "or shard within the nodes only (zero_hpz_partition_size, FSDP's hybrid sharding)."
)


def find_rule(table: Mapping[str, KeyRule], key: str) -> KeyRule | None:
    """Return the row of ``key``: its own, else that of the pattern that fits it."""
    if key in table:
        return table[key]
    return next((rule for pattern, rule in table.items() if "*" in pattern and fnmatchcase(key, pattern)), None)


def is_removed_optimizer(name: Any) -> bool:
    """Return True for an ``optimizer.type`` that DeepSpeed has removed."""
    return str(name).lower() in [one.lower() for one in REMOVED_OPTIMIZERS]


def find_removed(values: Mapping[str, Any]) -> Iterator[tuple[str, Any, KeyRule]]:
    """Yield the sections and keys of a DeepSpeed file at which DeepSpeed stops, their values and rows."""
    for pattern, rule in DEEPSPEED_KEYS.items():
        key = pattern.removesuffix(".*")
        *path, last = key.split(".")
        section: Any = values
        for part in path:
            section = section.get(part) if isinstance(section, Mapping) else None
        if rule.fate == "removed" and isinstance(section, Mapping) and last in section:
            yield key, section[last], rule
