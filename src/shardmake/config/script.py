"""A user's own training program, as far as it can be judged without running it."""

from pathlib import Path

from shardmake.core.errors import ShardmakeError


def check_script(key: str, path: Path) -> None:
    """Refuse a script that is not there or that Python cannot read; ``key`` is where the configuration names it."""
    if not path.is_file():
        raise ShardmakeError(f"{key}: {str(path)!r} does not exist. Name a Python file (now in {Path.cwd()}).")
    try:
        compile(path.read_bytes(), str(path), "exec")
    except (SyntaxError, ValueError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        raise ShardmakeError(
            f"{key}: {path}{line} is not Python: {error.args[0]}. It is started as `accelerate launch` would start it, "
            "so name the training program itself, not a shell script around it."
        ) from None
