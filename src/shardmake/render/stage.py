"""The files that run a plan: ``accelerate.yaml``, ``deepspeed.json`` and ``training.json``, and the launch command.

Every number stands in one place, the plan or the run, and is written from there into each file that wants a copy.
What is rendered depends on nothing but its arguments; no training library is imported here.
"""

import sys
from pathlib import Path

import yaml

from shardmake.config.models import Cluster, Run
from shardmake.core.atomic import write_json, write_text
from shardmake.core.errors import ShardmakeError
from shardmake.memory.model import Model
from shardmake.memory.read_config import read_model
from shardmake.render.accelerate_file import accelerate_config
from shardmake.render.check import Files, check_rendered
from shardmake.render.deepspeed_file import deepspeed_config
from shardmake.render.training_file import training_config
from shardmake.render.user_files import merge_own_files
from shardmake.run.plan import Choice, Plan

ACCELERATE, DEEPSPEED, TRAINING = "accelerate.yaml", "deepspeed.json", "training.json"


def render(plan: Plan, run: Run, cluster: Cluster, folder: Path) -> list[str]:
    """Write the three files of ``plan`` into ``folder``, each only if its content changed.

    Before that the libraries' own parsers read them (`shardmake.render.check`). Returns a line for everything that the
    run's own files changed. Raises ShardmakeError where run, plan and own files contradict each other or a library
    would refuse a file.
    """
    _check_batch(plan.choice, run)
    _check_hybrid(plan.choice)
    model = read_model(run.model, revision=run.revision, trust_remote_code=run.trust_remote_code)
    files, told = merge_own_files(render_files(plan, run, cluster, model, folder), run, plan.choice)
    flags = launch_flags(plan, machine_rank=0, address="localhost", port=1)
    check_rendered(files, plan.choice, model.hidden_size, flags, cluster.scratch)
    write_text(folder / ACCELERATE, as_yaml(files.accelerate))
    write_json(folder / DEEPSPEED, files.deepspeed)
    write_json(folder / TRAINING, files.training)
    return told


def render_files(plan: Plan, run: Run, cluster: Cluster, model: Model, folder: Path) -> Files:
    """The three files as data; ``folder`` is where they will lie, for the reference of one to another."""
    return Files(
        accelerate=accelerate_config(plan, run, model, folder / DEEPSPEED),
        deepspeed=deepspeed_config(plan, run, cluster, model, folder),
        training=training_config(plan, run, cluster, model),
    )


def as_yaml(values: dict[str, object]) -> str:
    """YAML with the keys in their order."""
    return yaml.safe_dump(values, sort_keys=False)


def launch_command(plan: Plan, attempt: Path, machine_rank: int | str, address: str, port: int | str) -> list[str]:
    """The command that starts the ranks of node ``machine_rank``; it can be typed by hand just so.

    ``attempt`` is the attempt's folder with its rendered files; ``address`` and ``port`` are node 0's; what is
    not known yet may be a word in its place. Keys that accelerate would ignore in its file are given here.
    """
    return [
        *(sys.executable, "-m", "accelerate.commands.launch"),
        *("--config_file", str(attempt / ACCELERATE)),
        *launch_flags(plan, machine_rank, address, port),
        *("-m", "shardmake.train", str(attempt)),
    ]


def launch_flags(plan: Plan, machine_rank: int | str, address: str, port: int | str) -> list[str]:
    """Options of `accelerate launch` beside its file: what only the node knows, and what the file cannot say."""
    return [
        *("--machine_rank", str(machine_rank)),
        *("--main_process_ip", address),
        *("--main_process_port", str(port)),
        *("--rdzv_backend", "static", "--same_network"),
        *("--max_restarts", "0"),
        *("--num_cpu_threads_per_process", str(threads_per_process(plan))),
    ]


def threads_per_process(plan: Plan) -> int:
    """Cores of a node shared out between its ranks; DeepSpeed's CPU optimizer lives on them."""
    return max(1, plan.resources["train"].cpus // plan.choice.processes_per_node)


def _check_hybrid(choice: Choice) -> None:
    if choice.strategy == "fsdp-hybrid" and choice.processes_per_node == 1:
        raise ShardmakeError("fsdp-hybrid shards within a node, and this plan has one rank a node. Use fsdp or ddp.")


def _check_batch(choice: Choice, run: Run) -> None:
    if choice.global_batch_size != run.global_batch_size:
        raise ShardmakeError(
            f"global_batch_size is {run.global_batch_size}, but the plan makes {choice.global_batch_size}: "
            f"{choice.readers} x {choice.micro_batch_size} sequences x "
            f"{choice.gradient_accumulation_steps} accumulation steps. Run `shardmake plan` again, or choose a "
            f"global_batch_size that {choice.data_parallel} can divide."
        )
