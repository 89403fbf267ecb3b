"""Push to the Hugging Face hub: one commit, read back and compared.

Weights are uploaded first and become visible with the commit that names them, all at once, so no reader ever sees half
a model. Uploads are addressed by content: a rerun sends only what is missing, and equal content makes no commit.
"""

import hashlib
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TypeVar

from shardmake.config import Push
from shardmake.errors import UserError
from shardmake.publish.bundle import CARD, Bundle
from shardmake.publish.manifest import SUMS, parse_sums

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.hf_api import RepoFile

T = TypeVar("T")
log = logging.getLogger(__name__)

# Seconds before each further attempt. The client retries single requests itself; not creation, and not the whole.
RETRY_WAITS = (2.0, 8.0, 30.0)
_PERMANENT = frozenset({400, 401, 402, 403, 404, 410, 413, 422, 451})
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
    with _explained(repository):
        return _retried(lambda: _push_once(bundle, repository, push, api), RETRY_WAITS)


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


def git_object_id(path: Path) -> str:
    """The name git gives a file of this content: SHA-1 of a header and the bytes."""
    content = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


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


def _retried(action: Callable[[], T], waits: tuple[float, ...]) -> T:
    """``action``, again after each wait as long as what went wrong may pass."""
    for wait in waits:
        try:
            return action()
        except Exception as error:
            if not _may_pass(error):
                raise
            log.warning("The push was interrupted (%s). Next attempt in %g s.", _first_line(error), wait)
            time.sleep(wait)
    return action()


def _may_pass(error: Exception) -> bool:
    """Lost connections, overloaded servers, a commit in between: yes. Refusals and errors in this program: no."""
    from httpx2 import HTTPError

    status = _status(error)
    if status is not None:
        return status not in _PERMANENT
    return isinstance(error, (HTTPError, OSError, RuntimeError))


def _status(error: BaseException | None) -> int | None:
    """HTTP status of ``error`` or of what caused it."""
    while error is not None:
        response = getattr(error, "response", None)
        if response is not None:
            return response.status_code
        error = error.__cause__
    return None


@contextmanager
def _explained(repository: str) -> Iterator[None]:
    """Turn the client's errors into what to do about them."""
    from httpx2 import HTTPError

    try:
        yield
    except (HTTPError, OSError, RuntimeError) as error:
        owner = repository.partition("/")[0]
        advice = _ADVICE.get(_status(error) or 0, "Nothing is lost: what was uploaded stays. Push again.")
        raise UserError(
            f"The push to hub:{repository} failed: {_first_line(error)}\n{advice.format(owner=owner)}"
        ) from error


def _first_line(error: BaseException) -> str:
    """The telling line of an error; the client's begin with the status and go on with hints."""
    message = getattr(error, "server_message", None) or str(error.__cause__ or error)
    return next((line.strip() for line in message.splitlines() if line.strip()), type(error).__name__)
