"""Losses without all logits at once, against the logits of the whole model."""

import json
import math
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import transformers

from shardmake.core.errors import ModelError
from shardmake.evaluate import losses
from shardmake.evaluate.losses import LossPerToken
from shardmake.evaluate.scores import IGNORED, ExampleLoss, PassOutOfMemoryError, as_record, means, plan_passes, score

VOCABULARY = 96
SMALL = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {}, "Gemma2": {"final_logit_softcapping": 0.02}, "Gemma3Text:Gemma3": {"tie_word_embeddings": True},
    "Cohere": {"logit_scale": 0.1}, "Granite": {"logits_scaling": 4.0},
    "Mixtral": {"num_local_experts": 2, "output_router_logits": True}, "GPTNeoX": {},
    "OPT": {"ffn_dim": 48, "word_embed_proj_dim": 16},
    "GPT2:GPT2LMHeadModel": {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64},
    "Bloom": {"n_layer": 2, "n_head": 2},
}  # fmt: skip


def make_network(family: str = "Llama") -> Any:
    prefix, _, name = family.partition(":")
    name = name or prefix
    config = getattr(transformers, f"{prefix}Config")(**SMALL, **FAMILIES[family])
    torch.manual_seed(0)
    model_class = getattr(transformers, name if name.endswith("Model") else f"{name}ForCausalLM")
    return model_class(config).eval()


def make_example(length: int, prompt: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, VOCABULARY, (length,), generator=torch.Generator().manual_seed(length))
    labels = ids.clone()
    labels[:prompt] = IGNORED
    return {"input_ids": ids, "labels": labels, "position_ids": torch.arange(length)}


EXAMPLES = [make_example(length, prompt) for length, prompt in ((30, 5), (12, 11), (25, 1), (7, 7), (30, 20))]
TOKENS = sum(int((example["labels"][1:] != IGNORED).sum()) for example in EXAMPLES)


def check_loss(network: Any, tokens: int = 64) -> None:
    """Compare the summed loss of the examples with that of each one alone, from all its logits."""
    found, total = score(network, EXAMPLES, plan_passes([30, 12, 25, 7, 30], tokens, 1)), 0.0
    for example in EXAMPLES:
        with torch.inference_mode():
            logits = network(input_ids=example["input_ids"][None], use_cache=False).logits[0]
        targets = example["labels"][1:]
        total += torch.nn.functional.cross_entropy(logits[:-1], targets, ignore_index=IGNORED, reduction="sum").item()
    assert sum(one.tokens for one in found) == TOKENS
    assert sum(one.total for one in found) == pytest.approx(total, rel=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_head_in_parts_gives_the_losses_of_the_whole_model(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "_LOGITS", 8 * VOCABULARY)
    logged, network = Mock(wraps=losses._token_scores), make_network(family)
    monkeypatch.setattr(losses, "_token_scores", logged)
    modules = dict(network.named_modules())
    assert LossPerToken(network, EXAMPLES[0]["input_ids"]).in_parts
    check_loss(network)
    sizes = [len(call.args[0]) for call in logged.call_args_list]
    assert sum(sizes) == TOKENS and max(sizes) == 8
    assert dict(network.named_modules()) == modules, "the decoder is back in its place"


def test_a_model_that_scales_by_its_input_gets_all_logits_at_once(caplog: pytest.LogCaptureFixture) -> None:
    """Its head applied to other token ids would give other logits."""

    class ByInput(transformers.LlamaForCausalLM):
        def forward(self, input_ids: Any = None, logits_to_keep: int = 0, **options: Any) -> Any:
            result = super().forward(input_ids, logits_to_keep=logits_to_keep, **options)
            result.logits = result.logits * (1 + input_ids.float().mean())
            return result

    network = ByInput(make_network().config).eval()
    check_loss(network, tokens=1)
    assert caplog.messages == [
        "ByInput: the head cannot be applied in parts. The logits of a pass are computed at once, which takes more "
        "memory."
    ]


@pytest.mark.parametrize("kind", ["no logits_to_keep", "fails"])
def test_code_of_another_shape_gets_all_logits_at_once(kind: str) -> None:
    class Old(transformers.LlamaForCausalLM):
        def forward(self, input_ids: Any = None, **options: Any) -> Any:
            return super().forward(input_ids, **options)

    class Strict(transformers.LlamaForCausalLM):
        def forward(self, input_ids: Any = None, logits_to_keep: int = 0, **options: Any) -> Any:
            if not isinstance(self.model, transformers.LlamaModel):
                raise RuntimeError("not my decoder")
            return super().forward(input_ids, logits_to_keep=logits_to_keep, **options)

    network = (Old if kind == "no logits_to_keep" else Strict)(make_network().config).eval()
    assert not LossPerToken(network, EXAMPLES[0]["input_ids"]).in_parts
    check_loss(network)


def test_a_pass_without_sequences_is_not_counted() -> None:
    network = make_network()
    assert score(network, EXAMPLES, [[2], []]) == score(network, EXAMPLES, [[2]])


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("tokens", [1, 50, 64, 1000])
def test_passes_are_bounded_by_their_tokens(tokens: int, ranks: int) -> None:
    lengths = [30, 12, 25, 7, 30, 8]
    passes = plan_passes(lengths, tokens, ranks)
    assert sorted(row for rows in passes for row in rows) == list(range(6))
    sizes = [len(rows) * max(lengths[row] for row in rows) for rows in passes]
    assert all(size <= tokens or len(rows) == 1 for size, rows in zip(sizes, passes, strict=True))
    longest = [max(lengths[row] for row in rows) for rows in passes]
    assert longest == sorted(longest, reverse=True) and max(map(len, passes)) <= math.ceil(6 / ranks)
    if tokens == 1000:
        assert len(passes) == ranks, "few sequences are shared by all ranks"


FULL = [
    torch.OutOfMemoryError("Tried to allocate 8.00 GiB."),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
]


@pytest.mark.parametrize("raised_on_gpu", FULL)
def test_a_pass_that_does_not_fit_is_named(raised_on_gpu: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "_token_scores", Mock(side_effect=raised_on_gpu))
    with pytest.raises(PassOutOfMemoryError) as raised:
        score(make_network(), EXAMPLES, [[0, 2]])
    assert raised.value.tokens == 60
    with pytest.raises(ModelError, match=r"one sequence of 30 tokens.*evaluation\.backend"):
        score(make_network(), EXAMPLES, [[0]])


def test_another_error_of_a_pass_is_not_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    error = RuntimeError("CUDA error: device-side assert triggered")
    monkeypatch.setattr(losses, "_token_scores", Mock(side_effect=error))
    with pytest.raises(RuntimeError, match="device-side assert"):
        score(make_network(), EXAMPLES, [[0, 2]])


def test_lengths_do_not_hide_behind_the_bucket_borders() -> None:
    found = score(make_network(), [make_example(length, 1) for length in (128, 129)], [[0, 1]])
    assert [(one.up_to, one.tokens) for one in as_record(found).by_length] == [(128, 127), (512, 128)]


def greedy_example(network: Any, prompt: int, answer: int) -> dict[str, torch.Tensor]:
    """Return an example whose answer is what greedy decoding gives."""
    ids = make_example(prompt, 1)["input_ids"][None]
    options = {"do_sample": False, "min_new_tokens": answer, "max_new_tokens": answer}
    whole = network.generate(ids, attention_mask=torch.ones_like(ids), **options)[0]
    labels = whole.clone()
    labels[:prompt] = IGNORED
    return {"input_ids": whole, "labels": labels, "position_ids": torch.arange(len(whole))}


def with_another_token(example: dict[str, torch.Tensor], position: int) -> dict[str, torch.Tensor]:
    changed = {name: tensor.clone() for name, tensor in example.items()}
    other = (int(changed["labels"][position]) + 1) % VOCABULARY
    changed["labels"][position] = changed["input_ids"][position] = other
    return changed


def pack(*examples: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.cat([example[name] for example in examples]) for name in examples[0]}


@pytest.mark.parametrize("is_packed", [False, True])
def test_exact_examples_are_those_that_greedy_decoding_answers(is_packed: bool) -> None:
    network = make_network()
    right, long = greedy_example(network, 6, 9), greedy_example(network, 4, 17)
    wrong = [with_another_token(right, position) for position in (6, 10, 14)]
    examples = [right, *wrong, long]
    rows = [pack(right, wrong[0], wrong[1]), pack(wrong[2], long)] if is_packed else examples
    found = score(network, rows, [list(range(len(rows)))])
    assert len(found) == 5 and as_record(found).exact == pytest.approx(0.4)


def test_exact_examples_are_counted_by_source() -> None:
    network = make_network()
    right = greedy_example(network, 6, 9)
    found = score(network, [right, with_another_token(right, 14), right], [[2, 0], [1]], [2, 1])
    assert [source.exact for source in as_record(found, ["a", "b"]).by_source] == [0.5, 1.0]


@pytest.mark.parametrize("passes", [[[0, 1, 2]], [[2], [1, 0]]])
def test_each_example_has_its_own_loss(passes: list[list[int]]) -> None:
    """Against passes over each example alone; the sequences are packed and of unlike length."""
    network = make_network()
    right, long = greedy_example(network, 6, 9), greedy_example(network, 4, 17)
    wrong = with_another_token(right, 10)
    found = score(network, [pack(right, wrong), long, pack(wrong, long, right)], passes)
    places = [(one.sequence, one.start) for one in found]
    expected = {(0, 0): right, (0, 15): wrong, (1, 0): long, (2, 0): wrong, (2, 15): long, (2, 36): right}
    assert places == [*expected]
    for one in found:
        (alone,) = score(network, [expected[one.sequence, one.start]], [[0]])
        assert one.loss == pytest.approx(alone.loss, rel=1e-5)
        assert (one.tokens, one.exact) == (alone.tokens, alone.exact)
    assert sum(one.exact for one in found) == 4


def of_length(bucket: int, total: float) -> ExampleLoss:
    return ExampleLoss(sequence=0, start=0, source=0, bucket=bucket, tokens=10, total=total, exact=False)


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_an_error(loss: float) -> None:
    with pytest.raises(ModelError, match=r"the model's loss is .* per token.*lower learning_rate"):
        means([of_length(0, loss)])


def test_a_perplexity_that_overflows_is_null() -> None:
    """The exponential of 709.78 is the largest float. The other bucket still has its number."""
    record = as_record([of_length(number, total) for number, total in enumerate((20.0, 7097.0, 7098.0))])
    shown = [one.perplexity_text() for one in record.by_length]
    assert shown == ["7.39", "1.65e+308", "above 1e+308"]
    text = json.dumps(record.as_json(), allow_nan=False)
    assert json.loads(text)["by_length"][2] == {
        "loss": 709.8, "perplexity": None, "tokens": 10, "exact": 0.0, "up_to": 2048,
    }  # fmt: skip
