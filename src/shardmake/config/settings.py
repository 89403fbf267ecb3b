"""The table of training settings: one row each.

A row says how a run, Trainer, DeepSpeed and Accelerate call the setting, which value the plan gives it, and what a
change of it means. The rendered files, the comparison with files of users, the check of each rank, the digest and the
report read the rows. Only this file names DeepSpeed's and Accelerate's keys of a setting; what a reader has to compute
stands beside the reader, by the name of the row.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from shardmake.config.models import Run

STOPS: Final = "Transformers would have stopped, once the model is loaded on every rank."
FILE_WINS: Final = "Your file would have won, and another training than the planned one would have run."
ARGUMENTS_WIN: Final = "The training arguments would have won."
ACCELERATE_STOPS: Final = "Accelerate would have stopped: it refuses this key beside a DeepSpeed file."
FSDP1_ONLY: Final = "Only FSDP1 has this setting, and runs use FSDP2."
WRAPPED: Final = "The memory estimate counts the blocks of the model as units."
ADD_AUTO: Final = 'Write "auto" in the DeepSpeed file.'

MICRO_BATCH: Final = "train_micro_batch_size_per_gpu"
ACCUMULATION: Final = "gradient_accumulation_steps"
TOTAL_BATCH: Final = "train_batch_size"

Planned = Callable[[Any, Run], Any]
"""The planned value under a `shardmake.run.plan.Choice`: one for every key of the files, or one for each. None leaves
the key to others."""


@dataclass(frozen=True)
class Setting:
    """One setting of a training and its names."""

    name: str
    """The words of a comparison."""
    key: str = ""
    """Key of a run; empty if the plan alone decides."""
    trainer: tuple[str, ...] = ()
    """Arguments of transformers' TrainingArguments; several make one value."""
    deepspeed: tuple[str, ...] = ()
    """Dotted keys of a DeepSpeed file that the plan or the run decides."""
    unplanned: tuple[str, ...] = ()
    """Dotted keys of a DeepSpeed file that set it too. A run refuses them, or leaves them to a script."""
    accelerate: tuple[str, ...] = ()
    """Dotted keys of an Accelerate file; the last part is the option of `accelerate launch`."""
    planned: Planned | None = None
    """None: the value of the run's key, if it has one."""
    effect: str = STOPS
    """A sentence: what another value in a DeepSpeed file of the user would have done."""
    launch_effect: str = ""
    """The same for an Accelerate file; empty if Accelerate refuses the key beside a DeepSpeed file."""
    is_result: bool = True
    """The key, or the recorded argument, can change what is trained. The others spread the training over hardware."""
    recorded: str = ""
    """Name of the value in the settings of a result, if it is not the run's key."""
    trainer_name: str = ""
    """Words for Trainer's value if several arguments make it."""
    advice: str = ADD_AUTO
    """A sentence that follows if another value trains than the one that is written."""
    auto: Any = None
    """The value that `Accelerator.prepare` puts in place of an "auto" that is still there."""
    label: str = ""
    """The fact in a report, if the value alone states it."""
    shown: str = "{:g}"
    """Format of the value in a report."""

    @property
    def deepspeed_keys(self) -> tuple[str, ...]:
        """Return every key of a DeepSpeed file that sets it."""
        return (*self.deepspeed, *self.unplanned)

    @property
    def option(self) -> str | None:
        """Return the option of `accelerate launch` that sets it; None without one."""
        return self.accelerate[0].rpartition(".")[2] if self.accelerate else None

    @property
    def is_shared(self) -> bool:
        """Return True if more than one of Trainer, DeepSpeed and Accelerate has it."""
        return sum(map(bool, (self.trainer, self.deepspeed_keys, self.accelerate))) > 1

    @property
    def is_plain(self) -> bool:
        """Return True if one argument and one key at the top of a DeepSpeed file hold the same value."""
        return len(self.trainer) == 1 and len(self.deepspeed) == 1 and "." not in self.deepspeed[0]

    @property
    def result_key(self) -> str:
        """Return the name of its argument among the settings that define a result; empty if it is not one."""
        return (self.recorded or self.key) if self.is_result and len(self.trainer) == 1 else ""

    @property
    def filled(self) -> dict[str, str]:
        """Return the training argument that transformers puts in place of "auto", by key of a DeepSpeed file."""
        keys = [key for key in self.deepspeed or self.unplanned if not key.endswith(".type")]
        arguments = self.trainer * len(keys) if len(self.trainer) == 1 else self.trainer
        return dict(zip(keys, arguments, strict=True)) if len(keys) == len(arguments) else {}

    def values(self, choice: Any, run: Run) -> dict[str, Any]:
        """Return the planned value of each key of DeepSpeed's and Accelerate's file under ``choice``."""
        keys = self.deepspeed or self.accelerate
        if self.planned is None:
            return dict.fromkeys(keys, getattr(run, self.key)) if self.key and keys else {}
        value = self.planned(choice, run)
        values = value if isinstance(value, Mapping) else dict.fromkeys(keys, value)
        return {key: value for key, value in values.items() if value is not None}


def _precision(choice: Any, run: Run) -> dict[str, Any]:
    """Return the precision as each file states it; beside a DeepSpeed file Accelerate refuses its key."""
    launched = "no" if choice.precision == "fp32" else choice.precision
    halves = {f"{name}.enabled": choice.precision == name for name in ("bf16", "fp16")}
    return {**halves, "mixed_precision": None if choice.is_deepspeed else launched}


def _fsdp(
    argument: str,
    option: str = "",
    planned: Planned = lambda choice, run: None,
    effect: str = ARGUMENTS_WIN,
    advice: str = "Trainer's fsdp_config wins. Write it there alone.",
) -> Setting:
    """Return the row of an argument of FSDP, which Trainer and Accelerate have in a section each."""
    return Setting(
        f"FSDP {argument.replace('_', ' ')}", trainer=(f"fsdp_config.{argument}",),
        accelerate=(f"fsdp_config.fsdp_{option or argument}",), launch_effect=effect, advice=advice,
        planned=lambda choice, run: planned(choice, run) if choice.is_fsdp else None,
    )  # fmt: skip


SETTINGS: Final[dict[str, Setting]] = {row.name: row for row in (
    Setting(
        "batch per rank", "micro_batch_size", ("per_device_train_batch_size",), (MICRO_BATCH,),
        planned=lambda choice, run: choice.micro_batch_size, is_result=False,
    ),
    Setting(
        "accumulation steps", "", (ACCUMULATION,), (ACCUMULATION,), accelerate=(f"deepspeed_config.{ACCUMULATION}",),
        planned=lambda choice, run: choice.gradient_accumulation_steps,
        advice="The engine counts this number: its total batch size and throughput are wrong. Trainer's own loop still "
        f"accumulates its number, with this version of Accelerate. {ADD_AUTO}",
    ),
    Setting(
        "total batch", "global_batch_size", ("per_device_train_batch_size", ACCUMULATION), (TOTAL_BATCH,),
        planned=lambda choice, run: choice.global_batch_size,
        effect="DeepSpeed would have stopped on the product of the others.",
        trainer_name="batch per rank x accumulation steps x ranks",
    ),
    Setting(
        "gradient clipping", "max_grad_norm", ("max_grad_norm",), ("gradient_clipping",),
        accelerate=("deepspeed_config.gradient_clipping",), auto=1.0, label="Gradient clipping", shown="norm {:g}",
    ),
    Setting(
        "learning rate", "learning_rate", ("learning_rate",),
        unplanned=("optimizer.params.lr", "scheduler.params.warmup_max_lr"),
    ),
    Setting(
        "betas", "", ("adam_beta1", "adam_beta2"), unplanned=("optimizer.params.betas",),
        trainer_name="adam_beta1 and adam_beta2",
        advice=f"{ADD_AUTO} OneCycle changes the betas unless cycle_momentum is false.",
    ),
    Setting("epsilon", "", ("adam_epsilon",), unplanned=("optimizer.params.eps",)),
    Setting("weight decay", "weight_decay", ("weight_decay",), unplanned=("optimizer.params.weight_decay",)),
    Setting(
        "optimizer", "optimizer", ("optim",), unplanned=("optimizer.type",),
        advice="Remove the optimizer from the DeepSpeed file, or optim from the arguments; with offload, "
        "zero_force_ds_cpu_optimizer: false keeps Trainer's.",
    ),
    Setting(
        "schedule", "scheduler", ("lr_scheduler_type",), unplanned=("scheduler.type",),
        advice="Remove the scheduler from the DeepSpeed file, or lr_scheduler_type from the arguments.",
    ),
    Setting("schedule arguments", "scheduler_arguments", ("lr_scheduler_kwargs",)),
    Setting(
        "warm-up steps", "warmup_ratio", ("warmup_steps",), unplanned=("scheduler.params.warmup_num_steps",),
        recorded="warmup_steps",
        advice=f"{ADD_AUTO} Trainer's schedule constant has no warm-up; constant_with_warmup has one.",
    ),
    Setting("total steps", "max_steps", ("max_steps",), unplanned=("scheduler.params.total_num_steps",)),
    Setting(
        "precision", "precision", ("bf16", "fp16"), ("bf16.enabled", "fp16.enabled"), ("torch_autocast.enabled",),
        ("mixed_precision",), planned=_precision, trainer_name="the precision",
        launch_effect="The training arguments would have won where they ask for bf16 or fp16, else your file.",
        advice="Set the same precision everywhere, or remove all but one.",
    ),
    Setting(
        "ZeRO stage", deepspeed=("zero_optimization.stage",), accelerate=("deepspeed_config.zero_stage",),
        planned=lambda choice, run: choice.zero_stage, effect=FILE_WINS,
    ),
    Setting(
        "optimizer offload", deepspeed=("zero_optimization.offload_optimizer.device",), effect=FILE_WINS,
        accelerate=("deepspeed_config.offload_optimizer_device",),
        planned=lambda choice, run: choice.spec.offload_optimizer or "none",
        advice="ZeRO stages 1 to 3 offload the optimizer to the CPU, and stage 3 alone to NVMe.",
    ),
    Setting(
        "parameter offload", deepspeed=("zero_optimization.offload_param.device",), effect=FILE_WINS,
        accelerate=("deepspeed_config.offload_param_device",),
        planned=lambda choice, run: choice.spec.offload_param or "none",
        advice="Only ZeRO stage 3 offloads parameters.",
    ),
    Setting(
        "NVMe path of the optimizer", deepspeed=("zero_optimization.offload_optimizer.nvme_path",), effect=FILE_WINS,
        accelerate=("deepspeed_config.offload_optimizer_nvme_path",),
    ),
    Setting(
        "NVMe path of the parameters", deepspeed=("zero_optimization.offload_param.nvme_path",), effect=FILE_WINS,
        accelerate=("deepspeed_config.offload_param_nvme_path",),
    ),
    Setting(
        "16-bit weights on save", unplanned=("zero_optimization.stage3_gather_16bit_weights_on_model_save",),
        accelerate=("deepspeed_config.zero3_save_16bit_model",), auto=False,
    ),
    Setting(
        "compilation", "torch_compile", ("torch_compile", "torch_compile_backend"),
        accelerate=("dynamo_backend", "dynamo_config.dynamo_backend"), is_result=False,
        planned=lambda choice, run: "INDUCTOR" if run.torch_compile else "NO",
        launch_effect="The run decides it (torch_compile), or a script for itself.",
        advice="Set torch_compile in the training arguments alone.",
    ),
    _fsdp(
        "version", planned=lambda choice, run: 2, effect="Runs use FSDP2 alone.", advice="Trainer's fsdp_config wins.",
    ),
    _fsdp("reshard_after_forward"),
    _fsdp("state_dict_type"),
    _fsdp("cpu_offload", "offload_params", planned=lambda choice, run: choice.spec.offload_param is not None),
    _fsdp("activation_checkpointing", planned=lambda choice, run: choice.gradient_checkpointing),
    _fsdp("transformer_layer_cls_to_wrap", effect=WRAPPED),
    _fsdp("backward_prefetch", effect=FSDP1_ONLY),
    _fsdp("use_orig_params", effect=FSDP1_ONLY),
    # --- of one library ---
    Setting("epochs", "epochs", ("num_train_epochs",)),
    Setting("seed", "", ("seed",), recorded="seed"),
    Setting("seed of the data", "", ("data_seed",), recorded="data_seed"),
    Setting("order of the data", "", ("train_sampling_strategy",), recorded="data.order"),
    Setting("TF32", "tf32"),
    Setting(
        "gradient type", "gradient_dtype", deepspeed=("data_types.grad_accum_dtype",), is_result=False,
        planned=lambda choice, run: choice.gradients, effect="gradient_dtype in the run decides it.",
    ),
    Setting(
        "tensor parallelism", "tensor_parallel", deepspeed=("tensor_parallel.autotp_size",), is_result=False,
        planned=lambda choice, run: choice.tensor_parallel, effect=FILE_WINS,
    ),
    Setting(
        "second shard of the weights", deepspeed=("zero_optimization.zero_hpz_partition_size",),
        planned=lambda choice, run: choice.processes_per_node if choice.spec.hpz else 1,
    ),
    Setting(
        "library", accelerate=("distributed_type",), launch_effect=FILE_WINS,
        planned=lambda choice, run: choice.spec.distributed_type,
    ),
    Setting(
        "nodes", "nodes", accelerate=("num_machines",), is_result=False, launch_effect=FILE_WINS,
        planned=lambda choice, run: choice.nodes,
    ),
    Setting(
        "ranks", accelerate=("num_processes",), launch_effect=FILE_WINS, planned=lambda choice, run: choice.world_size,
    ),
    Setting(
        "CPU", accelerate=("use_cpu",), planned=lambda choice, run: False,
        launch_effect="The launcher ignores it for the planned engine; the training arguments have it.",
    ),
    Setting(
        "sharded loading", accelerate=("deepspeed_config.zero3_init_flag",), launch_effect=FILE_WINS,
        planned=lambda choice, run: choice.zero_stage == 3 if choice.is_deepspeed else None,
    ),
)}  # fmt: skip
"""Every row by its name. Those that several libraries have stand first, in the order of a comparison."""


def run_keys(*, is_result: bool) -> tuple[str, ...]:
    """Return the keys of a run whose values are another training, or of those that are not."""
    return tuple(row.key for row in SETTINGS.values() if row.key and row.is_result is is_result)
