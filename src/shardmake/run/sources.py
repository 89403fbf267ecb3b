"""Which exact content a run's model and data stand for, once `shardmake fetch` has brought it here.

Stages after the fetch read local copies only, so that a compute node without internet never has to ask, and a moved
branch never changes a run under way.
"""

from pathlib import Path
from typing import ClassVar

from pydantic import Field

from shardmake.config.models import Run
from shardmake.core.errors import ShardmakeError
from shardmake.core.manifest import FileRecord
from shardmake.run.paths import RunDir
from shardmake.run.record import RunRecord


class PinnedSource(RunRecord):
    """A model or data set as it lies on this machine."""

    name: str = Field(description="What the configuration says.")
    subset: str | None = Field(None, description="Subset of a hub data set that the configuration says.")
    revision: str | None = Field(None, description="Branch, tag or commit that the configuration says.")
    commit: str | None = Field(None, description="The hub's commit that it stood for; None for a local path.")
    path: str = Field(description="Folder or file here.")
    files: dict[str, FileRecord] = Field(
        default_factory=dict, description="Files by name, for what came from the hub; a local path is taken as it is."
    )


class Sources(RunRecord):
    """``sources.json``: everything that a run starts from."""

    made_by: ClassVar[str] = "shardmake fetch NAME"

    model: PinnedSource = Field(description="The base model.")
    train: PinnedSource = Field(description="The training examples.")
    eval: PinnedSource | None = Field(None, description="The evaluation examples, where they are given apart.")


def read_sources(rundir: RunDir) -> Sources | None:
    """The sources of a run; None where it was not fetched."""
    return Sources.read_if_exists(rundir.sources)


def localize(run: Run, rundir: RunDir) -> Run:
    """``run`` with its hub ids replaced by the local copies; unchanged where nothing was fetched.

    Raises `ShardmakeError` where the configuration names something else than what was fetched.
    """
    sources = read_sources(rundir)
    if sources is None:
        return run
    _check_same((run.model, None, run.revision), sources.model, rundir)
    _check_same((run.data.train, run.data.subset, run.data.revision), sources.train, rundir)
    if run.data.eval or sources.eval:
        _check_same((run.data.eval, run.data.subset, run.data.revision), sources.eval, rundir)
    data = run.data.model_copy(
        update={
            "train": sources.train.path,
            "eval": sources.eval.path if sources.eval else run.data.eval,
            "subset": None,
            "revision": None,
        }
    )
    return run.model_copy(update={"model": sources.model.path, "revision": None, "data": data})


def _check_same(named: tuple[str | None, ...], source: PinnedSource | None, rundir: RunDir) -> None:
    """Refuse a source that is not what the configuration names: (name, subset, revision); of a path, only the name."""
    fetched = (source.name, source.subset, source.revision) if source else (None, None, None)
    if fetched[0] != named[0] or (source and source.commit and fetched != named):
        raise ShardmakeError(
            f"The configuration names {_said(named)}, and {rundir.sources} was made for {_said(fetched)}. "
            f"Fetch again: shardmake fetch {rundir.name}"
        )


def _said(named: tuple[str | None, ...]) -> str:
    return " ".join(part for part in named if part) or "nothing"


def missing_files(source: PinnedSource) -> list[str]:
    """The fetched files of ``source`` that are not here, or not at their size."""
    paths = {name: Path(source.path, name) for name in source.files}
    return [
        name for name, path in paths.items() if not path.is_file() or path.stat().st_size != source.files[name].size
    ]


def require_weights(rundir: RunDir) -> None:
    """Fail now, not later on all ranks, if the fetched model is missing or incomplete."""
    sources = read_sources(rundir)
    if sources and (missing := missing_files(sources.model)):
        raise ShardmakeError(
            f"{len(missing)} files of {sources.model.name} are not here ({', '.join(missing[:3])}). "
            f"Fetch them first: shardmake fetch {rundir.name}"
        )
