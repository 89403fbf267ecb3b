"""Check a push before anything is queued: protocol, package, token, a writable folder, secrets in the base model.

What was pushed is looked at again before something is removed because it was pushed.
"""

import logging
from collections.abc import Mapping
from pathlib import Path

from shardmake.config.models import Push
from shardmake.consolidate.aux_files import find_aux_files
from shardmake.core.errors import PushError, ShardmakeError
from shardmake.core.manifest import FileRecord, differences, read_folder
from shardmake.core.secrets import public_url
from shardmake.core.stores import protocol_problem, takes_login
from shardmake.core.temporary import temporary_folder
from shardmake.push.bundle import find_leaking
from shardmake.push.folder import refuse_foreign
from shardmake.push.hub import connect
from shardmake.push.object_store import missing_in_store
from shardmake.run.receipts import PushedTo

logger = logging.getLogger(__name__)


def check_push(push: Push | None, base: Path) -> None:
    """Raise `ShardmakeError` if a push can be seen to fail; ``base`` is the base model's folder."""
    check_destinations(push)
    if push and (leaking := find_leaking(find_aux_files(base))):
        raise PushError(
            f"Push is not possible: {', '.join(map(str, leaking))} contains what looks like a token or password, and "
            "would be pushed with the model. Remove it there."
        )


def check_destinations(push: Push | None) -> None:
    """Raise `ShardmakeError` if a destination can be seen to be unusable from this machine and without the network."""
    for destination in push.destinations if push else ():
        kind, _, place = destination.partition(":")
        if kind == "file":
            refuse_foreign(Path(place))
            _check_writable(Path(place))
        elif kind == "hub":
            connect(place)
        else:
            _check_protocol(destination)


def _check_writable(target: Path) -> None:
    """Raise `PushError` unless a folder can be made in the nearest existing folder above ``target``."""
    existing = next(folder for folder in target.absolute().parents if folder.exists())
    try:
        with temporary_folder("probe", existing):
            pass
    except OSError as error:
        raise PushError(
            f"Push to file:{target} is not possible: no folder can be created in {existing}: {error.strerror}. "
            "Make that folder writable, or name another one in push.to."
        ) from None


def _check_protocol(destination: str) -> None:
    """Raise `PushError` if fsspec does not know the protocol, lacks its package, or cannot use the login in the URL."""
    problem, public = protocol_problem(destination), public_url(destination)
    if not problem and public != destination and not takes_login(destination):
        problem = (
            f"{public.partition('://')[0]}:// takes no user or password in a URL. Remove them from push.to, and give "
            "the credentials as the store's own tools take them."
        )
    if problem:
        raise PushError(f"Push to {public} is not possible: {problem}")


def problems_at(destination: PushedTo, files: Mapping[str, FileRecord]) -> list[str]:
    """Return one sentence per file that is missing or different at ``destination``, or why it cannot be read.

    Every byte of a folder is read. Of an object store, sizes and the list of checksums are, which a push writes last.
    The hub is not asked; a log line says that its copy was compared when it was pushed.
    """
    kind, _, place = destination.to.partition(":")
    if kind == "hub":
        logger.info("%s was compared when it was pushed (commit %s), not now.", destination.to, destination.commit)
        return []
    try:
        if kind == "file":
            found = read_folder(folder := Path(place))
            problems = differences(files, found) if found else [f"the folder {folder} is missing or empty"]
            return [f"{destination.to}: {problem}" for problem in problems]
        missing = missing_in_store(files, destination.to)
    except ShardmakeError as error:
        return [str(error)]
    except OSError as error:
        if kind != "file":
            raise
        return [f"{destination.to}: {error.filename} cannot be read: {error.strerror}"]
    logger.info("%s has all files by size and by its list of checksums; they were not read again.", destination.to)
    return [f"{destination.to}: {name} is missing or different" for name in missing]
