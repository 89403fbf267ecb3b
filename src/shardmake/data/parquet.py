"""Parquet files: their first rows, their columns, and the numbers of their rows."""

from collections.abc import Iterator
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

from shardmake.core.errors import DataError


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


def check_columns(paths: tuple[Path, ...]) -> None:
    """Raise `DataError` for files that are not Parquet or have other columns than the first."""
    import pyarrow.parquet

    schemas = {}
    for path in paths:
        try:
            schemas[path] = pyarrow.parquet.read_schema(path).names
        except pyarrow.ArrowInvalid as error:
            raise DataError(f"{path} is not a Parquet file: {error}. Write it again, or name another file.") from None
    for path, names in schemas.items():
        if set(names) != set(schemas[paths[0]]):
            other = ", ".join(schemas[paths[0]])
            raise DataError(
                f"Columns differ: {path} has {', '.join(names)}; {paths[0]} has {other}. Use the same columns in "
                "all files."
            )


@lru_cache
def last_numbers(paths: tuple[Path, ...]) -> list[int]:
    """Return the number of the last row of each file, counted over all of them."""
    import pyarrow.parquet

    return list(accumulate(pyarrow.parquet.read_metadata(path).num_rows for path in paths))
