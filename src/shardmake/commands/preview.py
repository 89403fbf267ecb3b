"""Preview of a submission: the batch script, the command and environment of each node, the rendered files."""

import json
import shlex

from shardmake.config.effects import values_of
from shardmake.config.models import Cluster, Run
from shardmake.core.errors import ShardmakeError
from shardmake.core.secrets import redact
from shardmake.core.units import plural
from shardmake.launch.jobs import attempt_settings
from shardmake.launch.rendezvous import Rendezvous
from shardmake.launch.slurm_jobs import SlurmJobs
from shardmake.launch.worker import rank_environment
from shardmake.memory.read_config import read_model
from shardmake.plan.stage import make_plan
from shardmake.render.stage import as_yaml, launch_command, render_files
from shardmake.render.user_files import merge_own_files
from shardmake.run.attempt import AttemptDir
from shardmake.run.paths import RunDir
from shardmake.run.plan import Plan
from shardmake.run.settings import changed_settings, is_trained
from shardmake.run.sources import localize

ATTEMPT = "NNN"
"""Placeholder for the attempt's number, which the driver sets."""


def preview(plan: Plan, run: Run, cluster: Cluster, rundir: RunDir) -> str:
    """Return the preview as text, without writing or submitting anything.

    ``K``, ``ADDRESS`` and ``PORT`` are placeholders for values that the running job determines.
    """
    folder = AttemptDir(rundir.attempts.absolute() / ATTEMPT)
    model = read_model(run.model, revision=run.revision, trust_remote_code=run.trust_remote_code)
    files, _ = merge_own_files(render_files(plan, run, cluster, model, folder.root), run, plan.choice)
    return _page(
        _submitted(plan, run, cluster, rundir)
        | {
            str(folder.accelerate): as_yaml(files.accelerate),
            str(folder.deepspeed): json.dumps(files.deepspeed, indent=2),
            str(folder.training): json.dumps(files.training.as_json(), indent=2),
        }
    )


def dry_run(run: Run, cluster: Cluster, rundir: RunDir, unfetched: Run) -> str:
    """Return the submission for a dry run of the workflow, or the reason why it is not known yet.

    A missing plan is computed in memory, and so is one that was made with other settings, which are named. If nothing
    was fetched, that is from ``unfetched``, which names the model at the start of a chain of runs.
    """
    values = values_of(run, cluster)
    if is_trained(values, rundir):
        return (
            "# The training has finished with these settings: nothing is submitted, and its receipt is written again.\n"
            f"# To train again from the start: shardmake retrain {rundir.name}\n"
        )
    try:
        local = localize(run, rundir) if rundir.sources.exists() else unfetched
        changes = changed_settings("plan", values, rundir)
        is_current = rundir.plan.exists() and not changes
        plan = Plan.read(rundir.plan) if is_current else make_plan(rundir.name, local, cluster)[0]
        submitted = _page(_submitted(plan, run, cluster, rundir))
        edited = f"# --- changed since the last plan: {'; '.join(changes)}\n" if changes else ""
        return f"{edited}{submitted}# --- the files: shardmake render {rundir.name} --show\n"
    except (ShardmakeError, OSError) as error:
        return redact(f"# The submission is not known yet: {error}\n")


def _page(parts: dict[str, str]) -> str:
    """Return the parts as text without secrets, because Snakemake prints and logs a dry run."""
    return redact("\n".join(f"# --- {title}\n{body.strip()}\n" for title, body in parts.items()))


def _submitted(plan: Plan, run: Run, cluster: Cluster, rundir: RunDir) -> dict[str, str]:
    folder = AttemptDir(rundir.attempts.absolute() / ATTEMPT)
    job = "batch script" if cluster.executor == "slurm" else "on this machine, without Slurm"
    node = f"on each node K of {plan.choice.nodes}, after node 0 has published its address"
    service = (
        {f"on each of {plural(plan.service_nodes, 'node')} after these": run.service.command} if run.service else {}
    )
    command = f"python -m shardmake.launch.worker {folder.root} 0"
    if cluster.executor == "slurm":
        command = SlurmJobs(rundir.root, cluster, run).script(folder, plan, excluded=[])
    rendezvous = Rendezvous(address="ADDRESS", port=0, interface=cluster.network_interface or "INTERFACE", host="HOST")
    settings = attempt_settings(0, rundir.root, cluster, plan, resume_from=None, settings_digest="")
    variables = sorted(rank_environment(settings, rendezvous).items())
    exports = " ".join(f"{name}={shlex.quote(value)}" for name, value in variables)
    launched = f"env {exports} \\\n  {shlex.join(launch_command(plan, folder.root, 'K', 'ADDRESS', 'PORT'))}"
    return {job: command, node: launched, **service}
