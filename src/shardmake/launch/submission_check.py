"""Ask Slurm at plan time whether it would accept the jobs of a run, with ``sbatch --test-only``."""

import logging
import re
import shlex
import subprocess

from shardmake.config.models import Cluster, Run
from shardmake.core.errors import ConfigError
from shardmake.launch.container import check_container
from shardmake.launch.driver_script import PREFIX, batch_script
from shardmake.launch.slurm_jobs import TRANSIENT, SlurmJobs, run_slurm
from shardmake.launch.stage_jobs import ON_GPUS, sbatch_command
from shardmake.run.attempt import AttemptDir
from shardmake.run.driver_job import FOLDER, DriverDir
from shardmake.run.paths import RunDir
from shardmake.run.plan import Plan

logger = logging.getLogger(__name__)
_TEST = "--test-only"
_TEMPORARY = re.compile(r"\bbusy\b|not (available|usable) now|\(down, drained or reserved\)|\(inactive or drain\)")
"""Text of sbatch about nodes, partitions and reservations that cannot start the job at present but may later."""


def check_submission(plan: Plan, run: Run, cluster: Cluster, rundir: RunDir) -> None:
    """Let Slurm judge the jobs of the driver, of the training and of the other stages, with their own parameters.

    A job that would wait is not refused. Without an answer, the plan continues. The jobs' container is checked before.

    Raises:
        ConfigError: Slurm refuses a job, and the message has its words; or the container cannot run Shardmake.
    """
    if cluster.executor != "slurm":
        return
    check_container(cluster, [rundir.root], [run])
    script = SlurmJobs(rundir.root, cluster, run).script(
        AttemptDir(rundir.attempts.absolute() / "NNN"), plan, excluded=[]
    )
    if cluster.slurm.driver == "job":
        folder = DriverDir(rundir.root.absolute().parent / FOLDER / "NNN")
        _judge("the driver", run_slurm("sbatch", _TEST, stdin=batch_script(cluster, f"{PREFIX}NNN", folder)))
    _judge("train", run_slurm("sbatch", _TEST, stdin=script))
    for stage in ON_GPUS:
        command = shlex.split(sbatch_command(stage, run, cluster, plan.resources[stage]))
        _judge(stage, run_slurm(*command, _TEST, "--wrap=true"))


def _judge(stage: str, answer: "subprocess.CompletedProcess[str]") -> None:
    """Log what Slurm says about the job of ``stage``, or raise a `ConfigError` if Slurm refuses it."""
    words = "; ".join(re.sub(r"^sbatch: ((error|fatal): )?", "", line) for line in answer.stderr.splitlines())
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
