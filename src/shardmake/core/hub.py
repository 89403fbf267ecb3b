"""What every conversation with the Hugging Face hub shares: names, patience, and errors in the user's words."""

import hashlib
import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from shardmake.core.errors import ShardmakeError

T = TypeVar("T")
log = logging.getLogger(__name__)

# Seconds before each further attempt. The client retries many single requests itself, but neither all of them nor a
# whole transfer.
RETRY_WAITS = (2.0, 8.0, 30.0)
_PERMANENT = frozenset({400, 401, 402, 403, 404, 410, 413, 422, 451})


def is_hub_id(source: str) -> bool:
    """Whether ``source`` names something on the hub (``org/name``) rather than here."""
    return re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", source) is not None and not Path(source).exists()


def git_object_id(path: Path) -> str:
    """The name git gives a file of this content: SHA-1 of a header and the bytes. The hub lists small files by it."""
    content = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def with_retries(action: Callable[[], T]) -> T:
    """``action``, again after each of `RETRY_WAITS` as long as what went wrong may pass."""
    for wait in RETRY_WAITS:
        try:
            return action()
        except Exception as error:
            if not _may_pass(error):
                raise
            log.warning("Interrupted (%s). Next attempt in %g s.", first_line(error), wait)
            time.sleep(wait)
    return action()


def _may_pass(error: Exception) -> bool:
    """Lost connections, overloaded servers, a commit in between: yes. Refusals and errors in this program: no."""
    from httpx2 import HTTPError

    status = status_of(error)
    if status is not None:
        return status not in _PERMANENT
    if type(error) in (PermissionError, FileNotFoundError):  # as file systems raise them; subclasses mean other things
        return False
    return isinstance(error, (HTTPError, OSError, RuntimeError))


def status_of(error: BaseException | None) -> int | None:
    """HTTP status of ``error`` or of what caused it; None where no server answered."""
    while error is not None:
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status is not None:
            return status
        error = error.__cause__
    return None


@contextmanager
def translate_hub_errors(what: str, advice: Mapping[int, str], otherwise: str) -> Iterator[None]:
    """Turn the client's errors into a `ShardmakeError`: what failed, why, and the advice for its HTTP status."""
    from httpx2 import HTTPError

    try:
        yield
    except ShardmakeError:
        raise
    except (HTTPError, OSError, RuntimeError, ValueError) as error:  # ValueError: what the hub says of a bad upload
        told = first_line(error)
        todo = advice.get(_status_to_explain(error, told), otherwise)
        raise ShardmakeError(f"{what} failed: {told}\n{todo}") from error


def _status_to_explain(error: BaseException, told: str) -> int:
    """HTTP status, 0 for none. An account whose storage is used up is told 403 as well; 402 is what it means."""
    status = status_of(error) or 0
    return 402 if status == 403 and "storage" in told.lower() else status


def first_line(error: BaseException) -> str:
    """The telling line of an error: the server's words, all of a refusal by the client, else the first line."""
    message = getattr(error, "server_message", None)
    if message is None and isinstance(error, ValueError):
        return " ".join(str(error).split())
    message = message or str(error.__cause__ or error)
    return next((line.strip() for line in message.splitlines() if line.strip()), type(error).__name__)
