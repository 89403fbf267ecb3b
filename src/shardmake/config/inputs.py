"""The files on this machine that a run names: which must exist, and which are inputs of the workflow's rules."""

import filecmp
import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Final

from shardmake.config.chat_template import read_template
from shardmake.config.checks import run_before
from shardmake.config.formats import data_files, data_kind, raw_files
from shardmake.config.models import Data, Run
from shardmake.config.script_file import module_of, script_file
from shardmake.config.user_files import KINDS, read_user_files
from shardmake.core.errors import ConfigError
from shardmake.core.hub import is_hub_id
from shardmake.core.secrets import public_url
from shardmake.core.stores import is_url, protocol_problem

_MODEL_TEXTS: Final = (".json", ".jinja", ".model", ".txt", ".tiktoken", ".py")
"""Suffixes of a model folder's config, tokenizer, chat template and code. Its weights are too large to compare."""

_TAKEN_BY_SNAKEMAKE: Final = re.compile(r"\{|<[a-z][a-z0-9_]*>")
"""Parts of a path that Snakemake replaces: a wildcard in braces, and the name of a path variable."""


def local_files(run: Run, *parts: str) -> list[str]:
    """Return the files on this machine that a run names, so that Snakemake notices an edit.

    ``parts`` are ``model`` (its files without the weights) and ``data`` (each file of a folder). A hub id is not among
    them. A name counts as a path if it exists, ends in a data suffix, or is not a hub id (``org/name``).
    """
    files: list[Path] = []
    if "model" in parts and is_local(run.model):
        folder, config = Path(run.model), Path(run.model, "config.json")
        texts = sorted(folder.iterdir()) if folder.is_dir() else []
        files += [config, *(path for path in texts if path.suffix in _MODEL_TEXTS and path != config)]
    if "data" in parts:
        files += [Path(run.data.chat_template)] if run.data.chat_template else []
        for key, path in ((key, Path(name)) for key, name in _sources(run) if key != "model" and is_local(name)):
            is_raw = run.data.is_raw and key == "data.train"
            # A folder without data files is refused when it is read.
            files += raw_files(path) if is_raw else (data_files(path) if path.is_dir() else []) or [path]
    return [str(file) for file in files]


def named_paths(run: Run) -> list[Path]:
    """Return every file and folder on this machine that a run names, as it is written there."""
    files = [run.data.chat_template, run.deepspeed_config, run.accelerate_config]
    files += [run.script] if run.script and module_of(run.script) is None else []
    files += [run.resume_from, None if run_before(run.lora.adapter) else run.lora.adapter]
    return [Path(name) for _, name in _sources(run) if is_local(name)] + [Path(file) for file in files if file]


def _sources(run: Run) -> Iterator[tuple[str, str]]:
    """Yield the model and the sources of the examples, each after its key."""
    yield "model", run.model
    yield from (("data.train", one.source) for one in run.data.sources)
    yield from (("data.eval", one.source) for one in run.data.eval_sources)


def is_local(name: str) -> bool:
    """Return True if the name of a model or of data is a path, not a hub id, a URL or another run's model."""
    if is_url(name) or run_before(name) is not None:
        return False
    return Path(name).exists() or data_kind(name) is not None or not is_hub_id(name.partition(":")[0])


def check_inputs(name: str, run: Run) -> None:
    """Raise a `ConfigError` if a file of the run does not exist, or if it would be evaluated on its training data."""
    if run.script:
        check_script(f"runs.{name}.script", script_file(run.script))
    own = {f"{kind}_config": getattr(run, f"{kind}_config") for kind in KINDS}
    for key, file in (own | {"data.chat_template": run.data.chat_template}).items():
        if file and not Path(file).is_file():
            raise ConfigError(f"runs.{name}.{key}: {file!r} is not a file in {Path.cwd()}. Name an existing file.")
    for key, path in {"resume_from": run.resume_from, "lora.adapter": run.lora.adapter}.items():
        if path and run_before(path) is None and not Path(path).exists():
            raise ConfigError(
                f"runs.{name}.{key}: {path!r} does not exist in {Path.cwd()}. Name a checkpoint's folder."
            )
    if run.data.chat_template:
        read_template(Path(run.data.chat_template))
    read_user_files(run)
    _check_urls(name, run)
    for file in local_files(run, "model", "data"):
        if found := _TAKEN_BY_SNAKEMAKE.search(file):
            raise ConfigError(
                f"runs.{name}: {file!r} has {found[0]} in its path, which Snakemake takes for a wildcard or a "
                "variable. Rename the file or folder, or name a link to it that has none."
            )
        if Path(file).exists():
            continue
        if Path(file).name == "config.json":
            raise ConfigError(
                f"runs.{name}.model: {run.model!r} is not a model folder. It has no config.json. Name a folder "
                "written by save_pretrained, or a hub id (org/name)."
            )
        raise ConfigError(
            f"runs.{name}.data: {file!r} does not exist. Name an existing file or folder, or a hub data set."
        )

    _check_evaluation_data(name, run.data)


def _check_urls(name: str, run: Run) -> None:
    """Refuse a URL that cannot be fetched, as far as that is seen without the network."""
    for key, url in ((key, name) for key, name in _sources(run) if is_url(name)):
        if public_url(url) != url:
            raise ConfigError(
                f"runs.{name}.{key}: {public_url(url)} is written with a user or password, and this file is not "
                "secret. Remove them, and give the credentials as the store's own tools take them."
            )
        if problem := protocol_problem(url):
            raise ConfigError(f"runs.{name}.{key}: {url} cannot be fetched: {problem}")
    if is_url(run.model) and run.revision:
        raise ConfigError(f"runs.{name}.revision: a URL has no revisions. Remove it, or name a hub id as the model.")


def _check_evaluation_data(name: str, data: Data) -> None:
    if data.is_raw:  # the script decides which files it learns from
        return
    for train, held_out in product(data.sources, data.eval_sources):
        if _shares_examples(train.source, held_out.source):
            raise ConfigError(
                f"runs.{name}.data.eval: {held_out.source!r} has the examples of data.train ({train.source!r}). It "
                "would measure examples that training has seen. Name other examples, or remove eval: eval_fraction of "
                "train is then held out."
            )


def _shares_examples(train: str, held_out: str) -> bool:
    """Return whether both names lead to files of the same content, or to the same hub split.

    Of a folder, the names of its files decide which are for training; the plan compares these.
    """
    first, second = Path(train), Path(held_out)
    if not (first.exists() and second.exists()):
        return held_out == (train if ":" in train else f"{train}:train")
    is_file = first.is_file() and second.is_file()
    return is_file and (first.samefile(second) or filecmp.cmp(first, second, shallow=False))


def check_script(key: str, path: Path) -> None:
    """Raise a `ConfigError` if the script does not exist or is not Python; ``key`` is its key in the configuration."""
    if not path.is_file():
        raise ConfigError(f"{key}: {str(path)!r} does not exist in {Path.cwd()}. Name a Python file.")
    try:
        compile(path.read_bytes(), str(path), "exec")
    except (SyntaxError, ValueError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        raise ConfigError(
            f"{key}: {path}{line} is not Python: {error.args[0]}. `accelerate launch` starts this file, so name the "
            "training program itself, not a shell script around it."
        ) from None
