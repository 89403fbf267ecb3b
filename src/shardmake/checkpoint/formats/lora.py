"""LoRA adapters: told apart from the base weights by PEFT's names, and merged into them while they stream.

A merged weight is W + s * B @ A (Hu et al. 2021, arXiv:2106.09685, section 4.1) with s = alpha / r, or alpha / sqrt(r)
for rank-stabilised LoRA (arXiv:2312.03732); computed in float32 and rounded once.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardmake.checkpoint.formats.contents import Contents, Tensor, Update
from shardmake.core.atomic import read_json
from shardmake.core.errors import ShardmakeError

CONFIG = "adapter_config.json"
_PREFIX = "base_model.model."
_FACTOR = re.compile(r"(.+)\.lora_(A|B)(?:\.[^.]+)?\.weight")
_SAVED = re.compile(r"(.+)\.modules_to_save\.[^.]+\.(.+)")
_ORIGINAL = re.compile(r".+\.original_module\..+")
_UNSUPPORTED = ("use_dora", "fan_in_fan_out", "lora_bias", "target_parameters", "use_qalora", "use_bdlora")


@dataclass(frozen=True)
class Adapter:
    """An adapter and, if the checkpoint holds them, the weights it was trained on.

    Attributes:
        factors: By module, its A [rank, in] and B [out, rank].
        saved: Weights that were trained whole, by their name in the model.
        base: The base model's weights, by name; empty if the checkpoint holds none.
    """

    factors: dict[str, tuple[Tensor, Tensor]]
    saved: dict[str, Tensor]
    base: dict[str, Tensor]


def is_adapter(contents: Contents) -> bool:
    """Whether the names are those of a PEFT model with LoRA layers."""
    return any(_FACTOR.fullmatch(name) for name in contents.tensors)


def split(contents: Contents) -> Adapter:
    """Tell adapter and base weights apart.

    Raises:
        ShardmakeError: a layer has A without B or the other way round, or a kind of layer that is not supported.
    """
    factors: dict[str, dict[str, Tensor]] = {}
    saved, base = {}, {}
    for name, tensor in contents.tensors.items():
        plain = name.removeprefix(_PREFIX)
        if factor := _FACTOR.fullmatch(plain):
            factors.setdefault(factor[1], {})[factor[2]] = tensor
        elif ".lora_" in plain:
            raise ShardmakeError(f"{contents.folder}: {name} belongs to a kind of adapter that is not merged.")
        elif whole := _SAVED.fullmatch(plain):
            saved[f"{whole[1]}.{whole[2]}"] = tensor
        elif not _ORIGINAL.fullmatch(plain):
            base[plain.replace(".base_layer.", ".")] = tensor
    for module, pair in factors.items():
        if len(pair) != 2:
            raise ShardmakeError(f"{contents.folder}: {module} has lora_{''.join(pair)} but not the other factor.")
    if contents.format == "PEFT adapter":  # PEFT's own file holds no base weights, only some trained whole
        saved, base = {**saved, **base}, {}
    return Adapter({module: (pair["A"], pair["B"]) for module, pair in factors.items()}, saved, base)


def merge(contents: Contents, base: Contents | None) -> Contents:
    """The base model with the adapter in ``contents`` added to it.

    Args:
        contents: A checkpoint of a PEFT model, with or without the base weights in it.
        base: The base model, for a checkpoint without base weights.

    Raises:
        ShardmakeError: there are no base weights, the adapter is of another model, or of a kind that is not merged.
    """
    adapter = split(contents)
    config = read_config(contents.folder)
    weights = adapter.base or (base.tensors if base is not None else {})
    if not weights:
        raise ShardmakeError(f"{contents.folder} holds an adapter alone. Name the base model's folder with --base.")
    tensors = {**weights, **adapter.saved}
    for module, (a, b) in adapter.factors.items():
        tensors[f"{module}.weight"] = _updated(tensors.get(f"{module}.weight"), module, a, b, config)
    return contents.with_tensors(replace(tensor, name=name) for name, tensor in tensors.items())


def alone(contents: Contents) -> Contents:
    """The adapter in ``contents`` with the names that PEFT gives its tensors in a file.

    Raises:
        ShardmakeError: there is no adapter, or one of a kind that is not supported.
    """
    if not is_adapter(contents):
        raise ShardmakeError(f"{contents.folder} holds no LoRA adapter. Merge it without --adapter.")
    adapter = split(contents)
    tensors = dict(adapter.saved)
    for module, (a, b) in adapter.factors.items():
        tensors |= {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
    return contents.with_tensors((replace(t, name=_PREFIX + name) for name, t in tensors.items()), {})


def config_file(folder: Path) -> Path:
    """``adapter_config.json`` in the checkpoint's folder or the one above."""
    found = [path for path in (folder / CONFIG, folder.parent / CONFIG) if path.is_file()]
    if not found:
        raise ShardmakeError(f"There is no {CONFIG} in {folder} or above it, so the adapter's scale is not known.")
    return found[0]


def read_config(folder: Path) -> dict[str, Any]:
    """``adapter_config.json`` in the checkpoint's folder or the one above; ShardmakeError for what is not merged."""
    path = config_file(folder)
    config: dict[str, Any] = read_json(path, "the training")
    strange = [key for key in _UNSUPPORTED if config.get(key)]
    if config.get("peft_type") != "LORA" or strange:
        what = ", ".join(strange) or str(config.get("peft_type"))
        raise ShardmakeError(f"{path}: adapters with {what} are not merged. Use PEFT's merge_and_unload for them.")
    return config


def _updated(weight: Tensor | None, module: str, a: Tensor, b: Tensor, config: Mapping[str, Any]) -> Tensor:
    fits = weight is not None and weight.shape == (b.shape[0], a.shape[1]) and a.shape[0] == b.shape[1]
    if weight is None or not fits:
        shape = "no such weight" if weight is None else f"a weight of {list(weight.shape)}"
        raise ShardmakeError(
            f"The adapter has {list(b.shape)} x {list(a.shape)} for {module}, the base model {shape}: it was trained "
            "on another model."
        )
    if any(piece.runs > 1 for piece in weight.pieces):
        raise ShardmakeError(
            f"{module} is cut in two dimensions; merge the base model first, then the adapter into it."
        )
    return replace(weight, update=Update(a, b, scale(module, a.shape[0], config)))


def scale(module: str, rank: int, config: Mapping[str, Any]) -> float:
    """The factor of ``B @ A`` for ``module``; ``alpha_pattern`` may give single modules another alpha."""
    alpha = config["lora_alpha"]
    for pattern, value in (config.get("alpha_pattern") or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            alpha = value
            break
    return float(alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank)
