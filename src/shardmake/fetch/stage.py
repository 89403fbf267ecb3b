"""The fetch stage: hub ids to local copies, pinned to commits, recorded in ``sources.json``.

It runs where there is internet (the login node); jobs then run with the hub's offline switches set. A plan needs a
model's small files only, so they come first and the weights once there is a plan. What the configuration names by path
is taken as it is. Once fetched, a run keeps its commits; to move to a newer one, name it
as ``revision`` or remove ``sources.json``.
"""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from shardmake.config.models import Run
from shardmake.core.atomic import write_json
from shardmake.core.disk import check_download
from shardmake.core.errors import ShardmakeError
from shardmake.core.hub import is_hub_id, translate_hub_errors, with_retries
from shardmake.core.manifest import manifest_json, record
from shardmake.fetch.model import check_model_folder, describe_model, fetch_weights, find_in_cache, is_weights
from shardmake.run.paths import RunDir
from shardmake.run.sources import PinnedSource, Sources, missing_files, read_sources

if TYPE_CHECKING:
    from huggingface_hub import HfApi

Tell = Callable[[str], None]
Part = Literal["all", "description", "weights"]


def fetch(run: Run, rundir: RunDir, tell: Tell = lambda _: None, part: Part = "all") -> Sources:
    """Fetch the model and the data of ``run``, or a part of them, check them, and write ``sources.json``.

    ``description`` is all but the model's weights, which may then be fetched as ``weights``.
    Raises ShardmakeError where the hub refuses (with what to do), where a model folder is not whole, and where offline
    switches are set and something is not here yet.
    """
    sources = _describe(run, rundir, tell) if part != "weights" else _read(rundir)
    if part != "description":
        _bring_weights(sources.model, tell)
        write_json(rundir.weights_receipt, {"files": manifest_json(sources.model.files)})
    return sources


def _read(rundir: RunDir) -> Sources:
    sources = read_sources(rundir)
    if sources is None:
        raise ShardmakeError(f"There is no {rundir.sources} yet. Make it first: shardmake fetch {rundir.name}")
    return sources


def _bring_weights(model: PinnedSource, tell: Tell) -> None:
    from huggingface_hub.constants import is_offline_mode

    missing = missing_files(model)
    if not missing:
        tell(f"The weights of {model.name} are here.")
        return
    size = sum(model.files[name].size for name in missing)
    if is_offline_mode():
        raise ShardmakeError(
            f"{len(missing)} files of {model.name} are not here ({', '.join(missing[:3])}), and HF_HUB_OFFLINE or "
            "TRANSFORMERS_OFFLINE is set. Unset it where there is internet."
        )
    check_download(Path(model.path), size)
    tell(f"Fetching the weights of {model.name}: {len(missing)} files, {size / 1e9:,.1f} GB.")
    fetch_weights(_connect(), model)


def _describe(run: Run, rundir: RunDir, tell: Tell) -> Sources:
    before = read_sources(rundir)
    sources = Sources(
        model=_model(run, before.model if before else None, tell),
        train=_examples(run.data.train, run, rundir, "train", before.train if before else None, tell),
        eval=_examples(run.data.eval, run, rundir, "eval", before.eval if before else None, tell)
        if run.data.eval
        else None,
    )
    sources.write(rundir.sources)
    return sources


def _model(run: Run, before: PinnedSource | None, tell: Tell) -> PinnedSource:
    from huggingface_hub.constants import is_offline_mode

    if _still_stands(before, run.model, run.revision):
        assert before is not None
        tell(f"Model {run.model} is here, at commit {before.commit}.")
        return before
    if not is_hub_id(run.model):
        check_model_folder(Path(run.model))
        return PinnedSource(name=run.model, path=run.model)
    if is_offline_mode():
        return find_in_cache(run.model, run.revision)
    tell(f"Fetching config and tokenizer of {run.model}.")
    return describe_model(_connect(), run.model, run.revision)


def _examples(name: str, run: Run, rundir: RunDir, split: str, before: PinnedSource | None, tell: Tell) -> PinnedSource:
    """One split as a Parquet file in the run's folder, with the columns that the hub's data set has."""
    from shardmake.data.sources import EVAL_SPLITS, TRAIN_SPLITS, HubDataset, locate, read

    source = locate(name, run.data, TRAIN_SPLITS if split == "train" else EVAL_SPLITS)
    if not isinstance(source, HubDataset):
        return PinnedSource(name=name, path=name)
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
    return PinnedSource(
        name=name,
        subset=source.subset,
        revision=source.revision,
        commit=commit,
        path=str(path.parent),
        files={path.name: record(path)},
    )


def _still_stands(before: PinnedSource | None, name: str, revision: str | None, subset: str | None = None) -> bool:
    """Whether an earlier fetch of the same thing is here, whole but for weights."""
    return (
        before is not None
        and before.commit is not None
        and (before.name, before.revision, before.subset) == (name, revision, subset)
        and all(is_weights(name) for name in missing_files(before))
    )


def _commit_of_data(api: "HfApi", repository: str, revision: str | None) -> str:
    advice = "Check the name, the token (`hf auth login`) and the network."
    with translate_hub_errors(f"Asking the hub for the data set {repository}", {}, advice):
        commit = with_retries(lambda: api.dataset_info(repository, revision=revision)).sha
    assert commit is not None, "the hub names the commit of every revision"
    return commit


def _connect() -> "HfApi":
    """The hub's client, with the user's token where there is one."""
    from huggingface_hub import HfApi

    return HfApi(endpoint=os.environ.get("HF_ENDPOINT"))
