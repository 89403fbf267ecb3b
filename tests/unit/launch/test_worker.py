"""The worker of a node: when a task starts it, how it ends, and what it archives."""

import errno
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from shardmake.core.atomic import write_json
from shardmake.core.environment import kernel_caches
from shardmake.launch import slurm_task, worker
from shardmake.launch.jobs import attempt_settings
from shardmake.launch.rendezvous import Rendezvous, RendezvousError
from shardmake.run.attempt import AttemptDir, NodeExit
from shardmake.run.attempt_owner import NOBODY, claim, claim_next
from tests.finished_run import make_exit
from tests.programs import install_programs
from tests.unit.launch.fake_run import write_attempt
from tests.unit.plans import make_cluster, make_plan


@pytest.fixture
def folder(tmp_path: Path, prepared_worker: None) -> AttemptDir:
    """The attempt of a job of two nodes."""
    folder = AttemptDir(tmp_path / "train/attempts/001")
    write_attempt(folder, make_plan("ddp", nodes=2), make_cluster(scratch=str(tmp_path)))
    return folder


MET = Rendezvous(address="a", port=1, interface="ib0", host="h")


def environment_of_ranks(**site: Any) -> dict[str, str]:
    plan, folder = make_plan("ddp"), Path("runs/demo")
    attempt = attempt_settings(1, folder, make_cluster(**site), plan, resume_from=None, settings_digest="r")
    return worker.rank_environment(attempt, MET)


def test_interfaces_of_the_user_and_variables_of_the_file_win(monkeypatch: pytest.MonkeyPatch) -> None:
    def environment(**variables: str | int) -> dict[str, str]:
        return environment_of_ranks(network_interface="ib0", env=variables)

    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert environment()["NCCL_SOCKET_IFNAME"] == "=ib0" and environment()["GLOO_SOCKET_IFNAME"] == "ib0"
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "enp,ib")
    assert environment()["NCCL_SOCKET_IFNAME"] == "enp,ib" and environment()["GLOO_SOCKET_IFNAME"] == "ib0"
    found = environment(NCCL_SOCKET_IFNAME="hsn", NCCL_IB_TC=106, OMP_NUM_THREADS=3)
    assert (found["NCCL_SOCKET_IFNAME"], found["NCCL_IB_TC"], found["OMP_NUM_THREADS"]) == ("hsn", "106", "3")


def test_the_command_of_a_node_is_logged_without_secrets(folder: AttemptDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STORE_SECRET", "Plant-by-value-1")
    variables = {"ENDPOINT": "https://ada:Plant2w@host/x", "PASSED_ON": "Plant-by-value-1"}
    text = worker._heading(["accelerate", "launch"], variables, MET, folder.read(), worker.WorkerNode(0, 0))
    assert "env ENDPOINT=https://[removed]@host/x PASSED_ON=[removed] \\\n  accelerate launch" in text


@pytest.mark.parametrize(("accelerator", "job", "cluster", "value"), [
    ("h100", {}, {}, "expandable_segments:True"), ("cpu", {}, {}, None),
    ("h100", {"PYTORCH_ALLOC_CONF": "max_split_size_mb:256"}, {}, None),  # inherited from the job
    ("h100", {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:256"}, {}, None),
    ("h100", {}, {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:256"}, None),
    ("h100", {}, {"PYTORCH_ALLOC_CONF": "max_split_size_mb:256"}, "max_split_size_mb:256"),
])  # fmt: skip
def test_the_allocator_uses_segments_that_grow_unless_the_user_configured_it(
    monkeypatch: pytest.MonkeyPatch, accelerator: str, job: dict[str, str], cluster: dict[str, str], value: str | None
) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    for name in job:
        monkeypatch.setenv(name, job[name])
    found = environment_of_ranks(accelerator=accelerator, memory_gib_per_node=512.0, env=cluster)
    assert found.get("PYTORCH_ALLOC_CONF") == value


def test_lock_of_killed_build_is_removed(folder: AttemptDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = Path(kernel_caches(str(tmp_path))["TORCH_EXTENSIONS_DIR"]) / "cpu_adam/lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    monkeypatch.setattr("shardmake.core.build_locks.version", lambda _: "2.13")
    write_json(folder.deepspeed, {})
    monkeypatch.setattr(worker, "launch_command", lambda *_: ["test", "!", "-e", str(lock)])
    assert worker.main(folder.root, worker.WorkerNode(rank=0, start=0)) == 0
    assert f"Removed {lock}" in folder.log(0).read_text()


@pytest.mark.parametrize(("status", "exited", "ends_step"), [
    (1, [0], True), (1, [0, 1], False), (0, [0], False),
], ids=["another-node-is-stuck", "all-failed", "done-first"])  # fmt: skip
def test_a_failed_node_ends_the_step_if_another_is_stuck(
    folder: AttemptDir, monkeypatch: pytest.MonkeyPatch, status: int, exited: list[int], ends_step: bool
) -> None:
    for rank in exited:
        make_exit(rank, returncode=status).write(folder.exit_record(rank))
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setattr(worker, "main", lambda *_: status)
    monkeypatch.setattr(worker, "OTHERS_SECONDS", 0.1)
    stop = worker.StopRequest(folder.stop_file)
    if not ends_step:
        assert worker.run_slurm_task(folder.root, stop) is None
        return
    with pytest.raises(SystemExit) as end:
        worker.run_slurm_task(folder.root, stop)
    assert end.value.code not in (0, None)


def test_a_record_that_cannot_be_written_is_printed(
    folder: AttemptDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(NodeExit, "write", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    monkeypatch.setattr(worker, "run_rendezvous", Mock(side_effect=RendezvousError("no node connected")))
    assert worker.main(folder.root, worker.WorkerNode(rank=1, start=0)) == 1
    printed = capsys.readouterr().out
    assert "No space left on device" in printed and '"phase":"rendezvous"' in printed and "no node connected" in printed


@pytest.mark.parametrize(("error", "message", "kept"), [
    (OSError(errno.ENOSPC, "No space left on device", "/scratch/x"), "Cannot use /scratch/x. No space is left", False),
    (KeyError("rank"), "Unexpected error: KeyError: 'rank'", True),
])  # fmt: skip
def test_an_error_of_the_worker_has_a_message_and_its_traceback_a_file(
    folder: AttemptDir, monkeypatch: pytest.MonkeyPatch, error: Exception, message: str, kept: bool
) -> None:
    monkeypatch.setattr(worker, "run_rendezvous", Mock(side_effect=error))
    assert worker.main(folder.root, worker.WorkerNode(rank=1, start=0)) == 1
    record = NodeExit.read(folder.exit_record(1))
    assert record.message.startswith(message) and "Traceback" not in record.message
    assert folder.log(1).exists() == kept and (not kept or "KeyError" in folder.log(1).read_text())


def test_a_node_blames_the_missing_one(folder: AttemptDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_programs(tmp_path, monkeypatch, {"scontrol": '[ "$*" = "show hostnames c[1-2]" ] && printf "c1\\nc2\\n"'})
    monkeypatch.setenv("SLURM_STEP_NODELIST", "c[1-2]")
    monkeypatch.setattr(
        worker, "run_rendezvous",
        Mock(side_effect=RendezvousError("Node 1 did not connect to c1 before the deadline.", absent=1)),
    )  # fmt: skip
    worker.main(folder.root, worker.WorkerNode(rank=0, start=0))
    assert [node.culprit for node in folder.exits()] == ["c2"]
    (tmp_path / "scontrol").unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert worker.step_nodes() == []


@pytest.fixture
def claimed(tmp_path: Path) -> AttemptDir:
    (tmp_path / "attempts/001").mkdir(parents=True)
    return AttemptDir(tmp_path / "attempts/001")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Return the attempts whose worker started; the task is one of job 7."""
    found: list[Path] = []
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    monkeypatch.setattr(slurm_task, "run_slurm_task", lambda attempt, stop: found.append(attempt))
    monkeypatch.setattr(slurm_task, "StopRequest", Mock())
    return found


def test_the_first_job_works_on_every_node_and_after_a_restart(claimed: AttemptDir, started: list[Path]) -> None:
    for _ in range(2):
        slurm_task.main(claimed.root)
    assert started == [claimed.root] * 2


def test_a_requeued_job_counts_its_starts(tmp_path: Path, started: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Another node may have published the address of this start before, and the job two addresses before that."""
    folder = AttemptDir(tmp_path / "train/attempts/001")
    write_attempt(folder, make_plan("zero2")).model_copy(update={"again": 2}).write(folder.settings)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    for start in range(5):
        started.clear()
        MET.write(folder.rendezvous / f"start-{start}.json")
        slurm_task.main(folder.root)
        assert bool(started) is (start < 4)


@pytest.mark.parametrize(("owner", "reason"), [
    ("8", "attempt 001 belongs to job 8, because the sbatch of this one had failed"),
    (NOBODY, "attempt 001 belongs to no job, because the sbatch of this one had failed"),
    ("7", "a later attempt has begun"),
])  # fmt: skip
def test_another_job_leaves_the_attempt(
    claimed: AttemptDir, started: list[Path], capsys: pytest.CaptureFixture[str], owner: str, reason: str
) -> None:
    claim(claimed, owner)
    folder = claimed.root.parent
    if owner == "7":
        (folder / "002").mkdir()
    before = sorted(folder.rglob("*"))
    slurm_task.main(claimed.root)
    assert not started and sorted(folder.rglob("*")) == before
    assert capsys.readouterr().out == f"Job 7 ends without training: {reason}.\n"


def test_a_job_follows_its_attempts(claimed: AttemptDir, started: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The first attempt chooses the second one while the job runs; a requeued job begins with the last one."""
    second = claimed.root.with_name("002")

    def run(root: Path, stop: object) -> AttemptDir | None:
        started.append(root)
        if root == second:
            return None
        second.mkdir()
        return AttemptDir(root.with_name(claim_next(claimed, "002")))

    monkeypatch.setattr(slurm_task, "run_slurm_task", run)
    slurm_task.main(claimed.root)
    slurm_task.main(claimed.root)
    assert started == [claimed.root, second, second]
