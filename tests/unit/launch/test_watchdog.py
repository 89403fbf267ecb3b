"""Detection of hangs, and of the rank that caused one."""

import errno
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import pytest

from shardmake.launch import watchdog
from shardmake.launch.watchdog import Watchdog, allowance, describe_hang, find_culprit, overdue, rank_state
from shardmake.run import attempt
from shardmake.run.attempt import AttemptDir, Heartbeat, NodeHeartbeats, RankState, heartbeat_file, write_heartbeat
from tests.finished_run import make_exit
from tests.unit.launch.conftest import running_ranks

WAITING = 'File "torch/distributed/distributed_c10d.py", line 1 in all_reduce'
BUSY = 'File "data.py", line 7 in __getitem__'


def beat(rank: int = 0, phase: str = "train", step: int = 9, time: float = 1000.0, usual: float = 1.0) -> Heartbeat:
    values = {"host": f"c{rank + 1}", "pid": 0, "phase": phase, "step": step, "time": time}
    return Heartbeat(rank=rank, median_step_seconds=usual, **values)


@pytest.mark.parametrize(("phase", "usual", "seconds"), [
    ("train", 0.0, 600), ("train", 2.0, 600), ("train", 200.0, 1000), ("save", 2.0, 3600), ("load", 0.0, 3600),
    ("script", 0.0, float("inf")),
])  # fmt: skip
def test_allowances(phase: str, usual: float, seconds: float) -> None:
    assert allowance(beat(phase=phase, usual=usual), 600) == seconds


@pytest.mark.parametrize(("hang_seconds", "timeout"), [(600, 7200), (1.5, 1800)])
def test_timeouts_of_torch_exceed_every_allowance(hang_seconds: float, timeout: int) -> None:
    assert allowance(beat(phase="save"), hang_seconds) < attempt.collective_timeout(hang_seconds) == timeout


def test_the_rank_overdue_for_longest_is_found(tmp_path: Path) -> None:
    beats = [beat(0, time=1000), beat(1, time=900), beat(2, phase="save", time=100)]
    assert overdue(beats, 1599, 600) == beats[1]
    assert overdue(beats, 1499, 600) is None
    watch = Watchdog(AttemptDir(tmp_path), range(2), 2, 0.01, tmp_path / "heartbeat")
    write_heartbeat(AttemptDir(tmp_path), 0, "load", 0)
    time.sleep(0.1)
    assert watch.has_hung() and watch.missed and watch.missed.phase in ("start", "load"), "also without a heartbeat"


def at(rank: int, stack: str, *state: str, step: int = 9) -> RankState:
    return rank_state(beat(rank, step=step), stack, *state)


@pytest.mark.parametrize(("ranks", "missing", "named"), [
    ([at(0, WAITING), at(1, "", "stopped")], set(), 1), ([at(0, WAITING), at(1, WAITING, step=8)], set(), 1),
    ([at(0, BUSY), at(1, WAITING), at(2, WAITING)], set(), 0), ([at(0, WAITING), at(1, WAITING)], set(), None),
    ([at(0, BUSY), at(1, BUSY), at(2, WAITING)], set(), None), ([at(rank, BUSY) for rank in range(3)], {1}, 1),
    ([at(0, BUSY), at(1, WAITING), at(2, WAITING)], {2}, 2), ([at(0, BUSY), at(1, ""), at(2, BUSY)], {2}, 1),
    ([at(0, BUSY), at(1, WAITING), at(2, WAITING)], {1, 2}, None),
    ([at(0, BUSY), at(1, BUSY), at(2, WAITING)], {1, 2}, 1), ([at(rank, BUSY) for rank in range(3)], set(), None),
])  # fmt: skip
def test_the_culprit_by_stacks_or_its_collective(ranks: list[RankState], missing: set[int], named: int | None) -> None:
    """NCCL's calls return at once: ranks that wait are elsewhere, and their stacks show no collective."""
    found = find_culprit(ranks, missing)
    assert (found.rank if found else None) == named
    hang = describe_hang(beat(), ranks, 1700, missing)
    assert hang.rank == named and "No progress for 700 s in phase 'train' after step 9" in hang.message
    assert hang.host == (None if named is None else f"c{named + 1}")


STUCK = """
write_heartbeat(folder, rank, "train", 3)
def stuck_here(): time.sleep(60)
stuck_here()
"""


def test_two_nodes_collect_the_stacks_of_real_processes(tmp_path: Path) -> None:
    """Node 0 misses a heartbeat, node 1 learns of it from the file; the stopped rank is the culprit."""
    folder = AttemptDir(tmp_path)
    with running_ranks(2, folder, STUCK) as ranks, ThreadPoolExecutor(2) as pool:
        os.kill(ranks[1].pid, signal.SIGSTOP)
        nodes = [Watchdog(folder, range(n, n + 1), 2, limit, folder.heartbeats) for n, limit in ((0, 0.1), (1, 600))]
        assert not nodes[1].has_hung()
        time.sleep(0.2)
        assert [node.has_hung() for node in nodes] == [True, True]
        list(pool.map(lambda node: node.collect(tmp_path, tmp_path), nodes))
    found = folder.read_hang()
    assert found and found.rank == 1 and "(its process is stopped)" in found.message
    assert "stuck_here" in folder.stack(0).read_text()


WAITING_RANK = """
from torch.utils.file_baton import FileBaton
write_heartbeat(folder, 0, "load", 0)
FileBaton(sys.argv[3]).wait()
"""


def test_a_hang_names_the_lock_of_a_kernel_that_ranks_wait_for(tmp_path: Path) -> None:
    folder, lock = AttemptDir(tmp_path), tmp_path / "kernels/cpu_adam/lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    with running_ranks(1, folder, WAITING_RANK, str(lock)):
        watch = Watchdog(folder, range(1), 1, 0.01, folder.heartbeats)
        time.sleep(0.5)
        assert watch.has_hung()
        watch.collect(tmp_path, lock.parent.parent)
    found = folder.read_hang()
    assert found and f"Rank 0 waits for the lock of a kernel's build: {lock}." in found.message


def test_stacks_are_synced_before_the_states_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On NFS a file that stays open shows other nodes nothing until it is synced."""
    folder, synced = AttemptDir(tmp_path), []

    sync = lambda descriptor: synced.append(Path(f"/proc/self/fd/{descriptor}").readlink())  # noqa: E731
    for rank in (0, 1):
        beat(rank).write(heartbeat_file(folder.heartbeats, rank))
    folder.stacks.mkdir()
    folder.stack(0).write_text("stuck_here")  # rank 1 does not answer
    folder.hang.touch()
    monkeypatch.setattr(watchdog, "_ANSWER_SECONDS", 0.1)
    monkeypatch.setattr(watchdog.os, "fsync", sync)
    monkeypatch.setattr(watchdog.NodeStates, "write", lambda states, path: synced.append(path))
    Watchdog(folder, range(2), 2, 600, folder.heartbeats).collect(tmp_path, tmp_path)
    assert synced == [folder.stack(0), folder.stacks / "node-0.json"]


@pytest.mark.parametrize("clocks", [("time", "monotonic"), ("time",)], ids=["pause", "clock-set"])
def test_a_pause_of_all_is_not_a_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clocks: tuple[str, ...]) -> None:
    folder = AttemptDir(tmp_path)
    write_heartbeat(folder, 0, "train", 3)
    watch = Watchdog(folder, range(1), 1, 600, folder.heartbeats)

    def jump(seconds: float) -> None:
        for name in clocks:
            now = getattr(time, name)
            monkeypatch.setattr(watchdog.time, name, lambda now=now: now() + seconds)

    jump(5000)
    assert not watch.has_hung(), "the ranks paused too"
    for _ in range(39):
        jump(15)
        assert not watch.has_hung()
    jump(15)
    assert watch.has_hung(), "the ranks had their time since the pause"


def test_ranks_that_cannot_write_a_heartbeat_do_not_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watchdog(AttemptDir(tmp_path), range(1), 1, 0.05, tmp_path / "heartbeat")
    time.sleep(0.4)

    with monkeypatch.context() as full:
        full.setattr(watchdog, "open_file", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
        assert not watch.has_hung()
    assert not watch.has_hung(), "their time starts again"
    time.sleep(0.4)
    assert watch.has_hung()


def test_ranks_whose_peers_failed_elsewhere_are_abandoned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = AttemptDir(tmp_path)
    watch = Watchdog(folder, range(1, 2), 2, 600, folder.heartbeats)
    record = make_exit()
    record.write(folder.exit_record(0))
    monkeypatch.setattr(watchdog, "ABANDONED_SECONDS", 0.2)
    assert not watch.is_abandoned(), "a node that has finished"
    record.model_copy(update={"returncode": 1}).write(folder.exit_record(0))
    assert not watch.is_abandoned(), "its own ranks may still report the cause"
    time.sleep(0.3)
    assert watch.is_abandoned()


def test_a_node_copies_heartbeats_in_one_file_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, local, now = AttemptDir(tmp_path / "attempt"), tmp_path / "scratch", [100.0]
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: now[0])
    dog = Watchdog(folder, range(8, 16), 512, 600, local)
    folder.root.mkdir()
    for rank in (8, 9):
        beat(rank, time=time.time()).write(heartbeat_file(local, rank))
    assert not dog.has_hung()
    assert [copied.rank for copied in folder.node_beats(1)] == [8, 9]
    assert [path.name for path in folder.heartbeats.iterdir()] == ["node-1.json"]
    beat(8, step=10, time=time.time()).write(heartbeat_file(local, 8))
    seen = []
    for _ in range(3):
        now[0] += 5  # 64 nodes write ten files a second together: each waits 6.4 s
        dog.has_hung()
        seen.append(folder.node_beats(1)[0].step)
    assert seen == [9, 10, 10]
    folder.root.rename(tmp_path / "moved")
    now[0] += 50
    assert not dog.has_hung() and not folder.root.exists(), "nothing appears under the old path of a moved checkout"


def test_a_node_without_states_is_described_by_heartbeats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its worker was killed. The rank of a node that never wrote anything has no known host."""
    folder = AttemptDir(tmp_path)
    monkeypatch.setattr(watchdog, "_OTHER_NODES_SECONDS", 0)
    monkeypatch.setattr(watchdog, "_ANSWER_SECONDS", 0)
    NodeHeartbeats(beats=[beat(1)]).write(folder.node_heartbeats(1))
    folder.stacks.mkdir()
    dog = Watchdog(folder, range(1), 2, 600, tmp_path / "scratch")
    dog.missed = beat(0)
    folder.stack(0).write_text(WAITING)
    dog.collect(tmp_path, tmp_path)
    found = folder.read_hang()
    assert found and (found.rank, found.host) == (1, "c2") and "unreachable" in found.message
    folder.node_heartbeats(1).unlink()
    dog.collect(tmp_path, tmp_path)
    found = folder.read_hang()
    assert found and (found.rank, found.host) == (1, None) and "a node that is not known" in found.message
