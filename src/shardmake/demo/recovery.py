"""Train the demo's run again, kill a rank and the driver on the way, and compare the models: ``make demo-faults``.

The run trains in a folder of its own, ``runs/sbatch-options-killed``, which is replaced.
"""

import contextlib
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import yaml

from shardmake.core.errors import CheckpointError, ConfigError, ShardmakeError
from shardmake.core.fingerprint import fingerprint
from shardmake.run.metrics import read_metrics
from shardmake.run.paths import RunDir
from shardmake.run.receipts import TrainingReceipt

DEMO, AGAIN = "sbatch-options", "sbatch-options-killed"
_TARGET = f"runs/{AGAIN}/model/receipt.json"
_CONFIG, _OWN_CONFIG = Path("config/config.yaml"), Path("resources/demo/recovery.yaml")
_LOG = Path("logs/demo-faults.log")
_WORKER = "shardmake.launch.worker"
"""In the command line of the process that holds the ranks and outlives the driver."""
_DEADLINE = 1800
"""Seconds until a step must be reached."""


def main() -> None:
    """Print what happens, in ten lines; exit with 1 if anything is not as it should be."""
    try:
        show_recovery(narrate=_print_with_time(time.monotonic()))
    except ShardmakeError as error:
        sys.exit(f"error: {error}")


def show_recovery(runs: Path = Path("runs"), narrate: Callable[[str], None] = print) -> None:
    """Train, kill, continue and compare.

    Raises:
        ConfigError: The demo's run has not finished.
        CheckpointError: The training does not continue, or the models differ.
    """
    undisturbed, again = RunDir(runs / DEMO), RunDir(runs / AGAIN)
    if not undisturbed.model_receipt.exists():
        raise ConfigError(f"No model in {undisturbed.root} to compare with. Run `make demo` first.")
    steps = TrainingReceipt.read(undisturbed.train_receipt).steps or 0
    shutil.rmtree(again.root, ignore_errors=True)
    write_config(checkpoint_every=max(1, steps // 6))

    narrate(f"{AGAIN}: the settings of {DEMO}, {steps} steps, a checkpoint every {max(1, steps // 6)}.")
    workflow = _snakemake(_TARGET)
    _wait(lambda: _last_step(again) >= steps // 3, workflow)
    step, rank = _last_step(again), _process_of_rank(again, 1)
    rank.send_signal(signal.SIGKILL)
    narrate(f"Step {step}: killed rank 1 (process {rank.pid}, SIGKILL). The driver ends the attempt and resumes it.")
    _wait((again.attempts / "002").exists, workflow)
    narrate("The driver started attempt 2 from the newest valid checkpoint.")
    _wait(lambda: _last_step(again) >= 2 * steps // 3, workflow)
    step = _last_step(again)
    kill_tree(workflow.pid, spare=_WORKER)
    workflow.wait()
    narrate(f"Step {step}: killed Snakemake and the driver (SIGKILL). The ranks keep training.")
    if _snakemake("--unlock").wait() != 0:
        raise CheckpointError(f"The lock of the killed Snakemake was not removed. {_last_error()}")
    workflow = _snakemake(_TARGET)
    narrate("Started the same command again. Its driver adopts the running job.")
    if workflow.wait() != 0:
        raise CheckpointError(f"The workflow failed after the kills. {_last_error()}")
    receipt = TrainingReceipt.read(again.train_receipt)
    narrate(f"Training finished: {receipt.steps} steps in {receipt.attempts} attempts. Merged and verified.")
    _compare(undisturbed, again, narrate)


def write_config(checkpoint_every: int) -> None:
    """Write the configuration of the disturbed run: the demo's, with more checkpoints and without a push."""
    config = yaml.safe_load(_CONFIG.read_text())
    run = {key: value for key, value in config["runs"][DEMO].items() if key != "push"}
    run["checkpoints"] = {"every_steps": checkpoint_every}
    _OWN_CONFIG.parent.mkdir(parents=True, exist_ok=True)
    _OWN_CONFIG.write_text(yaml.safe_dump({**config, "runs": {AGAIN: run}}))


def kill_tree(pid: int, spare: str) -> None:
    """SIGKILL a process and its descendants, but for processes whose command line holds ``spare``, and theirs."""
    with contextlib.suppress(psutil.NoSuchProcess):  # one may end meanwhile
        process = psutil.Process(pid)
        if spare in " ".join(process.cmdline()):
            return
        process.suspend()  # so that it starts nothing between the list of its children and its end
        children = process.children()
        process.kill()
        for child in children:
            kill_tree(child.pid, spare)


def _print_with_time(start: float) -> Callable[[str], None]:
    def narrate(text: str) -> None:
        seconds = int(time.monotonic() - start)
        print(f"{seconds // 60}:{seconds % 60:02}  {text}", flush=True)

    return narrate


def _snakemake(*words: str) -> "subprocess.Popen[bytes]":
    _LOG.parent.mkdir(parents=True, exist_ok=True)
    program = Path(sys.executable).with_name("snakemake")
    with _LOG.open("ab") as log:
        command: list[str | Path] = [program, *words, "--profile", "profiles/local", "--configfile", _OWN_CONFIG]
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)


def _last_step(rundir: RunDir) -> int:
    return max((line.step for line in read_metrics(rundir.metrics)), default=0)


def _wait(condition: Callable[[], bool], workflow: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + _DEADLINE
    while not condition():
        if workflow.poll() is not None or time.monotonic() > deadline:
            raise CheckpointError(f"The training does not continue. {_last_error()}")
        time.sleep(0.2)


def _last_error() -> str:
    """Return the last error of the workflow."""
    lines = [line for line in _LOG.read_text(errors="replace").splitlines() if line.startswith("Error")]
    return " ".join([f"The output of the workflow is in {_LOG}.", *lines[-1:]])


def _process_of_rank(rundir: RunDir, rank: int) -> psutil.Process:
    """Return the training process with this rank."""
    folder = str(rundir.root.absolute())
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        is_own = "shardmake.train" in words and any(word.startswith(folder) for word in words)
        if is_own and process.environ().get("RANK") == str(rank):
            return process
    raise CheckpointError(f"No process of rank {rank} is running. The output of the workflow is in {_LOG}.")


def _compare(undisturbed: RunDir, again: RunDir, narrate: Callable[[str], None]) -> None:
    ours, theirs = (fingerprint(rundir.model / "model.safetensors") for rundir in (again, undisturbed))
    if ours != theirs:
        raise CheckpointError(f"{again.model} differs from {undisturbed.model}: the training did not resume exactly.")
    narrate(f"{again.model} equals {undisturbed.model}: {ours.size:,} bytes with CRC-32 {ours.crc32} in both.")


if __name__ == "__main__":
    main()
