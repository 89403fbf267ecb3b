"""Cutting and packing: every token once, in order; a pack has the loss of its examples, or its model is refused."""

import itertools
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, MambaConfig, MistralConfig, Qwen3Config
from transformers.modeling_outputs import CausalLMOutput

from shardmake.core.errors import ShardmakeError
from shardmake.data.dataset import IGNORED, Collator, Sequences, check_isolation
from shardmake.data.encode import Tokens
from shardmake.data.packing import fit, fit_pair, pack
from shardmake.run.paths import DATA_RECEIPT
from tests.finished_run import make_data_receipt
from tests.unit.wording import Wording

SIZE: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2}
ATTENTION = {**SIZE, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
CONFIGS = [LlamaConfig(**ATTENTION), Qwen3Config(**ATTENTION), MistralConfig(**ATTENTION, sliding_window=4)]
CPU = torch.device("cpu")


def make_model(config: object, **options: str) -> torch.nn.Module:
    torch.manual_seed(0)
    model: torch.nn.Module = AutoModelForCausalLM.from_config(config, **options)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


@pytest.mark.parametrize("flat", [False, True], ids=["rows", "flat"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.model_type)
def test_models_that_keep_examples_apart_pass(config: LlamaConfig, attention: str, flat: bool) -> None:
    config._attn_implementation = attention
    model = make_model(config).train()
    check_isolation(model, Collator(256, 0, packing=True, flat=flat), CPU)
    assert model.training


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_model_that_does_not_is_refused(dtype: torch.dtype, wording: Wording) -> None:
    model = make_model(MambaConfig(**SIZE)).to(dtype)
    with pytest.raises(ShardmakeError) as error:
        check_isolation(model, Collator(256, 0, packing=True, flat=False), CPU, dtype)
    wording(error.value)
    check_isolation(model, Collator(256, 0, packing=False, flat=False), CPU)


class Influenced(torch.nn.Module):
    """Logits of about 1; the first token of a sequence changes all of them by ``influence``."""

    def __init__(self, influence: float) -> None:
        super().__init__()
        self.influence = influence

    def forward(self, input_ids: torch.Tensor, **_: torch.Tensor) -> CausalLMOutput:
        first = input_ids.flatten()[0].float()
        return CausalLMOutput(logits=torch.ones(*input_ids.shape, 4) + self.influence * first)


@pytest.mark.parametrize(("influence", "dtype", "passes"), [
    (1e-6, torch.float32, True), (0.01, torch.float32, False), (0.01, torch.bfloat16, True),
    (0.1, torch.bfloat16, False), (0.01, torch.float16, False),
])  # fmt: skip
def test_experts_may_round_otherwise_in_16_bits(influence: float, dtype: torch.dtype, passes: bool) -> None:
    with nullcontext() if passes else pytest.raises(ShardmakeError, match="mixes packed examples"):
        check_isolation(Influenced(influence), Collator(256, 0, packing=True, flat=False), CPU, dtype)


def test_the_check_of_a_compiled_model_leaves_the_training_graph_static() -> None:
    """Compiled by the check, the graph would have symbols for batch and length after the first training batch."""
    graphs: list[list[torch.SymInt]] = []

    def record(graph: torch.fx.GraphModule, inputs: list[object]) -> object:
        graphs.append([value for value in inputs if isinstance(value, torch.SymInt)])
        return graph.forward

    torch.compiler.reset()
    collator = Collator(64, 0, packing=True, flat=False)
    model: Any = torch.compile(make_model(LlamaConfig(**ATTENTION)), backend=record)
    check_isolation(model, collator, CPU)
    assert graphs == []
    ids = torch.arange(64) % 60
    batch = collator([{"input_ids": ids, "labels": ids, "position_ids": torch.arange(64)}])
    model(**batch).loss.backward()
    assert graphs and not any(graphs)


tokens = st.lists(st.tuples(st.integers(0, 99), st.booleans()), min_size=1, max_size=40)
examples = st.lists(tokens.map(lambda pairs: ([i for i, _ in pairs], [on for _, on in pairs])), max_size=12)


@given(tokens=examples.filter(bool).map(lambda many: many[0]), length=st.integers(1, 50))
def test_cutting_keeps_the_beginning(tokens: Tokens, length: int) -> None:
    ids, mask = tokens
    [((kept, learned), outcome)] = fit(tokens, length, split=False)
    expected = [False, *mask[1:length]]
    if not any(mask[1:]):
        assert outcome == "dropped_without_loss" and kept == []
    elif not any(expected):
        assert outcome == "dropped_loss_truncated" and kept == []
    else:
        assert (kept, learned) == (ids[:length], expected)
        assert outcome == ("truncated" if len(ids) > length else "whole")


@given(ids=st.lists(st.integers(0, 99), min_size=2, max_size=60), length=st.integers(2, 20))
def test_splitting_loses_no_token_and_leaves_none_alone(ids: list[int], length: int) -> None:
    pieces = fit((ids, [True] * len(ids)), length, split=True)
    joined = [i for (piece, _), _ in pieces for i in piece]
    alone = len(ids) % length == 1 and len(ids) > length
    assert joined == ([*ids[:-1], *ids[-2:]] if alone else ids)
    assert all(len(piece) <= length and mask == [False] + [True] * (len(piece) - 1) for (piece, mask), _ in pieces)


@pytest.mark.parametrize(("length", "answers", "cuts", "expected"), [
    (4, ([3, 4], [3, 5]), True, ([3, 4], [3, 5], "whole")), (3, ([3, 4], [5]), True, ([3], [5], "truncated")),
    (3, ([3, 4], [3, 5]), True, "dropped_loss_truncated"), (2, ([3], [4]), True, "dropped_loss_truncated"),
    (9, ([3], [3]), True, "dropped_without_loss"), (3, ([3, 4], [5]), False, "dropped_too_long"),
    (4, ([3, 4], [5]), False, ([3, 4], [5], "whole")),
])  # fmt: skip
def test_both_answers_are_cut_or_dropped(length: int, answers: Any, cuts: bool, expected: Any) -> None:
    pair = [([1, 2, *answer], [False, False] + [True] * len(answer)) for answer in answers]
    found, outcome = fit_pair(pair, length, cuts=cuts)
    if isinstance(expected, str):
        assert (found, outcome) == ([([], []), ([], [])], expected)
    else:
        kept = [[token for token, on in zip(*one, strict=True) if on] for one in found]
        assert (*kept, outcome) == expected and all(ids[:2] == [1, 2] for ids, _ in found)


def as_dataset(many: list[Tokens]) -> datasets.Dataset:
    features = {"input_ids": datasets.List(datasets.Value("int32")), "loss_mask": datasets.List(datasets.Value("bool"))}
    columns = {"input_ids": [ids for ids, _ in many], "loss_mask": [mask for _, mask in many]}
    return datasets.Dataset.from_dict(columns, features=datasets.Features(features))


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(many=examples.filter(bool), length=st.integers(40, 90))
def test_every_example_is_packed_once_and_whole(many: list[Tokens], length: int, tmp_path: Path) -> None:
    packed = pack(as_dataset(many), length, tmp_path / "packed.arrow")
    found = []
    for row in packed:
        assert len(row["input_ids"]) == len(row["loss_mask"]) == sum(row["seq_lengths"]) <= length
        ends = torch.tensor(row["seq_lengths"]).cumsum(0).tolist()
        for e, n in zip(ends, row["seq_lengths"], strict=True):
            found.append((row["input_ids"][e - n : e], row["loss_mask"][e - n : e]))
    assert sorted(found) == sorted((list(ids), list(mask)) for ids, mask in many)


LENGTHS = (7, 12, 5, 20, 9, 3)
SEQUENCE_LENGTH = 32


@pytest.fixture(scope="module")
def many() -> list[Tokens]:
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(1, 100, (length,), generator=generator).tolist() for length in LENGTHS]
    return [(row, [i > 2 or i == 1 for i in range(len(row))]) for row in ids]


@pytest.fixture(scope="module")
def packed(many: list[Tokens], tmp_path_factory: pytest.TempPathFactory) -> Sequences:
    folder = tmp_path_factory.mktemp("packed")
    pack(as_dataset(many), SEQUENCE_LENGTH, folder / "cache.arrow").save_to_disk(str(folder / "train"))
    make_data_receipt("digest").write(folder / DATA_RECEIPT)
    return Sequences(folder, "train")


def test_rows_of_several_blocks_are_those_that_datasets_reads(tmp_path: Path) -> None:
    rows = [[number] * (1 + number % 3) for number in range(2500)]
    table = {
        "input_ids": rows, "loss_mask": [[True] * len(row) for row in rows], "seq_lengths": [[len(r)] for r in rows],
        "label": [number % 2 == 0 for number in range(2500)],  # of KTO
    }  # fmt: skip
    datasets.Dataset.from_dict(table).save_to_disk(str(tmp_path / "train"), num_shards=2)
    make_data_receipt("digest").write(tmp_path / DATA_RECEIPT)
    found = Sequences(tmp_path, "train")
    assert [found[index]["input_ids"].tolist() for index in range(len(found))] == rows
    assert found[-1]["input_ids"].tolist() == rows[-1] and found.lengths() == [len(row) for row in rows]
    with pytest.raises(IndexError):
        found[2500]


@pytest.fixture(scope="module", params=["sdpa", "eager"])
def model(request: pytest.FixtureRequest) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = ATTENTION | {"vocab_size": 100, "initializer_range": 0.5}
    return LlamaForCausalLM(LlamaConfig(**sizes, attn_implementation=request.param)).eval()


def apart(model: LlamaForCausalLM, many: list[Tokens]) -> torch.Tensor:
    """Summed loss of every example run on its own."""
    total = torch.zeros(())
    for ids, mask in many:
        input_ids = torch.tensor([ids])
        labels = input_ids.where(torch.tensor([mask]), torch.tensor(IGNORED))
        total = total + model(input_ids=input_ids, labels=labels).loss * sum(mask)
    return total


@pytest.mark.parametrize("flat", [False, True], ids=["rows", "flat"])
def test_a_pack_is_its_examples(model: LlamaForCausalLM, packed: Sequences, many: list[Tokens], flat: bool) -> None:
    assert len(packed) < len(many)
    expected = torch.autograd.grad(apart(model, many), list(model.parameters()))
    batch = Collator(SEQUENCE_LENGTH, pad_token_id=0, packing=True, flat=flat)([packed[i] for i in range(len(packed))])
    total = model(**batch).loss * (batch["labels"] != IGNORED).sum()
    torch.testing.assert_close(total, apart(model, many))
    torch.testing.assert_close(torch.autograd.grad(total, list(model.parameters())), expected, rtol=1e-4, atol=1e-4)


def test_with_a_cache_examples_see_each_other(model: LlamaForCausalLM, packed: Sequences, many: list[Tokens]) -> None:
    """The reason for use_cache=False in a batch; when this fails, transformers no longer needs it."""
    batch = Collator(SEQUENCE_LENGTH, pad_token_id=0, packing=True, flat=False)([packed[i] for i in range(len(packed))])
    total = model(**{**batch, "use_cache": True}).loss * (batch["labels"] != IGNORED).sum()
    assert abs(total - apart(model, many)) > 1


def test_batches_have_a_fixed_length(packed: Sequences) -> None:
    items = [packed[0], packed[1]]
    rows = Collator(SEQUENCE_LENGTH, 9, packing=True, flat=False)(items)
    shapes = {key: value.shape for key, value in rows.items() if key != "use_cache"}
    assert shapes == dict.fromkeys(("input_ids", "labels", "position_ids"), (2, SEQUENCE_LENGTH))
    flat = Collator(SEQUENCE_LENGTH, 9, packing=True, flat=True)(items)
    assert flat["input_ids"].tolist() == [rows["input_ids"].flatten().tolist()]
    bounds = flat["cu_seq_lens_q"].tolist()
    assert [flat["position_ids"][0, i].item() for i in bounds[:-1]] == [0] * (len(bounds) - 1)
    longest = max(b - a for a, b in itertools.pairwise(bounds))
    assert (bounds[-1], flat["max_length_k"]) == (2 * SEQUENCE_LENGTH, longest)


def test_unpacked_batches_are_padded_on_the_right() -> None:
    rows = [([1, 2, 3], [IGNORED, 2, 3]), ([4], [IGNORED])]
    items = [{"input_ids": torch.tensor(ids), "labels": torch.tensor(labels)} for ids, labels in rows]
    batch = Collator(4, pad_token_id=0, packing=False, flat=False)(items)
    assert {key: value.tolist() for key, value in batch.items()} == {
        "input_ids": [[1, 2, 3, 0], [4, 0, 0, 0]],
        "labels": [[IGNORED, 2, 3, IGNORED], [IGNORED] * 4],
        "attention_mask": [[1, 1, 1, 0], [1, 0, 0, 0]],
    }
