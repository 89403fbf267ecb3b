"""Check the values in DeepSpeed's files on which a merge depends, before any of them is used."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shardmake.checkpoint.formats.pickle_objects import Inert
from shardmake.checkpoint.formats.unpickle import TensorRef
from shardmake.core.errors import CheckpointError

Check = Callable[[Any], bool]


def check_model(path: Path, state: Mapping[Any, Any]) -> None:
    """Raise `CheckpointError` if a value of the model file ``path`` has another type than DeepSpeed writes."""
    _check(path, state, _MODEL)


def check_optimizer(path: Path, state: Mapping[Any, Any]) -> None:
    """Raise `CheckpointError` if a value of the optimizer file ``path`` has another type than DeepSpeed writes."""
    _check(path, state, _OPTIMIZER)


def _check(path: Path, state: Mapping[Any, Any], checks: Mapping[str, Check]) -> None:
    for name, is_valid in checks.items():
        value = state.get(name)
        if value is not None and not is_valid(value):
            kind = str(value.kind) if isinstance(value, Inert) else type(value).__name__
            raise CheckpointError(
                f"{path} has an unexpected value for {name!r} ({kind}). The file is damaged, or another version of "
                "DeepSpeed wrote it. Use another checkpoint."
            )


def _is(kind: type | tuple[type, ...]) -> Check:
    return lambda value: isinstance(value, kind)


def _list_of(is_valid: Check) -> Check:
    return lambda value: isinstance(value, list | tuple) and all(map(is_valid, value))


def _named(is_valid: Check) -> Check:
    return lambda value: (
        isinstance(value, Mapping)
        and all(isinstance(name, str) for name in value)
        and all(map(is_valid, value.values()))
    )


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and 0 <= value < 2**62


def _is_shape(value: Any) -> bool:
    return isinstance(value, tuple) and all(map(_is_size, value))


def _is_vector(value: Any) -> bool:
    return isinstance(value, TensorRef) and value.is_contiguous


def _is_address(value: Any) -> bool:
    return isinstance(value, Inert) and _is_size(value.start) and _is_size(value.numel)


def _is_stage(value: Any) -> bool:
    return _is_size(value) or (isinstance(value, Inert) and len(value.args) == 1 and _is_size(value.args[0]))


_MODEL: dict[str, Check] = {
    "module": _named(lambda _: True),
    "param_shapes": _list_of(_named(_is_shape)),
    "buffer_names": _list_of(_is(str)),
    "frozen_param_shapes": _named(_is_shape),
    "frozen_param_fragments": _named(_is_vector),
    "shared_params": _named(_is(str)),
    "global_steps": _is_size,
    "ds_config": _is((dict, Inert)),
    "ds_version": _is(str),
}
_OPTIMIZER: dict[str, Check] = {
    "zero_stage": _is_stage,
    "partition_count": lambda value: _is_size(value) or _list_of(_is_size)(value),
    "fp32_flat_groups": _list_of(_is_vector),
    "single_partition_of_fp32_groups": _list_of(_is_vector),
    "param_slice_mappings": _list_of(_named(_is_address)),
    "param_alignment_paddings": _list_of(_list_of(_is_size)),
}
"""By entry, what DeepSpeed writes; entries may also be missing or None."""
