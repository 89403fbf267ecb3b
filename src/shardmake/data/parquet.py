"""Rows of Parquet files, with the values that JSON lines of the same examples have.

Arrow gives all rows the same keys. A key that only other rows have comes back as null, so nulls are left out, except
those of a key that has no value in any row: it would not be in the file if no row had it. Columns of the type JSON
(`datasets` writes them for messages with unequal keys) keep every null.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardmake.core.errors import DataError

if TYPE_CHECKING:
    import pyarrow

_ROWS_AT_ONCE = 256


def parquet_rows(path: str, file: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield place and columns of each row of the open ``file``; few rows are in memory at once."""
    import pyarrow
    import pyarrow.parquet

    number = 0
    with _reading_errors(path), pyarrow.parquet.ParquetFile(file) as table:
        decode = {field.name: _decoder(field.type) for field in table.schema_arrow}
        for batch in table.iter_batches(_ROWS_AT_ONCE):
            for number, row in enumerate(batch.to_pylist(), start=number + 1):  # noqa: B020 - it counts on
                yield f"{path}, row {number}", {key: decode[key](value) for key, value in row.items()}


def count_parquet_rows(path: Path) -> int:
    """Return the number of rows of a file, which its end states."""
    import pyarrow.parquet

    with _reading_errors(str(path)):
        return int(pyarrow.parquet.read_metadata(path).num_rows)


@contextmanager
def _reading_errors(path: str) -> Iterator[None]:
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, OSError) as error:
        if getattr(error, "errno", None) is not None:
            raise
        problem = " ".join(str(error).split()).rstrip(".")
        raise DataError(f"Cannot read {path}: {problem}. Write it again, or name another one.") from None


def _decoder(kind: "pyarrow.DataType") -> Callable[[Any], Any]:
    """Return the function from a value of a column of type ``kind``, as Arrow gives it, to that of JSON lines."""
    import pyarrow

    if isinstance(kind, pyarrow.JsonType):
        return lambda value: None if value is None else json.loads(value)
    if pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind) or pyarrow.types.is_fixed_size_list(kind):
        item = _decoder(kind.value_type)
        return lambda values: None if values is None else [item(value) for value in values]
    if pyarrow.types.is_struct(kind):
        fields = {field.name: _decoder(field.type) for field in kind}
        always = {field.name for field in kind if pyarrow.types.is_null(field.type)}

        def decode(value: Any) -> Any:
            if value is None:
                return None
            return {key: fields[key](part) for key, part in value.items() if part is not None or key in always}

        return decode
    return lambda value: value
