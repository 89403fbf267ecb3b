"""Requests to the Hugging Face hub: names, retries and error messages."""

import hashlib
import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from json import JSONDecodeError
from pathlib import Path
from socket import gaierror
from typing import TYPE_CHECKING, Any, Final, TypeVar

from shardmake.core.errors import HubError, ShardmakeError

if TYPE_CHECKING:
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

T = TypeVar("T")
logger = logging.getLogger(__name__)

# Seconds before each further attempt. The client retries many single requests, but not all of them and not a whole
# transfer.
RETRY_WAITS = (2.0, 8.0, 30.0)
_LONGEST_WAIT = 600.0  # seconds, if a server requests a longer one
_NO_NETWORK = (
    "This machine does not reach the hub. Fetch on a machine with internet access and the same folders, such "
    "as a login node: shardmake fetch NAME. Or set HTTPS_PROXY, or name a local folder in place of the hub id."
)
_ANSWER_SECONDS: Final = 4.5
"""Seconds for the first answer of a hub, whose client asks twice. A firewall that drops packets would take minutes."""
_PERMANENT = frozenset({400, 401, 402, 403, 404, 410, 413, 422, 451})


def is_hub_id(source: str) -> bool:
    """Return whether ``source`` is a hub id (``org/name``) and not a path on this machine."""
    return re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", source) is not None and not Path(source).exists()


def cached_snapshot(repository: str, revision: str | None) -> Path | None:
    """Return the folder of a model in the hub's local cache without a request; None if it is not there."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(repository, revision=revision, local_files_only=True))
    except LocalEntryNotFoundError:
        return None


def connect() -> "HfApi":
    """Return the hub's client, with the user's token if there is one."""
    from huggingface_hub import HfApi

    return HfApi(endpoint=os.environ.get("HF_ENDPOINT"))


def commit_of(api: "HfApi", repository: str, revision: str | None, *, kind: str = "model") -> str:
    """Return the commit of a revision of a repository."""
    commit = api.repo_info(repository, revision=revision, repo_type=kind, timeout=_ANSWER_SECONDS).sha
    assert commit is not None, "the hub names the commit of every revision"
    return commit


def list_files(api: "HfApi", repository: str, commit: str) -> dict[str, "RepoFile"]:
    """Return the files of a model's repository by their paths."""
    from huggingface_hub.hf_api import RepoFile

    tree = api.list_repo_tree(repository, recursive=True, revision=commit)
    return {entry.path: entry for entry in tree if isinstance(entry, RepoFile)}


def git_object_id(path: Path) -> str:
    """Return git's object id of the file, SHA-1 of a header and the content. The hub lists it for small files."""
    content = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def with_retries(action: Callable[[], T], *, is_first: bool = False) -> T:
    """Return the result of ``action``; after a temporary error, retry it after each of `RETRY_WAITS`.

    ``is_first``: nothing was transferred before, so a hub that cannot be reached is waited for only once.
    """
    for wait in RETRY_WAITS:
        try:
            return action()
        except Exception as error:
            if not _is_temporary(error) or is_untrusted(error):
                raise
            failed = _unreached(error) if is_first else None
            if failed and (wait > RETRY_WAITS[0] or not isinstance(failed, OSError)):
                raise
            asked = getattr(_response_of(error), "headers", {}).get("Retry-After", "")
            seconds = max(wait, min(float(asked), _LONGEST_WAIT) if asked.isdecimal() else 0.0)
            logger.warning("The transfer was interrupted: %s. Retrying in %g s.", first_line(error), seconds)
            time.sleep(seconds)
    return action()


def _unreached(error: BaseException | None) -> BaseException | None:
    """Return the cause if the hub was not reached, as on a machine without internet: no address, or no answer."""
    while error is not None and not isinstance(error, (gaierror, ConnectionRefusedError)):
        if type(error).__name__ == "ConnectTimeout":
            break
        error = error.__cause__ or error.__context__
    return error


UNTRUSTED: Final = (
    "No authority that Python knows signed the server's certificate, as with a private authority or a proxy that "
    "inspects traffic. Set SSL_CERT_FILE (for s3:// AWS_CA_BUNDLE) to your site's file of authorities; "
    "REQUESTS_CA_BUNDLE and CURL_CA_BUNDLE are not read."
)


def is_untrusted(error: BaseException | None) -> bool:
    """Return whether a server's certificate was refused, by ``error`` or by its cause."""
    while error is not None:
        if "CERTIFICATE_VERIFY_FAILED" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def ask_endpoint() -> str:
    """Return the address of the hub, which answered; raise a `HubError` with the reason if it does not."""
    from huggingface_hub import get_session
    from huggingface_hub.constants import ENDPOINT

    otherwise = "Check HF_ENDPOINT, HTTPS_PROXY and NO_PROXY. Where nothing is fetched, this does not matter."
    with translate_hub_errors(f"The hub {ENDPOINT}", {}, otherwise):
        get_session().head(ENDPOINT, timeout=10)
    return str(ENDPOINT)


def _is_temporary(error: Exception) -> bool:
    """Return True for lost connections, overloaded servers and concurrent commits, False for rejected requests."""
    from huggingface_hub.errors import HTTPError

    status = status_of(error)
    if status is not None:
        return status not in _PERMANENT or _is_expired_address(error)
    if isinstance(error, JSONDecodeError):  # the page of a proxy in place of the hub's answer
        return True
    if type(error) in (PermissionError, FileNotFoundError):  # as file systems raise them; subclasses have other causes
        return False
    return isinstance(error, (HTTPError, OSError, RuntimeError))


def status_of(error: BaseException | None) -> int | None:
    """Return the HTTP status of ``error`` or of its cause; None if no server answered."""
    return getattr(_response_of(error), "status_code", None)


def _response_of(error: BaseException | None) -> Any:
    """Return the server's response in ``error`` or in its cause; None if no server answered."""
    while error is not None:
        response = getattr(error, "response", None)
        if getattr(response, "status_code", None) is not None:
            return response
        error = error.__cause__
    return None


def _is_expired_address(error: BaseException) -> bool:
    """Return whether storage rejects an upload. Its address is signed for a time, and only there is PUT used."""
    response = _response_of(error)
    return status_of(error) == 403 and getattr(getattr(response, "request", None), "method", "") == "PUT"


@contextmanager
def translate_hub_errors(what: str, advice: Mapping[int, str], otherwise: str) -> Iterator[None]:
    """Turn the client's errors into a `HubError` with the advice for the HTTP status, or else ``otherwise``.

    ``what`` is the request, as the subject of the message.
    """
    from huggingface_hub.errors import HTTPError

    try:
        yield
    except ShardmakeError:
        raise
    except (HTTPError, OSError, RuntimeError, ValueError) as error:  # ValueError: the hub rejects an upload
        reason = first_line(error)
        away = f"{otherwise}\n{_NO_NETWORK}" if _unreached(error) else None
        known = UNTRUSTED if is_untrusted(error) else away
        status = 0 if _is_expired_address(error) else status_of(error) or 0
        if status == 403 and "storage" in reason.lower():  # for a full account, which has the advice for 402
            status = 402
        todo = known or advice.get(status, otherwise)
        raise HubError(f"{what} failed: {reason}\n{todo}") from error


def first_line(error: BaseException) -> str:
    """Return the line that explains ``error``: the server's message, a whole `ValueError`, or the first line."""
    message = getattr(error, "server_message", None)
    if isinstance(error, JSONDecodeError):
        return "the answer is not JSON but a page, most likely of a proxy or of a login"
    if message is None and isinstance(error, ValueError):
        return " ".join(str(error).split())
    message = message or str(error.__cause__ or error)
    return next((line.strip() for line in message.splitlines() if line.strip()), type(error).__name__)
