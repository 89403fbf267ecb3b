"""Parquet files: their first rows, their columns, and the numbers of their rows."""

from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardmake.core.errors import DataError

if TYPE_CHECKING:
    import pyarrow


def parquet_rows(paths: tuple[Path, ...], batch_size: int) -> Iterator[dict[str, Any]]:
    """Yield the rows of the files, of which ``batch_size`` are in memory at once."""
    import pyarrow.parquet

    for path in paths:
        try:
            with pyarrow.parquet.ParquetFile(path) as file:
                for batch in file.iter_batches(batch_size):
                    yield from batch.to_pylist()
        except (pyarrow.ArrowException, OSError) as error:
            if getattr(error, "errno", None) is not None:
                raise
            raise unreadable(str(path), error) from None


def unreadable(source: str, cause: BaseException) -> DataError:
    """Return the error for a source that a library cannot read because of ``cause``."""
    problem = " ".join(str(cause).split()).rstrip(".")
    return DataError(f"Cannot read {source}: {problem}. Write it again, or name another one.")


def filled_parts(paths: tuple[Path, ...]) -> dict[Path, "pyarrow.Schema"]:
    """Return the schema of each file that has rows: `datasets` cannot read a file without rows.

    Raises `DataError` for a file that is not Parquet, or has other columns than the first, or columns of other types,
    which `datasets` would convert.
    """
    import pyarrow.parquet

    schemas: dict[Path, pyarrow.Schema] = {}
    for path in paths:
        try:
            metadata = pyarrow.parquet.read_metadata(path)
        except pyarrow.ArrowInvalid as error:
            raise DataError(f"{path} is not a Parquet file: {error}. Write it again, or name another file.") from None
        if metadata.num_rows:
            schemas[path] = metadata.schema.to_arrow_schema()
    for path, schema in schemas.items():
        _compare(path, schema, *next(iter(schemas.items())))
    return schemas


def _compare(path: Path, schema: "pyarrow.Schema", first_path: Path, first: "pyarrow.Schema") -> None:
    if set(schema.names) != set(first.names):
        raise DataError(
            f"Columns differ: {path} has {', '.join(schema.names)}; {first_path} has {', '.join(first.names)}. Use the "
            "same columns in all files."
        )
    for name in first.names:
        found, other = schema.field(name).type, first.field(name).type
        if not _agree(found, other):
            raise DataError(
                f"Types differ: the column {name} is {found} in {path} and {other} in {first_path}. Write it with the "
                "same type in all files."
            )


def _agree(one: "pyarrow.DataType", other: "pyarrow.DataType") -> bool:
    """Return True if values of both types are equal as Python objects; a type without values agrees with every one."""
    import pyarrow.types as of

    one, other = (it.value_type if of.is_dictionary(it) else it for it in (one, other))
    if of.is_null(one) or of.is_null(other):
        return True
    if _is_text(one) and _is_text(other):
        return True
    if _is_list(one) and _is_list(other):
        return _agree(one.value_type, other.value_type)
    if of.is_struct(one) and of.is_struct(other):
        names = {field.name for field in one}
        return names == {field.name for field in other} and all(
            _agree(one.field(name).type, other.field(name).type) for name in names
        )
    if all(of.is_integer(it) for it in (one, other)) or all(of.is_floating(it) for it in (one, other)):
        return True
    return bool(one == other)


def _is_text(kind: "pyarrow.DataType") -> bool:
    import pyarrow.types as of

    return bool(of.is_string(kind) or of.is_large_string(kind) or of.is_string_view(kind))


def _is_list(kind: "pyarrow.DataType") -> bool:
    import pyarrow.types as of

    return bool(of.is_list(kind) or of.is_large_list(kind) or of.is_fixed_size_list(kind))


def best_typed(schemas: Iterable["pyarrow.Schema"]) -> "pyarrow.Schema":
    """Return the first schema in which each column has a type; a column without values may have none."""
    found = list(schemas)
    return next((one for one in found if not any(_is_untyped(field.type) for field in one)), found[0])


def _is_untyped(kind: "pyarrow.DataType") -> bool:
    import pyarrow.types as of

    return bool(of.is_null(kind)) or any(_is_untyped(kind.field(at).type) for at in range(kind.num_fields))


@lru_cache
def last_numbers(paths: tuple[Path, ...]) -> list[int]:
    """Return the number of the last row of each file, counted over all of them."""
    import pyarrow.parquet

    return list(accumulate(pyarrow.parquet.read_metadata(path).num_rows for path in paths))
