"""The base of every JSON record that one process writes and another reads."""

import json
import operator
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Final, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from shardmake.core.atomic import sealed, unsealed, write_json
from shardmake.core.errors import ShardmakeError
from shardmake.core.run_folder import read_bytes
from shardmake.run.paths import RUNS, RunDir

FORMAT: Final = 1
"""Format of the files of a run. Files of an older one are refused (`check_format`), never made again by themselves."""
_SHOWN_PROBLEMS = 3
T = TypeVar("T")


def optional(default: Any, description: str, **limits: Any) -> Any:
    """Return a field that is not in the file while it has its ``default``."""
    return Field(default, exclude_if=partial(operator.eq, default), description=description, **limits)


class RunRecord(BaseModel):
    """A value that is written as JSON and read back equal. Unknown fields are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="constants")
    made_by: ClassVar[str] = "shardmake train NAME"
    """The command that writes the file, for error messages."""

    @classmethod
    def read(cls, path: Path, made_by: str = "") -> Self:
        """Return the record at ``path``.

        Raises `ShardmakeError` if the file is missing or is not such a record; the message names the fields and the
        command ``made_by`` that writes the file.
        """
        return read_record(path, cls, made_by or cls.made_by)

    @classmethod
    def read_if_exists(cls, path: Path) -> Self | None:
        """Return the record at ``path``, or None if there is no such file, also when it is removed at this moment."""
        try:
            return _parse(path, read_bytes(path), cls, cls.made_by)
        except FileNotFoundError:
            return None

    def write(self, path: Path) -> bool:
        """Write the record to ``path`` atomically; return whether the file changed."""
        return write_json(path, self.as_json())

    def as_json(self) -> Any:
        """Return the record as JSON data, keys in the order of the fields."""
        return self.model_dump(mode="json")


class RunFile(RunRecord):
    """A record that is a file of its own."""

    format: Literal[1] = Field(FORMAT, description="Format of the files of a run.")
    checksum: str | None = optional(None, "Digest of all other keys; in the file alone.")

    def write(self, path: Path) -> bool:
        """Write the record and its checksum to ``path`` atomically; return whether the file changed."""
        return write_json(path, sealed(self.as_json()))


def check_format(rundir: RunDir) -> None:
    """Raise `ShardmakeError` if the folder of a run has another format than this version writes."""
    for path in (rundir.sources, rundir.plan, rundir.data_receipt, rundir.train_receipt, rundir.attempt_history):
        if path.exists():
            _check_format(path, read_bytes(path))


def _check_format(path: Path, content: bytes) -> None:
    """Raise `ShardmakeError` if a file has another format; a damaged file is reported by its reader."""
    try:
        values = json.loads(content)
    except ValueError:
        return
    entries = values if isinstance(values, list) else [values]
    if (found := next((entry.get("format", 0) for entry in entries if isinstance(entry, dict)), FORMAT)) != FORMAT:
        raise ShardmakeError(
            f"{path} was made by another version of Shardmake: it has the format {found}, and this version reads "
            f"{FORMAT}. Nothing was changed. Use that version for this run. To continue with the other runs, remove it "
            "from the configuration; to make it again, give it another name."
        )


def read_record(path: Path, kind: type[T], made_by: str) -> T:
    """Return the content of ``path`` as a ``kind``, which may be any type that pydantic can validate."""
    try:
        return _parse(path, read_bytes(path), kind, made_by)
    except FileNotFoundError:
        raise ShardmakeError(f"{path} does not exist yet. Write it with: {_of_run(made_by, path)}") from None


def _parse(path: Path, content: bytes, kind: type[T], made_by: str) -> T:
    try:
        return TypeAdapter(kind).validate_json(_unsealed(content))
    except ValueError as error:
        _check_format(path, content)
        problem = f"{_problems(error)}. It is incomplete" if isinstance(error, ValidationError) else str(error)
        raise ShardmakeError(f"Cannot read {path}: {problem}. Remove it and run: {_of_run(made_by, path)}") from None


def _unsealed(content: bytes) -> bytes:
    """Return a JSON text without checksums; other text is returned as it is, for the reader's own message."""
    try:
        values = json.loads(content)
    except ValueError:
        return content
    return json.dumps(unsealed(values)).encode()


def _of_run(command: str, path: Path) -> str:
    """Return ``command`` with the run's name in place of NAME, if ``path`` lies below the default folder of runs."""
    parts = path.absolute().parts[:-1]
    below = parts[parts.index(RUNS.name) + 1 :] if RUNS.name in parts else ()
    return command.replace("NAME", below[0]) if below else command


def _problems(error: ValidationError) -> str:
    """Return the first problems of ``error``, each with its field."""
    problems = [
        ": ".join(part for part in (".".join(map(str, problem["loc"])), problem["msg"]) if part)
        for problem in error.errors(include_url=False, include_input=False)
    ]
    more = [f"and {len(problems) - _SHOWN_PROBLEMS} more"] if len(problems) > _SHOWN_PROBLEMS else []
    return "; ".join([*problems[:_SHOWN_PROBLEMS], *more])
