"""Arguments of a user's script, and the files that they name, compared with the plan before anything is queued."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainingArguments

from shardmake.core.errors import ConfigError
from shardmake.render.script_arguments import check_script_arguments
from tests.unit.plans import make_plan, make_run

PASSED = [
    *("--per_device_train_batch_size", "$SHARDMAKE_MICRO_BATCH_SIZE", "--max_steps=$SHARDMAKE_MAX_STEPS"),
    *("--gradient_accumulation_steps", "$SHARDMAKE_GRADIENT_ACCUMULATION_STEPS", "--output_dir", "$SHARDMAKE_OUTPUT"),
    *("--max_length", "$SHARDMAKE_SEQUENCE_LENGTH", "--data_path", "$HOME/x", "--my_flag"),
]
OWN = {"train_batch_size": 16, "bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}


PARSED = """
from transformers import {0}, HfArgumentParser
script, arguments = HfArgumentParser((Mine, {0})).parse_args_into_dataclasses()
"""
FINE_TUNED = PARSED.format("TrainingArguments")
LOOP = """
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--batch_size", type=int, default=2)
parser.add_argument("--gradient_accumulation_steps", type=int, default=4)
"""
CHANGED = (
    *("vars(args).update(mine)", "setattr(args, 'lr', 1)", "dataclasses.replace(args, learning_rate=1)"),
    *("args.set_training(learning_rate=1)", "parser.parse_args(['--lr', '1'])", "os.environ['SHARDMAKE_' + name]"),
    'os.environ[f"SHARDMAKE_{name}"]',
)
"""Lines of a script that may change arguments."""
BATCH = ["--per_device_train_batch_size", "4"]


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


@pytest.mark.parametrize(("args", "run", "words"), [
    (["--per_device_train_batch_size", "8"], {}, "8 x gradient_accumulation_steps 1 x 4 readers is 32, but"),
    (["--learning_rate=0.1"], {}, r"rate is 0\.1, but learning_rate is 0\.001 in the run\. Pass \$SHARDMAKE"),
    (["--num_train_epochs", "2"], {"epochs": 3, "max_steps": None}, "num_train_epochs is 2.0, but epochs is 3"),
    (["--max_seq_length", "64"], {}, "sequence_length is 64, but sequence_length is 32"),
    (["--weight_decay", "0.5"], {"weight_decay": 0.1}, "weight_decay is 0.5, but weight_decay is 0.1"),
    (
        ["--lr_scheduler_kwargs", '{"power": 3}'], {"scheduler_arguments": {"power": 2}},
        r"kwargs is \{'power': 3\}, but scheduler_arguments is \{'power': 2\}",
    ),
    (["--fp16", "True"], {}, "fp16 is true, but the plan's precision is bf16"),
    (["--config", "trl.json"], {}, r"(?s)is 32, but global_.*learning_rate is 0\.2.*sequence_length is 64"),
    (["--deepspeed", "ds.json"], {"strategy": "zero3"}, r"ds\.json: zero_optimization\.stage is 2, planned is 3"),
    (["--deepspeed", "ds.json"], {"strategy": "ddp"}, "json is a DeepSpeed file, but the plan's strategy is ddp"),
    (["--deepspeed", "--deepspeed_config", "auto.json"], {}, r'auto\.json: train_batch_size is "auto", which only'),
    (["--deepspeed", "--deepspeed_config", "sizes.json"], {}, "per_gpu 8 x .*steps 1 x 4 readers is 32, but"),
])  # fmt: skip
def test_arguments_that_contradict_the_plan(args: list[str], run: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check(*args, **run)


def test_a_script_needs_no_learning_rate_and_no_steps() -> None:
    check("--learning_rate", "0.1", "--max_steps", "7", learning_rate=None, max_steps=None)


def warned(source: str, *args: str, **changes: Any) -> str:
    Path("train.py").write_text(source)
    return "\n".join(check(*args, **changes))


@pytest.mark.parametrize(
    ("source", "args", "words"),
    [
        (FINE_TUNED, BATCH, ["learning_rate is 0.001, but --learning_rate is not among script_args, and its default is "
          f"{TrainingArguments.learning_rate}. Add --learning_rate $SHARDMAKE_LEARNING_RATE.", "max_steps is 10, but --max_steps"]),
        (FINE_TUNED, ["--max_steps", "10", "--learning-rate=1e-3"], ["micro_batch_size is 2, but --per_device_train_batch_size",
          "gradient_accumulation_steps is 2, but --gradient_accumulation_steps is not among script_args, and its default is 1."]),
        (PARSED.format("SFTConfig").replace("transformers", "trl"), [*BATCH, "--max_steps=10", "--learning_rate=1e-3"], ["sequence_length is 32, but --max_length"]),
        ("import transformers\nclass Own(transformers.TrainingArguments):\n    model_max_length: int = field(default=512)\nHfArgumentParser(Own)",
          [*BATCH, "--max_steps=10", "--learning_rate=1e-3"], ["sequence_length is 32, but --model_max_length is not among script_args, and its default is 512"]),
        ("import trl\ntrl.SFTConfig(learning_rate=2e-5, max_steps=10, max_length=n, per_device_train_batch_size=4)", [], ["learning_rate is 0.001, but the script itself has learning_rate 2e-05. Use $SHARDMAKE_LEARNING_RATE there, or set learning_rate: 2e-05."]),
        ("parser.add_argument('--local_rank', type=int, default=0)", [], ["--local_rank is not among script_args"]),
        (LOOP, [], ["learning_rate is 0.001, but --lr is", "gradient_accumulation_steps is 2, but --grad"]),
        (LOOP, ["--batch_size=8", "--grad", "2", "--lr", "0.1", "--steps", "7"], ["learning_rate is 0.001, but script_args have 0.1. Pass $SHARDMAKE_LEARNING_RATE, or set learning_rate: 0.1.",
          "max_steps is 10, but script_args have 7.", "micro_batch_size is 2, but script_args have 8. Pass $SHARDMAKE_MICRO_BATCH_SIZE."]),
        ('add_argument("--batch_size", default=8)', [], ["micro_batch_size is 2, but --batch_size is not among script_args, and its default is 8"]),
    ],
)  # fmt: skip
def test_keys_that_do_not_reach_the_script(source: str, args: list[str], words: list[str]) -> None:
    lines = warned(source, *args).splitlines()[1:]
    assert len(lines) == len(words)
    for line, start in zip(lines, words, strict=True):
        assert line.strip().startswith(start)


@pytest.mark.parametrize(("source", "args"), [
    ("from mine import parse\nparse()", []), ("not python (", []), (FINE_TUNED, ["$MY_ARGUMENTS"]),
    (FINE_TUNED, ["--config", "nowhere.yaml"]),
    (FINE_TUNED + "arguments.learning_rate = arguments.max_steps = 7\n", BATCH),
    (FINE_TUNED + "os.environ['SHARDMAKE_LEARNING_RATE'], os.environ['SHARDMAKE_MAX_STEPS']", BATCH),
    (FINE_TUNED, [*BATCH, "--learning_rate", "$RATE", "--max_steps", "$STEPS"]),
    (FINE_TUNED + "parser.set_defaults(**mine)", []), ("from trl import SFTConfig\nSFTConfig(**given)", []),
    (LOOP, ["--lr=$SHARDMAKE_LEARNING_RATE", "--batch_size", "1"]),
    ("add_argument('--local_rank', default=0)", ["--local_rank", "$LOCAL_RANK"]),
    (LOOP, ["--lr=$SHARDMAKE_LEARNING_RATE", "--gradient_acc", "$SHARDMAKE_GRADIENT_ACCUMULATION_STEPS"]),
    *((f"{FINE_TUNED}{line}", BATCH) for line in CHANGED), *((f"{LOOP}{line}", []) for line in CHANGED),
    (FINE_TUNED.replace("args_into_dataclasses(", "json_file('a'"), BATCH),
    (FINE_TUNED, [*BATCH, "--my_settings=mine.toml"]), ("add_argument('-l', '--lr', default=0.1)", []),
    ("add_argument('--lr', type=read, default='1e-1')", []),
    ("one.add_argument('--lr', default=0.1)\ntwo.add_argument('--lr', default=0.2)", []),
    ("add_argument('--local_rank', default=0)\nos.environ['LOCAL_RANK']", []),
    ("from trl import SFTConfig\nTrainer(SFTConfig(max_steps=10, max_length=32), optimizers=(a, b))", BATCH),
    pytest.param("a" + ".b" * 5_000, [], id="too deep to parse"),
])  # fmt: skip
def test_nothing_is_claimed_of_what_cannot_be_read(source: str, args: list[str]) -> None:
    assert warned(source, *args) == ""


def test_the_scripts_accumulation_is_not_taken_for_one() -> None:
    source = 'parser.add_argument("--per_device_train_batch_size")\nparser.add_argument("--gradient_accumulation_steps", default={})'
    assert warned(source.format(2), "--per_device_train_batch_size", "2", learning_rate=None, max_steps=None) == ""
    assert "is 8" not in warned(source.format("steps()"), "--per_device_train_batch_size", "1")
