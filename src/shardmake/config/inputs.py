"""The inputs of the stages: the files on this machine that a run names."""

from pathlib import Path

from shardmake.config.formats import data_kind
from shardmake.config.models import Run
from shardmake.core.errors import ConfigError


def local_files(run: Run, *parts: str) -> list[str]:
    """Return the files and folders on this machine that a run names.

    ``parts`` are ``model``, ``data``, ``script`` and ``own_files`` (`deepspeed_config`, `accelerate_config`). A hub id
    is not among them. A name counts as a path if it exists, ends in a data suffix, starts with ``.``, ``/`` or ``~``,
    or has more than one ``/``.
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
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or data_kind(name) is not None


def check_inputs(name: str, run: Run) -> None:
    """Raise a `ConfigError` if the model folder, a data file or the script of the run does not exist."""
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
