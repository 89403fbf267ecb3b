"""``accelerate launch ... -m shardmake.train ATTEMPT``: one rank. Nothing is imported before the signals are set."""

import faulthandler
import os
import signal
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from shardmake.core.process import die_with_parent

if TYPE_CHECKING:
    from shardmake.run.attempt import AttemptDir


def _die_with_launcher() -> None:
    """A rank whose launcher was killed would go on writing; the kernel ends it instead."""
    die_with_parent()
    if os.getppid() == 1:
        sys.exit("The launcher is gone.")


def _show_stacks_on_request(file: Path) -> None:
    """On SIGUSR1, write the stacks of all threads to ``file``, also from inside a call that never returns."""
    file.parent.mkdir(exist_ok=True)
    faulthandler.register(signal.SIGUSR1, file=file.open("w"), all_threads=True)


def main() -> None:
    """Run one rank; whatever ends it is kept for the driver."""
    for name in (signal.SIGTERM, signal.SIGUSR2):  # for the worker, which asks by the stop file
        signal.signal(name, signal.SIG_IGN)
    _die_with_launcher()
    folder = Path(sys.argv[1]).resolve()
    rank = int(os.environ.get("RANK", "0"))

    from shardmake.run.attempt import AttemptDir, record_error, write_heartbeat

    attempt = AttemptDir(folder)
    _show_stacks_on_request(attempt.stack(rank))
    try:
        write_heartbeat(attempt, rank, "start", 0)
        _meet(attempt)
        program(folder)(folder)
    except BaseException as error:
        record_error(attempt, rank, error)
        last = attempt.beat(rank)
        write_heartbeat(attempt, rank, "failed", last.step if last else 0)  # it may take its time to end
        raise
    from shardmake.train.process_group import end_process

    end_process()


def _meet(folder: "AttemptDir") -> None:
    """Find out in a second whether the network between all ranks works; name the node of a rank that did not come."""
    from shardmake.train.network_check import NetworkCheckError, check_all_reduce

    settings = folder.read()
    try:
        check_all_reduce(settings.accelerator == "cpu", settings.planned_bandwidth, print)
    except NetworkCheckError as error:
        beats = [folder.beat(rank) for rank in error.missing]
        error.host = error.host or next((beat.host for beat in beats if beat), None)
        raise


def program(folder: Path) -> Callable[[Path], None]:
    """What ``training.json`` says that the ranks run."""
    from shardmake.core.atomic import read_json
    from shardmake.run.attempt import AttemptDir

    kind = read_json(AttemptDir(folder).training, "shardmake train NAME")["program"]["kind"]
    return import_module(f"shardmake.train.{kind}").train


if __name__ == "__main__":
    main()
