"""The configuration, checked before anything is queued, and what the rules share."""

import ast
import functools
import inspect
import json
import os
import re
import shlex
import sys
from pathlib import Path

from snakemake.io import IOFile
from snakemake.logging import logger
from snakemake.utils import update_config

from shardmake.commands.stop_filter import StopFilter
from shardmake.config.checks import runs_before, with_first_model
from shardmake.config.effects import cluster_values, run_values
from shardmake.config.inputs import check_inputs, local_files
from shardmake.config.inheritance import Layer
from shardmake.config.invocation import (
    check_executor,
    check_module,
    check_until,
    missing_options,
    read_texts,
    sections,
    use_merged,
    write_merged,
)
from shardmake.config.load import load_cluster, load_config, parse_config, read_yaml
from shardmake.config.user_files import read_user_files
from shardmake.core.environment import CONFIG_VARIABLE, RUNS_VARIABLE
from shardmake.core.errors import ShardmakeError
from shardmake.core.failures import explain
from shardmake.core.permissions import share_tree
from shardmake.core.secrets import redact
from shardmake.launch.container import job_container
from shardmake.launch.driver_script import refuse_login_node, refuse_while_driven
from shardmake.launch.slurm_request import prepare_submission
from shardmake.launch.stage_jobs import job_resources as stage_resources
from shardmake.launch.stage_jobs import job_shell_prefix, memory_resources
from shardmake.plan.refusals import refuse_before_fetch
from shardmake.run.driver_job import current_driver_dir
from shardmake.run.evaluation import EvaluationResult
from shardmake.run.own_files import check_refused
from shardmake.run.paths import RunDir
from shardmake.run.record import check_format
from shardmake.run.settings import changed_settings, rerun_text

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
# This variable is removed before jobs are submitted.
IN_A_JOB = IS_DRIVER_JOB or "SLURM_JOB_ID" in os.environ

# As a module of another workflow, the rules take the `config` and the `prefix` of the module. Snakemake adds the prefix to
# the paths of rules. The commands and the functions below read files themselves, so they need it too.
IS_MODULE = not workflow.modifier.is_main_snakefile()
IS_LATER_PROCESS = IS_DRIVER_JOB or not workflow.is_main_process
KEPT_CONFIG = os.environ.get(CONFIG_VARIABLE) if IS_LATER_PROCESS and not IS_MODULE else None
ROOT = Path(workflow.modifier.path_modifier.replace_prefix("runs/"))  # the folder of the runs

# A configuration that the user names replaces the demo's. It is not read with `configfile:`: Snakemake's reader takes a
# millisecond for each run, and its message about invalid YAML has no line.
NAMES_CONFIG = workflow.overwrite_configfiles or (
    workflow.config_settings.replace_workflow_config and workflow.config_settings.config
)
IS_DEFAULT = not (KEPT_CONFIG or IS_MODULE or NAMES_CONFIG)
if IS_DEFAULT:
    workflow.configfiles.append(DEFAULT_CONFIG)


def command_line():
    """Return the options of Snakemake's command line and profiles, or None if another program started the workflow.

    Snakemake sets the executor in the workflow only after it has read the rules, and the workflow has ``--config`` with
    every value of a section as text. It may have changed its folder, so the options cannot be parsed again.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if (frame.f_code.co_name, frame.f_globals.get("__name__")) == ("args_to_api", "snakemake.cli"):
            return frame.f_locals["args"]
        frame = frame.f_back
    return None


def executor_of(options):
    """Return the executor that the command line asks for, or None if it has neither a profile nor cores and runs no job."""
    if options is None:
        return None
    # Snakemake itself gives a dry run a core.
    runs_no_job = options.cores is None or ((options.dryrun or options.touch) and not options.profile)
    return None if runs_no_job and options.executor == "local" else options.executor


def read_configuration():
    """Return the configuration, the cluster, and the start of every command, which finds the configuration by it.

    The commands of one workflow find it through the environment. Modules may have several, so theirs name it.
    """
    program = "shardmake"
    options = command_line() if workflow.is_main_process else None
    if KEPT_CONFIG:
        parsed = load_config(Path(KEPT_CONFIG))
    elif IS_MODULE:
        check_module(config)
        read_texts(config, workflow.config_settings.config)
        parsed = parse_config(config, "config of the module")
        own = f"{CONFIG_VARIABLE}_{str(ROOT).encode().hex()}"  # so a new value does not change the code of the rules
        os.environ[own] = str(write_merged(parsed, "config of the module").absolute())
        runs = shlex.quote(str(ROOT)).replace("{", "{{").replace("}", "}}")
        program = f'{CONFIG_VARIABLE}="${own}" {RUNS_VARIABLE}={runs} {program}'
    else:
        overrides = ["--config"] if workflow.config_settings.config else []
        source = " + ".join([*map(str, workflow.configfiles), *overrides])
        layers = [Layer(str(file), read_yaml(Path(file))) for file in workflow.configfiles]
        layers += [Layer("--config", workflow.config_settings.config) for _ in overrides]
        for layer in layers:  # again those of --configfile: Snakemake's reader takes 12:00:00 for a number
            update_config(config, layer.values)
        update_config(config, sections(options.config or () if options else ()))
        parsed = parse_config(config, source, layers)
        use_merged(write_merged(parsed, source))
    cluster = load_cluster(Path(parsed.cluster))
    if workflow.is_main_process:
        prepare_submission(cluster, os.environ)
        check_executor(cluster, parsed.cluster, executor_of(options))
        check_until((options.until or ()) if options else (), parsed)
        if options and (lines := missing_options(options)):
            logger.warning(lines)
    if options and not options.dryrun and not IS_DRIVER_JOB:
        refuse_while_driven(ROOT, parsed.runs.keys())  # before Snakemake's lock does, and offers --unlock
    for name, run in parsed.runs.items():
        check_format(RunDir(ROOT / name))
        check_inputs(name, run)
        refuse_before_fetch(run, cluster)
        check_refused(read_user_files(run), run)
    return parsed, cluster, program


CONFIG, CLUSTER, SHARDMAKE = checked(read_configuration)

# The commands are those of the Python that runs Snakemake, also on the nodes. A prefix of our own replaces Snakemake's
# default prefix, so `set -euo pipefail` is repeated here: without it a failing command in a pipe is not noticed.
# The folder's name may have any character, also those that the shell or Snakemake would replace. In a container, a
# function of the shell replaces the command of the jobs.
FOLDER_OF_PROGRAMS = shlex.quote(str(Path(sys.executable).parent)).replace("{", "{{").replace("}", "}}")
PROGRAMS = f"set -euo pipefail; export PATH={FOLDER_OF_PROGRAMS}:$PATH; "
RUNS = CONFIG.runs


def command(words):
    """Return the command of a rule that runs Shardmake with ``words``."""
    return f"{SHARDMAKE} {words}"


CONTAINER = job_container(CLUSTER, [ROOT / run for run in RUNS], RUNS.values())
shell.prefix(PROGRAMS if workflow.is_main_process else job_shell_prefix(CLUSTER, PROGRAMS, CONTAINER))
PATHS = RunDir(Path("runs/{run}"))  # the paths of every run, for inputs and outputs of rules

if CLUSTER.shared:
    share_tree(Path(".snakemake"))  # Snakemake's own records, so that another member of the group can continue


wildcard_constraints:
    run="|".join(map(re.escape, RUNS)),
    sweep="|".join(map(re.escape, CONFIG.sweeps)) or "$^",  # matches nothing


def final_receipt(run):
    """Return the file that proves that a run has a model which is evaluated and, if wanted, pushed."""
    paths = RunDir(Path("runs", run))
    return str(paths.push_receipt if RUNS[run].push else paths.evaluation)


def of_all_runs(*paths):
    """Return ``paths`` for every run."""
    return expand(list(map(str, paths)), run=RUNS)


def folders_before(run):
    """Return the folders of the runs from whose model or adapter ``run`` starts."""
    return [RunDir(Path("runs", before)) for before in runs_before(RUNS[run])]


def fetched_files(run):
    """Return what the step ``fetch`` makes: the weights of another run's model come after its training."""
    paths = RunDir(Path("runs", run))
    return [str(paths.sources)] + ([] if folders_before(run) else [str(paths.weights_receipt)])


# A target asks for the result of every step before it as well: Snakemake removes the results of a step that it runs again,
# and makes those that a failed step has lost only if they are asked for.
FETCHED = [file for run in RUNS for file in fetched_files(run)]
PLANNED = of_all_runs(PATHS.sources, PATHS.plan)
RENDERED = of_all_runs(PATHS.training, PATHS.rendered)
ENCODED = of_all_runs(PATHS.data_receipt)
TRAINED = list(dict.fromkeys(PLANNED + RENDERED + ENCODED + FETCHED)) + of_all_runs(PATHS.train_receipt)
MERGED = TRAINED + of_all_runs(PATHS.model_receipt)
EVALUATED = MERGED + of_all_runs(PATHS.evaluation)
PUSHED = EVALUATED + [final_receipt(run) for run in RUNS]
STEPS = {
    "fetch": FETCHED,
    "plan": PLANNED,
    "render": PLANNED + RENDERED,
    "data": PLANNED + ENCODED,
    "train": TRAINED,
    "consolidate": MERGED,
    "evaluate": EVALUATED,
    "push": PUSHED,
    "report": PUSHED + of_all_runs(PATHS.report) + expand("compare/{sweep}.html", sweep=CONFIG.sweeps),
}


CLUSTER_VALUES = cluster_values(CLUSTER)


@functools.cache
def values(run):
    """Return every setting of a run as text."""
    return run_values(RUNS[run]) | CLUSTER_VALUES


def recorded(made):
    """Return the settings with which Snakemake last made a file; None if it did not."""
    found = map(ast.literal_eval, workflow.persistence.params(IOFile(str(made))) or ())
    return next((text for text in found if isinstance(text, str) and text[:1] == "{"), None)


@functools.cache
def settings_of(run, stage):
    """Return the settings by which Snakemake decides whether a stage of a run is run again."""
    paths = RunDir(ROOT / run)
    made = {
        "fetch": paths.sources,
        "plan": paths.plan,
        "render": paths.training,
        "data": paths.data_receipt,
        "train": paths.train_receipt,
        "consolidate": paths.model_receipt,
        "evaluate": paths.evaluation,
        "push": paths.push_receipt,
    }
    return rerun_text(stage, values(run), paths, recorded(made[stage]))


def settings(stage):
    """Return the parameter of a stage's rule; the rule runs again if it changes.

    The file of the configuration is not part of it: another file with the same settings reruns nothing.
    """
    return lambda wildcards: settings_of(wildcards.run, stage)


def inputs_of(*parts):
    """Return the local files that a run names, so that a changed file is noticed."""

    def files(wildcards):
        found = local_files(with_first_model(wildcards.run, RUNS), *parts)
        return [os.path.abspath(file) for file in found] if IS_MODULE else found  # without the prefix

    return files


def sources_before(wildcards):
    """Return the fetched sources of the runs from which this run starts: their config and tokenizer."""
    return [str(before.sources) for before in folders_before(wildcards.run)]


def model_receipt_before(wildcards):
    """Return the receipts of the finished, verified models of other runs from which this run starts."""
    return [str(before.model_receipt) for before in folders_before(wildcards.run)]


def weights_of(wildcards):
    """Return the receipt of the base model's weights; only those of another run's model can change."""
    receipt = str(RunDir(Path("runs", wildcards.run)).weights_receipt)
    return receipt if folders_before(wildcards.run) else ancient(receipt)


def if_chained(function, otherwise=()):
    """Return ``function`` as the input of a rule, or ``otherwise`` if no run starts from another run's model."""
    return function if any(map(runs_before, RUNS.values())) else otherwise


def plan_before_data():
    """Return the plan as an input that is older than the tokenized data unless a setting of the data changed.

    Snakemake skips all checks of a job that comes after another job of the same invocation, also if the input between
    them is ancient. With an ancient plan, an edit that concerns both the plan and the data would not run the latter.
    """

    def plan(wildcards):
        paths = RunDir(ROOT / wildcards.run)
        if last := recorded(paths.data_receipt):
            is_stale = last != settings_of(wildcards.run, "data")
        else:  # made by hand, or not yet
            is_stale = changed_settings("data", values(wildcards.run), paths)
        path = str(RunDir(Path("runs", wildcards.run)).plan)
        return path if is_stale else ancient(path)

    return plan


def planned(stage, key):
    """Return the plan's amount of a resource for a stage. A dry run without a plan shows 1.

    Snakemake calls the returned function again when the plan exists.
    """

    def amount(wildcards, input):
        if workflow.dryrun and not Path(input.plan).exists():
            return 1
        return json.loads(Path(input.plan).read_text())["resources"][stage][key]

    return amount


def memory_of(stage, name):
    """Return the host RAM of a stage as the resource ``name``, from its plan."""

    def amount(wildcards, input):
        gib, cpus = (planned(stage, key)(wildcards, input) for key in ("memory_gib", "cpus"))
        return memory_resources(CLUSTER, 1024 * gib, cpus)[name]

    return amount


def resources_of(stage):
    """Return the resources of the Slurm job in which a stage runs."""

    def resource(name):
        return lambda wildcards: stage_resources(stage, RUNS[wildcards.run], CLUSTER)[name]

    names = checked(stage_resources, stage, next(iter(RUNS.values())), CLUSTER)  # the same for every run
    memory = memory_resources(CLUSTER, 1, 1)  # the same name for any amount
    return {name: memory_of(stage, name) for name in memory} | {name: resource(name) for name in names}


class DryRun:
    """``{NAME:STAGE RUN}`` in a message: in a dry run, the changed settings and what would be submitted."""

    def __format__(self, spec):
        if not workflow.dryrun:
            return ""
        stage, _, run = spec.partition(" ")
        paths = RunDir(ROOT / run)
        if stage == "train":
            from shardmake.commands.preview import dry_run  # its imports take a second

            return f"\n{dry_run(RUNS[run], CLUSTER, paths, with_first_model(run, RUNS))}"
        changes = changed_settings(stage, values(run), paths)
        return "".join(f"\nchanged: {change}" for change in changes)


# Snakemake formats messages with the names of the outermost workflow, also those of its modules' rules.
DRY_RUN = f"dry_run_{abs(hash(ROOT))}"
workflow.modifier_stack[0].globals[DRY_RUN] = DryRun()


def message_of(stage, words):
    """Return the message of a stage's rule."""
    return f"{{wildcards.run}}: {words}{{{DRY_RUN}:{stage} {{wildcards.run}}}}"


def losses_of(wildcards):
    """Return the row of a run in the table of runs of Snakemake's report; a reward model has no such losses."""
    scores = EvaluationResult.read(RunDir(ROOT / wildcards.run).evaluation).scores
    losses = [f"{score.loss:.4f}" for score in scores] if scores else ["", ""]
    return {"run": wildcards.run, "base model's loss": losses[0], "loss": losses[1]}


def report_results():
    """Log where the results of the runs are whose report this invocation made."""
    made = {
        job.wildcards.run for job in workflow.dag.jobs if job.rule.name == "report_run" and workflow.dag.finished(job)
    }
    for run in sorted(made):
        paths = RunDir(ROOT / run)
        logger.info(
            f"{run}: {score_of(paths)}. The model is in {paths.model}, the report is {paths.report}. To compare runs: "
            "shardmake compare"
        )


def score_of(paths):
    """Return the result of a run's evaluation in words; a finished workflow does not fail for it."""
    try:
        result = EvaluationResult.read(paths.evaluation)
    except ShardmakeError:
        return f"{paths.evaluation} cannot be read"
    if result.scores:
        return "evaluation loss {0.loss:.4f} -> {1.loss:.4f}".format(*result.scores)
    return f"preference accuracy {result.reward_model.accuracy:.1%}"


onsuccess:
    if workflow.is_main_process:
        report_results()


onstart:
    if workflow.is_main_process and not IN_A_JOB:
        checked(refuse_login_node, CLUSTER, {job.rule.name for job in workflow.dag.needrun_jobs()})
