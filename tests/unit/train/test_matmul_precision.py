"""A compiled fp32 run computes in fp32 on GPUs, unless it asks for TF32."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from transformers import TrainingArguments

from shardmake.train.library_patches import kept_matmul_precision
from shardmake.train.sharded_trainer import ShardedTrainer
from tests.unit.train.conftest import tiny_llama


@pytest.fixture(autouse=True)
def accelerate_sees_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Accelerate decides about TF32 as on a GPU, before anything runs on the device."""
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "cuda")
    AcceleratorState._reset_state(reset_partial_state=True)
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = False
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def test_accelerate_turns_tf32_on_by_itself() -> None:
    Accelerator(dynamo_backend="inductor")
    assert torch.backends.cuda.matmul.fp32_precision == "tf32"


@pytest.mark.parametrize("asked", [False, True])
def test_tf32_is_as_before_a_new_accelerator(asked: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32 = asked
    with kept_matmul_precision():
        Accelerator(dynamo_backend="inductor")
    assert torch.backends.cuda.matmul.fp32_precision == ("tf32" if asked else "ieee")
    assert torch.backends.cuda.matmul.allow_tf32 is asked, "torch's two switches agree"


def test_compiled_training_with_trainer_stays_in_fp32(tmp_path: Path) -> None:
    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none", torch_compile=True)
    trainer = ShardedTrainer(model=tiny_llama(), args=arguments)
    assert trainer.accelerator.state.dynamo_plugin.backend.value == "INDUCTOR"
    assert torch.backends.cuda.matmul.fp32_precision == "ieee"
