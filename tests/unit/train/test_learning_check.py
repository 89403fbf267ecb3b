"""The ranks read from the built objects how a training learns; a difference from the plan ends the run."""

import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import ExponentialLR
from transformers import SchedulerType, Trainer, TrainingArguments, get_scheduler

from shardmake.config.models import Schedule
from shardmake.config.optimizers import OPTIMIZERS
from shardmake.core.private_names import named_arguments
from shardmake.render.training_file import training_settings
from shardmake.run.length import planned_rates
from shardmake.run.plan import Choice
from shardmake.run.training_settings import TrainingSettings
from shardmake.train import learning_check
from shardmake.train.engine_check import EngineMismatchError
from shardmake.train.learning_check import BuiltTraining, check_learning, describe_learning, planned_learning
from shardmake.train.sharded_trainer import planned_optimizer
from tests.unit.plans import make_cluster, make_model, make_plan, make_run

RATE, STEPS = 1e-3, 10
BATCHES = SimpleNamespace(total_batch_size=8)  # Accelerate's data loader: the sequences of all ranks per forward pass


class DeepSpeedEngine(nn.Module):
    """As much of DeepSpeed's engine as is read."""

    def __init__(self, module: nn.Module, optimizer: Optimizer, **changes: Any) -> None:
        super().__init__()
        self.module, self.basic_optimizer = module, optimizer
        self.lr_scheduler: Any = None
        self.config = {"gradient_clipping": 1.0, "zero_optimization": {"stage": 2, "reduce_bucket_size": 4096}}
        values = {
            "gradient_clipping": 1.0, "gradient_accumulation_steps": 2, "train_micro_batch_size_per_gpu": 2,
            "torch_autocast_enabled": False, "torch_autocast_dtype": torch.bfloat16, "bfloat16_enabled": False,
            "fp16_enabled": False,
        }  # fmt: skip
        for name, value in (values | changes).items():
            setattr(self, name, lambda value=value: value)


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> TrainingArguments:
    batch = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    folder = str(tmp_path_factory.mktemp("output"))
    return TrainingArguments(folder, use_cpu=True, lr_scheduler_type="cosine", warmup_steps=3, **batch)


def settings(choice: Choice, **run: Any) -> TrainingSettings:
    values = {"scheduler": "cosine", "warmup_ratio": 0.3, "weight_decay": 0.01, "eval_every_steps": "never"}
    plan = make_plan("ddp").model_copy(update={"choice": choice})
    return training_settings(plan, make_run(**values | run), make_cluster(), make_model())


def choice(strategy: Any = "ddp") -> Choice:
    return make_plan(strategy, precision="fp32").choice


def groups(model: nn.Module, vectors: float = 0.0) -> list[dict[str, Any]]:
    parts = list(model.parameters())
    matrices = {"params": [p for p in parts if p.ndim > 1], "weight_decay": 0.01}
    return [matrices, {"params": [p for p in parts if p.ndim < 2], "weight_decay": vectors}]


def built(
    arguments: TrainingArguments, optimizer: Callable[..., Optimizer] = AdamW, schedule: str = "cosine",
    warmup: int = 3, vectors: float = 0.0, **changes: Any,
) -> BuiltTraining:  # fmt: skip
    model = nn.Linear(3, 3)
    made = optimizer(groups(model, vectors), lr=RATE)
    scheduler = get_scheduler(schedule, made, warmup, STEPS)
    plain = BuiltTraining(model, made, scheduler, BATCHES, arguments, "no", autocasts=False, steps=STEPS)
    return replace(plain, **changes)


def check(training: BuiltTraining, planned: Choice) -> None:
    given = settings(planned)
    expected = planned_learning(given, planned, training.arguments, training.steps)
    check_learning(describe_learning(training, given), expected)


def test_the_planned_training_passes(arguments: TrainingArguments) -> None:
    check(built(arguments), choice())
    found = describe_learning(built(arguments), settings(choice()))
    assert (found.optimizer, found.schedule, found.warmup_steps) == ("AdamW", "cosine", 3)
    assert found.rates[:3] == pytest.approx([0, RATE / 3, 2 * RATE / 3])


@pytest.mark.parametrize("name", get_args(Schedule))
def test_every_schedule_has_the_rates_that_trainer_builds(name: str, tmp_path: Path) -> None:
    given = {"min_lr": 1e-5} if "min_lr" in name else {"num_decay_steps": 4} if "decay" in name else {}
    values = {"lr_scheduler_type": name, "lr_scheduler_kwargs": given, "learning_rate": RATE, "warmup_steps": 2}
    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none", **values)
    trainer = Trainer(nn.Linear(3, 3), arguments)
    trainer.create_optimizer_and_scheduler(STEPS)
    rates = [trainer.lr_scheduler.get_last_lr()[0]]
    for _ in range(STEPS - 1):
        trainer.optimizer.step()
        trainer.lr_scheduler.step()
        rates += [trainer.lr_scheduler.get_last_lr()[0]]
    found = planned_rates(name, RATE, 2, STEPS, given)
    assert found == pytest.approx([rates[step] for step in (0, 1, 2, STEPS // 2, STEPS - 1)])


def test_the_schedules_are_those_that_follow_no_metric() -> None:
    assert {*get_args(Schedule), "reduce_lr_on_plateau", "greedy"} == {kind.value for kind in SchedulerType}


def test_wrappers_are_looked_through(arguments: TrainingArguments) -> None:
    """Accelerate's and DeepSpeed's wrappers keep the original under the same name."""
    plain = built(arguments)
    wrapped = {name: SimpleNamespace(**{name: getattr(plain, name)}) for name in ("optimizer", "scheduler")}
    check(replace(plain, **wrapped), choice())


def _with_another_rate(parts: Any, lr: float) -> AdamW:
    first, *others = parts
    return AdamW([first, *({**part, "lr": 2 * lr} for part in others)], lr=lr)


@pytest.mark.parametrize(("changes", "words"), [
    ({"optimizer": partial(SGD, momentum=0.9)}, "optimizer: planned 'AdamW', found 'SGD'"),
    ({"optimizer": partial(AdamW, betas=(0.9, 0.95))}, "betas: planned [0.9, 0.999], found [0.9, 0.95]"),
    ({"optimizer": partial(AdamW, eps=1e-6)}, "epsilon: planned 1e-08, found 1e-06"),
    ({"optimizer": lambda parts, lr: AdamW(parts, lr=2 * lr)}, "learning_rate: planned 0.001, found 0.002"),
    ({"optimizer": _with_another_rate}, "group_rates: planned [0.001], found [0.001, 0.002]"),
    ({"vectors": 0.01}, "decays_vectors: planned False, found True"),
    ({"schedule": "linear"}, "rates: planned"), ({"warmup": 0}, "rates: planned"),
    ({"batches": SimpleNamespace(total_batch_size=16)}, "global_batch_size: planned 16, found 32"),
    ({"precision": "bf16", "autocasts": True}, "autocast: planned None, found 'bfloat16'"),
    ({"scheduler": ExponentialLR(SGD([torch.ones(1)], lr=RATE), 0.9)}, "planned 'cosine', found 'ExponentialLR'"),
])  # fmt: skip
def test_every_difference_is_refused(arguments: TrainingArguments, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(EngineMismatchError, match=re.escape(words)):
        check(built(arguments, **changes), choice())


@pytest.mark.parametrize(("values", "words"), [
    ({}, ""), ({"gradient_clipping": 0.0}, "max_grad_norm: planned 1.0, found 0.0"),
    ({"gradient_accumulation_steps": 1}, "gradient_accumulation_steps: planned 2, found 1"),
    ({"train_micro_batch_size_per_gpu": 4}, "micro_batch_size: planned 2, found 4"),
    ({"torch_autocast_enabled": True}, "autocast: planned None, found 'bfloat16'"),
])  # fmt: skip
def test_deepspeeds_own_settings_count(arguments: TrainingArguments, values: dict[str, Any], words: str) -> None:
    """The arguments are those of the plan in each case."""
    plain = built(arguments)
    training = replace(plain, model=DeepSpeedEngine(plain.model, plain.optimizer, **values))
    with pytest.raises(EngineMismatchError, match=re.escape(words)) if words else nullcontext():
        check(training, choice("zero2"))


def test_deepspeeds_own_scheduler_and_optimizer_count(arguments: TrainingArguments) -> None:
    plain = built(arguments)
    engine = DeepSpeedEngine(plain.model, SGD(groups(plain.model), lr=RATE))
    engine.lr_scheduler = ExponentialLR(engine.basic_optimizer, 0.9)
    with pytest.raises(EngineMismatchError, match=r"(?s)'SGD'.*'ExponentialLR'"):
        check(replace(plain, model=engine), choice("zero2"))


def test_deepspeed_runs_with_the_rendered_file(arguments: TrainingArguments) -> None:
    plain = built(arguments)
    engine = DeepSpeedEngine(plain.model, plain.optimizer)
    rendered = {"gradient_clipping": "auto", "zero_optimization": {"stage": 2}}
    learning_check.check_deepspeed_file(engine, rendered)
    learning_check.check_deepspeed_file(plain.model, rendered | {"steps_per_print": 3})
    with pytest.raises(EngineMismatchError, match=r"zero_optimization\.stage: planned 3, found 2"):
        learning_check.check_deepspeed_file(engine, {"zero_optimization": {"stage": 3}})


def test_adapters_without_vectors_decay_everything(arguments: TrainingArguments) -> None:
    model = nn.Linear(3, 3, bias=False)
    optimizer = AdamW(model.parameters(), lr=RATE, weight_decay=0.01)
    scheduler = get_scheduler("cosine", optimizer, 3, STEPS)
    check(replace(built(arguments), model=model, optimizer=optimizer, scheduler=scheduler), choice())


@pytest.mark.parametrize("has_vectors", [True, False])
@pytest.mark.parametrize("optimizer", [name for name, spec in OPTIMIZERS.items() if not spec.package])
@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant", "constant_with_warmup"])
def test_what_transformers_builds_passes(tmp_path: Path, optimizer: str, schedule: str, has_vectors: bool) -> None:
    """Trainer's own optimizer and scheduler are the planned ones."""
    planned = choice()
    given = settings(planned, scheduler=schedule, optimizer=optimizer)
    single = {key: value for key, value in given.arguments.items() if key != "ddp_backend"}
    arguments = TrainingArguments(output_dir=str(tmp_path), **named_arguments(single))
    model = nn.Linear(3, 3, bias=has_vectors)
    trainer = Trainer(model=model, args=arguments, optimizer_cls_and_kwargs=planned_optimizer(given))
    trainer.create_optimizer_and_scheduler(STEPS)
    made = trainer.optimizer, trainer.lr_scheduler
    training = BuiltTraining(model, *made, BATCHES, arguments, "no", autocasts=False, steps=STEPS)
    found = describe_learning(training, given)
    check_learning(found, planned_learning(given, planned, arguments, STEPS))
    assert (found.betas is None) is not OPTIMIZERS[optimizer].has_betas
