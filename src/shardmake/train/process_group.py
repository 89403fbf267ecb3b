"""Extend the timeouts of process groups, and end a rank cleanly."""

import atexit
import os
import sys
import threading
from datetime import timedelta
from typing import NoReturn

from shardmake.core.private_names import private


def extend_timeouts(timeout: timedelta) -> None:
    """Set the timeout of every existing process group.

    Transformers sets it for the first group only, and for none without a GPU. DeepSpeed's own groups keep torch's ten
    minutes for NCCL.
    """
    from torch.distributed import distributed_c10d

    for group in private(distributed_c10d).world.pg_map:
        group.set_timeout(timeout)


def leave_together() -> None:
    """Destroy the process group, if there is one; a rank that exits without this sometimes aborts at the end."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def end_process() -> NoReturn:
    """Exit with status 0, without the interpreter's teardown.

    The teardown races with threads that torch leaves behind: one rank in several hundred aborts there
    (``std::terminate``) although its work is done, and the launcher then ends the other ranks.
    """
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    private(atexit).run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
