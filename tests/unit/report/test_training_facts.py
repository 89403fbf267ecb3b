import re

import pytest

from shardmake.config.models import Run
from shardmake.config.optimizers import OPTIMIZERS
from shardmake.report.card import card_plots, render_card
from shardmake.report.stage import write_report
from shardmake.run.engine import Engine, LearningSettings
from shardmake.run.paths import RunDir
from shardmake.run.training_settings import AdapterMethod, ScriptProgram
from tests.finished_run import (
    CHOICE,
    SETTINGS,
    TRAINED,
    make_attempt,
    make_plan,
    make_run,
    write_history,
)


def test_values_of_own_files_are_stated_without_paths(rundir: RunDir) -> None:
    values = {"zero_optimization.reduce_bucket_size": 1000, "aio.path": "/scratch/ada"}
    SETTINGS.model_copy(update={"own_files": values}).write(rundir.training)
    row = "| Own settings files | zero_optimization.reduce_bucket_size 1000 |"
    assert row in render_card(make_run(), rundir)


def test_adapters_are_stated_with_their_settings(rundir: RunDir) -> None:
    method = AdapterMethod(kind="lora", rank=8, alpha=16, dropout=0.1, targets=["q_proj", "v_proj"])
    SETTINGS.model_copy(update={"method": method}).write(rundir.training)
    row = "| Method | LoRA: rank 8, alpha 16, dropout 0.1, on q_proj, v_proj; merged into the base model |"
    assert row in render_card(make_run(method="lora"), rundir)


@pytest.mark.parametrize(
    ("arguments", "rows"),
    [
        ({"lr_scheduler_type": "constant"}, ["| Warm-up | none |", "constant schedule |"]),
        ({"warmup_steps": 0.05}, ["| Warm-up | 0.05 of all steps |"]),
        ({"num_train_epochs": 2.0}, ["| Length | 60 optimizer steps (2 epochs), 245,760 tokens |"]),
        ({"optim": "adafactor", "weight_decay": 0.0}, ["| Optimizer | Adafactor |", "| Weight decay | 0 |"]),
        *(({"optim": spec.optim}, [f"| Optimizer | {spec.label}"]) for spec in OPTIMIZERS.values()),
        (
            {"optim": "adamw_torch_fused"},
            ["| Optimizer | AdamW of PyTorch, fused, betas 0.9 and 0.999, epsilon 1e-08 |"],
        ),
    ],
)
def test_settings_are_those_that_were_rendered(rundir: RunDir, arguments: dict[str, object], rows: list[str]) -> None:
    SETTINGS.with_arguments(**arguments).write(rundir.training)
    assert [row for row in rows if row not in render_card(make_run(), rundir)] == []


LEARNED = LearningSettings(
    optimizer="AdamW",
    learning_rate=0.004,
    betas=[0.9, 0.999],
    epsilon=1e-8,
    weight_decay=0.2,
    decays_vectors=True,
    schedule="linear",
    warmup_steps=7,
    steps=60,
    rates=[],
    max_grad_norm=0.25,
    dtype="bfloat16",
    autocast="bfloat16",
    micro_batch_size=4,
    gradient_accumulation_steps=2,
    global_batch_size=16,
)


def test_what_the_ranks_found_is_stated_rather_than_what_was_rendered(rundir: RunDir) -> None:
    TRAINED.model_copy(update={"learning": LEARNED}).write(rundir.train_receipt)
    card = render_card(make_run(), rundir)
    assert "| Learning rate | 0.004 at its peak, linear schedule |" in card
    assert "| Warm-up | 7 steps |" in card
    assert "| Weight decay | 0.2 |" in card
    assert "| Gradient clipping | norm 0.25 |" in card
    assert "| Precision | bf16 under autocast in training, bf16 in these files |" in card


def test_an_early_end_and_the_best_checkpoint_are_stated(rundir: RunDir) -> None:
    TRAINED.model_copy(update={"learning": LEARNED.model_copy(update={"steps": 90})}).write(rundir.train_receipt)
    best = {"checkpoints": {"keep_best": True, "early_stopping": 2}, "final_checkpoint": "best"}
    card = render_card(make_run(**best), rundir)
    assert "| Length | 60 optimizer steps of 90, until the evaluation loss no longer fell, 245,760 tokens |" in card
    assert "| Checkpoint | that of step 60, with the lowest evaluation loss |" in card
    write_report(make_run(**best), rundir, "local")
    assert "It ended after 60 steps, because the evaluation loss no longer fell." in rundir.report.read_text()


def test_a_fallback_is_stated_as_what_trained(rundir: RunDir) -> None:
    smaller = CHOICE.model_copy(update={"micro_batch_size": 2, "gradient_accumulation_steps": 4})
    make_plan().model_copy(update={"choice": smaller}).write(rundir.attempts / "002/plan.json")
    card = render_card(make_run(), rundir)
    assert "| Strategy | zero2, micro batch 2: a fallback of the plan, which began with zero2 |" in card
    assert "= 2 per forward pass x 4 accumulation steps x 2 ranks" in card


def test_the_commit_of_the_workflow_is_stated(rundir: RunDir) -> None:
    attempt = make_attempt(2, rundir, "cpu").model_copy(update={"commit": "c0ffee123456"})
    attempt.write(rundir.attempts / "002/attempt.json")
    assert "transformers 5.23.0 at `c0ffee123456` |" in render_card(make_run(), rundir)


def test_the_gpus_are_named(rundir: RunDir) -> None:
    write_history(rundir, [(0, 900, range(1, 31), "x"), (0, 900, range(31, 61), "finished")], accelerator="a100-80gb")
    lines = [line for line in rundir.metrics.read_text().splitlines() if "tokens_per_second" not in line]
    rundir.metrics.write_text("\n".join(lines))
    assert "| Hardware | 2 x A100-80GB on 1 node |" in render_card(make_run(), rundir)
    assert "plots/memory.png" in render_card(make_run(), rundir)


SCRIPT = ScriptProgram(path="/home/ada/train.py", args=["--token", "x"], sha256="e" * 64)
FOUND = Engine(
    api="accelerate", engine="deepspeed", zero_stage=3, world_size=2, dtype="float32", offload_optimizer="cpu",
    micro_batch_size=1, gradient_accumulation_steps=4, global_batch_size=8,
)  # fmt: skip


def make_script_run(rundir: RunDir, found: Engine | None, metrics: str = "") -> Run:
    """A run that a script trained; ``metrics`` are the lines that it wrote."""
    SETTINGS.model_copy(update={"program": SCRIPT}).write(rundir.training)
    TRAINED.model_copy(update={"steps": None, "tokens": None, "loss": None, "trained": found}).write(
        rundir.train_receipt
    )
    rundir.metrics.write_text(metrics)
    return make_run(script="train.py")


def test_a_script_is_stated_as_its_ranks_found_it(rundir: RunDir) -> None:
    card = render_card(make_script_run(rundir, FOUND.model_copy(update={"rows_compared": True})), rundir)
    for row in (
        "| Rows | different on every rank, compared at the first step |",
        f"| Trained by | `train.py` (SHA-256 `{'e' * 16}...`) with Accelerate |",
        "| Data | train.jsonl; the script may have read other data |",
        "| Engine | DeepSpeed ZeRO-3, optimizer states on cpu |",
        "| World size | 2 ranks |",
        "| Precision | fp32 in training, bf16 in these files |",
        "| Global batch | 8 sequences = 1 per forward pass x 4 accumulation steps x 2 ranks |",
        "| Learning rate | set by the script |",
        "| Length | set by the script |",
    ):
        assert row in card
    assert "which were held out. The script may have trained on them." in card
    planned = ("0.0005", "zero2", "cosine", "256 tokens", "AdamW", "fine-tuning", "ada", "--token")
    assert [word for word in planned if word in card.partition("## Evaluation")[0].replace("fine-tuned", "")] == []


def test_a_script_without_an_engine_states_nothing_of_the_plan_as_fact(rundir: RunDir) -> None:
    card = render_card(make_script_run(rundir, None), rundir)
    for row in (
        "| Engine | set by the script; the plan was zero2 |",
        "| World size | 2 ranks were started |",
        "| Precision | set by the script in training, bf16 in these files |",
        "| Global batch | set by the script |",
    ):
        assert row in card


def test_a_script_that_logged_its_learning_rate_has_it_in_the_card(rundir: RunDir) -> None:
    run = make_script_run(rundir, FOUND, '{"step": 1, "learning_rate": 0.25}\n{"step": 2, "learning_rate": 0.125}\n')
    card = render_card(run, rundir)
    assert "| Learning rate | 0.25, the highest that the script logged |" in card
    assert re.findall(r"plots/([a-z-]+)\.png", card) == ["optimizer", "by-length"]


def test_a_script_without_metrics_pushes_no_empty_plots(rundir: RunDir) -> None:
    run = make_script_run(rundir, FOUND)
    assert re.findall(r"plots/([a-z-]+)\.png", render_card(run, rundir)) == ["by-length"]
    assert card_plots(run, rundir).keys() == {"plots/by-length.png"}
