"""``training.json``: model, method and training arguments, and the engine that the ranks must find."""

import math
from pathlib import Path
from typing import Any, Final

from shardmake.checkpoint.interval import job_mtbf_seconds
from shardmake.config.chat_template import read_template
from shardmake.config.choices import TORCH_DTYPES
from shardmake.config.models import Cluster, Run
from shardmake.config.script_file import script_file
from shardmake.config.settings import ACCUMULATION, SETTINGS
from shardmake.core.atomic import sha256
from shardmake.memory.model import Model
from shardmake.memory.optimizer_trial import optimizer_spec
from shardmake.render.accelerate_file import fsdp_settings
from shardmake.run.attempt import collective_timeout
from shardmake.run.engine import Engine
from shardmake.run.length import warmup_steps
from shardmake.run.plan import Choice, Plan
from shardmake.run.training_settings import (
    AdapterMethod,
    BaseModelSettings,
    CheckpointSettings,
    FullMethod,
    OptimizerSettings,
    Retention,
    ScriptProgram,
    TrainerProgram,
    TrainingSettings,
)

ATTENTION: Final = {"varlen": "varlen", "flash": "flash_attention_2", "sdpa": "sdpa", "eager": "eager"}
ADAM_BETAS: Final = (0.9, 0.999)
ADAM_EPSILON: Final = 1e-8


def training_settings(plan: Plan, run: Run, cluster: Cluster, model: Model) -> TrainingSettings:
    """Return what the ranks need: model, method, training arguments, and the engine that they must find."""
    choice, own, lora = plan.choice, run.checkpoints, run.lora
    program: TrainerProgram | ScriptProgram = TrainerProgram()
    if run.script:
        digest = sha256(script_file(run.script))
        program = ScriptProgram(path=run.script, args=run.script_args, sha256=digest, service=run.service)
    return TrainingSettings(
        model=BaseModelSettings(
            path=run.model, revision=run.revision, trust_remote_code=run.trust_remote_code,
            model_class=plan.workload.model_class, dtype=load_dtype(choice, run),
            attention=ATTENTION[plan.workload.attention], gradient_checkpointing=choice.gradient_checkpointing,
            on_gpu=not cluster.is_cpu and run.script is None and choice.loads_on_gpu(run.method),
            chat_template=read_template(Path(run.data.chat_template)) if run.data.chat_template else None,
        ),
        objective=run.objective,
        **({run.objective: run.objective_settings} if run.objective_settings else {}),
        method=AdapterMethod(kind=run.method, **lora.model_dump()) if run.method_spec.has_adapters else FullMethod(),
        freeze=run.freeze, learning_rates=run.learning_rates, loss=run.loss,
        arguments=training_arguments(plan, run, cluster, model),
        optimizer=replaced_optimizer(choice, run, cluster),
        expected=expected_engine(choice),
        checkpoints=CheckpointSettings(
            retention=Retention(keep=own.keep, best=own.keep_best, every_steps=own.keep_every_steps),
            mtbf_seconds=job_mtbf_seconds(cluster.node_mtbf_hours, choice.nodes) if own.every_steps == "auto" else None,
            asynchronous=own.asynchronous, early_stopping=own.early_stopping,
        ),
        profile=run.profile, memory_snapshot=run.memory_snapshot, program=program,
    )  # fmt: skip


def load_dtype(choice: Choice, run: Run) -> str:
    """Return the data type in which the weights are loaded, under torch's name.

    DDP and FSDP train fp32 master weights under autocast or a mixed-precision policy, so full fine-tuning loads fp32
    there. DeepSpeed keeps the master weights itself, and a frozen base needs none.
    """
    if not (run.method_spec.has_adapters or choice.is_deepspeed):
        return "float32"
    return TORCH_DTYPES[choice.precision]


def expected_engine(choice: Choice) -> Engine:
    """Return what each rank compares with the engine that was built, before it trains."""
    spec = choice.spec
    fsdp = {
        "fsdp_version": 2,
        "reshard_after_forward": spec.reshard_after_forward,
        "replicas": choice.nodes if spec.hybrid else 1,
        "expert_parallel": choice.expert_parallel if choice.expert_parallel > 1 else None,
    }
    return Engine(
        engine=spec.library, zero_stage=spec.zero_stage, world_size=choice.world_size,
        dtype=TORCH_DTYPES[choice.precision], offload_optimizer=spec.offload_optimizer,
        offload_param=spec.offload_param, gradient_dtype=None if spec.is_ddp else TORCH_DTYPES[choice.gradients],
        tensor_parallel=choice.tensor_parallel if spec.is_deepspeed else None, **(fsdp if spec.is_fsdp else {}),
    )  # fmt: skip


def replaced_optimizer(choice: Choice, run: Run, cluster: Cluster) -> OptimizerSettings | None:
    """Return Shardmake's own class, DeepSpeed's if a GPU's states are on the host, or None for that of ``optim``.

    The trainer builds it over Trainer's own parameter groups; from deepspeed.json it would decay norms and biases too.
    Ranks without a GPU gain nothing from it, and its compilation takes a minute and a half.
    """
    offloads = choice.is_deepspeed and choice.spec.offload_optimizer is not None and not cluster.is_cpu
    spec = optimizer_spec(run.optimizer)
    name = spec.own_class or (spec.host_class if offloads else "")
    if not name:
        return None
    arguments = {"lr": run.learning_rate, "betas": list(ADAM_BETAS), "eps": ADAM_EPSILON}
    own = {"fused": not cluster.is_cpu} if spec.own_class else {"adamw_mode": True}
    return OptimizerSettings(class_name=name, arguments=arguments | own)


def training_arguments(plan: Plan, run: Run, cluster: Cluster, model: Model) -> dict[str, Any]:
    """Return the keyword arguments of `transformers.TrainingArguments`, without paths; the trainer adds those.

    ``save_total_limit`` is not among them, because the checkpoint store keeps and removes checkpoints.
    """
    choice, spec, on_cpu = plan.choice, optimizer_spec(run.optimizer), cluster.is_cpu
    length = {"num_train_epochs": run.epochs, "max_steps": run.max_steps, "learning_rate": run.learning_rate}
    plain = [row for row in SETTINGS.values() if row.is_plain]
    return {
        "use_cpu": on_cpu,
        "ddp_backend": "gloo" if on_cpu else "nccl",
        "ddp_timeout": collective_timeout(cluster.hang_seconds),
        **({"ddp_find_unused_parameters": False} if choice.spec.is_ddp else {}),
        "per_device_train_batch_size": choice.micro_batch_size,
        "per_device_eval_batch_size": choice.micro_batch_size,
        ACCUMULATION: choice.gradient_accumulation_steps,
        "average_tokens_across_devices": True,
        **{key: value for key, value in length.items() if value is not None},  # a script may take none of them
        "lr_scheduler_type": run.scheduler,
        **({"lr_scheduler_kwargs": run.scheduler_arguments} if run.scheduler_arguments else {}),
        "warmup_steps": _warmup_steps(run),
        "optim": spec.optim if on_cpu else spec.fused or spec.optim,
        "adam_beta1": ADAM_BETAS[0],
        "adam_beta2": ADAM_BETAS[1],
        "adam_epsilon": ADAM_EPSILON,
        "weight_decay": run.weight_decay,
        **{row.trainer[0]: row.values(choice, run)[row.deepspeed[0]] for row in plain},
        "use_liger_kernel": run.loss == "fused",
        "bf16": choice.precision == "bf16",
        "fp16": choice.precision == "fp16",
        # Stated, because transformers would turn it on for a compiled model.
        **({"tf32": run.tf32} if choice.precision == "fp32" and not on_cpu else {}),
        **_memory_arguments(choice, run, model),
        **_interval_arguments(run),
        "seed": run.seed,
        "data_seed": run.seed,
        # The data stage has put the examples in order.
        **({"train_sampling_strategy": "sequential"} if run.keeps_order else {}),
        "torch_compile": run.torch_compile,
        "remove_unused_columns": False,
        "dataloader_num_workers": 0,
        "prediction_loss_only": True,
        "report_to": list(run.report_to) or "none",
        "disable_tqdm": True,
    }


def _warmup_steps(run: Run) -> int | float:
    """Return the steps if their number is known, else the ratio, which transformers accepts only below 1.

    The schedule "constant" has no warm-up; transformers ignores the argument.
    """
    if run.max_steps is None and run.scheduler != "constant":
        return min(run.warmup_ratio, math.nextafter(1.0, 0.0))
    return warmup_steps(run, run.max_steps or 0)


def _memory_arguments(choice: Choice, run: Run, model: Model) -> dict[str, Any]:
    """Return the arguments of activation checkpointing and of FSDP.

    FSDP checkpoints activations itself, block by block; the other libraries leave it to the model. FSDP reduces
    gradients after each micro batch. Otherwise Trainer would keep full gradients on every rank during accumulation.
    """
    if choice.is_fsdp:
        config = fsdp_settings(choice, run, model)  # transformers' names differ from accelerate's in two places
        config["cpu_offload"] = config.pop("offload_params")
        config["transformer_layer_cls_to_wrap"] = list(model.block_classes)
        config.pop("activation_checkpointing_offload", None)  # Trainer leaves it to accelerate's environment
        return {
            "fsdp": True,
            "fsdp_config": config,
            "activation_checkpointing": False,
            "accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}},
        }
    values = {"use_reentrant": False} | ({"offload": True} if run.activation_offload else {})
    further = {"activation_checkpointing_kwargs": values} if choice.gradient_checkpointing else {}
    return {"activation_checkpointing": choice.gradient_checkpointing, **further}


def _interval_arguments(run: Run) -> dict[str, Any]:
    """Return the steps between logs, saves and evaluations; a fraction below 1 is a part of all steps."""
    known = run.max_steps
    tenth = 0.1 if known is None else math.ceil(known / 10)
    every, wanted = run.checkpoints.every_steps, run.eval_every_steps
    by_itself = tenth if run.sequence_parallel == 1 and wanted == "auto" else None
    evaluate = wanted if isinstance(wanted, int) else by_itself
    return {
        "logging_strategy": "steps",
        "logging_steps": 10 if known is None else max(1, min(10, known // 50)),
        "logging_first_step": True,
        "logging_nan_inf_filter": False,
        "save_strategy": "steps",
        "save_steps": every if isinstance(every, int) else tenth,
        **({"eval_strategy": "no"} if evaluate is None else {"eval_strategy": "steps", "eval_steps": evaluate}),
    }
