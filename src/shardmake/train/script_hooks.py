"""Call the guard of a user's script from inside the libraries that the script uses.

Each library is changed when the script imports it. The script itself needs no change.
"""

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardmake.config.settings import MICRO_BATCH
from shardmake.config.strategies import DEEPSPEED
from shardmake.core.private_names import private
from shardmake.train.adapter_config import write_adapter_configs
from shardmake.train.first_batch import count_rows
from shardmake.train.fsdp_precision import count_whole_tokens, set_script_policy
from shardmake.train.library_patches import (
    broadcast_saved_buffers,
    kept_matmul_precision,
    name_checkpointed_adapters,
    share_rows,
    wrap,
)
from shardmake.train.rank_context import RankContext
from shardmake.train.script_guard import Batch, ScriptGuard

# Run a function when a module is imported for the first time, without importing the module here.
#
# A user's script may set variables that libraries read at their import, so Shardmake must not import them first.

Install = Callable[[Any], None]


class ImportHooks(MetaPathFinder):
    """The functions that wait for the import of a module."""

    def __init__(self) -> None:
        self.waiting: dict[str, Install] = {}
        sys.meta_path.insert(0, self)

    def after(self, name: str, install: Install) -> None:
        """Call ``install`` with the module ``name`` once it has been imported; now if it already has."""
        if name in sys.modules:
            install(sys.modules[name])
        else:
            self.waiting[name] = install

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return the module's spec with a loader that calls its function; part of the import system."""
        install = self.waiting.pop(fullname, None)
        if install is None:
            return None
        spec = find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_install(module: ModuleType) -> None:
            execute(module)
            install(module)

        spec.loader.exec_module = execute_and_install  # type: ignore[method-assign]
        return spec

    def remove(self) -> None:
        """Stop waiting."""
        sys.meta_path.remove(self)


def install_hooks(context: RankContext) -> ImportHooks:
    """Let the libraries call the guard and the callbacks of this rank once the script imports them."""
    hooks = ImportHooks()
    observer = ScriptObserver(context)
    hooks.after("torch", observer.hook_torch)
    hooks.after("torch.distributed.fsdp", observer.hook_fsdp)
    hooks.after("accelerate.accelerator", observer.hook_accelerator)
    hooks.after(
        "accelerate.utils.dataclasses",
        lambda module: set_script_policy(module.FullyShardedDataParallelPlugin, context.settings.expected),
    )
    hooks.after("accelerate.utils.fsdp_utils", broadcast_saved_buffers)
    hooks.after("deepspeed", observer.hook_deepspeed)
    hooks.after("transformers.trainer", observer.hook_trainer)
    hooks.after("peft.tuners.tuners_utils", name_checkpointed_adapters)
    if context.attempt.accelerator == "cpu" and context.settings.expected.engine == DEEPSPEED:
        hooks.after("accelerate.state", default_to_gloo)
    return hooks


def default_to_gloo(module: Any) -> None:
    """Let Accelerate start DeepSpeed's process group on a CPU.

    Without a GPU and without a named backend, Accelerate starts none (accelerate 1.15, `PartialState`), and every rank
    would train alone. Transformers resets Accelerate's state and so repeats the decision.
    """

    def start_with_gloo(start: Any, state: Any, cpu: bool = False, **kwargs: Any) -> None:
        start(state, cpu, **kwargs | {"backend": kwargs.get("backend") or "gloo"})

    wrap(module.PartialState, "__init__", start_with_gloo)


class ScriptObserver:
    """Finds the model that a script trains, through hooks in the libraries."""

    def __init__(self, context: RankContext) -> None:
        self.context = context
        on_cpu = context.attempt.accelerator == "cpu"
        self.guard = ScriptGuard(context.folder, context.rank, context.settings.expected, context.plan.choice, on_cpu)
        self.inside_accelerate = 0
        self.watched: dict[int, tuple[Any, Any, str]] = {}
        """Hook, model and precision of every prepared model, by the model's id."""
        self.model: Any = None
        """The model of the first training pass."""
        self.backward_passes = 0

    def hook_accelerator(self, module: Any) -> None:
        """Check every new Accelerator, and every model that it prepares for training."""

        def check_accelerator(start: Any, made: Any, /, *args: Any, **kwargs: Any) -> None:
            with kept_matmul_precision():
                start(made, *args, **kwargs)
            has_plugin = kwargs.get("deepspeed_plugin") is not None
            self.guard.check_accelerator(
                made.distributed_type.value, made.num_processes, has_deepspeed_plugin=has_plugin
            )
            if self.context.settings.expected.engine == DEEPSPEED:  # the ranks of a group of AutoTP read the same rows
                share_rows(made, self.context.plan.choice.tensor_parallel)
            made.register_save_state_pre_hook(describe_first)

        def save_described(save: Any, owner: Any, /, model: Any, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
            self.describe_adapters(model, save_directory)
            return save(owner, model, save_directory, *args, **kwargs)

        def describe_first(models: Sequence[Any], weights: Any, folder: Any) -> None:
            """Describe the model that a merge reads: of several, Accelerate saves each under a name of its own."""
            for model in models[:1]:
                self.describe_adapters(model, folder)

        def check_result(prepare: Any, owner: Any, /, *args: Any, **kwargs: Any) -> Any:
            self.inside_accelerate += 1
            try:
                result = prepare(owner, *args, **kwargs)
            finally:
                self.inside_accelerate -= 1
            if not kwargs.get("evaluation_mode"):
                for model in result if isinstance(result, list | tuple) else [result]:  # FSDP2 returns a list
                    self.add_model(model, owner.mixed_precision)
            return result

        wrap(module.Accelerator, "__init__", check_accelerator)
        wrap(module.Accelerator, "prepare", check_result)
        wrap(module.Accelerator, "prepare_model", check_result)
        wrap(module.Accelerator, "save_model", save_described)

    def hook_deepspeed(self, module: Any) -> None:
        """Check every DeepSpeed engine, and describe the adapters beside its checkpoints."""

        def check(initialize: Any, /, *args: Any, **kwargs: Any) -> Any:
            result = initialize(*args, **kwargs)
            if self.guard.api == "torch":
                self.guard.api = "deepspeed"
            self.add_model(result[0], "no")
            return result

        def save_described(save: Any, engine: Any, /, save_dir: Any, *args: Any, **kwargs: Any) -> Any:
            self.describe_adapters(engine.module, save_dir)
            return save(engine, save_dir, *args, **kwargs)

        wrap(module, "initialize", check)
        wrap(module.DeepSpeedEngine, "save_checkpoint", save_described)
        wrap(module.DeepSpeedEngine, "save_16bit_model", save_described)

    def hook_torch(self, module: Any) -> None:
        """Watch DDP's models, count backward passes, and check before the first optimizer step."""
        original = module.Tensor.backward

        def count(backward: Any, /, *args: Any, **kwargs: Any) -> Any:
            self.backward_passes += 1
            return backward(*args, **kwargs)

        def check(*_: Any) -> None:
            handle.remove()
            module.Tensor.backward = original
            self.check_first_step()

        self.watch_models_of(module.nn.parallel.DistributedDataParallel)
        wrap(module.Tensor, "backward", count)
        handle = register_optimizer_step_pre_hook(check)

    def watch_models_of(self, wrapper: Any) -> None:
        """Watch every model that the class ``wrapper`` wraps."""

        def watch(start: Any, model: Any, /, *args: Any, **kwargs: Any) -> None:
            start(model, *args, **kwargs)
            self.add_model(model, "no", check=False)

        wrap(wrapper, "__init__", watch)

    def hook_fsdp(self, module: Any) -> None:
        """Watch the models of both versions of FSDP."""

        def watch_sharded(shard: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
            result = shard(module, *args, **kwargs)
            for one in module if isinstance(module, list) else [module]:
                self.add_model(one, "no", check=False)
            return result

        self.watch_models_of(module.FullyShardedDataParallel)
        wrap(module, "fully_shard", watch_sharded)

    def hook_trainer(self, module: Any) -> None:
        """Add callbacks to Trainer; let it count tokens in integers, refuse partial checkpoints, describe adapters."""
        from shardmake.train.load_model import check_names

        count_whole_tokens(module.Trainer)
        # transformers 5.23 only warns here, after it has loaded a checkpoint with strict=False.
        private(module.Trainer).issue_warnings_after_load = lambda trainer, names: check_names(trainer.model, names)

        def save_described(save: Any, trainer: Any, output_dir: str) -> None:
            """Under FSDP this saves the model too (transformers 5.23), and `save_model` does nothing."""
            self.describe_adapters(trainer.model, output_dir)
            save(trainer, output_dir)

        def add_callbacks(start: Any, trainer: Any, /, *args: Any, **kwargs: Any) -> None:
            from shardmake.train.script_callbacks import script_callbacks

            start(trainer, *args, **kwargs)
            for callback in script_callbacks(self.context, self.guard, trainer):
                trainer.add_callback(callback)

        wrap(module.Trainer, "__init__", add_callbacks)
        wrap(private(module.Trainer), "save_optimizer_and_scheduler", save_described)

    def describe_adapters(self, model: Any, folder: Any) -> None:
        """Write the settings of the adapters in ``model`` to the folder of a checkpoint, on the first rank."""
        if self.context.rank == 0:
            write_adapter_configs(model, folder)

    def add_model(self, model: Any, precision: str, *, check: bool = True) -> None:
        """Watch a model for its first training pass, and check its engine now if that is complete.

        A part of a model that FSDP or DDP wraps is not the whole; the outermost one runs first and is checked then.
        """
        if not isinstance(model, torch.nn.Module) or self.model is not None:
            return
        if not any(parameter.requires_grad for parameter in model.parameters()):
            return
        if check:
            self.guard.check_model(model, precision)
        elif self.inside_accelerate:
            return
        if id(model) not in self.watched:
            handle = model.register_forward_pre_hook(torch.compiler.disable(self.check_first_pass), with_kwargs=True)
            self.watched[id(model)] = (handle, model, precision)

    def check_first_pass(self, model: Any, args: Any, kwargs: Any) -> None:
        """Check engine, batch and rows at the first forward pass of training."""
        if self.model is not None or not (model.training and torch.is_grad_enabled()):
            return
        precision = self.watched[id(model)][2]
        for handle, _, _ in self.watched.values():
            handle.remove()
        self.watched.clear()
        self.model = model
        self.guard.check_model(model, active_autocast(model) if self.guard.api == "torch" else precision)
        inputs = (kwargs, args)
        self.guard.check_rows(inputs)
        if not self.guard.declared_by_trainer:
            self.guard.batch = self.declared_batch(inputs)
            self.guard.check_batch()

    def declared_batch(self, inputs: Any) -> Batch:
        """Return the batch as far as the libraries know it before the first step."""
        readers = self.context.plan.choice.data_parallel
        rows, steps = count_rows(inputs), None
        if hasattr(self.model, MICRO_BATCH):
            steps = self.model.gradient_accumulation_steps()
            rows = getattr(self.model, MICRO_BATCH)() if rows == 1 else rows  # 1: a packed batch
        if self.guard.api == "accelerate":
            state = sys.modules["accelerate.state"].GradientState()
            steps = steps or (state.num_steps if state.num_steps > 1 else None)
            total = getattr(state.active_dataloader, "total_batch_size", None)
            rows = rows if total is None else total // readers
        return Batch.of(rows, steps, readers)

    def check_first_step(self) -> None:
        """Complete the batch with the counted passes, where no library knows it, and let the guard check."""
        guard, batch = self.guard, self.guard.batch
        skips_steps = guard.found.get("dtype") == "float16"  # its loss scaler skips the first optimizer steps
        if batch.accumulation_steps is None and not guard.declared_by_trainer and not skips_steps:
            readers = self.context.plan.choice.data_parallel
            guard.batch = Batch.of(batch.micro_batch_size, self.backward_passes, readers)
        guard.check_first_step("zero_stage" in guard.found)


def active_autocast(model: Any) -> str:
    """Return Accelerate's name of the data type that torch casts to at this moment."""
    device = next(model.parameters()).device.type
    if not torch.is_autocast_enabled(device):
        return "no"
    return {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(torch.get_autocast_dtype(device), "no")
