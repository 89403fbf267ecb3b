"""Arguments of a user's script, and the files that they name, compared with the plan before anything is queued."""

import json
from pathlib import Path
from typing import Any

import pytest

from shardmake.core.errors import ConfigError
from shardmake.render.script_arguments import check_script_arguments
from tests.unit.plans import make_plan, make_run

PASSED = [
    *("--per_device_train_batch_size", "$SHARDMAKE_MICRO_BATCH_SIZE", "--max_steps=$SHARDMAKE_MAX_STEPS"),
    *("--gradient_accumulation_steps", "$SHARDMAKE_GRADIENT_ACCUMULATION_STEPS", "--output_dir", "$SHARDMAKE_OUTPUT"),
    *("--max_length", "$SHARDMAKE_SEQUENCE_LENGTH", "--data_path", "$HOME/x", "--my_flag"),
]
OWN = {"train_batch_size": 16, "bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}


def check(*args: str, **changes: Any) -> list[str]:
    run = make_run(script="train.py", script_args=list(args), **{"strategy": "zero2"} | changes)
    return check_script_arguments(make_plan(run.strategy).choice, run)


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files that the arguments name, in the working folder."""
    monkeypatch.chdir(tmp_path)
    values: dict[str, Any] = {
        "ds": OWN, "auto": {**OWN, "train_batch_size": "auto"},
        "trl": {"learning_rate": 0.2, "per_device_train_batch_size": 8, "max_length": 64}, "mine": {"hobby": 1},
        "sizes": {"train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 1},
    }  # fmt: skip
    for name, content in values.items():
        Path(f"{name}.json").write_text(json.dumps(content))
    Path("train.py").write_text("print()")


@pytest.mark.parametrize(
    "args",
    [
        PASSED,
        ["--learning_rate", "1e-3", "--weight_decay", "0.5", "--bf16", "True"],  # weight_decay is not set in the run
        ["--per_device_train_batch_size", "4"],  # another split of the same batch
        ["--deepspeed", "auto.json"],
        ["--deepspeed", "--deepspeed_config", "ds.json"],
        ["--deepspeed_config", "$SHARDMAKE_DEEPSPEED_CONFIG"],
        ["--config", "nowhere.yaml", "mine.json"],
    ],
)
def test_arguments_that_agree_with_the_plan(args: list[str]) -> None:
    check(*args)
    check("--lr_scheduler_kwargs", '{"power": 2}', scheduler_arguments={"power": 2})


@pytest.mark.parametrize(
    ("args", "run", "words"),
    [
        (["--per_device_train_batch_size", "8"], {}, "8 x gradient_accumulation_steps 1 x 4 readers is 32, but"),
        (["--learning_rate=0.1"], {}, r"rate is 0\.1, but learning_rate is 0\.001 in the run\. Pass \$SHARDMAKE"),
        (["--num_train_epochs", "2"], {"epochs": 3, "max_steps": None}, "num_train_epochs is 2.0, but epochs is 3"),
        (["--max_seq_length", "64"], {}, "sequence_length is 64, but sequence_length is 32"),
        (["--weight_decay", "0.5"], {"weight_decay": 0.1}, "weight_decay is 0.5, but weight_decay is 0.1"),
        (
            ["--lr_scheduler_kwargs", '{"power": 3}'],
            {"scheduler_arguments": {"power": 2}},
            r"kwargs is \{'power': 3\}, but scheduler_arguments is \{'power': 2\}",
        ),
        (["--fp16", "True"], {}, "fp16 is true, but the plan's precision is bf16"),
        (["--config", "trl.json"], {}, r"(?s)is 32, but global_.*learning_rate is 0\.2.*sequence_length is 64"),
        (["--deepspeed", "ds.json"], {"strategy": "zero3"}, r"ds\.json: zero_optimization\.stage is 2, planned is 3"),
        (["--deepspeed", "ds.json"], {"strategy": "ddp"}, "json is a DeepSpeed file, but the plan's strategy is ddp"),
        (["--deepspeed", "--deepspeed_config", "auto.json"], {}, r'auto\.json: train_batch_size is "auto", which only'),
        (["--deepspeed", "--deepspeed_config", "sizes.json"], {}, "per_gpu 8 x .*steps 1 x 4 readers is 32, but"),
    ],
)
def test_arguments_that_contradict_the_plan(args: list[str], run: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check(*args, **run)


def test_a_script_needs_no_learning_rate_and_no_steps() -> None:
    check("--learning_rate", "0.1", "--max_steps", "7", learning_rate=None, max_steps=None)


@pytest.mark.parametrize(
    ("source", "args", "lines"),
    [
        (
            "accumulation", ["--batch_size=8", "--gradient_accumulation_steps", "2", "--lr", "0.1", "steps=7"],
            [
                "learning_rate is 0.001, but script_args have 0.1. Pass $SHARDMAKE_LEARNING_RATE, or set "
                "learning_rate: 0.1.",
                "max_steps is 10, but script_args have 7. Pass $SHARDMAKE_MAX_STEPS, or set max_steps: 7.",
                "micro_batch_size is 2, but script_args have 8. Pass $SHARDMAKE_MICRO_BATCH_SIZE.",
            ],
        ),
        ("", ["--batch_size", "4", "--lr", "1e-3", "--seq_len", "text"], []),  # another split of the same batch
        ("", ["--lr", "7", "--lr=1e-3", "--deepspeed=ds.json", "--deepspeed"], []),  # argparse takes the last
        ("accumulation", ["--batch_size", "8", "--lr=$SHARDMAKE_LEARNING_RATE", "--steps", "$STEPS"], []),
        (
            "add_argument('--local_rank', type=int, default=0)", [],
            ["--local_rank is not among script_args, and is 0 for every rank. Add --local_rank $LOCAL_RANK."],
        ),
        ("add_argument('--local_rank', default=0)", ["--local_rank", "$LOCAL_RANK"], []),
        ("add_argument('--local_rank', default=0)\nos.environ['LOCAL_RANK']", [], []),
    ],
)  # fmt: skip
def test_a_plan_warns_of_arguments_of_the_scripts_own_names(source: str, args: list[str], lines: list[str]) -> None:
    Path("train.py").write_text(source)
    found = "\n".join(check(*args)).splitlines()
    assert [line.strip() for line in found[1:]] == lines
