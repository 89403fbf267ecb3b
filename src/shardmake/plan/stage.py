"""The plan stage: choose, hold the request against the cluster, write the plan."""

from pathlib import Path
from typing import Any

from shardmake.checkpoint.interval import interval_seconds, job_mtbf_seconds, lost_share
from shardmake.config.inputs import check_script
from shardmake.config.models import Cluster, Run
from shardmake.core.atomic import write_text
from shardmake.core.errors import ShardmakeError
from shardmake.core.units import GIB, format_bytes
from shardmake.plan.figure import draw
from shardmake.plan.limits import ask_partitions, check_request
from shardmake.plan.planner import (
    Candidate,
    NothingFitsError,
    Planner,
    ResolvedRun,
    check,
    choices,
    choose,
    make_plan,
    resolve,
)
from shardmake.plan.planner import describe as name_of
from shardmake.plan.suggestions import Suggestion, changes, suggestions
from shardmake.run.disk_budget import check_choice, checkpoint_size
from shardmake.run.paths import RunDir
from shardmake.run.plan import MemoryEstimates, Plan

WRITING = 1e9
"""Bytes per second that a file system is assumed to take before a save has been measured."""


def plan_run(run: Run, cluster: Cluster, rundir: RunDir) -> Plan:
    """Make the plan of a run and write it with ``memory.json``.

    Raises:
        ShardmakeError: nothing fits, or the cluster or the disk cannot give what the plan asks.
    """
    if run.script:
        check_script("script", Path(run.script))
    try:
        plan, memory = make_plan(rundir.name, run, cluster)
    except NothingFitsError as error:
        lines = [f"\n  {setting}: {value} ({outcome})" for setting, value, outcome in _remedies(error.settings)]
        raise ShardmakeError(
            f"{error}\nEach of these alone would do:{''.join(lines)}" if lines else str(error)
        ) from None
    if cluster.executor == "slurm":
        check_request(plan, cluster, ask_partitions())
    check_choice(rundir, memory, plan.choice)
    memory.write(rundir.memory)
    write_text(rundir.memory_figure, draw(memory, plan.choice))
    plan.write(rundir.plan)
    return plan


def _remedies(settings: ResolvedRun) -> list[Suggestion]:
    """What alone would make something fit; for models with closed formulas, because tracing so much takes minutes."""
    run = settings.run
    if settings.model.decoder is None:
        return []
    kinds = list(changes(run.nodes or settings.cluster.max_nodes, run.sequence_length, run.method))
    if run.strategy != "auto":
        kinds.insert(0, ("strategy", ["auto"]))
    if settings.precision == "fp32" and not settings.hardware.is_cpu:
        kinds.insert(0, ("precision", ["auto"]))

    def outcome(setting: str, value: Any) -> str | None:
        try:
            found = _choice_of(run.model_copy(update={setting: value}), settings.cluster)
        except (
            ShardmakeError
        ):  # nothing fits, or another setting forbids it: the batch, a package that is not installed
            return None
        return f"{name_of(found.choice)}: {found.memory.gpu.device / GIB:.1f} GiB per GPU"

    return suggestions(kinds, outcome)


def _choice_of(run: Run, cluster: Cluster) -> Candidate:
    """What would be chosen, with as many nodes as ``run`` asks for."""
    most = max(cluster.max_nodes, run.nodes or 0)
    settings = resolve(run, cluster.model_copy(update={"max_nodes": most}))
    check(settings)
    desk = Planner(settings)
    return choose([desk.scan(choice) for choice in choices(desk.settings)], desk)[0]


def describe(plan: Plan, rundir: RunDir) -> str:
    """The plan in a few lines for people, with the disk it takes and the fallbacks below it."""
    choice, asked = plan.choice, plan.resources["train"]
    below = "; ".join(name_of(fallback.choice) for fallback in plan.fallbacks)
    checkpointing = "with" if choice.gradient_checkpointing else "without"
    return "\n".join(
        [
            f"{plan.run}: {choice.strategy}, {choice.nodes} node(s) x {choice.processes_per_node} rank(s), "
            f"{choice.precision}, {checkpointing} gradient checkpointing",
            f"  global batch {choice.global_batch_size} = {choice.readers} x {choice.micro_batch_size} "
            f"sequences x {choice.gradient_accumulation_steps} accumulation steps",
            f"  per node {asked.memory_gib} GiB of RAM and {asked.cpus} cores",
            f"  {plan.reason}",
            f"  {check_choice(rundir, MemoryEstimates.read(rundir.memory), plan.choice)}",
            f"  after an out-of-memory: {below or 'nothing needs less'}",
            f"  {len(plan.rejected)} other candidates, each with its reason, stand in the plan's folder",
        ]
    )


def describe_checkpoints(plan: Plan, run: Run, cluster: Cluster, rundir: RunDir) -> str:
    """What saving will cost: room on disk, and time where the interval is to be found."""
    wanted = run.checkpoints
    copies = wanted.most(run.max_steps)
    size = checkpoint_size(rundir, copies)
    room = f"  a checkpoint takes {format_bytes(size)}, {format_bytes((copies + 1) * size)} with those that are kept"
    if wanted.every_steps != "auto":
        return room
    mtbf = job_mtbf_seconds(cluster.node_mtbf_hours, plan.choice.nodes)
    save = waits = size / WRITING
    interval, held = interval_seconds(waits, mtbf), ""
    if wanted.asynchronous:  # every node writes its part, each as fast as the shared file system takes them all
        waits = save / plan.choice.nodes
        interval, held = interval_seconds(waits, mtbf, save), f" and holds training up for {waits:.1f} s of it"
    return (
        f"{room};\n  at 1 GB/s a save takes {save:.1f} s{held}: for a failure every {mtbf / 3600:.0f} h, saving every "
        f"{interval / 60:.0f} min loses least ({lost_share(waits, interval, mtbf):.2%} of the time). "
        "The first save, after 10 steps, is measured and sets the interval"
    )
