"""Data types by their safetensors names, which this package uses throughout."""

from typing import Literal

from shardmake.core.errors import ConfigError

Target = Literal["keep", "bf16", "fp16", "fp32"]

_TYPES = {
    "F64": (8, "float64", "DoubleStorage"), "F32": (4, "float32", "FloatStorage"),
    "F16": (2, "float16", "HalfStorage"), "BF16": (2, "bfloat16", "BFloat16Storage"),
    "F8_E4M3": (1, "float8_e4m3fn", ""), "F8_E5M2": (1, "float8_e5m2", ""), "F8_E8M0": (1, "float8_e8m0fnu", ""),
    "I64": (8, "int64", "LongStorage"), "I32": (4, "int32", "IntStorage"), "I16": (2, "int16", "ShortStorage"),
    "I8": (1, "int8", "CharStorage"), "U64": (8, "uint64", ""), "U32": (4, "uint32", ""), "U16": (2, "uint16", ""),
    "U8": (1, "uint8", "ByteStorage"), "BOOL": (1, "bool", "BoolStorage"),
    "C64": (8, "complex64", "ComplexFloatStorage"),
}  # fmt: skip
"""Bytes of an element, torch's name, and torch's typed storage class, as pickles name it, if there is one."""
ITEM_SIZE = {name: size for name, (size, _, _) in _TYPES.items()}
FROM_TORCH = {torch: name for name, (_, torch, _) in _TYPES.items()}
FROM_STORAGE = {storage: name for name, (_, _, storage) in _TYPES.items() if storage}

CONVERTIBLE = {"F32", "F16", "BF16"}
"""Types that ``--dtype`` converts; all others (indices, masks, fp8) are copied unchanged."""

_TARGETS = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}


def torch_name(dtype: str) -> str:
    """Return the name of ``dtype`` in torch and config.json."""
    return _TYPES[dtype][1]


def converted(dtype: str, target: Target) -> str:
    """Return the type of a tensor of ``dtype`` in the merged model."""
    if target == "keep" or dtype not in CONVERTIBLE:
        return dtype
    return _TARGETS[target]


def check_target(target: str) -> None:
    """Raise `ConfigError` for an unknown ``--dtype``."""
    if target not in ("keep", *_TARGETS):
        raise ConfigError(f"Unknown dtype: {target!r}. Use one of keep, {', '.join(_TARGETS)}.")
