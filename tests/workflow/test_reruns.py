"""Stages that `snakemake -n` would run again after each kind of edit; files stand in for what finished stages leave."""

import contextlib
import os
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardmake.config.effects import STAGES
from shardmake.config.load import load_config
from tests.workflow.checkout import PROFILE, RUN, Checkout
from tests.workflow.stand_in import leave

AFTER_TRAINING = ["consolidate", "evaluate", "push", "report"]


def finish(checkout: Checkout, *, trained: bool = True) -> None:
    """Write what finished stages of every run leave; Snakemake then records its parameters."""
    stages = STAGES if trained else ("fetch", "plan", "render", "data")
    with contextlib.chdir(checkout.root):
        for name in load_config(Path("config/config.yaml")).runs:
            for stage in stages:
                leave(stage, name)
    checkout("snakemake", *PROFILE, "--touch", "--forceall", *(() if trained else ("render", "data")))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, inputs: Path) -> Checkout:
    """A checkout with a run that was trained and pushed."""
    checkout = Checkout.create(tmp_path_factory.mktemp("reruns") / "checkout", inputs)
    finish(checkout)
    return checkout


@pytest.fixture
def edited(finished: Checkout) -> Iterator[Checkout]:
    """The finished checkout, whose configuration is restored after the test."""
    yield finished
    finished.configure()


def dry_run(checkout: Checkout) -> tuple[list[str], str]:
    """Return the stages that would run, and the whole output."""
    output = checkout("snakemake", *PROFILE, "-n").stdout
    return sorted(planned(output)), output


def planned(output: str) -> set[str]:
    """Return the stages in Snakemake's table of jobs."""
    return set(re.findall(r"^(\w+)_run +\d+$", output, re.M))


def test_edits_that_cannot_change_a_result_rerun_nothing(edited: Checkout) -> None:
    """All at once: what one of them reran would show."""
    edited.configure(
        {"memory_gib_per_node": 5, "hang_seconds": 900, "trainings_per_user": 9, "max_nodes": 2}, strategy="zero2",
        checkpoints={"every_steps": 3, "keep": 3, "keep_best": True, "asynchronous": True}, report_to=["tensorboard"],
        eval_every_steps=2, micro_batch_size=1, evaluation={**RUN["evaluation"], "batch_tokens": 1024},
        model="./resources/demo/base", data={"train": "resources//demo/train.jsonl", "eval": "./resources/demo/eval.jsonl"},
    )  # fmt: skip
    with (edited.root / "config/config.yaml").open("a") as file:
        file.write("# a comment\n")
    assert dry_run(edited)[0] == []


CHANGING: dict[str, tuple[dict[str, Any], list[str], str]] = {
    "learning rate": (
        {"learning_rate": 1e-3}, ["plan", "render", "train", *AFTER_TRAINING], "changed: learning_rate: 0.002 -> 0.001",
    ),
    "length": (
        {"sequence_length": 32}, ["data", "plan", "render", "train", *AFTER_TRAINING], "changed: sequence_length: 64 -> 32",
    ),
    "type of the weights": ({"dtype": "bf16"}, AFTER_TRAINING, "changed: dtype: keep -> bf16"),
    "evaluation": (
        {"evaluation": {**RUN["evaluation"], "max_new_tokens": 8}}, AFTER_TRAINING[1:],
        "changed: evaluation.max_new_tokens: 4 -> 8",
    ),
    "destination": (
        {"push": {"to": "file:published/other"}}, AFTER_TRAINING[2:],
        "changed: push.to: file:published/demo -> file:published/other",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("edit", "stages", "named"), CHANGING.values(), ids=CHANGING)
def test_an_edit_reruns_the_stages_whose_result_it_changes(
    edited: Checkout, edit: dict[str, Any], stages: list[str], named: str
) -> None:
    edited.configure(**edit)
    found, output = dry_run(edited)
    assert found == sorted(stages)
    assert named in output, "the dry run names the setting and its new value"


def test_a_lost_file_of_the_model_reruns_the_merge(finished: Checkout) -> None:
    lost, aside = finished.run / "model/config.json", finished.root / "aside"
    lost.rename(aside)
    found, output = dry_run(finished)
    aside.rename(lost)
    assert found == sorted(AFTER_TRAINING) and "changed: runs/demo/model/config.json: removed" in output


def test_own_files_script_and_data_rerun_what_their_content_changes(checkout: Checkout) -> None:
    """A new date reruns nothing; an edit counts like one of the configuration."""
    own, data = checkout.root / "ds.json", checkout.root / "examples"
    own.write_text('{"zero_optimization": {"reduce_bucket_size": 1000}}')
    data.mkdir()
    shutil.copy(checkout.root / "resources/demo/train.jsonl", data / "train.jsonl")
    run = {"deepspeed_config": "ds.json", "data": {"train": "examples", "eval": "resources/demo/eval.jsonl"}}
    checkout.configure(**run)
    finish(checkout)
    template = checkout.root / "resources/demo/base/tokenizer_config.json"
    for path in (own, data / "train.jsonl", template):
        path.touch()
    assert dry_run(checkout)[0] == []
    own.write_text('{"zero_optimization": {"reduce_bucket_size": 2000}, "wall_clock_breakdown": true}')
    assert dry_run(checkout)[0] == [], "neither value can change the result"
    own.write_text('{"communication_data_type": "fp32"}')
    found, output = dry_run(checkout)
    assert found == sorted(["plan", "render", "train", *AFTER_TRAINING])
    assert 'deepspeed_config.content: {} -> {"communication_data_type": "fp32"}' in output
    assert "deepspeed_config.content: {}" in checkout("shardmake", "train", "demo", check=False).stdout
    own.write_text('{"zero_optimization": {"reduce_bucket_size": 1000}}')
    template.write_text(template.read_text() + " ")
    assert {"fetch", "data", "plan", "train"} <= set(dry_run(checkout)[0])
    template.write_text(template.read_text().removesuffix(" "))
    (data / "more.jsonl").write_text((data / "train.jsonl").read_text())
    assert {"fetch", "data", "plan", "train"} <= set(dry_run(checkout)[0])


def test_a_changed_secret_is_noticed_and_not_stored(edited: Checkout) -> None:
    edited.configure(push={"to": "s3://ada:hunter2hunter2@bucket/demo"})
    found, output = dry_run(edited)
    assert found == ["push", "report"] and "hunter2" not in output


def test_until_the_training_has_finished_every_setting_of_the_plan_takes_effect(checkout: Checkout) -> None:
    finish(checkout, trained=False)
    assert "plan" not in dry_run(checkout)[0]
    checkout.configure(cluster={"memory_gib_per_node": 5})
    found, output = dry_run(checkout)
    assert {"plan", "render"} <= set(found) and "data" not in found
    assert "changed: cluster.memory_gib_per_node: 6.0 -> 5.0" in output


# --- a stage that breaks, on a first run or after an edit, is to do again with all that follows it ---------------------
# Snakemake removes what a stage made before it runs again, and forgets results in the middle that nobody asks for.

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
HOW = ("error", "full disk", "kill", "kill all", "Ctrl-C")
EXAMPLES = {"data": {"train": "resources/demo/eval.jsonl"}}
BREAKS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "first run": ({}, tuple(stage for stage in STAGES if stage != "data")), "first data": ({}, ("data",)),
    "examples": (EXAMPLES, ("fetch", "plan", "render", "train")), "data": (EXAMPLES, ("data",)),
    "dtype": ({"dtype": "bf16"}, ("consolidate",)),
    "evaluation": ({"evaluation": {**RUN["evaluation"], "max_new_tokens": 8}}, ("evaluate",)),
    "destination": ({"push": {"to": "file:published/other"}}, ("push", "report")),
}  # fmt: skip
"""An edit, and stages that it runs again; without an edit, stages of a first run. Data are made beside other stages."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, inputs: Path) -> Checkout:
    """A finished run."""
    checkout = Checkout.create(tmp_path_factory.mktemp("broken") / "checkout", inputs)
    run(checkout)
    assert dry_run(checkout)[0] == []
    return checkout


def run(checkout: Checkout, broken: str = "") -> tuple[bool, str]:
    """Run the workflow in a session of its own; return whether it succeeded, and its output."""
    (checkout.root / "sitecustomize.py").write_text(STAND_IN)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{checkout.root}:{os.environ.get('PYTHONPATH', '')}:{Path(__file__).parents[2]}")
        patch.setenv("BROKEN", broken)
        log = checkout.root / "snakemake.log"
        status = checkout.start("snakemake", *PROFILE, log=log).wait()
    print(f"broken: {broken}\n{log.read_text()}")
    return status == 0, log.read_text()


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("edit", "stages"), BREAKS.values(), ids=BREAKS)
def test_a_broken_stage_and_what_follows_is_to_do_again(
    made: Checkout, tmp_path: Path, edit: dict[str, Any], stages: tuple[str, ...]
) -> None:
    """Each run does the stage that broke in the run before, and breaks in the next one."""
    checkout = Checkout(Path(shutil.copytree(made.root, tmp_path / "copy", symlinks=True)))
    if edit:
        checkout.configure(**edit)
    else:
        for made_before in ("runs", ".snakemake"):
            shutil.rmtree(checkout.root / made_before)
    breaks = [f"{stage}:{HOW[(STAGES.index(stage) + (0 if edit else 3)) % len(HOW)]}" for stage in stages]
    for first, broken in zip((stages[0], *stages), (*breaks, ""), strict=True):
        succeeded, log = run(checkout, broken)
        later = {first, "train", *AFTER_TRAINING}
        assert planned(log) & later == later - {*STAGES[: STAGES.index(first)]} and succeeded == (not broken)
        assert broken == "train:Ctrl-C" or "Ctrl-C" not in broken or "The same command continues it." in log
        if broken.endswith("kill all"):
            succeeded, log = run(checkout)
            *_, unlock = log.strip().splitlines()
            assert not succeeded and unlock.endswith(" --unlock")
            checkout(*shlex.split(unlock))
    assert dry_run(checkout)[0] == []
