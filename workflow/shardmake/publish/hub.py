"""Push to the Hugging Face hub: one commit, read back and compared.

Weights are uploaded first and become visible with the commit that names them, all at once, so no reader ever sees half
a model. Uploads are addressed by content: a rerun sends only what is missing, and equal content makes no commit.
"""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from shardmake.config import Push
from shardmake.errors import UserError
from shardmake.hub import explained, git_object_id, retried
from shardmake.manifest import SUMS, parse_sums
from shardmake.publish.bundle import CARD, Bundle

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.hf_api import RepoFile

_ADVICE = {
    401: "The hub does not accept the token. Make a new one with write permission and run `hf auth login`.",
    402: "The account's storage or plan is used up. Free some space there or change the plan.",
    403: "The token may not write there. Take a token with write permission, ask {owner} for the right, or push to "
    "another name.",
    404: "There is no such repository or branch that this token can see. Check push.to and push.revision.",
    413: "A file is too large for the hub. Lower max_shard_size and consolidate again.",
}


class PushDamagedError(RuntimeError):
    """After the commit the hub does not hold what was sent."""


def push_to_hub(bundle: Bundle, repository: str, push: Push, api: "HfApi") -> dict[str, Any]:
    """Make ``repository`` hold ``bundle``; return its address and commit.

    Raises `UserError` if the hub refuses, cannot be reached, or keeps losing files.
    """
    owner = repository.partition("/")[0]
    advice = {status: text.format(owner=owner) for status, text in _ADVICE.items()}
    with explained(f"The push to hub:{repository}", advice, "Nothing is lost: what was uploaded stays. Push again."):
        return retried(lambda: _push_once(bundle, repository, push, api))


def _push_once(bundle: Bundle, repository: str, push: Push, api: "HfApi") -> dict[str, Any]:
    _ensure_repository(repository, push, api)
    head = _head(api, repository, push.revision)
    remote = _list_files(api, repository, head)
    changed = [name for name in bundle.paths if not _holds(remote.get(name), bundle, name)]
    ours = _names_of_last_push(api, repository, head) if SUMS in remote else set()
    _refuse_foreign(repository, [name for name in changed if name in remote], ours)
    stale = sorted((ours & remote.keys()) - bundle.paths.keys())
    commit = _commit(bundle, repository, push, api, head, changed, stale) if changed or stale else head
    _read_back(bundle, repository, api, commit)
    return {"url": f"{api.endpoint}/{repository}/tree/{commit}", "commit": commit}


def _ensure_repository(repository: str, push: Push, api: "HfApi") -> None:
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        is_private = api.repo_info(repository).private
    except RepositoryNotFoundError:
        api.create_repo(repository, private=push.private, exist_ok=True)
        is_private = push.private
    if push.private and not is_private:
        raise UserError(
            f"hub:{repository} is public, and push.private asks for a private repository. "
            "Make it private in its settings, or set `private: false` in push."
        )
    if push.revision is not None:
        api.create_branch(repository, branch=push.revision, exist_ok=True)


def _head(api: "HfApi", repository: str, revision: str | None) -> str:
    commit = api.repo_info(repository, revision=revision).sha
    assert commit is not None, "the hub names the commit of every revision"
    return commit


def _list_files(api: "HfApi", repository: str, commit: str) -> dict[str, "RepoFile"]:
    from huggingface_hub.hf_api import RepoFile

    tree = api.list_repo_tree(repository, recursive=True, revision=commit)
    return {entry.path: entry for entry in tree if isinstance(entry, RepoFile)}


def _holds(remote: "RepoFile | None", bundle: Bundle, name: str) -> bool:
    """Whether the hub's file is ours: by SHA-256 for large files, by git's object id for small ones."""
    wanted = bundle.manifest[name]
    if remote is None or remote.size != wanted.size:
        return False
    if remote.lfs is not None:
        return remote.lfs.sha256 == wanted.sha256
    return remote.blob_id == git_object_id(bundle.paths[name])


def _names_of_last_push(api: "HfApi", repository: str, commit: str) -> set[str]:
    with TemporaryDirectory() as folder:
        path = api.hf_hub_download(repository, SUMS, revision=commit, local_dir=folder)
        return {*parse_sums(Path(path).read_text()), SUMS}


def _refuse_foreign(repository: str, overwritten: list[str], ours: set[str]) -> None:
    """A card made on the web may be replaced; another model may not."""
    if foreign := sorted(set(overwritten) - ours - {CARD}):
        raise UserError(
            f"The name hub:{repository} is taken: it holds files that no push of Shardmake wrote "
            f"({', '.join(foreign[:3])}). Choose another name in push.to, or another push.revision."
        )


def _commit(
    bundle: Bundle, repository: str, push: Push, api: "HfApi", head: str, changed: list[str], stale: list[str]
) -> str:
    """Upload what changed, then make it visible in one commit on top of ``head``; return the commit's id."""
    from huggingface_hub import CommitOperationDelete

    additions = [_addition(bundle, name) for name in changed]
    api.preupload_lfs_files(repository, additions, revision=push.revision, free_memory=False)
    deletions = [CommitOperationDelete(name) for name in stale]
    info = api.create_commit(
        repository,
        [*additions, *deletions],
        commit_message="Push model",
        revision=push.revision,
        parent_commit=head,
    )
    return info.oid


def _addition(bundle: Bundle, name: str) -> "CommitOperationAdd":
    from huggingface_hub import CommitOperationAdd

    addition = CommitOperationAdd(name, bundle.paths[name])
    addition.upload_info.sha256 = bytes.fromhex(bundle.manifest[name].sha256)
    return addition


def _read_back(bundle: Bundle, repository: str, api: "HfApi", commit: str) -> None:
    remote = _list_files(api, repository, commit)
    if wrong := [name for name in bundle.paths if not _holds(remote.get(name), bundle, name)]:
        raise PushDamagedError(
            f"after commit {commit[:12]} the hub lacks or holds other content for: {', '.join(wrong)}"
        )
