"""Configuration, checked before anything is queued, and the few values that rules take from it."""

import json
import sys
from pathlib import Path

from snakemake.exceptions import WorkflowError

from shardmake.config.models import Config, check_inputs, load_cluster, local_files, parse_config, stage_digest
from shardmake.core.errors import ShardmakeError
from shardmake.commands.preview import dry_run
from shardmake.run.paths import RunDir
from shardmake.core.permissions import share_tree

# The commands are those of the Python that runs Snakemake, also on the nodes. A prefix of one's own replaces Snakemake's,
# which makes a failure in a pipe one of the rule's.
shell.prefix(f"set -euo pipefail; export PATH={Path(sys.executable).parent}:$PATH; ")

CONFIG_FLAGS = " ".join(f"--config {file}" for file in workflow.configfiles)


def read_configuration():
    """The configuration of this invocation; a mistake in it ends Snakemake with our own words."""
    try:
        parsed = parse_config(config, " + ".join(str(file) for file in workflow.configfiles))
        cluster = load_cluster(Path(parsed.cluster))
        for name, run in parsed.runs.items():
            check_inputs(name, run)
        return parsed, cluster
    except ShardmakeError as error:
        raise WorkflowError(str(error)) from None


CONFIG, CLUSTER = read_configuration()
if CLUSTER.shared:
    share_tree(Path(".snakemake"))  # Snakemake's own records, so that another member can go on
RUNS = CONFIG.runs


wildcard_constraints:
    run="|".join(RUNS),


def settings_of(stage):
    """Digest of the settings that a stage reads: an edited comment, or another stage's key, reruns nothing."""
    return lambda wildcards: stage_digest(RUNS[wildcards.run], CLUSTER, stage)


def inputs_of(*parts):
    """The local files that a run names, so that a changed file is seen."""
    return lambda wildcards: local_files(RUNS[wildcards.run], *parts)


def final_receipt(run):
    """What proves that a run is done."""
    return f"runs/{run}/push/receipt.json" if RUNS[run].push else f"runs/{run}/evaluation.json"


class Submission:
    """``{SUBMISSION:NAME}`` in a message: in a dry run, what would be submitted for the run; otherwise nothing."""

    def __format__(self, run):
        if not workflow.dryrun:
            return ""
        files = [*map(Path, workflow.configfiles), Path(CONFIG.cluster)]
        submission = dry_run(RUNS[run], CLUSTER, RunDir(Path("runs", run)), files)
        return f"\n{submission}"


SUBMISSION = Submission()


def planned(stage, key, factor=1):
    """What the plan gives a stage; Snakemake asks again once the plan is there. A dry run without a plan says 1."""

    def ask(wildcards, input):
        if workflow.dryrun and not Path(input.plan).exists():
            return factor
        return factor * json.loads(Path(input.plan).read_text())["resources"][stage][key]

    return ask


def gpus_of(run):
    """GPUs of one node for a run's evaluation, which shares its sequences among them, in the words this cluster wants."""
    count = RUNS[run].evaluation.processes or CLUSTER.processes_per_node
    kind = f"gpu:{CLUSTER.slurm.gpu_type}:{count}" if CLUSTER.slurm.gpu_type else f"gpu:{count}"
    return kind if CLUSTER.accelerator != "cpu" and CLUSTER.slurm.gpu_request != "none" else ""
