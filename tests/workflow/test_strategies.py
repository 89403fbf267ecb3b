"""Every strategy trains as rendered, the ranks find the planned engine, and all of them compute the same."""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shardmake.attempt import AttemptDir, write_record
from shardmake.config import Cluster, Run, Strategy, get_run, load_cluster, load_config
from shardmake.launch.jobs import attempt_settings
from shardmake.plan.engine import expected_engine
from shardmake.plan.model import read_model
from shardmake.plan.plan import Plan, as_json
from shardmake.plan.render import as_yaml, launch_command, render_files
from shardmake.plan.strategy import make_plan
from shardmake.receipt import write_json, write_text
from tests.workflow.checkout import REPOSITORY, Checkout

pytestmark = pytest.mark.training
STEPS = 4
RANK = Path(__file__).with_name("fsdp_rank.py")


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory, inputs: Path) -> Checkout:
    """A checkout with tokenized data."""
    checkout = Checkout.create(tmp_path_factory.mktemp("strategies") / "checkout", inputs)
    configure(checkout, "ddp")
    checkout("shardmake", "data", "demo")
    return checkout


def configure(lab: Checkout, strategy: Strategy, nodes: int = 1) -> None:
    cluster: dict[str, Any] = {"max_nodes": 2, "nvme_path": str(lab.root / "nvme")}
    lab.configure(cluster, strategy=strategy, nodes=nodes, max_steps=STEPS, checkpoints={"every_steps": STEPS})


def train_by_hand(lab: Checkout, strategy: Strategy, nodes: int = 1) -> dict[int, float]:
    """Losses by step of a training started node by node with the rendered command, without the driver."""
    configure(lab, strategy, nodes)
    shutil.rmtree(lab.run / "train", ignore_errors=True)
    config = load_config(lab.root / "config/config.yaml")
    run, cluster = get_run(config, "demo"), load_cluster(lab.root / config.cluster)
    run = run.model_copy(update={"model": str(lab.root / run.model)})
    plan, _ = make_plan("demo", run, cluster)
    folder = AttemptDir(lab.run / "train/attempts/001")
    write_json(folder.plan, as_json(plan))
    write_files(plan, run, cluster, folder)
    settings = attempt_settings(1, lab.run, cluster, plan, resume_from=None, recipe="by hand")
    write_record(folder.settings, settings)
    launch(plan, folder)
    for path in sorted(folder.ranks.iterdir()):
        report = json.loads(path.read_text())
        assert expected_engine(plan.choice, 2).items() <= report.items()
    return lab.losses()


def write_files(plan: Plan, run: Run, cluster: Cluster, folder: AttemptDir) -> None:
    """As `render`, without asking the libraries first: they are about to have their say."""
    files = render_files(plan, run, cluster, read_model(run.model), folder.root)
    write_text(folder.accelerate, as_yaml(files.accelerate))
    write_json(folder.deepspeed, files.deepspeed)
    write_json(folder.training, files.training)


def launch(plan: Plan, folder: AttemptDir) -> None:
    port = free_port()
    processes = []
    for node in range(plan.choice.nodes):
        command = launch_command(plan, folder.root, node, "127.0.0.1", port)
        if plan.choice.is_fsdp:
            start = command.index("-m", command.index("--num_cpu_threads_per_process"))
            command[start : start + 2] = [str(RANK)]
        log = folder.log(node).open("w")
        processes.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=rank_environment()))
    codes = [process.wait(timeout=1500) for process in processes]
    assert codes == [0] * len(codes), folder.log(0).read_text()[-5000:]


def rank_environment() -> dict[str, str]:
    path = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def reference(lab: Checkout) -> dict[int, float]:
    """Losses under DDP."""
    losses = train_by_hand(lab, "ddp")
    assert list(losses) == list(range(1, STEPS + 1))
    return losses


@pytest.mark.parametrize(
    "strategy",
    ["zero2-offload", "zero3-offload", "fsdp", "fsdp-grad-op", "fsdp-offload"],
)
def test_offload_and_fsdp_compute_what_ddp_computes(
    lab: Checkout, reference: dict[int, float], strategy: Strategy
) -> None:
    assert train_by_hand(lab, strategy) == pytest.approx(reference, abs=2e-4)


def test_hybrid_sharding_over_two_nodes_of_two_ranks(lab: Checkout, reference: dict[int, float]) -> None:
    assert train_by_hand(lab, "fsdp-hybrid", nodes=2) == pytest.approx(reference, abs=2e-4)


@pytest.mark.nvme
@pytest.mark.timeout(1800)
def test_nvme_offload_swaps_to_real_files(lab: Checkout, reference: dict[int, float]) -> None:
    assert train_by_hand(lab, "zero3-nvme") == pytest.approx(reference, abs=2e-4)
    swapped = list((lab.run / "train/checkpoints").rglob("offloaded_tensors/rank*/*.swp"))
    assert sum(path.stat().st_size for path in swapped) > 1 << 20


def test_the_printed_command_is_the_run(lab: Checkout) -> None:
    """Copied from the log of the attempt into a shell, it trains the same again outside of Shardmake."""
    configure(lab, "zero2")
    shutil.rmtree(lab.run / "train", ignore_errors=True)
    for stage in ("plan", "render", "train"):
        lab("shardmake", stage, "demo")
    losses = lab.losses()
    log = (lab.run / "train/attempts/001/node-0.log").read_text()
    command = log[log.index("env ") : log.index("\n", log.index("accelerate.commands.launch"))]
    shutil.rmtree(lab.run / "train/checkpoints")
    (lab.run / "train/metrics.jsonl").unlink()
    subprocess.run(command, shell=True, check=True, cwd=lab.root, timeout=300, executable="/bin/bash")
    assert lab.losses() == losses
    assert Path(sys.executable).name in command
