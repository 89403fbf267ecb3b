"""Forward passes of every attention kernel and loss on fake CUDA tensors: devices, types and sizes, but no kernel.

A fake tensor has no memory, and its operators compute shapes only. Backward passes on fake CUDA tensors need a driver;
`tests/unit/data/test_varlen.py` runs them on the CPU.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import triton
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen3Config

from shardmake.config.attention import FLASH_KERNELS
from shardmake.data.dataset import Collator
from shardmake.data.varlen import register_varlen

LENGTH, ROWS = 512, 2
SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
CONFIGS = [LlamaConfig(**SIZES), Qwen3Config(**SIZES), MistralConfig(**SIZES, sliding_window=64)]
EXAMPLES = [300, 150]


VARLEN = torch.ops.torch_attn._varlen_attn.default


class Recorder(TorchDispatchMode):
    """Records the largest number of elements of any result, and the data types that varlen computes in."""

    def __init__(self) -> None:
        super().__init__()
        self.largest, self.varlen_types = 0, set[torch.dtype]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator and look at its results."""
        result = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.largest = max([self.largest, *(tensor.numel() for tensor in tensors)])
        if func is VARLEN:
            self.varlen_types |= {tensor.dtype for tensor in args[:3]}
            assert {tensor.device.type for tensor in args[:5]} == {"cuda"}
        return result


@contextmanager
def autocast() -> Iterator[None]:
    """Turn CUDA's autocast on; `torch.autocast` turns itself off without a GPU."""
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    torch.set_autocast_enabled("cuda", True)
    yield
    torch.set_autocast_enabled("cuda", False)
    torch.clear_autocast_cache()


def make_batch(attention: str, *, packing: bool) -> dict[str, Any]:
    """Return a batch as the training's collator makes it."""
    ids = torch.ones(sum(EXAMPLES), dtype=torch.long)
    positions = torch.cat([torch.arange(length) for length in EXAMPLES])
    item = {"input_ids": ids, "labels": ids, "position_ids": positions}
    return Collator(LENGTH, 0, packing, flat=packing and attention in FLASH_KERNELS)([item] * ROWS)


def run(config: Any, attention: str, dtype: torch.dtype, batch: dict[str, Any]) -> tuple[Any, Recorder]:
    """Return the output of a forward pass in training with fp32 or 16-bit weights, and what ran."""
    register_varlen()
    mode, recorder = FakeTensorMode(allow_non_fake_inputs=True), Recorder()
    with mode:
        with torch.device("cuda"):
            model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=dtype)
        inputs = {
            name: mode.from_tensor(value).to("cuda") if isinstance(value, torch.Tensor) else value
            for name, value in batch.items()
        }
    with mode, recorder, autocast() if dtype == torch.float32 else nullcontext():
        output = model.train()(**inputs)
    return output, recorder


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.model_type)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "autocast"])
@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("attention", ["varlen", "sdpa", "eager"])
def test_every_kernel_runs_forward(config: Any, attention: str, packing: bool, dtype: torch.dtype) -> None:
    """Only varlen does without a mask or scores of sequence length squared."""
    output, recorder = run(config, attention, dtype, make_batch(attention, packing=packing))
    assert output.loss.device.type == "cuda" and output.loss.shape == ()
    assert output.logits.numel() == ROWS * LENGTH * SIZES["vocab_size"]
    assert recorder.varlen_types == ({torch.bfloat16} if attention == "varlen" else set())
    assert (recorder.largest < LENGTH * LENGTH) == (attention == "varlen")


@contextmanager
def recorded_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Record Triton's kernels instead of compiling them; each must get its tensors on the GPU."""
    launched: list[str] = []

    def record(self: Any, *args: Any, **kwargs: Any) -> None:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        assert tensors and {tensor.device.type for tensor in tensors} == {"cuda"}
        launched.append(self.__name__)

    with monkeypatch.context() as patch:
        patch.setattr(triton.runtime.jit.JITFunction, "run", record)
        patch.setattr(torch.Tensor, "item", lambda tensor: 1)  # fake labels have no number
        patch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        for name in ("_exchange_device", "_maybe_exchange_device"):  # they ask the driver
            patch.setattr(torch.cuda, name, lambda index: 0)
        yield launched


@pytest.mark.parametrize("attention", ["varlen", "sdpa"])
def test_the_fused_loss_runs_forward_up_to_its_kernels(attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from liger_kernel.transformers import apply_liger_kernel_to_llama
    from transformers.models.llama import modeling_llama

    for name in ("LlamaMLP", "LlamaRMSNorm", "apply_rotary_pos_emb"):
        monkeypatch.setattr(modeling_llama, name, getattr(modeling_llama, name))  # restored after the test
    monkeypatch.setattr(modeling_llama.LlamaForCausalLM, "forward", modeling_llama.LlamaForCausalLM.forward)
    apply_liger_kernel_to_llama()
    with recorded_kernels(monkeypatch) as launched:
        output, recorder = run(CONFIGS[0], attention, torch.bfloat16, make_batch(attention, packing=True))
    assert output.loss.device.type == "cuda" and output.logits is None
    assert {"liger_cross_entropy_kernel", "_rms_norm_forward_kernel"} <= set(launched)
    assert bool(recorder.varlen_types) == (attention == "varlen")
