"""The one error type that people read: it says what is wrong and what to do about it."""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """Something the user can mend. The command line prints the message alone, without a traceback, and exits 2."""


def nearest(word: str, allowed: Iterable[str]) -> str:
    """``" Did you mean 'zero3'?"`` for a near miss of one of ``allowed``, else an empty string."""
    matches = difflib.get_close_matches(word, list(allowed), n=1, cutoff=0.6)
    return f" Did you mean {matches[0]!r}?" if matches else ""
