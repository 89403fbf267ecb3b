"""Ask Slurm at plan time, with ``sbatch --test-only``, if it would accept a run's jobs and when it would start it."""

import logging
import re
import shlex
import subprocess
import time
from collections.abc import Iterator
from datetime import datetime

from shardmake.config.models import Cluster, Run
from shardmake.config.slurm_options import inherited
from shardmake.core.environment import unset_variable
from shardmake.core.errors import ConfigError
from shardmake.core.units import format_bytes, plural
from shardmake.launch.container import check_container
from shardmake.launch.driver_script import PREFIX, batch_script
from shardmake.launch.slurm_jobs import TRANSIENT, SlurmJobs, run_slurm
from shardmake.launch.slurm_request import memory_in_place_of_the_plans
from shardmake.launch.stage_jobs import ON_GPUS, sbatch_command
from shardmake.run.attempt import AttemptDir
from shardmake.run.driver_job import FOLDER, DriverDir
from shardmake.run.paths import RunDir
from shardmake.run.plan import MemoryEstimates, Plan

logger = logging.getLogger(__name__)
_TEST = "--test-only"
_TEMPORARY = re.compile(r"\bbusy\b|not (available|usable) now|\(down, drained or reserved\)|\(inactive or drain\)")
"""Text of sbatch about nodes, partitions and reservations that cannot start the job at present but may later."""
_REFUSED_TEST = "allocation failure"
"""Text of srun if Slurm refuses the task of a test, whose options srun has read before."""
_OF_THIS_NODE = re.compile(rf"{TRANSIENT.pattern}|plugin|librar", re.IGNORECASE)
"""Text of srun about what the nodes may have, though the login node does not."""
_START = re.compile(r"\bto start at (\S+)")
_MINUTE, _HOUR, _DAY = 60, 3600, 86400


def check_submission(plan: Plan, run: Run, cluster: Cluster, rundir: RunDir) -> None:
    """Let Slurm judge the jobs of the driver, of the training and of the other stages, with their own parameters.

    A job that would wait is not refused. Without an answer, the plan continues. The jobs' container is checked before.

    Raises:
        ConfigError: Slurm refuses a job, and the message has its words; or the container cannot run Shardmake.
    """
    if cluster.executor != "slurm":
        return
    if unset := unset_variable(cluster.scratch):
        logger.info("scratch: the jobs expand %s. %s is not set here.", cluster.scratch, unset)
    check_container(cluster, [rundir.root], [run])
    if cluster.slurm.driver == "job":
        folder = DriverDir(rundir.root.absolute().parent / FOLDER / "NNN")
        script = batch_script(cluster, f"{PREFIX}NNN", folder)
        _judge("the driver", run_slurm("sbatch", _TEST, stdin=script))
    _check_memory(memory_in_place_of_the_plans(cluster), plan)
    _check_step(cluster.slurm.srun_extra)
    _judge("train", run_slurm("sbatch", _TEST, stdin=_training_script(SlurmJobs(rundir.root, cluster, run), plan)))
    for stage in ON_GPUS:
        command = shlex.split(sbatch_command(stage, run, cluster, plan.resources[stage]))
        _judge(stage, run_slurm(*command, _TEST, "--wrap=true"))


def _check_memory(given: int, plan: Plan) -> None:
    if 0 < given < plan.host_memory:  # 0 is all memory of a node
        raise ConfigError(
            f"slurm.extra.mem is {format_bytes(given)} to sbatch, and the training needs "
            f"{format_bytes(plan.host_memory)} on a node. Remove the key, or write at least "
            f"{plan.resources['train'].memory_gib}G with its unit."
        )


def _check_step(options: list[str]) -> None:
    """Let srun read further ``options`` of the training's step, in a test for one task; raise a `ConfigError`."""
    answer = run_slurm("srun", _TEST, *options, "true") if options else None
    if answer is None or answer.returncode == 0 or _REFUSED_TEST in answer.stderr:
        return
    words = _words(answer)
    is_of_site = _words(run_slurm("srun", _TEST, "true")) == words  # such as one that takes no job without an account
    if is_of_site or not answer.stderr.startswith("srun: ") or _OF_THIS_NODE.search(words):
        logger.warning("srun did not say whether it takes slurm.srun_extra (%s). The plan continues.", words)
    else:
        raise ConfigError(f"srun refuses slurm.srun_extra: {words.rstrip('.')}. Correct it in the cluster file.")


def _words(answer: "subprocess.CompletedProcess[str]") -> str:
    return "; ".join(re.sub(r"^s\w+: ((error|fatal): )?", "", line) for line in answer.stderr.splitlines())


def _training_script(jobs: SlurmJobs, plan: Plan) -> str:
    return jobs.script(AttemptDir(RunDir(jobs.run_folder).attempts.absolute() / "NNN"), plan, excluded=[])


def _judge(stage: str, answer: "subprocess.CompletedProcess[str]") -> None:
    """Log what Slurm says about the job of ``stage``, or raise a `ConfigError` if Slurm refuses it."""
    words = _words(answer)
    if answer.returncode == 0:
        logger.info("Slurm would accept the job of %s: %s", stage, words)
    elif answer.returncode == 127 or TRANSIENT.search(words):
        logger.warning(
            "Slurm did not say whether it would accept the job of %s (%s). The plan continues.", stage, words
        )
    elif _TEMPORARY.search(words):
        logger.warning("Slurm would let the job of %s wait: %s", stage, words)
    else:
        raise ConfigError(
            f"Slurm refuses the job of {stage}: {words}. Correct the section slurm of the cluster file. To see the "
            "parameters, run: snakemake -n --profile slurm"
        )


def parse_start(text: str) -> float | None:
    """Return the Unix time of a start as Slurm prints it, in this machine's time zone; None for ``N/A``."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None


def expected_starts(plan: Plan, memory: MemoryEstimates, cluster: Cluster, rundir: RunDir) -> str:
    """Return when Slurm would start the training if it were submitted now, by number of nodes; empty without Slurm.

    Other numbers of nodes are asked for with the planned request per node. If Slurm does not know the start for the
    planned number, it is not asked for others. ``sbatch --test-only`` counts running jobs, not waiting ones.
    """
    if cluster.executor != "slurm":
        return ""
    if closed := _closed_partition(cluster.slurm.partition or inherited("partition")):
        return closed
    parts = []
    for nodes in node_counts(plan.choice.nodes, memory):
        start = _query_start(plan, nodes, cluster, rundir)
        parts.append(f"{plural(nodes + plan.job_nodes - plan.choice.nodes, 'node')}: {_describe(start)}")
        if start is None and nodes == plan.choice.nodes:
            break
    return f"if submitted now, by Slurm's estimate without the jobs that already wait: {'; '.join(parts)}"


def _closed_partition(partition: str | None) -> str:
    """Return a sentence if the partition starts no jobs; empty if it does, or without an answer.

    ``sbatch --test-only`` estimates a start in a partition that is down as if it were up.
    """
    option = [f"--partition={partition}"] if partition else []
    states = run_slurm("sinfo", "--noheader", "--format=%a", *option).stdout.split()
    if not states or "up" in states:
        return ""
    return f"Slurm starts no jobs at present: partition {partition or 'by default'} is {states[0]}"


def node_counts(planned: int, memory: MemoryEstimates) -> Iterator[int]:
    """Yield ``planned``, then the fewest, the next larger and the largest number of nodes on which a candidate fits."""
    yield planned
    fitting = sorted({candidate.choice.nodes for candidate in memory.candidates if candidate.fits})
    larger = [nodes for nodes in fitting if nodes > planned]
    yield from sorted({*fitting[:1], *larger[:1], *larger[-1:]} - {planned})


def _query_start(plan: Plan, nodes: int, cluster: Cluster, rundir: RunDir) -> float | None:
    """Return the Unix time at which Slurm would start the training on ``nodes``; None without an estimate."""
    wanted = plan.model_copy(update={"choice": plan.choice.model_copy(update={"nodes": nodes})})
    script = _training_script(SlurmJobs(rundir.root, cluster), wanted)
    answer = run_slurm("sbatch", _TEST, stdin=script)
    found = _START.search(answer.stderr) if answer.returncode == 0 else None
    return parse_start(found[1]) if found else None


def _describe(start: float | None) -> str:
    """Return ``start`` relative to now, as coarse as the estimate."""
    if start is None:
        return "Slurm does not know when it would start"
    seconds = start - time.time()
    if seconds < _MINUTE:
        return "would start at once"
    if seconds < 2 * _HOUR:
        return f"would start in about {seconds / _MINUTE:.0f} min"
    if seconds < 2 * _DAY:
        return f"would start in about {seconds / _HOUR:.0f} h"
    return f"would start in about {seconds / _DAY:.0f} days"
