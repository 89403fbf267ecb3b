"""Parquet files: their first rows, their columns, and the numbers of their rows."""

from collections.abc import Iterator
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


def filled_parts(paths: tuple[Path, ...]) -> tuple[list[Path], "pyarrow.Schema | None"]:
    """Return the files that have rows, and the schema of all of them: `datasets` cannot read a file without rows.

    Raises `DataError` for a file that is not Parquet, has other columns than the first, or types that Arrow does not
    unify with those of the files before it.
    """
    import pyarrow.parquet

    parts: list[Path] = []
    common: pyarrow.Schema | None = None
    for path in paths:
        try:
            metadata = pyarrow.parquet.read_metadata(path)
        except pyarrow.ArrowInvalid as error:
            raise DataError(f"{path} is not a Parquet file: {error}. Write it again, or name another file.") from None
        if metadata.num_rows:
            schema = _without_dictionaries(metadata.schema.to_arrow_schema())
            common = schema if common is None else _unified(common, schema, path, parts[0])
            parts.append(path)
    return parts, common


def _without_dictionaries(schema: "pyarrow.Schema") -> "pyarrow.Schema":
    """Return ``schema`` with the types of the values, which Arrow does not unify with dictionaries of them."""
    import pyarrow

    kinds = [getattr(kind, "value_type", kind) if pyarrow.types.is_dictionary(kind) else kind for kind in schema.types]
    return pyarrow.schema(zip(schema.names, kinds, strict=True))


def _unified(common: "pyarrow.Schema", schema: "pyarrow.Schema", path: Path, first: Path) -> "pyarrow.Schema":
    import pyarrow

    if set(schema.names) != set(common.names):
        raise DataError(
            f"Columns differ: {path} has {', '.join(schema.names)}; {first} has {', '.join(common.names)}. Use the "
            "same columns in all files."
        )
    try:
        return pyarrow.unify_schemas([common, schema], promote_options="permissive")
    except pyarrow.ArrowTypeError as error:
        raise DataError(
            f"Types differ between {first} and {path}: {error}. Write the column with the same type in all files."
        ) from None


@lru_cache
def last_numbers(paths: tuple[Path, ...]) -> list[int]:
    """Return the number of the last row of each file, counted over all of them."""
    import pyarrow.parquet

    return list(accumulate(pyarrow.parquet.read_metadata(path).num_rows for path in paths))
