"""The files that run a plan: ``accelerate.yaml``, ``deepspeed.json`` and ``training.json``, and the launch command.

Every number stands in one place, the plan or the run, and is written from there into each file that needs a copy.
The files depend on the arguments alone; no training library is imported here.
"""

import sys
from pathlib import Path

import yaml

from shardmake.config.models import Cluster, Run
from shardmake.config.user_files import KINDS
from shardmake.core.atomic import sha256, write_bytes, write_json, write_text
from shardmake.core.errors import ConfigError
from shardmake.core.run_folder import make_folder, remove, unlink
from shardmake.memory.model import Model
from shardmake.memory.read_config import read_model
from shardmake.render.accelerate_file import accelerate_config
from shardmake.render.check import Files, Rendering, check_rendered
from shardmake.render.deepspeed_file import deepspeed_config, with_numbers
from shardmake.render.training_file import training_settings
from shardmake.render.user_files import merge_own_files
from shardmake.run.attempt import AttemptDir
from shardmake.run.paths import RunDir, short_path
from shardmake.run.plan import Plan, RenderReceipt


def render(plan: Plan, run: Run, cluster: Cluster, rundir: RunDir) -> list[str]:
    """Write the files of the plan's choice and of each fallback, from which the driver copies those of an attempt.

    The libraries' own parsers read all of them first (`shardmake.render.check`), so that a fallback that cannot be
    trained is refused before the queue. Returns a line for everything that the run's own files changed. Raises
    `ConfigError` if run, plan and own files contradict each other or a library would refuse a file.
    """
    if plan.not_checked:
        raise ConfigError(
            f"The plan of {plan.run} cannot be rendered: it was made with --offline, which did not check "
            f"{', '.join(plan.not_checked)}. Make it on the cluster: shardmake plan {plan.run}"
        )
    choice = plan.choice
    if choice.global_batch_size != run.global_batch_size:
        raise ConfigError(
            f"global_batch_size is {run.global_batch_size}, but the plan makes {choice.global_batch_size}: "
            f"{choice.readers} x {choice.micro_batch_size} sequences x {choice.gradient_accumulation_steps} "
            "accumulation steps. Run `shardmake plan` again, or choose a global_batch_size that "
            f"{choice.data_parallel} can divide."
        )
    plans = [plan.at(fallback) for fallback in range(len(plan.fallbacks) + 1)]
    model = read_model(run.model, revision=run.revision, trust_remote_code=run.trust_remote_code)
    merged = [_merge(number, one, run, cluster, model, rundir) for number, one in enumerate(plans)]
    renderings = [
        Rendering(files, one.choice, launch_flags(one, rundir.plan_folder, machine_rank=0, address="localhost", port=1))
        for (files, _), one in zip(merged, plans, strict=True)
    ]
    check_rendered(renderings, cluster.scratch)
    unlink(rundir.rendered)
    remove(rundir.fallbacks)
    make_folder(rundir.fallbacks)
    for number, (files, _) in enumerate(merged):
        write_files(files, rundir.rendered_files(number), model)
    digests = {path.name: sha256(path) for path in _rendered(rundir.plan_folder)}
    RenderReceipt(plan_digest=plan.digest, files=digests).write(rundir.rendered)
    return list(dict.fromkeys(line for _, lines in merged for line in lines))


def _merge(
    number: int, plan: Plan, run: Run, cluster: Cluster, model: Model, rundir: RunDir
) -> tuple[Files, list[str]]:
    """Return the files of fallback ``number`` with the run's own files merged, and a line for each change."""
    try:
        if plan.choice.spec.hybrid and plan.choice.processes_per_node == 1:
            name = plan.choice.strategy
            raise ConfigError(f"{name} shards within a node, and this plan has one rank a node. Use fsdp or ddp.")
        return merge_own_files(render_files(plan, run, cluster, model, rundir.plan_folder), run, plan.choice)
    except ConfigError as error:
        if number == 0:
            raise
        raise ConfigError(
            f"Cannot render fallback {number} of the plan, {plan.choice.strategy} with micro batch "
            f"{plan.choice.micro_batch_size}: {error}\nOr set strategy and micro_batch_size in the run and plan again; "
            "the plan then lacks this fallback."
        ) from None


def write_files(files: Files, folder: Path, model: Model) -> None:
    """Write the files into ``folder``, each only if its content changed.

    A script gets DeepSpeed's file with numbers too.
    """
    to = AttemptDir(folder)
    write_text(to.accelerate, as_yaml(files.accelerate))
    write_json(to.deepspeed, files.deepspeed)
    files.training.write(to.training)
    if files.training.program.kind == "script":
        write_json(to.deepspeed_native, with_numbers(files.deepspeed, files.training.arguments, model.hidden_size))
    else:
        unlink(to.deepspeed_native)


def copy_rendered(rundir: RunDir, plan: Plan, fallback: int, folder: Path) -> None:
    """Copy the rendered files of ``fallback`` into an attempt's ``folder``, byte for byte.

    Raises `ConfigError` if they were rendered for another plan than ``plan``, or edited.
    """
    check_unedited(rundir)
    if RenderReceipt.read(rundir.rendered).plan_digest != plan.digest:
        raise ConfigError(
            f"The rendered files in {rundir.plan_folder} belong to another plan. "
            f"Render them again: shardmake render {rundir.name}"
        )
    for path in _rendered(rundir.rendered_files(fallback)):
        write_bytes(folder / path.name, path.read_bytes())


def check_unedited(rundir: RunDir) -> None:
    """Raise a `ConfigError` if a rendered file is not as it was rendered: a finished training would not have it."""
    receipt = RenderReceipt.read_if_exists(rundir.rendered)
    for name, digest in receipt.files.items() if receipt else ():
        path = rundir.plan_folder / name
        if path.exists() and sha256(path) != digest:
            is_own = path.stem in KINDS
            place = f"in a file of your own, named by {path.stem}_config" if is_own else "as keys of the run"
            raise ConfigError(
                f"{short_path(path)} was edited after it was rendered, which has no lasting effect. Write the values "
                f"{place}, and render again: shardmake render {rundir.name}"
            )


def _rendered(folder: Path) -> list[Path]:
    """Return the rendered files in ``folder``; only a script has the native DeepSpeed file."""
    files = AttemptDir(folder)
    named = (files.accelerate, files.deepspeed, files.training, files.deepspeed_native)
    return [path for path in named if path != files.deepspeed_native or path.exists()]


def render_files(plan: Plan, run: Run, cluster: Cluster, model: Model, folder: Path) -> Files:
    """Return the three files as data; ``folder`` is any folder inside the run's."""
    return Files(
        accelerate=accelerate_config(plan, run, model),
        deepspeed=deepspeed_config(plan, run, cluster, model, folder),
        training=training_settings(plan, run, cluster, model),
    )


def as_yaml(values: dict[str, object]) -> str:
    """Return ``values`` as YAML, with the keys in their order."""
    return yaml.safe_dump(values, sort_keys=False)


def launch_command(plan: Plan, attempt: Path, machine_rank: int | str, address: str, port: int | str) -> list[str]:
    """Return the command that starts the ranks of node ``machine_rank``; it also works when typed by hand.

    ``attempt`` is the attempt's folder with its rendered files; ``address`` and ``port`` are node 0's. A value that is
    not known yet may be a placeholder. Keys that accelerate would ignore in its file are given here.
    """
    return [
        *(sys.executable, "-m", "accelerate.commands.launch"),
        *("--config_file", str(AttemptDir(attempt).accelerate)),
        *launch_flags(plan, attempt, machine_rank, address, port),
        *("-m", "shardmake.train", str(attempt)),
    ]


def launch_flags(plan: Plan, folder: Path, machine_rank: int | str, address: str, port: int | str) -> list[str]:
    """Return the options of `accelerate launch` beside its file: settings of one node, and those the file cannot hold.

    ``folder`` is the folder of the rendered files.
    """
    threads = max(1, plan.resources["train"].cpus // plan.choice.processes_per_node)  # for DeepSpeed's CPU optimizer
    file = ["--deepspeed_config_file", str(AttemptDir(folder.absolute()).deepspeed)] if plan.choice.is_deepspeed else []
    return [
        *(*file, "--machine_rank", str(machine_rank), "--main_process_ip", address, "--main_process_port", str(port)),
        *("--rdzv_backend", "static", "--same_network", "--max_restarts", "0"),
        *("--num_cpu_threads_per_process", str(threads)),
    ]
