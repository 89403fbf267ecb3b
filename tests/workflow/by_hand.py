"""Launch trainings node by node with the rendered command, as a user would, without the driver."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from shardmake.checkpoint import store
from shardmake.checkpoint.reshard.convert import set_load_universal
from shardmake.config.load import get_run, load_cluster, load_config
from shardmake.config.models import Cluster, Run, Strategy
from shardmake.core.atomic import read_json, write_json
from shardmake.core.build_locks import remove_stale_locks
from shardmake.launch.jobs import attempt_settings
from shardmake.memory.read_config import read_model
from shardmake.plan.stage import make_plan
from shardmake.render import stage
from shardmake.render.stage import launch_command, render_files
from shardmake.render.training_file import expected_engine
from shardmake.run.attempt import AttemptDir
from shardmake.run.plan import Plan
from tests import fork_server
from tests.fork_server import free_port
from tests.workflow.checkout import Checkout

STEPS = 4
FSDP_RANK = Path(__file__).with_name("fsdp_rank.py")


def configure(checkout: Checkout, strategy: Strategy, nodes: int = 1, **changes: Any) -> None:
    """Configure a run of `STEPS` steps that is saved at its end, on nodes with two ranks."""
    cluster: dict[str, Any] = {"max_nodes": 2, "nvme_path": str(checkout.root / "nvme")}
    run = {"max_steps": STEPS, "checkpoints": {"every_steps": STEPS}, **changes}
    checkout.configure(cluster, strategy=strategy, nodes=nodes, **run)


def train_by_hand(checkout: Checkout, strategy: Strategy, nodes: int = 1, **changes: Any) -> dict[int, float]:
    """Train from the start and return the losses by step, after checking that every rank has the planned engine."""
    shutil.rmtree(checkout.run / "train", ignore_errors=True)
    plan, folder = launch_by_hand(checkout, strategy, nodes, **changes)
    for path in sorted(folder.ranks.iterdir()):
        assert expected_engine(plan.choice).as_json().items() <= json.loads(path.read_text()).items()
    return checkout.losses()


def committed_checkpoints(checkout: Checkout) -> dict[int, Path]:
    """Return the committed checkpoints of the run by step."""
    return {record.step: path for record, path in store.committed(checkout.run / "train/checkpoints")}


def assert_merges_as_ddp(checkout: Checkout) -> None:
    """Merge the model and compare it with the one of the fixture ``reference``."""
    checkout("shardmake", "consolidate", "demo")
    merged = load_file(checkout.run / "model/model.safetensors")
    torch.testing.assert_close(merged, load_file(checkout.root / "reference.safetensors"), atol=1e-4, rtol=1e-3)


def rewind_to(checkout: Checkout, step: int) -> Path:
    """Remove the checkpoints after ``step`` and the receipt; return the checkpoint of ``step``."""
    for later, path in committed_checkpoints(checkout).items():
        if later > step:
            store.remove(path)
    (checkout.run / "train/receipt.json").unlink()
    return committed_checkpoints(checkout)[step]


def launch_by_hand(
    checkout: Checkout, strategy: Strategy, nodes: int = 1, resume_from: Path | None = None, fsdp_on_cpu: bool = True,
    zero: dict[str, Any] | None = None, **changes: Any,
) -> tuple[Plan, AttemptDir]:  # fmt: skip
    """Run one attempt, which must succeed; ``zero`` is merged into ``zero_optimization`` of the DeepSpeed file."""
    configure(checkout, strategy, nodes, **changes)
    config = load_config(checkout.root / "config/config.yaml")
    run, cluster = get_run(config, "demo"), load_cluster(checkout.root / config.cluster)
    run = run.model_copy(update={"model": str(checkout.root / run.model)})
    plan, _ = make_plan("demo", run, cluster)
    number = len(list((checkout.run / "train").glob("attempts/*"))) + 1
    folder = AttemptDir(checkout.run / f"train/attempts/{number:03d}")
    plan.write(folder.plan)
    write_files(plan, run, cluster, folder)
    if zero:
        values = read_json(folder.deepspeed, "this test")
        write_json(folder.deepspeed, values | {"zero_optimization": values["zero_optimization"] | zero})
    if resume_from:
        set_load_universal(folder.deepspeed, resume_from)
    resume = str(resume_from) if resume_from else None
    settings = attempt_settings(number, checkout.run, cluster, plan, resume_from=resume, settings_digest="by hand")
    settings.write(folder.settings)
    launch(plan, folder, FSDP_RANK if fsdp_on_cpu and plan.choice.is_fsdp else None)
    return plan, folder


def write_files(plan: Plan, run: Run, cluster: Cluster, folder: AttemptDir) -> None:
    """Write the files of `render` without its checks by the libraries, which follow in the training itself."""
    model = read_model(run.model)
    stage.write_files(render_files(plan, run, cluster, model, folder.root), folder.root, model)


def launch(plan: Plan, folder: AttemptDir, program: Path | None) -> None:
    """Run the rendered command on every node, with ``program`` instead of `shardmake.train`."""
    port = free_port()
    processes = []
    for node in range(plan.choice.nodes):
        command = launch_command(plan, folder.root, node, "127.0.0.1", port)
        if program:
            start = command.index("-m", command.index("--num_cpu_threads_per_process"))
            command[start : start + 2] = [str(program)]
        log = folder.log(node).open("w")
        processes.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=rank_environment()))
    codes = [process.wait(timeout=1500) for process in processes]
    assert codes == [0] * len(codes), folder.log(0).read_text()[-5000:]


def rank_environment() -> dict[str, str]:
    """Return the environment that the worker would set on a node without a GPU."""
    for kernels in (Path.home() / ".cache/torch_extensions").glob("*"):
        remove_stale_locks(kernels)  # of ranks that a test killed while they loaded
    return fork_server.rank_environment()
