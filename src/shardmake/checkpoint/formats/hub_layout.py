"""The weights of a model folder as byte ranges of a model's parameters.

transformers renames and joins weights when it loads a folder; it joins the experts of a mixture into one parameter, for
example. `save_pretrained` does the reverse. A sharded checkpoint has the parameters, and a merge has to write the
weights as the base model's files have them. Here transformers' own conversion runs in reverse on tensors without data,
and the memory that its results share with the parameters says which range each weight is.
"""

import re
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardmake.checkpoint.formats import huggingface
from shardmake.checkpoint.formats.contents import Contents, StoredTensor
from shardmake.checkpoint.formats.unpickle import numel
from shardmake.core.errors import CheckpointError, ModelError
from shardmake.core.private_names import private
from shardmake.run.text_part import composite_class, towers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_MOST_NAMES, _STACKED = 3, 3


@dataclass(frozen=True)
class HubWeight:
    """The weight ``name`` of a model folder: elements of the parameter ``parameter`` from element ``offset`` on."""

    name: str
    shape: tuple[int, ...]
    parameter: str
    offset: int


@dataclass(frozen=True)
class ClassParameter:
    """A parameter of a module with stacked matrices, such as a mixture's experts, in the order of the class.

    ``is_transposed``: its matrices are [in, out].
    """

    name: str
    shape: tuple[int, ...]
    is_transposed: bool


@dataclass(frozen=True)
class HubLayout:
    """A model folder's weights that are not a parameter of the same name, and the parameters with stacked matrices."""

    weights: tuple[HubWeight, ...] = ()
    stacked: tuple[ClassParameter, ...] = ()


def stacked_parameters(model: "PreTrainedModel") -> tuple[ClassParameter, ...]:
    """Return the parameters of the modules that hold one with stacked matrices, which a convolution's weight is not."""
    from torch.nn import Conv1d

    found = []
    for path, module in model.named_modules():
        held = [(name, tuple(tensor.shape)) for name, tensor in module.named_parameters(recurse=False)]
        if any(len(shape) == _STACKED for _, shape in held) and not isinstance(module, Conv1d):
            transposed = bool(getattr(module, "is_transposed", False))
            found += [ClassParameter(f"{path}.{name}", shape, transposed) for name, shape in held]
    return tuple(found)


def hub_weights(
    model: "PreTrainedModel", names: Collection[str] | None, missing: Collection[str] = ()
) -> list[HubWeight]:
    """Return the weights that are not a parameter of the same name.

    Args:
        model: The model, on the meta device.
        names: Names in the base model's files, whose layout the result has; None for transformers' default layout.
        missing: Parameters that the checkpoint does not hold. Those of towers need no layout: the base has their bytes.

    Raises:
        ModelError: A weight is more than a range of one parameter, such as a transposed one.
    """
    from transformers.core_model_loading import revert_weight_conversion

    tied = getattr(model, "all_tied_weights_keys", None) or {}
    absent = {name for name in missing if name.startswith(_towers(model))}
    parameters = {name: value for name, value in model.state_dict().items() if name not in tied and name not in absent}
    owners = {private(value.untyped_storage()).cdata: name for name, value in parameters.items()}
    private(model).weight_conversions = None if names is None else _convert(model, names)[0]
    with _views():
        weights = revert_weight_conversion(model, dict(parameters))
    found = {name: owners.get(private(weight.untyped_storage()).cdata) for name, weight in weights.items()}
    wrong = sorted(name for name, owner in found.items() if owner is None or not weights[name].is_contiguous())
    if wrong:
        more = f" and {len(wrong) - _MOST_NAMES} more" if len(wrong) > _MOST_NAMES else ""
        raise ModelError(
            f"{type(model).__name__} cannot be merged: its files hold {', '.join(wrong[:_MOST_NAMES])}{more}, which "
            "transformers computes from several parameters or transposes. Shardmake copies ranges of one parameter. "
            "Name another model."
        )
    return [
        HubWeight(name, tuple(weight.shape), owner, weight.storage_offset())
        for name, weight in weights.items()
        if (owner := found[name]) is not None and (owner != name or weight.shape != parameters[name].shape)
    ]


def unloaded_names(model: "PreTrainedModel", names: Iterable[str]) -> list[str]:
    """Return the ``names`` that are not trained: those that the class leaves in the files, and those of its towers.

    The class declares the first, such as the layers for multi-token prediction of DeepSeek-V3 and Qwen3-Next. Every
    other name that is not a parameter is an error of loading.
    """
    patterns = list(private(model).keys_to_ignore_on_load_unexpected or ())
    absent = _towers(model)
    converted, parameters = _convert(model, names)[1], model.state_dict()
    return sorted(
        name
        for name, parameter in converted.items()
        if f"{parameter}.".startswith(absent)
        or (name not in parameters and any(re.search(pattern, name) for pattern in patterns))
    )


def _towers(model: "PreTrainedModel") -> tuple[str, ...]:
    """Return the starts of the names of a composite model's towers; none for another model."""
    return tuple(f"{name}." for name in towers(model)) if composite_class(model.config) else ()


def check_all_loaded(
    model: "PreTrainedModel", source: str, revision: str | None = None, replaced: str | None = None
) -> None:
    """Raise a `ModelError` if the files of ``source``, a folder or hub id, hold weights that ``model`` does not have.

    They may hold ``replaced``. transformers does not look for them if it loads under ZeRO-3.
    """
    from transformers.core_model_loading import LoadStateDictInfo
    from transformers.utils import cached_file

    folder = Path(str(cached_file(source, "config.json", revision=revision))).parent
    converted, parameters = _convert(model, huggingface.weight_names(folder))[1], model.state_dict()
    left_over = {name for name, new in converted.items() if new not in parameters and name not in parameters}
    info = LoadStateDictInfo(set(), left_over, set(), [], {}, set())
    private(model).adjust_missing_and_unexpected_keys(info)  # removes the names that the class does not load
    if names := sorted(set(info.unexpected_keys) - {replaced}):
        raise ModelError(
            f"Cannot load {source} completely: unexpected keys: {', '.join(names[:_MOST_NAMES])} ({len(names)} in "
            "all). Check that its files belong together."
        )


def _convert(model: "PreTrainedModel", names: Iterable[str]) -> tuple[list[Any], dict[str, str]]:
    """Return the conversions that transformers uses to load files with these ``names``, and what it makes of each name.

    It reverses the conversions to save the model.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    parameters = model.state_dict()
    converted = {
        name: rename_source_key(name, renamings, converters, model.base_model_prefix, parameters)[0] for name in names
    }
    return [entry for entry in mapping if entry.was_used()], converted


def _views() -> Any:
    """Return a context in which ``contiguous`` copies nothing, so that a result shares its parameter's memory."""
    import torch
    from torch.overrides import TorchFunctionMode

    class KeepViews(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function is torch.Tensor.contiguous:
                return args[0]
            return function(*args, **(kwargs or {}))

    return KeepViews()


def in_hub_layout(contents: Contents, weights: Iterable[HubWeight]) -> Contents:
    """Return ``contents`` with the weights of a model folder in place of the parameters that hold them.

    Parameters that the checkpoint does not hold are ignored: it may have the folder's layout already.

    Raises:
        CheckpointError: A part of a parameter is a weight of its own, and the update of the parameter reads its rows.
    """
    parts: dict[str, list[HubWeight]] = {}
    for weight in weights:
        if weight.parameter in contents.tensors:
            parts.setdefault(weight.parameter, []).append(weight)
    if not parts:
        return contents
    new_names = {weight.parameter: weight.name for found in parts.values() for weight in found}
    tensors = (made for tensor in contents.tensors.values() for made in _parts(tensor, parts.get(tensor.name, ())))
    aliases = {alias: new_names.get(owner, owner) for alias, owner in contents.aliases.items()}
    trained = {new_names.get(name, name): tensor for name, tensor in contents.trained.items()}
    return replace(contents.with_tensors(tensors, aliases), trained=trained)


def in_class_layout(
    tensors: Mapping[str, StoredTensor], layout: HubLayout, names: Collection[str]
) -> dict[str, StoredTensor]:
    """Return the ``tensors`` of a model folder with the parameters ``names`` in place of the weights that they hold.

    Raises:
        CheckpointError: The weights of a parameter are of several types, or some are missing.
    """
    shapes = {parameter.name: parameter.shape for parameter in layout.stacked}
    parts = {weight.name: weight for weight in layout.weights if weight.parameter in names}
    found: dict[str, StoredTensor] = {}
    for name, tensor in tensors.items():
        if (part := parts.get(name)) is None:
            found[name] = tensor
            continue
        before = found.get(part.parameter, replace(tensor, shape=(0, *tensor.shape[1:]), pieces=()))
        if before.dtype != tensor.dtype:
            raise CheckpointError(
                f"Cannot merge the adapter: the base model stores {part.parameter} in parts of the types "
                f"{before.dtype} and {tensor.dtype}. Name it in one type with --base."
            )
        pieces = (replace(piece, at=piece.at + part.offset) for piece in tensor.pieces)
        shape = shapes.get(part.parameter, (before.shape[0] + tensor.shape[0], *tensor.shape[1:]))
        found[part.parameter] = StoredTensor(part.parameter, tensor.dtype, shape, (*before.pieces, *pieces))
    return {name: tensor.check() if name in names else tensor for name, tensor in found.items()}


def _parts(tensor: StoredTensor, weights: Sequence[HubWeight]) -> Iterator[StoredTensor]:
    """Yield the weights that ``tensor`` holds in the order of their bytes; without any, the tensor itself."""
    if not weights:
        yield tensor
        return
    pieces = sorted(tensor.pieces, key=lambda piece: piece.at)
    starts = [piece.at for piece in pieces] if all(piece.runs == 1 for piece in pieces) else None
    for weight in sorted(weights, key=lambda weight: weight.offset):
        begin, end = weight.offset, weight.offset + numel(weight.shape)
        if end - begin == tensor.numel:
            yield replace(tensor, name=weight.name, shape=weight.shape)
            continue
        if tensor.update is not None and tensor.update.READS_WEIGHT:
            raise CheckpointError(
                f"Cannot merge the adapter: it updates {tensor.name} by rows, and the base model stores parts of it as "
                f"separate weights such as {weight.name}. Use PEFT's merge_and_unload."
            )
        first = 0 if starts is None else max(0, bisect_right(starts, begin) - 1)
        held = pieces[first:] if starts is None else pieces[first : bisect_right(starts, end - 1)]
        part = StoredTensor(weight.name, tensor.dtype, tensor.shape, tuple(held)).elements(begin, end, weight.shape)
        yield replace(part, update=tensor.update and replace(tensor.update, start=begin))
