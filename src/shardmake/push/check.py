"""Check a push before anything is queued: protocol, package, token, a writable folder, secrets in the base model."""

from pathlib import Path

from shardmake.config.models import Push
from shardmake.consolidate.aux_files import find_aux_files
from shardmake.core.errors import PushError
from shardmake.core.secrets import public_url
from shardmake.core.stores import protocol_problem, takes_login
from shardmake.core.temporary import temporary_folder
from shardmake.push.bundle import find_leaking
from shardmake.push.folder import refuse_foreign
from shardmake.push.hub import connect


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
