"""The hooks in torch and Accelerate, on one rank in this process, and functions that run at an import."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import accelerate.accelerator
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from shardmake.config.models import Strategy
from shardmake.core.errors import EngineMismatchError
from shardmake.render.training_file import expected_engine
from shardmake.run.attempt import AttemptDir
from shardmake.run.engine import Engine
from shardmake.train.script_hooks import ImportHooks, ScriptObserver, default_to_gloo
from tests.unit.plans import make_plan

ROWS = torch.arange(48.0).reshape(12, 4)
BATCH = "global_batch_size: planned 4 sequences"


def make_context(folder: Path, strategy: Strategy = "ddp") -> Any:
    """One rank with a global batch of two passes of two rows."""
    plan = make_plan(strategy, nodes=1, processes_per_node=1, precision="fp32")
    settings = SimpleNamespace(expected=expected_engine(plan.choice))
    attempt = SimpleNamespace(accelerator="cpu")
    return SimpleNamespace(folder=AttemptDir(folder), rank=0, plan=plan, settings=settings, attempt=attempt)


@pytest.fixture
def hooked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_rank: None) -> Iterator[ScriptObserver]:
    """Hooks in torch and Accelerate, and a process group of one rank."""
    changed = [(Accelerator, name) for name in ("__init__", "prepare", "prepare_model", "save_model")]
    for owner, name in (*changed, (DistributedDataParallel, "__init__"), (torch.Tensor, "backward")):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    observer = ScriptObserver(make_context(tmp_path))
    observer.hook_torch(torch)
    observer.hook_accelerator(accelerate.accelerator)
    yield observer
    sys.modules["torch.optim.optimizer"]._global_optimizer_pre_hooks.clear()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def trained(folder: Path) -> tuple[str | None, str, int | None, int | None, int | None]:
    found = Engine.read(AttemptDir(folder).trained)
    batch = found.micro_batch_size, found.gradient_accumulation_steps, found.global_batch_size
    return found.api, found.engine, *batch


def parts() -> tuple[Any, Any, Any]:
    """Return a model, its optimizer and six batches."""
    model = torch.nn.Linear(4, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(ROWS, batch_size=2)  # type: ignore[arg-type]


def train_with_torch(accumulation: int) -> None:
    model, optimizer, loader = parts()
    model = DistributedDataParallel(model)
    with torch.no_grad():
        model(ROWS[:5])  # no training pass
    for number, batch in enumerate(loader, 1):
        model(batch).sum().backward()
        if number % accumulation == 0:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.usefixtures("hooked")
def test_passes_are_counted_where_no_library_declares_them(tmp_path: Path) -> None:
    counting = torch.Tensor.backward
    train_with_torch(2)
    assert trained(tmp_path) == ("torch", "ddp", 2, 2, 4)
    assert torch.Tensor.backward is not counting, "torch is as before after the first step"


def train_with_accelerate(accumulation: int, declared: int) -> int:
    """Return the number of passes before the end."""
    accelerator = Accelerator(gradient_accumulation_steps=declared)
    model, optimizer, loader = accelerator.prepare(*parts())
    for number, batch in enumerate(loader, 1):
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).sum())
            if number % accumulation == 0:
                optimizer.step()
                optimizer.zero_grad()
    return number


@pytest.mark.parametrize(("accumulation", "declared"), [(1, 2), (2, 1)])
@pytest.mark.usefixtures("hooked")
def test_accelerate_accumulates_as_declared_or_in_the_loop(tmp_path: Path, accumulation: int, declared: int) -> None:
    assert train_with_accelerate(accumulation, declared) == 6
    assert trained(tmp_path) == ("accelerate", "ddp", 2, 2, 4)


@pytest.mark.parametrize(("train", "words"), [
    (lambda: train_with_torch(3), "found 6 sequences, 1 ranks x 2 x 3 accumulation steps"),
    (lambda: train_with_accelerate(1, 3), BATCH), (lambda: train_with_accelerate(3, 1), BATCH),
    (lambda: train_with_accelerate(1, 1), BATCH),
])  # fmt: skip
@pytest.mark.usefixtures("hooked")
def test_another_accumulation_is_refused_before_the_first_step(tmp_path: Path, train: Any, words: str) -> None:
    with pytest.raises(EngineMismatchError, match=words):
        train()
    assert not AttemptDir(tmp_path).trained.exists()


@pytest.mark.parametrize("container", [tuple, list])
def test_prepared_models_are_found_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, container: type) -> None:
    """Accelerate 1.15 returns a list for FSDP2 and a tuple otherwise."""
    found: list[tuple[Any, str]] = []

    class Engine:
        mixed_precision = "bf16"
        prepare = prepare_model = save_model = lambda self, *objects: container(objects)

    observer = ScriptObserver(make_context(tmp_path))
    monkeypatch.setattr(observer, "add_model", lambda model, precision: found.append((model, precision)))
    observer.hook_accelerator(SimpleNamespace(Accelerator=Engine))
    assert Engine.prepare(Engine.__new__(Engine), "model", "optimizer") == container(("model", "optimizer"))
    assert found == [("model", "bf16"), ("optimizer", "bf16")]


def test_accelerate_gets_a_backend_on_cpus() -> None:
    calls = []

    class State:
        def __init__(self, cpu: bool = False, **kwargs: Any) -> None:
            calls.append((cpu, kwargs))

    default_to_gloo(SimpleNamespace(PartialState=State))
    State()
    State(True, backend="mpi", timeout=3)
    State(backend=None)
    gloo = (False, {"backend": "gloo"})
    assert calls == [gloo, (True, {"backend": "mpi", "timeout": 3}), gloo]


@pytest.fixture
def hooks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ImportHooks]:
    (tmp_path / "hooked_package").mkdir()
    (tmp_path / "hooked_package/__init__.py").write_text("value = 1\n")
    (tmp_path / "hooked_package/inner.py").write_text("value = 2\n")
    monkeypatch.syspath_prepend(tmp_path)
    hooks = ImportHooks()
    yield hooks
    hooks.remove()
    for name in [name for name in sys.modules if name.startswith("hooked_package")]:
        del sys.modules[name]


def test_functions_run_once_at_the_import_of_their_module(hooks: ImportHooks) -> None:
    seen = []
    hooks.after("hooked_package", lambda module: seen.append(("package", module.value)))
    hooks.after("hooked_package.inner", lambda module: seen.append(("inner", module.value)))
    assert seen == [] and "hooked_package" not in sys.modules
    importlib.import_module("hooked_package.inner")
    importlib.import_module("hooked_package.inner")
    assert seen == [("package", 1), ("inner", 2)]
    hooks.after("hooked_package", lambda module: seen.append(("later", module.value)))
    assert seen[-1] == ("later", 1)
    hooks.after("hooked_package.nowhere", lambda module: None)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("hooked_package.nowhere")
