"""Checks of a node before its ranks start, without torch in this process.

They take a fraction of a second; on GPUs, importing the planned attention kernel adds the seconds of importing torch.
The ranks themselves check the network first (`shardmake.train.network_check`). A finding is either a defect of the
node, which is then excluded, or a problem of the run, which would fail on every node.
"""

import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from shardmake.checkpoint import store
from shardmake.checkpoint.record import RECORD_NAME
from shardmake.config.attention import Attention
from shardmake.config.strategies import STRATEGY_SPECS
from shardmake.core.atomic import read_json
from shardmake.core.disk import check_save, named_swap_folders
from shardmake.core.environment import kernel_caches, library_versions, unset_variable
from shardmake.core.errors import ShardmakeError
from shardmake.core.permissions import make_private
from shardmake.core.process import wait_for_output
from shardmake.core.units import GIB
from shardmake.launch.compilers import check_compilers
from shardmake.launch.gpu_status import installed_cuda, list_gpus, list_released_gpus, visible_gpus
from shardmake.launch.gpus import check_attention, check_build, check_gpu_memory, check_gpus, slow_gpus
from shardmake.launch.ready_ranks import READY
from shardmake.run.attempt import Attempt, AttemptDir
from shardmake.run.findings import Finding, stops, warning
from shardmake.run.plan import Plan
from shardmake.run.training_settings import ScriptProgram, TrainingSettings
from shardmake.run.turns import takes_turns

SCRATCH_BYTES = GIB
SCRATCH_ADVICE = "Set `scratch` in the cluster file to a node-local folder that jobs can write."
_NAME_SECONDS = 2.0


class PreflightError(RuntimeError):
    """The node, or with ``blames_run`` the run, cannot train."""

    def __init__(self, findings: Sequence[Finding], *, blames_run: bool = False) -> None:
        super().__init__("; ".join(finding.found for finding in findings))
        self.blames_run = blames_run


def check_node(folder: AttemptDir, attempt: Attempt, plan: Plan, node_rank: int, report: Callable[[str], None]) -> None:
    """Check this node, and pass warnings and the duration to ``report``, which writes them to the node's log.

    Raises:
        PreflightError: with all findings.
    """
    started = time.monotonic()
    for name in check_names(socket.gethostname()) if attempt.nodes > 1 else []:
        report(f"preflight: warning: {name.found}")
    if findings := _find_defects(folder, attempt, plan, report):
        raise PreflightError(findings)
    variables = os.environ | kernel_caches(attempt.scratch) | attempt.environment
    spec = STRATEGY_SPECS[plan.choice.strategy]
    if missing := check_compilers(spec, variables, on_gpus=attempt.accelerator != "cpu"):
        raise PreflightError(missing, blames_run=True)
    if node_rank == 0:
        _check_disk(attempt)
    report(f"preflight: all checks of this node passed ({time.monotonic() - started:.2f} s)")


def _find_defects(folder: AttemptDir, attempt: Attempt, plan: Plan, report: Callable[[str], None]) -> list[Finding]:
    settings = TrainingSettings.read(folder.training, "shardmake train NAME")
    versions = check_versions(
        library_versions(), attempt.versions, "in the container" if attempt.container else "on this node"
    )
    if versions and attempt.container:  # every node has the same image
        raise PreflightError(versions, blames_run=True)
    scratch = check_scratch(attempt.scratch)
    if scratch and unset_variable(attempt.scratch):
        raise PreflightError(scratch, blames_run=True)
    model = Path(settings.model.path)
    resume = [Path(attempt.resume_from) / RECORD_NAME] if attempt.resume_from else []
    files = [attempt.rundir.data_receipt, *([model / "config.json"] if model.is_absolute() else []), *resume]
    folders = [folder.root, attempt.rundir.train]
    denied = [f"{path} cannot be read here" for path in files if not os.access(path, os.R_OK)]
    denied += [f"{path} cannot be written here" for path in folders if not os.access(path, os.W_OK | os.X_OK)]
    findings = [
        *versions,
        # The job may request all memory of a node, which is never all free.
        *check_memory(psutil.virtual_memory().available + READY.memory(), plan.host_memory),
        *scratch,
        *check_swap_folders(read_json(folder.deepspeed, "shardmake train NAME")),
        *(stops("files", problem) for problem in denied),
    ]
    if attempt.accelerator != "cpu":
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        gpus = list_gpus() if takes_turns() else list_released_gpus(visible)
        mine = visible_gpus(gpus or [], visible)
        for slow in slow_gpus(mine):
            report(f"preflight: warning: {slow.found}")
        attention = "sdpa" if isinstance(settings.program, ScriptProgram) else plan.workload.attention
        unusable = [*check_build(gpus or [], installed_cuda()), *check_attention(gpus or [], attention)]
        unusable += check_gpu_memory(mine, attempt.gpu_memory)
        if unusable:
            raise PreflightError(unusable, blames_run=True)
        findings += check_gpus(gpus, visible, attempt.processes_per_node)
        # A node without its GPUs fails the import, too.
        if not findings and (broken := check_import(attention, os.environ)):
            raise PreflightError(broken, blames_run=True)
    return findings


_IMPORT_SECONDS = 300.0
_IMPORTS: Mapping[Attention, str] = {
    "varlen": """
import torch.backends.cuda, torch.nn.attention.varlen
if not torch.backends.cuda.is_flash_attention_available():
    raise ImportError("this build of torch has no FlashAttention")
""",
    # The import shows whether the extension fits this torch; transformers checks the package's name and version.
    "flash": """
from flash_attn import flash_attn_func, flash_attn_varlen_func
from transformers.utils import is_flash_attn_2_available
if not is_flash_attn_2_available():
    raise ImportError("transformers finds no flash-attn 2.3.3 or newer, or no GPU")
""",
}
_PRINT_ERROR = """
import sys
try:
    exec(sys.argv[1], {})
except Exception as error:
    print(type(error).__name__, error, sep=": ")
"""


def check_import(attention: Attention, environment: Mapping[str, str]) -> list[Finding]:
    """Import the attention kernel as the ranks will, in a process of its own, and return a finding if that fails."""
    if attention not in _IMPORTS:
        return []
    command = [sys.executable, "-c", _PRINT_ERROR, _IMPORTS[attention]]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=dict(environment)
    )
    printed = wait_for_output(process, _IMPORT_SECONDS)
    if printed == "":
        return []
    late = f"the import crashed or took longer than {_IMPORT_SECONDS:.0f} s"
    error = late if printed is None else printed.strip().splitlines()[-1]
    advice = ": install flash-attn for this torch, or set attention: varlen" if attention == "flash" else ""
    return [stops("attention", f"attention: {attention} cannot be used on this node: {error}{advice}")]


def check_versions(
    here: Mapping[str, str], planned: Mapping[str, str], place: str = "on this node", advice: str = ""
) -> list[Finding]:
    """Return the libraries whose version ``here``, at the named ``place``, differs from the login node's."""
    return [
        stops(
            "versions", f"{name} is {here.get(name, 'not installed')} {place} and {version} on the login node", advice
        )
        for name, version in planned.items()
        if here.get(name) != version
    ]


def check_memory(available: int, needed: int) -> list[Finding]:
    """Return a finding if host RAM, in bytes, does not suffice."""
    if available >= needed:
        return []
    found = f"the training needs {needed / GIB:.1f} GiB of memory, and {available / GIB:.1f} GiB are free"
    return [stops("memory", found)]


def check_scratch(given: str) -> list[Finding]:
    """Return a finding if the scratch folder has an unknown variable, is missing, not writable or full."""
    if unknown := unset_variable(given):
        return [stops("scratch", f"scratch: {given}: the job has no variable {unknown} on this node", SCRATCH_ADVICE)]
    scratch = Path(os.path.expandvars(given))
    if not os.access(scratch, os.W_OK | os.X_OK):
        why = "cannot be written" if scratch.is_dir() else "does not exist"
        return [stops("scratch", f"the scratch folder {scratch} {why}", SCRATCH_ADVICE)]
    free = shutil.disk_usage(scratch).free
    if free >= SCRATCH_BYTES:
        return []
    found = f"the scratch folder {scratch} has {free / GIB:.2f} GiB free and needs {SCRATCH_BYTES / GIB:.0f} GiB"
    return [stops("scratch", found, SCRATCH_ADVICE)]


def check_swap_folders(deepspeed: Mapping[str, Any]) -> list[Finding]:
    """Return a finding for each folder on NVMe in which another user could read or replace what DeepSpeed swaps."""
    parents = {folder.parent for folder in named_swap_folders(deepspeed)}
    return [
        stops("NVMe", f"the swap folder {parent} cannot be made, or is not a folder of this user alone")
        for parent in sorted(parents)
        if not make_private(parent)
    ]


def check_names(host: str) -> list[Finding]:
    """Return a warning if ``host`` does not resolve to an address and back within two seconds.

    It is not an error, because the ranks connect by address.
    """
    problem = f"the name service did not resolve the name of this node, {host}, within {_NAME_SECONDS:.0f} s"

    def look_up() -> None:
        nonlocal problem
        try:
            address = socket.gethostbyname(host)
            back = socket.gethostbyaddr(address)[0]
            same = back.partition(".")[0] == host.partition(".")[0]
            problem = "" if same else f"{host} resolves to {address}, which resolves back to {back}"
        except OSError as error:
            problem = f"{host} does not resolve to an address and back ({error})"

    thread = threading.Thread(target=look_up, daemon=True)
    thread.start()
    thread.join(_NAME_SECONDS)
    advice = "Training connects by address. Other programs may wait for names."
    return [warning("name service", found, advice)] if (found := problem) else []


def _check_disk(attempt: Attempt) -> None:
    """Check the space for the next checkpoint: as large as the newest one, or as estimated before the first."""
    newest = next(store.committed(attempt.rundir.checkpoints), None)
    size = newest[0].size if newest else attempt.checkpoint_bytes
    try:
        check_save(attempt.rundir.train, size)
    except ShardmakeError as error:
        raise PreflightError([stops("disk", str(error))], blames_run=True) from None
