"""Which engine runs a scenario."""

from shardmake.memory.buckets import Buckets
from shardmake.memory.ddp import MemoryEngine
from shardmake.memory.fsdp import Fsdp, Fsdp1
from shardmake.memory.scenario import Scenario
from shardmake.memory.timeline import Timeline
from shardmake.memory.zero import ZeroOneTwo, ZeroThree

ZERO: dict[int, type[MemoryEngine]] = {0: MemoryEngine, 1: ZeroOneTwo, 2: ZeroOneTwo, 3: ZeroThree}


def make_engine(scenario: Scenario, buckets: Buckets, timeline: Timeline) -> MemoryEngine:
    """The engine that runs ``scenario``."""
    if scenario.is_fsdp:
        return (Fsdp1 if scenario.fsdp_version == 1 else Fsdp)(scenario, buckets, timeline)
    return ZERO[scenario.zero_stage](scenario, buckets, timeline)
