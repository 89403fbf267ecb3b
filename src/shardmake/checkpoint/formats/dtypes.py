"""Data types by their safetensors names, which this package uses throughout."""

from typing import Literal

from shardmake.core.errors import ConfigError

Target = Literal["keep", "bf16", "fp16", "fp32"]

ITEM_SIZE = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I64": 8, "I32": 4,
    "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1, "C64": 8,
}  # fmt: skip
"""Bytes per element."""

_TORCH_NAME = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U64": "uint64",
    "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool", "C64": "complex64",
}  # fmt: skip
FROM_TORCH = {torch_name: name for name, torch_name in _TORCH_NAME.items()}
"""safetensors name by torch name, such as ``F32`` by ``float32``."""

FROM_STORAGE = {
    "DoubleStorage": "F64", "FloatStorage": "F32", "HalfStorage": "F16", "BFloat16Storage": "BF16",
    "LongStorage": "I64", "IntStorage": "I32", "ShortStorage": "I16", "CharStorage": "I8", "ByteStorage": "U8",
    "BoolStorage": "BOOL", "ComplexFloatStorage": "C64",
}  # fmt: skip
"""safetensors name by torch's typed storage class, as pickles name it."""

CONVERTIBLE = {"F32", "F16", "BF16"}
"""Types that ``--dtype`` converts; all others (indices, masks, fp8) are copied unchanged."""

_TARGETS = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}


def torch_name(dtype: str) -> str:
    """Return the name of ``dtype`` in torch and config.json."""
    return _TORCH_NAME[dtype]


def converted(dtype: str, target: Target) -> str:
    """Return the type of a tensor of ``dtype`` in the merged model."""
    if target == "keep" or dtype not in CONVERTIBLE:
        return dtype
    return _TARGETS[target]


def check_target(target: str) -> None:
    """Raise `ConfigError` for an unknown ``--dtype``."""
    if target not in ("keep", *_TARGETS):
        raise ConfigError(f"Unknown dtype: {target!r}. Use one of keep, {', '.join(_TARGETS)}.")
