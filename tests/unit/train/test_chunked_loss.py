"""The chunked loss equals the plain one, with shifted and unshifted labels, and never holds all logits."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, GemmaConfig, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from shardmake.train.load_model import token_losses, use_chunked_loss

SIZE = {
    "vocab_size": 512, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip


@pytest.fixture(autouse=True, params=["torch's", "ours"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's from 2.13 on; ours stands in before."""
    if request.param == "ours":
        monkeypatch.delattr(torch.nn.functional, "linear_cross_entropy", raising=False)


def make_models(config: Any) -> tuple[Any, Any]:
    """Return a model with the plain loss, and an equal one with the chunked loss."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(AutoModelForCausalLM.from_config(config))
    use_chunked_loss(models[1])
    return models[0], models[1]


def batch(*, shifted: bool) -> dict[str, Any]:
    torch.manual_seed(1)
    ids = torch.randint(0, 512, (3, 40))
    labels = ids.masked_fill(torch.rand(3, 40) < 0.3, -100)
    more = {"shift_labels": labels.roll(-1, 1)} if shifted else {}
    return {"input_ids": ids, "labels": labels, **more}


@pytest.mark.parametrize("kind", [LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config, GemmaConfig])
@pytest.mark.parametrize("tokens", [None, 50], ids=["mean", "of the global batch"])
def test_the_loss_and_its_gradients_are_the_same(kind: Any, tokens: int | None) -> None:
    plain, chunked = make_models(kind(**SIZE))
    for shifted in (False, True):
        losses = []
        for model in (plain, chunked):
            model.zero_grad()
            loss = model(**batch(shifted=shifted), **({"num_items_in_batch": tokens} if tokens else {})).loss
            loss.backward()
            losses.append(loss.detach())
        torch.testing.assert_close(losses[1], losses[0], atol=1e-5, rtol=1e-5)
        for (name, one), (_, other) in zip(plain.named_parameters(), chunked.named_parameters(), strict=True):
            torch.testing.assert_close(other.grad, one.grad, atol=1e-5, rtol=1e-4, msg=name)


def test_the_sum_of_16_bit_losses_has_more_than_8_bits_and_without_labels_there_are_logits() -> None:
    plain, chunked = make_models(LlamaConfig(**SIZE))
    inputs = batch(shifted=False)
    exact = plain(**inputs).loss
    with torch.autocast("cpu", torch.bfloat16):
        loss = chunked(**inputs).loss
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(exact.item(), rel=1e-3)
    ids = inputs["input_ids"]
    assert torch.equal(chunked(input_ids=ids).logits, plain(input_ids=ids).logits)
    assert chunked(input_ids=ids, labels=ids).logits is None


def test_a_frozen_head_in_16_bits_gets_no_gradient_and_the_rows_that_of_the_plain_loss() -> None:
    """As under LoRA: the head is frozen. The types are those of autocast."""
    torch.manual_seed(2)
    hidden, head = torch.randn(1, 40, 32, dtype=torch.bfloat16), torch.randn(512, 32, dtype=torch.bfloat16)
    targets = torch.randint(0, 512, (1, 40)).masked_fill(torch.rand(1, 40) < 0.3, -100)
    scale = torch.rand(40, dtype=torch.bfloat16)
    for rows in (hidden.requires_grad_(), exact := hidden.detach().float().requires_grad_()):
        losses = token_losses(rows, head.to(rows.dtype), targets)
        assert losses.dtype == rows.dtype
        (losses * scale).float().sum().backward()
    plain = torch.nn.functional.cross_entropy(exact[0] @ head.float().T, targets[0], reduction="none")
    expected = torch.autograd.grad((plain * scale).sum(), exact)[0]
    torch.testing.assert_close(exact.grad, expected, atol=1e-4, rtol=1e-4)
    assert hidden.grad is not None
    torch.testing.assert_close(hidden.grad.float(), expected, atol=0.05, rtol=0.05)


class _Largest(TorchDispatchMode):
    """Finds the elements of the largest tensor that any operator returns."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = (leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))
        self.numel = max(self.numel, *sizes, 0)
        return result


def test_logits_are_never_whole() -> None:
    """In both passes; the plain loss makes them."""
    tokens, vocabulary = 512, 4096
    ids = torch.randint(0, vocabulary, (1, tokens))
    largest = []
    for model in make_models(LlamaConfig(**SIZE | {"vocab_size": vocabulary})):
        with _Largest() as made:
            model(input_ids=ids, labels=ids).loss.backward()
        largest.append(made.numel)
    plain, chunked = largest
    assert plain >= tokens * vocabulary and chunked <= tokens * vocabulary // 8
