"""The configuration of one invocation of Snakemake, in a file that all its commands read.

Snakemake merges the configuration from files and ``--config KEY=VALUE``. The merged file carries that to the commands,
also to those in a job on a node. Its name is its digest, so another invocation with other values cannot change it.
"""

import argparse
import hashlib
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, Final

import yaml

from shardmake.config.checks import PREFIX, runs_before
from shardmake.config.load import COPY_OF, merge, read_yaml
from shardmake.config.models import Cluster, Config
from shardmake.config.parse_text import parse_yaml
from shardmake.core.atomic import write_text
from shardmake.core.environment import CONFIG_VARIABLE, cache_folder
from shardmake.core.errors import ConfigError
from shardmake.core.secrets import mask

NOTE_VARIABLE: Final = "SHARDMAKE_NOTE"
"""Environment variable with a file in which the workflow leaves the name of the merged file, for `shardmake submit`."""
FOLDER: Final = Path(".snakemake/shardmake")
_DUMPER: Final = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


def write_merged(config: Config, source: str, folder: Path = FOLDER) -> Path:
    """Write ``config`` below ``folder`` and return the file; ``source`` names the user's files for messages.

    A configuration with a secret, such as the password of a store, goes to a folder that only the user can read.
    """
    values = config.model_dump(exclude_unset=True)
    text = f"{COPY_OF}{source}\n{yaml.dump(values, Dumper=_DUMPER, sort_keys=False, allow_unicode=True)}"
    if mask(text) != text:
        folder = cache_folder() / "config"
    path = folder / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.yaml"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o777 if folder == FOLDER else 0o700)
        write_text(path, text)
    except OSError as error:
        raise ConfigError(
            f"Cannot write {path}: {error.strerror}. Run Snakemake in a folder that you can write to."
        ) from None
    return path


def use_merged(path: Path) -> None:
    """Let the commands of this Snakemake read the merged file ``path``."""
    os.environ[CONFIG_VARIABLE] = str(path.absolute())
    if note := os.environ.get(NOTE_VARIABLE):
        write_text(Path(note), str(path.absolute()))


def last_merged(name: str) -> Path | None:
    """Return the newest merged file in the working folder that has a run called ``name``, or any without a name."""
    newest = sorted(FOLDER.glob("*.yaml"), key=lambda path: path.stat().st_mtime, reverse=True)
    return next((path for path in newest if not name or name in (read_yaml(path).get("runs") or ())), None)


def check_config_files(arguments: Sequence[str]) -> None:
    """Exit with the message of `refuse_config_options`; ``profiles/default`` calls this before Snakemake reads any."""
    try:
        refuse_config_options(arguments)
    except ConfigError as error:
        sys.exit(f"Error: {error}")


def config_options(
    arguments: Sequence[str], *others: str, exit_on_error: bool = True
) -> tuple[argparse.Namespace, list[str]]:
    """Return ``configfile``, ``config`` and ``others`` among Snakemake's arguments, and the arguments without them."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=exit_on_error)
    parser.add_argument("--configfile", "--configfiles", nargs="+", default=[])
    parser.add_argument("--config", "-C", nargs="*", default=[])
    for option in others:
        parser.add_argument(*option.split())
    return parser.parse_known_args(arguments)


def refuse_config_options(arguments: Sequence[str]) -> None:
    """Raise `ConfigError` if Snakemake would end with a traceback because of ``--configfile`` or ``--config``.

    A file must exist, have keys and be valid YAML, and the command line have sections and values. Snakemake reads both
    before the workflow, and its own message names neither the file nor the line.
    """
    try:
        options = config_options(arguments, exit_on_error=False)[0]
    except argparse.ArgumentError:
        return  # Snakemake reports it
    for override in options.config:
        dotted, equals, value = override.partition("=")
        section, *keys = dotted.split(".")
        if not equals:
            raise ConfigError(
                f"--config: {override!r} has no value. The option takes every word after it as KEY=VALUE. Write "
                "targets before it, such as `plan --config KEY=VALUE`."
            )
        if keys:
            for key in reversed(keys):
                value = f"{{{key}: {value}}}"
            raise ConfigError(
                f"--config: {override!r} has a dot in its key. Snakemake takes the name of a section. Write what "
                f"is below it in braces: --config '{section}={value}'."
            )
    for name in options.configfile:
        if not name:
            raise ConfigError("--configfile: the name is empty. Name a file, or set the variable that holds it.")
        path, problem = Path(name), "is a file that a step of a run made"
        try:
            is_target = {"format", "checksum"} <= read_yaml(path).keys()
        except ConfigError:
            if path.suffix in (".yaml", ".yml", ".json"):
                raise
            is_target, problem = True, "is not YAML" if path.exists() else "does not exist"
        if is_target:
            raise ConfigError(
                f"--configfile: {name!r} {problem}. The option takes every word after it as a file. Write targets "
                "before it, such as `plan --configfile FILE`."
            )


def sections(overrides: Sequence[str]) -> dict[str, Any]:
    """Return the sections and lists among Snakemake's ``--config KEY=VALUE``, read as in a configuration file.

    Snakemake itself reads every number, ``true`` and ``null`` in them as text. Raises `ConfigError` for invalid YAML.
    """
    found: dict[str, Any] = {}
    for override in overrides:
        key, _, text = override.partition("=")
        try:
            value = parse_yaml(text)
        except yaml.YAMLError as error:
            problem = getattr(error, "problem", None) or error
            raise ConfigError(f"--config {override}: the value is not valid YAML: {problem}.") from None
        if isinstance(value, dict | list):
            merge(found, {key: value})
    return found


def read_texts(config: dict[str, Any], overrides: Mapping[str, Any]) -> None:
    """Read the texts that ``overrides``, Snakemake's ``--config``, gave to the ``config`` of a module as YAML.

    Snakemake has merged them into the configuration of the whole workflow, of which ``config`` is a section.
    """
    merged = deepcopy(config)
    merge(merged, overrides)
    if merged == config:
        merge(config, _values_of(overrides))
        return
    for section in overrides.values():
        if isinstance(section, dict):
            read_texts(config, section)


def _values_of(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _values_of(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_values_of(inner) for inner in value]
    try:
        return parse_yaml(value) if isinstance(value, str) else value
    except yaml.YAMLError:  # it was in quotes
        return value


def check_module(config: Mapping[str, Any]) -> None:
    """Raise a `ConfigError` if another workflow uses Shardmake as a module without a configuration."""
    if not config:
        raise ConfigError(
            "The module has no configuration. Give it the section with `cluster` and `runs`, such as "
            '`config: config["shardmake"]`.'
        )


def missing_options(options: Any) -> str | None:
    """Return which options of ``profiles/default`` Snakemake does not have among ``options``, and what that costs.

    Snakemake reads that profile neither for a workflow that has Shardmake as a module nor beside
    ``--workflow-profile``.
    """
    lines = ["Shardmake's rules expect these lines in the config.yaml of your Snakemake profile:"]
    if {trigger.name for trigger in options.rerun_triggers} - {"MTIME", "PARAMS", "INPUT"}:
        lines.append("rerun-triggers: [mtime, params, input]  # an upgrade of Shardmake reruns no finished stage")
    if options.max_checksum_file_size < 10**10:
        lines.append("max-checksum-file-size: 10GB  # a new date of the same data reruns nothing")
    return "\n  ".join(lines) if lines[1:] else None


def check_executor(cluster: Cluster, file: str, executor: str | None) -> None:
    """Raise a `ConfigError` if the cluster ``file`` and Snakemake's ``executor`` name different places for the jobs.

    An ``executor`` of None runs no job.
    """
    if executor is None or (cluster.executor == "local") == (executor == "local"):
        return
    would, other = "run the stages on this machine", "local"
    if executor != "local":
        would, other = f"submit jobs through {executor!r}", "slurm"
    raise ConfigError(
        f"cluster: {file} has `executor: {cluster.executor}`, but Snakemake would {would}. Use "
        f"`--profile {cluster.profile}`, or name a cluster file with `executor: {other}`."
    )


_STEPS_BETWEEN_RUNS: Final = {
    "fetch_run": "fetch", "fetch_weights_run": "train", "train_run": "train", "consolidate_run": "consolidate",
}  # fmt: skip
"""Rules on which the same rule for the next run of a chain depends, and the step that brings all runs there."""


def check_until(rules: Collection[str], config: Config) -> None:
    """Raise a `ConfigError` if ``rules``, those of Snakemake's ``--until``, stand between two runs of a chain.

    Snakemake starts nothing that depends on a job of such a rule, and the second run would wait forever.
    """
    chained = next(((name, before) for name, run in config.runs.items() for before in runs_before(run)), None)
    for rule in rules:
        if chained is not None and rule in _STEPS_BETWEEN_RUNS:
            name, before = chained
            raise ConfigError(
                f"--until {rule}: Snakemake would stop before the jobs of {rule} for run {name}, which come after "
                f"those of {PREFIX}{before}. Name the step as the target: snakemake {_STEPS_BETWEEN_RUNS[rule]}"
            )
