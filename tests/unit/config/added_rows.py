"""Run with one more optimizer and one more method: ``python -m tests.unit.config.added_rows FOLDER``.

This is a process of its own, because the types of the configuration are made from the tables when they are imported.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardmake.config.methods import METHODS
from shardmake.config.optimizers import OPTIMIZERS, OptimizerSpec

OPTIMIZER, METHOD = "rmsprop", "rslora"
OPTIMIZERS[OPTIMIZER] = OptimizerSpec(
    "rmsprop", "RMSprop", "RMSprop of PyTorch", moments=1, package="bitsandbytes", fails_sharded="{strategy}: {others}."
)
METHODS[METHOD] = replace(METHODS["lora"], label="rsLoRA", trains="scaled adapters", peft_options={"use_rslora": True})


def estimated(model: Path, *options: str) -> dict[str, Any]:
    """The first candidate of `shardmake estimate`, and the number of trained weights."""
    from typer.testing import CliRunner

    from shardmake.cli import app

    arguments = ["estimate", str(model), "--strategy", "ddp", "--gradient-checkpointing", "--json", *options]
    found = json.loads(CliRunner().invoke(app, arguments, catch_exceptions=False).stdout)
    return {"trainable": found["trainable"], **found["candidates"][0]["gpu"]["terms"]}


def optimizer(folder: Path, model: Path) -> dict[str, Any]:
    from shardmake.config.models import Run
    from shardmake.doctor.kernels import BITSANDBYTES
    from shardmake.plan.refusals import unsuitable
    from tests.unit.train.test_learning_check import test_what_transformers_builds_passes

    run, arguments = card(folder / "optimizer", optimizer=OPTIMIZER)
    test_what_transformers_builds_passes(folder, OPTIMIZER, "cosine", has_vectors=True)
    return {
        **run, "estimate": estimated(model, "--optimizer", OPTIMIZER), "optim": arguments["arguments"]["optim"],
        "refusal": unsuitable(Run.model_validate(make(optimizer=OPTIMIZER)), "fsdp"), "doctor": list(BITSANDBYTES),
    }  # fmt: skip


def method(folder: Path, model: Path) -> dict[str, Any]:
    from transformers import TrainingArguments

    from shardmake.config.models import Run
    from shardmake.render.training_file import training_settings
    from shardmake.train.load_model import load_model
    from tests.unit.plans import make_cluster, make_model, make_plan

    found, arguments = card(folder / "method", method=METHOD, model=str(model.parent))
    run = Run.model_validate(make(method=METHOD, model=str(model.parent)))
    settings = training_settings(make_plan("ddp"), run, make_cluster(), make_model())
    adapted: Any = load_model(settings, TrainingArguments(str(folder)))
    return {
        **found, "estimate": {kind: estimated(model, "--method", kind) for kind in (METHOD, "lora")},
        "kind": arguments["method"]["kind"], "scaled": adapted.peft_config["default"].use_rslora,
    }  # fmt: skip


def make(**changes: Any) -> dict[str, Any]:
    from tests.unit.plans import make_run

    return {**make_run().model_dump(), "eval_every_steps": "never", **changes}


def card(folder: Path, **changes: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The card of a run that trained with the row, the reference of the configuration, and training.json."""
    from shardmake.config.models import Run
    from shardmake.render.training_file import training_settings
    from shardmake.report.card import render_card
    from tests.finished_run import make_rundir
    from tests.unit.plans import make_cluster, make_model, make_plan
    from tools.config_reference import config_schema_text, readme_text

    run, rundir = Run.model_validate(make(**changes)), make_rundir(folder)
    training_settings(make_plan("ddp"), run, make_cluster(), make_model()).write(rundir.training)
    text = {"card": render_card(run, rundir), "readme": readme_text(), "schema": config_schema_text()}
    return text, json.loads(rundir.training.read_text())


if __name__ == "__main__":
    from transformers import AutoConfig, AutoModelForCausalLM

    from tests.unit.plans import LLAMA

    root = Path(sys.argv[1])
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**LLAMA)).save_pretrained(root / "base")
    config = root / "base" / "config.json"
    (root / "found.json").write_text(json.dumps({"optimizer": optimizer(root, config), "method": method(root, config)}))
