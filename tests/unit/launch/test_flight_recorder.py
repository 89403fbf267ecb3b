"""Dumps of the flight recorder: they arrive, and torch's tool finds the collective that the ranks hang in."""

import os
import pickle
import time
from pathlib import Path
from typing import Any

import pytest

from shardmake.launch import flight_recorder
from shardmake.launch.flight_recorder import CollectiveHang, analyse_dumps, dump_file, recorder_variables, request_dump
from shardmake.launch.watchdog import Watchdog
from shardmake.run.attempt import AttemptDir
from tests.fork_server import free_port
from tests.unit.launch.conftest import running_ranks

STATES = {"scheduled": (None, None), "started": (1, None), "completed": (1, 2)}


def entry(number: int, state: str = "completed", **changes: Any) -> dict[str, Any]:
    """An entry with the fields that torch 2.13 writes (version 2.10)."""
    started, completed = STATES[state]
    return {
        "frames": [{"name": "all_reduce", "filename": "distributed_c10d.py", "line": 3245}], "record_id": number - 1,
        "pg_id": 0, "process_group": ("0", "default_pg"), "thread_name": "python", "thread_id": "1",
        "collective_seq_id": number, "p2p_seq_id": 0, "op_id": number, "profiling_name": "nccl:all_reduce",
        "time_created_ns": number, "input_sizes": [[4]], "input_dtypes": ["Float"], "output_sizes": [[4]],
        "output_dtypes": ["Float"], "state": state, "time_discovered_started_ns": started,
        "time_discovered_completed_ns": completed, "retired": state == "completed", "timeout_ms": 600000,
        "is_p2p": False,
    } | changes  # fmt: skip


Groups = dict[str, tuple[str, list[int]]]


def find(entries: dict[int, list[dict[str, Any]]], groups: Groups | None = None) -> CollectiveHang:
    """Return the finding for dumps with these entries by rank; ``groups`` have description and ranks by name."""
    groups = groups or {"0": ("default_pg", list(range(max(entries) + 1)))}
    dumps = {}
    for rank in entries:
        groups_of = {n: {"name": n, "desc": desc, "ranks": str(of)} for n, (desc, of) in groups.items() if rank in of}
        dump = {"host_name": f"host_rank{rank}", "rank": rank, "entries": entries[rank], "version": "2.10"}
        dumps[f"nccl-rank-{rank}"] = dump | {"pg_config": groups_of}
    return flight_recorder.find_collective(dumps)


def test_a_rank_that_did_not_join_is_named() -> None:
    waiting = [entry(1), entry(2), entry(3, "started")]
    found = find({0: waiting, 1: waiting[:2], 2: waiting})
    message = "Rank 1 did not join all_reduce number 3 of the group default_pg, in which ranks 0, 2 wait."
    assert found == CollectiveHang(message, frozenset({1}))
    many = {rank: list(waiting) for rank in range(16)} | {5: waiting[:2]}
    assert "in which 15 ranks (0, 1, 2, 3, 4, 6, 7, 8, ...) wait." in find(many).message


def test_a_rank_that_waits_in_another_group_is_a_consequence() -> None:
    """Ranks 0 and 1 shard, 0 and 2 replicate: rank 2 waits for rank 0, and rank 0 for rank 1."""
    groups = {"1": ("shard", [0, 1]), "2": ("shard", [2, 3]), "3": ("replicate", [0, 2])}
    shard = entry(1, "started", process_group=("1", "shard"))
    done = entry(1, process_group=("2", "shard"))
    replicate = entry(1, "started", process_group=("3", "replicate"), record_id=1)
    found = find({2: [done, replicate], 0: [shard], 1: [], 3: [done]}, groups)
    message = "Rank 1 did not join all_reduce number 1 of the group shard, in which rank 0 waits."
    assert found == CollectiveHang(message, frozenset({1}))


@pytest.mark.parametrize(("changes", "words"), [
    ({"profiling_name": "nccl:broadcast"}, "ranks 0, 2: all_reduce number 2 of the group default_pg with input"),
    ({"input_sizes": [[8]], "output_sizes": [[8]]}, "rank 1: all_reduce number 2 of the group default_pg with"),
    ({"input_dtypes": ["BFloat16"], "output_dtypes": ["BFloat16"]}, "BFloat16"),
], ids=["name", "size", "type"])  # fmt: skip
def test_ranks_that_run_different_collectives(changes: dict[str, Any], words: str) -> None:
    same = [entry(1), entry(2, "started")]
    found = find({0: same, 1: [entry(1), entry(2, "started", **changes)], 2: list(same)})
    assert found.message.startswith("The ranks do not run the same collective: ") and words in found.message
    assert not found.missing


@pytest.mark.parametrize("states", [("started", "started"), ("completed", "started"), ("started", "scheduled")])
def test_a_collective_that_all_joined_and_none_or_some_finished(states: tuple[str, str]) -> None:
    """Nothing is known about ranks without a dump, or if all have finished."""
    found = find({rank: [entry(1), entry(2, state), entry(3, "scheduled")] for rank, state in enumerate(states)})
    message = "All ranks joined all_reduce number 2 of the group default_pg, and it did not complete."
    assert found == CollectiveHang(message)
    waiting, groups = [entry(1), entry(2, "started")], {"0": ("default_pg", [0, 1, 2])}
    assert find({0: waiting, 2: list(waiting)}, groups) == CollectiveHang()
    assert find({0: [entry(1)], 1: [entry(1)], 2: [entry(1)]}, groups) == CollectiveHang()


def test_a_dump_is_requested_by_a_byte_in_the_pipe(tmp_path: Path) -> None:
    folder = AttemptDir(tmp_path)
    variables = recorder_variables(folder, tmp_path)
    assert int(variables["TORCH_NCCL_COORD_CHECK_MILSEC"]) < 1000
    stem = variables["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"]
    assert not request_dump(folder, tmp_path, 0), "without NCCL there is no pipe"
    os.mkfifo(f"{stem}0.pipe")
    assert not request_dump(folder, tmp_path, 0), "without the rank there is no reader, and it must not block"
    reader = os.open(f"{stem}0.pipe", os.O_RDONLY | os.O_NONBLOCK)
    assert request_dump(folder, tmp_path, 0)
    assert os.read(reader, 8) == b"1"
    os.close(reader)


def test_a_dump_that_is_still_written_is_incomplete_and_not_analysed(tmp_path: Path) -> None:
    folder = AttemptDir(tmp_path)
    folder.stacks.mkdir()
    assert analyse_dumps(folder) == CollectiveHang()
    content = pickle.dumps({"version": "2.10", "pg_config": {}, "entries": []})
    for part in (b"", content[:10]):
        dump_file(folder, 0).write_bytes(part)
        assert not flight_recorder.is_dumped(folder, 0)
    assert analyse_dumps(folder) == CollectiveHang()
    assert "nccl-rank-0 is not a complete dump" in (folder.stacks / "nccl-analysis.txt").read_text()
    dump_file(folder, 0).write_bytes(content)
    assert flight_recorder.is_dumped(folder, 0)


HANGING = """
import pickle, select
import torch, torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace
dist.init_process_group("gloo", rank=rank, world_size=2)
for _ in range(3):
    dist.all_reduce(torch.ones(4))
if rank == 0:
    work = dist.all_reduce(torch.ones(4), async_op=True)
pipe = os.environ["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] + f"{rank}.pipe"
os.mkfifo(pipe)
reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
write_heartbeat(folder, rank, "train", 3)
while select.select([reader], [], []) and os.read(reader, 1) != b"1":
    time.sleep(0.05)
time.sleep(2)  # as late as torch may look
dump = pickle.loads(_dump_fr_trace(includeStackTraces=False))  # their symbols take seconds
# Gloo leaves name and description of the group empty, NCCL does not. The tool of torch 2.11 knows NCCL's names alone.
for entry in dump["entries"]:
    entry["profiling_name"] = entry["profiling_name"].replace("gloo:", "nccl:")
dump["pg_config"] = {"0": {"name": "0", "desc": "default_pg", "ranks": dump["pg_config"][""]["ranks"]}}
content = pickle.dumps(dump)
with open(os.environ["TORCH_FR_DUMP_TEMP_FILE"] + str(rank), "wb", buffering=0) as file:
    file.write(content[:100])
    time.sleep(1)
    file.write(content[100:])
time.sleep(600)
"""


def test_the_hang_report_names_the_collective_from_real_dumps_that_arrive_late(tmp_path: Path) -> None:
    """Two ranks over gloo, whose recorder has the format of NCCL's."""
    folder = AttemptDir(tmp_path)
    variables = recorder_variables(folder, tmp_path) | {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    variables |= {"MASTER_PORT": str(free_port())}
    with running_ranks(2, folder, HANGING, variables={**os.environ, **variables}):
        watch = Watchdog(folder, range(2), 2, 0.1, folder.heartbeats)
        time.sleep(0.5)
        assert watch.has_hung()
        watch.collect(tmp_path, tmp_path)
    found = folder.read_hang()
    assert found, "the watchdog wrote its finding"
    assert found.rank == 1, "both ranks are outside a collective in their stacks, as with NCCL"
    message = "Rank 1 did not join all_reduce number 4 of the group default_pg, in which rank 0 waits."
    assert found.message.endswith(message)
    assert "missing ranks: {1}" in (folder.stacks / "nccl-analysis.txt").read_text(), "the output of torch's tool"
