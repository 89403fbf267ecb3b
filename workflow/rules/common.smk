"""The configuration, checked before anything is queued, and what the rules share."""

import ast
import functools
import json
import os
import shlex
import sys
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path

from snakemake.cli import parse_args
from snakemake.io import IOFile
from snakemake.logging import logger
from snakemake.utils import update_config

from shardmake.commands.preview import dry_run
from shardmake.commands.stop_filter import StopFilter
from shardmake.config.checks import run_before, with_first_model
from shardmake.config.inputs import check_inputs, local_files
from shardmake.config.inheritance import Layer
from shardmake.config.invocation import (
    RUNS_VARIABLE,
    VARIABLE,
    check_executor,
    check_module,
    check_until,
    sections,
    use_merged,
    write_merged,
)
from shardmake.config.load import load_cluster, load_config, parse_config, read_yaml
from shardmake.config.user_files import read_user_files
from shardmake.core.errors import ShardmakeError
from shardmake.core.failures import explain
from shardmake.core.permissions import share_tree
from shardmake.core.secrets import redact
from shardmake.launch.container import job_container
from shardmake.launch.driver_script import refuse_login_node, refuse_while_driven
from shardmake.launch.stage_jobs import job_resources as stage_resources
from shardmake.launch.stage_jobs import job_shell_prefix
from shardmake.run.driver_job import current_driver_dir
from shardmake.run.own_files import check_refused
from shardmake.run.paths import RunDir
from shardmake.run.record import check_format
from shardmake.run.settings import changed_settings, compared_keys, rerun_settings

logger.addFilter(StopFilter())  # a training that a person stopped is not done, and not a failure

DEFAULT_CONFIG = "config/config.yaml"


def checked(function, *arguments):
    """Return the result of ``function``, or end Snakemake with the message of an error that the user can fix.

    Snakemake would print an exception with the lines of Python that raised it.
    """
    try:
        return function(*arguments)
    except (ShardmakeError, OSError) as error:
        logger.error(redact(f"Error: {explain(error, Path())}"))
        sys.exit(1)


# The Snakemake of a job takes the configuration of the invocation that submitted the job.
IS_DRIVER_JOB = current_driver_dir() is not None
KEPT_CONFIG = os.environ.get(VARIABLE) if IS_DRIVER_JOB or not workflow.is_main_process else None
# The Slurm executor removes this variable before it starts jobs.
IN_A_JOB = IS_DRIVER_JOB or "SLURM_JOB_ID" in os.environ

# As a module of another workflow, the rules take the `config` and the `prefix` of the module. Snakemake adds the prefix to
# the paths of rules. The commands and the functions below read files themselves, so they need it too.
IS_MODULE = not workflow.modifier.is_main_snakefile()
ROOT = Path(workflow.modifier.path_modifier.replace_prefix("runs/"))  # the folder of the runs

# A configuration that the user names replaces the demo's. The file is read before Snakemake reads it, because
# Snakemake's message about invalid YAML has no line.
if not KEPT_CONFIG and not IS_MODULE and not workflow.overwrite_configfiles:
    checked(read_yaml, Path(DEFAULT_CONFIG))

    configfile: DEFAULT_CONFIG


def command_line():
    """Return the options of Snakemake's command line and profiles, or None if another program started the workflow.

    Snakemake sets the executor in the workflow only after it has read the rules, and the workflow has ``--config`` with
    every value of a section as text.
    """
    if Path(sys.argv[0]).name not in ("snakemake", "__main__.py"):
        return None
    with redirect_stderr(StringIO()):
        return parse_args(sys.argv[1:])[1]


def executor_of(options):
    """Return the executor that the command line asks for, or None if it has neither a profile nor cores and runs no job."""
    if options is None or (options.executor == "local" and options.cores is None):
        return None
    return options.executor


def read_configuration():
    """Return the configuration and the cluster; the commands find the configuration through the environment."""
    options = command_line() if workflow.is_main_process else None
    if KEPT_CONFIG:
        parsed = load_config(Path(KEPT_CONFIG))
    elif IS_MODULE:
        check_module(config)
        parsed = parse_config(config, "config of the module")
        use_merged(write_merged(parsed, "config of the module"))
        os.environ[RUNS_VARIABLE] = str(ROOT)
    else:
        overrides = ["--config"] if workflow.config_settings.config else []
        source = " + ".join([*map(str, workflow.configfiles), *overrides])
        update_config(config, sections(options.config or () if options else ()))
        layers = [Layer(str(file), read_yaml(Path(file))) for file in workflow.configfiles]
        layers += [Layer("--config", workflow.config_settings.config) for _ in overrides]
        parsed = parse_config(config, source, layers)
        use_merged(write_merged(parsed, source))
    cluster = load_cluster(Path(parsed.cluster))
    if workflow.is_main_process:
        check_executor(cluster, parsed.cluster, executor_of(options))
        check_until((options.until or ()) if options else (), parsed)
    if options and not options.dryrun and not IS_DRIVER_JOB:
        refuse_while_driven(ROOT, parsed.runs.keys())  # before Snakemake's lock does, and offers --unlock
    for name, run in parsed.runs.items():
        check_format(RunDir(ROOT / name))
        check_inputs(name, run)
        check_refused(read_user_files(run), run)
    return parsed, cluster


CONFIG, CLUSTER = checked(read_configuration)

# The commands are those of the Python that runs Snakemake, also on the nodes. A prefix of our own replaces Snakemake's
# default prefix, so `set -euo pipefail` is repeated here: without it a failing command in a pipe is not noticed.
# The folder's name may have any character, also those that the shell or Snakemake would replace. In a container, a
# function of the shell replaces the command of the jobs.
FOLDER_OF_PROGRAMS = shlex.quote(str(Path(sys.executable).parent)).replace("{", "{{").replace("}", "}}")
PROGRAMS = f"set -euo pipefail; export PATH={FOLDER_OF_PROGRAMS}:$PATH; "
RUNS = CONFIG.runs
CONTAINER = job_container(CLUSTER, [ROOT / run for run in RUNS], RUNS.values())
shell.prefix(PROGRAMS if workflow.is_main_process else job_shell_prefix(CLUSTER, PROGRAMS, CONTAINER))
PATHS = RunDir(Path("runs/{run}"))  # the paths of every run, for inputs and outputs of rules

if CLUSTER.shared:
    share_tree(Path(".snakemake"))  # Snakemake's own records, so that another member of the group can continue


wildcard_constraints:
    run="|".join(RUNS),
    sweep="|".join(CONFIG.sweeps) or "$^",  # matches nothing


def final_receipt(run):
    """Return the file that proves that a run has a model which is evaluated and, if wanted, pushed."""
    paths = RunDir(Path("runs", run))
    return str(paths.push_receipt if RUNS[run].push else paths.evaluation)


def of_all_runs(*paths):
    """Return ``paths`` for every run."""
    return expand(list(map(str, paths)), run=RUNS)


def model_before(run):
    """Return the folder of the run from whose model ``run`` starts, or None."""
    before = run_before(RUNS[run].model)
    return None if before is None else RunDir(Path("runs", before))


def fetched_files(run):
    """Return what the step ``fetch`` makes: the weights of another run's model come after its training."""
    paths = RunDir(Path("runs", run))
    return [str(paths.sources)] + ([] if model_before(run) else [str(paths.weights_receipt)])


STEPS = {
    "fetch": [file for run in RUNS for file in fetched_files(run)],
    "plan": of_all_runs(PATHS.plan),
    "render": of_all_runs(PATHS.training),
    "data": of_all_runs(PATHS.data_receipt),
    "train": of_all_runs(PATHS.train_receipt),
    "consolidate": of_all_runs(PATHS.model_receipt),
    "evaluate": of_all_runs(PATHS.evaluation),
    "push": [final_receipt(run) for run in RUNS],
    "report": of_all_runs(PATHS.report) + expand("compare/{sweep}.html", sweep=CONFIG.sweeps),
}


@functools.cache
def settings_of(run, stage):
    """Return the settings by which Snakemake decides whether a stage of a run is run again."""
    paths = RunDir(ROOT / run)
    made = {"plan": paths.plan, "render": paths.training}.get(stage, paths.settings)
    recorded = (ast.literal_eval(text) for text in workflow.persistence.params(IOFile(str(made))) or ())
    pairs = dict(text.partition(": ")[::2] for text in recorded if isinstance(text, str))
    return rerun_settings(stage, RUNS[run], CLUSTER, paths, pairs)


def command_params(stage):
    """Return the parameters of a stage's rule; a rule runs again if one of them changes.

    One parameter per setting, because a dry run shows those that changed, before and now. The file of the
    configuration is not among them: another file with the same settings reruns nothing.
    """

    def setting(key):
        return lambda wildcards: f"{key}: {settings_of(wildcards.run, stage)[key]}"

    return {key.replace(".", "_"): setting(key) for key in compared_keys(stage)}


def inputs_of(*parts):
    """Return the local files that a run names, so that a changed file is noticed."""

    def files(wildcards):
        found = local_files(with_first_model(wildcards.run, RUNS), *parts)
        return [os.path.abspath(file) for file in found] if IS_MODULE else found  # without the prefix

    return files


def sources_before(wildcards):
    """Return the fetched sources of the run from whose model this run starts: its config and tokenizer."""
    before = model_before(wildcards.run)
    return [] if before is None else str(before.sources)


def model_receipt_before(wildcards):
    """Return the receipt of the finished, verified model from which this run starts, if it is another run's."""
    before = model_before(wildcards.run)
    return [] if before is None else str(before.model_receipt)


def weights_of(wildcards):
    """Return the receipt of the base model's weights; only those of another run's model can change."""
    receipt = str(RunDir(Path("runs", wildcards.run)).weights_receipt)
    return receipt if model_before(wildcards.run) else ancient(receipt)


def plan_before(stage):
    """Return the plan as an input that is older than the output of ``stage`` unless a setting of ``stage`` changed.

    Snakemake skips all checks of a job that comes after another job of the same invocation, also if the input between
    them is ancient. With an ancient plan, an edit that concerns both the plan and the stage would not run the stage.
    """

    def plan(wildcards):
        is_stale = changed_settings(stage, RUNS[wildcards.run], CLUSTER, RunDir(ROOT / wildcards.run))
        path = str(RunDir(Path("runs", wildcards.run)).plan)
        return path if is_stale else ancient(path)

    return plan


def planned(stage, key, factor=1):
    """Return the plan's amount of a resource for a stage. A dry run without a plan shows ``factor``.

    Snakemake calls the returned function again when the plan exists.
    """

    def amount(wildcards, input):
        if workflow.dryrun and not Path(input.plan).exists():
            return factor
        return factor * json.loads(Path(input.plan).read_text())["resources"][stage][key]

    return amount


def resources_of(stage):
    """Return the resources of the Slurm job in which a stage runs."""

    def resource(name):
        return lambda wildcards: stage_resources(stage, RUNS[wildcards.run], CLUSTER)[name]

    names = checked(stage_resources, stage, next(iter(RUNS.values())), CLUSTER)  # the same for every run
    return {"mem_mb": planned(stage, "memory_gib", 1024), **{name: resource(name) for name in names}}


class Submission:
    """``{SUBMISSION:NAME}`` in a message: in a dry run, what would be submitted for the run; otherwise empty."""

    def __format__(self, run):
        if not workflow.dryrun:
            return ""
        return f"\n{dry_run(RUNS[run], CLUSTER, RunDir(ROOT / run), with_first_model(run, RUNS))}"


# Snakemake formats messages with the names of the outermost workflow, also those of a module's rules.
workflow.modifier_stack[0].globals["SUBMISSION"] = Submission()


onstart:
    if workflow.is_main_process and not IN_A_JOB:
        checked(refuse_login_node, CLUSTER, {job.rule.name for job in workflow.dag.needrun_jobs()})
