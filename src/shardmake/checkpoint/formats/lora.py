"""LoRA adapters: separate them from the base weights by PEFT's names and describe how to merge them.

A merged weight is W + s * B @ A (Hu et al. 2021, arXiv:2106.09685, section 4.1) with s = alpha / r, or alpha / sqrt(r)
for rank-stabilised LoRA (arXiv:2312.03732). It is computed in float32 and rounded once. A weight that is stored as
[in, out] (Conv1D) gets the transposed product.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardmake.checkpoint.formats.contents import Contents, LoraUpdate, StoredTensor
from shardmake.core.atomic import read_json
from shardmake.core.errors import CheckpointError

CONFIG = "adapter_config.json"
DEFAULT = "default"
"""PEFT's name of an adapter that the program does not name."""
REFERENCE = "ref"
"""TRL's name of the frozen copy of an adapter, from which DPO measures the distance."""
_PREFIX = "base_model.model."
_FACTOR = re.compile(r"(.+)\.lora_(?P<factor>A|B)(?:\.(?P<adapter>[^.]+))?\.weight")
_SAVED = re.compile(r"(.+)\.modules_to_save\.(?P<adapter>[^.]+)\.(?P<weight>.+)")
_QUANTIZED = re.compile(r".+\.base_layer\.weight\..+")
"""Scales and codes of a base weight in 4 bits."""
_ORIGINAL = re.compile(r".+\.original_module\..+")
UNSUPPORTED = ("use_dora", "lora_bias", "target_parameters", "use_qalora", "use_bdlora")
"""Settings of an adapter that cannot be merged."""


@dataclass(frozen=True)
class Adapter:
    """An adapter and, if the checkpoint holds them, the base weights.

    Attributes:
        factors: By module, its A [rank, in] and B [out, rank].
        saved: Weights that were trained in full (modules_to_save), by their name in the model.
        base: The base model's weights, by name; empty if the checkpoint holds none, or holds them in 4 bits: then the
            adapter is added to those of the base model's folder.
    """

    factors: dict[str, tuple[StoredTensor, StoredTensor]]
    saved: dict[str, StoredTensor]
    base: dict[str, StoredTensor]


def is_adapter(contents: Contents) -> bool:
    """Return True if the names are those of a PEFT model with LoRA layers."""
    return any(_FACTOR.fullmatch(name) for name in contents.tensors)


def split(contents: Contents) -> Adapter:
    """Separate adapter and base weights.

    Raises:
        CheckpointError: A layer has only one of A and B, or is of a kind that is not supported, or there are several
            adapters.
    """
    factors: dict[str, dict[str, StoredTensor]] = {}
    saved, base = {}, {}
    unused = _unused_adapter(contents)
    for name, tensor in contents.tensors.items():
        plain = name.removeprefix(_PREFIX)
        if unused is not None and _adapter_name(plain) == unused:
            continue
        if factor := _FACTOR.fullmatch(plain):
            factors.setdefault(factor[1], {})[factor["factor"]] = tensor
        elif ".lora_" in plain:
            raise CheckpointError(
                f"Cannot merge {contents.folder}. The tensor {name} belongs to an adapter type that is not supported. "
                "Use PEFT's merge_and_unload."
            )
        elif full := _SAVED.fullmatch(plain):
            saved[f"{full[1]}.{full['weight']}"] = tensor
        elif not _ORIGINAL.fullmatch(plain):
            base[plain.replace(".base_layer.", ".")] = tensor
    for module, pair in factors.items():
        if len(pair) != 2:
            raise CheckpointError(
                f"Cannot merge {contents.folder}. The module {module} has lora_{''.join(pair)} but not the other "
                "factor. Use another checkpoint."
            )
    if any(_QUANTIZED.fullmatch(name) or tensor.dtype == "U8" for name, tensor in contents.tensors.items()):
        base = {}
    # PEFT's own file and its part of a model's states hold no base weights, only those that were trained in full.
    if contents.format == "PEFT adapter" or not any(f"{module}.weight" in base for module in factors):
        saved, base = {**saved, **base}, {}
    return Adapter({module: (pair["A"], pair["B"]) for module, pair in factors.items()}, saved, base)


def _unused_adapter(contents: Contents) -> str | None:
    """Return the name of the adapter that is not merged, if there is one; several others raise `CheckpointError`."""
    names = {_adapter_name(name.removeprefix(_PREFIX)) for name in contents.tensors} - {None}
    trained = sorted(str(name) for name in names - {REFERENCE})
    if len(trained) > 1:
        raise CheckpointError(
            f"Cannot merge {contents.folder}. It holds several adapters ({', '.join(trained)}), and which of them "
            "belong to the model is not recorded. Use PEFT's merge_and_unload."
        )
    return REFERENCE if trained and REFERENCE in names else None


def _adapter_name(plain: str) -> str | None:
    """Return the adapter to which a weight belongs by its name; None for base weights and in PEFT's own files."""
    found = _FACTOR.fullmatch(plain) or _SAVED.fullmatch(plain)
    return found["adapter"] if found else None


def merge(contents: Contents, base: Contents | None) -> Contents:
    """Return the base model with the adapter in ``contents`` added to it.

    Args:
        contents: A checkpoint of a PEFT model, with or without the base weights.
        base: The base model, for a checkpoint without base weights.

    Raises:
        CheckpointError: Base weights are missing, or the adapter is of another model or of an unsupported kind.
    """
    adapter = split(contents)
    config = read_config(contents.folder)
    weights = adapter.base or (base.tensors if base is not None else {})
    if not weights:
        raise CheckpointError(
            f"{contents.folder} holds an adapter without base weights. Name the base model's folder with --base."
        )
    tensors = {**weights, **adapter.saved}
    for module, (a, b) in adapter.factors.items():
        tensors[f"{module}.weight"] = _with_update(tensors.get(f"{module}.weight"), module, a, b, config)
    return contents.with_tensors(replace(tensor, name=name) for name, tensor in tensors.items())


def adapter_only(contents: Contents) -> Contents:
    """Return the adapter in ``contents`` with the names that PEFT uses in its files.

    Raises:
        CheckpointError: The checkpoint holds no adapter, or one of a kind that is not supported.
    """
    if not is_adapter(contents):
        raise CheckpointError(f"{contents.folder} holds no LoRA adapter. Merge it without --adapter.")
    adapter = split(contents)
    tensors = dict(adapter.saved)
    for module, (a, b) in adapter.factors.items():
        tensors |= {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
    return contents.with_tensors((replace(t, name=_PREFIX + name) for name, t in tensors.items()), {})


def config_file(folder: Path) -> Path:
    """Return ``adapter_config.json`` in the checkpoint's folder or its parent folder."""
    found = [path for path in (folder / CONFIG, folder.parent / CONFIG) if path.is_file()]
    if not found:
        raise CheckpointError(
            f"{CONFIG} is missing in {folder} and its parent folder. It holds the adapter's scale. Copy it there."
        )
    return found[0]


def read_config(folder: Path) -> dict[str, Any]:
    """Read ``adapter_config.json``; raise `CheckpointError` for settings that are not supported."""
    path = config_file(folder)
    config: dict[str, Any] = read_json(path, "the training")
    if unsupported := unsupported_features(config):
        raise CheckpointError(
            f"Cannot merge the adapter of {path}. Adapters with {', '.join(unsupported)} are not supported. "
            "Use PEFT's merge_and_unload."
        )
    return config


def unsupported_features(config: Mapping[str, Any]) -> list[str]:
    """Return the settings of ``adapter_config.json`` that cannot be merged; of another adapter than LoRA its kind."""
    features = [key for key in UNSUPPORTED if config.get(key)]
    kind = str(getattr(config.get("peft_type"), "value", config.get("peft_type")))
    return features or ([kind] if kind != "LORA" else [])


def _with_update(
    weight: StoredTensor | None, module: str, a: StoredTensor, b: StoredTensor, config: Mapping[str, Any]
) -> StoredTensor:
    transposed = bool(config.get("fan_in_fan_out"))  # PEFT sets it for Conv1D, whose weights are [in, out]
    wanted = (a.shape[1], b.shape[0]) if transposed else (b.shape[0], a.shape[1])
    fits = weight is not None and weight.shape == wanted and a.shape[0] == b.shape[1]
    if weight is None or not fits:
        shape = "no such weight" if weight is None else f"a weight of {list(weight.shape)}"
        raise CheckpointError(
            f"Cannot merge the adapter: it has {list(b.shape)} x {list(a.shape)} for {module}, the base model has "
            f"{shape}. The adapter was trained on another model. Name that model with --base."
        )
    if any(piece.runs > 1 for piece in weight.pieces):
        raise CheckpointError(
            f"Cannot merge the adapter: {module} is sharded in two dimensions. Merge the base model first, then the "
            "adapter into the result."
        )
    return replace(weight, update=LoraUpdate(a, b, scale(module, a.shape[0], config), transposed))


def scale(module: str, rank: int, config: Mapping[str, Any]) -> float:
    """Return the factor of ``B @ A`` for ``module``; ``alpha_pattern`` may set another alpha for some modules."""
    alpha = config["lora_alpha"]
    for pattern, value in (config.get("alpha_pattern") or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            alpha = value
            break
    return float(alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank)
