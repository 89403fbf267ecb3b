"""``accelerate launch ... -m shardmake.train ATTEMPT``: one rank. Nothing is imported before the signals are set."""

import ctypes
import os
import signal
import sys
from pathlib import Path

PR_SET_PDEATHSIG = 1


def _die_with_launcher() -> None:
    """A rank whose launcher was killed would go on writing; the kernel ends it instead."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == 1:
        sys.exit("The launcher is gone.")


def main() -> None:
    """Run one rank; whatever ends it is kept for the driver."""
    for name in (signal.SIGTERM, signal.SIGUSR2):  # for the worker, which asks by the stop file
        signal.signal(name, signal.SIG_IGN)
    _die_with_launcher()
    folder = Path(sys.argv[1]).resolve()

    from shardmake.attempt import AttemptDir, record_error

    try:
        from shardmake.train.trainer import train

        train(folder)
    except BaseException as error:
        record_error(AttemptDir(folder), int(os.environ.get("RANK", "0")), error)
        raise


if __name__ == "__main__":
    main()
