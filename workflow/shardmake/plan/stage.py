"""The plan stage: choose, hold the request against the cluster, write the plan."""

from shardmake.config import Cluster, Run
from shardmake.plan.figure import draw
from shardmake.plan.limits import ask_partitions, check_request
from shardmake.plan.plan import Plan, as_json
from shardmake.plan.strategy import describe as name_of
from shardmake.plan.strategy import make_plan
from shardmake.receipt import read_json, write_json, write_text
from shardmake.rundir import RunDir
from shardmake.space import check_plan


def plan_run(run: Run, cluster: Cluster, rundir: RunDir) -> Plan:
    """Make the plan of a run and write it with ``memory.json``.

    Raises:
        UserError: nothing fits, or the cluster or the disk cannot give what the plan asks.
    """
    plan, memory = make_plan(rundir.name, run, cluster)
    if cluster.executor == "slurm":
        check_request(plan, cluster, ask_partitions())
    check_plan(rundir, memory, plan.choice)
    write_json(rundir.memory, memory)
    write_text(rundir.memory_figure, draw(memory, plan.choice))
    write_json(rundir.plan, as_json(plan))
    return plan


def describe(plan: Plan, rundir: RunDir) -> str:
    """The plan in a few lines for people, with the disk it takes and the ladder below it."""
    choice, asked = plan.choice, plan.resources["train"]
    checkpointing = "with" if choice.gradient_checkpointing else "without"
    return "\n".join(
        [
            f"{plan.run}: {choice.strategy}, {choice.nodes} node(s) x {choice.processes_per_node} rank(s), "
            f"{choice.precision}, {checkpointing} gradient checkpointing",
            f"  global batch {choice.global_batch_size} = {choice.world_size} ranks x {choice.micro_batch_size} "
            f"sequences x {choice.gradient_accumulation_steps} accumulation steps",
            f"  per node {asked.memory_gib} GiB of RAM and {asked.cpus} cores",
            f"  {plan.reason}",
            f"  {check_plan(rundir, read_json(rundir.memory, f'shardmake plan {plan.run}'), plan.choice)}",
            f"  after an out-of-memory: {'; '.join(map(name_of, plan.ladder)) or 'nothing needs less'}",
            f"  {len(plan.rejected)} other candidates, each with its reason, stand in the plan's folder",
        ]
    )
