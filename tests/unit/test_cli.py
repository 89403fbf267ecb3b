"""The command line ends with one message and a status, never with a traceback."""

import errno
import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
from typer.main import get_group
from typer.testing import CliRunner

from shardmake import cli
from shardmake.cli import files, runs, stages
from shardmake.cli.groups import GROUPS
from shardmake.core.errors import DiskFullError, ShardmakeError, StopRequestedError
from shardmake.core.failures import explain_os_error

Captured = pytest.CaptureFixture[str]

Patch = pytest.MonkeyPatch

COMMANDS = {
    "fetch": ["fetch", "chat"], "plan": ["plan", "chat"], "render": ["render", "chat"],
    "show": ["render", "chat", "--show"], "data": ["data", "chat"], "preview": ["data", "chat", "--show", "1"],
    "train": ["train", "chat"], "consolidate": ["consolidate", "chat"], "merge": ["consolidate", "checkpoint", "out"],
    "evaluate": ["evaluate", "chat"], "push": ["push", "chat"], "report": ["report", "chat"],
    "retrain": ["retrain", "chat"], "submit": ["submit"], "status": ["status", "chat"], "status of all": ["status"],
    "list": ["list"], "init": ["init", "--model", "org/base", "--data", "train.jsonl"], "compare": ["compare", "chat"],
    "config": ["config", "chat"], "stop": ["stop", "chat"], "stop a sweep": ["stop", "--sweep", "grid"],
    "cancel": ["cancel", "chat"], "cancel neither": ["cancel"], "logs": ["logs", "chat"],
    "reshard": ["reshard", "checkpoint", "out", "--ranks", "2"], "verify": ["verify", "model"],
    "check": ["check", "ds.json"], "estimate": ["estimate", "model"], "clean": ["clean"],
    "doctor": ["doctor", "--cluster", "cluster.yaml"],
}  # fmt: skip
OF_A_RUN = [name for name, words in COMMANDS.items() if words[1:2] == ["chat"]]
ONLY_READ = ("status", "config")
RUN = {
    "model": "base", "data": {"train": "train.jsonl", "eval": "eval.jsonl"}, "sequence_length": 32,
    "global_batch_size": 2, "max_steps": 2, "learning_rate": 1e-3, "push": {"to": "file:published"},
}  # fmt: skip
CLUSTER = {"executor": "local", "processes_per_node": 2, "cpus_per_node": 2, "memory_gib_per_node": 4}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: Patch) -> Path:
    """An empty working folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def configure() -> None:
    Path("config").mkdir()
    Path("cluster.yaml").write_text(json.dumps(CLUSTER))
    Path("config/config.yaml").write_text(json.dumps({"cluster": "cluster.yaml", "runs": {"chat": RUN}}))


def run(words: list[str], monkeypatch: Patch, capfd: Captured) -> tuple[int, str]:
    """Run the command line in this process; return its status and what it printed."""
    monkeypatch.setattr(sys, "argv", ["shardmake", *words])
    with pytest.raises(SystemExit) as end:
        cli.main()
    printed = "".join(capfd.readouterr())
    assert "Traceback" not in printed, printed
    return int(end.value.code or 0), printed


def test_filters_of_slurms_lists_in_the_environment_hide_no_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SQUEUE_STATES", "RUNNING")
    monkeypatch.setenv("SLURM_CLUSTERS", "test")
    assert CliRunner().invoke(cli.app, ["estimate", "--list-gpus"]).exit_code == 0
    assert "SQUEUE_STATES" not in os.environ and "SLURM_CLUSTERS" in os.environ


def test_the_table_has_every_command_but_demo_and_run() -> None:
    """`run` replaces this process with Snakemake."""
    assert {*" ".join(GROUPS.values()).split()} == {words[0] for words in COMMANDS.values()} | {"demo", "run"}


def test_the_help_has_every_command_in_its_group_and_options_at_80_columns(monkeypatch: Patch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    registered = [name for module in (stages, files, runs) for name in get_group(module.app).commands]
    assert sorted(registered) == sorted(" ".join(GROUPS.values()).split())
    text = CliRunner().invoke(cli.app, ["--help"]).output
    assert [line.rstrip(":") for line in text.splitlines() if line.rstrip(":") in GROUPS] == [*GROUPS]
    options = CliRunner().invoke(cli.app, ["estimate", "--help"]).output
    assert all(name in options for name in ("--gradient-checkpointing", "--sequence-parallel", "--trust-remote-code"))
    assert max(map(len, options.splitlines())) <= 80


@pytest.mark.parametrize(("name", "place"), [
    *product(COMMANDS, ["empty"]),
    *product([*(name for name in OF_A_RUN if name not in ONLY_READ), "clean"], ["without inputs", "a file as runs"]),
])  # fmt: skip
def test_missing_inputs(name: str, place: str, monkeypatch: Patch, capfd: Captured) -> None:
    if place != "empty":
        configure()
    if place == "a file as runs":
        Path("runs").write_text("a file")
    status, printed = run(COMMANDS[name], monkeypatch, capfd)
    assert status == 2 and "Error: " in printed and "Unexpected" not in printed


@pytest.mark.parametrize("name", ["check", "estimate", "verify", "merge", "reshard", "fetch", "plan"])
def test_files_of_other_encodings(name: str, monkeypatch: Patch, capfd: Captured) -> None:
    configure()
    for file in ("ds.json", "model/config.json", "base/config.json", "checkpoint/latest", "train.jsonl"):
        Path(file).parent.mkdir(exist_ok=True)
        Path(file).write_bytes(b'{"caf\xe9": 1}\n')
    status, printed = run(COMMANDS[name], monkeypatch, capfd)
    assert status in (1, 2) and "Unexpected" not in printed
    assert "\nError: " in f"\n{printed}" or "error: " in printed


def test_a_configuration_of_another_encoding(monkeypatch: Patch, capfd: Captured) -> None:
    configure()
    Path("config/config.yaml").write_bytes(b"cluster: caf\xe9.yaml\n")
    status, printed = run(["status", "chat"], monkeypatch, capfd)
    assert status == 2 and "config/config.yaml" in printed


def fail_with(error: BaseException, monkeypatch: Patch) -> None:
    def clean(runs: Path, *, remove: bool, names: set[str] | None) -> None:
        raise error

    monkeypatch.setattr("shardmake.commands.clean.clean", clean)


def test_a_requested_stop_is_no_error(monkeypatch: Patch, capfd: Captured) -> None:
    fail_with(StopRequestedError("Saved at step 93. Run again."), monkeypatch)
    assert run(["clean"], monkeypatch, capfd) == (3, "Saved at step 93. Run again.\n")
    fail_with(StopRequestedError("Saved."), monkeypatch)
    assert run(["--quiet", "clean"], monkeypatch, capfd) == (3, "Saved.\n")


def test_an_unexpected_error_is_kept_in_a_file(folder: Path, monkeypatch: Patch, capfd: Captured) -> None:
    Path("logs").mkdir()
    monkeypatch.setenv("HF_TOKEN", "secret-value-1234")
    fail_with(TypeError("bad value\nTraceback (most recent call last): secret-value-1234"), monkeypatch)
    status, printed = run(["clean"], monkeypatch, capfd)
    assert status == 70
    assert "Unexpected error: TypeError: bad value\nThis is a bug in Shardmake or in a library." in printed
    (kept,) = Path("logs").iterdir()
    assert f"The traceback is in {kept}." in printed
    assert "def clean" not in printed and "raise error" in kept.read_text() and "secret-value" not in kept.read_text()


def test_verbose_prints_the_traceback(monkeypatch: Patch, capfd: Captured) -> None:
    fail_with(OSError(errno.EACCES, "Permission denied", "runs/x"), monkeypatch)
    monkeypatch.setattr(sys, "argv", ["shardmake", "--verbose", "clean"])
    with pytest.raises(SystemExit, match="2"):
        cli.main()
    printed = capfd.readouterr().err
    assert "Traceback" in printed and "Error: Cannot use runs/x. Permission was denied." in printed


def test_an_interrupt_ends_with_its_status(monkeypatch: Patch, capfd: Captured) -> None:
    fail_with(KeyboardInterrupt(), monkeypatch)
    assert run(["clean"], monkeypatch, capfd) == (130, "")


MAIN = [sys.executable, "-c", "from shardmake.cli import main; main()"]


@pytest.mark.parametrize(
    ("words", "statuses"),
    [
        (["estimate", "--list-gpus"], {1}),
        (["--help"], {1}),
        (["clean", "--runs", "."], {0, 1}),
    ],  # the last one only logs
)
def test_a_closed_pipe_ends_quietly(words: list[str], statuses: set[int]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run([*MAIN, *words], stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert done.returncode in statuses and done.stderr == ""


def test_a_full_disk_for_the_output_is_reported() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([*MAIN, "estimate", "--list-gpus"], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2 and "No space is left" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(("number", "words"), [
    (errno.ENOSPC, "No space is left on its file system. Free some space"),
    (errno.EDQUOT, "Your disk quota is used up. Free some space"),
    (errno.EROFS, "Its file system is read-only. Use a folder that you can write to."),
    (errno.EACCES, "Permission was denied. Check its owner and mode"),
    (errno.ENOENT, "It does not exist. Check the path"), (errno.ENOTDIR, "A part of the path is a file"),
])  # fmt: skip
def test_errors_of_the_system_have_path_reason_and_advice(number: int, words: str) -> None:
    with_path = explain_os_error(OSError(number, os.strerror(number), "runs/chat/x"), Path("runs/chat"))
    assert str(with_path).startswith(f"Cannot use runs/chat/x. {words}")
    assert isinstance(with_path, DiskFullError) == (number in (errno.ENOSPC, errno.EDQUOT))


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), OSError("Not enough disk space. Needed: 3 GB")]
)
def test_a_full_disk_without_a_path_names_the_folder_of_the_command(folder: Path, error: OSError) -> None:
    found = explain_os_error(error, Path("runs/chat"))
    assert str(found).startswith(f"Cannot use {folder}/runs/chat. No space is left")


@pytest.mark.parametrize(("error", "words"), [
    (OSError("org/base has no file named config.json"), "failed. org/base has no file named config.json. Check"),
    (TimeoutError(errno.ETIMEDOUT, "Connection timed out"), "failed. Connection timed out. Check the place"),
    (OSError(errno.ENXIO, "No such device", "/dev/x"), "failed: /dev/x. No such device. Check the place"),
])  # fmt: skip
def test_other_errors_keep_their_text(error: OSError, words: str) -> None:
    found = explain_os_error(error, Path())
    assert type(found) is ShardmakeError and words in str(found)


@pytest.mark.parametrize("name", ["fetch", "plan"])
def test_a_key_that_no_plan_takes_is_refused_before_any_work(name: str, monkeypatch: Patch, capfd: Captured) -> None:
    own = {"zero_optimization": {"stage": 2}, "autotuning": {"enabled": True}}
    Path("ds.json").write_text(json.dumps(own))
    monkeypatch.setitem(RUN, "deepspeed_config", "ds.json")
    configure()
    for file in ("train.jsonl", "eval.jsonl"):
        Path(file).write_text(json.dumps({"text": file}) + "\n")
    Path("base").mkdir()
    Path("base/config.json").write_text("{}")
    status, printed = run(COMMANDS[name], monkeypatch, capfd)
    assert status == 2 and "autotuning.enabled: True in ds.json" in printed
