"""The error tree: every error that a user can fix derives from `ShardmakeError`."""

import difflib
from collections.abc import Iterable
from typing import Final

STOPPED: Final = 3
"""Exit status of a command that stopped because a person asked for it."""


class ShardmakeError(ValueError):
    """An error that the user can fix. The command line prints the message without a traceback and exits with 2."""


class LinkError(ShardmakeError):
    """A path in a run's folder is a link, which somebody may have put there, and is not followed."""


class ConfigError(ShardmakeError):
    """The configuration, the cluster file or a command-line option cannot be used."""


class DataError(ShardmakeError):
    """The training or evaluation data cannot be used."""


class ModelError(ShardmakeError):
    """A model folder, its config.json or its weights cannot be used."""


class CheckpointError(ShardmakeError):
    """A checkpoint is missing, incomplete, damaged or in a format that cannot be read."""


class EngineMismatchError(ShardmakeError):
    """The ranks would train with another engine, batch or data than planned."""


class DiskFullError(ShardmakeError):
    """The file system or the user's quota has no room left."""


class SlurmError(ShardmakeError):
    """Slurm rejected a request or did not answer."""


class TooFewNodesError(SlurmError):
    """Slurm has not as many nodes as the job requests, beside those that it excludes."""


class HubError(ShardmakeError):
    """The Hugging Face hub rejected a request or did not answer."""


class PushError(ShardmakeError):
    """The final model could not be pushed, or what arrived is not what was sent."""


class StopRequestedError(ShardmakeError):
    """A person asked the training to stop. The command line prints the message alone and exits with `STOPPED`."""


def is_user_error(name: str) -> bool:
    """Return whether ``name`` is a class of this tree, whose message needs no traceback."""
    kind = globals().get(name)
    return isinstance(kind, type) and issubclass(kind, ShardmakeError)


def nearest(word: str, allowed: Iterable[str]) -> str:
    """Return ``" Did you mean 'zero3'?"`` if ``word`` is similar to one of ``allowed``, else an empty string."""
    matches = difflib.get_close_matches(word, list(allowed), n=1, cutoff=0.6)
    return f" Did you mean {matches[0]!r}?" if matches else ""
