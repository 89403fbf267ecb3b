"""The plan stage: choose, check the request against the cluster, write the plan."""

from collections.abc import Callable, Sequence
from html import escape
from typing import NamedTuple

from shardmake.checkpoint.interval import interval_seconds, job_mtbf_seconds, lost_share
from shardmake.config.inputs import check_script
from shardmake.config.models import Cluster, Run
from shardmake.config.script_file import script_file
from shardmake.core.atomic import write_text
from shardmake.core.library_process import one_library_process
from shardmake.core.log import warn_while_slow
from shardmake.core.units import GIB, format_bytes, format_number, plural
from shardmake.memory.hardware import Hardware
from shardmake.memory.host import evaluation_bytes
from shardmake.memory.scenario import BYTES
from shardmake.plan.abilities import describe_quantized_base
from shardmake.plan.candidates import Candidate, describe_choice
from shardmake.plan.choose import NothingFitsError, choose_from
from shardmake.plan.fallbacks import find_fallbacks
from shardmake.plan.limits import check_request, query_partitions
from shardmake.plan.planner import Planner
from shardmake.plan.reasons import describe_scaling, reason_of, rejected
from shardmake.plan.refusals import refuse, wrong_fsdp
from shardmake.plan.resolve import ResolvedRun, check, resolve
from shardmake.plan.suggestions import suggest, suggest_better, suggest_measuring, suggest_smaller_loss
from shardmake.run.disk_budget import check_choice, checkpoint_size
from shardmake.run.own_files import describe_own_files
from shardmake.run.paths import RunDir
from shardmake.run.plan import Choice, Fallback, MemoryEstimates, Plan, Resources

WRITING = 1e9
"""Assumed write speed of the file system until a save has been measured, bytes per second."""
NOT_CHECKED_OFFLINE = ("Slurm", "disk space", "installed packages", "data", "evaluation", "trackers", "destination")
"""Names of the checks that a plan away from the cluster leaves out."""


@one_library_process()
def plan_run(
    run: Run, cluster: Cluster, rundir: RunDir, check_submission: Callable[[Plan], None] = lambda plan: None
) -> Plan:
    """Make the plan of a run and write it with ``memory.json``; ``check_submission`` may refuse it before.

    A refused plan leaves ``memory.json``, so that its figures can be read, unless there is an earlier plan. Raises
    `NothingFitsError`, or another `ShardmakeError` if the cluster or the disk does not have what the plan requests.
    """
    if run.script:
        check_script("script", script_file(run.script))
    plan, memory = _planned(run, cluster, rundir)
    if cluster.executor == "slurm":
        check_request(plan, cluster, query_partitions(hidden=True))
    check_submission(plan)
    check_choice(rundir, memory, plan.choice)
    _write_memory(rundir, memory, plan.choice)
    plan.write(rundir.plan)
    return plan


@one_library_process()
def plan_offline(run: Run, cluster: Cluster, rundir: RunDir) -> Plan:
    """Make the plan of a run away from its cluster, from the model's config.json, and write it with ``memory.json``.

    The plan names what was not checked, so that nothing trains with it. Raises `NothingFitsError`.
    """
    made, memory = _planned(run, cluster, rundir, packages=False)
    plan = made.model_copy(update={"not_checked": list(NOT_CHECKED_OFFLINE)})
    _write_memory(rundir, memory, plan.choice)
    plan.write(rundir.plan)
    return plan


def _planned(run: Run, cluster: Cluster, rundir: RunDir, *, packages: bool = True) -> tuple[Plan, MemoryEstimates]:
    """Return the plan with its advice, and the estimates; without a plan, raise what would fit."""
    with warn_while_slow(f"Planning run {rundir.name}: comparing strategies, nodes and micro batches"):
        refuse(wrong_fsdp(run, cluster))
        try:
            made = choose_run(run, cluster, packages=packages)
        except NothingFitsError as error:
            _write_memory(rundir, memory_estimates(error.settings, error.candidates), None, replaces=False)
            raise NothingFitsError(f"{error}{_advice(error.settings)}", error.settings, error.candidates) from None
        memory = memory_estimates(made.settings, made.candidates)
        _write_memory(rundir, memory, made.chosen.choice, replaces=False)
        return as_plan(rundir.name, made).model_copy(update={"advice": _advice_beside(made)}), memory


def _advice_beside(made: "ChosenRun") -> list[str]:
    """Return the changes that the planner found better than the choice of ``made``, each with what it saves."""
    better = suggest_better(made.settings, made.chosen, made.candidates)
    known = {one.setting for _, one in better}
    smaller = [one for one in suggest_smaller_loss(made.settings, made.chosen) if one.setting not in known]
    return [
        *(f"{gain}: {one}" for gain, one in better),
        *(f"less GPU memory: {one}" for one in smaller),
        *(f"may take less GPU-time: {one}" for one in suggest_measuring(made.settings, made.chosen)),
    ]


def _advice(settings: ResolvedRun) -> str:
    """Return the single changes that would make something fit, or what else to do."""
    if found := suggest(settings):
        return "\nEach of these changes alone would fit, the cheapest first:" + "".join(f"\n  {one}" for one in found)
    return " No single change of the run fits. Change several settings, or use GPUs with more memory."


def _write_memory(rundir: RunDir, memory: MemoryEstimates, chosen: Choice | None, *, replaces: bool = True) -> None:
    """Write the estimates and their table; those of a plan that may be refused replace no others.

    ``chosen`` is None if nothing fits.
    """
    if replaces or not rundir.plan.exists():
        memory.write(rundir.memory)
        write_text(rundir.memory_table, memory_table(memory, chosen))


def memory_table(memory: MemoryEstimates, chosen: Choice | None) -> str:
    """Return an HTML page with a row per candidate: its name, bytes of a rank, seconds per step and reason."""
    heads = ("candidate", f"memory of a rank, of {format_bytes(memory.gpu_memory)}", "s/step", "")
    rows = [f"<tr><th>{'<th>'.join(map(escape, heads))}"]
    for candidate in memory.candidates:
        seconds = format_number(candidate.step_seconds) if candidate.fits else ""
        cells = (candidate.name, format_bytes(candidate.gpu.device), seconds, candidate.reason)
        style = ' style="font-weight: bold"' if candidate.choice == chosen else ""
        rows.append(f"<tr{style}><td>{'<td>'.join(map(escape, cells))}")
    return "\n".join(['<!DOCTYPE html><meta charset="utf-8"><table>', *rows, "</table>\n"])


class ChosenRun(NamedTuple):
    """A run with the choice among its candidates."""

    settings: ResolvedRun
    chosen: Candidate
    fallbacks: list[Candidate]
    candidates: list[Candidate]


def choose_run(run: Run, cluster: Cluster, *, packages: bool = True) -> ChosenRun:
    """Return the choice for ``run`` on ``cluster``, its fallbacks and every candidate.

    Without ``packages``, those that the run needs may be missing here. Raises `ConfigError` if settings contradict each
    other, or nothing fits.
    """
    settings = resolve(run, cluster)
    check(settings, packages=packages)
    planner = Planner(settings)
    chosen, candidates = choose_from(planner)
    fallbacks, candidates = find_fallbacks(chosen, candidates, planner)
    return ChosenRun(settings, chosen, fallbacks, candidates)


def make_plan(name: str, run: Run, cluster: Cluster) -> tuple[Plan, MemoryEstimates]:
    """Return the plan of run ``name`` on ``cluster``, and every candidate with its memory; see `choose_run`."""
    made = choose_run(run, cluster)
    return as_plan(name, made), memory_estimates(made.settings, made.candidates)


def as_plan(name: str, made: ChosenRun) -> Plan:
    """Return the plan of run ``name`` as it is written."""
    settings, chosen, fallbacks, candidates = made
    frozen = settings.split.frozen if settings.split.frozen_names else 0
    return Plan(
        run=name,
        choice=chosen.choice,
        workload=settings.workload,
        reason=" ".join([reason_of(chosen, candidates, fallbacks), *_assumed_network(settings, chosen)]),
        attention_reason=settings.attention_reason,
        service_nodes=settings.run.service_nodes or 0,
        spare_nodes=settings.cluster.slurm.spare_nodes or 0,
        rejected=rejected(chosen, candidates),
        fallbacks=[as_fallback(candidate, settings) for candidate in fallbacks],
        host_memory=host_need(chosen, settings.hardware),
        resources=resources(settings, chosen),
        own_files=[
            *describe_own_files(settings.user_files, chosen.choice, settings.run),
            *describe_quantized_base(settings.model, settings.run),
            *settings.abilities.describe_absent(),
            *([f"freeze: {frozen:,} of {settings.split.total:,} weights are not trained"] if frozen else []),
            *(
                f"learning_rates: {settings.run.learning_rates[pattern]:g} for the {count:,} weights of {pattern}"
                for pattern, count in settings.rate_groups.items()
            ),
            *settings.abilities.describe_experts(),
            *_script_gradients(settings, chosen),
        ],
    )


def _script_gradients(settings: ResolvedRun, chosen: Candidate) -> list[str]:
    """Return a line about the whole gradients that a script's own accumulation would keep under FSDP."""
    choice = chosen.choice
    size = format_bytes(BYTES[choice.gradients] * settings.split.trainable)
    if not settings.run.script or not choice.is_fsdp or choice.gradient_accumulation_steps == 1:
        return []
    return [
        "the memory estimate counts a rank's part of the gradients. A script that accumulates without synchronization "
        "(accelerator.no_sync, or accumulate without sync_each_batch) keeps those of all weights on each GPU: "
        f"{size} more"
    ]


def _assumed_network(settings: ResolvedRun, chosen: Candidate) -> list[str]:
    """Return the bandwidth between nodes that the times count on, if the cluster file does not state it."""
    if chosen.choice.nodes == 1 or "inter_node_gbps" in settings.cluster.model_fields_set:
        return []
    rate = settings.cluster.inter_node_gbps
    return [
        f"The times assume {rate:g} GB/s between nodes ({8 * rate:g} Gbit/s): set inter_node_gbps in the cluster file."
    ]


def resources(settings: ResolvedRun, chosen: Candidate) -> dict[str, Resources]:
    """Return memory and cores per node by stage, with a quarter of headroom, at most those of a node."""
    hardware, model, wanted = settings.hardware, settings.model, settings.run.evaluation
    weights = BYTES[settings.precision] * model.parameters
    ranks = wanted.processes or (1 if hardware.is_cpu else hardware.processes_per_node)
    needs = {
        "consolidate": 2 * GIB + 16 * model.largest_tensor,
        "evaluate": evaluation_bytes(model.parameters, weights, ranks, hardware, wanted.backend),
        "data": 4 * GIB,
    }
    few = min(4, hardware.cpus_per_node)
    asked = {stage: _resources(hardware, needed, few) for stage, needed in needs.items()}
    return {"train": _training_resources(settings, host_need(chosen, hardware)), **asked}


def as_fallback(candidate: Candidate, settings: ResolvedRun) -> Fallback:
    """Return ``candidate`` as it is written to the plan."""
    need = host_need(candidate, settings.hardware)
    asked = _training_resources(settings, need).memory_gib
    return Fallback(choice=candidate.choice, host_memory=need, memory_gib=asked)


def host_need(candidate: Candidate, hardware: Hardware) -> int:
    """Return the host RAM per node in bytes; without GPUs it holds all tensors."""
    tensors = candidate.choice.processes_per_node * candidate.memory.gpu.reserved if hardware.is_cpu else 0
    return candidate.memory.host.total + tensors


def _training_resources(settings: ResolvedRun, needed: int) -> Resources:
    """Return the request of the training job for ``needed`` bytes per node.

    Every node of a job has the same request, and the need of a service is not known: it gets all memory of a node.
    """
    hardware = settings.hardware
    return _resources(hardware, hardware.host_memory if settings.run.service else needed, hardware.cpus_per_node)


def _resources(hardware: Hardware, needed: int, cpus: int) -> Resources:
    gib = -(-int(1.25 * needed) // GIB)
    return Resources(memory_gib=max(1, min(gib, hardware.host_memory // GIB)), cpus=cpus)


def memory_estimates(settings: ResolvedRun, candidates: Sequence[Candidate]) -> MemoryEstimates:
    """Return the content of plan/memory.json."""
    return MemoryEstimates(
        model=settings.model.architecture,
        parameters=settings.model.parameters,
        trainable=settings.split.trainable,
        gpu_memory=settings.hardware.gpu_memory,
        host_memory=settings.hardware.host_memory,
        traced_tokens=Planner(settings).traced_tokens(candidates[0].choice),
        candidates=[candidate.as_record() for candidate in candidates],
    )


def describe(plan: Plan, rundir: RunDir) -> str:
    """Return the plan in a few lines, with the disk space it takes and its fallbacks."""
    choice, asked = plan.choice, plan.resources["train"]
    below = "; ".join(describe_choice(fallback.choice) for fallback in plan.fallbacks)
    checkpointing = "with" if choice.gradient_checkpointing else "without"
    memory = MemoryEstimates.read(rundir.memory)
    place = ", whose activations are held on the host" if plan.workload.activation_offload else ""
    service = (
        f"{plural(plan.service_nodes, 'more node')} for the service, so the job takes {plan.job_nodes} nodes (with "
        "executor: local, this machine runs both). The estimate does not cover the service"
    )
    spare = (
        f"{plural(plan.spare_nodes, 'spare node')}, so an hour of the job takes {plan.job_nodes} node hours instead of "
        f"{choice.nodes}"
    )
    disk = f"not checked: {', '.join(plan.not_checked)}. On the cluster: shardmake plan {plan.run}"
    if not plan.not_checked:
        disk = check_choice(rundir, memory, plan.choice)
    lines = [
        f"{plan.run}: {choice.strategy}, {plural(choice.nodes, 'node')} x {plural(choice.processes_per_node, 'rank')}, "
        f"{plan.precision}, {checkpointing} gradient checkpointing{place}",
        *[service] * bool(plan.service_nodes),
        *[spare] * bool(plan.spare_nodes),
        f"gradients are accumulated and reduced in {choice.gradients}",
        f"global batch {choice.global_batch_size} = {choice.readers} x {choice.micro_batch_size} "
        f"sequences x {plural(choice.gradient_accumulation_steps, 'accumulation step')}",
        f"per node {asked.memory_gib} GiB of RAM and {asked.cpus} cores",
        plan.reason,
        *([describe_scaling(traced, plan.workload.sequence_length)] if (traced := memory.traced_tokens) else []),
        *plan.advice,
        *([f"attention {plan.workload.attention}: {why}"] if (why := plan.attention_reason) else []),
        *plan.own_files,
        disk,
        f"after an out-of-memory: {below or 'the training ends, there is no fallback'}",
        f"{plural(len(plan.rejected), 'other candidate')} and the reason against each: {rundir.plan}",
    ]
    return "\n  ".join(lines)


def describe_checkpoints(plan: Plan, run: Run, cluster: Cluster, rundir: RunDir) -> str:
    """Return the cost of saving: disk space, and time if the interval is automatic."""
    wanted = run.checkpoints
    copies = wanted.most(run.max_steps)
    size = checkpoint_size(rundir, copies)
    room = f"  a checkpoint takes {format_bytes(size)}, {format_bytes((copies + 1) * size)} with those that are kept"
    if wanted.every_steps != "auto":
        return room
    mtbf = job_mtbf_seconds(cluster.node_mtbf_hours, plan.choice.nodes)
    save = waits = size / WRITING
    interval, held = interval_seconds(waits, mtbf), ""
    if wanted.asynchronous:  # every node writes its part at the full speed of the shared file system
        waits = save / plan.choice.nodes
        interval, held = interval_seconds(waits, mtbf, save), f" and blocks training for {waits:.1f} s of it"
    return (
        f"{room};\n  at 1 GB/s a save takes {save:.1f} s{held}: for a failure every {mtbf / 3600:.0f} h, saving every "
        f"{interval / 60:.0f} min loses the least ({lost_share(waits, interval, mtbf):.2%} of the time). "
        "The first save, after 10 steps, is measured and sets the interval"
    )
