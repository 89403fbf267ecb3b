"""A stage that breaks, on a first run or after an edit, is to do again with all that follows it.

Snakemake removes what a stage made before it runs again, and forgets results in the middle that nobody asks for. The
stages are stand-ins, which write what the rules and Snakemake read of real ones.
"""

import os
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from shardmake.config.effects import STAGES
from tests.workflow.checkout import PROFILE, RUN, Checkout
from tests.workflow.test_reruns import dry_run

STAND_IN = """
import errno, os, signal, sys
from pathlib import Path
words = [Path(sys.orig_argv[1]).name, *sys.orig_argv[2:4]] if len(sys.orig_argv) > 3 else []
if words[:1] == ["shardmake"]:
    from tests.workflow.stand_in import leave
    stage, _, how = os.environ["BROKEN"].partition(":")
    how = how if stage == words[1] else ""
    if how == "error":
        sys.exit("Error: the stage failed. As planned. Run it again.")
    if how == "full disk":
        sys.exit(f"Error: {OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))}")
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "kill all":
        os.killpg(0, signal.SIGKILL)
    if how == "Ctrl-C":
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        os.killpg(0, signal.SIGINT)
        os._exit(130)
    leave(*words[1:])
    os._exit(0)
"""
EDITS: dict[str, dict[str, Any]] = {
    **{key: {"data": {"train": "resources/demo/eval.jsonl"}} for key in ("fetch", "plan", "render", "data", "train")},
    "consolidate": {"dtype": "bf16"},
    "evaluate": {"evaluation": {**RUN["evaluation"], "max_new_tokens": 8}},
    **{key: {"push": {"to": "file:published/other"}} for key in ("push", "report")},
}
"""An edit that runs the stage again."""
HOW = ("error", "full disk", "kill", "kill all", "Ctrl-C")
BREAKS = [
    (stage, HOW[(number + 3 + 2 * is_edited) % len(HOW)], is_edited)
    for number, stage in enumerate(STAGES)
    for is_edited in (False, True)
]
"""Each stage and each way to break, on a first run and after an edit."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, inputs: Path) -> Checkout:
    """A finished run."""
    checkout = Checkout.create(tmp_path_factory.mktemp("broken") / "checkout", inputs)
    run(checkout)
    assert dry_run(checkout)[0] == []
    return checkout


def run(checkout: Checkout, broken: str = "") -> int:
    """Run the workflow in a session of its own and return its status."""
    (checkout.root / "sitecustomize.py").write_text(STAND_IN)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{checkout.root}:{os.environ.get('PYTHONPATH', '')}:{Path(__file__).parents[2]}")
        patch.setenv("BROKEN", broken)
        log = checkout.root / "snakemake.log"
        status = checkout.start("snakemake", *PROFILE, log=log).wait()
    print(log.read_text())
    return status


@pytest.mark.parametrize(("stage", "how", "is_edited"), BREAKS)
def test_a_broken_stage_and_what_follows_is_to_do_again(
    made: Checkout, tmp_path: Path, stage: str, how: str, is_edited: bool
) -> None:
    checkout = Checkout(Path(shutil.copytree(made.root, tmp_path / "copy", symlinks=True)))
    if is_edited:
        checkout.configure(**EDITS[stage])
    else:
        for made_before in ("runs", ".snakemake"):
            shutil.rmtree(checkout.root / made_before)
    assert run(checkout, f"{stage}:{how}") != 0
    log = (checkout.root / "snakemake.log").read_text()
    assert how != "Ctrl-C" or stage == "train" or "The same command continues it." in log
    if how == "kill all":
        assert run(checkout) != 0
        *_, unlock = (checkout.root / "snakemake.log").read_text().strip().splitlines()
        assert unlock.endswith(" --unlock")
        checkout(*shlex.split(unlock))
    todo = dry_run(checkout)[0]
    assert {*STAGES[max(STAGES.index(stage), STAGES.index("train")) :]} <= {*todo} and stage in todo
    assert run(checkout) == 0
    assert dry_run(checkout)[0] == []
