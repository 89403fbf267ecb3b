"""A run whose script asks a stand-in server: its settings, and what both left behind."""

import json
from pathlib import Path
from typing import Any

from tests.workflow.checkout import Checkout

SCRIPTS = Path(__file__).with_name("scripts")
COMMAND = f"python {SCRIPTS / 'service.py'} --host $SHARDMAKE_SERVICE_HOST --port $SHARDMAKE_SERVICE_PORT"


def service_settings(
    checkout: Checkout, command: str = COMMAND, seconds: float = 0.0, **service: Any
) -> dict[str, Any]:
    """Return the settings of a run of 6 steps that saves after 2 and 4; every step sleeps for ``seconds``."""
    few = checkout.root / "resources/few.jsonl"
    few.write_text("".join((checkout.root / "resources/demo/train.jsonl").read_text().splitlines(keepends=True)[:64]))
    arguments = {
        "model": "$SHARDMAKE_BASE", "data": str(few), "final": "$SHARDMAKE_OUTPUT",
        "server": "$SHARDMAKE_SERVICE_HOST:$SHARDMAKE_SERVICE_PORT", "answers": str(checkout.root / "answers.jsonl"),
        "seconds": str(seconds), "output_dir": "$SHARDMAKE_CHECKPOINTS",
        "per_device_train_batch_size": "$SHARDMAKE_MICRO_BATCH_SIZE",
        "gradient_accumulation_steps": "$SHARDMAKE_GRADIENT_ACCUMULATION_STEPS", "max_steps": "$SHARDMAKE_MAX_STEPS",
        "save_steps": "2", "logging_steps": "1", "report_to": "none", "use_cpu": "true",
    }  # fmt: skip
    return {
        "strategy": "ddp", "nodes": 1, "data": {"train": "resources/few.jsonl", "eval": "resources/demo/eval.jsonl"},
        "script": str(SCRIPTS / "hf_trainer.py"),
        "script_args": [f"--{name}={value}" for name, value in arguments.items()], "service_nodes": 1,
        "service": {"command": command, "health": "/health", **service},
    }  # fmt: skip


def answers(checkout: Checkout) -> list[dict[str, Any]]:
    """Return the server's answers to rank 0, in their order: step, text, and the server's process."""
    file = checkout.root / "answers.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def ends(checkout: Checkout) -> list[str]:
    return [record["end"] for record in checkout.read("train/attempts/index.json")]


def assert_asked_in_every_step(checkout: Checkout) -> None:
    """Check that each of the 6 steps was asked about, by two servers at most, and that the last one answered."""
    found = answers(checkout)
    assert {line["step"] for line in found} == set(range(1, 7)) and found[-1]["step"] == 6
    assert all(line["text"] == f"step {line['step']}"[::-1] for line in found)
