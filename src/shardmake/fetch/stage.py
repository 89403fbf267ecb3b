"""The fetch stage: copy hub repositories, pinned to commits, and record them in ``sources.json``.

Models and data at a URL (``s3://``, ``gs://``) are copied in the same way, and pinned by what the store lists. Fetching
runs on a machine with internet access, the login node. Jobs then run with the hub's offline switches set. A
plan needs only the small files of a model, so they come first; the weights follow the plan. Local paths are recorded
and not copied. A run keeps its commits after the first fetch. To change to a newer one, set ``revision`` or remove
``sources.json``.
"""

import logging
import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from shardmake.config.checks import run_before
from shardmake.config.formats import data_files
from shardmake.config.models import Data, EvalSource, Run
from shardmake.core.atomic import digest, sha256
from shardmake.core.disk import require_space
from shardmake.core.errors import ModelError, ShardmakeError
from shardmake.core.hub import commit_of, connect, is_hub_id, translate_hub_errors, with_retries
from shardmake.core.manifest import FileRecord, read_folder, read_named, record
from shardmake.core.run_folder import link_or_copy, locked, make_folder, remove, rename
from shardmake.core.stores import is_url
from shardmake.core.units import format_bytes
from shardmake.data.sources import EVAL_SPLITS, ONE_SPLIT, TRAIN_SPLITS, HubDataset, locate_named
from shardmake.fetch import adapter, chain, store
from shardmake.fetch import model as hub
from shardmake.fetch.adapter import Merge
from shardmake.fetch.hub_data import write_split
from shardmake.fetch.model import FETCH_AGAIN, check_model_folder, check_types, choose_files, find_in_cache, is_weights
from shardmake.run.paths import RunDir
from shardmake.run.receipts import WeightsReceipt
from shardmake.run.sources import PinnedSource, Sources, missing_files, model_before, read_sources

if TYPE_CHECKING:
    from huggingface_hub import HfApi

logger = logging.getLogger(__name__)
Part = Literal["all", "description", "weights"]
Split = Literal["train", "eval"]


def fetch(run: Run, rundir: RunDir, part: Part = "all", merge: Merge | None = None) -> Sources:
    """Fetch the model and the data of ``run``, or a part of them, verify them, and write ``sources.json``.

    ``description`` is everything except the model's weights, ``weights`` the rest. Raises `ShardmakeError` if the hub
    refuses, a model folder is incomplete, or a file is missing and an offline switch is set.
    """
    sources = _describe(run, rundir) if part != "weights" else read_sources(rundir)
    if sources is None:
        raise ModelError(f"File not found: {rundir.sources}. Run first: shardmake fetch {rundir.name}")
    if part != "description":
        receipt = _weights(run, rundir, sources.model, merge)
        if sources.adapter is not None and merge is not None:
            receipt = receipt.model_copy(update=adapter.fetch_weights(run, rundir, sources, receipt, merge))
        receipt.write(rundir.weights_receipt)
    return sources


def _weights(run: Run, rundir: RunDir, model: PinnedSource, merge: Merge | None) -> WeightsReceipt:
    """Fetch or link the weights of ``model``; return the receipt of what is there then."""
    start = model_before(rundir, model)
    is_merged = start is not None and run_before(model.name) is None
    if is_merged != bool(run.resume_from):
        raise ModelError(
            f"Weights of {model.name} were not fetched: {rundir.sources} is from before resume_from was added to the "
            f"run or removed. Fetch all parts: shardmake fetch {rundir.name}"
        )
    if start is not None and model.origin is not None and run.resume_from and merge is not None:
        if model.origin.files:
            _fetch_weights(model.origin)
        merge(run, Path(run.resume_from), Path(model.origin.path), start.model)
        return chain.link_weights(start, rundir.base_model, run)
    if (before := run_before(model.name)) is not None:
        logger.info(f"Checking the model of run {before} and linking its weights.")
        return chain.link_weights(rundir.sibling(before), rundir.base_model, run)
    is_local = model.commit is None and model.listing is None
    if not is_local:
        _fetch_weights(model)
    if not run.script:
        check_types(Path(model.path))
    if is_local:
        return _local_weights(model, rundir)
    complete = read_named(Path(model.path), [*model.files], record) if model.listing else model.files
    return WeightsReceipt(files=complete)


def _local_weights(model: PinnedSource, rundir: RunDir) -> WeightsReceipt:
    """Return size and digest of each weight file of a local folder.

    Every byte is read once. A file that was not written since another fetch, also one of another run, is not read.
    """
    before = WeightsReceipt.read_if_exists(rundir.weights_receipt)
    if before is not None and not before.files and rundir.checkpoints.exists():
        return before  # by a version without digests, whose checkpoints would belong to other settings
    folder = Path(model.path).absolute()
    paths = [folder / name for name in choose_files(path.name for path in folder.iterdir()) if is_weights(name)]
    times = {str(path): path.stat().st_ctime_ns for path in paths}
    known: dict[str, FileRecord] = {}
    for place in rundir.root.parent.glob(f"*/{rundir.weights_receipt.relative_to(rundir.root)}"):
        with suppress(ShardmakeError, OSError):  # removed or renewed at this moment, or of another version
            found = WeightsReceipt.read(place)
            same = found.changed_at.items() & times.items()
            known |= {Path(path).name: found.files[Path(path).name] for path, _ in same}
    rest = [path.name for path in paths if path.name not in known]
    size = sum((folder / name).stat().st_size for name in rest)
    if rest:
        logger.info(f"Reading the weights of {model.name} once for their digests: {format_bytes(size)}.")
    files = known | read_named(folder, rest, record)
    return WeightsReceipt(files={path.name: files[path.name] for path in paths}, changed_at=times)


def _fetch_weights(model: PinnedSource) -> None:
    from huggingface_hub.constants import is_offline_mode

    missing = missing_files(model)
    if not missing:
        logger.info(f"The weights of {model.name} are complete.")
        return
    size = sum(model.files[name].size for name in missing)
    if is_offline_mode() and model.listing is None:
        raise ModelError(
            f"{len(missing)} files of {model.name} are missing ({', '.join(missing[:3])}), and HF_HUB_OFFLINE or "
            "TRANSFORMERS_OFFLINE is set. Unset it on a machine with internet access."
        )
    require_space(Path(model.path), size, f"The base model's weights need {format_bytes(size)}")
    logger.info(f"Fetching the weights of {model.name}: {len(missing)} files, {size / 1e9:,.1f} GB.")
    if model.listing is None:
        hub.fetch_weights(connect(), model)
    else:
        store.fetch_weights(model)


def _describe(run: Run, rundir: RunDir) -> Sources:
    before = read_sources(rundir)
    earlier = {} if before is None else {source.path: source for source in (*before.train, *before.eval)}

    def examples(split: Split, sources: Sequence[EvalSource], *, several: bool) -> list[PinnedSource]:
        folders = [rundir.fetched / (f"{split}-{one.label}" if several else split) for one in sources]
        return [
            _examples(one.source, run.data.only(one), folder, split, earlier)
            for one, folder in zip(sources, folders, strict=True)
        ]

    trains_adapter = run_before(run.lora.adapter)  # its commit, as that of its adapter, also if the branch has moved
    first = read_sources(rundir.sibling(trains_adapter)) if trains_adapter else before
    model = _model(run, rundir, first.model if first else None)
    sources = Sources(
        model=model,
        adapter=adapter.describe(run, rundir, model) if run.lora.adapter else None,
        train=examples("train", run.data.sources, several=isinstance(run.data.train, list)),
        eval=examples("eval", run.data.eval_sources, several=isinstance(run.data.eval, list)),
    )
    sources.write(rundir.sources)
    return sources


def _model(run: Run, rundir: RunDir, before: PinnedSource | None) -> PinnedSource:
    from huggingface_hub.constants import is_offline_mode

    other = run_before(run.model)
    if other or run.resume_from:
        if other:
            base = chain.description_of(rundir.sibling(other))
        else:
            unmerged = run.model_copy(update={"resume_from": None})
            base = _model(unmerged, rundir, before.origin if before and before.origin else before)
        chain.copy_description(Path(base.path), rundir.base_model)
        content = digest_of_model(rundir.base_model, run)
        return PinnedSource(name=run.model, path=str(rundir.base_model), origin=base, content=content)
    if current := _current(before, run.model, run.revision):
        logger.info(f"Model {run.model} is already here, at {_version(current)}.")
        return current
    if is_url(run.model):
        logger.info(f"Fetching config and tokenizer of {run.model}.")
        return store.describe_model(run.model)
    if not is_hub_id(run.model):
        check_model_folder(Path(run.model))
        return PinnedSource(name=run.model, path=run.model, content=digest_of_model(Path(run.model), run))
    if is_offline_mode():
        return find_in_cache(run.model, run.revision)
    logger.info(f"Fetching config and tokenizer of {run.model}.")
    return hub.describe_model(connect(), run.model, run.revision)


def digest_of_model(folder: Path, run: Run) -> str:
    """Return a digest of what a local folder makes of its weights: the config, and the code if the run uses it.

    The tokenizer and its chat template are in the digest of the data.
    """
    code = sorted(folder.glob("*.py")) if run.trust_remote_code else []
    return digest({path.name: sha256(path) for path in (folder / "config.json", *code)})


def _examples(name: str, data: Data, folder: Path, split: Split, earlier: Mapping[str, PinnedSource]) -> PinnedSource:
    """Fetch the files of one split of a hub data set into ``folder``.

    ``earlier`` has the sources of an earlier fetch by their path.
    """
    is_raw = data.is_raw and split != "eval"
    whole = is_url(name) or (is_raw and is_hub_id(name))
    revision = None if is_url(name) else data.revision
    if whole and (current := next((one for one in earlier.values() if _current(one, name, revision)), None)):
        logger.info(f"Data {name} {'are' if is_url(name) else 'is'} already here, at {_version(current)}.")
        return current
    if is_url(name):
        logger.info(f"Fetching data {name}.")
        return store.fetch_data(name, every_file=is_raw)
    if whole:
        logger.info(f"Fetching every file of the data set {name}.")
        return _every_file(name, revision)
    if is_raw:
        return PinnedSource(name=name, path=name)
    source = locate_named(name, data, EVAL_SPLITS if split == "eval" else TRAIN_SPLITS)
    if not isinstance(source, HubDataset):
        return PinnedSource(name=name, path=name)
    if current := _current(earlier.get(str(folder)), name, source.revision, source.subset):
        logger.info(f"Data {name} is already here, at {_version(current)}.")
        return current
    commit = _commit_of_data(connect(), source.repository, source.revision)
    pinned = PinnedSource(name=name, subset=source.subset, revision=source.revision, commit=commit, path=str(folder))
    runs = folder.parents[2]
    with locked(runs, f"fetch-{digest([name, source.subset, commit, split])}"):
        unfinished = folder.with_name(f".{folder.name}.partial")
        remove(unfinished)
        make_folder(unfinished, private=True)
        content = unfinished / folder.name
        files = _take_same(pinned, content, runs.glob(f"*/fetched/{split}*/{ONE_SPLIT}"))
        if files is None:
            logger.info(f"Fetching data {name}.")
            make_folder(content)
            write_split(source, commit, content)
            files = {str(path.relative_to(content)): record(path) for path in data_files(content)}
        fetched = pinned.model_copy(update={"files": files})
        fetched.write(content / ONE_SPLIT)
        remove(folder)  # other runs may have links to the files
        rename(content, folder)
        remove(unfinished)
    return fetched


def _take_same(wanted: PinnedSource, folder: Path, records: Iterable[Path]) -> dict[str, FileRecord] | None:
    """Link the files of another run that fetched the same split into ``folder``; return None if no run has them.

    ``records`` are the files `ONE_SPLIT` of all runs for this split.
    """
    for place in sorted(records):
        with suppress(ShardmakeError, OSError):  # removed or renewed at this moment, or of another version
            found = PinnedSource.read(place)
            if (found.name, found.subset, found.commit) == (wanted.name, wanted.subset, wanted.commit):
                shutil.copytree(place.parent, folder, copy_function=link_or_copy, ignore=_links)
                if {str(path.relative_to(folder)): record(path) for path in data_files(folder)} == found.files:
                    logger.info(f"Took the data {wanted.name} of run {place.parents[2].name}.")
                    return found.files
        remove(folder)
    return None


def _links(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if Path(folder, name).is_symlink()]


def _every_file(name: str, revision: str | None) -> PinnedSource:
    """Fetch every file of a hub data set into the hub's cache."""
    api = connect()
    commit = _commit_of_data(api, name, revision)
    with translate_hub_errors(f"Fetching {name}", {}, FETCH_AGAIN):
        folder = Path(with_retries(lambda: api.snapshot_download(name, repo_type="dataset", revision=commit)))
    return PinnedSource(name=name, revision=revision, commit=commit, path=str(folder), files=read_folder(folder))


def _version(source: PinnedSource) -> str:
    return f"commit {source.commit}" if source.commit else f"listing {source.listing}"


def _current(
    before: PinnedSource | None, name: str, revision: str | None, subset: str | None = None
) -> PinnedSource | None:
    """Return ``before``, an earlier fetch of the same source, if it is complete except for weights."""
    if before is None or (before.name, before.revision, before.subset) != (name, revision, subset):
        return None
    is_pinned = (before.commit or before.listing) is not None
    return before if is_pinned and all(map(is_weights, missing_files(before))) else None


def _commit_of_data(api: "HfApi", repository: str, revision: str | None) -> str:
    advice = "Check the name, the token (`hf auth login`) and the network."
    with translate_hub_errors(f"Requesting the data set {repository} from the hub", {}, advice):
        return with_retries(lambda: commit_of(api, repository, revision, kind="dataset"), is_first=True)
