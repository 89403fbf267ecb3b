"""The destination of a merge: which folder may be replaced, and which must not."""

import errno
from collections.abc import Iterator, Mapping
from pathlib import Path

from shardmake.checkpoint.formats.contents import Contents
from shardmake.checkpoint.formats.registry import LAYOUTS
from shardmake.consolidate.aux_files import AUX_FILES
from shardmake.core.errors import CheckpointError, ConfigError, ShardmakeError
from shardmake.core.fingerprint import fingerprint
from shardmake.core.hub import cached_snapshot, is_hub_id, translate_hub_errors, with_retries
from shardmake.core.run_folder import real_path
from shardmake.run.paths import MODEL_CARD, MODEL_RECEIPT
from shardmake.run.receipts import MergeReceipt

_NAMED = 5
_SMALL = 64 << 20
"""Bytes; of larger files only the size is compared with the receipt, because hashing them takes as long as a merge."""


def check_destination(out: Path, sources: Mapping[Path, str], *, overwrite: bool) -> None:
    """Raise `ConfigError` if writing the model to ``out`` would remove something else.

    Links are followed, and folders are compared by device and inode.

    Args:
        out: The model's folder. If it exists, it must be empty or hold an unchanged earlier result of a merge.
        sources: What each folder is that must neither hold ``out`` nor be in it.
        overwrite: Accept an ``out`` with any other content.
    """
    cannot = f"Cannot write the model to {out}."
    if _is_loop(out):
        raise ConfigError(f"{cannot} Its symbolic links form a loop. Name another folder.")
    place = real_path(out)
    staging = staging_folder(out)
    for folder, what in sources.items():
        if relation := _relation(place, folder.resolve()):
            raise ConfigError(f"{cannot} It {relation} {what} {folder}. Name another folder.")
        if _relation(staging, folder.resolve()):
            raise ConfigError(f"{cannot} The merge writes to {staging} first, where {what} is. Name another folder.")
    for folder, what in ((Path.cwd(), "the current folder"), (Path("~").expanduser(), "your home folder")):
        if _relation(place, folder.resolve()) in ("is", "contains"):
            raise ConfigError(f"{cannot} It is or contains {what} {folder}. Name a new folder.")
    if staging.is_symlink() or (staging.exists() and not staging.is_dir()):
        raise ConfigError(f"{cannot} The merge writes to {staging} first, which is not a folder. Remove it.")
    if place.exists() and not place.is_dir():
        raise ConfigError(f"{cannot} It is not a folder. Name another folder.")
    foreign = [] if overwrite or not place.is_dir() else list(_foreign_files(place))
    if foreign:
        raise ConfigError(
            f"{cannot} It holds files that are not the result of an earlier merge: {_list(foreign)}. Name a new "
            "folder, or add --overwrite to delete everything in this one."
        )


def _is_loop(path: Path) -> bool:
    """Return whether the symbolic links of ``path`` form a loop. Path.resolve refuses one only before Python 3.13."""
    try:
        path.stat()
    except OSError as error:
        return error.errno == errno.ELOOP
    return False


def staging_folder(out: Path) -> Path:
    """Return the folder in which the files of ``out`` are written before they replace it."""
    place = real_path(out)
    return place.parent / f".{place.name}.partial"


def checkpoint_folders(contents: Contents) -> list[Path]:
    """Return the folders of a checkpoint: the one with the shards, and its parent if that is the checkpoint."""
    folder = contents.folder
    try:
        is_inner = any(folder in layout.find(folder.parent).values() for layout in LAYOUTS)
    except CheckpointError:  # the parent is a checkpoint, but not a complete one
        is_inner = True
    return [folder, folder.parent] if is_inner else [folder]


def _relation(out: Path, source: Path) -> str | None:
    """Return how ``out`` relates to ``source``: ``is``, ``contains``, ``is in``, or None."""
    ours, theirs = _identities(out), _identities(source)
    if out == source or (out.exists() and source.exists() and ours[0] == theirs[0]):
        return "is"
    if out in source.parents or (out.exists() and ours[0] in theirs):
        return "contains"
    return "is in" if source in out.parents or (source.exists() and theirs[0] in ours) else None


def _identities(path: Path) -> list[tuple[int, int]]:
    """Return device and inode of ``path`` and its parents, from the first one that exists."""
    states = [folder.stat() for folder in (path, *path.parents) if folder.exists()]
    return [(state.st_dev, state.st_ino) for state in states]


def _foreign_files(folder: Path) -> Iterator[str]:
    """Yield the names in ``folder`` that the merge whose receipt is there did not write, or that were changed since."""
    try:
        written = MergeReceipt.read(folder / MODEL_RECEIPT).verification.files
    except ShardmakeError:
        yield from sorted(path.name for path in folder.iterdir())
        return
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_dir() and not path.is_symlink():
            continue
        if path.is_symlink() or name not in {MODEL_RECEIPT, MODEL_CARD, *written}:
            yield name
        elif name in written:
            size = written[name].size
            if path.stat().st_size != size or (size <= _SMALL and fingerprint(path) != written[name]):
                yield f"{name} (changed)"


def _list(names: list[str]) -> str:
    rest = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + rest


def find_base(named: str) -> Path:
    """Return the folder that ``named`` is; a hub id (``org/name`` or ``org/name@revision``) is fetched if needed.

    Of a model that is not in the hub's local cache, only the small files are fetched. Its weights are needed for a LoRA
    adapter only, and may be hundreds of gigabytes.

    Raises:
        ConfigError: ``named`` is neither a folder nor a hub id.
        HubError: The hub did not answer or rejected the request.
    """
    path = Path(named).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise ConfigError(f"Cannot use --base {named}. It is a file. Name its folder: {path.absolute().parent}")
    repository, _, revision = named.partition("@")
    if not is_hub_id(repository):
        raise ConfigError(f"Cannot use --base {named}. There is no such folder. Name a folder or a hub id (org/name).")
    return _find_on_hub(repository, revision or None)


def _find_on_hub(repository: str, revision: str | None) -> Path:
    from huggingface_hub import constants, snapshot_download

    cached = cached_snapshot(repository, revision)
    if cached is not None and (cached / "config.json").is_file():
        return cached
    if constants.is_offline_mode():
        raise ConfigError(
            f"Cannot use --base {repository}. It is not in the hub's local cache, and HF_HUB_OFFLINE is set. Name "
            "a folder."
        )
    advice = f"Check the name and the revision, download it with `hf download {repository}`, or name a folder."
    with translate_hub_errors(f"Fetching the base model {repository}", {}, advice):
        return Path(with_retries(lambda: snapshot_download(repository, revision=revision, allow_patterns=AUX_FILES)))
