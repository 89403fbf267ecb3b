"""The files on this machine that a run names."""

from pathlib import Path

from shardmake.config.models import Run
from shardmake.core.errors import ConfigError


def local_files(run: Run, *parts: str) -> list[str]:
    """The files and folders on this machine that a run names; ``parts`` are ``model``, ``data`` and ``script``.

    A hub id names none. What looks like a path (it ends in a data suffix, starts with ``.`` or ``/``, or has more
    than one ``/``) is one, whether it exists or not.
    """
    named = {
        "model": [run.model],
        "data": [run.data.train, *([run.data.eval] if run.data.eval else [])],
        "script": [run.script] if run.script else [],
    }
    files = [Path(name) for part in parts for name in named[part] if Path(name).exists() or _looks_local(name)]
    return [str(path / "config.json" if part_is_model(path, run) else path) for path in files]


def part_is_model(path: Path, run: Run) -> bool:
    """Whether ``path`` is the run's model folder, of which config.json stands for the whole."""
    return str(path) == str(Path(run.model))


def _looks_local(name: str) -> bool:
    return (
        name.startswith((".", "/", "~")) or name.count("/") > 1 or Path(name).suffix in (".jsonl", ".json", ".parquet")
    )


def check_inputs(name: str, run: Run) -> None:
    """Refuse a run whose model folder, data file or script is not there."""
    if run.script:
        check_script(f"runs.{name}.script", Path(run.script))
    for file in local_files(run, "model", "data"):
        if Path(file).exists():
            continue
        if Path(file).name == "config.json":
            raise ConfigError(
                f"runs.{name}.model: {run.model!r} is no model folder: it has no config.json. Name a folder saved by "
                "save_pretrained, or a hub id (org/name)."
            )
        raise ConfigError(
            f"runs.{name}.data: {file!r} does not exist. Name an existing file or folder, or a hub data set."
        )


def check_script(key: str, path: Path) -> None:
    """Refuse a script that is not there or that Python cannot read; ``key`` is where the configuration names it."""
    if not path.is_file():
        raise ConfigError(f"{key}: {str(path)!r} does not exist. Name a Python file (now in {Path.cwd()}).")
    try:
        compile(path.read_bytes(), str(path), "exec")
    except (SyntaxError, ValueError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        raise ConfigError(
            f"{key}: {path}{line} is not Python: {error.args[0]}. It is started as `accelerate launch` would start it, "
            "so name the training program itself, not a shell script around it."
        ) from None
