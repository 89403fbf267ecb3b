"""Changes to what libraries do: imports, the precision of products and of FSDP, and adapters in checkpointed layers."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import FullyShardedDataParallelPlugin
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from peft.tuners import tuners_utils
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import Trainer, TrainingArguments
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from shardmake.config.models import Precision, Strategy
from shardmake.render.training_file import expected_engine
from shardmake.run.engine import Engine
from shardmake.train import script_hooks
from shardmake.train.fsdp_precision import count_whole_tokens, fsdp_policy, set_script_policy
from shardmake.train.library_patches import kept_matmul_precision, name_checkpointed_adapters
from shardmake.train.sharded_trainer import ShardedTrainer
from tests.unit.plans import make_plan
from tests.unit.train.conftest import tiny_llama
from tests.unit.train.test_script_hooks import make_context

CODE = """
import sys
from shardmake.train.library_patches import import_deepspeed
import_deepspeed()
assert "deepspeed.runtime.zero.muon.muon_optimizer" in sys.modules
assert sys.modules.get("mlflow", "not imported") == "not imported"
assert "torch._inductor.compile_fx" not in sys.modules, "DeepSpeed compiled its Muon"
import torch
assert torch.compile.__module__ == "torch"
"""


def test_deepspeed_is_imported_without_its_tuner_and_its_compiled_optimizer() -> None:
    subprocess.run([sys.executable, "-c", CODE], check=True)


@pytest.fixture
def accelerate_sees_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Accelerate decides about TF32 as on a GPU, before anything runs on the device."""
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "cuda")
    AcceleratorState._reset_state(reset_partial_state=True)
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = False
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.mark.usefixtures("accelerate_sees_a_gpu")
def test_accelerate_turns_tf32_on_by_itself() -> None:
    Accelerator(dynamo_backend="inductor")
    assert torch.backends.cuda.matmul.fp32_precision == "tf32"


@pytest.mark.usefixtures("accelerate_sees_a_gpu")
@pytest.mark.parametrize("asked", [False, True])
def test_tf32_is_as_before_a_new_accelerator(asked: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32 = asked
    with kept_matmul_precision():
        Accelerator(dynamo_backend="inductor")
    assert torch.backends.cuda.matmul.fp32_precision == ("tf32" if asked else "ieee")
    assert torch.backends.cuda.matmul.allow_tf32 is asked, "torch's two switches agree"


@pytest.mark.usefixtures("accelerate_sees_a_gpu")
def test_compiled_training_with_trainer_stays_in_fp32(tmp_path: Path) -> None:
    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none", torch_compile=True)
    trainer = ShardedTrainer(model=tiny_llama(), args=arguments)
    assert trainer.accelerator.state.dynamo_plugin.backend.value == "INDUCTOR"
    assert torch.backends.cuda.matmul.fp32_precision == "ieee"


@pytest.fixture(autouse=True)
def original(monkeypatch: pytest.MonkeyPatch) -> Any:
    """PEFT's own function, as before any other test."""
    find = tuners_utils._get_tuner_state_dict_key_prefixes
    find = getattr(find, "__wrapped__", find)
    monkeypatch.setattr(tuners_utils, "_get_tuner_state_dict_key_prefixes", find)
    return find


def checkpointed_model() -> Any:
    """Return a model with adapters, wrapped as Accelerate wraps its layers under FSDP, and the adapters' names."""
    model: Any = get_peft_model(tiny_llama(num_hidden_layers=2), LoraConfig(target_modules=["q_proj"]))
    names = get_peft_model_state_dict(model).keys()
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, LlamaDecoderLayer))
    return model, names


def test_adapters_of_checkpointed_layers_are_saved_and_loaded(original: Any) -> None:
    for _ in range(3):
        name_checkpointed_adapters(tuners_utils)
    assert tuners_utils._get_tuner_state_dict_key_prefixes.__wrapped__ is original, "PEFT is changed once"
    model, names = checkpointed_model()
    saved = get_peft_model_state_dict(model)
    assert saved.keys() == names and len(saved) == 4
    set_peft_model_state_dict(model, {name: torch.full_like(value, 0.5) for name, value in saved.items()})
    assert all((value == 0.5).all() for value in get_peft_model_state_dict(model).values())


def test_a_users_script_saves_them_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting: dict[str, Callable[[Any], None]] = {}
    monkeypatch.setattr(script_hooks, "ImportHooks", lambda: SimpleNamespace(after=waiting.__setitem__))
    script_hooks.install_hooks(make_context(tmp_path))
    model, names = checkpointed_model()
    assert not get_peft_model_state_dict(model), "PEFT has fixed it: remove name_checkpointed_adapters"
    waiting[tuners_utils.__name__](tuners_utils)
    assert get_peft_model_state_dict(model).keys() == names


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
