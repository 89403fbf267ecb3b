"""The private names of libraries that Shardmake uses, all of them, and the versions of libraries that it supports.

A private name may change in any version. Each stands here once; other modules write ``private(model).mp_policy`` for
``model._mp_policy``. A test finds each one in the installed version, and private names in other modules. Methods that
a subclass of Trainer overrides are listed too.
"""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from typing import Any, Final

from shardmake.core.environment import installed_versions
from shardmake.core.errors import ConfigError, ShardmakeError

SUPPORTED: Final[Mapping[str, tuple[str, str]]] = {
    "torch": ("2.11", "2.14"),
    "transformers": ("5.17", "5.24"),
    "accelerate": ("1.15", "1.15"),
    "deepspeed": ("0.19.8", "0.19.8"),
    "peft": ("0.21", "0.21"),
    "trl": ("1.16", "1.16"),
    "submitit": ("1.5.4", "1.5.4"),
}
"""The oldest and the newest version with which the tests ran. pyproject.toml requires the oldest."""


BROKEN_PAIRS: Final = (
    ("transformers", "5.24", "peft", "0.22", "model.add_adapter of a script stops. Use PEFT's get_peft_model there."),
)
"""A library from a version on, another one below a version, and what then breaks in a user's script."""


@dataclass(frozen=True)
class Names:
    """Private names of one class or module."""

    library: str
    holder: str
    """Path of the class or module; of a module alone, its path is the private name."""
    names: tuple[str, ...] = ()
    oldest: str = ""
    """First version that has them, if later than the oldest supported one."""


_TRAINER: Final = (
    "_get_grad_norm", "_get_num_items_in_batch", "_get_output_dir", "_globalstep_last_logged",
    "_issue_warnings_after_load", "_load_from_checkpoint", "_load_optimizer_and_scheduler", "_prepare_input",
    "_prepare_inputs", "_save_checkpoint", "_save_optimizer_and_scheduler", "_tr_loss", "_train_batch_size",
)  # fmt: skip
_SUB_GROUPS: Final = (
    "_clear_fp32_optimizer_param_groups", "_load_global_state_stage3", "_prepare_sub_group",
    "_reassign_or_swap_out_partitioned_parameters", "_release_sub_group", "_set_fp32_optimizer_param_groups",
    "_swappable_optimizer_subgroup",
)  # fmt: skip
_MODULE: Final = (
    "_buffers", "_forward_hooks", "_forward_pre_hooks", "_modules", "_non_persistent_buffers_set", "_parameters",
)  # fmt: skip
_PRETRAINED: Final = (
    "_from_config", "_is_hf_initialized", "_keys_to_ignore_on_load_unexpected",
    "_no_split_modules", "_supports_attention_backend", "_supports_flash_attn", "_supports_sdpa",
)  # fmt: skip
NAMES: Final = (
    Names("python", "argparse.ArgumentParser", ("_actions",)),
    Names("python", "atexit", ("_run_exitfuncs",)),
    Names("torch", "torch", ("_dynamo",)),
    Names("torch", "torch._dynamo.OptimizedModule", ("_orig_mod",)),
    Names("torch", "torch.UntypedStorage", ("_cdata",)),
    Names("torch", "torch.cuda", ("_lazy_init",)),
    Names("torch", "torch.cuda.memory", ("_dump_snapshot", "_record_memory_history")),
    Names("torch", "torch.nn.Module", _MODULE),
    Names("torch", "torch.optim.AdamW", ("_step_supports_amp_scaling",)),
    Names("torch", "torch.optim._muon", ("_adjust_lr", "_zeropower_via_newtonschulz")),
    Names("torch", "torch.distributed.distributed_c10d", ("_get_default_store", "_get_object_coll_device", "_world")),
    Names("torch", "torch.distributed.algorithms._checkpoint.checkpoint_wrapper", ("_CHECKPOINT_PREFIX",)),
    Names("torch", "torch.distributed.fsdp.FSDPModule", ("_get_fsdp_state",)),
    Names("torch", "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState", ("_mp_policy",)),
    Names("torch", "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState", ("_fsdp_param_groups",), oldest="2.12"),
    Names("torch", "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState", ("_fsdp_param_group",)),
    Names("torch", "torch._subclasses.fake_tensor"),
    Names("torch", "torch.testing._internal.distributed.fake_pg"),
    Names("torch", "torch.utils._python_dispatch"),
    Names("torch", "torch.utils._pytree"),
    Names("transformers", "transformers.Trainer", _TRAINER),
    Names("transformers", "transformers.PreTrainedConfig", ("_attn_implementation",)),
    Names("transformers", "transformers.PreTrainedModel", _PRETRAINED),
    Names("transformers", "transformers.PreTrainedModel", ("_is_distributed_loading_by_transformers",), oldest="5.23"),
    Names("transformers", "transformers.distributed.fsdp", ("_get_fsdp_policy_kwargs",), oldest="5.23"),
    Names("transformers", "transformers.PreTrainedTokenizerFast", ("_encode_plus",)),
    Names("transformers", "transformers.core_model_loading", ("_weight_conversions",)),
    Names("accelerate", "accelerate.commands.launch", ("_validate_launch_command",)),
    Names("accelerate", "accelerate.Accelerator", ("_prepare_device_mesh",)),
    Names("accelerate", "accelerate.state.PartialState", ("_reset_state",)),
    Names("accelerate", "accelerate.state.AcceleratorState", ("_reset_state",)),
    Names("deepspeed", "deepspeed.runtime.engine.DeepSpeedEngine", ("_get_zero_ckpt_name",)),
    Names("deepspeed", "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3", _SUB_GROUPS),
    Names(
        "deepspeed",
        "deepspeed.runtime.swap_tensor.partitioned_optimizer_swapper.PartitionedOptimizerSwapper",
        ("_get_param_swap_info",),
    ),
    Names("peft", "peft.tuners.tuners_utils", ("_get_tuner_state_dict_key_prefixes",)),
    Names("trl", "trl.trainer.base_trainer._BaseTrainer", ("_send_telemetry",)),
    Names("trl", "trl.DPOTrainer", ("_precompute_ref_logps", "_prepare_dataset")),
    Names(
        "submitit",
        "submitit.SlurmExecutor",
        ("_get_job_id_from_submission_command", "_make_submission_file_text", "_submit_command"),
    ),
    Names("fsspec", "fsspec.AbstractFileSystem", ("_get_kwargs_from_urls",)),
)


class PrivateNameError(ShardmakeError, AttributeError):
    """The installed version of a library does not have a private name."""


class _Private:
    """An object of a library, whose private attributes are read and set without their underscore."""

    __slots__ = ("_owner",)

    def __init__(self, owner: Any) -> None:
        object.__setattr__(self, "_owner", owner)

    def __getattr__(self, name: str) -> Any:
        listed = _find(name)
        try:
            return getattr(self._owner, f"_{name}")
        except AttributeError as error:
            if hasattr(self._owner, f"_{name}"):  # a property that failed
                raise
            raise PrivateNameError(
                f"{listed.library} {_version(listed.library)} does not have the private name {listed.holder}._{name}, "
                f"which Shardmake uses. {_advice(listed.library)}"
            ) from error

    def __setattr__(self, name: str, value: Any) -> None:
        _find(name)
        setattr(self._owner, f"_{name}", value)


def private(owner: Any) -> Any:
    """Return ``owner``, an object of a library, with its private names as attributes without the underscore."""
    return _Private(owner)


def private_module(name: str) -> Any:
    """Return the private module of the table whose last part is ``name``; an underscore at its start is left out."""
    (path,) = (one.holder for one in NAMES if one.holder.rpartition(".")[2].lstrip("_") == name)
    return import_module(path)


def _find(name: str) -> Names:
    return next(one for one in NAMES if f"_{name}" in one.names)


def _version(library: str) -> str:
    return sys.version.split()[0] if library == "python" else version(library)


def _advice(library: str) -> str:
    oldest, newest = SUPPORTED.get(library, ("", ""))
    tested = f"It is tested with {library} {oldest} to {newest}. " if oldest else ""
    return f"{tested}Run `make install` again, which installs the versions of constraints.txt."


def named_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return training arguments with the names of the installed transformers; 5.23 renamed gradient checkpointing."""
    from transformers import TrainingArguments

    known = TrainingArguments.__dataclass_fields__
    return {
        name if name in known else name.replace("activation_checkpointing", "gradient_checkpointing"): value
        for name, value in arguments.items()
    }


def check_libraries() -> None:
    """Refuse all libraries that are older than the supported ones, before one of them is imported."""
    wrong = [
        f"{name} {found}"
        for name, found in installed_versions(SUPPORTED).items()
        if found and _numbers(found) < _numbers(SUPPORTED[name][0])
    ]
    if wrong:
        oldest = " ".join(f"{name}>={SUPPORTED[name][0]}" for name in SUPPORTED)
        raise ConfigError(
            f"Cannot use the installed libraries: {', '.join(wrong)}. Shardmake needs {oldest}. Run `make install` "
            "again, which installs the versions of constraints.txt, or install at least these."
        )


def library_warnings() -> Iterator[str]:
    """Yield a warning about each library that is newer than the newest tested one, and about pairs that break."""
    installed = {name: found for name, found in installed_versions(SUPPORTED).items() if found}
    for name, found in installed.items():
        newest = _numbers(SUPPORTED[name][1])
        if _numbers(found)[: len(newest)] > newest:
            yield f"{name} {found} is newer than {SUPPORTED[name][1]}, the newest that was tested. {_advice(name)}"
    for name, first, other, needed, effect in BROKEN_PAIRS:
        both = name in installed and other in installed
        if both and _numbers(installed[name]) >= _numbers(first) and _numbers(installed[other]) < _numbers(needed):
            yield f"{name} {installed[name]} with {other} {installed[other]}: {effect}"


def _numbers(text: str) -> tuple[int, ...]:
    from packaging.version import Version

    return Version(text).release
