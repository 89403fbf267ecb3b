"""The preview of a submission, and the documentation page of strategies."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from shardmake.cli import app
from shardmake.commands.preview import dry_run, preview
from shardmake.config.models import Run
from shardmake.run.paths import RunDir
from tests.unit.plans import LLAMA, make_cluster, make_plan, make_run
from tools.strategies_page import table

REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    (tmp_path / "base").mkdir()
    (tmp_path / "base/config.json").write_text(json.dumps(LLAMA))
    return make_run(model=str(tmp_path / "base"))


def test_slurm_preview_contains_script_command_environment_and_files(tmp_path: Path, run: Run) -> None:
    cluster = make_cluster(executor="slurm", accelerator="a100-80gb", network_interface="ib0")
    rundir = RunDir(tmp_path / "docs-chat")
    text = preview(make_plan("zero3"), run, cluster, rundir)
    shown = {
        "#SBATCH --nodes=2", "#SBATCH --ntasks-per-node=1", "NCCL_SOCKET_IFNAME==ib0",
        "HF_DATASETS_OFFLINE=1 HF_HUB_OFFLINE=1", "TRITON_CACHE_DIR=/tmp/shardmake-",
        "--machine_rank K --main_process_ip ADDRESS --main_process_port PORT", "distributed_type: DEEPSPEED",
        '"stage": 3', '"learning_rate": 0.001',
    }  # fmt: skip
    assert {words for words in shown if words not in text} == set() and not rundir.root.exists()


def test_a_password_in_the_setup_is_not_shown(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STORE_SECRET", "Plant-by-value-1")
    setup = ["export DB_PASSWORD=Plant77w!", "login Plant-by-value-1", "module load x"]
    cluster = make_cluster(executor="slurm", slurm={"setup": setup})
    rundir = RunDir(tmp_path / "docs-chat")
    make_plan("zero3").write(rundir.plan)
    for text in (preview(make_plan("zero3"), run, cluster, rundir), dry_run(run, cluster, rundir, run)):
        assert "export DB_PASSWORD=[removed]\nlogin [removed]\nmodule load x" in text and "Plant" not in text


def test_nodes_with_internet_are_not_offline_and_a_local_preview_names_the_worker(tmp_path: Path, run: Run) -> None:
    cluster = make_cluster(executor="slurm", internet_on_compute_nodes=True)
    assert "OFFLINE" not in preview(make_plan("zero3"), run, cluster, RunDir(tmp_path / "docs-chat"))
    plan = make_plan("ddp", nodes=1, gradient_accumulation_steps=4)
    text = preview(plan, run, make_cluster(), RunDir(tmp_path / "r"))
    assert "#SBATCH" not in text and "python -m shardmake.launch.worker" in text


def test_the_page_of_strategies_is_up_to_date() -> None:
    assert (REPOSITORY / "docs/reference/strategies.md").read_text() == table()


def test_check_exits_with_1_after_an_error(tmp_path: Path) -> None:
    def verdict(values: dict[str, Any]) -> tuple[int, str]:
        (tmp_path / "a.yaml").write_text(yaml.safe_dump(values))
        result = CliRunner().invoke(app, ["check", str(tmp_path / "a.yaml")])
        return result.exit_code, result.output

    fine = {"distributed_type": "DEEPSPEED", "num_processes": 4, "num_machines": 1, "use_cpu": False}
    code, output = verdict(fine)
    assert code == 0 and "No errors" in output
    code, output = verdict(fine | {"num_processes": "eight"})
    assert code == 1 and "num_processes" in output
