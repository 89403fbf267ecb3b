"""The inputs of the stages: the files on this machine that a run names."""

import filecmp
from pathlib import Path

from shardmake.config.formats import data_kind
from shardmake.config.models import Data, Run
from shardmake.core.errors import ConfigError


def local_files(run: Run, *parts: str) -> list[str]:
    """Return the files and folders on this machine that a run names.

    ``parts`` are ``model``, ``data``, ``script`` and ``own_files`` (`deepspeed_config`, `accelerate_config`). A hub id
    is not among them. A name counts as a path if it exists, ends in a data suffix, starts with ``.`` or ``/``, or
    has more than one ``/``.
    """
    named = {
        "model": [run.model],
        "data": [run.data.train, *([run.data.eval] if run.data.eval else [])],
        "script": [run.script] if run.script else [],
        "own_files": [name for name in (run.deepspeed_config, run.accelerate_config) if name],
    }
    files = [Path(name) for part in parts for name in named[part] if Path(name).exists() or _looks_local(name)]
    # config.json represents the model folder
    return [str(path / "config.json" if path == Path(run.model) else path) for path in files]


def _looks_local(name: str) -> bool:
    return name.startswith((".", "/")) or name.count("/") > 1 or data_kind(name) is not None


def check_inputs(name: str, run: Run) -> None:
    """Raise a `ConfigError` if a file of the run does not exist, or if it would be evaluated on its training data."""
    if run.script:
        check_script(f"runs.{name}.script", Path(run.script))
    for key in ("deepspeed_config", "accelerate_config"):
        file = getattr(run, key)
        if file and not Path(file).is_file():
            raise ConfigError(f"runs.{name}.{key}: {file!r} is not a file in {Path.cwd()}. Name an existing file.")
    for file in local_files(run, "model", "data"):
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


def _check_evaluation_data(name: str, data: Data) -> None:
    if data.eval is not None and _shares_examples(data.train, data.eval):
        raise ConfigError(
            f"runs.{name}.data.eval: {data.eval!r} has the examples of data.train ({data.train!r}). It would "
            "measure examples that training has seen. Name other examples, or remove eval: eval_fraction of "
            "train is then held out."
        )


def _shares_examples(train: str, held_out: str) -> bool:
    """Return whether both names lead to the same file, to a folder and a file in it, or to the same hub split."""
    files = Path(train), Path(held_out)
    if not all(file.exists() for file in files):
        return held_out == (train if ":" in train else f"{train}:train")
    first, second = (file.resolve() for file in files)
    if first.is_relative_to(second) or second.is_relative_to(first):
        return True
    if not (first.is_file() and second.is_file()):
        return False
    return first.samefile(second) or filecmp.cmp(first, second, shallow=False)


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
