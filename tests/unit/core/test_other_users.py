"""A real second user plants folders, links and files where Shardmake's node-local folders will be.

The second user is an outsider: a member of no common group. Both users share a folder with the mode of /tmp.
"""

import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shardmake.core import failures
from shardmake.core.atomic import digest, write_json
from shardmake.core.disk import remove_swap_files, swap_folder
from shardmake.core.environment import kernel_caches
from shardmake.core.failures import describe_unexpected
from shardmake.core.secrets import redact
from shardmake.launch.preflight import check_swap_folders
from shardmake.launch.slurm_jobs import waiting_snapshot
from shardmake.launch.worker import remove_local_files
from shardmake.run.attempt import AttemptDir
from shardmake.run.findings import Finding
from shardmake.train.async_saver import ScratchFolder
from tests.unit.launch.test_preflight import node
from tests.users import ATTACKER, VICTIM, as_user

pytestmark = pytest.mark.root
RUN_FOLDER = "/project/runs/chat"
PLANTED = (
    "torch_extensions/fused_adam/fused_adam.so",
    "inductor/fxgraph/ab/graph",
    f"saves/chat-{digest(RUN_FOLDER)[:8]}/checkpoint-1/x.pt",
)


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A folder like /tmp, with a home of the victim and a folder of the attacker beside it."""
    with tempfile.TemporaryDirectory(prefix="shardmake-test-") as name:
        root = Path(name)
        root.chmod(0o755)
        for user, folder in ((VICTIM, "home"), (ATTACKER, "theirs"), (0, "tmp")):
            (root / folder).mkdir()
            (root / folder).chmod({"home": 0o700, "theirs": 0o777, "tmp": 0o1777}[folder])
            os.chown(root / folder, user, user)
        yield root / "tmp"


def plant(folder: Path) -> None:
    """Put files below ``folder`` that a library would load or Shardmake would remove."""
    for name in PLANTED:
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text("planted")


def plant_in_new_folder(folder: Path, mode: int) -> None:
    folder.mkdir()
    plant(folder)
    folder.chmod(mode)


def plant_behind_link(folder: Path) -> None:
    plant(folder.parent.parent / "theirs")
    folder.symlink_to(folder.parent.parent / "theirs")


def open_own_folder(folder: Path) -> None:
    """As the victim: the folder of an earlier version, or one made by hand."""
    folder.mkdir()
    folder.chmod(0o777)


Trap = Callable[[Path], None]
TRAPS: dict[str, list[tuple[int, Trap]]] = {
    "a folder of another user": [(ATTACKER, lambda folder: plant_in_new_folder(folder, 0o755))],
    "an open folder of another user": [(ATTACKER, lambda folder: plant_in_new_folder(folder, 0o777))],
    "a link to another user's folder": [(ATTACKER, plant_behind_link)],
    "a link to the victim's home": [(ATTACKER, lambda folder: folder.symlink_to(folder.parent.parent / "home"))],
    "a link to nothing": [(ATTACKER, lambda folder: folder.symlink_to(folder.parent.parent / "theirs/new"))],
    "a file of another user": [(ATTACKER, Path.touch)],
    "an own folder open to all": [(VICTIM, open_own_folder), (ATTACKER, plant)],
}
with_every_trap = pytest.mark.parametrize("trap", TRAPS)


def set_trap(folder: Path, trap: str) -> dict[Path, tuple[int, int]]:
    """Make the trap at ``folder``; return everything around it."""
    for user, action in TRAPS[trap]:
        as_user(user, lambda action=action: action(folder))
    return everything(folder.parent.parent)


def everything(root: Path) -> dict[Path, tuple[int, int]]:
    """Return mode and owner of all that exists below ``root``."""
    return {path: (path.lstat().st_mode, path.lstat().st_uid) for path in root.rglob("*")}


def assert_private(folder: Path, planted: Path) -> None:
    """Check that ``folder`` is the victim's and that nobody else can read or write it."""
    assert folder != planted and not folder.is_symlink(), "what another user could fill is not used"
    found = folder.lstat()
    assert stat.filemode(found.st_mode) == "drwx------" and found.st_uid == VICTIM
    with pytest.raises(PermissionError):
        as_user(ATTACKER, lambda: list(folder.iterdir()))
    with pytest.raises(PermissionError):
        as_user(ATTACKER, lambda: (folder / "torch_extensions").mkdir())


@with_every_trap
def test_compiled_kernels_are_not_loaded_from_a_planted_folder(scratch: Path, trap: str) -> None:
    folder = scratch / f"shardmake-{VICTIM}"
    set_trap(folder, trap)
    caches = [Path(cache) for cache in as_user(VICTIM, lambda: kernel_caches(str(scratch))).values()]
    assert len(caches) == 3 and not any(cache.exists() for cache in caches)
    for cache in caches:
        assert_private(cache.parent, folder)


def test_kernels_stay_in_one_folder_that_nobody_touched(scratch: Path) -> None:
    first, second = (as_user(VICTIM, lambda: kernel_caches(str(scratch))) for _ in range(2))
    assert first == second and Path(first["TRITON_CACHE_DIR"]).parent == scratch / f"shardmake-{VICTIM}"


@with_every_trap
def test_no_answer_is_read_from_a_planted_folder(scratch: Path, trap: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    folder = scratch / f"shardmake-queue-{VICTIM}"
    set_trap(folder, trap)
    assert_private(as_user(VICTIM, waiting_snapshot).parent, folder)


@with_every_trap
def test_asynchronous_saves_write_and_remove_nothing_in_a_planted_folder(scratch: Path, trap: str) -> None:
    folder = scratch / f"shardmake-{VICTIM}"
    before = set_trap(folder, trap)
    saver = ScratchFolder(folder / "saves/chat", folder, scratch, node=0, nodes=1, share=1.0)
    assert "is not a folder of this user alone" in as_user(VICTIM, lambda: saver.make_room(1))
    assert everything(scratch.parent) == before


@with_every_trap
def test_a_node_swaps_no_weights_to_a_planted_folder_and_removes_nothing_there(scratch: Path, trap: str) -> None:
    planted = scratch / f"shardmake-{VICTIM}"
    before = set_trap(planted, trap)

    def check() -> list[Finding]:
        settings = {"zero_optimization": {"offload_param": {"nvme_path": swap_folder(str(scratch), "chat", planted)}}}
        remove_swap_files(settings)
        return check_swap_folders(settings)

    (finding,) = as_user(VICTIM, check)
    assert finding.found.startswith(f"the swap folder {planted} cannot be made, or is not")
    assert everything(scratch.parent) == before


@with_every_trap
def test_the_end_of_a_worker_removes_nothing_in_a_planted_folder(scratch: Path, tmp_path: Path, trap: str) -> None:
    _, attempt, _ = node(tmp_path)
    attempt = attempt.model_copy(update={"scratch": str(scratch), "run_folder": RUN_FOLDER})
    assert str(attempt.saves.relative_to(scratch / f"shardmake-{os.getuid()}")) in PLANTED[2]
    folder = AttemptDir(scratch.parent / "run")
    write_json(folder.deepspeed, {})
    before = set_trap(scratch / f"shardmake-{VICTIM}", trap)
    as_user(VICTIM, lambda: remove_local_files(folder, attempt))
    assert everything(scratch.parent) == before


def test_a_traceback_is_not_written_through_a_link(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    monkeypatch.setattr(failures, "LOGS", scratch / "absent")
    monkeypatch.setattr(failures.time, "strftime", lambda _: "now")
    as_user(VICTIM, lambda: (scratch.parent / "home/notes").write_text("mine"))
    redact("")  # imports what the victim cannot read
    link = scratch / "shardmake-error-now-1234.txt"
    monkeypatch.setattr(failures.os, "getpid", lambda: 1234)
    as_user(ATTACKER, lambda: link.symlink_to(scratch.parent / "home/notes"))
    assert "No folder for the traceback was writable" in as_user(VICTIM, lambda: describe_unexpected(ValueError("x")))
    assert (scratch.parent / "home/notes").read_text() == "mine"
