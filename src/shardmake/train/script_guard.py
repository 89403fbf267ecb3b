"""Compare what a user's script trains with to the plan, and end the run before the first step if they differ.

The script may use Trainer, Accelerate, DeepSpeed or torch alone. `shardmake.train.script_hooks` calls this guard from
inside those libraries: when an Accelerator or a model is prepared, at the first forward pass of training, and before
the first optimizer step.
"""

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist

from shardmake.config.strategies import DDP, DEEPSPEED, FSDP
from shardmake.core.errors import EngineMismatchError
from shardmake.core.private_names import private
from shardmake.run.adapter_settings import AdapterSettings
from shardmake.run.attempt import AttemptDir, rank_report
from shardmake.run.engine import Engine, ScriptApi
from shardmake.run.plan import Choice
from shardmake.train import first_batch
from shardmake.train.adapter_config import adapter_configs
from shardmake.train.engine_check import (
    below_compiler,
    describe_engine,
    dtype_name,
    environment_report,
    is_deepspeed_engine,
)

logger = logging.getLogger(__name__)
_ENGINES: Final = {"DEEPSPEED": DEEPSPEED, "FSDP": FSDP, "MULTI_GPU": DDP, "MULTI_CPU": DDP, "NO": DDP}
"""The engine of each of Accelerate's distributed types; a single rank is NO."""
_ADVICE: Final = {
    "engine": "The launcher sets the engine. Create the Accelerator without deepspeed_plugin, fsdp_plugin and cpu, and "
    "Trainer without --deepspeed and --fsdp; a script without Accelerate builds the planned engine itself. Or set "
    "strategy in the run.",
    "world_size": "The ranks do not train together. Start the process group in every rank: with Accelerator(), "
    "TrainingArguments, deepspeed.init_distributed() or torch.distributed.init_process_group().",
    "zero_stage": "The script brings a DeepSpeed file or plugin of its own. Remove it (--deepspeed, deepspeed_plugin, "
    "config=); give the file as deepspeed_config in the run, or set strategy. A script that calls "
    "deepspeed.initialize takes the file in SHARDMAKE_DEEPSPEED_CONFIG.",
    "dtype": "The precision is the plan's. Remove mixed_precision, bf16, fp16 or autocast from the script and load the "
    "model in the planned data type (dtype=...), or set precision in the run.",
    "gradient_dtype": "The data type of gradients is the plan's. Remove FSDP's mixed precision policy (or its "
    "reduce_dtype) and data_types from the script, or set gradient_dtype in the run.",
    "global_batch_size": "Pass $SHARDMAKE_MICRO_BATCH_SIZE and $SHARDMAKE_GRADIENT_ACCUMULATION_STEPS to the script in "
    "script_args, or set global_batch_size and micro_batch_size in the run to the script's values.",
}
_OTHER_ADVICE: Final = "Remove the script's own setting, or set strategy in the run."
_CPU_FSDP: Final = (
    "Accelerate does not use FSDP on CPUs. Set strategy to ddp or to a ZeRO strategy, or run on a cluster with GPUs."
)


@dataclass(frozen=True)
class Batch:
    """The sizes of a script's batches; None is unknown."""

    micro_batch_size: int | None = None
    accumulation_steps: int | None = None
    global_batch_size: int | None = None

    @classmethod
    def of(cls, micro_batch_size: int | None, accumulation_steps: int | None, data_parallel: int) -> "Batch":
        """Return the sizes with the global one computed."""
        if micro_batch_size is None or accumulation_steps is None:
            return cls(micro_batch_size, accumulation_steps)
        return cls(micro_batch_size, accumulation_steps, micro_batch_size * accumulation_steps * data_parallel)


def mismatch_message(differing: Mapping[str, tuple[Any, Any]], advice: Mapping[str, str] = _ADVICE) -> str:
    """Return a line per planned and found value, and how to change them; empty if none differ."""
    keys = [*differing]
    if "engine" in keys:  # every other difference of the model follows from it
        keys = [key for key in keys if key in ("engine", "world_size")]
    if not keys:
        return ""
    lines = [f"  {key}: planned {differing[key][0]}, found {differing[key][1]}" for key in keys]
    words = dict.fromkeys(advice.get(key, _OTHER_ADVICE) for key in keys)
    return "\n".join(["The script does not train as planned. Nothing was trained.", *lines, *words])


def trained_dtype(model: Any, described: str) -> str:
    """Return the data type of the forward pass: the engine's mixed precision or autocast, or that of most weights.

    ``described`` is the engine's mixed precision; float32 means that it casts nothing.
    """
    if is_deepspeed_engine(model) and model.torch_autocast_enabled():
        return dtype_name(model.torch_autocast_dtype())
    if described != "float32":
        return described
    if hasattr(private(model), "get_fsdp_state"):
        policy = private(private(model).get_fsdp_state()).mp_policy
        if policy.param_dtype is not None:
            return dtype_name(policy.param_dtype)
    sizes: Counter[torch.dtype] = Counter()
    for parameter in model.parameters():
        if parameter.is_floating_point():
            sizes[parameter.dtype] += getattr(parameter, "ds_numel", parameter.numel())
    return dtype_name(max(sizes, key=lambda dtype: sizes[dtype], default=torch.float32))


def check_adapters(model: torch.nn.Module) -> None:
    """Raise an `EngineMismatchError` if the consolidate stage could not merge the adapters of a PEFT model."""
    found = {
        setting
        for config in adapter_configs(model).values()
        for setting in AdapterSettings.parse(config.to_dict()).refused(holds_base=False)
    }
    if found:
        names = ", ".join(sorted(found))
        raise EngineMismatchError(
            f"The script's adapters cannot be merged: {names}. Nothing was trained. Use LoRA or DoRA without these "
            "settings."
        )


class ScriptGuard:
    """One rank's comparison of its script with the plan; it raises `EngineMismatchError`."""

    def __init__(self, folder: AttemptDir, rank: int, expected: Engine, choice: Choice, on_cpu: bool) -> None:
        self.folder, self.rank, self.choice, self.on_cpu = folder, rank, choice, on_cpu
        self.expected = expected
        self.api: ScriptApi = "torch"
        self.found: dict[str, Any] = {}
        self.batch = Batch()
        self.learned: dict[str, Any] = {}
        self.declared_by_trainer = False
        self.rows_compared = False

    def check_accelerator(self, distributed_type: str, world_size: int, *, has_deepspeed_plugin: bool = False) -> None:
        """Check the engine and the ranks of a new Accelerator.

        On a CPU, Accelerate ignores a DeepSpeed plugin for which transformers may already have partitioned the model.
        """
        self.api = "accelerate" if self.api == "torch" else self.api
        engine = DEEPSPEED if has_deepspeed_plugin else _ENGINES.get(distributed_type, distributed_type)
        found = {"engine": engine, "world_size": world_size}
        self._report(found)
        no_fsdp = self.on_cpu and self.expected.engine == FSDP and found["engine"] == DDP
        self._check(found, {"engine": _CPU_FSDP} if no_fsdp else {})

    def check_model(self, model: Any, precision: str) -> None:
        """Check the engine of a model that was prepared for training.

        ``precision`` is Accelerate's name of the compute data type, used if the engine has none of its own.
        """
        model = below_compiler(model)
        check_adapters(model)
        engine = describe_engine(model, precision)
        found = engine.as_json() | {
            "world_size": dist.get_world_size() if dist.is_initialized() else 1,
            "dtype": trained_dtype(model, engine.dtype),
        }
        self._report(found)
        self._check(found)

    def set_trainer(self, world_size: int, batch: Batch, learning_rate: float, steps: int) -> None:
        """Check the batch that Trainer is about to train with, and record its learning rate and steps."""
        self.learned = {"learning_rate": learning_rate, "steps": steps}
        self.api, self.declared_by_trainer, self.batch = "trainer", True, batch
        self._check({"world_size": world_size})
        self.check_batch()

    def check_rows(self, inputs: Any) -> None:
        """Check that the ranks got different rows for their first forward pass, and tensor-parallel ranks the same."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return
        digests = first_batch.exchange(first_batch.digest_rows(inputs))
        if digests is None or not all(digests):
            logger.warning("The ranks' first rows were not compared: a rank has none, or did not train in time.")
            return
        self.rows_compared = True
        ranks = first_batch.conflict(digests, self.choice.tensor_parallel)
        if ranks is None:
            return
        one, other = ranks
        if one // self.choice.tensor_parallel != other // self.choice.tensor_parallel:
            what = "the same rows" if digests[one] == digests[other] else "some of the same rows"
            raise EngineMismatchError(
                f"Ranks {one} and {other} got {what} in their first batch. Nothing was trained. Every rank "
                "needs rows of its own: pass the data loader to accelerator.prepare, or give it a "
                "torch.utils.data.DistributedSampler."
            )
        raise EngineMismatchError(
            f"Ranks {one} and {other} of a tensor-parallel group got different rows in their first batch. Nothing was "
            "trained. The ranks of a group share each layer's matrices and need the same rows: prepare the data loader "
            "after the mesh of tensor-parallel ranks."
        )

    def check_batch(self) -> None:
        """Check the global batch, if it is known; report another split of the same one."""
        batch, choice = self.batch, self.choice
        if batch.global_batch_size is None:
            return
        planned = f"{choice.micro_batch_size} x {choice.gradient_accumulation_steps} accumulation steps"
        found = f"{batch.micro_batch_size} x {batch.accumulation_steps} accumulation steps"
        if batch.global_batch_size != choice.global_batch_size:
            key = "global_batch_size"
            sizes = {
                key: (
                    f"{choice.global_batch_size} sequences, {choice.readers} x {planned}",
                    f"{batch.global_batch_size} sequences, {choice.readers} x {found}",
                )
            }
            raise EngineMismatchError(mismatch_message(sizes))
        if found != planned and self.rank == 0:
            logger.info(
                "The script splits the batch of a rank into %s, the plan into %s. The memory estimate is for the plan.",
                *(found, planned),
            )

    def check_first_step(self, has_engine: bool) -> None:
        """Check that an engine was built at all before the first optimizer step, and record what trains."""
        if not has_engine and self.choice.world_size > 1:
            self._check({"engine": "none: the optimizer's model was not wrapped by any"})
        self.check_batch()
        if self.rank == 0 and has_engine:
            self.trained().write(self.folder.trained)
        self._report({})

    def trained(self) -> Engine:
        """Return the record of what trains."""
        return Engine(
            **self.found,
            **self.learned,
            api=self.api,
            micro_batch_size=self.batch.micro_batch_size,
            gradient_accumulation_steps=self.batch.accumulation_steps,
            global_batch_size=self.batch.global_batch_size,
            rows_compared=self.rows_compared,
        )

    def _check(self, found: Mapping[str, Any], advice: Mapping[str, str] | None = None) -> None:
        """Raise for a difference in ``found``, which may have some fields only."""
        differing = self.expected.differences(self.expected.model_copy(update=dict(found)))
        if message := mismatch_message(differing, {**_ADVICE, **(advice or {})}):
            raise EngineMismatchError(message)

    def _report(self, found: Mapping[str, Any]) -> None:
        self.found |= found
        rank_report(self.folder, self.rank, environment_report() | {"api": self.api} | self.found)
