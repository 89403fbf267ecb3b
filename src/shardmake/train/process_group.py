"""The process group of the ranks, and how a rank ends."""

import atexit
import os
import sys
import threading
from datetime import timedelta
from typing import NoReturn


def extend_timeouts(timeout: timedelta) -> None:
    """Have the collectives of every process group there is wait for ``timeout``.

    Transformers passes it to the first group alone, and to none without a GPU; DeepSpeed's own groups keep torch's ten
    minutes for NCCL.
    """
    from torch.distributed import distributed_c10d

    for group in distributed_c10d._world.pg_map:
        distributed_c10d._set_pg_timeout(timeout, group)


def leave_together() -> None:
    """End the process group, if there is one: a rank that just goes sometimes aborts after all the work is done."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def end_process() -> NoReturn:
    """End this process with status 0 and without the interpreter's teardown.

    The teardown races with threads that torch has left behind: one rank in some hundreds aborts there
    (``std::terminate``), after all its work is done, and the launcher then ends the other ranks.
    """
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
