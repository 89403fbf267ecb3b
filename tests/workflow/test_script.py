"""A user's `accelerate launch` script runs unmodified through the whole workflow; test_loop.py has every engine."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.workflow.by_hand import launch_by_hand
from tests.workflow.checkout import PROFILE, RUN, Checkout

pytestmark = pytest.mark.training
SCRIPT = Path(__file__).with_name("scripts") / "accelerate_loop.py"
ARGUMENTS = ["--model", "$SHARDMAKE_BASE", "--lr", "$SHARDMAKE_LEARNING_RATE", "--output_dir", "$SHARDMAKE_OUTPUT"]


def test_script_fails_resumes_and_is_merged_evaluated_and_pushed(checkout: Checkout) -> None:
    """The script reads its own data, which is handed over unchanged (`format: raw`)."""
    more = ("--checkpoints", "$SHARDMAKE_CHECKPOINTS", "--losses", "losses.json", "--die_after", "2")
    data = ("--data", "$SHARDMAKE_RAW_DATA/train.jsonl")
    raw = RUN["data"] | {"format": "raw"}
    checkout.configure(
        strategy="zero2", max_steps=4, script=str(SCRIPT), script_args=[*ARGUMENTS, *data, *more], data=raw
    )
    failed = checkout("snakemake", *PROFILE, check=False)
    assert failed.returncode != 0
    assert "RuntimeError: simulated failure" in failed.stdout
    assert 'raise RuntimeError("simulated failure")' in failed.stdout

    checkout("snakemake", *PROFILE)
    history = checkout.read("train/attempts/index.json")
    assert [record["end"] for record in history] == ["error in the training", "finished"]
    assert history[1]["checkpoint_step"] > history[0]["checkpoint_step"] > 0
    assert len(json.loads((checkout.root / "losses.json").read_text())) == 2 * (4 - 2)
    reports = [checkout.read(f"train/attempts/002/ranks/rank-{rank}.json") for rank in (0, 1)]
    assert {(report["engine"], report["zero_stage"]) for report in reports} == {("deepspeed", 2)}
    evaluation = checkout.read("evaluation.json")
    assert evaluation["tuned"]["loss"] < evaluation["base"]["loss"] - 0.3
    raw = json.loads((checkout.run / "data/receipt.json").read_text())["sources"]["train"]["files"]
    assert [file["path"] for file in raw] == ["train.jsonl"]
    card = (checkout.root / "published/demo/README.md").read_text()
    assert "| Examples | 1 file, read by the script |" in card
    assert re.search(r"\| Trained by \| `accelerate_loop\.py` \(SHA-256 `\w{16}\.\.\.`\) with Accelerate \|", card)
    assert "| Engine | DeepSpeed ZeRO-2 |" in card and "| Global batch | 8 sequences" in card
    figures = {path.stem for path in (checkout.run / "figures").glob("*.svg")}
    assert set(re.findall(r"plots/([a-z-]+)\.png", card)) == figures - {"memory"}  # RAM: in the report only
    assert (checkout.run / "report.html").read_text().count("<svg") == len(figures)
    example = card.partition("```python\n")[2].partition("```")[0]
    subprocess.run([sys.executable, "-c", example], cwd=checkout.root / "published", check=True)
    assert "Trained with zero2 on 2 ranks in 2 attempts." in checkout("shardmake", "status", "demo").stdout
    assert "Nothing to be done" in checkout("snakemake", *PROFILE).stdout


LEAKING = """
import logging, os, sys
print("password=" + "Plant77-printed")
print("token:", os.environ["HF_TOKEN"], file=sys.stderr, flush=True)
logging.getLogger("script").warning("id %s", os.environ["DATABASE_URL"])
os.system("echo child: $HF_TOKEN; echo $MY_PASSWORD >&2")
raise RuntimeError(f"no login with {os.environ['MY_PASSWORD']}")
"""
PLANTED = {
    "HF_TOKEN": "hf_Wq3TfEaYk2MdL9xPzRbNcUvHs", "MY_PASSWORD": "correct-horse-4",
    "DATABASE_URL": "postgres://ada:pa/ss-9@db/x",
}  # fmt: skip


def test_secrets_that_scripts_print_or_raise_reach_no_file(checkout: Checkout, monkeypatch: pytest.MonkeyPatch) -> None:
    script = checkout.root / "leaking.py"
    script.write_text(LEAKING)
    for name, value in PLANTED.items():
        monkeypatch.setenv(name, value)
    checkout.configure(strategy="zero2", script=str(script), script_args=[])
    failed = checkout("snakemake", *PROFILE, check=False)
    assert failed.returncode != 0 and "RuntimeError: no login with [removed]" in failed.stdout
    log = (checkout.run / "train/attempts/001/node-0.log").read_text()
    assert "token: [removed]" in log and "child: [removed]" in log
    secrets = [*PLANTED.values(), "pa/ss-9", "Plant77-printed"]
    assert [value for value in secrets if value in failed.stdout] == []
    files = [path for path in checkout.root.rglob("*") if path.is_file() and path != script]
    assert [(path, value) for path in files for value in secrets if value.encode() in path.read_bytes()] == []


def test_unplanned_engine_is_rejected(shared_checkout: Checkout, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("from accelerate import Accelerator\nAccelerator(cpu=True)\nprint('trained something else')\n")
    with pytest.raises(AssertionError, match="engine: planned fsdp, found ddp"):
        launch_by_hand(shared_checkout, "fsdp", fsdp_on_cpu=False, script=str(script))
