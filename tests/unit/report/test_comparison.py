"""The comparison of runs: settings that differ, results, the best ones, and the page."""

import re
from pathlib import Path
from typing import Any

import pytest

from shardmake.commands.status import print_comparison, select_runs
from shardmake.config.load import parse_config
from shardmake.config.models import Config
from shardmake.core.errors import ConfigError
from shardmake.report.comparison import Comparison, compare, write_comparison
from shardmake.run.evaluation import EvaluationResult
from shardmake.run.metrics import DeviceMemory, read_metrics
from shardmake.run.paths import RunDir
from shardmake.run.receipts import DataFile, DataReceipt
from shardmake.run.settings import current
from tests.finished_run import EVALUATED, PREFERENCES, make_data_receipt, make_run, make_rundir, write_history
from tests.unit.plans import make_cluster

GPU = make_cluster(accelerator="a100-80gb")
RUN = make_run().model_dump(exclude_unset=True)
ATTEMPTS = [(0.0, 900.0, range(1, 61), "finished")]


def config_of(**sweep: Any) -> Config:
    return parse_config({"cluster": "c", "runs": {"grid": RUN | {"sweep": sweep}}}, "test")


def make_finished(root: Path, name: str, loss: float, accelerator: str = "a100-80gb") -> RunDir:
    """A finished run with an evaluation loss, and a measured peak of 9 GiB at its last step."""
    rundir = RunDir(make_rundir(root / name).root.rename(root / "runs" / name))
    write_history(rundir, ATTEMPTS, accelerator)
    memory = DeviceMemory(allocated=8 << 30, reserved=9 << 30)
    lines = [line.model_copy(update={"memory": memory}) for line in read_metrics(rundir.metrics)]
    rundir.metrics.write_text("".join(line.as_text() for line in lines))
    tuned = EVALUATED.tuned.model_copy(update={"loss": loss})
    EVALUATED.model_copy(update={"tuned": tuned}).write(rundir.evaluation)
    return rundir


@pytest.fixture
def sweep(tmp_path: Path) -> tuple[Config, Path]:
    """Three runs of a sweep: two finished ones, and one that has not begun."""
    (tmp_path / "runs").mkdir()
    make_finished(tmp_path, "grid-lr1e-5", 2.5)
    make_finished(tmp_path, "grid-lr2e-5", 2.25)
    return config_of(learning_rate=[1e-5, 2e-5, 3e-5]), tmp_path / "runs"


def compare_sweep(config: Config, runs: Path) -> Comparison:
    return compare(select_runs(config, [], "grid"), GPU, runs)


def test_different_settings_and_best_results(sweep: tuple[Config, Path], capsys: pytest.CaptureFixture[str]) -> None:
    found = compare_sweep(*sweep)
    assert found.settings == {"learning_rate": ["1e-05", "2e-05", "3e-05"]}
    header, rows = found.table()
    first, second, third = (dict(zip(header, row, strict=True)) for row in rows)
    assert (first["evaluation loss"], second["evaluation loss"]) == ("2.5000", "2.2500 *")
    assert first["GPU-hours"] == "0.50" and first["tokens"] == "245,760"
    assert (first["memory predicted"], first["memory measured"]) == ("10.0 GiB", "9.0 GiB"), "equal: none is best"
    assert set(third.values()) == {"grid-lr3e-5", "3e-05", ""}
    assert found.notes == ["Not trained to the end, so never marked as the best: grid-lr3e-5."]
    print_comparison(found)
    assert header[1] == "steps" and header[-1] == "learning_rate", "results first"
    assert "grid-lr2e-5" in capsys.readouterr().out
    runs = found.as_json()["runs"]
    assert runs[1]["results"]["memory measured"] == 9 << 30
    assert runs[1]["best"] == ["evaluation loss"] and runs[2]["results"]["evaluation loss"] is None


def test_a_rendered_run_differs_only_in_its_own_settings(sweep: tuple[Config, Path]) -> None:
    """Rendering reads fewer settings than the training does."""
    config, runs = sweep
    for stage, name in (("train", "grid-lr1e-5"), ("render", "grid-lr3e-5")):
        rundir = RunDir(runs / name)
        current(stage, config.runs[name], GPU).write(rundir.stage_settings(stage))
    assert list(compare_sweep(*sweep).settings) == ["learning_rate"]


def test_losses_of_different_objectives_are_not_compared(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    names = ("sft", "dpo")
    for name in names:
        make_finished(tmp_path, name, 2.5)
    rundir = RunDir(tmp_path / "runs/dpo")
    EVALUATED.model_copy(update={"preferences": PREFERENCES}).write(rundir.evaluation)
    runs = {name: RUN | {"objective": name} for name in names}
    config = parse_config({"cluster": "c", "runs": runs}, "test")
    found = compare(select_runs(config, names, None), GPU, tmp_path / "runs")
    assert found.settings["objective"] == ["sft", "dpo"]
    assert found.notes == ["The runs have different objectives, so their training losses cannot be compared."]
    header, rows = found.table()
    assert [row[header.index("reward accuracy, %")] for row in rows] == ["", "87.5"]


def test_tokens_that_a_script_counted_are_named(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    for name in ("ours", "theirs"):
        make_finished(tmp_path, name, 2.5)
    config = parse_config({"cluster": "c", "runs": {"ours": RUN, "theirs": RUN | {"script": "train.py"}}}, "test")
    [note] = compare(config.runs, GPU, tmp_path / "runs").notes
    assert note.startswith("Tokens and tokens/s of theirs are as the script counted them")
    assert not compare({"theirs": config.runs["theirs"]}, GPU, tmp_path / "runs").notes


def test_losses_on_other_examples_are_not_ranked(sweep: tuple[Config, Path]) -> None:
    receipt = make_data_receipt("d")
    other = receipt.eval.model_copy(update={"files": [DataFile(path="eval", bytes=1, sha256="x")]})
    receipt.model_copy(update={"eval": other}).write(RunDir(sweep[1] / "grid-lr1e-5").data_receipt)
    assert DataReceipt.read(RunDir(sweep[1] / "grid-lr1e-5").data_receipt).eval.files
    found = compare_sweep(*sweep)
    assert all(not run["best"] for run in found.as_json()["runs"])
    assert found.notes[-1].startswith("The evaluations of these runs count other tokens: other examples")


def test_evaluations_that_count_other_tokens_are_not_ranked(sweep: tuple[Config, Path]) -> None:
    rundir = RunDir(sweep[1] / "grid-lr1e-5")
    EvaluationResult.read(rundir.evaluation).model_copy(update={"tokens": 77}).write(rundir.evaluation)
    found = compare_sweep(*sweep)
    assert all(not run["best"] for run in found.as_json()["runs"]) and "77 (grid-lr1e-5)" in found.notes[-1]


def test_runs_of_other_seeds_are_ranked_on_the_same_evaluation_data(sweep: tuple[Config, Path]) -> None:
    """The seed changes the order of the examples, so the files differ."""
    receipt = make_data_receipt("d")
    for name, path, seed in (("grid-lr1e-5", "here/eval.jsonl", 1), ("grid-lr2e-5", "there/eval.jsonl", 2)):
        files = [DataFile(path="eval", bytes=1, sha256=f"order {seed}")]
        sources = {"eval/a": {"files": [{"path": path, "bytes": 1, "sha256": "examples"}]}}
        settings = receipt.settings.model_copy(update={"seed": seed})
        changes = {"eval": receipt.eval.model_copy(update={"files": files}), "sources": sources, "settings": settings}
        receipt.model_copy(update=changes).write(RunDir(sweep[1] / name).data_receipt)
    found = compare_sweep(*sweep)
    assert found.as_json()["runs"][1]["best"] == ["evaluation loss"] and len(found.notes) == 1


def test_the_page_is_whole_and_escapes_names(sweep: tuple[Config, Path], tmp_path: Path) -> None:
    page = tmp_path / "new/compare.html"
    write_comparison(compare_sweep(*sweep), "Sweep <grid>", page)
    text = page.read_text()
    assert "<h1>Sweep &lt;grid&gt;</h1>" in text and text.count("<svg") == 1
    assert not re.search(r"""(src|href)=["'](?!#)""", text) and '<td class="number best">2.2500 *</td>' in text
    assert "not in the figure: grid-lr3e-5." in text
    assert all(f">{name}</text>" in text for name in ("grid-lr1e-5", "grid-lr2e-5"))


def test_a_run_on_cpus_has_process_hours_and_no_memory(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    for name in ("grid-s1", "grid-s2"):
        make_finished(tmp_path, name, 2.5, "cpu")
    header, _ = compare(select_runs(config_of(seed=[1, 2]), [], "grid"), make_cluster(), tmp_path / "runs").table()
    assert "process-hours" in header and not any("memory" in name for name in header)


@pytest.mark.parametrize(("names", "name", "message"), [
    ([], None, "compare: the runs are missing."), (["grid-s1"], "grid", "compare: the runs are missing."),
    (["grid-s1", "grid-s1"], None, "compare: grid-s1 is one run."),
    ([], "grit", "Sweep 'grit' does not exist. Did you mean 'grid'? The sweeps are: grid."),
    (["grid-s1", "none"], None, "Run 'none' does not exist."),
])  # fmt: skip
def test_the_choice_of_runs(names: list[str], name: str | None, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        select_runs(config_of(seed=[1, 2]), names, name)
