"""Checkpoints from real training, made once per test session, and the expected weights."""

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from shardmake.checkpoint.formats.dtypes import Target
from shardmake.checkpoint.formats.registry import read_checkpoint
from shardmake.consolidate import loading, merge_plan, peft_check, verify
from shardmake.consolidate.layout import plan_shards
from shardmake.consolidate.loading import load
from shardmake.consolidate.writer import ShardWriter
from shardmake.core.units import parse_size

HERE = Path(__file__).parent
ZERO = {
    1: ("zero2-fp16", "zero3-fp16", "zero2-bf16-lora-nobase"),
    2: (
        "zero1-frozen", "zero1-bf16-accumfp32", "zero1-bf16-masters", "zero2-bf16-frozen-universal",
        "zero2-bf16-masters-tied", "zero2-roundrobin-tied", "zero3-bf16-tied-frozen-universal",
        "zero3-subgroups-resnet", "zero3-lora",
    ),
    3: ("zero1-bf16", "zero3-tied"), 4: ("zero2-bf16-tied-frozen", "zero3-bf16-subgroups"),
}  # fmt: skip
FSDP = {
    2: ("trainer-tied", "tied-bf16", "optim", "perrank-tied"), 3: ("plain", "flat-bf16", "fsdp1", "verl-tied"),
    4: ("tp",),
}  # fmt: skip
SHAPE = {
    "vocab_size": 101, "hidden_size": 24, "intermediate_size": 52, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
"""Sizes of a small Llama."""
TORCH = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def check_loading_in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the checks with transformers and PEFT in the test process, which saves seconds per merge.

    Tests that start the command, and those of memory and kills, use the separate process.
    """

    for module in (merge_plan, verify, loading):
        monkeypatch.setattr(
            module, "check_loading", lambda folder, code=False, *more, **named: load(folder, code, *more, **named)
        )
    monkeypatch.setattr(peft_check, "run_module", lambda _, request, *__: peft_check.answer(request))


@functools.cache
def trained(root: Path, script: str, world: int) -> Path:
    """Train the variants of ``script`` (``zero`` or ``fsdp``) at this world size once; return their folder."""
    out = root / f"{script}-{world}"
    variants = (ZERO if script == "zero" else FSDP)[world]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world}"]
    done = subprocess.run(
        [*launcher, HERE / "consolidate_train.py", out, *variants], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return out


def expected_weights(variant: Path, target: Target = "keep") -> dict[str, torch.Tensor]:
    """Return the weights as the ranks gathered them in training, in the requested type."""
    tensors = load_file(variant / "truth.safetensors")
    if target == "keep":
        return tensors
    return {name: t.to(TORCH[target]) if t.is_floating_point() else t for name, t in tensors.items()}


def merged(checkpoint: Path, out: Path, target: Target = "keep", size: str = "20KB") -> dict[str, torch.Tensor]:
    """Merge a checkpoint without the verification; return the weights."""
    contents = read_checkpoint(checkpoint, target)
    stored = [tensor for name, tensor in contents.tensors.items() if name not in contents.aliases]
    writer = ShardWriter(plan_shards(stored, target, parse_size(size)), out)
    writer.write(workers=2)
    writer.check_sums()
    return load_weights(out)


def load_weights(model: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(model.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def assert_equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    """Compare names, types, shapes and bits."""
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype, name
        assert tensor.shape == theirs[name].shape, name
        assert torch.equal(tensor, theirs[name]), name
