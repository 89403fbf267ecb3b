"""The fetch stage: hub ids to local copies, pinned to commits, recorded in ``sources.json``.

It runs where there is internet (the login node); jobs then run with the hub's offline switches set. What the
configuration names by path is taken as it is. Once fetched, a run keeps its commits; to move to a newer one, name it
as ``revision`` or remove ``sources.json``.
"""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from shardmake.config import Run
from shardmake.fetch.model import check_model_folder, fetch_model, find_in_cache
from shardmake.hub import explained, is_hub_id, retried
from shardmake.manifest import record
from shardmake.receipt import write_json
from shardmake.rundir import RunDir
from shardmake.sources import Source, Sources, is_whole, read_sources

if TYPE_CHECKING:
    from huggingface_hub import HfApi

Tell = Callable[[str], None]


def fetch(run: Run, rundir: RunDir, tell: Tell = lambda _: None) -> Sources:
    """Fetch the model and the data of ``run``, check them, and write ``sources.json``.

    Raises `UserError` where the hub refuses (with what to do), where a model folder is not whole, and where offline
    switches are set and something is not here yet.
    """
    before = read_sources(rundir)
    sources = Sources(
        model=_model(run, before.model if before else None, tell),
        train=_examples(run.data.train, run, rundir, "train", before.train if before else None, tell),
        eval=_examples(run.data.eval, run, rundir, "eval", before.eval if before else None, tell)
        if run.data.eval
        else None,
    )
    write_json(rundir.sources, sources.model_dump(mode="json"))
    return sources


def _model(run: Run, before: Source | None, tell: Tell) -> Source:
    from huggingface_hub.constants import is_offline_mode

    if _still_stands(before, run.model, run.revision):
        assert before is not None
        tell(f"Model {run.model} is here, at commit {before.commit}.")
        return before
    if not is_hub_id(run.model):
        check_model_folder(Path(run.model))
        return Source(name=run.model, path=run.model)
    if is_offline_mode():
        return find_in_cache(run.model, run.revision)
    tell(f"Fetching model {run.model}.")
    return fetch_model(_connect(), run.model, run.revision)


def _examples(name: str, run: Run, rundir: RunDir, split: str, before: Source | None, tell: Tell) -> Source:
    """One split as a Parquet file in the run's folder, with the columns that the hub's data set has."""
    from shardmake.data.sources import EVAL_SPLITS, TRAIN_SPLITS, HubDataset, locate, read

    source = locate(name, run.data, TRAIN_SPLITS if split == "train" else EVAL_SPLITS)
    if not isinstance(source, HubDataset):
        return Source(name=name, path=name)
    if _still_stands(before, name, source.revision, source.subset):
        assert before is not None
        tell(f"Data {name} is here, at commit {before.commit}.")
        return before
    tell(f"Fetching data {name}.")
    commit = _commit_of_data(_connect(), source.repository, source.revision)
    rows = read(replace(source, revision=commit), rundir.fetched / "cache")
    path = rundir.fetched / split / f"{split}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    rows.to_parquet(str(path))
    return Source(
        name=name,
        subset=source.subset,
        revision=source.revision,
        commit=commit,
        path=str(path.parent),
        files={path.name: record(path)},
    )


def _still_stands(before: Source | None, name: str, revision: str | None, subset: str | None = None) -> bool:
    """Whether an earlier fetch of the same thing is here, whole."""
    return (
        before is not None
        and before.commit is not None
        and (before.name, before.revision, before.subset) == (name, revision, subset)
        and is_whole(before)
    )


def _commit_of_data(api: "HfApi", repository: str, revision: str | None) -> str:
    advice = "Check the name, the token (`hf auth login`) and the network."
    with explained(f"Asking the hub for the data set {repository}", {}, advice):
        commit = retried(lambda: api.dataset_info(repository, revision=revision)).sha
    assert commit is not None, "the hub names the commit of every revision"
    return commit


def _connect() -> "HfApi":
    """The hub's client, with the user's token where there is one."""
    from huggingface_hub import HfApi

    return HfApi(endpoint=os.environ.get("HF_ENDPOINT"))
