"""Real ranks compare a user's program with the plan, whichever library it uses."""

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from shardmake.config.models import Strategy
from shardmake.run.attempt import USER_SCRIPT_PHASE, AttemptDir, Heartbeat, RequestedStop, heartbeat_file
from shardmake.run.engine import Engine
from shardmake.run.metrics import read_metrics
from shardmake.run.paths import RunDir
from tests.replaced_commands import RUNS, arguments_of
from tests.workflow.forked import Forked, log

pytestmark = pytest.mark.training
SCRIPTS = Path(__file__).with_name("scripts")
FILES = ["--model", "$SHARDMAKE_BASE", "--data", "DATA", "--output_dir", "$SHARDMAKE_OUTPUT"]
"""Paths of the programs for which the page "You have, you write" does not show them."""
TRAINER = [*arguments_of("Trainer with a DeepSpeed file"), "--train_file", "DATA", "--logging_steps", "1", "--report_to", "none"]  # fmt: skip
ACCELERATE = [*arguments_of("accelerate launch"), *FILES]
NATIVE = [*arguments_of("DeepSpeed itself"), *FILES]
TORCH = [*arguments_of("torchrun"), *FILES]
TRL = [
    *arguments_of("TRL's command line", dataset_name="FOLDER"),
    *("--report_to", "none", "--use_cpu", "True", "--bf16", "False", "--logging_steps", "1"),
]
OWN_FILE = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": 3}}
"""A DeepSpeed file of another ZeRO stage than the plan's."""


@dataclass
class Programs:
    """Runs programs as scripts of a run with two ranks and a global batch of 8 sequences."""

    forked: Forked
    folder: Path

    def train(self, strategy: Strategy, script: str, words: list[str], **settings: Any) -> tuple[AttemptDir, list[int]]:
        """Run ``script`` in the run with ``settings``; return the first attempt and the exit statuses of the ranks."""
        (rows := self.folder / "rows").mkdir(exist_ok=True)
        shutil.copy(self.forked.inputs / "train.jsonl", rows)
        (own_file := self.folder / "own.json").write_text(json.dumps(OWN_FILE))
        names = {"DATA": str(rows / "train.jsonl"), "FOLDER": str(rows), "OWN_FILE": str(own_file)}
        program = script if script.startswith("-m ") else str(SCRIPTS / script)
        given = {"global_batch_size": 8, "micro_batch_size": 2, "script": program, **settings}
        given["script_args"] = [names.get(word, word) for word in words]
        codes = self.forked.train(self.rundir, self.forked.plan(strategy, 2, **given))
        return AttemptDir(self.rundir.attempts / "001"), codes

    @property
    def rundir(self) -> RunDir:
        return RunDir(self.folder / "lab")

    def stop_at_once(self, script: str, arguments: list[str]) -> AttemptDir:
        """Run ``script`` with a stop file, which must save and stop after its first step."""
        self.rundir.train.mkdir(parents=True)
        self.rundir.stop_file.touch()
        folder, codes = self.train("ddp", script, arguments)
        assert codes == [0, 0], log(self.rundir)
        assert RequestedStop.read(folder.stopped).step == 1
        assert [path.name for path in self.rundir.script_output.glob("checkpoint-*")] == ["checkpoint-1"]
        self.rundir.stop_file.unlink()
        return folder

    def refusal(self, strategy: Strategy, script: str, arguments: list[str]) -> str:
        """Run ``script``, which must fail before it trains; return the error."""
        (folder, codes), rundir = self.train(strategy, script, arguments), self.rundir
        errors = folder.rank_errors()
        assert any(codes) and errors, log(rundir)
        assert errors[0].kind == "EngineMismatchError", errors[0].traceback
        assert not folder.trained.exists() and not rundir.metrics.exists() and not any(rundir.script_output.glob("*"))
        assert "Nothing was trained." in errors[0].message
        return errors[0].message


@pytest.fixture
def programs(forked: Forked, tmp_path: Path) -> Programs:
    return Programs(forked, tmp_path)


def trained(folder: AttemptDir) -> dict[str, Any]:
    return Engine.read(folder.trained).model_dump(include=set(expected("", "")))


def expected(api: str, engine: str, stage: int = 0, dtype: str = "float32") -> dict[str, Any]:
    sizes = {"micro_batch_size": 2, "gradient_accumulation_steps": 2, "global_batch_size": 8, "world_size": 2}
    return {"api": api, "engine": engine, "zero_stage": stage, "dtype": dtype, "rows_compared": True, **sizes}


TRAINED: list[tuple[Strategy, str, list[str], dict[str, Any]]] = [
    ("zero2", "hf_trainer.py", TRAINER, expected("trainer", "deepspeed", 2)),
    ("zero2", "hf_trainer.py", [*TRAINER, "--use_cpu", "True"], expected("trainer", "deepspeed", 2)),
    ("ddp", "hf_trainer.py", TRAINER, expected("trainer", "ddp")),
    ("zero3", "hf_trainer.py", TRAINER, expected("trainer", "deepspeed", 3)),
    ("zero2", "-m trl.scripts.sft", TRL, expected("trainer", "deepspeed", 2)),
    ("zero2", "native_deepspeed.py", NATIVE, expected("deepspeed", "deepspeed", 2)),
    ("zero3", "native_deepspeed.py", NATIVE, expected("deepspeed", "deepspeed", 3)),
    ("ddp", "plain_torch.py", TORCH, expected("torch", "ddp")),
    ("fsdp", "plain_torch.py", [*TORCH, "--wrap", "fsdp"], expected("torch", "fsdp")),
    ("ddp", "plain_torch.py", [*TORCH, "--compile", "wrapped"], expected("torch", "ddp")),
    ("fsdp", "plain_torch.py", [*TORCH, "--wrap", "fsdp", "--compile", "model"], expected("torch", "fsdp")),
    ("fsdp", "plain_torch.py", [*TORCH, "--wrap", "fsdp", "--compile", "layers"], expected("torch", "fsdp")),
    ("ddp", "accelerate_loop.py", [*ACCELERATE, "--compile"], expected("accelerate", "ddp")),
    ("zero3", "accelerate_loop.py", [*ACCELERATE, "--save", "gathered"], expected("accelerate", "deepspeed", 3)),
]


@pytest.mark.parametrize(
    ("strategy", "script", "arguments", "found"), TRAINED, ids=lambda value: value if isinstance(value, str) else ""
)
def test_programs_train_as_planned(
    programs: Programs, strategy: Strategy, script: str, arguments: list[str], found: dict[str, Any]
) -> None:
    (folder, codes), rundir = programs.train(strategy, script, arguments), programs.rundir
    assert codes == [0, 0], log(rundir)
    assert trained(folder) == found
    reports = [json.loads((folder.ranks / f"rank-{rank}.json").read_text()) for rank in (0, 1)]
    assert [report["world_size"] for report in reports] == [2, 2]
    assert [line.step for line in read_metrics(rundir.metrics)] == ([1, 2, 3, 4] if found["api"] == "trainer" else [])


def test_each_configuration_of_the_page_trains_above() -> None:
    cases = {
        "Trainer with a DeepSpeed file": ("hf_trainer.py", TRAINER),
        "DeepSpeed itself": ("native_deepspeed.py", NATIVE), "torchrun": ("plain_torch.py", TORCH),
        "accelerate launch": ("accelerate_loop.py", ACCELERATE),
        "TRL's command line": (RUNS["TRL's command line"]["script"], TRL),
    }  # fmt: skip
    assert list(cases) == list(RUNS)
    for title, (script, arguments) in cases.items():
        strategy = RUNS[title]["strategy"]
        assert any(case[:2] == (strategy, script) and case[2][: len(arguments)] == arguments for case in TRAINED), title


@pytest.mark.parametrize(
    ("strategy", "script", "arguments", "words"),
    [
        ("zero2", "hf_trainer.py", [*TRAINER, "--deepspeed", "OWN_FILE"], "zero_stage: planned 2, found 3"),
        ("ddp", "hf_trainer.py", [*TRAINER, "--deepspeed", "OWN_FILE"], "engine: planned ddp, found deepspeed"),
        ("zero2", "hf_trainer.py", [*TRAINER, "--gradient_accumulation_steps", "8"], "found 32 sequences"),
        ("zero2", "accelerate_loop.py", [*ACCELERATE, "--own_plugin", "OWN_FILE"], r"(?s)zero_stage: planned 2, found 3.*bfloat16"),
        ("ddp", "accelerate_loop.py", [*ACCELERATE, "--precision", "bf16"], "dtype: planned float32, found bfloat16"),
        ("ddp", "accelerate_loop.py", [*ACCELERATE, "--gradient_accumulation_steps", "8"], "found 32 sequences, 2 rank"),
        ("ddp", "accelerate_loop.py", [*ACCELERATE, "--load_dtype", "bfloat16"], "found bfloat16"),
        ("ddp", "accelerate_loop.py", [*ACCELERATE, "--own_loader", "same"], "Ranks 0 and 1 got the same rows"),
        ("ddp", "accelerate_loop.py", [*ACCELERATE, "--own_loader", "reversed"], "got some of the same rows"),
        ("zero2", "native_deepspeed.py", [*arguments_of("DeepSpeed itself", deepspeed_config="OWN_FILE"), *FILES], "zero_stage: planned 2, found 3"),
        ("zero2", "native_deepspeed.py", [*NATIVE, "--batch_size", "4"], "found 16 sequences, 2 ranks x 4 x 2"),
        ("zero2", "plain_torch.py", TORCH, "engine: planned deepspeed, found ddp"),
        ("ddp", "plain_torch.py", [*TORCH, "--wrap", "none"], "engine: planned ddp, found none"),
        ("ddp", "plain_torch.py", [*TORCH, "--same_rows"], "Ranks 0 and 1 got the same rows"),
        ("ddp", "plain_torch.py", [*TORCH, "--autocast"], "dtype: planned float32, found bfloat16"),
        ("ddp", "plain_torch.py", [*TORCH, "--accumulation", "3"], "found 12 sequences"),
    ],
    ids=lambda value: re.sub(r"[^a-z0-9_.]+", "-", value.lower()) if isinstance(value, str) else "",
)  # fmt: skip
def test_programs_that_train_something_else_are_refused(
    programs: Programs, strategy: Strategy, script: str, arguments: list[str], words: str
) -> None:
    assert re.search(words, programs.refusal(strategy, script, arguments))


def test_the_ranks_of_a_tensor_parallel_group_train_on_the_same_rows(programs: Programs) -> None:
    folder, codes = programs.train("zero2", "hf_trainer.py", TRAINER, tensor_parallel=2)
    assert codes == [0, 0], log(programs.rundir)
    assert trained(folder) == expected("trainer", "deepspeed", 2) | {"gradient_accumulation_steps": 4}
    groups = programs.rundir.root.rename(programs.folder / "groups")
    _, codes = programs.train("ddp", "hf_trainer.py", TRAINER)
    assert codes == [0, 0], log(programs.rundir)
    (found, saved), (losses, weights) = results(RunDir(groups)), results(programs.rundir)
    assert found == pytest.approx(losses, abs=2e-4)
    assert saved.keys() - weights.keys() == {"lm_head.weight"}  # DeepSpeed's gathering stores a tied weight twice
    torch.testing.assert_close({name: saved[name] for name in weights}, weights, atol=1e-4, rtol=1e-3)


def results(rundir: RunDir) -> tuple[list[float | None], dict[str, torch.Tensor]]:
    """Return the losses of the steps and the weights that the script saved."""
    return [line.loss for line in read_metrics(rundir.metrics)], load_file(rundir.script_output / "model.safetensors")


def test_trl_stops_on_request(programs: Programs) -> None:
    programs.stop_at_once("-m trl.scripts.sft", TRL)


def test_trainer_stops_on_request_and_resumes(programs: Programs) -> None:
    folder = programs.stop_at_once("hf_trainer.py", TRAINER)
    beat = Heartbeat.read_if_exists(heartbeat_file(folder.heartbeats, 1))
    assert beat and (beat.phase, beat.step) == (USER_SCRIPT_PHASE, 1)
    (_, codes), rundir = programs.train("ddp", "hf_trainer.py", TRAINER), programs.rundir
    assert codes == [0, 0], log(rundir)
    assert [(line.attempt, line.step) for line in read_metrics(rundir.metrics)] == [(1, 1), (2, 2), (2, 3), (2, 4)]
    assert all(line.loss and line.tokens is None for line in read_metrics(rundir.metrics))
