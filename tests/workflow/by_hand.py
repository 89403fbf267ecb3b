"""Launch trainings node by node with the rendered command, as a user would, without the driver."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from shardmake.checkpoint import store
from shardmake.config.models import Strategy
from shardmake.core.build_locks import remove_stale_locks
from shardmake.render.stage import launch_command
from shardmake.render.training_file import expected_engine
from shardmake.run.attempt import AttemptDir
from shardmake.run.paths import RunDir
from shardmake.run.plan import Plan
from tests import fork_server
from tests.fork_server import free_port
from tests.workflow.checkout import REPOSITORY, Checkout
from tests.workflow.forked import plan_of, write_attempt

STEPS = 4
FSDP_RANK = REPOSITORY / "tests/fsdp_on_cpu.py"


def configure(checkout: Checkout, strategy: Strategy, nodes: int = 1, **changes: Any) -> None:
    """Configure a run of `STEPS` steps that is saved at its end, on nodes with two ranks."""
    run = {"max_steps": STEPS, "checkpoints": {"every_steps": STEPS}, "nodes": nodes, **changes}
    checkout.configure({"max_nodes": 2, "nvme_path": str(checkout.root / "nvme")}, strategy=strategy, **run)


def train_by_hand(checkout: Checkout, strategy: Strategy, nodes: int = 1, **changes: Any) -> dict[int, float]:
    """Train from the start and return the losses by step, after checking that every rank has the planned engine."""
    shutil.rmtree(checkout.run / "train", ignore_errors=True)
    plan, folder = launch_by_hand(checkout, strategy, nodes, **changes)
    for path in sorted(folder.ranks.iterdir()):
        assert expected_engine(plan.choice).as_json().items() <= json.loads(path.read_text()).items()
    return checkout.losses()


def assert_merges_as_ddp(checkout: Checkout) -> None:
    """Merge the model and compare it with the one of the fixture ``reference``."""
    checkout("shardmake", "consolidate", "demo")
    merged = load_file(checkout.run / "model/model.safetensors")
    torch.testing.assert_close(merged, load_file(checkout.root / "reference.safetensors"), atol=1e-4, rtol=1e-3)


def rewind_to(checkout: Checkout, step: int) -> Path:
    """Remove the checkpoints after ``step`` and the receipt; return the checkpoint of ``step``."""
    checkpoints = checkout.run / "train/checkpoints"
    for record, path in list(store.committed(checkpoints)):
        if record.step > step:
            store.remove(path)
    (checkout.run / "train/receipt.json").unlink()
    return checkpoints / f"checkpoint-{step}"


def launch_by_hand(
    checkout: Checkout, strategy: Strategy, nodes: int = 1, resume_from: Path | None = None, fsdp_on_cpu: bool = True,
    zero: dict[str, Any] | None = None, **changes: Any,
) -> tuple[Plan, AttemptDir]:  # fmt: skip
    """Run one attempt, which must succeed; ``zero`` is merged into ``zero_optimization`` of the DeepSpeed file."""
    configure(checkout, strategy, nodes, **changes)
    plan, *_ = planned = plan_of(checkout)
    sections = {"zero_optimization": zero} if zero else None
    folder = write_attempt(RunDir(checkout.run), planned, resume_from, sections)
    launch(plan, folder, FSDP_RANK if fsdp_on_cpu and plan.choice.is_fsdp else None)
    return plan, folder


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
