"""``accelerate launch ... -m shardmake.train ATTEMPT``: run one rank, whose signals are set before other imports."""

import faulthandler
import gc
import logging
import os
import signal
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from shardmake.core.atomic import write_bytes
from shardmake.core.environment import UNUSED, hidden, hide, scratch_folder
from shardmake.core.log import configure_logging
from shardmake.core.private_names import check_libraries, library_warnings
from shardmake.core.process import die_with_parent
from shardmake.core.run_folder import make_folder, open_file
from shardmake.core.secrets import redact_output
from shardmake.core.temporary import temporary_folder
from shardmake.train.waiting import wait_for_arguments

if TYPE_CHECKING:
    from shardmake.run.attempt import AttemptDir

_MODULES = {"trainer": "trainer", "script": "user_script"}
"""Module of each kind of program in ``training.json``."""


def main() -> None:
    """Run one rank, and keep the error that ends it for the driver."""
    for name in (signal.SIGTERM, signal.SIGUSR2):  # the worker handles them, and requests a stop by the stop file
        signal.signal(name, signal.SIG_IGN)
    die_with_parent()  # without its launcher the rank would continue to write
    if os.getppid() == 1:
        sys.exit("The rank was not started, because its launcher has ended.")
    rank = int(os.environ.get("RANK", "0"))
    redact_output()
    configure_logging(rank=rank)
    collect_after = gc.get_threshold()
    gc.set_threshold(100_000)  # what is imported stays, and every collection would visit all of it

    from shardmake.run.attempt import (
        AttemptDir,
        Heartbeat,
        heartbeat_file,
        local_heartbeats,
        mark_meeting,
        record_error,
        write_heartbeat,
    )

    if len(sys.argv) > 2:
        load_program(Path(sys.argv[1]))
        import_module("shardmake.train.trainer").import_libraries(Path(sys.argv[1]))
        sys.argv[1:] = wait_for_arguments(int(sys.argv[2]))
    folder = Path(sys.argv[1]).resolve()
    attempt = AttemptDir(folder)
    # The worker requests the stacks with SIGUSR1; faulthandler answers even from inside a call that never returns.
    make_folder(attempt.stacks, parents=False)
    faulthandler.register(signal.SIGUSR1, file=open_file(attempt.stack(rank), "w"), all_threads=True)
    try:
        write_heartbeat(attempt, rank, "start", 0)
        check_libraries()
        for message in library_warnings() if os.environ.get("LOCAL_RANK", "0") == "0" else ():
            logging.getLogger(__name__).warning(message)
        _take_turn(attempt, rank)
        _check_network(attempt, rank)
        mark_meeting()
        train = load_program(folder)
        gc.freeze()
        gc.set_threshold(*collect_after)
        train(folder)
    except BaseException as error:
        record_error(attempt, rank, error)
        last = Heartbeat.read_if_exists(heartbeat_file(local_heartbeats(attempt), rank))
        write_heartbeat(attempt, rank, "failed", last.step if last else 0)  # the process may take long to end
        raise
    from shardmake.train.process_group import end_process

    end_process()


def _take_turn(folder: "AttemptDir", rank: int) -> None:
    """Import the libraries and wait, if this training shares its GPUs with others (`shardmake.run.turns`)."""
    from shardmake.run.attempt import write_heartbeat
    from shardmake.run.turns import takes_turns, wait_for_turn

    if takes_turns():
        os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # an import that asks for GPUs starts no CUDA
        load_program(folder.root)
        if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
            import_module("deepspeed")
        attempt = folder.read()
        name = f"{attempt.rundir.name}-{attempt.number:03d}"
        wait_for_turn(name, rank, lambda: write_heartbeat(folder, rank, "waits for its turn", 0))


def _check_network(folder: "AttemptDir", rank: int) -> None:
    """Check the network between all ranks; add NCCL's messages and the node of a missing rank to the error."""
    from shardmake.train.network_check import CheckSettings, NetworkCheckError, check_all_reduce

    attempt = folder.read()
    with temporary_folder("network", scratch_folder(attempt.scratch)) as local:
        settings = CheckSettings(
            on_cpu=attempt.accelerator == "cpu",
            deadline=attempt.network_check_seconds,
            between_nodes=attempt.planned_bandwidth,
            within_node=attempt.planned_node_bandwidth,
            nccl_log=local / "nccl.txt",
        )
        try:
            check_all_reduce(settings)
        except NetworkCheckError as error:
            if settings.nccl_log and settings.nccl_log.exists():
                kept = folder.nccl_log(rank)
                write_bytes(kept, settings.nccl_log.read_bytes())
                error.args = (f"{error}. NCCL's messages are in {kept}",)
            beats = [folder.beat(rank) for rank in error.missing]
            error.host = error.host or next((beat.host for beat in beats if beat), None)
            raise


def load_program(folder: Path) -> Callable[[Path], None]:
    """Return the function that trains this rank, as ``training.json`` names it."""
    from shardmake.run.attempt import AttemptDir
    from shardmake.run.training_settings import TrainingSettings

    settings = TrainingSettings.read(AttemptDir(folder).training, "shardmake train NAME")
    kind = settings.program.kind
    hide(*settings.unused_packages)
    with hidden(*UNUSED if kind == "trainer" else ()):
        return import_module(f"shardmake.train.{_MODULES[kind]}").train


if __name__ == "__main__":
    main()
