"""Records, and the paths of a run's folder: a file that cannot be a record is reported with its command."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from shardmake.cli import app
from shardmake.core.atomic import write_json
from shardmake.core.errors import ShardmakeError
from shardmake.run.attempt import Heartbeat, RequestedStop
from shardmake.run.paths import BelowRoot, RunDir
from shardmake.run.record import RunFile, _unsealed, check_format
from tests.finished_run import TRAINED
from tests.unit.plans import make_cluster, make_plan, make_run

PATHS = {value.path for value in vars(RunDir).values() if isinstance(value, BelowRoot)}
ABOVE = {str(above) for path in PATHS for above in Path(path).parents}
STAGES = ["fetch", "plan", "render", "data", "train", "consolidate", "evaluate", "push", "report", "stop", "cancel"]


@pytest.mark.parametrize("linked", [{path for path in PATHS if "/" not in path}, PATHS - ABOVE], ids=["top", "bottom"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_follows_no_link(stage: str, linked: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody else's data may lie there, or a person's own on a larger disk."""
    monkeypatch.chdir(tmp_path)
    write_json(Path("cluster.json"), make_cluster().model_dump(mode="json", exclude_unset=True))
    runs = {"chat": make_run().model_dump(mode="json", exclude_unset=True)}
    write_json(Path("config.json"), {"cluster": "cluster.json", "runs": runs})
    theirs, links = tmp_path / "theirs", [Path("runs/chat", path) for path in linked]
    (theirs / "train").mkdir(parents=True)
    (theirs / "train/thesis.txt").write_text("years of work")
    for link in links:
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(theirs)
    result = CliRunner().invoke(app, [stage, "chat", "--config", "config.json"])
    assert isinstance(result.exception, ShardmakeError) and "is a link to" in str(result.exception)
    assert [str(path.relative_to(theirs)) for path in theirs.rglob("*")] == ["train", "train/thesis.txt"]
    assert (theirs / "train/thesis.txt").read_text() == "years of work" and all(link.is_symlink() for link in links)


@given(beat=st.builds(Heartbeat, time=st.floats(allow_nan=False), median_step_seconds=st.floats(allow_nan=False)))
def test_a_record_is_read_back_equal(beat: Heartbeat, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("record") / "beat.json"
    beat.write(path)
    assert Heartbeat.read(path) == beat == Heartbeat.read_if_exists(path)


def test_a_missing_record_names_the_command_that_writes_it(tmp_path: Path) -> None:
    path = tmp_path / "runs/chat/train/attempts/001/stopped.json"
    assert RequestedStop.read_if_exists(path) is None
    with pytest.raises(ShardmakeError, match=r"does not exist yet\. Write it with: shardmake train chat"):
        RequestedStop.read(path)


@pytest.mark.parametrize(("content", "problem"), [
    ("", "EOF"), ('{"step": 4', "EOF"), ('{"format": 1, "step": 4}', "time: Field required"),
    ('{"format": 1, "step": "four", "time": 1}', "step: Input should be a valid integer"),
    ('{"format": 1, "step": 4, "time": 1, "epoch": 2}', "epoch: Extra inputs are not permitted"), ("{}{}", "trailing"),
])  # fmt: skip
def test_a_damaged_record_names_file_field_and_command(tmp_path: Path, content: str, problem: str) -> None:
    path = tmp_path / "runs/chat/stopped.json"
    path.parent.mkdir(parents=True)
    path.write_text(content)
    with pytest.raises(ShardmakeError, match=problem) as error:
        RequestedStop.read_if_exists(path)
    assert str(path) in str(error.value) and "shardmake train chat" in str(error.value)


def test_only_the_first_problems_are_listed(tmp_path: Path) -> None:
    path = tmp_path / "beat.json"
    path.write_text('{"format": 1}')
    with pytest.raises(ShardmakeError, match="and 3 more"):
        Heartbeat.read(path)


@pytest.mark.parametrize("file", ["sources.json", "plan/plan.json", "train/receipt.json", "train/attempts/index.json"])
def test_a_run_of_an_older_format_is_named_and_not_changed(tmp_path: Path, file: str) -> None:
    path = tmp_path / "runs/chat" / file
    path.parent.mkdir(parents=True)
    path.write_text('[{"step": 4}]' if "index" in file else '{"step": 4, "format": "text"}')
    with pytest.raises(ShardmakeError, match=rf"{file} was made by another version.*has the format (0|text)") as error:
        check_format(RunDir(tmp_path / "runs/chat"))
    with pytest.raises(ShardmakeError, match="was made by another version") as same:
        RequestedStop.read(path)
    assert str(same.value) == str(error.value)


def test_a_run_of_this_format_a_new_one_and_a_damaged_file_pass(tmp_path: Path) -> None:
    folder = RunDir(tmp_path / "runs/chat")
    check_format(folder)
    RequestedStop(step=4, time=1.5).write(folder.plan)
    for damaged in ('{"format"', "3", '["text"]'):
        folder.sources.write_text(damaged)
        check_format(folder)


@pytest.mark.parametrize("record", [make_plan("zero2"), TRAINED], ids=["plan", "receipt"])
def test_every_flipped_bit_of_a_record_is_found(record: RunFile, tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    record.write(path)
    content, accepted = path.read_bytes(), 0
    for position in range(8 * len(content)):
        flipped = bytearray(content)
        flipped[position // 8] ^= 1 << position % 8
        try:
            found = type(record).model_validate_json(_unsealed(bytes(flipped)))
        except ValueError:
            continue
        assert found == record
        accepted += 1
    assert accepted < len(content) / 3, "those that change white space alone"
    path.write_bytes(content.replace(b"zero", b"Zero"))
    with pytest.raises(ShardmakeError, match=r"damaged, or was edited by hand\. Remove it and run"):
        type(record).read(path)


PAGE = Path(__file__).parents[3] / "docs/reference/run-folder.md"
INTERNAL = {"train/job.json", "train/STOP", "train/driver.lock", "train/checkpoints/.saving", "settings/.lock"}
"""Paths by which processes of other versions, and people, find each other; the page leaves them out."""


def test_the_layout_is_the_documented_one() -> None:
    """Rules, people and other tools rely on these names."""
    column = "".join(row.split("|")[1] for row in PAGE.read_text().splitlines() if row.startswith("| `"))
    documented = {path.rstrip("/") for path in re.findall(r"`([^`]+)`", column)}
    patterns = {"train/attempts/NNN", "train/reference-DIGEST.safetensors", "settings/STAGE.json"}
    paths = {value.path for value in vars(RunDir).values() if isinstance(value, BelowRoot)}
    assert documented - patterns | INTERNAL <= paths
    rundir = RunDir(Path("runs/docs-chat"))
    assert rundir.name == "docs-chat" and rundir.metrics == Path("runs/docs-chat/train/metrics.jsonl")
    assert rundir.plan == Path("runs/docs-chat/plan/plan.json")
    assert [rundir.rendered_files(fallback) for fallback in (0, 2)] == [rundir.plan_folder, rundir.fallbacks / "2"]
    assert rundir.stage_settings("plan") == Path("runs/docs-chat/settings/plan.json")
    assert rundir.figure("loss") == Path("runs/docs-chat/figures/loss.svg")
    assert str(RunDir.pattern().plan).format(run="docs-chat") == str(rundir.plan), "Snakemake fills in the wildcard"
