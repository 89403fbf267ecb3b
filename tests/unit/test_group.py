import subprocess
import sys

RANK = """
import atexit, sys, threading, time
from shardmake.train.group import end_process

def upload():
    time.sleep(0.3)
    print("the thread ended", flush=True)

atexit.register(print, "atexit ran")
threading.Thread(target=upload).start()
sys.stdout.write("buffered")
end_process()
"""


def test_a_rank_ends_after_its_threads_and_what_was_registered_for_its_exit() -> None:
    done = subprocess.run([sys.executable, "-c", RANK], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "bufferedthe thread ended\natexit ran\n", "")
