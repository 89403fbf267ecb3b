"""Find classes and functions that no training wrote into a checkpoint, before DeepSpeed or torch loads it.

Both load parts of a checkpoint with the standard unpickler, which imports and calls whatever the file names. Here the
same pickles are read without that, as in `unpickle`, and each name is compared with those that a checkpoint has.
"""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from shardmake.checkpoint.formats.dcp import METADATA, read_metadata
from shardmake.checkpoint.formats.torch_zip_reader import ZipArchive, read_small
from shardmake.checkpoint.formats.unpickle import names_in
from shardmake.core.errors import CheckpointError

_PICKLES = {".pt", ".pth", ".bin", ".pkl"}
_EXPECTED = re.compile(
    "|".join(
        (
            r"_codecs\.encode",
            r"collections\.(OrderedDict|defaultdict)",
            r"(builtins|__builtin__)\.(set|frozenset|complex)",
            r"pathlib\.(_local\.)?(PosixPath|PurePosixPath|Path)",
            r"numpy\.(dtype|ndarray)",
            r"numpy\.(_core|core)\.multiarray\.(_reconstruct|scalar)",
            r"torch\.(Tensor|Size|device|dtype|[A-Z][A-Za-z0-9]+Storage|(bfloat|float|u?int|qu?int|complex)[0-9]\w*|bool)",
            r"torch\.nn\.parameter\.Parameter",
            r"torch\.storage\.(UntypedStorage|TypedStorage)",
            r"torch\._utils\._rebuild_(tensor|tensor_v2|tensor_v3|parameter|parameter_with_state|wrapper_subclass)",
            r"torch\._tensor\._rebuild_from_type_v2",
            r"torch\.serialization\._get_layout",
            r"torch\.distributed\.checkpoint\.metadata\._?[A-Z]\w*",
            r"torch\.distributed\.checkpoint\.filesystem\._StorageInfo",
            r"deepspeed\.runtime\.fp16\.loss_scaler\.[A-Z]\w*",
            r"deepspeed\.runtime\.zero\.config\.ZeroStageEnum",
            r"deepspeed\.utils\.tensor_fragment\.fragment_address",
        )
    )
)
"""Names that DeepSpeed 0.19, torch 2.13 and numpy 2 write; ``pathlib._local`` is Python 3.13's.

None of them runs code that the file brings along.
"""


def find_foreign_names(checkpoint: Path, files: Iterable[str]) -> dict[str, list[str]]:
    """Return those of the ``files`` below ``checkpoint`` that name what no training writes, and the names.

    With ``.metadata``, the objects in DCP's other files are read. Raise `CheckpointError` for a file that the unpickler
    would load and that torch did not write.
    """
    found = {}
    for name in files:
        path = checkpoint / name
        named = {each for content in _pickles(path) for each in names_in(content, path)}
        if foreign := sorted(each for each in named if not _EXPECTED.fullmatch(each)):
            found[name] = foreign
    return found


def refuse_foreign_names(checkpoint: Path, files: Iterable[str]) -> None:
    """Raise `CheckpointError` for the first of ``files`` in which `find_foreign_names` finds something."""
    for name, foreign in find_foreign_names(checkpoint, files).items():
        is_enum = all(each.rpartition(".")[2] == "getattr" for each in foreign)
        todo = (
            "Python 3.11.0 to 3.11.3 writes it for an enumeration: merge the checkpoint and start from that model. If "
            "the training had another Python, find out who changed this file."
            if is_enum
            else "Find out who changed this file."
        )
        raise CheckpointError(
            f"{checkpoint / name} was not loaded. Its pickle would import {', '.join(foreign[:3])}, which no training "
            f"writes. {todo} To train from an older checkpoint, move {checkpoint} away."
        )


def _pickles(path: Path) -> Iterator[bytes]:
    if path.name == METADATA:
        yield read_small(path)
        metadata = read_metadata(path)
        for (name, _), place in metadata.places.items():
            if metadata.entries.get(name) is None:  # torch loads tensors with its own restricted unpickler
                yield _in_archive(place.path, place.offset, place.size)
    elif path.suffix in _PICKLES:
        yield _in_archive(path)


def _in_archive(path: Path, start: int = 0, length: int | None = None) -> bytes:
    with ZipArchive(path, start, length) as archive:
        if "constants.pkl" in archive.entries:  # torch.load would run it
            raise CheckpointError(f"Rejected {path}. It is a program of TorchScript, not a checkpoint.")
        return archive.read("data.pkl")
