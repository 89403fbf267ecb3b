"""The commands that run a job in a container or another environment, and what is refused before."""

import contextlib
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shardmake.config.models import Cluster, Container, Slurm
from shardmake.core.errors import ConfigError
from shardmake.doctor.job import job_request, make_request
from shardmake.launch import container as containers
from shardmake.launch.container import (
    JobContainer,
    check_container,
    check_job_environment,
    distinct_folders,
    job_container,
)
from shardmake.launch.outcome import Action, classify, decide
from shardmake.launch.slurm_jobs import SlurmJobs, make_executor
from shardmake.launch.stage_jobs import job_shell_prefix
from shardmake.run.attempt import AttemptDir
from shardmake.run.attempt_history import EndReason
from shardmake.run.findings import Verdict
from tests.programs import install_programs, write_program
from tests.unit.launch.test_outcome import evidence, state
from tests.unit.launch.test_stage_jobs import format_as_snakemake
from tests.unit.plans import make_cluster, make_plan, make_run
from tests.unit.wording import Wording


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is the current one, with caches and code of fixed names below the test's folder."""
    folder = tmp_path / "my checkout"
    for name in ("my checkout", "hub", "code"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(containers, "cache_folder", lambda: tmp_path / "missing")
    monkeypatch.setattr(containers, "code_folder", lambda: tmp_path / "code")
    return folder


def in_container(folder: Path, **changes: Any) -> Cluster:
    values = {"image": "/images/train.sif", "binds": ["/opt/site:/opt/site:ro"]} | changes
    return make_cluster(
        executor="slurm", accelerator="a100-80gb", cache=str(folder.parent / "hub"), scratch="/local",
        slurm=Slurm(container=Container(**values)),
    )  # fmt: skip


def script_of(checkout: Path, cluster: Cluster) -> str:
    folder = AttemptDir(checkout / "runs/demo/train/attempts/001")
    return SlurmJobs(checkout / "runs/demo", cluster).script(folder, make_plan("zero3"), excluded=[])


def srun_line(script: str) -> list[str]:
    (line,) = [line for line in script.splitlines() if line.startswith("srun ")]
    return shlex.split(line)


def test_apptainer_runs_the_worker_with_all_that_it_needs(checkout: Path, wording: Wording) -> None:
    """The signal before the time limit does not end the process that serves the image."""
    text = script_of(checkout, in_container(checkout))
    words = srun_line(text)
    wording("\n".join(words[words.index("apptainer") :]))
    assert not [word for word in words if word.startswith("--container-")]
    signals = [line for line in text.splitlines() if "--signal" in line]
    assert signals == ["#SBATCH --signal=URG@120"] and "#SBATCH --no-requeue" in text


def test_pyxis_gets_the_container_as_options_of_srun(checkout: Path, wording: Wording) -> None:
    cluster = in_container(checkout, kind="pyxis", image="nvcr.io#nvidia/pytorch:25.10-py3", python="/opt/py/python")
    words = srun_line(script_of(checkout, cluster))
    start = words.index("--container-image=nvcr.io#nvidia/pytorch:25.10-py3")
    wording("\n".join(words[start:]))
    container = job_container(cluster)
    assert container
    step = shlex.split(container.shell_function.removeprefix("shardmake() { ").removesuffix("; }"))
    assert step == [
        *("srun", "--overlap", "--nodes=1", "--ntasks=1", *words[start : start + 3]),
        *("--cpus-per-task=${SLURM_CPUS_PER_TASK:-1}", *words[start + 3 : -4], "-m", "shardmake.cli", "$@"),
    ]


def test_the_nodes_of_doctor_are_checked_in_the_container(checkout: Path) -> None:
    request = make_request(in_container(checkout), 2, build_kernels=False)
    container = job_container(request.cluster, [checkout / "logs"])
    executor = make_executor(checkout / "logs", job_request(request, "doctor"), container)
    text = executor._make_submission_file_text(executor._submitit_command_str, "x")
    assert " apptainer exec --nv " in text and request.environment is None


def test_the_function_of_a_stage_keeps_words_and_status(checkout: Path, tmp_path: Path) -> None:
    programs = tmp_path / "programs"
    write_program(programs / "apptainer", 'while [ "$1" != -m ]; do shift; done\nprintf "%s|" "$@"\nexit 3')
    prefix = job_shell_prefix(in_container(checkout), "set -euo pipefail; ", job_container(in_container(checkout)))
    script = f"{format_as_snakemake(prefix)}shardmake data 'a run' --cpus 2 2>&1 | cat"
    path = {"PATH": f"{programs}:/usr/bin:/bin"}
    done = subprocess.run(["bash", "-c", script], env=path, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (3, "-m|shardmake.cli|data|a run|--cpus|2|")


def test_links_are_bound_by_name_and_by_target(tmp_path: Path) -> None:
    for name in ("home/data", "big/runs/demo", "other"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "home/runs").symlink_to(tmp_path / "big/runs")
    (tmp_path / "other/train.jsonl").write_text("{}")
    (tmp_path / "home/data/train.jsonl").symlink_to(tmp_path / "other/train.jsonl")
    named = [tmp_path / "home", tmp_path / "home/runs/demo", tmp_path / "home/data/train.jsonl", Path("/node/local")]
    expected = ["/node/local", *(str(tmp_path / name) for name in ("big/runs/demo", "home", "other"))]
    assert [str(path) for path in distinct_folders(named)] == sorted(expected)


def test_the_folder_above_a_jobs_own_scratch_is_bound(checkout: Path) -> None:
    cluster = in_container(checkout).model_copy(update={"scratch": "/node/local/job_$SLURM_JOB_ID/x"})
    container = job_container(cluster)
    assert isinstance(container, JobContainer) and "/node/local" in container.binds


def test_files_of_a_run_and_of_the_runs_beside_it_are_bound(checkout: Path, tmp_path: Path) -> None:
    for name in ("elsewhere/runs/demo", "elsewhere/checkpoints", "data", "own"):
        (tmp_path / name).mkdir(parents=True)
    (checkout / "runs").symlink_to(tmp_path / "elsewhere/runs")
    (checkout / "runs/demo/train").symlink_to(tmp_path / "elsewhere/checkpoints")
    (tmp_path / "data/train.jsonl").touch()
    run = make_run(data={"train": str(tmp_path / "data/train.jsonl")}, script=str(tmp_path / "own/train.py"))
    (tmp_path / "own/train.py").touch()
    container = job_container(in_container(checkout), [checkout / "runs/demo"], [run])
    assert container
    for name in ("elsewhere/runs", "elsewhere/checkpoints", "data", "own"):
        assert str(tmp_path / name) in container.binds, name


@pytest.mark.parametrize(("changes", "words"), [
    ({"image": "missing.sif"}, "missing.sif': there is no such file. Name an image"),
    ({"image": "/images/x.sqsh", "kind": "pyxis"}, "'/images/x.sqsh': there is no such file"),
    ({"image": "docker://x"}, r"a:b' cannot be bound, because apptainer separates paths at ':'"),
])  # fmt: skip
def test_a_missing_image_and_a_folder_that_cannot_be_bound_are_refused_at_plan(
    checkout: Path, changes: dict[str, str], words: str
) -> None:
    (checkout.parent / "hub").rename(checkout.parent / "a:b")
    cluster = in_container(checkout, **changes).model_copy(update={"cache": str(checkout.parent / "a:b")})
    with pytest.raises(ConfigError, match=words):
        check_container(cluster, [checkout / "runs/demo"], [make_run()])


@pytest.mark.parametrize(("answer", "words"), [
    ("echo 'env: python3: No such file or directory' >&2; exit 127", "cannot run Shardmake: env: python3: No such"),
    ("""echo '{"torch": "1.0"}'""", "torch is 1.0 in the container and .* on the login node; .*shardmake is not"),
    ("echo 'FATAL: no user namespace' >&2; exit 255", None),
])  # fmt: skip
def test_the_image_is_tried(checkout: Path, monkeypatch: pytest.MonkeyPatch, answer: str, words: str | None) -> None:
    install_programs(checkout.parent, monkeypatch, {"apptainer": answer})
    (checkout / "x.sif").touch()
    with pytest.raises(ConfigError, match=words) if words else contextlib.nullcontext():
        check_container(in_container(checkout, image="x.sif"), [checkout / "runs/demo"], [make_run()])


@pytest.mark.parametrize("line", [
    "FATAL:   could not open image /x.sif: no such file or directory", "/opt/python3: No module named submitit",
    "env: 'python3': No such file or directory",
    "/var/spool/slurmd/job7/slurm_script: line 20: apptainer: command not found",
    "slurmstepd-c1: error: pyxis: failed to import docker image", "srun: unrecognized option '--container-image=x'",
])  # fmt: skip
def test_a_container_that_does_not_start_stops_the_training_with_its_reason(line: str) -> None:
    found = containers.start_failure(["INFO: starting", line, "srun: error: c1: task 0: Exited with exit code 1"])
    outcome = classify(evidence(start_failure=found))
    assert outcome.end is EndReason.SETUP and line in outcome.message
    assert decide(outcome, state(has_fallback=True)) is Action.STOP


THIS = f"PYTHONPATH=$PYTHONPATH:{os.environ.get('PYTHONPATH', '')}"  # `make test-versions` puts libraries there


@pytest.mark.parametrize(("script", "verdict", "words"), [
    (f'#!/bin/sh\n{THIS} exec {sys.executable} "$@"\n', Verdict.OK, "with the versions of this one"),
    ('#!/bin/sh\necho \'{"torch": "1"}\'\n', Verdict.STOPS, "torch is 1 in "),
    ("#!/bin/sh\necho No module named shardmake >&2; exit 1\n", Verdict.STOPS, "No module named shardmake"),
    ("\x7fELF" + "x" * 20, Verdict.NOT_CHECKED, "is built for another architecture"),
    ("", Verdict.NOT_CHECKED, "is not on this node"),
])  # fmt: skip
def test_the_environment_is_compared_before_a_job(tmp_path: Path, script: str, verdict: Verdict, words: str) -> None:
    if script:
        write_program(tmp_path / "bin/python", script)
    cluster = make_cluster(executor="slurm", environment=str(tmp_path))
    found = [one for one in check_job_environment(cluster) if words in one.found]
    assert [one.verdict for one in found] == [verdict]
    with pytest.raises(ConfigError, match="environment: ") if verdict is Verdict.STOPS else contextlib.nullcontext():
        check_container(cluster)
    job = job_container(cluster)
    assert job is not None and job.python[-1] == f"{tmp_path}/bin/python" and str(tmp_path) in job.shell_function
