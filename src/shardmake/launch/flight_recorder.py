"""NCCL's flight recorder: each rank's last collectives, dumped at a hang and analysed with torch's own tool."""

import contextlib
import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardmake.core.process import wait_for_output
from shardmake.core.run_folder import open_file, unlink
from shardmake.run.attempt import AttemptDir

if TYPE_CHECKING:
    from torch.distributed.flight_recorder.components.types import Collective

_PREFIX = "nccl-rank-"
_END_OF_PICKLE = b"."
ANALYSIS_SECONDS = 60.0
_LISTED_RANKS = 8


def recorder_variables(folder: AttemptDir, pipes: Path) -> dict[str, str]:
    """Return the variables with which NCCL records its last collectives and dumps them on request.

    The dumps go to the attempt's folder. A byte in ``rank-R.pipe`` in ``pipes``, a folder on the node, requests one.
    """
    return {
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": str(folder.stacks / _PREFIX),
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": str(pipes / "rank-"),
        "TORCH_NCCL_COORD_CHECK_MILSEC": "200",  # torch looks for the byte this often
    }


def request_dump(folder: AttemptDir, pipes: Path, rank: int) -> bool:
    """Ask a rank of this node for its dump; return False if it has no pipe (no NCCL) or does not read it any more."""
    unlink(dump_file(folder, rank))
    try:
        descriptor = os.open(pipes / f"rank-{rank}.pipe", os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return False
    with contextlib.closing(os.fdopen(descriptor, "wb", buffering=0)) as pipe:
        pipe.write(b"1")
    return True


def dump_file(folder: AttemptDir, rank: int) -> Path:
    """Return the path of a rank's dump."""
    return folder.stacks / f"{_PREFIX}{rank}"


def is_dumped(folder: AttemptDir, rank: int) -> bool:
    """Return whether the rank's dump is complete; torch does not write it under another name first."""
    with contextlib.suppress(OSError), dump_file(folder, rank).open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() == _END_OF_PICKLE
    return False


@dataclass(frozen=True)
class CollectiveHang:
    """The collective that the ranks hang in, as the dumps show it; empty if they do not."""

    message: str = ""
    """A sentence about the collective."""
    missing: frozenset[int] = frozenset()
    """Ranks that did not join the collective, and that wait in no other one."""


def analyse_dumps(folder: AttemptDir) -> CollectiveHang:
    """Return the collective that the ranks hang in.

    torch's tool runs in a process of its own, and its output is kept beside the dumps.
    """
    if not any(folder.stacks.glob(f"{_PREFIX}*")):
        return CollectiveHang()
    command = [sys.executable, "-m", __name__, str(folder.stacks)]
    with open_file(folder.stacks / "nccl-analysis.txt", "w") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        printed = (wait_for_output(process, ANALYSIS_SECONDS) or "").splitlines()
    message, missing = json.loads(printed[-1]) if printed else ("", ())  # torch's tool may print before it
    return CollectiveHang(message, frozenset(missing))


def find_collective(dumps: Mapping[str, dict[str, Any]]) -> CollectiveHang:
    """Return the result of `analyse_dumps` for the contents of the dumps, by file name."""
    from torch.distributed.flight_recorder.components.builder import build_db
    from torch.distributed.flight_recorder.components.config_manager import JobConfig

    # Ranks whose states differ count as mismatches too, and after `mismatch_cap` of them the tool stops.
    arguments = JobConfig().parse_args(["", "--allow-incomplete-ranks", "--mismatch_cap", str(sys.maxsize)])
    version = str(next(iter(dumps.values()))["version"])
    return describe_collectives(
        build_db(dict(dumps), arguments, version).collectives, {dump["rank"] for dump in dumps.values()}
    )


def describe_collectives(collectives: "Sequence[Collective]", dumped: Set[int]) -> CollectiveHang:
    """Describe the first collective that some ranks did not join, ran differently or did not finish.

    A rank that did not join may itself wait in a collective of another group. Such collectives are consequences. The
    ``dumped`` ranks are known; nothing is said about a collective that others take part in.
    """
    waited_for = [one for one in collectives if one.missing_ranks]
    waiting = {rank for one in waited_for for rank in one.expected_ranks - (one.missing_ranks or set())}
    waited_for.sort(key=lambda one: not (one.missing_ranks or set()) - waiting)
    if waited_for:
        first = waited_for[0]
        missing = first.missing_ranks or set()
        others = first.expected_ranks - missing
        message = (
            f"{_ranks(missing).capitalize()} did not join {_describe(first)}, in which {_ranks(others)} "
            f"{'waits' if len(others) == 1 else 'wait'}."
        )
        return CollectiveHang(message, frozenset(missing - waiting))
    unlike = next((variants for one in collectives if len(variants := _variants(one)) > 1), None)
    if unlike:
        return CollectiveHang(f"The ranks do not run the same collective: {'; '.join(unlike)}.")
    unfinished = next((one for one in collectives if one.expected_ranks <= dumped and not _is_completed(one)), None)
    if unfinished is None:
        return CollectiveHang()
    return CollectiveHang(f"All ranks joined {_describe(unfinished)}, and it did not complete.")


def _is_completed(collective: "Collective") -> bool:
    others = (collective.mismatch_collectives or {}).values()
    return all(one.collective_state == "completed" for one in (collective, *others))


def _variants(collective: "Collective") -> list[str]:
    """Return what each rank ran as ``collective``, if the ranks ran it in different ways."""
    others = collective.mismatch_collectives or {}
    variants = defaultdict(set)
    for rank in collective.expected_ranks:
        one = others.get(rank, collective)
        # The tool keeps no types, only its own sentence about them.
        types = str(one.type_of_mismatch) if "DTYPE" in str(one.type_of_mismatch) else ""
        variants[f"{_describe(one)} with input {one.input_sizes} {types}".rstrip()].add(rank)
    return [f"{_ranks(ranks)}: {text}" for text, ranks in variants.items()]


def _describe(collective: "Collective") -> str:
    name = collective.collective_name.partition(":")[2]
    return f"{name} number {collective.collective_seq_id} of the group {collective.pg_desc.rpartition(':')[2]}"


def _ranks(ranks: Set[int]) -> str:
    listed = ", ".join(map(str, sorted(ranks)[:_LISTED_RANKS]))
    if len(ranks) > _LISTED_RANKS:
        return f"{len(ranks)} ranks ({listed}, ...)"
    return f"rank{'' if len(ranks) == 1 else 's'} {listed}"


def main(stacks: Path) -> None:
    """Print the result for the dumps in ``stacks`` as one line."""
    from torch.distributed.flight_recorder.components.loader import read_dump

    dumps = {}
    for path in sorted(stacks.glob(f"{_PREFIX}*")):
        try:
            dumps[path.name] = read_dump(_PREFIX, str(path))
        except Exception as error:  # a rank was killed while it wrote its dump
            print(f"{path.name} is not a complete dump: {error}", file=sys.stderr)
    if dumps:
        found = find_collective(dumps)
        print(json.dumps([found.message, sorted(found.missing)]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
