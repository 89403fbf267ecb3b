import os
import time
from pathlib import Path

import pytest

from shardmake.core.disk import FreeSpace, check_save, free_space, mount_of, quota_left, tree_size
from shardmake.core.errors import DiskFullError
from shardmake.plan.stage import describe_checkpoints
from shardmake.run.disk_budget import check_run, checkpoint_size, warn_of_purge
from shardmake.run.paths import RunDir
from shardmake.run.plan import PlaceEstimate
from tests.finished_run import MEMORY, make_plan, make_run, make_rundir
from tests.programs import install_programs
from tests.unit.plans import make_cluster

TIB = 1 << 40
NONE = 1 << 62


def with_disk_terms(rundir: RunDir, **terms: int) -> None:
    disk = PlaceEstimate(total=sum(terms.values()), terms=terms)
    candidate = MEMORY.candidates[0].model_copy(update={"disk": disk})
    MEMORY.model_copy(update={"candidates": [candidate]}).write(rundir.memory)


def test_a_run_that_does_not_fit_is_rejected_with_its_parts(tmp_path: Path) -> None:
    rundir = make_rundir(tmp_path)
    with_disk_terms(rundir, checkpoints=900_000 * TIB, model=TIB)
    message = r"will need .* GiB more \(checkpoints .* model 1024\.0 GiB\).*shardmake clean"
    with pytest.raises(DiskFullError, match=message):
        check_run(rundir)
    check_save(tmp_path, 1)
    with pytest.raises(DiskFullError, match="The next checkpoint needs"):
        check_save(tmp_path, 900_000 * TIB)


def test_a_run_whose_files_the_site_will_purge_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rundir = make_rundir(tmp_path)
    os.utime(rundir.plan, (0, time.time() - 55 * 86400))
    for days, expected in ((None, ""), (90, ""), (60, f"{rundir.root} has files that were last changed 55 days ago")):
        warn_of_purge(rundir, days)
        assert expected in caplog.text and bool(expected) == bool(caplog.text)
    caplog.clear()
    os.utime(rundir.plan)
    warn_of_purge(rundir, 60)
    assert not caplog.text


def test_existing_checkpoints_count(tmp_path: Path) -> None:
    rundir = make_rundir(tmp_path)
    checkpoint = rundir.checkpoints / "checkpoint-1" / "shard.bin"
    checkpoint.parent.mkdir(parents=True)
    with checkpoint.open("wb") as file:
        file.truncate(2 * TIB)  # sparse: a size without blocks
    with_disk_terms(rundir, checkpoints=2 * TIB)
    check_run(rundir)


def test_the_plan_describes_the_cost_of_checkpoints(tmp_path: Path) -> None:
    rundir = make_rundir(tmp_path)
    with_disk_terms(rundir, checkpoints=30 << 30, model=TIB)
    assert checkpoint_size(rundir, copies=2) == 10 << 30
    said = describe_checkpoints(make_plan(), make_run(), make_cluster(), rundir)
    assert said == "  a checkpoint takes 10.0 GiB, 30.0 GiB with those that are kept"
    said = describe_checkpoints(make_plan(), make_run(checkpoints={"every_steps": "auto"}), make_cluster(), rundir)
    assert "a save takes 10.7 s: for a failure every 3700 h, saving every 282 min loses the least (0.13% of the" in said


def test_a_quota_below_the_free_space_is_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device, point, _ = mount_of(tmp_path, Path("/proc/mounts").read_text())
    says = f"echo 'Disk quotas for user ada (uid 1000):'\necho '{device} 900* 0 1000 6days 1 0 0'"
    install_programs(tmp_path / "bin", monkeypatch, {"quota": says})
    link = Path("/dev/shm", tmp_path.name)
    link.symlink_to(tmp_path)
    try:
        assert free_space(tmp_path) == free_space(link / "new") == FreeSpace(100 * 1024, f"your quota on {point}")
    finally:
        link.unlink()
    install_programs(tmp_path / "bin", monkeypatch, {"quota": f"echo '{device} 900 0 0 0 9999* 0 10000 0'"})
    with pytest.raises(DiskFullError, match=rf"has only 1 files left \(your quota on {point}\)\. Free some"):
        check_save(tmp_path, 1)


@pytest.mark.parametrize(("row", "left"), [
    ("/dev/sdb1 1000 2000 3000 0 5 0 0 0", [(2000 * 1024, NONE)]),
    ("/dev/sdb1 1000 2000 0 0 5 0 0 0", [(1000 * 1024, NONE)]),
    ("/dev/sdb1 3500* 2000 3000 1764300000 5 0 9 0", [(0, 4)]), ("/dev/sdb1 1000 0 0 0 9* 8 0 1764300000", [(NONE, 0)]),
    ("/dev/sdb1 1000 0 0 0 5 0 0 0", []), ("/dev/sdc1 1000 2000 3000 0 5 0 0 0", []),
    ("/dev/sdb1\n   1000 2000 3000 - 5 0 0 -", [(2000 * 1024, NONE)]),
    ("/dev/sdb1 [1000]* 2000 [3000] - 5 0 0 -", [(2000 * 1024, NONE)]), ("/dev/sdb1 - - - - 5 0 0 -", []),
    ("/dev/sdb1 1000", []), ("", []),
])  # fmt: skip
def test_rows_of_quota(row: str, left: list[tuple[int, int]]) -> None:
    header = "Disk quotas for user ada (uid 1000):\n     Filesystem  blocks   quota   limit   grace   files\n"
    assert quota_left(header + row, "/dev/sdb1") == left


MOUNTS = "/dev/vda / ext4 rw 0 0\nnas:/home /home nfs4 rw 0 0\n10.0.0.1@o2ib:/work /work lustre rw 0 0\n"


@pytest.mark.parametrize(
    ("folder", "kind"), [("/", "ext4"), ("/home/ada", "nfs4"), ("/homework", "ext4"), ("/work", "lustre")]
)
def test_mounts(folder: str, kind: str) -> None:
    assert mount_of(Path(folder), MOUNTS)[2] == kind
    assert mount_of(Path(folder), "proc /proc proc rw 0 0\n") == ("unknown", "/", "unknown"), "a chroot"


def test_sizes(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b").write_bytes(b"123")
    assert tree_size(tmp_path) == 3 and tree_size(tmp_path / "none") == 0
