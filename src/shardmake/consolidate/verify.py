"""Read a merged model again, all of it, and say whether it is what it should be."""

import hashlib
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from shardmake.checkpoint.formats import huggingface as hf_folder
from shardmake.checkpoint.formats.contents import Contents, Tensor
from shardmake.checkpoint.formats.dtypes import CONVERTIBLE, torch_name
from shardmake.consolidate.aux_files import config_folder, widest
from shardmake.consolidate.blocks import Block, page_aligned, read_into
from shardmake.consolidate.compare import compare
from shardmake.consolidate.loading import Loading, try_loading
from shardmake.core.atomic import read_json, sha256
from shardmake.core.errors import ShardmakeError

_BLOCK = 4 << 20
_CHUNK = 1 << 16  # elements of bf16 that are looked at at once; they stay in the core's cache
_FLOATS = {"F64": np.float64, "F32": np.float32, "F16": np.float16}


class FileSum(BaseModel):
    """Size and checksum of one file."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    size: int = Field(description="Bytes.")
    sha256: str = Field(description="Hex digest.")


class Verification(BaseModel):
    """What was checked, and found good."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    architecture: str = Field(description="The transformers class that loads it with no missing or unexpected key.")
    tensors: int = Field(description="Tensors stored.")
    parameters: int = Field(description="Elements stored.")
    bytes: int = Field(description="Bytes of all tensors.")
    dtype: str = Field(description="Type in config.json, and of every floating tensor.")
    ties: dict[str, str] = Field(description="Tied weights, by the name that is not stored.")
    zero: list[str] = Field(description="Vectors that are all zero, as biases may be.")
    files: dict[str, FileSum] = Field(description="Every file of the model.")
    compared_with: str | None = Field(None, description="The checkpoint that every bit was compared with.")


def verify(
    model: Path,
    against: Path | None = None,
    *,
    base: Path | None = None,
    workers: int = 4,
    trust_remote_code: bool = False,
) -> Verification:
    """Check the model in the folder ``model``.

    Every tensor that its config asks for is there, with shape and type, and none besides; none holds a value that is
    not finite, none but vectors is all zero; ties are right; the index is true; transformers loads it with no missing
    or unexpected key; files have the checksums in the folder's receipt, where there is one.

    Args:
        model: A Hugging Face folder, of a model or of an adapter.
        against: A checkpoint to compare with: bit for bit, or after rounding to the model's type.
        base: The base model's folder, where ``model`` or ``against`` is an adapter.
        workers: Threads; each holds a few MiB.
        trust_remote_code: Whether code in the folder may run.

    Raises:
        ShardmakeError: all that is wrong, one line each.
    """
    adapted = config_folder([base]) if hf_folder.recognises_adapter(model) else None
    verification = verify_loaded(model, try_loading(model, trust_remote_code, adapted), workers)
    if against is None:
        return verification
    compare(model, against, base=base, ties=verification.ties.items(), workers=workers)
    return verification.model_copy(update={"compared_with": str(against)})


def verify_loaded(model: Path, loading: Loading, workers: int = 4) -> Verification:
    """`verify` where transformers has been asked already, about files with the same headers."""
    contents = hf_folder.read(model)
    scans = scan(model, workers)
    problems = [*loading.problems(), *_tie_problems(contents, loading), *_type_problems(model, contents)]
    problems += [problem for found in scans for problem in found.problems]
    problems += _stray_problems(model)
    problems += _receipt_problems(model, {found.name: found.sums for found in scans})
    if problems:
        raise ShardmakeError("\n".join([f"{model} is not a whole model:", *(f"  {line}." for line in problems)]))
    return _summary(model, contents, loading, scans)


@dataclass(frozen=True)
class Scan:
    """What one pass over a file found."""

    name: str
    sums: FileSum
    problems: tuple[str, ...] = ()
    zero: tuple[str, ...] = ()


def scan(model: Path, workers: int) -> list[Scan]:
    """Read every file of the folder once: its checksum and, of weights, their values."""
    weights = hf_folder.shard_names(model)
    others = sorted(
        str(path.relative_to(model))
        for path in model.rglob("*")
        if path.is_file() and path.name not in {*weights, "receipt.json"} and not path.name.startswith(".")
    )
    with ThreadPoolExecutor(workers) as pool:
        scanned = pool.map(lambda name: _scan_weights(model / name), weights)
        plain = pool.map(lambda name: Scan(name, _sum(model / name)), others)
        return [*scanned, *plain]


def _sum(path: Path) -> FileSum:
    return FileSum(size=path.stat().st_size, sha256=sha256(path))


class _Hashed:
    """A file's bytes in order, each block hashed by another thread while the next one is read and looked at."""

    def __init__(self, path: Path) -> None:
        self.path, self.at = path, 0
        self._file = os.open(path, os.O_RDONLY)
        self._hash = hashlib.sha256()
        self._buffers = [page_aligned(_BLOCK), page_aligned(_BLOCK)]
        self._pool = ThreadPoolExecutor(1)
        self._hashing = self._pool.submit(lambda: None)

    def __enter__(self) -> "_Hashed":
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()
        os.close(self._file)

    def blocks(self, end: int) -> Iterator[Block]:
        """The bytes up to ``end``; a block is valid until the one after the next."""
        while self.at < end:
            self._buffers.reverse()
            got = read_into(self._buffers[0][: end - self.at], self._file, self.at)
            if not got:
                raise ShardmakeError(f"{self.path} changed while it was read.")
            block = self._buffers[0][:got]
            self._hashing.result()
            self._hashing = self._pool.submit(self._hash.update, block.data)
            self.at += got
            yield block

    def pass_over(self, end: int) -> None:
        """Hash the bytes up to ``end`` without looking at them."""
        for _ in self.blocks(end):
            pass

    def digest(self) -> FileSum:
        """Of everything so far."""
        self._hashing.result()
        return FileSum(size=self.at, sha256=self._hash.hexdigest())


def _scan_weights(path: Path) -> Scan:
    problems: list[str] = []
    zero: list[str] = []
    with _Hashed(path) as file:
        for tensor in sorted(hf_folder.read_file(path), key=_start):
            file.pass_over(_start(tensor))
            finite, any_value = _scan_tensor(file, tensor)
            if not finite:
                problems.append(f"{tensor.name} holds values that are not finite (NaN or infinity)")
            if not any_value and tensor.numel and tensor.dtype in CONVERTIBLE:
                if len(tensor.shape) < 2:
                    zero.append(tensor.name)
                else:
                    problems.append(f"{tensor.name} is all zero")
        file.pass_over(path.stat().st_size)
        return Scan(path.name, file.digest(), tuple(problems), tuple(zero))


def _start(tensor: Tensor) -> int:
    """Where a tensor of one piece begins in its file; an empty one, nowhere."""
    return tensor.pieces[0].record.offset + tensor.pieces[0].start if tensor.pieces else 0


def _scan_tensor(file: _Hashed, tensor: Tensor) -> tuple[bool, bool]:
    """Whether all values are finite, and whether any is not zero; what two tensors share counts for the first."""
    finite, end = True, _start(tensor) + tensor.nbytes
    any_value = file.at >= end
    for block in file.blocks(end):
        any_value = any_value or bool(block.any())
        finite = finite and _is_finite(block, tensor.dtype)
    return finite, any_value


def _is_finite(block: Block, dtype: str) -> bool:
    """Whether no value is NaN or infinite; types that have neither always are."""
    if dtype in _FLOATS:
        return bool(np.isfinite(block.view(_FLOATS[dtype])).all())
    if dtype != "BF16":
        return True
    bits = block.view(np.uint16)
    chunks = (bits[at : at + _CHUNK] & 0x7FFF for at in range(0, bits.size, _CHUNK))
    return all(chunk.max() < 0x7F80 for chunk in chunks)  # all ones in the exponent: infinity or NaN


def _tie_problems(contents: Contents, loading: Loading) -> list[str]:
    stored = contents.tensors
    return [
        f"{alias} is stored, though the model ties it to {owner}"
        for alias, owner in loading.ties
        if alias in stored and owner in stored
    ]


def _type_problems(model: Path, contents: Contents) -> list[str]:
    said = _said_type(model)
    held = {torch_name(tensor.dtype) for tensor in contents.tensors.values() if tensor.dtype in CONVERTIBLE}
    if said is None or said in held or not held:
        return []
    return [f"config.json says {said}, the tensors are {', '.join(sorted(held))}"]


def _said_type(model: Path) -> str | None:
    """The type in config.json; None where there is no config, as with an adapter."""
    if not (model / "config.json").is_file():
        return None
    config = json.loads((model / "config.json").read_text())
    return str(config.get("dtype") or config.get("torch_dtype"))


def _stray_problems(model: Path) -> list[str]:
    used = set(hf_folder.shard_names(model))
    found = [path.name for suffix in ("safetensors", "bin") for path in model.glob(f"*.{suffix}")]
    strange = set(found) - used - {"training_args.bin"}
    return [f"{name} is no part of the model" for name in sorted(strange)]


def _receipt_problems(model: Path, found: dict[str, FileSum]) -> list[str]:
    if not (model / "receipt.json").is_file():
        return []
    receipt = read_json(model / "receipt.json", "shardmake consolidate")
    recorded = {name: FileSum.model_validate(sums) for name, sums in receipt["verification"]["files"].items()}
    gone = [f"{name} is in the receipt, but not in the folder" for name in recorded if name not in found]
    changed = [name for name, sums in recorded.items() if name in found and found[name] != sums]
    added = [f"{name} was added since the receipt was written" for name in found if name not in recorded]
    return gone + added + [f"{name} has changed since the receipt was written" for name in changed]


def _summary(model: Path, contents: Contents, loading: Loading, scans: list[Scan]) -> Verification:
    tensors = contents.tensors.values()
    return Verification(
        architecture=loading.architecture,
        tensors=len(tensors),
        parameters=sum(tensor.numel for tensor in tensors),
        bytes=sum(tensor.nbytes for tensor in tensors),
        dtype=_said_type(model) or torch_name(widest(tensor.dtype for tensor in tensors)),
        ties=dict(loading.ties),
        zero=[name for found in scans for name in found.zero],
        files={found.name: found.sums for found in scans},
        compared_with=None,
    )
