"""The comparison of a script's engine, batch and first rows with the plan and between ranks."""

import json
import logging
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from shardmake.config.models import Strategy
from shardmake.core.errors import EngineMismatchError
from shardmake.core.private_names import private
from shardmake.render.training_file import expected_engine
from shardmake.run.attempt import AttemptDir
from shardmake.run.engine import Engine
from shardmake.train import script_guard
from shardmake.train.engine_check import below_compiler, describe_engine, parameter_groups
from shardmake.train.first_batch import conflict, count_rows, digest_rows, exchange
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
def test_the_global_batch(tmp_path: Path, caplog: pytest.LogCaptureFixture, batch: Batch, words: str | None) -> None:
    """Another split of it is reported."""
    caplog.set_level(logging.INFO, "shardmake")
    guard = make_guard(tmp_path)
    guard.batch = batch
    with refused(words):
        guard.check_batch()
    reported = "4 x 1 accumulation steps, the plan into 2 x 2 accumulation steps" in caplog.text
    assert reported == (batch == Batch.of(4, 1, 2))


class DeepSpeedEngine(torch.nn.Linear):
    """An engine as far as the guard reads it."""

    torch_autocast_dtype = staticmethod(lambda: torch.bfloat16)
    torch_autocast_enabled: Any


def test_the_compute_type_is_that_of_the_weights_unless_the_engine_casts() -> None:
    model = torch.nn.Linear(8, 8)
    assert trained_dtype(model, "float32") == "float32"
    assert trained_dtype(model, "bfloat16") == "bfloat16"
    assert trained_dtype(model.to(torch.bfloat16), "float32") == "bfloat16"
    assert trained_dtype(torch.nn.Sequential(model, torch.nn.LayerNorm(8)), "float32") == "bfloat16"
    for enabled, dtype in ((False, "float32"), (True, "bfloat16")):
        engine = DeepSpeedEngine(2, 2)
        engine.torch_autocast_enabled = lambda enabled=enabled: enabled
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
    (1, ["a,b,c", "b,c,d"], "Ranks 0 and 1 got some of the same rows"), (2, ["a", "a"], None),
    (2, ["a", "b"], "Ranks 0 and 1 of a tensor-parallel group got different rows"), (1, ["a", ""], None),
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
    ({"peft_type": "LORA"}, None), ({"peft_type": "LORA", "target_parameters": ["mlp.experts.gate_up_proj"]}, None),
    ({"peft_type": "LORA", "use_dora": True, "lora_bias": True}, "lora_bias"),
    ({"peft_type": "LOHA"}, "peft_type LOHA"),
])  # fmt: skip
def test_adapters_that_cannot_be_merged_end_the_run_at_its_start(settings: dict[str, Any], found: str | None) -> None:
    adapted = torch.nn.Linear(2, 2)
    adapted.peft_config = {"default": SimpleNamespace(to_dict=lambda: settings)}  # type: ignore[assignment]
    with refused(found and rf"cannot be merged: {found}\. Nothing was trained\."):
        check_adapters(torch.nn.Sequential(adapted))


ROWS = torch.arange(12).reshape(3, 4)


def test_rows_are_counted_and_ranks_exchange_text(one_rank: None) -> None:
    assert count_rows(ROWS) == 3
    assert count_rows(({"scale": torch.tensor(2.0), "position": torch.zeros(7), "input_ids": ROWS}, ())) == 3
    assert count_rows(({}, [torch.tensor(1.0), "text"])) is None
    assert exchange("abc") == ["abc"]


def test_the_digest_depends_on_every_value_and_not_on_the_container() -> None:
    batch = digest_rows({"input_ids": ROWS, "labels": ROWS})
    assert digest_rows([ROWS.clone(), ROWS.clone()]) == batch
    assert digest_rows({"input_ids": ROWS, "labels": ROWS + 1}) != batch
    assert digest_rows(ROWS.reshape(4, 3)) != digest_rows(ROWS)
    assert digest_rows(ROWS.to(torch.bfloat16)) != digest_rows(ROWS)
    assert digest_rows({"count": torch.tensor(3), "use_cache": False}) == ""


def test_each_row_has_a_digest_of_its_own() -> None:
    first, second, third = digest_rows({"input_ids": ROWS, "labels": ROWS}).split(",")
    assert digest_rows({"input_ids": ROWS[1:], "labels": ROWS[1:]}) == f"{second},{third}"
    changed = {"input_ids": ROWS, "labels": ROWS + torch.tensor([[1], [0], [0]])}
    assert digest_rows(changed).split(",")[1:] == [second, third] and digest_rows(changed).split(",")[0] != first
    assert "," not in digest_rows({"input_ids": ROWS, "position": torch.zeros(7)})


def test_a_row_is_the_same_with_more_padding_on_either_side() -> None:
    mask, row = torch.ones(1, 4, dtype=torch.int64), ROWS[:1]

    def batch(*sides: int) -> dict[str, torch.Tensor]:
        pad = torch.nn.functional.pad
        return {
            "input_ids": pad(row, sides, value=9), "attention_mask": pad(mask, sides),
            "labels": pad(row, sides, value=-100),
        }  # fmt: skip

    assert digest_rows((batch(0, 0),)) == digest_rows((batch(0, 3),)) == digest_rows((batch(5, 1),))
    hidden = batch(0, 3) | {"attention_mask": torch.ones(1, 7)}
    assert digest_rows(hidden) != digest_rows(batch(0, 3))
    assert digest_rows(batch(0, 0) | {"weight": torch.tensor([2.0])}) != digest_rows(batch(0, 0))


@pytest.mark.parametrize(("digests", "tensor_parallel", "ranks"), [
    (["a", "b", "c", "d"], 1, None), (["a", "b", "c", "a"], 1, (0, 3)), (["a", "a", "b", "b"], 1, (0, 1)),
    (["a", "a", "b", "b"], 2, None), (["a", "a", "a", "a"], 2, (0, 2)), (["a", "b", "c", "c"], 2, (0, 1)),
    (["a,b,c", "d,e,f", "g,h,c", "i,j,k"], 1, None), (["a,b,c", "d,e,f", "g,b,c", "i,j,k"], 1, (0, 2)),
    (["a,b,b", "d,e,f", "g,a,b", "i,j,k"], 1, None), (["a,b", "a,b", "b,c", "b,c"], 2, None),
    (["a,b,c", "a,b,c", "b,c,d", "b,c,d"], 2, (0, 2)), (["a,b", "b,a"], 2, (0, 1)),
])  # fmt: skip
def test_equal_rows_in_parallel_group(digests: list[str], tensor_parallel: int, ranks: tuple[int, int] | None) -> None:
    assert conflict(digests, tensor_parallel) == ranks


@pytest.mark.parametrize("reshards", [True, False])
@pytest.mark.usefixtures("one_rank")
def test_weights_around_the_blocks_do_not_hide_the_strategy(reshards: bool) -> None:
    """Accelerate leaves it to FSDP2 for the root, which has weights of its own under PEFT: the final norm."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
    fully_shard(model[0], reshard_after_forward=reshards)
    fully_shard(model)
    assert describe_engine(model, "bf16").reshard_after_forward is reshards


@pytest.mark.usefixtures("one_rank")
def test_the_group_of_torch_2_11_describes_fsdp_as_the_groups_of_later_versions() -> None:
    """It has one group or none, in an attribute that later versions keep as a property."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    fully_shard(model[0], reshard_after_forward=True)
    fully_shard(model)
    for module, number in ((model[0], 1), (model, 0)):
        state = private(private(module).get_fsdp_state())
        older = SimpleNamespace(_fsdp_param_group=state.fsdp_param_group)
        assert parameter_groups(private(older)) == parameter_groups(state)
        assert len(parameter_groups(state)) == number


@pytest.mark.usefixtures("one_rank")
def test_a_compiled_model_has_the_engine_that_it_wraps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accelerate compiles DDP as a whole. FSDP1 is an engine that no plan has."""
    monkeypatch.setenv("WORLD_SIZE", "2")  # of one rank, every engine is DDP
    wrapped = DistributedDataParallel(torch.nn.Linear(4, 4))
    sharded = FullyShardedDataParallel(torch.nn.Linear(4, 4), device_id=torch.device("cpu"))
    for model, engine in ((wrapped, "ddp"), (sharded, "FullyShardedDataParallel")):
        assert below_compiler(torch.compile(model)) is model is below_compiler(model)
        assert describe_engine(torch.compile(model), "bf16") == describe_engine(model, "bf16")
        assert describe_engine(model, "no").engine == engine


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.usefixtures("one_rank")
def test_fsdp2_of_a_compiled_model_stays_fsdp2(in_place: bool) -> None:
    """FSDP2 has its state on the compiler's wrapper, and layers that are compiled in place have none."""
    plain = torch.nn.Sequential(torch.nn.Linear(4, 4))
    model: torch.nn.Module = (plain.compile() or plain) if in_place else torch.compile(plain)
    fully_shard(model)
    assert below_compiler(model) is model
    found = describe_engine(model, "bf16")
    assert (found.engine, found.fsdp_version) == ("fsdp", 2)
