"""Which engine runs a scenario."""

from shardmake.plan.buckets import Buckets
from shardmake.plan.memory.engine import Engine
from shardmake.plan.memory.fsdp import Fsdp, Fsdp1
from shardmake.plan.memory.scenario import Scenario
from shardmake.plan.memory.timeline import Timeline
from shardmake.plan.memory.zero import ZeroOneTwo, ZeroThree

ZERO: dict[int, type[Engine]] = {0: Engine, 1: ZeroOneTwo, 2: ZeroOneTwo, 3: ZeroThree}


def make_engine(scenario: Scenario, buckets: Buckets, timeline: Timeline) -> Engine:
    """The engine that runs ``scenario``."""
    if scenario.is_fsdp:
        return (Fsdp1 if scenario.stack.fsdp1 else Fsdp)(scenario, buckets, timeline)
    return ZERO[scenario.zero_stage](scenario, buckets, timeline)
