"""Write a model with quantized weights in bf16, tensor by tensor: FP8 with scales, FP4 and MXFP4.

The result has the base model's names, files and config without the declaration of quantized weights, so that it trains,
merges and loads as if it were published in bf16.
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from shardmake.checkpoint.formats import huggingface
from shardmake.checkpoint.formats.contents import StoredTensor
from shardmake.core.errors import ModelError
from shardmake.fetch.copied_base import copy_small_files, new_model, reader, refuse_existing, write_weights

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)
QUANTIZATION_KEYS: Final = ("quantization_config", "compression_config")
_PACKED: Final = ("I8", "U8")
"""Types that hold two FP4 numbers a byte."""
_FP4: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The values of E2M1 (OCP Microscaling Formats, section 5.3.3)."""


@dataclass(frozen=True)
class Quantized:
    """How the files of a method hold a quantized weight: the ends of the names that belong to one weight.

    ``scales`` are tried in this order in place of ``weight``; tensors that end with one of ``unused`` are left out.
    """

    weight: str
    scales: tuple[str, ...]
    types: tuple[str, ...]
    unused: tuple[str, ...] = ()


_ACTIVATIONS = (".activation_scale", ".input_scale", ".qscale_act")
METHODS: Final[Mapping[str, Quantized]] = {
    "fp8": Quantized("", ("_scale_inv", ">.scale", ">.qscale_weight"), ("F8_E4M3", "F8_E5M2", "I8"), _ACTIVATIONS),
    "mxfp4": Quantized("_blocks", ("_scales",), ("U8",)),
    "compressed-tensors": Quantized("", ("_scale",), ("F8_E4M3",), _ACTIVATIONS),
}
"""By ``quant_method``; ``>`` in the name of scales drops ``.weight`` before it."""


def dequantize(source: Path, out: Path) -> None:
    """Write the model in the folder ``source`` to the new folder ``out`` in bf16.

    It needs the host memory of `new_model` for the largest weight in bf16. Raises `ModelError` if the weights are not
    quantized, or not in a way that is known.
    """
    refuse_existing(out)
    config: dict[str, Any] = json.loads((source / "config.json").read_text())
    method, settings = _declared(config, source)
    tensors = huggingface.read(source).tensors
    pairs = _pairs(tensors, method, source)
    used = {name for pair in pairs.values() for name in pair[:2]}
    kept = {name: t for name, t in tensors.items() if name not in used and not name.endswith(method.unused)}
    unscaled = {name for name, t in kept.items() if t.dtype in method.types and name.endswith(method.weight)}
    if left := sorted(unscaled | {name for name, t in kept.items() if t.dtype.startswith("F8")}):
        raise ModelError(f"Cannot dequantize {source}: {left[0]} has no scales. Copy the model again.")
    sizes = [2 * t.numel * (2 if t.dtype in _PACKED else 1) for t in (tensors[name] for name, _ in pairs.values())]
    size = sum(sizes) + sum(tensor.nbytes for tensor in kept.values())
    with new_model(out, size, max(sizes)) as staging, reader(tensors) as read:
        convert = _convert_blocks if method.weight else _convert_scaled
        block = settings.get("weight_block_size") or _block_of_groups(settings)
        made = ((name, convert(read(pair[0]), read(pair[1]), block)) for name, pair in pairs.items())
        write_weights(staging, [((name, read(name)) for name in kept), made])
        for part in (config, config.get("text_config") or {}):
            for key in (*QUANTIZATION_KEYS, "torch_dtype"):
                part.pop(key, None)
        copy_small_files(source, staging, {**config, "dtype": "bfloat16"})
    logger.info("Wrote %s in bf16: %d quantized weights of %s. A merge of it is in bf16, too.", out, len(pairs), source)


def _block_of_groups(settings: Mapping[str, Any]) -> list[int] | None:
    """Return the size of the blocks that compressed-tensors states for its weights, if it does."""
    groups = (group.get("weights") or {} for group in (settings.get("config_groups") or {}).values())
    return next((one["block_structure"] for one in groups if one.get("block_structure")), None)


def _declared(config: Mapping[str, Any], source: Path) -> tuple[Quantized, Mapping[str, Any]]:
    text = config.get("text_config") or {}
    found = next((part[key] for part in (config, text) for key in QUANTIZATION_KEYS if part.get(key)), None)
    if found is None:
        raise ModelError(f"Cannot dequantize {source}: its config.json declares no quantized weights. Use it as it is.")
    method = METHODS.get(found.get("quant_method", ""))
    if method is None:
        raise ModelError(
            f"Cannot dequantize {source}: the quantization method {found.get('quant_method')!r} is not known. Known "
            f"are {', '.join(METHODS)}. Load it with transformers, dequantize it there and call save_pretrained."
        )
    return method, found


def _pairs(tensors: Mapping[str, StoredTensor], method: Quantized, source: Path) -> dict[str, tuple[str, str]]:
    """Return the names of quantized weight and scales by the name of each weight in bf16."""
    found = {}
    for name, tensor in tensors.items():
        if tensor.dtype not in method.types or not name.endswith(method.weight):
            continue
        stem = name.removesuffix(method.weight)
        names = (stem.removesuffix(".weight") + end[1:] if end.startswith(">") else stem + end for end in method.scales)
        scales = next((one for one in names if one in tensors), None)
        if scales is not None:
            found[stem] = name, scales
    if not found:
        kinds = ", ".join(sorted({tensor.dtype for tensor in tensors.values()}))
        raise ModelError(
            f"Cannot dequantize {source}: no weight of it has scales in a known format; its tensors are {kinds}. Load "
            "it with transformers, dequantize it there and call save_pretrained."
        )
    return found


def _convert_scaled(weight: "Tensor", scales: "Tensor", block: list[int] | None) -> "Tensor":
    """Return ``weight`` [..., rows, columns] times the scale of each of its blocks, in bf16.

    ``scales`` is a number or a grid [..., rows of blocks, columns of blocks]. At the edges blocks of the size ``block``
    are cut; without that size, the grid divides the weight evenly. int8 holds two FP4 numbers a byte.
    """
    import torch

    if weight.dim() > 2:
        return torch.stack([_convert_scaled(*pair, block) for pair in zip(weight, scales, strict=True)])
    values = _fp4(weight).flatten(-2) if weight.dtype == torch.int8 else weight.float()
    factors = _powers(scales) if scales.dtype == torch.uint8 else scales.float()
    if factors.numel() == 1:
        return (values * factors).bfloat16()
    if factors.dim() == 1:  # one scale a row
        factors = factors[:, None]
    sizes = []
    for axis, (length, count) in enumerate(zip(values.shape, factors.shape, strict=True)):
        size = block[axis] if block and ceil(length / block[axis]) == count else max(1, length // count)
        if ceil(length / size) != count:
            raise ModelError(f"Cannot dequantize a weight of {list(weight.shape)} with scales {list(scales.shape)}.")
        sizes.append(size)
    rows = factors.repeat_interleave(sizes[0], 0)[: values.shape[0]]
    return (values * rows.repeat_interleave(sizes[1], 1)[:, : values.shape[1]]).bfloat16()


def _convert_blocks(blocks: "Tensor", scales: "Tensor", _: list[int] | None) -> "Tensor":
    """Return MXFP4 experts [experts, in, out] in bf16; ``blocks`` is [experts, out, in / 32, 16]."""
    import torch

    made = ((_fp4(one).flatten(-2) * _powers(powers)[..., None]) for one, powers in zip(blocks, scales, strict=True))
    return torch.stack([expert.bfloat16().flatten(-2).T.contiguous() for expert in made])


def _fp4(packed: "Tensor") -> "Tensor":
    """Return the two numbers in each byte in fp32, the one in the lower bits first, in a last dimension of two."""
    import torch

    held = packed.view(torch.uint8).int()
    return torch.tensor(_FP4)[torch.stack([held & 0xF, held >> 4], dim=-1)]


def _powers(exponents: "Tensor") -> "Tensor":
    """Return 2 ** (byte - 127) in fp32, the scales of E8M0."""
    return (exponents.float() - 127).exp2()
