"""Adapters of PEFT: separate them from the base weights by PEFT's names, and describe what they change.

Every kind of change is a class of `UPDATES`. It is computed in float32 and rounded once.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Final, Self

import numpy as np
import numpy.typing as npt

from shardmake.checkpoint.formats.contents import Change, Contents, Read, StoredTensor, Update
from shardmake.checkpoint.formats.hub_layout import ClassParameter, HubLayout, in_class_layout
from shardmake.core.errors import CheckpointError
from shardmake.run.adapter_settings import CONFIG, WITH_PEFT, AdapterSettings

DEFAULT = "default"
"""PEFT's name of an adapter that the program does not name."""
REFERENCE = "ref"
"""TRL's name of the frozen copy of an adapter, from which DPO measures the distance."""
PREFIX: Final = "base_model.model."
_SAVED = re.compile(r"(.+)\.modules_to_save(?:\.(?P<adapter>(?!weight$)[^.]+))?\.(?P<weight>.+)")
_QUANTIZED = re.compile(r".+\.base_layer\.weight\..+")
"""Scales and codes of a base weight in 4 bits."""
_ORIGINAL = re.compile(r".+\.(original_module|token_adapter\.trainable_tokens_original)\..+")
_BASE = re.compile(r"(\.token_adapter|\.base_layer)*\.base_layer\.")
_ROWS = 1 << 21
"""Elements of a weight that are read at once to compute norms."""
Array = npt.NDArray[Any]


@dataclass(frozen=True)
class LoraUpdate(Update):
    """W + s * B @ A (Hu et al. 2021, arXiv:2106.09685, section 4.1) with A [rank, in], B [out, rank] and W [out, in].

    Attributes:
        transposed: W is [in, out], as in the Conv1D layers of GPT-2, and gets the transposed product.
        count: W is a stack of so many matrices. A [count x rank, in] holds their factors one after the other, and
            B [out, rank x count] those of the same rank side by side, as PEFT stores them.
        parameter: The name by which ``target_parameters`` chose W; empty if the module was chosen.
    """

    transposed: bool = False
    count: int = 1
    parameter: str = ""
    PARTS: ClassVar[tuple[str, ...]] = ("lora_A", "lora_B")

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight."""
        a, b = (self.parts[part].shape for part in self.PARTS[:2])
        matrix = (a[1], b[0]) if self.transposed else (b[0], a[1])
        return matrix if self.count == 1 else (self.count, *matrix)

    @property
    def scale(self) -> float:
        """The factor of ``B @ A``."""
        return self.settings.scale(self.parameter or self.module)

    def fitting(self, weight: StoredTensor | None) -> Self:
        """Transpose the product if only that fits: a model may have Conv1D and Linear layers."""
        found = super().fitting(weight)
        fits = weight is None or weight.shape == found.shape
        return found if fits else replace(self, transposed=not self.transposed)

    def problems(self, weight: StoredTensor | None) -> Iterator[str]:
        """Compare the factors with the rank and the weight."""
        yield from super().problems(weight)
        a, b = (self.parts[part].shape for part in self.PARTS[:2])
        if len(a) != 2 or len(b) != 2:
            yield (
                f"the factors of {self.module} have the shapes {list(a)} and {list(b)}. Only matrices can be merged, "
                f"not convolutions. {WITH_PEFT}"
            )
        rank = self.settings.rank(self.parameter or self.module) * self.count
        if (a[0], b[1]) != (rank, rank):
            yield (
                f"{CONFIG} gives {self.module} the rank {rank}, its factors are {list(a)} and {list(b)}. The files do "
                "not belong together. Copy the adapter again."
            )
        may_turn = self.PARTS == LoraUpdate.PARTS and not self.parameter
        either = (self.shape, self.shape[::-1]) if may_turn else (self.shape,)
        if weight is not None and weight.shape not in either:
            yield self.misfit(weight)

    def load(self, read: Read, weight: StoredTensor) -> Change:
        """Add the product."""
        right, left = self._factors(read)
        rows, columns = left.shape[1], right.shape[2]

        def add(values: Array, first: int) -> Array:
            begin, end = first // columns, -(-(first + values.size) // columns)
            spans = ((n, max(0, begin - n * rows), end - n * rows) for n in range(begin // rows, -(-end // rows)))
            delta = np.concatenate([left[n, low:high] @ right[n] for n, low, high in spans]).reshape(-1)
            return values + delta[first - begin * columns :][: values.size]

        return add

    def _factors(self, read: Read) -> tuple[Array, Array]:
        """Return the factors [count, rank, columns] and [count, rows, rank] of the change, one times the scale."""
        a, b = (read(self.parts[part]) for part in self.PARTS[:2])
        a = a.reshape(self.count, -1, a.shape[1])
        b = np.ascontiguousarray(b.reshape(b.shape[0], -1, self.count).transpose(2, 0, 1)) * np.float32(self.scale)
        return (b.transpose(0, 2, 1), a.transpose(0, 2, 1)) if self.transposed else (a, b)

    def part(self, read: Read, rows: Sequence[int]) -> dict[str, Array]:
        """Cut one of the factors."""
        a, b = (read(self.parts[part]) for part in self.PARTS[:2])
        names = [f"{part}{'' if 'embedding' in part else '.weight'}" for part in self.PARTS[:2]]
        pair = (a[:, rows], b) if self.transposed else (a, b[rows])
        return dict(zip(names, pair, strict=True))


@dataclass(frozen=True)
class EmbeddingUpdate(LoraUpdate):
    """LoRA of an embedding, whose weight [tokens, width] gets the transposed product."""

    transposed: bool = True
    PARTS: ClassVar[tuple[str, ...]] = ("lora_embedding_A", "lora_embedding_B")


@dataclass(frozen=True)
class DoraUpdate(LoraUpdate):
    """Each row of LoRA's result, scaled to the length in a vector (DoRA, arXiv:2402.09353, equation 5)."""

    PARTS: ClassVar[tuple[str, ...]] = (*LoraUpdate.PARTS, "lora_magnitude_vector")
    READS_WEIGHT: ClassVar[bool] = True

    def problems(self, weight: StoredTensor | None) -> Iterator[str]:
        """Compare the lengths as well."""
        if self.settings.fan_in_fan_out:
            yield f"use_dora of {self.module} is in a Conv1D layer. {WITH_PEFT}"
        yield from super().problems(weight)
        held = self.parts[self.PARTS[2]].shape
        if held != self.shape[:1]:
            yield f"use_dora of {self.module} has {list(held)} lengths for a weight of {list(self.shape)}. {WITH_PEFT}"

    def load(self, read: Read, weight: StoredTensor) -> Change:
        """Read the weight once to measure its rows."""
        add, lengths = super().load(read, weight), read(self.parts[self.PARTS[2]])
        height, width = self.shape
        step, factors = max(1, _ROWS // width), np.empty(height, np.float32)
        for begin in range(0, height, step):
            end = min(begin + step, height)
            rows = add(read(weight.rows(begin, end)).reshape(-1), begin * width).reshape(-1, width)
            factors[begin:end] = lengths[begin:end] / np.linalg.norm(rows, axis=1)
        return lambda values, first: (
            add(values, first) * factors[np.arange(first, first + values.size, dtype=np.int64) // width]
        )

    def part(self, read: Read, rows: Sequence[int]) -> dict[str, Array]:
        """Cut the lengths as well."""
        return super().part(read, rows) | {self.PARTS[2]: read(self.parts[self.PARTS[2]])[rows]}


@dataclass(frozen=True)
class TokenUpdate(Update):
    """The rows of an embedding that were trained (``trainable_token_indices``), in place of the base's."""

    PARTS: ClassVar[tuple[str, ...]] = ("token_adapter.trainable_tokens_delta",)

    @property
    def rows(self) -> list[int]:
        """The numbers of the rows."""
        return self.settings.tokens(self.module)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the rows."""
        return self.parts[self.PARTS[0]].shape

    def problems(self, weight: StoredTensor | None) -> Iterator[str]:
        """Compare the rows with the weight and the settings."""
        yield from super().problems(weight)
        if len(self.shape) != 2 or len(self.rows) != self.shape[0]:
            yield (
                f"trainable_token_indices in {CONFIG} has {len(self.rows)} tokens for {self.module}, the file "
                f"{list(self.shape)}. Copy the adapter again."
            )
        if weight is None:
            yield f"{self.misfit(None)} If that model ties it, save with save_embedding_layers=True."
        elif weight.shape[1:] != self.shape[1:] or max(self.rows) >= weight.shape[0]:
            yield self.misfit(weight)

    def load(self, read: Read, weight: StoredTensor) -> Change:
        """Replace the rows."""
        held, width = read(self.parts[self.PARTS[0]]), self.shape[1]
        rows = dict(zip(self.rows, held, strict=True))  # of equal ones, the last counts

        def put(values: Array, first: int) -> Array:
            values = values.copy()
            for number, row in rows.items():
                low, high = max(first, number * width), min(first + values.size, (number + 1) * width)
                if low < high:
                    values[low - first : high - first] = row[low - number * width : high - number * width]
            return values

        return put

    def part(self, read: Read, rows: Sequence[int]) -> dict[str, Array]:
        """Select the rows."""
        inside = [row in rows for row in self.rows]
        return {self.PARTS[0]: read(self.parts[self.PARTS[0]])[inside]}


UPDATES: Final[tuple[type[Update], ...]] = (LoraUpdate, EmbeddingUpdate, DoraUpdate, TokenUpdate)
"""Every kind of update, recognised by the tensors that PEFT stores for a module."""
_PARTS = "|".join(sorted({re.escape(part) for kind in UPDATES for part in kind.PARTS}))
_PART = re.compile(rf"(?P<module>.+)\.(?P<part>{_PARTS})(?:\.(?!weight$)(?P<adapter>[^.]+))?(?:\.weight)?")
_WITH_ITS_PROGRAM = "Merge it with the program that trained it; PEFT leaves out what it does not know."
_OTHER_PART = re.compile(r".+\.(lora_|token_adapter\.(?!base_layer)).+")


@dataclass(frozen=True)
class Adapter:
    """An adapter and, if the checkpoint holds them, the base weights.

    Attributes:
        parts: By module, the tensors of its update by `Update.PARTS`.
        saved: Weights that were trained in full (modules_to_save), by their name in the model.
        base: The base model's weights, by name; empty if the checkpoint holds none, or holds them in 4 bits: then the
            adapter is added to those of the base model's folder.
    """

    parts: dict[str, dict[str, StoredTensor]]
    saved: dict[str, StoredTensor]
    base: dict[str, StoredTensor]


def is_adapter(contents: Contents) -> bool:
    """Return True if the names are those of a PEFT model with LoRA layers, or the files are an adapter's."""
    return contents.format == "PEFT adapter" or any(_PART.fullmatch(name) for name in contents.tensors)


def split(contents: Contents) -> Adapter:
    """Separate adapter and base weights; raise `CheckpointError` for several adapters and for unknown parts of one."""
    parts: dict[str, dict[str, StoredTensor]] = {}
    saved, base = dict[str, StoredTensor](), dict[str, StoredTensor]()
    unused = _unused_adapter(contents)
    for name, tensor in contents.tensors.items():
        plain = name.removeprefix(PREFIX)
        if unused is not None and _adapter_name(plain) == unused:
            continue
        if part := _PART.fullmatch(plain):
            held, key = parts.setdefault(part["module"], {}), part["part"]
        elif full := _SAVED.fullmatch(plain):
            held, key = saved, f"{full[1]}.{full['weight']}"
        elif _ORIGINAL.fullmatch(plain):
            continue
        elif _OTHER_PART.fullmatch(plain):
            raise CheckpointError(
                f"Cannot merge {contents.folder}. The tensor {name} belongs to an adapter type that is not "
                f"supported. {_WITH_ITS_PROGRAM}"
            )
        else:
            held, key = base, _BASE.sub(".", plain)
        if (other := held.setdefault(key, tensor)) is not tensor:
            raise CheckpointError(
                f"Cannot merge {contents.folder}. {other.name} and {name} are one tensor of the adapter, and PEFT "
                "loads at most one of them. Delete the other, or save the adapter again with save_pretrained."
            )
    if any(_QUANTIZED.fullmatch(name) or tensor.dtype == "U8" for name, tensor in contents.tensors.items()):
        base = {}
    # PEFT's own file and its part of a model's states hold no base weights, only those that were trained in full.
    adapted = set(map(outermost, parts))
    holds_base = any(len(held.shape) > 1 and name.rpartition(".")[0] in adapted for name, held in base.items())
    if contents.format == "PEFT adapter" or not holds_base:
        saved, base = {**saved, **base}, {}
    return Adapter(parts, saved, base)


def _unused_adapter(contents: Contents) -> str | None:
    """Return the name of the adapter that is not merged, if there is one; several others raise `CheckpointError`."""
    names = {_adapter_name(name.removeprefix(PREFIX)) for name in contents.tensors} - {None}
    trained = sorted(str(name) for name in names - {REFERENCE})
    if len(trained) > 1:
        raise CheckpointError(
            f"Cannot merge {contents.folder}. It holds several adapters ({', '.join(trained)}), and which of them "
            f"belong to the model is not recorded. {WITH_PEFT}"
        )
    return REFERENCE if trained and REFERENCE in names else None


def _adapter_name(plain: str) -> str | None:
    """Return the adapter to which a weight belongs by its name; None for base weights and in PEFT's own files."""
    found = _PART.fullmatch(plain) or _SAVED.fullmatch(plain)
    return found["adapter"] if found else None


def merge(contents: Contents, base: Contents | None, layout: Callable[[], HubLayout] = HubLayout) -> Contents:
    """Return the base model with the adapter in ``contents``, a checkpoint of a PEFT model, added to it.

    ``base`` is the base model, for a checkpoint without base weights; ``layout`` returns the layout of its files. Raise
    `CheckpointError` if base weights are missing, or the adapter is of another model or of an unsupported kind.
    """
    adapter = split(contents)
    settings = read_settings(contents.folder, holds_base=bool(adapter.base))
    if not adapter.parts and not adapter.saved:
        raise CheckpointError(
            f"Cannot merge {contents.folder}. Its adapter holds no weights: a rank that has none wrote it. Merge "
            "the sharded checkpoint, or save the adapter with the weights of all ranks."
        )
    weights = adapter.base or (base.tensors if base is not None else {})
    if not weights:
        raise CheckpointError(
            f"{contents.folder} holds an adapter without base weights. Name the base model's folder with --base."
        )
    known = weights.keys() >= {f"{module}.weight" for module in adapter.parts} | adapter.saved.keys()
    held = HubLayout() if known else layout()
    stacked = _stacked(adapter.parts, settings, held.stacked)
    updates = dict(_update(module, parts, settings, stacked) for module, parts in adapter.parts.items())
    weights = in_class_layout(weights, held, updates.keys() | adapter.saved.keys())
    tensors, trained = {**weights, **adapter.saved}, {name: weights.get(name) for name in adapter.saved}
    for name, update in updates.items():
        weight = tensors.get(name)
        found = update.fitting(weight)
        tensors[name] = replace(weight or StoredTensor(name, "F32", found.shape, ()), update=found)
        if not isinstance(update, TokenUpdate):  # PEFT ties these rows with the weights
            trained[name] = weight
    kept = {} if settings.ensure_weight_tying else trained
    merged = contents.with_tensors(replace(tensor, name=name) for name, tensor in tensors.items())
    return replace(merged, trained=kept)


def unadapted(contents: Contents, unloaded: Collection[str]) -> list[str]:
    """Return the weights of a merge that ``target_modules`` chooses and the adapter does not have.

    Only stacks of layers with adapted weights count, without the ``unloaded`` weights, which the class does not have.
    """
    stacks = {_stack(name): tensor.update.settings for name, tensor in contents.tensors.items() if tensor.update}
    left = contents.tensors.keys() - contents.trained.keys() - {*unloaded}
    return [
        name
        for name, tensor in contents.tensors.items()
        if tensor.update is None and name in left and name.endswith(".weight")
        and (settings := stacks.get(_stack(name))) and settings.targets(name.removesuffix(".weight"))
    ]  # fmt: skip


def _stack(name: str) -> str:
    """Return ``name`` up to its last number, without the numbers."""
    return re.sub(r"\d+", "*", name[: max((found.end() for found in re.finditer(r"\.\d+\.", name)), default=0)])


def outermost(module: str) -> str:
    """Return the name of a module without PEFT's wrappers for several of its parameters."""
    return re.sub(r"(\.base_layer)+$", "", module)


def _stacked(
    modules: Collection[str], settings: AdapterSettings, parameters: Iterable[ClassParameter]
) -> dict[str, ClassParameter]:
    """Return the parameter that an update changes, by PEFT's name of its module, where that has stacked matrices.

    PEFT wraps a module once for each of its ``target_parameters``, in the order of the class, the last one outermost.
    """
    levels: dict[str, list[str]] = {}
    for module in modules:
        levels.setdefault(outermost(module), []).append(module)
    held: dict[str, list[ClassParameter]] = {}
    for parameter in filter(lambda parameter: settings.adapts(parameter.name), parameters):
        held.setdefault(parameter.name.rpartition(".")[0], []).append(parameter)
    return {
        name: parameter
        for module, names in levels.items()
        if len(found := held.get(module, [])) == len(names)
        for name, parameter in zip(sorted(names, key=len), reversed(found), strict=True)
    }


def _update(
    module: str, parts: Mapping[str, StoredTensor], settings: AdapterSettings, stacked: Mapping[str, ClassParameter]
) -> tuple[str, Update]:
    kind = next((kind for kind in UPDATES if set(kind.PARTS) == parts.keys()), None)
    if kind is None or (issubclass(kind, DoraUpdate) != settings.use_dora and kind is not TokenUpdate):
        raise CheckpointError(
            f"Cannot merge the adapter: {module} has {', '.join(sorted(parts))}, with which no kind of adapter is "
            f"complete{' with use_dora' * settings.use_dora}. Copy the adapter again. If it is complete: "
            f"{_WITH_ITS_PROGRAM}"
        )
    weight = stacked.get(module, ClassParameter(f"{module}.weight", (), settings.fan_in_fan_out))
    if kind is not LoraUpdate:
        return weight.name, kind(module, parts, settings)
    count = weight.shape[0] if len(weight.shape) == 3 else 1
    parameter = weight.name if settings.adapts(weight.name) else ""
    return weight.name, LoraUpdate(module, parts, settings, weight.is_transposed, count, parameter)


def adapter_only(contents: Contents) -> Contents:
    """Return the adapter alone, with the names that PEFT uses in its files; raise `CheckpointError` without one."""
    if not is_adapter(contents):
        raise CheckpointError(f"{contents.folder} holds no LoRA adapter. Merge it without --adapter.")
    adapter = split(contents)
    named = [name.removeprefix(PREFIX) for name in contents.tensors if name.startswith(PREFIX)]
    if contents.format == "PEFT adapter" and len(named) == len(contents.tensors) and not any(map(_adapter_name, named)):
        return contents
    tensors = dict(adapter.saved)
    for module, parts in adapter.parts.items():
        for part, tensor in parts.items():
            tensors[f"{module}.{part}{'.weight' * (part in LoraUpdate.PARTS)}"] = tensor
    return contents.with_tensors((replace(t, name=PREFIX + name) for name, t in tensors.items()), {})


def config_file(folder: Path) -> Path:
    """Return ``adapter_config.json`` in the checkpoint's folder or its parent folder."""
    found = [path for path in (folder / CONFIG, folder.parent / CONFIG) if path.is_file()]
    if not found:
        raise CheckpointError(
            f"{CONFIG} is missing in {folder} and its parent folder. It holds the adapter's scale. Copy it there."
        )
    return found[0]


def read_settings(folder: Path, *, holds_base: bool) -> AdapterSettings:
    """Read ``adapter_config.json``; raise `CheckpointError` for settings that cannot be merged."""
    path = config_file(folder)
    settings = AdapterSettings.read(path)
    for name, instead in settings.refused(holds_base).items():
        raise CheckpointError(f"Cannot merge the adapter of {path}: {name} is not supported. {instead}")
    return settings
