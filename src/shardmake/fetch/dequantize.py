"""Write a model with quantized weights in bf16, tensor by tensor: FP8, integers and FP4 with scales.

The result has the base model's names, files and config without the declaration of quantized weights, so that it trains,
merges and loads as if it were published in bf16.
"""

import json
import logging
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from shardmake.checkpoint.formats import huggingface, quantized
from shardmake.checkpoint.formats.contents import StoredTensor
from shardmake.core.errors import ModelError
from shardmake.fetch.copied_base import copy_small_files, new_model, reader, refuse_existing, write_weights

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)
_FP4: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The values of E2M1 (OCP Microscaling Formats, section 5.3.3)."""
_WORD: Final = 32
"""Bits of the words in which compressed-tensors packs integers."""
_OPERANDS: Final = ("_zero_point", "_global_scale", "_shape")
"""Ends of the names of tensors that compressed-tensors stores beside the scales of a weight."""
_BLOCK: Final = (128, 128)
"""The size of blocks in FP8 if a config states none, as in transformers."""
_BY_TRANSFORMERS: Final = "If transformers can dequantize it, do that and call save_pretrained, or name it in 16 bits."
_UNUSED: Final = (
    ".activation_scale", ".qscale_act", ".input_scale", ".input_zero_point", ".input_global_scale", ".output_scale",
    ".q_scale", ".k_scale", ".v_scale",
)  # fmt: skip
"""Ends of the names of tensors about activations and the cache of keys and values."""


@dataclass(frozen=True)
class Quantized:
    """How the files of a method hold a quantized weight: the ends of the names that belong to one weight.

    ``scales`` are tried in this order in place of ``weight``. ``two_a_byte`` are the types that hold two FP4 numbers.
    """

    weight: str
    scales: tuple[str, ...]
    types: tuple[str, ...]
    two_a_byte: tuple[str, ...] = ()


METHODS: Final[Mapping[str, tuple[Quantized, ...]]] = {
    "fp8": (Quantized("", ("_scale_inv", ">.scale", ">.qscale_weight"), ("F8_E4M3", "F8_E5M2", "I8"), ("I8",)),),
    "mxfp4": (Quantized("_blocks", ("_scales",), ("U8",), ("U8",)),),
    "compressed-tensors": (
        Quantized("_packed", ("_scale",), ("I32", "U8"), ("U8",)), Quantized("", ("_scale",), ("F8_E4M3", "I8")),
    ),
}  # fmt: skip
"""By ``quant_method``; ``>`` in the name of scales drops ``.weight`` before it."""


def dequantize(source: Path, out: Path) -> None:
    """Write the model in the folder ``source`` to the new folder ``out`` in bf16.

    It needs the host memory of `new_model` for the largest weight in bf16. Raises `ModelError` if the weights are not
    quantized, or not in a way that is known.
    """
    refuse_existing(out)
    config: dict[str, Any] = json.loads((source / "config.json").read_text())
    layouts, settings = _declared(config, source)
    tensors = huggingface.read(source).tensors
    stored = _stored(tensors, layouts, source)
    used = {name for one in stored.values() for name in one.parts.values()}
    kept = {name: t for name, t in tensors.items() if name not in used and not name.endswith(_UNUSED)}
    unscaled = {
        name for name, t in kept.items() for one in layouts if t.dtype in one.types and name.endswith(one.weight)
    }
    if left := sorted(unscaled | {name for name, t in kept.items() if t.dtype.startswith("F8")}):
        raise ModelError(f"Cannot dequantize {source}: {left[0]} has no scales. Copy the model again.")
    if reordered := sorted(name for name in kept if name.endswith("_g_idx")):
        raise ModelError(f"Cannot dequantize {source}: {reordered[0]} reorders columns. {_BY_TRANSFORMERS}")
    numbers = _numbers(settings)
    held = ((one.layout, tensors[one.parts["weight"]]) for one in stored.values())
    sizes = [2 * tensor.numel * _in_one(layout, tensor.dtype, numbers) for layout, tensor in held]
    size = sum(sizes) + sum(tensor.nbytes for tensor in kept.values())
    with new_model(out, size, max(sizes)) as staging, reader(tensors) as read:
        made = (
            (name, _convert(one.layout, {part: read(full) for part, full in one.parts.items()}, numbers))
            for name, one in stored.items()
        )
        write_weights(staging, [((name, read(name)) for name in kept), made])
        for part in (config, config.get("text_config") or {}):
            for key in (*quantized.KEYS, "torch_dtype"):
                part.pop(key, None)
        copy_small_files(source, staging, {**config, "dtype": "bfloat16"})
    logger.info(
        "Wrote %s in bf16: %d quantized weights of %s. A merge of it is in bf16, too.", out, len(stored), source
    )


@dataclass(frozen=True)
class _Stored:
    """The names of the tensors that make up one weight, by their part of it, and the layout that has them."""

    layout: Quantized
    parts: Mapping[str, str]


@dataclass(frozen=True)
class _Numbers:
    """Sizes of the blocks of weights that have one scale, and the bits of packed integers, which a config states."""

    blocks: Sequence[Sequence[int]]
    bits: Sequence[int]
    only: bool
    """True if no weight has blocks of other sizes."""


def _numbers(settings: Mapping[str, Any]) -> _Numbers:
    """Return what ``settings`` state; without the size of blocks, a config of FP8 means that of transformers."""
    groups = [group.get("weights") or {} for group in (settings.get("config_groups") or {}).values()]
    blocks = [one.get("block_structure") or [1, max(one.get("group_size") or 0, 0) or sys.maxsize] for one in groups]
    if "config_groups" not in settings:
        blocks.append(settings.get("weight_block_size", _BLOCK))
    bits = sorted({one["num_bits"] for one in groups if one.get("num_bits") and _WORD % one["num_bits"] == 0})
    return _Numbers([block for block in blocks if block], bits, bool(groups))


def _in_one(layout: Quantized, dtype: str, numbers: _Numbers) -> int:
    """Return how many numbers an element of the stored weight can have."""
    return 2 if dtype in layout.two_a_byte else _WORD // min(numbers.bits, default=1) if dtype == "I32" else 1


def _declared(config: Mapping[str, Any], source: Path) -> tuple[tuple[Quantized, ...], Mapping[str, Any]]:
    _, found = quantized.declared(config) or ("", None)
    if found is None:
        raise ModelError(f"Cannot dequantize {source}: its config.json declares no quantized weights. Use it as it is.")
    if (found.get("transform_config") or {}).get("config_groups"):
        raise ModelError(
            f"Cannot dequantize {source}: its transform_config rotates weights, which is not undone. {_BY_TRANSFORMERS}"
        )
    layouts = METHODS.get(found.get("quant_method", ""))
    if layouts is None:
        raise ModelError(
            f"Cannot dequantize {source}: the quantization method {found.get('quant_method')!r} is not known. Known "
            f"are {', '.join(METHODS)}. {_BY_TRANSFORMERS}"
        )
    return layouts, found


def _stored(tensors: Mapping[str, StoredTensor], layouts: Iterable[Quantized], source: Path) -> dict[str, _Stored]:
    """Return the tensors of each quantized weight by the name of the weight in bf16."""
    found = {}
    for layout in layouts:
        for name, tensor in tensors.items():
            if tensor.dtype not in layout.types or not name.endswith(layout.weight):
                continue
            stem = name.removesuffix(layout.weight)
            ends = (stem.removesuffix(".weight") + end[1:] if end[0] == ">" else stem + end for end in layout.scales)
            scales = next((one for one in ends if one in tensors), None)
            if scales is not None:
                operands = {end: stem + end for end in _OPERANDS if stem + end in tensors}
                found[stem] = _Stored(layout, {"weight": name, "scales": scales, **operands})
    if not found:
        kinds = ", ".join(sorted({tensor.dtype for tensor in tensors.values()}))
        raise ModelError(
            f"Cannot dequantize {source}: no weight of it has scales in a known format; its tensors are {kinds}. "
            f"{_BY_TRANSFORMERS}"
        )
    return found


def _convert(layout: Quantized, parts: Mapping[str, "Tensor"], numbers: _Numbers) -> "Tensor":
    """Return the weight [..., rows, columns] in bf16: its stored numbers less their zero points, times their scales.

    A scale or zero point is a number, one a row, or a grid [..., rows of blocks, columns of blocks]. Blocks of a size
    in ``numbers`` are cut at the edges; unless only these exist, a grid that fits none divides the weight evenly.
    """
    import torch

    weight, scales = parts["weight"], parts["scales"]
    if layout.weight == "_blocks":
        return _convert_blocks(weight, scales)
    if weight.dim() > 2:
        experts = ({part: _of_expert(part, held, n) for part, held in parts.items()} for n in range(len(weight)))
        return torch.stack([_convert(layout, expert, numbers) for expert in experts])
    if weight.dtype == torch.int32:
        columns = int(parts["_shape"][1])
        values = _unpacked(weight, columns, numbers.bits)
    else:
        fp4 = weight.dtype in (torch.int8, torch.uint8) and bool(layout.two_a_byte)
        values = _fp4(weight).flatten(-2) if fp4 else weight.float()
    factors = _powers(scales) if scales.dtype == torch.uint8 else scales.float()
    if "_global_scale" in parts:
        factors = factors / parts["_global_scale"].float()
    if "_zero_point" in parts:
        zeros = parts["_zero_point"]
        if zeros.dtype == torch.int32:
            zeros = _unpacked(zeros.T, values.shape[0], numbers.bits).T
        values -= _spread(zeros.float(), values.shape, numbers)
    return (values * _spread(factors, values.shape, numbers)).bfloat16()


def _of_expert(part: str, held: "Tensor", number: int) -> "Tensor":
    return held[1:] if part == "_shape" else held if held.numel() == 1 else held[number]


def _spread(grid: "Tensor", shape: Sequence[int], numbers: _Numbers) -> "Tensor":
    """Return the number of ``grid`` for each element of a weight of ``shape``, or one number for all of them."""
    if grid.numel() == 1:
        return grid.flatten()
    if grid.dim() == 1:
        grid = grid[:, None]
    fitting = (
        block for block in numbers.blocks
        if all(ceil(length / size) == count for length, size, count in zip(shape, block, grid.shape, strict=True))
    )  # fmt: skip
    even = [max(1, length // count) for length, count in zip(shape, grid.shape, strict=True)]
    rows, columns = map(min, next(fitting, numbers.blocks[0] if numbers.only else even), shape)
    if grid.shape != (ceil(shape[0] / rows), ceil(shape[1] / columns)):
        raise ModelError(
            f"Cannot dequantize a weight of {list(shape)} with scales {list(grid.shape)}: its config.json states no "
            f"size of blocks that fits. {_BY_TRANSFORMERS}"
        )
    return grid.repeat_interleave(rows, 0)[: shape[0]].repeat_interleave(columns, 1)[:, : shape[1]]


def _unpacked(words: "Tensor", columns: int, known: Sequence[int]) -> "Tensor":
    """Return the integers in ``words`` [rows, words], int32 that hold the first one in their lowest bits, in fp32."""
    import torch

    bits = next((one for one in known if ceil(columns * one / _WORD) == words.shape[1]), None)
    if bits is None:
        raise ModelError(
            f"Cannot dequantize a packed weight of {columns} columns in {words.shape[1]} words. Its config.json states "
            f"no number of bits that fits and that divides {_WORD}. {_BY_TRANSFORMERS}"
        )
    held = (words[..., None] >> torch.arange(0, _WORD, bits)) & (2**bits - 1)
    return held.flatten(-2)[:, :columns].float() - 2 ** (bits - 1)


def _convert_blocks(blocks: "Tensor", scales: "Tensor") -> "Tensor":
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
