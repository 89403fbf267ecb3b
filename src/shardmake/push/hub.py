"""Push to the Hugging Face hub: one commit, read back and compared.

Weights are uploaded first and become visible with the commit that names them, all at once, so a reader never sees a
partial model. Uploads are addressed by content: a rerun sends only what is missing, and equal content makes no commit.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from shardmake.config.models import Push
from shardmake.core import hub
from shardmake.core.errors import HubError, PushError
from shardmake.core.hub import first_line, git_object_id, translate_hub_errors, with_retries
from shardmake.core.manifest import SUMS, parse_sums
from shardmake.core.temporary import temporary_folder
from shardmake.push.bundle import Bundle
from shardmake.run.paths import MODEL_CARD

if TYPE_CHECKING:
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

_TITLE = "Push model"
_GROUP = 5
"""Files that the client sends at once; each group has retries of its own, so a long push survives many cuts."""
_ADVICE = {
    400: "The hub rejected the content. Its message above names the cause, usually in the base model's card.",
    401: "The hub rejected the token. Create a new one with write permission and run `hf auth login`.",
    402: "The account's storage or plan is exhausted. Free some space there or change the plan.",
    403: "The token has no write permission there. Use a token with write permission, ask {owner} for access, or push "
    "to another name.",
    404: "The repository or branch does not exist, or the token cannot see it. Check push.to and push.revision.",
    413: "A file is too large for the hub. Lower max_shard_size and consolidate again.",
}


class PushDamagedError(RuntimeError):
    """After the commit the hub does not have the content that was sent."""


@dataclass(frozen=True)
class _Place:
    """A repository and revision; ``opens_request``: push as a new pull request against ``revision``."""

    api: "HfApi"
    repository: str
    revision: str | None
    opens_request: bool = False


def push_to_hub(bundle: Bundle, repository: str, push: Push, api: "HfApi") -> dict[str, str]:
    """Make ``repository`` hold ``bundle``; return its address and commit.

    Raises `HubError` if the hub refuses, cannot be reached, or repeatedly loses files.
    """
    owner = repository.partition("/")[0]
    advice = {status: text.format(owner=owner) for status, text in _ADVICE.items()}
    otherwise = "Uploaded files are kept. Push again."
    with translate_hub_errors(f"The push to hub:{repository}", advice, otherwise), _explain_xet(repository):
        return with_retries(lambda: _push_once(bundle, repository, push, api))


@contextmanager
def _explain_xet(repository: str) -> Iterator[None]:
    """Raise a `HubError` with advice if the hub has no addresses of the protocol xet, which it offers for a file."""
    try:
        yield
    except Exception as error:
        reason = first_line(error)
        if "404" not in reason or "/xet-" not in reason:
            raise
        raise HubError(
            f"The push to hub:{repository} failed: {reason}\nThis hub does not support uploads with xet. "
            "Set HF_HUB_DISABLE_XET=1 and push again."
        ) from error


def connect(repository: str) -> "HfApi":
    """Return the hub's client with the user's token; refuse offline mode and a missing token."""
    from huggingface_hub import constants, get_token

    if constants.is_offline_mode():
        raise HubError(
            f"Push to hub:{repository} is not possible while HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set. "
            "Unset it for the push, on a machine with internet."
        )
    if get_token() is None:
        raise HubError(
            f"Push to hub:{repository} is not possible: it needs a token with write permission, and there is none. "
            "Run `hf auth login`, or set HF_TOKEN, and run the command again."
        )
    return hub.connect()


def _push_once(bundle: Bundle, repository: str, push: Push, api: "HfApi") -> dict[str, str]:
    _ensure_repository(repository, push, api)
    place = _place(repository, push, api)
    head = hub.commit_of(api, repository, place.revision)
    remote = hub.list_files(api, repository, head)
    changed = [name for name in bundle.paths if not _holds(remote.get(name), bundle, name)]
    ours = _names_of_last_push(place, head) if SUMS in remote else set()
    overwritten = [name for name in changed if name in remote]
    _refuse_foreign(place, head, remote, overwritten, ours)
    stale = sorted((ours & remote.keys()) - bundle.paths.keys())
    if changed or stale:
        _refuse_public(repository, push, api)  # as it is now, after a transfer of hours
    commit = _commit(bundle, place, head, changed, stale) if changed or stale else head
    _read_back(bundle, place, commit)
    return {"url": f"{api.endpoint}/{repository}/tree/{commit}", "commit": commit}


def _ensure_repository(repository: str, push: Push, api: "HfApi") -> None:
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        api.repo_info(repository)
    except RepositoryNotFoundError:
        api.create_repo(repository, private=push.private, exist_ok=True)
    _refuse_public(repository, push, api)
    if push.revision is not None:
        api.create_branch(repository, branch=push.revision, exist_ok=True)


def _refuse_public(repository: str, push: Push, api: "HfApi") -> None:
    """Raise a `PushError` if the hub says that a repository is public which has to be private."""
    if push.private and not api.repo_info(repository).private:
        raise PushError(
            f"Push refused: hub:{repository} is public, but push.private requests a private repository. "
            "Make it private in its settings, or set `private: false` in push."
        )


def _place(repository: str, push: Push, api: "HfApi") -> _Place:
    """Return the branch, the open pull request of an earlier push of this user, or a new pull request."""
    if not push.pull_request:
        return _Place(api, repository, push.revision)
    requests = api.get_repo_discussions(repository, discussion_type="pull_request", discussion_status="open")
    alike = [request for request in requests if request.title == _TITLE]
    me = api.whoami()["name"] if alike else ""
    ours = next((request.git_reference for request in alike if request.author == me), None)
    return _Place(api, repository, ours or push.revision, opens_request=ours is None)


def _holds(remote: "RepoFile | None", bundle: Bundle, name: str) -> bool:
    """Compare the hub's file with ours, by SHA-256 for large files and by git's object id for small ones."""
    wanted = bundle.manifest[name]
    if remote is None or remote.size != wanted.size:
        return False
    if remote.lfs is not None:
        return remote.lfs.sha256 == wanted.sha256
    return remote.blob_id == git_object_id(bundle.paths[name])


def _names_of_last_push(place: _Place, commit: str) -> set[str]:
    with temporary_folder("sums") as folder:
        path = place.api.hf_hub_download(place.repository, SUMS, revision=commit, local_dir=folder)
        return {*parse_sums(Path(path).read_text()), SUMS}


def _refuse_foreign(
    place: _Place, head: str, remote: dict[str, "RepoFile"], overwritten: list[str], ours: set[str]
) -> None:
    """Raise `PushError` if a push would overwrite another model; a card made on the web may be replaced.

    A hub may list a commit incompletely for a moment, so a listing counts if a second one equals it.
    """
    foreign = sorted(set(overwritten) - ours - {MODEL_CARD})
    if not foreign:
        return
    if hub.list_files(place.api, place.repository, head) != remote:
        raise PushDamagedError(f"the hub listed the files of commit {head[:12]} in two ways")
    raise PushError(
        f"Push refused: hub:{place.repository} contains files that no push of Shardmake wrote "
        f"({', '.join(foreign[:3])}). Choose another name in push.to, or another push.revision."
    )


def _commit(bundle: Bundle, place: _Place, head: str, changed: list[str], stale: list[str]) -> str:
    """Upload changed files, make them visible in one commit on top of ``head``, and return its id."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    request = place.opens_request
    additions = [CommitOperationAdd(name, bundle.paths[name]) for name in changed]
    for addition in additions:
        addition.upload_info.sha256 = bytes.fromhex(bundle.manifest[addition.path_in_repo].sha256)
    for start in range(0, len(additions), _GROUP):
        upload = partial(place.api.preupload_lfs_files, place.repository, additions[start : start + _GROUP])
        with_retries(partial(upload, revision=place.revision, create_pr=request, free_memory=False))
    info = place.api.create_commit(
        place.repository, [*additions, *(CommitOperationDelete(name) for name in stale)], commit_message=_TITLE,
        revision=place.revision, parent_commit=head, create_pr=request,
    )  # fmt: skip
    return info.oid


def _read_back(bundle: Bundle, place: _Place, commit: str) -> None:
    remote = hub.list_files(place.api, place.repository, commit)
    if wrong := [name for name in bundle.paths if not _holds(remote.get(name), bundle, name)]:
        raise PushDamagedError(
            f"after commit {commit[:12]} the hub has no or different content for: {', '.join(wrong)}"
        )
