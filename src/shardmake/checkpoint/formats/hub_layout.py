"""The weights of a model folder as ranges of a model's parameters.

transformers renames, joins and splits weights when it loads a folder; it joins the experts of a mixture into one
parameter, for example. `save_pretrained` does the reverse. A sharded checkpoint has the parameters, and a merge has to
write the weights as the base model's files have them. Here transformers' own conversion runs in reverse on tensors
without data. The memory that its results share with the parameters, and the copies that it makes on the way, say from
which elements each weight is made.
"""

import itertools
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from shardmake.checkpoint.formats.contents import ITEM_SIZE, Contents, Piece, StoredTensor
from shardmake.checkpoint.formats.unpickle import numel
from shardmake.core.errors import CheckpointError, ModelError
from shardmake.core.private_names import private
from shardmake.run.text_part import composite_class, towers

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    Copies = dict[int, list[tuple[Tensor, Tensor]]]
    """Views of each new storage, and what was copied to them."""

_MOST_NAMES, _STACKED = 3, 3
_MOST_PARTS = 100_000
"""Parts of one weight."""


class Part(NamedTuple):
    """Elements of ``parameter`` from element ``begin`` on, and their places in a weight.

    There are ``runs`` runs of ``size`` elements each. The first run belongs to element ``at`` of the weight
    (row-major), each following run ``stride`` elements further.
    """

    parameter: str
    begin: int
    size: int
    at: int = 0
    runs: int = 1
    stride: int = 0


@dataclass(frozen=True)
class HubWeight:
    """The weight ``name`` of a model folder, and the parts of parameters that it is made of."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]

    @property
    def is_range(self) -> bool:
        """True if the weight has consecutive elements of one parameter."""
        return len(self.parts) == 1 and self.parts[0].runs == 1


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
            turned = bool(getattr(module, "is_transposed", False))  # PEFT ignores it for a single matrix
            found += [ClassParameter(f"{path}.{name}", size, turned and len(size) == _STACKED) for name, size in held]
    return tuple(found)


def renamed(weights: Sequence[HubWeight]) -> dict[str, str]:
    """Return the name in the files of each parameter that is one weight there."""
    uses = Counter(part.parameter for weight in weights for part in weight.parts)
    only = ((weight.parts[0].parameter, weight.name) for weight in weights if len(weight.parts) == 1)
    return {parameter: name for parameter, name in only if uses[parameter] == 1}


def hub_weights(
    model: "PreTrainedModel", names: Collection[str] | None, missing: Collection[str] = ()
) -> list[HubWeight]:
    """Return the weights of ``model``, which is on the meta device, that are not a parameter of the same name.

    Args:
        names: Names in the base model's files, whose layout the result has; None for transformers' default layout.
        missing: Parameters that the checkpoint does not hold. Those of towers need no layout: the base has their bytes.

    Raise `ModelError` for a weight that is computed, or transposed in too many parts.
    """
    from transformers.core_model_loading import revert_weight_conversion

    tied = getattr(model, "all_tied_weights_keys", None) or {}
    absent = {name for name in missing if name.startswith(_towers(model))}
    parameters = {name: value for name, value in model.state_dict().items() if name not in tied and name not in absent}
    owners = {private(value.untyped_storage()).cdata: name for name, value in parameters.items()}
    private(model).weight_conversions = None if names is None else _convert(model, names)[0]
    copies: Copies = {}
    with _recorded(copies):
        weights = revert_weight_conversion(model, dict(parameters))
    found = {name: HubWeight(name, tuple(one.shape), _parts_of(one, owners, copies)) for name, one in weights.items()}
    wrong = sorted(
        name for name, weight in found.items() if sum(p.size * p.runs for p in weight.parts) != numel(weight.shape)
    )
    if wrong:
        more = f" and {len(wrong) - _MOST_NAMES} more" if len(wrong) > _MOST_NAMES else ""
        raise ModelError(
            f"{type(model).__name__} cannot be merged: its files hold {', '.join(wrong[:_MOST_NAMES])}{more}, which "
            "transformers computes from the parameters. Shardmake copies ranges of them. Name another model."
        )
    same = {name: HubWeight(name, tuple(it.shape), (Part(name, 0, it.numel()),)) for name, it in parameters.items()}
    return [weight for name, weight in found.items() if weight != same.get(name)]


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


def _recorded(copies: "Copies") -> Any:
    """Return a context that notes copies in ``copies``, by storage, and in which ``contiguous`` copies nothing."""
    import torch
    from torch.overrides import TorchFunctionMode

    class Record(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function is torch.Tensor.contiguous:
                return args[0]
            result = function(*args, **(kwargs or {}))
            if function in (torch.cat, torch.concat, torch.stack):
                dim = (kwargs or {}).get("dim", args[1] if len(args) > 1 else 0)
                places = (
                    result.unbind(dim)
                    if function is torch.stack
                    else result.split([t.shape[dim] for t in args[0]], dim)
                )
                copies[_storage(result)] = list(zip(places, args[0], strict=True))
            elif function in (torch.reshape, torch.Tensor.reshape) and _storage(result) != _storage(args[0]):
                copies[_storage(result)] = [(result.view(args[0].shape), args[0])]
            return result

    return Record()


def _storage(tensor: "Tensor") -> int:
    return int(private(tensor.untyped_storage()).cdata)


def _parts_of(weight: "Tensor", owners: Mapping[int, str], copies: "Copies") -> tuple[Part, ...]:
    """Return the parts of a weight; fewer elements than it has if it is neither a view nor one copy of parameters."""
    import torch

    copied = copies.get(_storage(weight), [])
    is_whole = weight.is_contiguous() and sum(place.numel() for place, _ in copied) == weight.numel()
    pairs = copied if is_whole else [(torch.empty(weight.shape, device="meta"), weight)]
    return tuple(
        part
        for place, source in pairs
        if (owner := owners.get(_storage(source)))
        for part in _copied(owner, place, source)
    )


def _copied(owner: str, place: "Tensor", source: "Tensor") -> Iterator[Part]:
    """Yield the parts of the parameter ``owner`` that a copy of its view ``source`` to the view ``place`` has."""
    dims = [dim for dim in zip(source.shape, source.stride(), place.stride(), strict=True) if dim[0] != 1]
    count, runs, stride = 1, 1, 0
    while found := next((dim for dim in dims if dim[1] == dim[2] == count), None):
        count *= found[0]
        dims.remove(found)
    if found := next((dim for dim in dims if dim[1] == count), None):
        runs, _, stride = found
        dims.remove(found)
    if numel(tuple(size for size, _, _ in dims)) > _MOST_PARTS:
        return
    for index in itertools.product(*(range(size) for size, _, _ in dims)):
        begin, at = (sum(i * dim[key] for i, dim in zip(index, dims, strict=True)) for key in (1, 2))
        yield Part(owner, int(source.storage_offset()) + begin, count, int(place.storage_offset()) + at, runs, stride)


def in_hub_layout(contents: Contents, weights: Iterable[HubWeight]) -> Contents:
    """Return ``contents`` with the weights of a model folder in place of the parameters that hold them.

    Parameters that the checkpoint does not hold are ignored: it may have the folder's layout already. Raise
    `CheckpointError` if a part of a parameter is a weight of its own, and the parameter has an update that reads its
    rows, or the weight is not one range of it.
    """
    held = contents.tensors
    made = [weight for weight in weights if all(part.parameter in held for part in weight.parts)]
    if not made:
        return contents
    new: dict[str, list[HubWeight]] = {part.parameter: [] for weight in made for part in weight.parts}
    for weight in sorted(made, key=lambda weight: weight.parts[0].begin):
        new[weight.parts[0].parameter].append(weight)
    tensors: list[StoredTensor] = []
    for name, tensor in held.items():
        tensors += [_made(weight, held) for weight in new[name]] if name in new else [tensor]
    names = renamed(made)
    aliases = {alias: names.get(owner, owner) for alias, owner in contents.aliases.items()}
    trained = {names.get(name, name): tensor for name, tensor in contents.trained.items()}
    return replace(contents.with_tensors(tensors, aliases), trained=trained)


def in_class_layout(
    tensors: Mapping[str, StoredTensor], layout: HubLayout, names: Collection[str]
) -> dict[str, StoredTensor]:
    """Return the ``tensors`` of a model folder with the parameters ``names`` in place of the weights that they hold.

    Raise `CheckpointError` if the weights of a parameter are of several types, or some are missing.
    """
    shapes = {parameter.name: parameter.shape for parameter in layout.stacked}
    parts = {weight.name: weight.parts for weight in layout.weights if weight.parts[0].parameter in names}
    found: dict[str, StoredTensor] = {}
    for name, tensor in tensors.items():
        if name not in parts:
            found[name] = tensor
            continue
        part, *others = parts[name]
        before = found.get(part.parameter, replace(tensor, shape=(0, *tensor.shape[1:]), pieces=()))
        if before.dtype != tensor.dtype or others or part.runs > 1:
            raise CheckpointError(
                f"Cannot merge the adapter: the base model stores {part.parameter} in several types, or with the rows "
                f"of its parts in turn, as in {name}. Save the base model with save_pretrained and name it with --base."
            )
        pieces = (replace(piece, at=piece.at + part.begin) for piece in tensor.pieces)
        shape = shapes.get(part.parameter, (before.shape[0] + tensor.shape[0], *tensor.shape[1:]))
        found[part.parameter] = StoredTensor(part.parameter, tensor.dtype, shape, (*before.pieces, *pieces))
    return {name: tensor.check() if name in names else tensor for name, tensor in found.items()}


def _made(weight: HubWeight, held: Mapping[str, StoredTensor]) -> StoredTensor:
    first = held[weight.parts[0].parameter]
    if weight.is_range and weight.parts[0].size == first.numel:
        return replace(first, name=weight.name, shape=weight.shape)
    sources = {part.parameter: held[part.parameter] for part in weight.parts}
    for tensor in sources.values():
        if tensor.update is not None and (tensor.update.READS_WEIGHT or not weight.is_range):
            raise CheckpointError(
                f"Cannot merge the adapter: it updates {tensor.name}, and the base model stores parts of it as "
                f"separate weights such as {weight.name}. Use PEFT's merge_and_unload."
            )
        if tensor.dtype != first.dtype:
            raise CheckpointError(
                f"Cannot write {weight.name}: of what it is made of, {first.name} is {first.dtype} and {tensor.name} "
                f"{tensor.dtype}. Train them in one type."
            )
    sorted_pieces = {name: sorted(tensor.pieces, key=lambda piece: piece.at) for name, tensor in sources.items()}
    size = ITEM_SIZE[first.dtype]
    pieces = (piece for part in weight.parts for piece in _pieces(part, sorted_pieces[part.parameter], size))
    update = first.update and replace(first.update, start=weight.parts[0].begin)
    return StoredTensor(weight.name, first.dtype, weight.shape, tuple(pieces), update).check()


def _pieces(part: Part, held: Sequence[Piece], size: int) -> Iterator[Piece]:
    """Yield the pieces of ``part`` from those of its parameter, which are ordered by their elements."""
    begin, end = part.begin, part.begin + part.size * part.runs
    if all(piece.runs == 1 for piece in held):
        starts = [piece.at for piece in held]
        held = held[max(0, bisect_right(starts, begin) - 1) : bisect_right(starts, end - 1)]
    for piece in itertools.chain.from_iterable(piece.cut(begin, end, size) for piece in held):
        if part.runs == 1:
            yield replace(piece, at=part.at + piece.at)
        else:
            yield from _spread(piece, part, size)


def _spread(piece: Piece, part: Part, size: int) -> Iterator[Piece]:
    """Yield a piece of a part of several runs, cut where its runs end."""
    for index in range(piece.runs):
        done = 0
        while done < piece.count:
            run, within = divmod(piece.at + index * piece.stride + done, part.size)
            runs = 1 if within else max(1, (piece.count - done) // part.size)
            count = min(part.size - within, piece.count - done)
            start = piece.start + (index * piece.count + done) * size
            yield Piece(
                piece.record, start, part.at + run * part.stride + within, count, runs, part.stride if runs > 1 else 0
            )
            done += runs * count
