"""FSDP computes in the planned data type, and its loss stays in full precision."""

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import FullyShardedDataParallelPlugin
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import Trainer, TrainingArguments

from shardmake.config.models import Precision, Strategy
from shardmake.render.training_file import expected_engine
from shardmake.run.engine import Engine
from shardmake.train.fsdp_precision import count_whole_tokens, fsdp_policy, set_script_policy
from shardmake.train.sharded_trainer import ShardedTrainer
from tests.unit.plans import make_plan
from tests.unit.train.conftest import tiny_llama


def expected(strategy: Strategy = "fsdp", precision: Precision = "bf16") -> Engine:
    return expected_engine(make_plan(strategy, precision=precision).choice)


@pytest.mark.parametrize(("strategy", "precision"), [("fsdp", "fp32"), ("ddp", "bf16"), ("zero3", "bf16")])
def test_nothing_is_cast_by_other_engines_and_in_fp32(strategy: Strategy, precision: Precision) -> None:
    assert fsdp_policy(expected(strategy, precision)) is None


def plugin_with(policy: Any) -> Any:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, mixed_precision_policy=policy)
    plugin.set_mixed_precision("bf16")  # as AcceleratorState does
    return plugin


@pytest.mark.usefixtures("one_rank")
def test_loss_of_fsdp2_is_not_rounded_to_16_bits() -> None:
    """Accelerate's own policy rounds it, which is the reason for ours."""
    torch.manual_seed(0)
    rows = torch.randint(32, (2, 8))

    def loss_with(policy: Any) -> Any:
        torch.manual_seed(1)
        model = tiny_llama()
        for module in (*model.model.layers, model):
            fully_shard(module, mp_policy=plugin_with(policy).mixed_precision_policy)
        return model(input_ids=rows, labels=rows).loss.detach()

    kept, rounded = loss_with(fsdp_policy(expected())), loss_with(None)
    assert (kept.dtype, rounded.dtype) == (torch.float32, torch.bfloat16)
    assert kept != rounded and kept.bfloat16() == rounded, "only the last cast differs"


@pytest.mark.usefixtures("one_rank")
def test_count_of_tokens_is_not_rounded_to_16_bits(tmp_path: Path) -> None:
    """Trainer of transformers 5.23 divides the count, which makes it a float; FSDP2 would pass 1001 tokens on as 1000."""

    class Count(torch.nn.Linear):
        def forward(self, tokens: torch.Tensor) -> Any:
            return tokens + 0 * self.weight.sum().float()

    class Script(Trainer):  # a script's, which the hook changes
        pass

    model = Count(2, 2)
    fully_shard(model, mp_policy=fsdp_policy(expected()))
    batch = [{"labels": torch.arange(1002)[None]}]
    count_whole_tokens(Script)
    arguments, found = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none"), []
    for kind in (ShardedTrainer, Script):
        trainer = kind(model=torch.nn.Linear(1, 1), args=arguments)
        trainer.model_accepts_loss_kwargs, trainer._loss_shifts_labels = True, True
        found.append(float(model(trainer._get_num_items_in_batch(batch, torch.device("cpu"))).detach()))
    assert found == [1001, 1001]


class ScriptPlugin(FullyShardedDataParallelPlugin):  # the class of a script's process, which the hook changes
    pass


def test_a_scripts_plugin_gets_the_planned_policy_unless_it_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ScriptPlugin, "set_mixed_precision", ScriptPlugin.set_mixed_precision, raising=False)
    set_script_policy(ScriptPlugin, expected())

    def policy(precision: str, **own: Any) -> Any:
        plugin = ScriptPlugin(fsdp_version=2, **own)
        plugin.set_mixed_precision(precision)
        return plugin.mixed_precision_policy

    own = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    assert policy("bf16") == fsdp_policy(expected()) and policy("bf16", mixed_precision_policy=own) == own
    assert policy("fp16").param_dtype == torch.float16, "not the planned one: the engine check reports it"
