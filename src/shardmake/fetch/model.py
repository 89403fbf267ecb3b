"""Fetch the files of a model from the hub, at one commit, each compared with the hub's checksums."""

import json
from collections.abc import Container, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from shardmake.checkpoint.formats import quantized
from shardmake.checkpoint.formats.huggingface import MODEL, MODEL_BIN, is_licence
from shardmake.core.errors import ModelError
from shardmake.core.hub import cached_snapshot, commit_of, git_object_id, list_files, translate_hub_errors, with_retries
from shardmake.core.manifest import FileRecord, read_folder, record
from shardmake.run.sources import PinnedSource

if TYPE_CHECKING:
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

FETCH_AGAIN = "Check the network and fetch again. Finished files are kept."
_TEXTS = (".json", ".txt", ".model", ".jinja", ".py", ".md", ".tiktoken")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


def describe_model(api: "HfApi", repository: str, revision: str | None) -> PinnedSource:
    """Fetch the model ``repository`` without its weights into the hub's cache; list the weights with the hub's digests.

    Raises `HubError` or `ModelError` for a model that does not exist, needs a token or a licence, is incomplete, or
    arrives damaged.
    """
    with _with_advice(api, repository):
        return with_retries(lambda: _describe_once(api, repository, revision), is_first=True)


def fetch_weights(api: "HfApi", source: PinnedSource) -> None:
    """Fetch the weights of ``source`` next to the files of `describe_model`; do not fetch finished files again.

    Raises the errors of `describe_model`.
    """
    with _with_advice(api, source.name):
        with_retries(lambda: _fetch_weights_once(api, source))


def _with_advice(api: "HfApi", repository: str) -> AbstractContextManager[None]:
    page = f"{api.endpoint}/{repository}"
    advice = {
        401: f"It is private, gated or misspelt. Log in with `hf auth login` (or set HF_TOKEN). If {page} shows a "
        "licence, accept it there.",
        403: f"The token's owner has not accepted the licence. Accept it at {page}, or log in as someone who has.",
        404: f"Check the name and the revision: {page}",
    }
    return translate_hub_errors(f"Fetching {repository}", advice, FETCH_AGAIN)


def _describe_once(api: "HfApi", repository: str, revision: str | None) -> PinnedSource:
    commit = commit_of(api, repository, revision)
    listed = list_files(api, repository, commit)
    names = choose_files(listed)
    large = {
        name: FileRecord(entry.size, entry.lfs.sha256)
        for name, entry in listed.items()
        if name in names and is_weights(name) and entry.lfs  # files stored in git are small
    }
    small = [name for name in names if name not in large]
    # by branch name, so that the cache resolves the name offline; a branch that moved meanwhile is fetched again
    folder = Path(api.snapshot_download(repository, revision=revision, allow_patterns=small))
    if folder.name != commit:
        raise RuntimeError(f"{repository} changed during the fetch")
    files = {name: large.get(name) or _checked(folder / name, listed[name]) for name in names}
    check_model_folder(folder, large)
    return PinnedSource(name=repository, revision=revision, commit=commit, path=str(folder), files=files)


def is_weights(name: str) -> bool:
    """Return True if a file of a model contains weights."""
    return name.endswith((".safetensors", ".bin"))


def is_description(name: str) -> bool:
    """Return True if a file of a model contains neither weights nor their index."""
    return not is_weights(name) and not name.endswith(".index.json")


def _fetch_weights_once(api: "HfApi", source: PinnedSource) -> None:
    names = [name for name in source.files if is_weights(name)]
    folder = Path(api.snapshot_download(source.name, revision=source.commit, allow_patterns=names))
    for name in names:
        _remove_unless(record(folder / name) == source.files[name], folder / name)


def find_in_cache(repository: str, revision: str | None) -> PinnedSource:
    """Return the model from the hub's local cache without a request; raise `ModelError` if it is not cached."""
    folder = cached_snapshot(repository, revision)
    if folder is None:
        raise ModelError(
            f"Model not found: {repository} is not in the local cache, and HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is "
            "set. Unset it on a machine with internet access, or copy the model here and name its folder."
        )
    check_model_folder(folder)
    pinned = {"name": repository, "revision": revision, "commit": folder.name, "path": str(folder)}
    return PinnedSource(**pinned, files=read_folder(folder))


def choose_files(names: Iterable[str]) -> list[str]:
    """Return the files needed to load a model: text files and one set of weights, safetensors if available.

    Weights for other libraries and files in subfolders are not included.
    """
    top_level = [name for name in names if "/" not in name]
    safetensors = [name for name in top_level if name.endswith(".safetensors")]
    ours = [name for name in safetensors if not name.startswith("consolidated")]
    pickled = [name for name in top_level if name.startswith("pytorch_model") and name.endswith(".bin")]
    weights = ours or safetensors or pickled
    return sorted([*weights, *(name for name in top_level if name.endswith(_TEXTS) or is_licence(name))])


def _checked(path: Path, listed: "RepoFile") -> FileRecord:
    """Return size and digest of a fetched file after comparing them with the hub's."""
    entry = record(path)
    is_same = entry.sha256 == listed.lfs.sha256 if listed.lfs else git_object_id(path) == listed.blob_id
    _remove_unless(is_same and entry.size == listed.size, path)
    return entry


def _remove_unless(is_same: bool, path: Path) -> None:
    """Remove a file that differs from the hub's and raise, so that it is fetched again."""
    if not is_same:
        blob = path.resolve()
        path.unlink()
        if blob.parent == path.parents[2].resolve() / "blobs":  # of the hub's cache, and nobody's file behind a link
            blob.unlink(missing_ok=True)
        raise RuntimeError(f"{path.name} arrived damaged")


def check_model_folder(folder: Path, pending: Container[str] = ()) -> None:
    """Raise `ModelError` for a model folder without config, tokenizer or a weight file that is not ``pending``."""
    missing = [] if (folder / "config.json").is_file() else ["config.json"]
    missing += _missing_weights(folder, pending)
    if not any((folder / name).is_file() for name in _TOKENIZERS):
        missing.append("a tokenizer (tokenizer.json or tokenizer.model)")
    if missing:
        raise ModelError(
            f"Model folder {folder} is incomplete: missing {', '.join(missing)}. "
            "Copy the missing files, or name the model's hub id instead of a folder."
        )


def _missing_weights(folder: Path, pending: Container[str]) -> list[str]:
    def is_available(name: str) -> bool:
        return name in pending or ((folder / name).is_file() and (folder / name).stat().st_size > 0)

    for files in (MODEL, MODEL_BIN):  # in the order of transformers
        if files.single in pending or (folder / files.single).is_file():  # an empty one, too
            return [] if is_available(files.single) else [f"the content of {files.single}, which is empty"]
        if (folder / files.index).is_file():
            shards = sorted(set(json.loads((folder / files.index).read_text())["weight_map"].values()))
            return [name for name in shards if not is_available(name)]
    return ["its weights (model.safetensors)"]


def check_types(folder: Path) -> None:
    """Raise `ModelError` for quantized weights that config.json does not declare; the plan refuses declared ones."""
    if quantized.declared(json.loads((folder / "config.json").read_text())):
        return
    if found := quantized.find_quantized(folder):
        raise ModelError(
            f"Model cannot be trained: its config.json declares no quantized weights, but {found.name} in {folder} has "
            f"the type {found.dtype}. Name the same model in 16 or 32 bits, or copy the config.json that was published "
            "with these weights."
        )
