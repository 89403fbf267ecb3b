"""Data sets of the hub: the files of one split.

JSON, CSV and Parquet files come as they are, so that their rows are read as those of any other file. What only
`datasets` reads (texts, archives, files with settings of their own) is written as Parquet.
"""

import dataclasses
import errno
import glob
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from shardmake.config.formats import data_kind
from shardmake.core.errors import DataError, ShardmakeError, nearest
from shardmake.core.hub import connect, with_retries
from shardmake.data.sources import HubDataset

if TYPE_CHECKING:
    import datasets

_WHERE: Final = {"name", "version", "data_dir", "data_files", "description"}
"""Keys of a builder's configuration that do not change how a file is read."""


def write_split(source: HubDataset, commit: str, folder: Path) -> None:
    """Write the first existing split of ``source`` at ``commit`` into ``folder``.

    Raises `DataError` if there is no such split or subset, if it cannot be read, and if the hub does not answer.
    """
    import datasets

    with _hub_errors(source, commit):
        builder = datasets.load_dataset_builder(source.repository, source.subset, revision=commit)
        existing = datasets.get_dataset_split_names(source.repository, source.subset, revision=commit)
        split = next((split for split in source.splits if split in existing), None)
        if split is None:
            raise DataError(
                f"Hub data set {source} has no split {' or '.join(source.splits)}, only {', '.join(existing)}. "
                f"Name one, as in {source.repository}:{existing[0]}."
            )
        if names := _readable_files(builder, split, f"hf://datasets/{source.repository}@{commit}/"):
            fetch_files = partial(
                connect().snapshot_download, source.repository, repo_type="dataset", revision=commit, local_dir=folder
            )
            with_retries(lambda: fetch_files(allow_patterns=[glob.escape(name) for name in names]))
        else:
            builder.download_and_prepare()
            builder.as_dataset(split).to_parquet(str(folder / f"{split}.parquet"))


def _readable_files(builder: "datasets.DatasetBuilder", split: str, root: str) -> list[str]:
    """Return the files of ``split`` below ``root``; none if `shardmake.data.files` reads them otherwise."""
    config, usual = builder.config, type(builder.config)()
    keys = {field.name for field in dataclasses.fields(config)} - _WHERE
    files = (config.data_files or {}).get(split, [])
    has_settings = any(getattr(config, key) != getattr(usual, key) for key in keys)
    kinds = {data_kind(name) for name in files}
    if has_settings or len(kinds) != 1 or None in kinds or not all(name.startswith(root) for name in files):
        return []
    return [name.removeprefix(root) for name in files]


@contextmanager
def _hub_errors(source: HubDataset, commit: str) -> Iterator[None]:
    """Turn errors of a hub data set into `DataError` with advice; a full disk is not one of them."""
    import datasets

    try:
        yield
    except ShardmakeError:
        raise
    except datasets.exceptions.DatasetGenerationError as error:
        cause = error.__cause__ or error.__context__ or error
        if getattr(cause, "errno", None) is not None:
            raise cause from None
        problem = " ".join(str(cause).split()).rstrip(".")
        raise DataError(f"Cannot read hub data set {source}: {problem}. Name another one.") from None
    except ValueError as error:
        raise DataError(f"Cannot load hub data set {source}: {_subset_mistake(source, commit) or error}") from None
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise DataError(
            f"Cannot fetch hub data set {source}: the hub request failed: {error}. Check the name and the network."
        ) from None


def _subset_mistake(source: HubDataset, commit: str) -> str:
    import datasets

    subsets = datasets.get_dataset_config_names(source.repository, revision=commit)
    existing = f"Existing: {', '.join(subsets)}."
    if source.subset is None:
        return f"it has several subsets; choose one with data.subset. {existing}" if len(subsets) > 1 else ""
    suggestion = nearest(source.subset, subsets)
    return "" if source.subset in subsets else f"it has no subset {source.subset!r}.{suggestion} {existing}"
