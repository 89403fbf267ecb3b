"""Hugging Face folders, as DDP training and PEFT save them: safetensors or torch files, with or without an index."""

import json
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from shardmake.checkpoint.formats import unpickle
from shardmake.checkpoint.formats.contents import Contents, Piece, StoredTensor, unsharded
from shardmake.checkpoint.formats.dtypes import ITEM_SIZE, Target
from shardmake.checkpoint.formats.torch_zip_reader import ZipRecord
from shardmake.checkpoint.formats.unpickle import TensorRef, numel
from shardmake.core.errors import CheckpointError

_LARGEST_HEADER = 100_000_000  # bytes, the limit of the safetensors format
_NO_ADAPTER = re.compile(r"checkpoint-\d+|ref")
_INCOMPLETE = "The model is not complete. Copy it again."


@dataclass(frozen=True)
class WeightFiles:
    """File names of one kind of weights: a single file, or several with an index."""

    stem: str
    suffix: str

    @property
    def single(self) -> str:
        """File name if all weights are in one file."""
        return f"{self.stem}.{self.suffix}"

    @property
    def index(self) -> str:
        """Name of the index file, which maps tensors to files."""
        return f"{self.single}.index.json"

    def shard(self, number: int, count: int) -> str:
        """Return the name of file ``number`` (from 0 on) of ``count``."""
        return self.single if count == 1 else f"{self.stem}-{number + 1:05d}-of-{count:05d}.{self.suffix}"


MODEL = WeightFiles("model", "safetensors")
MODEL_BIN = WeightFiles("pytorch_model", "bin")
ADAPTER = WeightFiles("adapter_model", "safetensors")
ADAPTER_BIN = WeightFiles("adapter_model", "bin")


def find_weight_files(folder: Path) -> WeightFiles | None:
    """Return the kind of weights in ``folder``; safetensors take precedence, as in transformers."""
    for files in (MODEL, MODEL_BIN, ADAPTER, ADAPTER_BIN):
        if (folder / files.single).is_file() or (folder / files.index).is_file():
            return files
    return None


def is_licence(name: str) -> bool:
    """Return True for the names under which models publish their licence."""
    stem, _, suffix = name.upper().partition(".")
    return stem.startswith(("LICENSE", "LICENCE", "NOTICE", "COPYING", "USE_POLICY")) and suffix in ("", "TXT", "MD")


def recognise(path: Path) -> Path | None:
    """Return ``path`` if it holds a model's weights."""
    return path if find_weight_files(path) in (MODEL, MODEL_BIN) else None


def recognise_adapter(path: Path) -> Path | None:
    """Return ``path`` if it holds a PEFT adapter's weights."""
    return path if (path / ADAPTER.single).is_file() or (path / ADAPTER_BIN.single).is_file() else None


def find_adapters(path: Path) -> dict[str, Path]:
    """Return a PEFT folder as "default", with the adapters of other names in sub-folders; empty for another folder.

    The checkpoints of a training and TRL's copy of an adapter are none of them.
    """
    others = (it for it in sorted(path.iterdir()) if it.is_dir() and not _NO_ADAPTER.fullmatch(it.name))
    found = {"default": path, **{it.name: it for it in others if recognise_adapter(it)}}
    return found if recognise_adapter(path) else {}


def read(folder: Path, target: Target = "keep") -> Contents:
    """Read the model or adapter in ``folder``.

    Raises:
        CheckpointError: A file of the index is missing, a header is damaged, or index and files do not agree.
    """
    names = shard_names(folder)
    tensors = {tensor.name: tensor for name in names for tensor in read_file(folder / name)}
    if _index(folder).is_file():
        weight_map = _weight_map(folder)
        wrong = list(weight_map.keys() ^ tensors.keys())
        held = {tensor.name: tensor.pieces[0].record.path.name for tensor in tensors.values() if tensor.pieces}
        wrong += [name for name, file in held.items() if file != weight_map.get(name)]
        if wrong:
            raise CheckpointError(
                f"{_index(folder)} does not match the weight files in {sorted(wrong)[0]}. Copy the model again."
            )
    return Contents("Hugging Face folder", folder, None, 1, tensors)


def read_adapter(folder: Path, target: Target = "keep") -> Contents:
    """Read the single weight file of a PEFT folder."""
    files = ADAPTER if (folder / ADAPTER.single).is_file() else ADAPTER_BIN
    tensors = {tensor.name: tensor for tensor in read_file(folder / files.single)}
    return Contents("PEFT adapter", folder, None, 1, tensors)


def shard_names(folder: Path) -> list[str]:
    """Return the names of the weight files in ``folder``, from the index if there is one."""
    if not _index(folder).is_file():
        return [(find_weight_files(folder) or MODEL).single]
    names = sorted(set(_weight_map(folder).values()))
    if any("/" in name or name in ("", ".", "..") for name in names):
        raise CheckpointError(f"{_index(folder)} names files outside its folder. Download the model again.")
    return names


def weight_names(folder: Path) -> set[str]:
    """Return the names of the tensors in ``folder``, from the index if there is one."""
    if _index(folder).is_file():
        return set(_weight_map(folder))
    return {tensor.name for tensor in read_file(folder / shard_names(folder)[0])}


def _index(folder: Path) -> Path:
    return folder / (find_weight_files(folder) or MODEL).index


def _weight_map(folder: Path) -> dict[str, str]:
    try:
        index = json.loads(_index(folder).read_text())
        weight_map = dict(index["weight_map"])
        if not all(isinstance(name, str) for name in weight_map.values()):
            raise TypeError("a file name is not text")
        return weight_map
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"{_index(folder)} is not a valid index of weight files ({error}). Copy it again."
        ) from None


def read_file(path: Path) -> Iterator[StoredTensor]:
    """Return the tensors of one weight file, in the order of their bytes.

    Raises:
        CheckpointError: The file is missing, truncated or damaged.
    """
    return _read_torch(path) if path.suffix == ".bin" else _read_safetensors(path)


def _read_torch(path: Path) -> Iterator[StoredTensor]:
    """Read a ``torch.save`` file without executing anything in it."""
    if not path.is_file():
        raise CheckpointError(f"{path} is missing. {_INCOMPLETE}")
    state = unpickle.load(path)
    if not isinstance(state, Mapping) or not all(isinstance(ref, TensorRef) for ref in state.values()):
        raise CheckpointError(f"{path} is not a model file. It must hold tensors by name and nothing else.")
    return (unsharded(name, ref) for name, ref in state.items())


def _read_safetensors(path: Path) -> Iterator[StoredTensor]:
    """Check the header as the format requires: no holes, no overlaps, correct sizes."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > _LARGEST_HEADER:
                raise ValueError("it is too large")
            header = json.loads(file.read(length))
        at, start = 0, 8 + length
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
            begin, end = entry["data_offsets"]
            shape = tuple(entry["shape"])
            if not all(type(number) is int and number >= 0 for number in (begin, end, *shape)):
                raise ValueError(f"shape or offsets of {name} are not counts")
            if begin != at or end - begin != numel(shape) * ITEM_SIZE[entry["dtype"]]:
                raise ValueError(f"the offsets of {name} do not match its shape")
            at = end
            record = ZipRecord(path, start + begin, end - begin, None)
            pieces = (Piece(record, 0, 0, numel(shape)),) if numel(shape) else ()
            yield StoredTensor(name, entry["dtype"], shape, pieces)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing. {_INCOMPLETE}") from None
    except (struct.error, KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise _damaged(path, f"header: {error}") from None
    if start + at != path.stat().st_size:
        raise _damaged(path, f"it has {path.stat().st_size} bytes, its header describes {start + at}")


def _damaged(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"{path} is not a complete safetensors file: {reason}. Write or copy it again.")
