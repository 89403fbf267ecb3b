"""The exact content of a run's model and data, as `shardmake fetch` recorded it.

Stages after the fetch read local copies only. A compute node needs no internet access, and a moved branch never changes
a run in progress.
"""

import os
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from shardmake.config.checks import run_before
from shardmake.config.models import EvalSource, Lora, Run
from shardmake.core.atomic import digest, sha256
from shardmake.core.errors import ConfigError, DataError, ModelError
from shardmake.core.manifest import FileRecord, Manifest, differences, read_named, record
from shardmake.run.paths import RunDir
from shardmake.run.receipts import DataReceipt, WeightsReceipt
from shardmake.run.record import RunFile, RunRecord, optional


class PinnedSource(RunRecord):
    """A model or data set on this machine."""

    name: str = Field(description="Name in the configuration.")
    subset: str | None = Field(None, description="Subset of a hub data set, from the configuration.")
    revision: str | None = Field(None, description="Branch, tag or commit, from the configuration.")
    commit: str | None = Field(None, description="The hub's commit; None for a local path and for a URL.")
    listing: str | None = Field(
        None, description="Digest of the names, sizes and versions of the files at a URL; None for anything else."
    )
    path: str = Field(description="Local folder or file.")
    files: dict[str, FileRecord] = Field(
        default_factory=dict,
        description="Files from the hub or a URL by name; empty for a local path. Weights at a URL have no digest.",
    )
    content: str | None = Field(None, description="Digest of a local model's config and code; None for the hub.")
    origin: "PinnedSource | None" = optional(
        None, "For another run's model, or a checkpoint's: the model from which that training started."
    )

    @property
    def first(self) -> "PinnedSource":
        """Return the model from which the first run of a chain starts: this one if it is not a run's."""
        return self if self.origin is None else self.origin.first


class PinnedAdapter(RunRecord):
    """The adapter whose training continues."""

    name: str = Field(description="Path, or `run:NAME`, in the configuration.")
    rank: int | None = optional(None, "Rank of its matrices; None, as the rest, if the section `lora` of a run has it.")
    alpha: int | None = optional(None, "Scale: the update is multiplied by alpha / rank.")
    targets: list[str] | None = optional(None, "Layers that it changes.")

    def merged_into(self, lora: Lora) -> Lora:
        """Return ``lora`` with the adapter's values; raise `ConfigError` if it sets another one."""
        own = self.model_dump(exclude={"name"}, exclude_none=True)
        for key in sorted(own.keys() & lora.model_fields_set):
            value = getattr(lora, key)
            if (sorted(value) if isinstance(value, list) else value) != own[key]:
                raise ConfigError(
                    f"lora.{key}: {value} is not that of lora.adapter {self.name}, {own[key]}. Remove lora.{key}."
                )
        return lora.model_copy(update=own)


class Sources(RunFile):
    """``sources.json``: everything that a run starts from."""

    made_by: ClassVar[str] = "shardmake fetch NAME"

    model: PinnedSource = Field(description="The base model.")
    train: list[PinnedSource] = Field(description="The sources of the training examples, in the configured order.")
    eval: list[PinnedSource] = Field([], description="The sources of the evaluation examples, if configured.")
    adapter: PinnedAdapter | None = optional(None, "The adapter whose training continues.")


def model_before(rundir: RunDir, model: PinnedSource) -> RunDir | None:
    """Return the folder of the finished model that ``model`` links: another run's, or a merged checkpoint."""
    if (name := run_before(model.name)) is not None:
        return rundir.sibling(name)
    return RunDir(rundir.fetched / "checkpoint") if model.origin is not None else None


def read_sources(rundir: RunDir) -> Sources | None:
    """Return the sources of a run, or None if nothing was fetched."""
    return Sources.read_if_exists(rundir.sources)


def localize(run: Run, rundir: RunDir) -> Run:
    """Return ``run`` with local copies in place of hub ids; unchanged if nothing was fetched.

    Raises `ConfigError` if the configuration names something else than what was fetched, or the model of another run
    or an adapter and nothing was fetched.
    """
    sources = read_sources(rundir)
    if sources is None:
        what = f"Adapter not found: {run.lora.adapter} was not read" if run.lora.adapter else ""
        if run_before(run.model) is not None:
            what = f"Model not found: {run.model} is another run's model"
        if what:
            advice = f"Fetch first: shardmake fetch {rundir.name} --part description"
            raise ConfigError(f"{what}, and {rundir.sources} does not exist. {advice}")
        return run
    adapter, lora, path = sources.adapter, run.lora, str(rundir.adapter)
    _check_same((lora.adapter, None, None), PinnedSource(name=adapter.name, path=path) if adapter else None, rundir)
    if adapter is not None:
        lora = adapter.merged_into(lora).model_copy(update={"adapter": path})
    _check_same((run.model, None, run.revision), sources.model, rundir)
    data = run.data
    for one, source in (*zip_longest(data.sources, sources.train), *zip_longest(data.eval_sources, sources.eval)):
        hub = data.only(one) if one else data
        _check_same((one.source if one else None, hub.subset, hub.revision), source, rundir)
    here = {
        "train": _local_sources(data.train, sources.train),
        "eval": None if data.eval is None else _local_sources(data.eval, sources.eval),
        "subset": None,
        "revision": None,
    }
    update = {"model": sources.model.path, "revision": None, "data": run.data.model_copy(update=here), "lora": lora}
    return run.model_copy(update=update)


def _local_sources(sources: str | Sequence[EvalSource], pinned: Sequence[PinnedSource]) -> str | list[EvalSource]:
    if isinstance(sources, str):
        return pinned[0].path
    return [
        one.model_copy(update={"source": source.path, "name": one.label, "subset": None, "revision": None})
        for one, source in zip(sources, pinned, strict=True)
    ]


def _check_same(named: tuple[str | None, ...], source: PinnedSource | None, rundir: RunDir) -> None:
    """Compare a source with the configured (name, subset, revision); for a path, only the name."""
    fetched = (source.name, source.subset, source.revision) if source else (None, None, None)
    if fetched[0] != named[0] or (source and source.commit and fetched != named):
        raise ConfigError(
            f"Sources differ: the configuration names {_words(named)}, but {rundir.sources} has {_words(fetched)}. "
            f"Fetch again: shardmake fetch {rundir.name}"
        )


def _words(named: tuple[str | None, ...]) -> str:
    return " ".join(part for part in named if part) or "nothing"


def missing_files(source: PinnedSource) -> list[str]:
    """Return the files of ``source`` that are missing or have another size."""
    paths = {name: Path(source.path, name) for name in source.files}
    return [
        name for name, path in paths.items() if not path.is_file() or path.stat().st_size != source.files[name].size
    ]


def require_weights(rundir: RunDir) -> None:
    """Raise `ModelError` if the fetched model is incomplete or outdated, before any rank starts.

    Of a local model, only files that were written since the fetch are read.
    """
    sources = read_sources(rundir)
    if sources is None:
        return
    if (before := model_before(rundir, sources.model)) is not None:
        _require_current(rundir, before)
    if missing := missing_files(sources.model):
        raise ModelError(
            f"{len(missing)} files of {sources.model.name} are missing ({', '.join(missing[:3])}). "
            f"Fetch them first: shardmake fetch {rundir.name}"
        )
    receipt = WeightsReceipt.read_if_exists(rundir.weights_receipt)
    if sources.adapter and (receipt is None or receipt.adapter_of != origin_of_adapter(rundir, sources.adapter.name)):
        raise ModelError(
            f"Training was not started: {rundir.weights_receipt} does not record the present adapter of "
            f"{sources.adapter.name}. Fetch it first: shardmake fetch {rundir.name} --part weights"
        )
    if receipt and receipt.changed_at:
        files = recorded_weights(rundir)
        now = {name: Path(name).stat().st_ctime_ns for name in files if Path(name).is_file()}  # no program can set it
        changed = {name: file for name, file in files.items() if receipt.changed_at.get(name) != now.get(name)}
        refuse_changed(rundir, changed)


def origin_of_adapter(rundir: RunDir, name: str) -> str | None:
    """Return what `WeightsReceipt.adapter_of` is for the adapter ``name``; None if its run has no finished model."""
    if (before := run_before(name)) is None:
        return name
    receipt = rundir.sibling(before).model_receipt
    return sha256(receipt) if receipt.exists() else None


def recorded_weights(rundir: RunDir) -> Manifest:
    """Return the files of the base model, and of an adapter, by path, as `shardmake fetch` recorded them, if it did."""
    sources, receipt = read_sources(rundir), WeightsReceipt.read_if_exists(rundir.weights_receipt)
    if sources is None or receipt is None:
        return {}
    places = {sources.model.path: receipt.files, str(rundir.adapter): receipt.adapter if sources.adapter else {}}
    return {str(Path(folder, name).absolute()): one for folder, held in places.items() for name, one in held.items()}


def recorded_data(rundir: RunDir, *splits: Literal["train", "eval"]) -> Manifest:
    """Return the files of the tokenized data by path, as `shardmake data` recorded them."""
    receipt = DataReceipt.read_if_exists(rundir.data_receipt)
    files = [file for split in splits for file in getattr(receipt, split).files] if receipt else []
    return {str(rundir.data / file.path): FileRecord(file.bytes, file.sha256) for file in files}


def refuse_changed(rundir: RunDir, expected: Manifest) -> None:
    """Read the files ``expected``, by path, and raise `ModelError` if one is not as it was recorded."""
    present = [name for name in expected if Path(name).is_file()]
    if changed := differences(expected, read_named(Path(), present, record)):
        raise ModelError(
            f"A file differs from the record of run {rundir.name}: {changed[0]}. Other weights or data than planned "
            f"would be used. Restore the file, or take what is there now (shardmake fetch {rundir.name} --part "
            f"weights, or shardmake data {rundir.name}) and train from the start."
        )


def check_raw(rundir: RunDir) -> None:
    """Raise `DataError` if a file of the raw data has another size than when it was hashed."""
    for file in DataReceipt.read(rundir.data_receipt).sources["train"]["files"]:
        path = rundir.raw_data / file["path"]
        size = path.stat().st_size if path.exists() else None
        if size != file["bytes"]:
            found = "is missing" if size is None else f"has {size:,} bytes instead of {file['bytes']:,}"
            raise DataError(
                f"Training was not started: {os.path.realpath(path)} {found}, and other data than the run's would be "
                f"learned. Restore it, or hash the data again: shardmake data {rundir.name}"
            )


def _require_current(rundir: RunDir, before: RunDir) -> None:
    """Raise `ModelError` unless the weights of the run ``before`` were fetched since its model was written."""
    receipt = WeightsReceipt.read_if_exists(rundir.weights_receipt)
    if receipt is not None and before.model_receipt.exists() and receipt.merged == sha256(before.model_receipt):
        return
    state = "was not fetched yet" if receipt is None else f"is not the one that {rundir.weights_receipt} records"
    raise ModelError(
        f"Training was not started: the model of run {before.name} {state}. Fetch it first: "
        f"shardmake fetch {rundir.name} --part weights"
    )


def content_of_model(rundir: RunDir) -> str | None:
    """Return a digest of a model that can change under its name: that of another run, a local one, or an adapter.

    None for a model of the hub without an adapter, and if nothing was fetched.
    """
    sources, receipt = read_sources(rundir), WeightsReceipt.read_if_exists(rundir.weights_receipt)
    if sources is None or (sources.model.origin is None and not (sources.adapter or (receipt and receipt.changed_at))):
        return sources.model.content if sources else None
    receipt = receipt or WeightsReceipt.read(rundir.weights_receipt)
    files = receipt.files | (receipt.adapter if sources.adapter else {})
    return digest({"description": sources.model.content, **{name: one.sha256 for name, one in files.items()}})
