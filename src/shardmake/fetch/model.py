"""A model from the hub: the files that loading it needs, at one commit, every one compared with the hub's checksums."""

import json
from collections.abc import Container, Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardmake.core.errors import ShardmakeError
from shardmake.core.hub import git_object_id, translate_hub_errors, with_retries
from shardmake.core.manifest import FileRecord, read_folder, record
from shardmake.run.sources import PinnedSource

if TYPE_CHECKING:
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

_TEXTS = (".json", ".txt", ".model", ".jinja", ".py", ".md", ".tiktoken")
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


def describe_model(api: "HfApi", repository: str, revision: str | None) -> PinnedSource:
    """The model ``repository`` without its weights, in the hub's cache on this machine; the weights' sizes and digests
    are the hub's own.

    Raises ShardmakeError for a model that does not exist, needs a token or a licence, is not whole, or arrives damaged.
    """
    with _advised(api, repository):
        return with_retries(lambda: _describe_once(api, repository, revision))


def fetch_weights(api: "HfApi", source: PinnedSource) -> None:
    """The weights of ``source`` beside what `describe_model` fetched; finished files are not fetched again.

    Raises `ShardmakeError` as `describe_model` does.
    """
    with _advised(api, source.name):
        with_retries(lambda: _fetch_weights_once(api, source))


def _advised(api: "HfApi", repository: str) -> AbstractContextManager[None]:
    page = f"{api.endpoint}/{repository}"
    advice = {
        401: f"It is private, gated or misspelt. Log in with `hf auth login` (or set HF_TOKEN); if {page} asks for its "
        "licence to be accepted, accept it there.",
        403: f"The token's owner has not accepted the licence. Accept it at {page}, or log in as someone who has.",
        404: f"Check the name and the revision: {page}",
    }
    return translate_hub_errors(
        f"Fetching {repository}", advice, "Check the network and fetch again: finished files are kept."
    )


def _describe_once(api: "HfApi", repository: str, revision: str | None) -> PinnedSource:
    from huggingface_hub.hf_api import RepoFile

    commit = api.model_info(repository, revision=revision).sha
    assert commit is not None, "the hub names the commit of every revision"
    tree = api.list_repo_tree(repository, recursive=True, revision=commit)
    listed = {entry.path: entry for entry in tree if isinstance(entry, RepoFile)}
    names = choose_files(listed)
    later = {name: FileRecord(entry.size, entry.lfs.sha256) for name, entry in _weights(names, listed).items()}
    now = [name for name in names if name not in later]
    # by the branch's name, so that the cache knows the name offline; a branch that moved meanwhile is asked for again
    folder = Path(api.snapshot_download(repository, revision=revision, allow_patterns=now))
    if folder.name != commit:
        raise RuntimeError(f"{repository} changed during the fetch")
    files = {name: later.get(name) or _checked(folder / name, listed[name]) for name in names}
    check_model_folder(folder, later)
    return PinnedSource(name=repository, revision=revision, commit=commit, path=str(folder), files=files)


def _weights(names: Iterable[str], listed: Mapping[str, "RepoFile"]) -> dict[str, Any]:
    """The large files of the weights, as the hub lists them; a file that git holds is small."""
    return {name: listed[name] for name in names if is_weights(name) and listed[name].lfs}


def is_weights(name: str) -> bool:
    """Whether a file of a model holds weights."""
    return name.endswith((".safetensors", ".bin"))


def _fetch_weights_once(api: "HfApi", source: PinnedSource) -> None:
    names = [name for name in source.files if is_weights(name)]
    folder = Path(api.snapshot_download(source.name, revision=source.commit, allow_patterns=names))
    for name in names:
        _keep_if(record(folder / name) == source.files[name], folder / name)


def find_in_cache(repository: str, revision: str | None) -> PinnedSource:
    """The model as it lies in the hub's cache here, without asking the hub; `ShardmakeError` where it does not."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(repository, revision=revision, local_files_only=True))
    except LocalEntryNotFoundError:
        raise ShardmakeError(
            f"The model {repository} is not here, and HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set. "
            f"Unset it where there is internet, or copy the model here and name its folder."
        ) from None
    check_model_folder(folder)
    return PinnedSource(
        name=repository, revision=revision, commit=folder.name, path=str(folder), files=read_folder(folder)
    )


def choose_files(names: Iterable[str]) -> list[str]:
    """What loading needs of a repository's files: texts and one set of weights, safetensors where there are any.

    Copies of the weights for other libraries and everything in subfolders stay where they are.
    """
    here = [name for name in names if "/" not in name]
    safetensors = [name for name in here if name.endswith(".safetensors")]
    usual = [name for name in safetensors if not name.startswith("consolidated")]
    weights = (
        usual or safetensors or [name for name in here if name.startswith("pytorch_model") and name.endswith(".bin")]
    )
    return sorted([*weights, *(name for name in here if name.endswith(_TEXTS) or name.startswith("LICENSE"))])


def _checked(path: Path, listed: "RepoFile") -> FileRecord:
    """Size and digest of a fetched file, which must be the hub's."""
    entry = record(path)
    is_same = entry.sha256 == listed.lfs.sha256 if listed.lfs else git_object_id(path) == listed.blob_id
    _keep_if(is_same and entry.size == listed.size, path)
    return entry


def _keep_if(is_same: bool, path: Path) -> None:
    """Remove a file that is not the hub's, so that it is fetched again."""
    if not is_same:
        path.resolve().unlink()
        path.unlink(missing_ok=True)
        raise RuntimeError(f"{path.name} arrived damaged")


def check_model_folder(folder: Path, to_come: Container[str] = ()) -> None:
    """Refuse a model folder that lacks its config, a file of its weights that is not ``to_come``, or a tokenizer."""
    missing = [] if (folder / "config.json").is_file() else ["config.json"]
    missing += _missing_weights(folder, to_come)
    if not any((folder / name).is_file() for name in _TOKENIZERS):
        missing.append("a tokenizer (tokenizer.json or tokenizer.model)")
    if missing:
        raise ShardmakeError(
            f"The model in {folder} is not whole: it lacks {', '.join(missing)}. "
            "Copy the rest, or name the hub's id of the model instead of a folder."
        )


def _missing_weights(folder: Path, to_come: Container[str]) -> list[str]:
    def is_there(name: str) -> bool:
        return name in to_come or ((folder / name).is_file() and (folder / name).stat().st_size > 0)

    index = next((folder / name for name in _INDEXES if (folder / name).is_file()), None)
    if index is not None:
        shards = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        return [name for name in shards if not is_there(name)]
    whole = any(is_there(name) for name in ("model.safetensors", "pytorch_model.bin"))
    return [] if whole else ["its weights (model.safetensors)"]
