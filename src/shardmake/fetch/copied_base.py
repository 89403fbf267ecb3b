"""Write a changed copy of a base model once for all runs: its weights tensor by tensor, and its other files."""

import logging
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from shardmake.checkpoint.formats import huggingface
from shardmake.checkpoint.formats.contents import StoredTensor
from shardmake.core.atomic import write_json
from shardmake.core.disk import require_space
from shardmake.core.errors import ConfigError
from shardmake.core.run_folder import fsync_directory
from shardmake.core.units import format_bytes
from shardmake.fetch.model import is_description

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)
_FILE_SIZE: Final = 1 << 30
"""Bytes of a file of the copy; one tensor may be larger."""
_COPIES: Final = 8


def refuse_existing(out: Path) -> None:
    """Raise `ConfigError` if ``out`` exists."""
    if out.exists():
        raise ConfigError(f"Cannot write the model: {out} exists. Name a folder that does not exist.")


@contextmanager
def new_model(out: Path, size: int, largest: int) -> Iterator[Path]:
    """Yield an empty folder that becomes ``out``; the copy has ``size`` bytes, and its largest changed weight so many.

    It takes `_FILE_SIZE` of host memory, and `_COPIES` times that weight.
    """
    require_space(out.parent, size, f"The model needs {format_bytes(size)}")
    logger.info("It needs at most %s of host memory.", format_bytes(_FILE_SIZE + _COPIES * largest))
    staging = out.with_name(f".{out.name}.partial")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    yield staging
    fsync_directory(staging)
    staging.rename(out)


@contextmanager
def reader(tensors: Mapping[str, StoredTensor]) -> "Iterator[Callable[[str], Tensor]]":
    """Yield a function that reads a tensor of safetensors files by its name."""
    from safetensors import safe_open

    paths = {name: tensor.pieces[0].record.path for name, tensor in tensors.items() if tensor.pieces}
    with ExitStack() as stack:
        files = {path: stack.enter_context(safe_open(path, framework="pt")) for path in sorted(set(paths.values()))}
        yield lambda name: files[paths[name]].get_tensor(name)


def write_weights(folder: Path, streams: "list[Iterator[tuple[str, Tensor]]]") -> None:
    """Write the tensors to files of `_FILE_SIZE`, and their index."""
    from safetensors.torch import save_file

    weight_map: dict[str, int] = {}
    held: dict[str, Tensor] = {}
    count = 0

    def flush() -> None:
        nonlocal count
        save_file({name: tensor.contiguous() for name, tensor in held.items()}, folder / str(count), {"format": "pt"})
        weight_map.update(dict.fromkeys(held, count))
        held.clear()
        count += 1

    total = 0
    for name, tensor in (item for stream in streams for item in stream):
        if held and sum(one.nbytes for one in held.values()) + tensor.nbytes > _FILE_SIZE:
            flush()
        held[name] = tensor
        total += tensor.nbytes
    flush()
    names = [huggingface.MODEL.shard(number, count) for number in range(count)]
    for number, name in enumerate(names):
        (folder / str(number)).rename(folder / name)
    if count > 1:
        index = {name: names[number] for name, number in sorted(weight_map.items())}
        write_json(folder / huggingface.MODEL.index, {"metadata": {"total_size": total}, "weight_map": index})


def copy_small_files(source: Path, folder: Path, config: dict[str, Any]) -> None:
    """Copy what is not weights and not there yet, with ``config`` as config.json."""
    for path in source.iterdir():
        if path.is_file() and is_description(path.name) and not (folder / path.name).exists():
            shutil.copyfile(path, folder / path.name)
    write_json(folder / "config.json", config)
