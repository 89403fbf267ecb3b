"""Every command that writes, on a read-only and on a full file system: one message, no traceback, a status."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from shardmake.config.effects import STAGES
from shardmake.core.atomic import write_json
from shardmake.run.paths import RunDir
from shardmake.run.receipts import PushReceipt
from tests.finished_run import TRAINED, make_rundir
from tests.unit.commands.test_clean import configure, make_checkpoint
from tests.workflow.checkout import LOCAL, RUN

WRITING = {
    "demo": ["demo", "out/demo"], "merge": ["consolidate", "resources/demo/base", "out/model"],
    **{name: [name, name] for name in STAGES},
}  # fmt: skip
READING = {
    "clean": ["clean"], "status": ["status", "push"], "estimate": ["estimate", "resources/demo/base"],
    "verify": ["verify", "resources/demo/base"], "show": ["render", "render", "--show"],
}  # fmt: skip
DRIVER = """
import json, os, sys
import datasets, transformers
from shardmake import cli
out = sys.argv[1]
os.chdir(sys.argv[2])
for name, words in json.loads(sys.argv[3]).items():
    if os.fork() == 0:
        os.dup2(os.open(f"{out}/{name}.txt", os.O_WRONLY | os.O_CREAT), 1)
        os.dup2(1, 2)
        sys.argv = ["shardmake", *words]
        cli.main()
    print(name, os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""
READ_ONLY = 'mount --bind "$1" "$1" && mount -o remount,bind,ro "$1" || exit 99'
FULL = """
mount -t tmpfs -o size=96m none "$2" && cp -r "$1/." "$2" || exit 99
dd if=/dev/zero of="$2/filler" bs=4k 2>/dev/null
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with a run for each command, which has everything that the command reads."""
    root = tmp_path_factory.mktemp("project")
    write_json(root / "cluster.yaml", LOCAL | {"processes_per_node": 1})
    run = {name: RUN[name] for name in ("model", "data", "sequence_length", "push")}
    run |= {"global_batch_size": 2, "max_steps": 2, "learning_rate": 1e-3}
    runs = dict.fromkeys((*WRITING, *READING, "seed"), run)
    write_json(root / "config/config.yaml", {"cluster": "cluster.yaml", "runs": runs})
    run_all(root, root.with_name("made"), {"demo": ["demo"]})
    for split, rows in (("train", 40), ("eval", 4)):
        file = root / f"resources/demo/{split}.jsonl"
        file.write_text("".join(file.read_text().splitlines(keepends=True)[:rows]))
    advance(root, "fetch", "plan")
    advance(root, "plan", "render", "data")
    advance(root, "render", "show")
    advance(root, "data", "train")
    trained = RunDir(root / "runs/seed")
    shutil.copytree(root / "resources/demo/base", trained.script_output)
    TRAINED.model_copy(update={"checkpoint": "train/output"}).write(trained.train_receipt)
    copy(root, "seed", "consolidate")
    advance(root, "consolidate", "evaluate")
    for name in ("push", "report"):
        make_rundir(root / name).root.rename(root / "runs" / name)
        shutil.rmtree(root / name)
    make_pushed(RunDir(root / "runs/clean"), root)
    return root


def make_pushed(rundir: RunDir, root: Path) -> None:
    shutil.copytree(root / "runs/push", rundir.root)
    configure(rundir)
    for step in (10, 20):
        make_checkpoint(rundir, step, finished=True)
    model = json.loads(rundir.model_receipt.read_text())["verification"]["files"]
    PushReceipt.model_validate({"destinations": [], "files": {}, "model": model}).write(rundir.push_receipt)


def advance(root: Path, command: str, *followers: str) -> None:
    """Run ``command`` on the run ``seed``, and copy its folder before to the command's own and after to the followers."""
    copy(root, "seed", command)
    statuses = run_all(root, root.with_name("made"), {command: [command, "seed"]})
    assert statuses == {command: 0}, (root.with_name("made") / f"{command}.txt").read_text()
    for name in followers:
        copy(root, "seed", name)


def copy(root: Path, source: str, target: str) -> None:
    if (root / "runs" / source).exists():
        shutil.copytree(root / "runs" / source, root / "runs" / target, dirs_exist_ok=True)


def run_all(root: Path, out: Path, commands: dict[str, list[str]], prepare: str = "") -> dict[str, int]:
    """Run the commands in a namespace of its own, after the shell lines ``prepare``; return their statuses."""
    out.mkdir(exist_ok=True)
    mounted = out / "mounted" if "tmpfs" in prepare else root
    mounted.mkdir(exist_ok=True)
    script = f'{prepare}\nexec "$3" -c "$4" "$5" "$2" "$6"'
    arguments = [root, mounted, sys.executable, DRIVER, out, json.dumps(commands)]
    command = ["unshare", "-rm", "sh", "-c", script, "sh", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {name: int(status) for name, status in (line.split() for line in done.stdout.splitlines()[-len(commands) :])}


@pytest.mark.parametrize(
    ("prepare", "reason"),
    [(READ_ONLY, "Read-only file system|read-only"), (FULL, "No space left|No space is left|left \\(free|are free")],
    ids=["read-only", "full"],
)
def test_commands_end_with_a_message(project: Path, tmp_path: Path, prepare: str, reason: str) -> None:
    out = tmp_path / "out"
    statuses = run_all(project, out, WRITING | READING, prepare)
    texts = {name: (out / f"{name}.txt").read_text() for name in statuses}
    assert {name: text for name, text in texts.items() if "Traceback" in text or "Unexpected error" in text} == {}
    assert {name: statuses[name] for name in WRITING} == dict.fromkeys(WRITING, 2), texts
    assert [name for name in WRITING if not re.search(reason, texts[name])] == [], texts
    assert {name: statuses[name] for name in READING} == dict.fromkeys(READING, 0), texts
