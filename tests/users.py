"""Real users without accounts: a forked process of root that takes a number of its own."""

import os
import pickle
from collections.abc import Callable
from typing import Any

ATTACKER, VICTIM = 42011, 42012


def as_user(user: int, function: Callable[[], Any]) -> Any:
    """Return what ``function`` returns in a process of the user number ``user``, or raise its error.

    The process must not import anything: other users may be unable to read the libraries.
    """
    reader, writer = os.pipe()
    if not (pid := os.fork()):
        try:
            os.setgroups([])
            os.setgid(user)
            os.setuid(user)
            os.umask(0o022)
            outcome = (function(), None)
        except BaseException as error:
            outcome = (None, error)
        os.write(writer, pickle.dumps(outcome))
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as answer:
        result, error = pickle.loads(answer.read())
    os.waitpid(pid, 0)
    if error:
        raise error
    return result
