"""Attention varlen gives what eager attention gives; its operator runs on the CPU by a reference here."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import LlamaConfig

from shardmake.data import varlen
from shardmake.data.dataset import IGNORED, Collator
from shardmake.data.varlen import KernelLimitError, plain_varlen, register_cpu_kernel, register_varlen, varlen_attention
from tests.unit.data.test_packing import CONFIGS, make_model

LENGTHS = [[7, 12, 1], [9], [3, 4]]
"""Tokens of the examples in each sequence of a batch."""


def plain_backward(grad: torch.Tensor, q: Any, k: Any, v: Any, out: Any, lse: Any, *rest: Any) -> Any:
    """Differentiate the reference in a thread of its own: in an operator's kernel autograd is off."""
    cu_q, cu_k, max_q, max_k, causal, _, scale, window = rest
    inputs = [tensor.detach().requires_grad_() for tensor in (q, k, v)]

    def differentiate() -> Any:
        again = plain_varlen(*inputs, cu_q, cu_k, max_q, max_k, causal, scale, window)[0]
        return torch.autograd.grad(again, inputs, grad)

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(differentiate).result()


@pytest.fixture(autouse=True, scope="module")
def kernel() -> None:
    register_varlen()
    register_cpu_kernel()
    torch.library.register_kernel("torch_attn::_varlen_attn_backward", "cpu", plain_backward)


@pytest.fixture(params=CONFIGS, ids=lambda config: config.model_type)
def model(request: pytest.FixtureRequest) -> Any:
    return make_model(request.param, attn_implementation="varlen")


def make_items() -> list[dict[str, torch.Tensor]]:
    """Return sequences of the `LENGTHS`; the first token of an example has no label."""
    torch.manual_seed(1)
    items = []
    for lengths in LENGTHS:
        ids = torch.randint(1, 64, (sum(lengths),))
        positions = torch.cat([torch.arange(length) for length in lengths])
        items.append({"input_ids": ids, "labels": ids.where(positions > 0, IGNORED), "position_ids": positions})
    return items


def loss_and_gradients(model: Any, batches: list[dict[str, Any]]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    total = sum(model(**batch).loss * (batch["labels"][:, 1:] != IGNORED).sum() for batch in batches)
    assert isinstance(total, torch.Tensor)
    return total.detach(), list(torch.autograd.grad(total, list(model.parameters())))


def examples_alone() -> list[dict[str, Any]]:
    """Return each example of two tokens or more as a batch."""
    alone = []
    for item, lengths in zip(make_items(), LENGTHS, strict=True):
        parts = item["input_ids"].split(lengths)
        alone += [{"input_ids": ids[None], "labels": ids[None].clone()} for ids in parts if len(ids) > 1]
    return alone


@pytest.mark.parametrize("flat", [True, False], ids=["a flat batch of examples", "padded rows"])
def test_loss_and_gradients_are_those_of_eager_attention(model: Any, flat: bool) -> None:
    items = make_items() if flat else [{**item, "labels": item["input_ids"]} for item in make_items()]
    batch = Collator(24, pad_token_id=0, packing=flat, flat=flat)(items)
    assert batch["input_ids"].shape == ((1, 3 * 24) if flat else (3, 24))
    found = loss_and_gradients(model, [batch])
    model.set_attn_implementation("eager")
    expected = loss_and_gradients(model, examples_alone() if flat else [batch])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def tensors(width: int = 16, keys: int = 6) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.randn(1, 4, 6, width), torch.randn(1, 2, keys, width), torch.randn(1, 2, keys, width)


def test_values_narrower_than_keys_are_padded() -> None:
    """Latent attention (DeepSeek) has them."""
    query, key, value = tensors()
    out, _ = varlen_attention(torch.nn.Module(), query, key, value[..., :8], None, scaling=0.3)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, key, value[..., :8], is_causal=True, scale=0.3, enable_gqa=True
    )
    torch.testing.assert_close(out, expected.transpose(1, 2))


def test_a_kernel_without_the_argument_for_grouped_heads_gets_them_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of torch 2.11."""
    shapes, kernel = [], cast(Any, plain_varlen)

    def older(q: Any, k: Any, v: Any, *bounds: Any, scale: float | None, window_size: tuple[int, int]) -> Any:
        shapes.append((q.shape[1], k.shape[1], v.shape[1]))
        return kernel(q, k, v, *bounds, scale=scale, window_size=list(window_size))[0]

    query, key, value = tensors()
    expected, _ = varlen_attention(torch.nn.Module(), query, key, value, None)
    monkeypatch.setattr(varlen, "varlen_attn", older)
    monkeypatch.setattr(varlen, "_NAMES_GROUPS", False)
    torch.testing.assert_close(varlen_attention(torch.nn.Module(), query, key, value, None)[0], expected)
    assert shapes == [(4, 2, 2)]


def test_queries_in_fp32_are_computed_in_the_16_bits_of_the_values() -> None:
    query, key, value = tensors()
    assert varlen_attention(torch.nn.Module(), query, key, value.bfloat16(), None)[0].dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        assert varlen_attention(torch.nn.Module(), query, key, value, None)[0].dtype == torch.bfloat16
    module = torch.nn.Module()
    module.config = LlamaConfig(dtype="float16")  # 4-bit layers return fp32 if their input is
    assert varlen_attention(module, query, key, value, None)[0].dtype == torch.float16


def test_torch_s_own_shapes_of_the_backward_pass_fit_grouped_heads_in_16_bits() -> None:
    """Fake tensors on the CPU: torch computes the shapes as for a GPU, and runs no kernel."""
    with FakeTensorMode():
        query, key, value = (torch.empty(1, heads, 6, 16, dtype=torch.bfloat16) for heads in (4, 2, 2))
        inputs = [tensor.requires_grad_() for tensor in (query, key, value)]
        bounds = torch.empty(3, dtype=torch.int32)
        out, _ = varlen_attention(torch.nn.Module(), query, key, value, None, cu_seq_lens_q=bounds, max_length_q=4)
        assert out.shape == (1, 6, 4, 16)
        gradients = torch.autograd.grad(out.sum(), inputs)
    assert [(g.shape, g.dtype) for g in gradients] == [(t.shape, torch.bfloat16) for t in inputs]


@pytest.mark.parametrize(("changes", "sentence"), [
    ({"dropout": 0.1}, "has dropout in its attention"),
    ({"softcap": 50.0}, r"changes the attention scores \(softcap\)"),
    ({"s_aux": torch.zeros(4)}, r"changes the attention scores \(s_aux\)"),
    ({"attention_mask": torch.zeros(1, 1, 6, 6)}, "makes an attention mask of its own"),
    ({"is_causal": False}, "has attention to later tokens"), ({"keys": 9}, "attends to more keys"),
    ({"width": 20}, "has heads of 20 numbers, and the kernel takes multiples of 8 up to 256"),
    ({"width": 264}, "has heads of 264 numbers"),
], ids=lambda value: "-".join(value) if isinstance(value, dict) else "")  # fmt: skip
def test_what_the_kernel_does_not_do_is_refused(changes: dict[str, Any], sentence: str) -> None:
    sizes = {name: changes.pop(name) for name in ("keys", "width") if name in changes}
    with pytest.raises(KernelLimitError, match=sentence):
        varlen_attention(torch.nn.Module(), *tensors(**sizes), changes.pop("attention_mask", None), **changes)
