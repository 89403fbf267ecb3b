"""Command lines, shell scripts and Accelerate files: the launcher's options, its ranks and the program's arguments."""

import shlex
from pathlib import Path
from typing import Any

import pytest

from shardmake.core.errors import ConfigError
from shardmake.render.command_lines import Arguments, Command, read_arguments, read_command, read_script
from shardmake.render.comparison import EngineSettings
from shardmake.render.launcher_settings import refuse_counts

TRAIN = "train.py --deepspeed ds.json --learning_rate 1e-4 --bf16"


def command(line: str) -> Command:
    found = read_command(shlex.split(line), "a line")
    assert found is not None
    return found


@pytest.mark.parametrize(("line", "launcher", "ranks"), [
    (f"accelerate launch --config_file a.yaml --num_processes 4 {TRAIN}", "accelerate", 4),
    (f"srun -N 2 accelerate launch --num-processes=4 {TRAIN}", "accelerate", 4),
    (f"python -m accelerate.commands.launch --num_processes 4 {TRAIN}", "accelerate", 4),
    (f"torchrun --nproc_per_node=2 --nnodes 3 {TRAIN}", "torchrun", 6),
    (f"torchrun --nproc-per-node gpu {TRAIN}", "torchrun", None),
    (f"python3.11 -m torch.distributed.run --nproc_per_node 2 {TRAIN}", "torchrun", 2),
    (f"deepspeed --num_gpus=2 {TRAIN}", "deepspeed", 2), (f"deepspeed {TRAIN}", "deepspeed", None),
    (f"CUDA_VISIBLE_DEVICES=0 python -u {TRAIN}", "python", 1),
])  # fmt: skip
def test_launchers(line: str, launcher: str, ranks: int | None) -> None:
    found = command(line)
    assert (found.launcher, found.ranks, found.program) == (launcher, ranks, "train.py")
    assert read_arguments(found) == Arguments({"learning_rate": 1e-4, "bf16": True}, "ds.json")


def test_the_config_file_is_not_one_of_the_flags() -> None:
    found = command("accelerate launch --config_file a.yaml --mixed_precision bf16 train.py")
    assert (found.config_file, found.flags) == ("a.yaml", ["--mixed_precision", "bf16"])


@pytest.mark.parametrize(("arguments", "expected"), [
    ("args.json", Arguments({}, files=["args.json"])),
    ("--config sft.yaml --max_steps 5", Arguments({"max_steps": 5}, files=["sft.yaml"])),
    ("--deepspeed --deepspeed_config ds.json --learning_rate 1", Arguments(None, "ds.json", is_native=True)),
    ("--epochs 3", Arguments(None)), ("--bf16 False --model_name_or_path x", Arguments({"bf16": False})),
])  # fmt: skip
def test_arguments_of_the_program(arguments: str, expected: Arguments) -> None:
    assert read_arguments(command(f"torchrun train.py {arguments}")) == expected


def test_a_nearly_right_option_is_kept_for_the_comparison() -> None:
    found = read_arguments(command("torchrun train.py --lerning_rate 1e-4 --max-grad-nrm=0.5 --data x --resum"))
    assert found.trainer == {"lerning_rate": "1e-4", "max_grad_nrm": "0.5"}


SCRIPT = """#!/bin/bash
#SBATCH --nodes 2
LR=1e-4  # once
for SEED in 1 2; do :; done
ARGS="--bf16 --max_steps 5"
WORDS='$LR'
cat > notes <<END
torchrun ignored.py
END
if true; then
  srun torchrun --nproc_per_node 2 train.py --learning_rate ${LR} $ARGS \\
    --seed $SEED --run_name "$WORDS" --weight_decay $(cat decay) "$@" > log 2>&1 && echo done
fi
deepspeed --num_gpus=2 train.py --deepspeed ds.json | tee log
"""


def test_a_script() -> None:
    first, second = read_script("train.sh", SCRIPT)
    assert (first.title, second.title) == ("train.sh, line 11", "train.sh, line 14")
    values: dict[str, Any] = {"learning_rate": 1e-4, "bf16": True, "max_steps": 5}
    arguments = read_arguments(first)
    assert arguments.trainer == values | {"run_name": "$LR"}
    assert arguments.unknown == {"weight_decay": "$(cat decay)", "seed": "$SEED"} and arguments.is_open
    assert read_arguments(second) == Arguments({}, "ds.json")


@pytest.mark.parametrize(("script", "message"), [
    ("#!/bin/sh\n$LAUNCHER train.py\n", "no line of it starts accelerate"),
    ('true\ntorchrun "train.py\n', 'line 2: " is not closed'),
])  # fmt: skip
def test_a_script_without_a_launcher_and_an_open_quote_are_refused(script: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_script("train.sh", script)


@pytest.mark.parametrize("line", [
    f'srun bash -c "torchrun --nproc_per_node 2 {TRAIN}"',
    f"srun --nodes 2 bash -lc 'cd /work && exec torchrun --nproc_per_node $RANKS {TRAIN}'",
    f'sh -c "bash -c \\"torchrun --nproc_per_node 2 {TRAIN}\\""',
    f'ssh node2 "echo torchrun"; bash -c "pip install torchrun && torchrun --nproc_per_node 2 {TRAIN}"',
])  # fmt: skip
def test_commands_in_the_text_of_a_shell(line: str) -> None:
    (found,) = read_script("train.sh", f"RANKS=2\n{line}\n")
    assert (found.launcher, found.ranks, found.program) == ("torchrun", 2, "train.py")
    assert read_arguments(found) == Arguments({"learning_rate": 1e-4, "bf16": True}, "ds.json")


@pytest.mark.parametrize(
    "line",
    ["pip install -U deepspeed==0.19", "python -m pip install deepspeed", "echo torchrun train.py", "which torchrun"],
)
def test_a_launcher_that_is_only_named_starts_nothing(line: str) -> None:
    (found,) = read_script("train.sh", f"{line}\ntorchrun {TRAIN}\n")
    assert found.title == "train.sh, line 2"


SHELL = {
    "an array": (
        'A=(\n  --max_steps 5  # five\n)\nA+=(--bf16)\ntorchrun x.py "${A[@]}"', {"max_steps": 5, "bf16": True},
    ),
    "an extended variable": ('A="--bf16"\nA="$A --max_steps 5"\nA+=" --seed 3"\ntorchrun x.py $A', {"seed": 3}),
    "a text of several lines": ('A="\n --max_steps 5\n --bf16"\ntorchrun x.py $A', {"max_steps": 5, "bf16": True}),
    "a launcher in a variable": ('L="torchrun --nproc_per_node 2"\nC="$L x.py --bf16"\nsrun $C', {"bf16": True}),
    "a single quote": ('N="it\'s --bf16"\ntorchrun x.py --max_steps 5 $N', {"max_steps": 5, "bf16": True}),
    "equal branches": ("case $1 in a) S=3 ;; *) S=3 ;; esac\ntorchrun x.py --seed $S", {"seed": 3}),
    "a branch": ("if $T; then S=3; else S=4; fi\ntorchrun x.py --seed $S", {"seed": "$S"}),
    "a part of a branch": (
        'A=--bf16\nif $T; then A="$A --seed 3"; fi\ntorchrun x.py $A', {"bf16": True, "": "${A[@]}"},
    ),
    "a guard": ("S=3\n[ $T ] && S=4\ntorchrun x.py --seed $S", {"seed": "$S"}),
    "a longer number behind a guard": ("S=1\n[ $T ] && S=10\ntorchrun x.py --seed $S", {"seed": "$S"}),
    "a function that reads options": ("f() { S=$2; }\nS=3\nf 1 2\ntorchrun x.py --seed $S", {"seed": "$S"}),
    "a last branch without its end": (
        "S=3\ncase $1 in a) S=4 ;; *) echo other\nesac\ntorchrun x.py --seed $S", {"seed": "$S"},
    ),
    "a value printed into a variable": ("S=3\nprintf -v S %d 4\ntorchrun x.py --seed $S", {"seed": "$S"}),
    "an element": ("S=(3 4)\nS[0]=5\ntorchrun x.py --seed ${S[0]}", {"seed": "${S[0]}"}),
    "a value read with a separator": ("S=3\nIFS=, read -r S T\ntorchrun x.py --seed $S", {"seed": "$S"}),
    "more behind a guard": ('A=(--seed 3)\n[ $T ] && A+=(--bf16)\ntorchrun x.py "${A[@]}"', {"seed": 3, "": "${A[@]}"}),
    "an assignment after a command": ("cd x && S=3\ntorchrun x.py --seed $S", {"seed": 3}),
    "a loop": ('for S in 1 2; do A="--seed $S --bf16"; torchrun x.py $A; done', {"seed": "$S", "bf16": True}),
    "the turn of a loop": ("S=1\nwhile t; do torchrun x.py --seed $S; S=$(n); done", {"seed": "$S"}),
    "a counter": ("for ((i=0; i<3; i++)); do torchrun x.py --seed $i; done", {"seed": "$i"}),
    "a function": ('f() { torchrun x.py --seed $S "$@"; }\nS=3\nf 1', {"seed": 3, "": "$@"}),
    "a read value": ("read S\ntorchrun x.py --seed $S", {"seed": "$S"}),
    "a flag": ("torchrun x.py --bf16 $BF16", {"bf16": "$BF16"}),
    "options behind a flag": ("torchrun x.py --bf16 $EXTRA_ARGS", {"bf16": True, "": "$EXTRA_ARGS"}),
    "a wrapped job": ('sbatch --wrap="torchrun x.py --bf16"', {"bf16": True}),
    "a sourced file": ('S=1\n. "$(dirname "$0")/env.sh"\ntorchrun x.py --seed $S $B', {"seed": 3, "bf16": True}),
    "a file sourced in a branch": ("S=1\n[ $T ] && source env.sh\ntorchrun x.py --seed $S", {"seed": "$S"}),
    "a sourced file that is not here": ("S=3\n. $D/env.sh\ntorchrun x.py --seed $S", {"seed": "$S"}),
    "a file that sources itself": ("S=1\nsource self.sh\ntorchrun x.py --seed $S", {"seed": "$S"}),
    "the folder of the script": ("torchrun x.py --output_dir $PWD/o", {"output_dir": "./o"}),
    "quotes": ("torchrun x.py --run_name 'a $S' --output_dir \"o p\"", {"run_name": "a $S", "output_dir": "o p"}),
}  # fmt: skip


@pytest.mark.parametrize("name", SHELL)
def test_a_value_is_known_or_said_to_be_unknown(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unknown value is shown as it is written, and the key "" holds a variable with any options."""
    monkeypatch.chdir(tmp_path)
    Path("env.sh").write_text("export S=3\nB=--bf16\n")
    Path("self.sh").write_text("S=3\nsource self.sh\n")
    text, expected = SHELL[name]
    *unread, found = read_script("train.sh", text)
    assert all("is not compared: the file cannot be read here" in one.notes[0] for one in unread)
    arguments = read_arguments(found)
    opened = {"": arguments.notes[0].split(" ")[0]} if arguments.is_open else {}
    values = (arguments.trainer or {}) | arguments.unknown | opened
    assert {key: values.get(key) for key in expected} == expected and arguments.is_open == ("" in expected)


def test_a_program_that_only_a_shell_knows_is_named() -> None:
    unread, found = read_script("train.sh", f"$LAUNCHER train.py\ntorchrun {TRAIN}\n")
    assert unread.notes == ["$LAUNCHER train.py is not compared: only a shell knows what it starts."]
    assert (unread.launcher, found.launcher) == ("", "torchrun")


def test_a_number_of_ranks_that_only_a_shell_knows_is_not_one_rank() -> None:
    for options in ("--nproc_per_node $GPUS", "--nproc-per-node=$GPUS", "--nnodes $N --nproc-per-node 8"):
        (found,) = read_script("train.sh", f"torchrun {options} {TRAIN}\n")
        assert found.ranks is None, options


@pytest.mark.parametrize(("line", "reason"), [
    ("torchrun train.py --learning_rate fast", "invalid float value: 'fast'"),
    ("deepspeed --num_gpus=two train.py", "--num_gpus.*invalid int value: 'two'"),
    ("torchrun --nproc_per_node=-1 train.py", "--nproc_per_node -1. Every node needs"),
    ("torchrun --nproc_per_node 0 train.py", "--nproc_per_node 0. Every node needs"),
    ("torchrun --nproc-per-node eight train.py", "--nproc_per_node eight. torchrun needs a number or one of auto"),
    ("torchrun --nnodes two train.py", "--nnodes two. torchrun needs a number from 1 on"),
    ("torchrun --nnodes 1:0 train.py", "--nnodes 1:0. torchrun needs a number from 1 on"),
])  # fmt: skip
def test_what_a_launcher_or_transformers_cannot_read_is_named(line: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        read_arguments(command(line))


FILE = {"num_processes": 4, "num_machines": 1, "machine_rank": 0}


@pytest.mark.parametrize(("changes", "key", "effect"), [
    ({"num_processes": 0}, "num_processes", "`accelerate launch` needs a whole number from 1 on."),
    ({"num_processes": "-2"}, "num_processes", "`accelerate launch` needs a whole number from 1 on."),
    ({"num_processes": 2.5}, "num_processes", "`accelerate launch` needs a whole number from 1 on."),
    ({"num_processes": True}, "num_processes", "`accelerate launch` needs a whole number from 1 on."),
    ({"num_machines": 0}, "num_machines", "`accelerate launch` needs a whole number from 1 on."),
    ({"num_machines": 3}, "num_processes", "Each of the 3 machines starts 1, silently. Write a multiple of 3."),
    ({"machine_rank": 1}, "machine_rank", "The machines are numbered from 0 to 0."),
    ({"main_process_port": 70000}, "main_process_port", "The largest port is 65535."),
])  # fmt: skip
def test_a_count_that_cannot_be_used_is_one_error(changes: dict[str, Any], key: str, effect: str) -> None:
    found = EngineSettings()
    values = FILE | changes
    refuse_counts(values, found)
    assert [(one.key, one.value, one.effect) for one in found.problems] == [(key, (FILE | changes)[key], effect)]
    assert key not in values


@pytest.mark.parametrize("changes", [{}, {"num_machines": "2"}, {"main_process_port": 0}, {"machine_rank": "0"}])
def test_other_counts_pass(changes: dict[str, Any]) -> None:
    found = EngineSettings()
    refuse_counts(FILE | changes, found)
    assert found.problems == []
