"""A rank that trains a tiny model with Trainer or Accelerate and records which settings came up.

`launch` and `run_rank` are programs of `tests.fork_server`. Their folder holds ``case.json``
(`shardmake.render.comparison.Settings`). Each rank writes ``rank-N.json``: the value of each setting in `OBSERVED` by
its name, the rows that it trained on, and losses; or the class and the message of its error.
"""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, FullyShardedDataParallel

from shardmake.core.environment import leave_collectives_to_gloo
from shardmake.train.script_hooks import default_to_gloo
from tests import fsdp_on_cpu
from tests.fork_server import WRITE_ENVIRONMENT
from tests.settings_cases import DEEPSPEED_FILE

VOCABULARY, ROWS, LENGTH = 64, 512, 8
STEPS = 2
"""Optimizer steps of a script."""
SCRIPT_BATCH, SCRIPT_RATE = 4, 1e-3


@dataclass
class Built:
    """The objects that the libraries built for one training, and its batches; ``arguments`` is None for a script."""

    model: Any
    accelerator: Any
    optimizer: Any
    scheduler: Any
    arguments: Any = None
    steps: int = 0
    batches: list[list[int]] = field(default_factory=list)
    clips: list[float] = field(default_factory=list)

    @property
    def uses_deepspeed(self) -> bool:
        return type(self.model).__name__ == "DeepSpeedEngine"


def launch(folder: Path, rank: int) -> None:
    """Let the real `accelerate launch` start ranks, each of which writes its environment to ``environment-N``."""
    from accelerate.commands.launch import launch_command, launch_command_parser

    forget_ranks()
    settings = read_case(folder)
    (folder / "environment.py").write_text(WRITE_ENVIRONMENT)
    (folder / "accelerate.json").write_text(json.dumps(settings.accelerate))
    flags = [str(folder / flag) if flag == DEEPSPEED_FILE else flag for flag in settings.flags]
    if settings.deepspeed is not None:
        (folder / DEEPSPEED_FILE).write_text(json.dumps(settings.deepspeed))
    options = ["--config_file", str(folder / "accelerate.json"), *flags, "--num_cpu_threads_per_process", "1"]
    program = [str(folder / "environment.py"), str(folder / "environment-")]
    launch_command(launch_command_parser().parse_args([*options, "--main_process_port", "0", *program]))


def forget_ranks() -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]


def read_case(folder: Path) -> SimpleNamespace:
    return SimpleNamespace(**json.loads((folder / "case.json").read_text()))


def run_rank(folder: Path, rank: int) -> None:
    """Train and write what came up."""
    settings = read_case(folder)
    leave_collectives_to_gloo()
    if os.environ["WORLD_SIZE"] == "1":
        forget_ranks()  # as in a program that no launcher starts
    elif settings.on_cpu:
        fsdp_on_cpu.undo()
    else:
        behave_as_on_gpus(settings)
    torch.manual_seed(0)
    found: dict[str, Any] = {}
    try:
        built = train_script(settings) if settings.trainer is None else train_with_trainer(settings, folder, found)
        found |= {"observed": {name: observe(built) for name, observe in OBSERVED.items()}}
        found |= {"rows": [row for batch in built.batches for row in batch], "steps": built.steps, **details(built)}
    except BaseException as error:
        found = {"error": type(error).__name__, "message": str(error)[:2000]}
        raise
    finally:
        (folder / f"rank-{rank}.json").write_text(json.dumps(found))


def behave_as_on_gpus(settings: SimpleNamespace) -> None:
    """Let Accelerate see all ranks, as it does on GPUs (`shardmake.train.user_script` does the same)."""
    import accelerate.state

    if settings.trainer is None and os.environ.get("ACCELERATE_USE_DEEPSPEED") != "true":
        os.environ["ACCELERATE_USE_CPU"] = "true"
    default_to_gloo(accelerate.state)


# --- the programs -----------------------------------------------------------------------------------------------------


def train_with_trainer(settings: SimpleNamespace, folder: Path, found: dict[str, Any]) -> Built:
    """Train with transformers' Trainer; ``found`` gets the losses."""
    from transformers import Trainer, TrainingArguments
    from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

    given = {"output_dir": str(folder / "output"), "report_to": "none", "save_strategy": "no", "disable_tqdm": True}
    given |= {"logging_steps": 1}
    if not settings.on_cpu:
        given |= {"use_cpu": True, "ddp_backend": "gloo" if "RANK" in os.environ else None}
    deepspeed = settings.deepspeed if settings.named_by_trainer else None
    arguments = TrainingArguments(**given | settings.trainer, deepspeed=deepspeed)
    found["partitions_at_load"] = is_deepspeed_zero3_enabled()
    trainer = Trainer(model=tiny_model(), args=arguments, train_dataset=rows(), data_collator=collate)
    batches, clips = record_batches(trainer.model), record_clips(trainer.accelerator)
    trainer.train()
    lines = trainer.state.log_history
    found |= {name: [line[name] for line in lines if name in line] for name in ("loss", "grad_norm", "learning_rate")}
    objects = (trainer.model_wrapped, trainer.accelerator, trainer.optimizer, trainer.lr_scheduler)
    return Built(*objects, arguments, trainer.state.global_step, batches, clips)


def train_script(settings: SimpleNamespace) -> Built:
    """Train with a loop of Accelerate that takes everything from its launcher."""
    from accelerate import Accelerator
    from accelerate.utils import DummyOptim, DummyScheduler
    from torch.utils.data import DataLoader

    accelerator = Accelerator()
    model, file = tiny_model(), settings.deepspeed or {}
    batches, clips = record_batches(model), record_clips(accelerator)
    optimizer = (DummyOptim if "optimizer" in file else torch.optim.AdamW)(model.parameters(), lr=SCRIPT_RATE)
    objects: list[Any] = [model, optimizer, DataLoader(rows(), SCRIPT_BATCH, collate_fn=collate)]
    if "scheduler" in file:
        objects.append(DummyScheduler(optimizer, total_num_steps=2 * STEPS, warmup_num_steps=1))
    model, optimizer, loader, *scheduler = accelerator.prepare(*objects)
    built = Built(model, accelerator, optimizer, *(scheduler or [None]), None, 0, batches, clips)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
        built.steps += accelerator.sync_gradients
        if built.steps == STEPS:
            break
    return built


def tiny_model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def rows() -> list[dict[str, list[int]]]:
    """Return rows whose first two tokens are their number."""
    tokens = torch.randint(VOCABULARY, (ROWS, LENGTH)).tolist()
    numbered = [[*divmod(number, VOCABULARY), *row[2:]] for number, row in enumerate(tokens)]
    return [{"input_ids": row, "labels": row} for row in numbered]


def collate(batch: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a batch of shape (rows, length) for each column."""
    return {key: torch.tensor([row[key] for row in batch]) for key in batch[0]}


def record_batches(model: Any) -> list[list[int]]:
    """Return a list that gets the numbers of the rows of each forward pass."""
    batches: list[list[int]] = []

    def record(module: Any, args: Any, values: dict[str, Any]) -> None:
        ids = values["input_ids"]
        batches.append((ids[:, 0] * VOCABULARY + ids[:, 1]).tolist())

    model.register_forward_pre_hook(record, with_kwargs=True)
    return batches


def record_clips(accelerator: Any) -> list[float]:
    """Return a list that gets the norm of each call that clips gradients without DeepSpeed."""
    clips: list[float] = []
    clip = accelerator.clip_grad_norm_

    def record(parameters: Any, max_norm: float, **options: Any) -> Any:
        clips.append(max_norm)
        return clip(parameters, max_norm, **options)

    accelerator.clip_grad_norm_ = record
    return clips


# --- what came up -----------------------------------------------------------------------------------------------------


def basic_optimizer(built: Built) -> Any:
    """Return torch's or DeepSpeed's optimizer below all wrappers."""
    own = built.optimizer
    return built.model.basic_optimizer if built.uses_deepspeed else getattr(own, "optimizer", own)


def schedule(built: Built) -> Any:
    """Return the scheduler below Accelerate's wrapper, None without one."""
    found = (built.model.lr_scheduler if built.uses_deepspeed else None) or built.scheduler
    return getattr(found, "scheduler", found)


def schedule_name(built: Built) -> str | None:
    """Return DeepSpeed's or torch's class, or transformers' name of a schedule."""
    found = schedule(built)
    if type(found).__name__ != "LambdaLR":
        return None if found is None else type(found).__name__
    function = found.lr_lambdas[0]
    name = str(getattr(function, "func", function).__name__).removeprefix("_get_")
    name = name.removesuffix("_lr_lambda").removesuffix("_lambda").removesuffix("_schedule_with_warmup")
    return name.replace("_schedule_with", "_with")


def warmup(built: Built) -> Any:
    """Return the steps of warm-up, None for a schedule of DeepSpeed that has none."""
    found = schedule(built)
    if type(found).__name__ != "LambdaLR":
        return getattr(found, "warmup_num_steps", None)
    return getattr(found.lr_lambdas[0], "keywords", {}).get("num_warmup_steps", 0)


def peak_rate(built: Built) -> float:
    """Return the highest learning rate of the schedule, of the optimizer without one."""
    found, group = schedule(built), first_group(built)
    for name in ("max_lrs", "min_lr", "org_lrs", "base_lrs"):
        if hasattr(found, name):
            return float(max(getattr(found, name)))
    return float(group.get("initial_lr", group["lr"]))


def first_group(built: Built) -> dict[str, Any]:
    return dict(basic_optimizer(built).param_groups[0])


def engine_name(built: Built) -> str:
    """Return the engine by the class of the model that trained, below the compiler's."""
    model = getattr(built.model, "_orig_mod", built.model)
    if isinstance(model, (FSDPModule, FullyShardedDataParallel)):
        return "FSDP"
    return {"DeepSpeedEngine": "DeepSpeed", "DistributedDataParallel": "DDP"}.get(type(model).__name__, "one process")


def precision(built: Built) -> str:
    """Return the precision of the engine, of Accelerate without DeepSpeed."""
    if not built.uses_deepspeed:
        return str(built.accelerator.mixed_precision).replace("no", "fp32")
    if built.model.torch_autocast_enabled():
        return f"{str(built.model.torch_autocast_dtype()).removeprefix('torch.')} autocast"
    return "bf16" if built.model.bfloat16_enabled() else "fp16" if built.model.fp16_enabled() else "fp32"


def of_engine(name: str, otherwise: Callable[[Built], Any] = lambda built: None) -> Callable[[Built], Any]:
    """Return the observation that DeepSpeed's engine answers itself; ``otherwise`` is that of other engines."""
    return lambda built: getattr(built.model, name)() if built.uses_deepspeed else otherwise(built)


def optimizer_device(built: Built) -> str:
    """Return where ZeRO's optimizer keeps its states."""
    zero = getattr(built.model, "optimizer", None) if built.uses_deepspeed else None
    if getattr(zero, "swap_optimizer", False):
        return "nvme"
    return "cpu" if getattr(zero, "offload_optimizer", getattr(zero, "cpu_offload", False)) else "none"


def parameter_device(built: Built) -> str:
    """Return where ZeRO's parameters rest."""
    zero = getattr(built.model, "optimizer", None) if built.uses_deepspeed else None
    if not getattr(zero, "offload_param", False):
        return "none"
    return "nvme" if getattr(zero, "params_in_nvme_and_cpu", False) else "cpu"


def swap_folder(section: str) -> Callable[[Built], Any]:
    """Return the observation of the folder that DeepSpeed's engine offloads to."""

    def value(built: Built) -> Any:
        found = getattr(built.model, section)() if built.uses_deepspeed else None
        return None if found is None or found.nvme_path is None else str(found.nvme_path)

    return value


def fsdp(read: Callable[[Any, Any], Any]) -> Callable[[Built], Any]:
    """Return an observation of FSDP's wrapped model and plugin."""

    def value(built: Built) -> Any:
        if engine_name(built) != "FSDP":
            return None
        found = read(built.model, built.accelerator.state.fsdp_plugin)
        return getattr(found, "name", found)

    return value


def wrapped_layers(model: Any, plugin: Any) -> list[str]:
    """Return the class names of the wrapped layers; Accelerate wraps embeddings and norms of its own accord."""
    modules = list(model.modules())
    wrapped = {type(module).__name__.removeprefix("FSDP") for module in modules if isinstance(module, FSDPModule)}
    wrapped |= {type(module.module).__name__ for module in modules if isinstance(module, FullyShardedDataParallel)}
    return sorted(wrapped & {"LlamaDecoderLayer", "LlamaMLP"})


OBSERVED: dict[str, Callable[[Built], Any]] = {
    "engine": engine_name,
    "batch per rank": lambda built: max(map(len, built.batches)),
    "accumulation steps": of_engine("gradient_accumulation_steps", lambda built: len(built.batches) / built.steps),
    "total batch": lambda built: None,  # of all ranks: `tests.workflow.test_engine_truth` counts their rows
    "gradient clipping": of_engine("gradient_clipping", lambda built: max(built.clips, default=None)),
    "learning rate": peak_rate,
    "betas": lambda built: list(first_group(built)["betas"]) if "betas" in first_group(built) else None,
    "epsilon": lambda built: first_group(built).get("eps"),
    "weight decay": lambda built: max(group["weight_decay"] for group in basic_optimizer(built).param_groups),
    "optimizer": lambda built: type(basic_optimizer(built)).__name__,
    "schedule": schedule_name,
    "warm-up steps": warmup,
    "total steps": lambda built: getattr(schedule(built), "total_num_steps", built.steps),
    "precision": precision,
    "ZeRO stage": of_engine("zero_optimization_stage"),
    "optimizer offload": optimizer_device,
    "parameter offload": parameter_device,
    "NVMe path of the optimizer": swap_folder("zero_offload_optimizer"),
    "NVMe path of the parameters": swap_folder("zero_offload_param"),
    "16-bit weights on save": of_engine("zero_gather_16bit_weights_on_model_save"),
    "compilation": lambda built: str(built.accelerator.state.dynamo_plugin.backend.value).lower(),
    "FSDP version": fsdp(lambda model, plugin: plugin.fsdp_version),
    "FSDP reshard after forward": fsdp(lambda model, plugin: plugin.reshard_after_forward),
    "FSDP state dict type": fsdp(lambda model, plugin: plugin.state_dict_type),
    "FSDP cpu offload": fsdp(lambda model, plugin: isinstance(plugin.cpu_offload, CPUOffloadPolicy)),
    "FSDP activation checkpointing": fsdp(
        lambda model, plugin: any(isinstance(one, CheckpointWrapper) for one in model.modules())
    ),
    "FSDP transformer layer cls to wrap": fsdp(wrapped_layers),
    "FSDP backward prefetch": fsdp(lambda model, plugin: getattr(model, "backward_prefetch", None)),  # FSDP1's alone
    "FSDP use orig params": fsdp(lambda model, plugin: getattr(model, "_use_orig_params", None)),
}
"""How to read each setting of the comparison from what the libraries built, by its name in the table."""


def details(built: Built) -> dict[str, Any]:
    """Return what planted faults are recognised by, beyond the settings of the table."""
    found: dict[str, Any] = {"class": type(built.model).__name__}
    if not built.uses_deepspeed:
        return found
    return found | {
        "batch": built.model.train_batch_size(), "initial_rate": first_group(built).get("initial_lr"),
        "zero_optimizer": type(built.model.optimizer).__name__,
        "zero_init": any(hasattr(one, "ds_id") for one in built.model.module.parameters()),
    }  # fmt: skip
