"""The comparison of a script's engine and batch with the plan."""

import json
import logging
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardmake.config.models import Strategy
from shardmake.core.errors import EngineMismatchError
from shardmake.render.training_file import expected_engine
from shardmake.run.attempt import AttemptDir
from shardmake.run.engine import Engine
from shardmake.train import script_guard
from shardmake.train.script_guard import Batch, ScriptGuard, check_adapters, mismatch_message, trained_dtype
from tests.unit.plans import make_plan
from tests.unit.wording import Wording


def make_guard(folder: Path, strategy: Strategy = "zero2", **choice: Any) -> ScriptGuard:
    made = make_plan(strategy, **{"nodes": 1, "precision": "fp32", **choice}).choice
    return ScriptGuard(AttemptDir(folder), 0, expected_engine(made), made, on_cpu=True)


def refused(words: str | None) -> AbstractContextManager[Any]:
    return pytest.raises(EngineMismatchError, match=words) if words else nullcontext()


def test_the_message_names_every_difference_and_how_to_change_it(wording: Wording) -> None:
    assert mismatch_message({}) == ""
    stages = mismatch_message({"zero_stage": (2, 3), "offload_param": (None, "cpu")})
    wording(f"{stages}\n\n{mismatch_message({'engine': ('deepspeed', 'ddp'), 'zero_stage': (2, 0)})}")


@pytest.mark.parametrize(("strategy", "kind", "ranks", "words"), [
    ("zero2", "DEEPSPEED", 2, None), ("ddp", "MULTI_CPU", 2, None), ("ddp", "MULTI_GPU", 2, None),
    ("zero2", "MULTI_CPU", 2, "engine: planned deepspeed, found ddp"),
    ("zero2", "DEEPSPEED", 1, "world_size: planned 2, found 1"),
    ("fsdp", "MULTI_CPU", 2, "Accelerate does not use FSDP on CPUs"),
    ("ddp", "MEGATRON_LM", 2, "engine: planned ddp, found MEGATRON_LM"),
])  # fmt: skip
def test_accelerator_is_planned(tmp_path: Path, strategy: Strategy, kind: str, ranks: int, words: str | None) -> None:
    """A DeepSpeed plugin is refused where Accelerate ignores it."""
    with refused(words):
        make_guard(tmp_path, strategy).check_accelerator(kind, ranks)
    assert json.loads((tmp_path / "ranks/rank-0.json").read_text())["api"] == "accelerate"
    with refused("engine: planned ddp, found deepspeed"):
        make_guard(tmp_path, "ddp").check_accelerator("MULTI_CPU", 2, has_deepspeed_plugin=True)


@pytest.mark.parametrize(("batch", "words"), [
    (Batch.of(2, 2, 2), None), (Batch.of(4, 1, 2), None), (Batch.of(None, 2, 2), None),
    (Batch.of(2, 8, 2), "planned 8 sequences, 2 ranks x 2 x 2 accumulation steps, found 32 sequences, 2 ranks x 2 x 8"),
])  # fmt: skip
def test_the_global_batch_is_the_planned_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, batch: Batch, words: str | None
) -> None:
    """Another split of it is reported."""
    caplog.set_level(logging.INFO, "shardmake")
    guard = make_guard(tmp_path)
    guard.batch = batch
    with refused(words):
        guard.check_batch()
    reported = "4 x 1 accumulation steps, the plan into 2 x 2 accumulation steps" in caplog.text
    assert reported == (batch == Batch.of(4, 1, 2))


def test_the_compute_type_is_that_of_the_weights_unless_the_engine_casts() -> None:
    model = torch.nn.Linear(8, 8)
    assert trained_dtype(model, "float32") == "float32"
    assert trained_dtype(model, "bfloat16") == "bfloat16"
    assert trained_dtype(model.to(torch.bfloat16), "float32") == "bfloat16"
    assert trained_dtype(torch.nn.Sequential(model, torch.nn.LayerNorm(8)), "float32") == "bfloat16"


class DeepSpeedEngine(torch.nn.Linear):
    """An engine as far as the guard reads it."""

    torch_autocast_dtype = staticmethod(lambda: torch.bfloat16)


@pytest.mark.parametrize(("enabled", "dtype"), [(False, "float32"), (True, "bfloat16")])
def test_the_autocast_of_deepspeed_is_a_data_type_too(enabled: bool, dtype: str) -> None:
    engine: Any = DeepSpeedEngine(2, 2)
    engine.torch_autocast_enabled = lambda: enabled
    assert trained_dtype(engine, "float32") == dtype


def test_a_step_without_an_engine_is_refused_and_a_planned_one_is_recorded(tmp_path: Path) -> None:
    guard = make_guard(tmp_path, "ddp")
    with pytest.raises(EngineMismatchError, match="engine: planned ddp, found none"):
        guard.check_first_step(has_engine=False)
    make_guard(tmp_path, "ddp", processes_per_node=1, gradient_accumulation_steps=4).check_first_step(has_engine=False)
    assert not guard.folder.trained.exists()
    found = {"engine": "ddp", "zero_stage": 0, "world_size": 2, "dtype": "float32"}
    guard.found |= found | {"offload_optimizer": None, "offload_param": None}
    guard.batch = Batch.of(2, 2, 2)
    guard.check_first_step(has_engine=True)
    assert Engine.read(guard.folder.trained).global_batch_size == 8


@pytest.mark.parametrize(("tensor_parallel", "digests", "words"), [
    (1, ["a", "b"], None), (1, ["a", "a"], "Ranks 0 and 1 got the same rows"),
    (1, ["a,b,c", "b,c,d"], "Ranks 0 and 1 got some of the same rows"),
    (2, ["a", "a"], None),
    (2, ["a", "b"], "Ranks 0 and 1 of a tensor-parallel group got different rows"),
    (1, ["a", ""], None),
])  # fmt: skip
def test_rows_are_compared_between_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tensor_parallel: int, digests: list[str], words: str | None
) -> None:
    monkeypatch.setattr(script_guard.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(script_guard.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(script_guard.first_batch, "exchange", lambda digest: digests)
    guard = make_guard(tmp_path, tensor_parallel=tensor_parallel, gradient_accumulation_steps=2 * tensor_parallel)
    with refused(words):
        guard.check_rows({})
    assert guard.rows_compared == all(digests)


@pytest.mark.parametrize(("settings", "found"), [
    ({"peft_type": "LORA"}, None),
    ({"peft_type": "LORA", "target_parameters": ["mlp.experts.gate_up_proj"]}, None),
    ({"peft_type": "LORA", "use_dora": True, "lora_bias": True}, "lora_bias"),
    ({"peft_type": "LOHA"}, "peft_type LOHA"),
])  # fmt: skip
def test_adapters_that_cannot_be_merged_end_the_run_at_its_start(settings: dict[str, Any], found: str | None) -> None:
    adapted = torch.nn.Linear(2, 2)
    adapted.peft_config = {"default": SimpleNamespace(to_dict=lambda: settings)}  # type: ignore[assignment]
    with refused(found and rf"cannot be merged: {found}\. Nothing was trained\."):
        check_adapters(torch.nn.Sequential(adapted))
