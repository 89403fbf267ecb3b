"""Quantized weights of a model: what its config.json declares, and what its files hold without a declaration."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from shardmake.checkpoint.formats.contents import StoredTensor
from shardmake.core.errors import CheckpointError

KEYS: Final = ("quantization_config", "compression_config")
"""Keys of config.json; the second is what compressed-tensors wrote before its format had a place in transformers."""


def declared(config: Mapping[str, Any]) -> tuple[str, Any] | None:
    """Return the key of config.json about quantized weights, of the whole model or of its text part, and its value."""
    text = config.get("text_config")
    parts = [config, text] if isinstance(text, Mapping) else [config]
    return next(((key, part[key]) for part in parts for key in KEYS if part.get(key)), None)


def find_quantized(folder: Path) -> StoredTensor | None:
    """Return a weight in ``folder`` whose type has scales beside it, such as FP8; None without any.

    Buffers may be integers. None for files of an older torch, which transformers reads.
    """
    from shardmake.checkpoint.formats import huggingface  # with safetensors, which an estimate does not need

    try:
        held = huggingface.read(folder).tensors.values()
    except CheckpointError:
        return None
    named = (one for one in held if one.dtype.startswith("F8") or "weight" in one.name.rpartition(".")[2])
    return next((one for one in named if one.dtype[0] in "IU" or one.dtype.startswith("F8")), None)
