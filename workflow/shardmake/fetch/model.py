"""A model from the hub: the files that loading it needs, at one commit, every one compared with the hub's checksums."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from shardmake.errors import UserError
from shardmake.hub import explained, git_object_id, retried
from shardmake.manifest import FileRecord, read_folder, record
from shardmake.sources import Source

if TYPE_CHECKING:
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

_TEXTS = (".json", ".txt", ".model", ".jinja", ".py", ".md", ".tiktoken")
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


def fetch_model(api: "HfApi", repository: str, revision: str | None) -> Source:
    """The model ``repository`` in the hub's cache on this machine; files that are there are not fetched again.

    Raises `UserError` for a model that does not exist, needs a token or a licence, or arrives damaged.
    """
    page = f"{api.endpoint}/{repository}"
    advice = {
        401: f"It is private, gated or misspelt. Log in with `hf auth login` (or set HF_TOKEN); if {page} asks for its "
        "licence to be accepted, accept it there.",
        403: f"The token's owner has not accepted the licence. Accept it at {page}, or log in as someone who has.",
        404: f"Check the name and the revision: {page}",
    }
    with explained(f"Fetching {repository}", advice, "Check the network and fetch again: finished files are kept."):
        return retried(lambda: _fetch_once(api, repository, revision))


def _fetch_once(api: "HfApi", repository: str, revision: str | None) -> Source:
    from huggingface_hub.hf_api import RepoFile

    commit = api.model_info(repository, revision=revision).sha
    assert commit is not None, "the hub names the commit of every revision"
    tree = api.list_repo_tree(repository, recursive=True, revision=commit)
    listed = {entry.path: entry for entry in tree if isinstance(entry, RepoFile)}
    names = choose_files(listed)
    # by the branch's name, so that the cache knows the name offline; a branch that moved meanwhile is asked for again
    folder = Path(api.snapshot_download(repository, revision=revision, allow_patterns=names))
    if folder.name != commit:
        raise RuntimeError(f"{repository} changed during the fetch")
    files = {name: _checked(folder / name, listed[name]) for name in names}
    check_model_folder(folder)
    return Source(name=repository, revision=revision, commit=commit, path=str(folder), files=files)


def find_in_cache(repository: str, revision: str | None) -> Source:
    """The model as it lies in the hub's cache here, without asking the hub; `UserError` where it does not."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(repository, revision=revision, local_files_only=True))
    except LocalEntryNotFoundError:
        raise UserError(
            f"The model {repository} is not here, and HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set. "
            f"Unset it where there is internet, or copy the model here and name its folder."
        ) from None
    check_model_folder(folder)
    return Source(name=repository, revision=revision, commit=folder.name, path=str(folder), files=read_folder(folder))


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
    """Size and digest of a fetched file; one that is not the hub's is removed, to be fetched again."""
    entry = record(path)
    is_same = entry.sha256 == listed.lfs.sha256 if listed.lfs else git_object_id(path) == listed.blob_id
    if not is_same or entry.size != listed.size:
        path.resolve().unlink()
        path.unlink(missing_ok=True)
        raise RuntimeError(f"{path.name} arrived damaged")
    return entry


def check_model_folder(folder: Path) -> None:
    """Refuse a model folder that lacks its config, a file of its weights, or a tokenizer."""
    missing = [] if (folder / "config.json").is_file() else ["config.json"]
    missing += _missing_weights(folder)
    if not any((folder / name).is_file() for name in _TOKENIZERS):
        missing.append("a tokenizer (tokenizer.json or tokenizer.model)")
    if missing:
        raise UserError(
            f"The model in {folder} is not whole: it lacks {', '.join(missing)}. "
            "Copy the rest, or name the hub's id of the model instead of a folder."
        )


def _missing_weights(folder: Path) -> list[str]:
    index = next((folder / name for name in _INDEXES if (folder / name).is_file()), None)
    if index is not None:
        shards = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        return [name for name in shards if not (folder / name).is_file() or not (folder / name).stat().st_size]
    whole = any((folder / name).is_file() for name in ("model.safetensors", "pytorch_model.bin"))
    return [] if whole else ["its weights (model.safetensors)"]
