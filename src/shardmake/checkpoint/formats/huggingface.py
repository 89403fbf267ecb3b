"""Files of whole tensors, safetensors or torch: Hugging Face folders, single files, and shards of other names.

DDP training and PEFT save Hugging Face folders, with or without an index. Accelerate's FULL_STATE_DICT, Lightning's
``.ckpt`` files and users' own loops write one file of any name, perhaps with optimizer states beside the weights.
torchtune writes shards.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from safetensors import SafetensorError, safe_open

from shardmake.checkpoint.formats import unpickle
from shardmake.checkpoint.formats.contents import Contents, Piece, StoredTensor, unsharded
from shardmake.checkpoint.formats.dtypes import ITEM_SIZE, Target
from shardmake.checkpoint.formats.models import NO_WEIGHTS, Levels, names_of_model
from shardmake.checkpoint.formats.torch_zip_reader import ZipRecord
from shardmake.checkpoint.formats.unpickle import TensorRef, numel
from shardmake.core.errors import CheckpointError

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


class _Index(BaseModel):
    weight_map: dict[str, str]


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


def is_complete(folder: Path) -> bool:
    """Return True if ``folder`` holds a model's weights, and not their index alone."""
    return recognise(folder) is not None and all((folder / name).is_file() for name in shard_names(folder))


def recognise_adapter(path: Path) -> Path | None:
    """Return ``path`` if it holds a PEFT adapter's weights."""
    return path if (path / ADAPTER.single).is_file() or (path / ADAPTER_BIN.single).is_file() else None


def find_adapters(path: Path) -> dict[str, Path]:
    """Return a PEFT folder as "default", with the adapters of other names in sub-folders; empty for another folder."""
    return {"default": path, **_named_adapters(path)} if recognise_adapter(path) else {}


def find_named_adapters(path: Path) -> dict[str, Path]:
    """Return the adapters in sub-folders of a folder without weights, where PEFT saves all but "default"."""
    return {} if find_files(path) else _named_adapters(path)


def _named_adapters(path: Path) -> dict[str, Path]:
    """Return the sub-folders with adapters, but for the checkpoints of a training and TRL's copy of an adapter."""
    others = (it for it in sorted(path.iterdir()) if it.is_dir() and not _NO_ADAPTER.fullmatch(it.name))
    return {it.name: it for it in others if recognise_adapter(it)}


def read(folder: Path, target: Target = "keep") -> Contents:
    """Read the model or adapter in ``folder``; raise `CheckpointError` if index and files do not agree."""
    contents = _contents("Hugging Face folder", folder, [folder / name for name in shard_names(folder)])
    if index := _index(folder):
        weight_map = _weight_map(index)
        tensors = contents.tensors
        wrong = list(weight_map.keys() ^ tensors.keys())
        held = {tensor.name: tensor.pieces[0].record.path.name for tensor in tensors.values() if tensor.pieces}
        wrong += [name for name, file in held.items() if file != weight_map.get(name)]
        if wrong:
            raise CheckpointError(
                f"{index} does not match the weight files in {sorted(wrong)[0]}. Copy the model again."
            )
    return contents


def _contents(format: str, folder: Path, files: Iterable[Path]) -> Contents:
    return Contents(format, folder, None, 1, {tensor.name: tensor for file in files for tensor in read_file(file)})


def read_adapter(folder: Path, target: Target = "keep") -> Contents:
    """Read the single weight file of a PEFT folder."""
    files = ADAPTER if (folder / ADAPTER.single).is_file() else ADAPTER_BIN
    return _contents("PEFT adapter", folder, [folder / files.single])


def shard_names(folder: Path) -> list[str]:
    """Return the names of the weight files in ``folder``, from the index if there is one."""
    index = _index(folder)
    if index is None:
        return [(find_weight_files(folder) or MODEL).single]
    names = sorted(set(_weight_map(index).values()))
    if any("/" in name or name in ("", ".", "..") for name in names):
        raise CheckpointError(f"{index} names files outside its folder. Download the model again.")
    return names


def weight_names(folder: Path) -> set[str]:
    """Return the names of the tensors in ``folder``, from the index if there is one."""
    if index := _index(folder):
        return set(_weight_map(index))
    return {tensor.name for tensor in read_file(folder / shard_names(folder)[0])}


def _index(folder: Path) -> Path | None:
    """Return the index of the weights in ``folder``; None beside a single file, which transformers loads instead."""
    files = find_weight_files(folder) or MODEL
    is_read = (folder / files.index).is_file() and not (folder / files.single).is_file()
    return folder / files.index if is_read else None


def _weight_map(index: Path) -> dict[str, str]:
    try:
        return _Index.model_validate_json(index.read_bytes()).weight_map
    except ValidationError as error:
        reason = error.errors()[0]["msg"]
        raise CheckpointError(f"{index} is not a valid index of weight files ({reason}). Copy it again.") from None


def read_file(path: Path) -> Iterator[StoredTensor]:
    """Return the tensors of a weight file in the order of their bytes; raise `CheckpointError` if it is damaged."""
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
    """Read the header; the library refuses one with holes, overlaps or wrong sizes."""
    try:
        with safe_open(path, "numpy") as file:
            views = {name: file.get_slice(name) for name in file.offset_keys()}
            held = [(name, view.get_dtype(), tuple(view.get_shape())) for name, view in views.items()]
        sizes = [numel(shape) * ITEM_SIZE[dtype] for _, dtype, shape in held]
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing. {_INCOMPLETE}") from None
    except (SafetensorError, KeyError) as error:
        raise CheckpointError(f"{path} is not a complete safetensors file: {error}. Write or copy it again.") from None
    at = path.stat().st_size - sum(sizes)
    for (name, dtype, shape), size in zip(held, sizes, strict=True):
        pieces = (Piece(ZipRecord(path, at, size, None), 0, 0, numel(shape)),) if size else ()
        yield StoredTensor(name, dtype, shape, pieces)
        at += size


_SUFFIXES = (".pt", ".pth", ".ckpt", ".bin", ".safetensors")
_OTHER_FILES = re.compile(
    r"(optim|sched|scaler|sampler|rng_|random_states|training_args|recipe_state|dataloader|custom_checkpoint).*"
)
"""Names of files with other states of a training."""
_NUMBERED = re.compile(r"(pytorch_)?model(?P<number>_\d+)?\.(safetensors|bin)")
_LEVELS = 3
"""A model is below the first or second level."""
_MOST_ENTRIES = 1 << 20
"""A dictionary may hold another one many times."""
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d+)-of-(?P<count>\d+)\.(safetensors|bin)")


def find_files(path: Path) -> dict[str, Path]:
    """Return ``path`` if it is a file of weights, or all such files in the folder ``path``, by name."""
    if path.is_file():
        return {path.name: path} if path.suffix in _SUFFIXES else {}
    files = (it for it in sorted(path.iterdir()) if it.suffix in _SUFFIXES and it.is_file())
    return {it.name: it for it in files if not _OTHER_FILES.match(it.name)}


def find_several(path: Path) -> dict[str, Path]:
    """Return the files of the models that ``accelerator.save_state`` wrote, if they are several."""
    named = [(it, match) for it in sorted(path.iterdir()) if (match := _NUMBERED.fullmatch(it.name))]
    return {it.name: it for it, _ in named} if any(match["number"] for _, match in named) else {}


def read_one(file: Path, target: Target = "keep", key: str | None = None) -> Contents:
    """Read the model in ``file``, of several the one at ``key``; raise `CheckpointError` if it holds no such model."""
    if file.suffix == ".safetensors":
        return _contents("one file", file.parent, [file])
    state = unpickle.load(file)
    held = dict(islice(_entries(state, _LEVELS), _MOST_ENTRIES)) if isinstance(state, Mapping) else {}
    weights = {path for path, value in held.items() if isinstance(value, TensorRef)}
    names, left_out = names_of_model({path: path for path in held}, weights, key, file)
    if not names:
        raise CheckpointError(f"Cannot merge {file}. It holds no tensors by name. Name another file.")
    tensors = {name: unsharded(name, held[path]) for path, name in names.items()}
    return Contents("one file", file.parent, None, 1, tensors, left_out=left_out)


def _entries(state: Mapping[Any, Any], levels: int) -> Iterator[tuple[Levels, Any]]:
    """Yield the entries of a dictionary by the keys of up to ``levels`` levels, without other states of a training."""
    for key, value in state.items():
        if levels > 1 and isinstance(value, Mapping):
            if not NO_WEIGHTS.fullmatch(str(key)):
                yield from (((str(key), *path), held) for path, held in _entries(value, levels - 1))
        else:
            yield (str(key),), value


def find_shards(path: Path) -> dict[str, Path]:
    """Return the folder ``path`` if it holds a numbered shard."""
    return {"": path} if any(_SHARD.fullmatch(it.name) for it in path.iterdir()) else {}


def read_shards(folder: Path, target: Target = "keep") -> Contents:
    """Read all shards in ``folder``; raise `CheckpointError` if one is missing, or if there are several sets."""
    found = {it: match for it in sorted(folder.iterdir()) if (match := _SHARD.fullmatch(it.name))}
    sets = {(match["stem"], int(match["count"])) for match in found.values()}
    numbers = {match["number"] for match in found.values()}
    if len(sets) != 1 or not len(found) == len(numbers) == next(iter(sets))[1]:
        expected = " and ".join(f"{stem} of {count}" for stem, count in sorted(sets))
        raise CheckpointError(
            f"{folder} holds {len(found)} shards of {expected}, not those of one model. Copy it again."
        )
    return _contents("shards", folder, found)
