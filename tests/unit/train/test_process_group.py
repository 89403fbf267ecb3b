import subprocess
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from shardmake.train.process_group import extend_timeouts

RANK = """
import atexit, sys, threading, time
from shardmake.train.process_group import end_process

def upload():
    time.sleep(0.3)
    print("the thread ended", flush=True)

atexit.register(print, "atexit ran")
threading.Thread(target=upload).start()
sys.stdout.write("buffered")
end_process()
"""


def test_rank_ends_after_its_threads_and_exit_handlers() -> None:
    done = subprocess.run([sys.executable, "-c", RANK], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "bufferedthe thread ended\natexit ran\n", "")


def test_every_process_group_gets_the_timeout(one_rank: None) -> None:
    """Torch gives a group that an engine creates the default timeout."""
    groups = [dist.group.WORLD, dist.new_group([0])]
    extend_timeouts(timedelta(seconds=7200))
    backends = [group._get_backend(torch.device("cpu")) for group in groups]
    assert [backend.options._timeout for backend in backends] == [timedelta(seconds=7200)] * 2
