"""The whole workflow on one machine, with real processes."""

import json
import os
import re
import shutil
import socket
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from shardmake.checkpoint import store
from shardmake.core.atomic import sealed, unsealed, write_json
from shardmake.core.fingerprint import fingerprint
from shardmake.demo.recovery import AGAIN, DEMO, kill_tree
from tests.unit.checkpoint.formats.test_unpickle import Hostile
from tests.workflow.checkout import PROFILE, UNPUSHED, Checkout, wait_for
from tests.workflow.conftest import SECRETS

pytestmark = pytest.mark.training


@pytest.mark.usefixtures("secrets")
def test_from_config_to_pushed_model_through_a_killed_head_and_a_failed_push(checkout: Checkout) -> None:
    decay = {"scheduler": "warmup_stable_decay", "scheduler_arguments": {"num_decay_steps": 4, "min_lr_ratio": 0.1}}
    given = {"freeze": ["*.input_layernorm"], "report_to": ["tensorboard", "mlflow"], "profile": {"first_step": 3}}
    checkout.configure(max_steps=10, learning_rates={"model.embed_tokens": 1e-4}, **given, **decay)
    assert "This was a dry-run" in checkout("snakemake", *PROFILE, "-n").stdout
    head = checkout.start("snakemake", *PROFILE, log=checkout.root / "first.log")
    wait_for(lambda: len(checkout.metrics()) >= 2 or head.poll() is not None)
    kill_tree(head.pid, spare="shardmake.launch.worker")
    head.wait()

    blocked = checkout.root / "published"
    blocked.write_text("a file where the folder should be")  # after the plan, which would refuse it
    checkout("snakemake", *PROFILE, "--unlock")
    again = checkout("snakemake", *PROFILE, check=False)
    assert again.returncode != 0
    assert "Adopting job" in again.stdout
    history = checkout.read("train/attempts/index.json")
    assert [(entry["attempt"], entry["end"]) for entry in history] == [(1, "finished")]
    assert sorted(checkout.losses()) == list(range(1, 11))
    assert "published" in again.stdout and "Traceback" not in again.stdout
    assert "MissingOutputException" not in again.stdout, "the rule itself failed, at once"

    trained = (checkout.run / "train/receipt.json").stat().st_mtime_ns
    merged = (checkout.run / "model/receipt.json").stat().st_mtime_ns
    blocked.unlink()
    retried = checkout("snakemake", *PROFILE)
    assert "pushing the model" in retried.stdout
    assert "training;" not in retried.stdout and "merging the sharded" not in retried.stdout
    assert (checkout.run / "train/receipt.json").stat().st_mtime_ns == trained
    assert (checkout.run / "model/receipt.json").stat().st_mtime_ns == merged
    assert_result_is_complete(checkout)
    assert "train/profile/trace-steps-3-4.json.gz" in (checkout.run / "report.html").read_text()
    assert (checkout.run / "train/profile/trace-steps-3-4.json.gz").is_file()
    assert_trackers_have_the_losses(checkout)
    assert_nothing_private_left(checkout)
    assert_snakemake_reports(checkout)

    assert "Nothing to be done" in checkout("snakemake", *PROFILE).stdout
    for name in ("config/config.yaml", "config/cluster.yaml", "workflow/rules/train.smk"):
        with (checkout.root / name).open("a") as file:
            file.write("\n# a comment\n")
    assert "Nothing to be done" in checkout("snakemake", *PROFILE).stdout
    forced = checkout("snakemake", *PROFILE, "runs/demo/model/receipt.json", "-f")
    assert "merging the sharded" in forced.stdout and "training;" not in forced.stdout


def assert_trackers_have_the_losses(checkout: Checkout) -> None:
    """TensorBoard and MLflow hold the losses of the metrics."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(checkout.run / "train/tensorboard"))
    events.Reload()
    losses = {event.step: event.value for event in events.Scalars("train/loss")}
    assert losses == pytest.approx(checkout.losses(), abs=1e-3)
    assert {"train/learning_rate", "train/grad_norm"} <= set(events.Tags()["scalars"])
    (logged,) = (checkout.run / "train/mlflow").glob("*/*/metrics/loss")
    assert {int(line.split()[2]) for line in logged.read_text().splitlines()} == set(losses)


def assert_nothing_private_left(checkout: Checkout) -> None:
    """No file of the run, its logs or what was pushed holds a secret; what was pushed names no path or host of this machine."""
    files = {path: path.read_bytes() for path in checkout.root.rglob("*") if path.is_file()}
    assert any(path.name.startswith("events.out") for path in files)
    assert [path for path, text in files.items() for value in SECRETS.values() if value.encode() in text] == []
    private = [str(checkout.root), socket.gethostname() + " ", str(Path.home())]
    pushed = {path: text for path, text in files.items() if path.is_relative_to(checkout.root / "published")}
    assert {"README.md", "config.json", "loss.png"} <= {path.name for path in pushed}
    assert [(path, word) for path, text in pushed.items() for word in private if word.encode() in text] == []


def assert_snakemake_reports(checkout: Checkout) -> None:
    checkout("snakemake", *PROFILE, "--report", "report.html")
    page = (checkout.root / "report.html").read_text()
    assert "Training loss of demo by optimizer step, stitched over all attempts" in page
    for name in ("report.html", "loss.svg", "optimizer.svg", "speed.svg", "memory.svg"):
        assert name in page


def assert_result_is_complete(checkout: Checkout) -> None:
    """The pushed weights are those that DeepSpeed's own converter takes from the last checkpoint."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    receipt = checkout.read("train/receipt.json")
    reference = get_fp32_state_dict_from_zero_checkpoint(str(checkout.run / receipt["checkpoint"]))
    pushed = load_file(checkout.root / "published/demo/model.safetensors")
    assert set(pushed) == set(reference) - {"lm_head.weight"}
    for name, tensor in pushed.items():
        assert torch.equal(tensor, reference[name]), name
    evaluation = checkout.read("evaluation.json")
    assert evaluation["tuned"]["loss"] < evaluation["base"]["loss"] - 0.3
    assert len(evaluation["samples"]) == 1


def test_stop_file_saves_and_stops_and_training_resumes_from_there(checkout: Checkout) -> None:
    """Training resumes under another strategy too: the driver converts the checkpoint before it submits."""
    log = checkout.root / "driver.log"
    checkout.configure(max_steps=400, checkpoints={"every_steps": 300})
    checkout.stages()
    driver = checkout.start("shardmake", "train", "demo", log=log)
    wait_for(lambda: len(checkout.metrics()) >= 1)
    (checkout.run / "train/STOP").touch()
    assert driver.wait(timeout=120) == 3
    *_, last = log.read_text().splitlines()
    step = checkout.read("train/attempts/index.json")[-1]["checkpoint_step"]
    assert last == (
        f"Training of demo saved and stopped at step {step}, because somebody created runs/demo/train/STOP. "
        f"Run the same command again to resume from step {step}."
    )
    assert "demo  train  stopped on request  attempt 1 ended: stop requested" in checkout("shardmake", "status").stdout
    steps = {int(folder.name.split("-")[1]) for folder in (checkout.run / "train/checkpoints").iterdir()}
    assert len(steps) == 1 and steps < set(range(1, 300))

    checkout.configure(max_steps=400, checkpoints={"every_steps": 300}, strategy="zero2")
    checkout.stages("plan", "render")
    driver = checkout.start("shardmake", "train", "demo", log=log)
    wait_for(lambda: "(zero3 on 2 ranks) for zero2 on 2" in log.read_text())
    wait_for(lambda: "resuming from checkpoint" in log.read_text())
    wait_for(lambda: any(line["attempt"] == 2 for line in checkout.metrics()))
    (checkout.run / "train/STOP").touch()
    assert driver.wait(timeout=120) == 3
    logged = [line["step"] for line in checkout.metrics()]
    assert logged == sorted(set(logged)), "no step is logged twice"
    assert_a_replaced_file_runs_nothing(checkout)


def assert_a_replaced_file_runs_nothing(checkout: Checkout) -> None:
    """Replace a file of the newest checkpoint by one that runs code, with its checksum or left out of the record."""
    proof = checkout.root / "proof"
    record, checkpoint = next(store.committed(checkout.run / "train/checkpoints"))
    name = next(name for name in record.files if name.endswith("optim_states.pt"))
    states = torch.load(checkpoint / name, weights_only=False)
    torch.save(states | {"more": Hostile(os.mkdir, str(proof))}, checkpoint / name)
    others = {other: entry for other, entry in record.files.items() if other != name}
    replaced = others | {name: fingerprint(checkpoint / name)}
    for files, reason in (
        (replaced, f"{name} was not loaded. Its pickle would import posix.mkdir,"),
        (others, f"{checkpoint.name} was not loaded. {name} (1 in all) is not in its record,"),
    ):
        store.commit_in_place(checkpoint, record.model_copy(update={"files": files}))
        stopped = checkout("shardmake", "train", "demo", check=False)
        assert reason in stopped.stdout
        assert stopped.returncode == 2 and "Traceback" not in stopped.stdout
        assert not proof.exists() and checkpoint.exists()


LINKED = """
import os, sys
from pathlib import Path
if sys.orig_argv[1:2] and Path(sys.orig_argv[1]).name == "shardmake":
    from shardmake.run.paths import RunDir
    check = RunDir.refuse_links
    def check_and_link(rundir):
        check(rundir)
        for path in (rundir.root / name for name in os.environ["LINKED"].split()):
            path.parent.mkdir(exist_ok=True, parents=True)
            path.symlink_to(Path(os.environ["THEIRS"], "notes.txt" if path.suffix else ""))
    RunDir.refuse_links = check_and_link
"""
RESULTS = {
    "fetch": "sources.json fetched", "plan": "plan settings/plan.json",
    "render": "plan/accelerate.yaml plan/deepspeed.json plan/training.json plan/rendered.json plan/fallbacks",
    "data": "data settings/data.json",
    "train": "train/attempts train/checkpoints train/metrics.jsonl train/job.json train/receipt.json train/resharded",
    "consolidate": "model settings/consolidate.json",
    "evaluate": "evaluation.json evaluation.csv settings/evaluate.json", "push": "push settings/push.json",
    "report": "report.html figures",
}  # fmt: skip
"""The paths to which a stage writes."""


def test_no_stage_writes_to_what_somebody_links_to_while_it_runs(
    checkout: Checkout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The links appear once the stage has checked that there are none."""
    (theirs := tmp_path / "theirs").mkdir()
    (theirs / "notes.txt").write_text("years of work")
    monkeypatch.setenv("THEIRS", str(theirs))
    checkout.configure(max_steps=2, checkpoints={"every_steps": 2})
    for stage, linked in RESULTS.items():
        with monkeypatch.context() as patch:
            checkout.run_at_start(LINKED, patch)
            patch.setenv("LINKED", linked)
            done = checkout("shardmake", stage, "demo", check=False)
        assert {path.name: path.read_text() for path in theirs.iterdir()} == {"notes.txt": "years of work"}, stage
        left = [path for name in linked.split() if (path := checkout.run / name).is_symlink()]
        refused = any(f"{path} is a link to" in done.stdout for path in left)
        assert (done.returncode, refused) in ((2, True), (0, False)), "written to a link, or in its place"
        for path in left:
            path.unlink()
        checkout("shardmake", stage, "demo")


SHORTAGE = """
import json, os, sys
def refuse(event, arguments):
    if event == "open" and str(arguments[0]).endswith("metrics.jsonl") and "a" in str(arguments[1]):
        with open(os.path.join(sys.argv[1], "plan.json")) as file:
            choice = json.load(file)["choice"]
        if not choice["gradient_checkpointing"]:
            import torch
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB (simulated).")
if "shardmake.train" in sys.orig_argv:
    sys.addaudithook(refuse)
"""


def test_out_of_memory_takes_fallbacks_until_one_succeeds(checkout: Checkout, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own error, raised in the first step of every fallback without gradient checkpointing."""
    checkout.run_at_start(SHORTAGE, monkeypatch)
    checkout.configure(max_steps=2, checkpoints={"every_steps": 2}, micro_batch_size="auto", sequence_length=128)
    checkout.stages()
    output = checkout("shardmake", "train", "demo").stdout
    assert "CUDA out of memory" in output
    assert output.count("take the next fallback") == 2
    ends = [(entry["end"], entry["fallback"]) for entry in checkout.read("train/attempts/index.json")]
    assert ends == [("GPU out of memory", 0), ("GPU out of memory", 1), ("finished", 2)]
    settings = checkout.read("train/attempts/003/training.json")["arguments"]
    assert settings["activation_checkpointing"] and settings["gradient_accumulation_steps"] == 4
    assert sorted(checkout.losses()) == [1, 2]


DIVERGENCE = """
import sys
def diverge(event, arguments):
    if event == "open" and str(arguments[0]).endswith("metrics.jsonl") and "a" in str(arguments[1]):
        import gc, torch
        for value in gc.get_objects():
            if isinstance(value, torch.nn.Parameter):
                value.data.mul_(1e30)
if "shardmake.train" in sys.orig_argv:
    sys.addaudithook(diverge)
"""
"""Weights of the size that a diverging training reaches, from the end of the first step on."""


def test_loss_that_diverges_twice_at_a_step_stops_the_run(checkout: Checkout, monkeypatch: pytest.MonkeyPatch) -> None:
    checkout.run_at_start(DIVERGENCE, monkeypatch)
    checkout.configure(strategy="ddp", checkpoints={"every_steps": 1}, non_finite="rewind")
    checkout.stages()
    failed = checkout("shardmake", "train", "demo", check=False)
    assert failed.returncode == 2
    assert "is nan" in failed.stdout and "NonFiniteError" in failed.stdout
    history = checkout.read("train/attempts/index.json")
    assert [entry["end"] for entry in history] == ["non-finite loss", "non-finite loss"]
    assert history[0]["failed_step"] == history[1]["failed_step"] == history[1]["checkpoint_step"] + 1


@pytest.mark.faults
def test_a_rank_and_the_driver_are_killed_and_the_model_is_the_same(checkout: Checkout) -> None:
    """``make demo-faults``."""
    checkout.write_config({"cluster": "config/cluster.yaml", "runs": {DEMO: UNPUSHED | {"max_steps": 60}}})
    missing = checkout("python", "-m", "shardmake.demo.recovery", check=False)
    assert missing.returncode == 1 and "Run `make demo` first." in missing.stdout

    checkout("snakemake", *PROFILE, f"runs/{DEMO}/model/receipt.json")
    lines = checkout("python", "-m", "shardmake.demo.recovery").stdout.splitlines()
    assert re.fullmatch(rf"\d+:\d\d  {AGAIN}: the settings of {DEMO}, 60 steps, .*", lines[0])
    assert sum("SIGKILL" in line for line in lines) == 2
    assert "60 steps in 2 attempts" in lines[-2] and f"runs/{AGAIN}/model equals runs/{DEMO}/model" in lines[-1]


def flip(path: Path) -> None:
    """Flip a bit in the middle, in place, and give the file its times back."""
    times, content = path.stat(), bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    with path.open("r+b") as file:
        file.write(content)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def forget_changes(checkout: Checkout, weights: Path) -> None:
    """Let the receipt have the file's present time, as when the disk itself damaged it."""
    path = checkout.run / "fetched/weights.json"
    receipt = unsealed(json.loads(path.read_text()))
    receipt["changed_at"] = {str(weights): weights.stat().st_ctime_ns}
    write_json(path, sealed(receipt))


def test_a_flipped_bit_stops_every_later_stage(checkout: Checkout) -> None:
    checkout.configure(method="lora", strategy="ddp", checkpoints={"every_steps": 2, "keep": 3})
    checkout.stages("fetch", "plan", "render", "data", "train")
    uninterrupted = checkout.losses()
    (checkout.run / "train/receipt.json").unlink()
    for step in (4, 6):
        shutil.rmtree(checkout.run / f"train/checkpoints/checkpoint-{step}")
    weights = checkout.root / "resources/demo/base/model.safetensors"
    (data,) = (checkout.run / "data/train").glob("*.arrow")
    attempts = checkout.run / "train/attempts"

    def refused(stage: str, path: Path) -> None:
        found = checkout("shardmake", stage, "demo", check=False)
        assert found.returncode == 2 and f"{path} has other content" in found.stdout
        assert "Restore the file" in found.stdout

    flip(weights)
    refused("train", weights)
    assert not (attempts / "002").exists(), "found before a job was queued"
    forget_changes(checkout, weights)
    refused("train", weights)
    assert "train_loss" not in (attempts / "002/node-0.log").read_text() and not (attempts / "002/ranks").exists()
    flip(weights)
    flip(data)
    refused("train", data)
    flip(data)
    assert "resuming from checkpoint-2" in checkout("shardmake", "train", "demo").stdout
    assert checkout.losses() == uninterrupted
    checkout("shardmake", "consolidate", "demo")
    flip(weights)
    for stage in ("consolidate", "evaluate"):
        refused(stage, weights)
    flip(weights)
    checkout.configure(resume_from="runs/demo/train/checkpoints/checkpoint-6")
    said = checkout("shardmake", "fetch", "demo", "--runs", "later").stdout
    assert "Its optimizer states, schedule and step are not taken over." in said
    started = checkout.root / "later/demo/fetched/model/model.safetensors"
    assert started.read_bytes() == (checkout.run / "model/model.safetensors").read_bytes(), "adapters are merged"
