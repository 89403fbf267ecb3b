"""Published measurements that are not a training run: one layer, the context, and host RAM while loading.

They check parts of the memory model. The context and NCCL are constants that come from these very sources.
"""

import re
from collections.abc import Callable
from typing import NamedTuple

from benchmarks.old_libraries import OldScenario, micro_step
from benchmarks.published_models import config_file
from shardmake.core.units import GIB
from shardmake.memory import states
from shardmake.memory.host import PROCESS
from shardmake.memory.model import split
from shardmake.memory.read_config import read_model

Row = dict[str, str]


class Part(NamedTuple):
    """An estimate in GiB, and what it is."""

    estimate: float
    figure: str


def one_layer(row: Row) -> Part:
    """Return one layer's forward pass by itself: what it saves and its output (transformers of 2024)."""
    model = read_model(config_file(row["model"]))
    scenario = OldScenario(
        model=model, split=split(model, "full"), strategy="zero2", nodes=1, ranks_per_node=1,
        micro_batch=int(row["micro_batch"]), sequence_length=int(row["seq_len"]), attention="sdpa", transformers_4=True,
    )  # fmt: skip
    events = micro_step(scenario)
    layer = events[events.index(("forward", 0)) : events.index(("forward end", 0))]
    freed = {event[1] for event in layer if event[0] == "free"}
    size = sum(event[2] for event in layer if event[0] == "alloc" and event[1] not in freed)
    return Part(size / GIB, "allocated")


def overhead(row: Row) -> Part:
    """Return the constants for what is outside the allocator; this source is where they come from."""
    nccl = states.NCCL if "NCCL" in row["strategy"] else 0
    return Part((states.CONTEXT + nccl) / GIB, "constant")


def host_load(row: Row) -> Part:
    """Return host RAM at loading under FSDP: rank 0 has all weights and the file that it reads, the others theirs."""
    rank_0 = "rank 0" in row["strategy"]
    weights_and_file = 4 * read_model(config_file(row["model"])).parameters + 5 * 10**9 if rank_0 else 0
    return Part((weights_and_file + PROCESS) / GIB, "host")


PARTS: list[tuple[str, Callable[[Row], Part]]] = [
    ("activation-memory-per-layer", one_layer),
    ("stas00/ml-engineering", overhead),
    ("ram-efficient-pytorch-fsdp", host_load),
]


def part_of(row: Row) -> Part | None:
    """Return the part that ``row`` measures; None if it is a training run."""
    found = (part for pattern, part in PARTS if re.search(pattern, row["source_url"]))
    part = next(found, None)
    return part and part(row)
