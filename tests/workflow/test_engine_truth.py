"""The real engine, with Trainer, Accelerate and DeepSpeed on two CPU ranks, does what the comparison predicts."""

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import pytest

from shardmake.render.comparison import Comparison, Row, Settings
from shardmake.render.engine_values import VARIES
from shardmake.render.settings_table import same_value
from tests.fork_server import ForkServer, set_by_launcher
from tests.planted_settings import PLANTED, Planted
from tests.settings_cases import CASES, COMPILES
from tests.unit.render.compared_settings import compare_settings

pytestmark = [pytest.mark.training, pytest.mark.timeout(600)]
COMPILED = [pytest.mark.nvme, pytest.mark.timeout(1800)]
FAULTS = [pytest.param(one, id=one.name, marks=COMPILED if one.compiles else ()) for one in PLANTED]
PROGRAM = "tests.workflow.engine_cases"
EVERY_ROW = "test_every_row_is_what_comes_up"
Found = dict[str, Any]
Train = Callable[[Settings], list[Found]]


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Train]:
    """Train with given settings and return what each rank found; ranks are forked from one process."""
    server = ForkServer(PROGRAM, "accelerate.commands.launch", "torch.distributed.run")

    def run(settings: Settings) -> list[Found]:
        folder = tmp_path_factory.mktemp("case")
        (folder / "case.json").write_text(json.dumps(asdict(settings)))
        environment, ranks = {}, settings.world_size
        if settings.accelerate is not None:
            codes = server.run(folder, {}, 1, program=f"{PROGRAM}:launch")
            assert codes == [0], (folder / "node-0.log").read_text()
            first = json.loads((folder / "environment-0").read_text())
            environment, ranks = set_by_launcher(first), int(first.get("WORLD_SIZE", 1))
        server.run(folder, environment, ranks, program=f"{PROGRAM}:run_rank")
        found = [json.loads(path.read_text()) for path in sorted(folder.glob("rank-*.json"))]
        assert found, (folder / "node-0.log").read_text()
        return found

    yield run
    server.close()


@pytest.fixture(scope="module")
def predicted(request: pytest.FixtureRequest) -> dict[str, Comparison]:
    """Compare the cases of this session in one process."""
    tests = [item for item in request.session.items if getattr(item, "originalname", "") == EVERY_ROW]
    names = [item.callspec.params["name"] for item in tests if isinstance(item, pytest.Function)]
    return dict(zip(names, compare_settings([CASES[name] for name in names]), strict=True))


# --- every row of the table -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [pytest.param(name, marks=COMPILED if name in COMPILES else ()) for name in CASES])
def test_every_row_is_what_comes_up(name: str, train: Train, predicted: dict[str, Comparison]) -> None:
    rows, found = predicted[name].rows, train(CASES[name])
    if any(row.verdict == "stops" for row in rows):
        assert any("error" in one for one in found), "It was predicted to stop."
        return
    assert not [one for one in found if "error" in one]
    differing = {
        row.setting: (row.runs, observed)
        for row in rows
        if row.runs is not None and not _is_predicted(row, observed := _observed(row.setting, found))
    }
    assert not differing, "setting: (predicted, observed)"


def _observed(setting: str, found: list[Found]) -> Any:
    """Return what came up on rank 0; the total batch is the number of different rows of a step on all ranks."""
    if setting == "total batch":
        return len({row for one in found for row in one["rows"]}) / found[0]["steps"]
    return found[0]["observed"][setting]


def _is_predicted(row: Row, observed: Any) -> bool:
    if row.runs == VARIES:
        return not same_value(row.setting, observed, row.values["Trainer"].value)
    return same_value(row.setting, observed, row.runs)


# --- planted faults ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("planted", FAULTS)
def test_a_planted_fault_does_what_is_predicted(planted: Planted, train: Train) -> None:
    found = train(planted.fault)
    if isinstance(planted.engine, str):
        assert planted.engine in [one.get("error") for one in found]
        return
    assert planted_values(planted, found[0]) == planted.engine


@pytest.mark.parametrize("planted", FAULTS)
def test_the_corrected_twin_trains(planted: Planted, train: Train) -> None:
    found = train(planted.corrected)[0]
    assert found.get("class") == "DeepSpeedEngine", found
    if isinstance(planted.engine, dict):
        assert (planted_values(planted, found) == planted.engine) == planted.has_no_effect


def planted_values(planted: Planted, found: Found) -> Found:
    """Return the values of a rank's record that identify the fault."""
    assert "error" not in found, found
    assert isinstance(planted.engine, dict)
    values = found | found["observed"]
    return {key: values[key] for key in planted.engine}


def test_trainer_accumulates_its_own_number(train: Train) -> None:
    """Without the key, the engine counts 1, and Trainer's loop still makes one step of 4 micro batches."""
    planted = next(one for one in PLANTED if one.name == "accumulation in the arguments only")
    alone, corrected = train(planted.fault)[0], train(planted.corrected)[0]
    assert alone["loss"] == corrected["loss"]
    assert alone["grad_norm"] == corrected["grad_norm"]
    assert [one["observed"]["accumulation steps"] for one in (alone, corrected)] == [1, 4]
