import json
from pathlib import Path

import pytest

from shardmake.commands.estimate import EXPLANATIONS, EstimateRequest, estimate, print_table
from shardmake.core.errors import ShardmakeError

CONFIG = {
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "vocab_size": 32000,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model") / "config.json"
    path.write_text(json.dumps(CONFIG))
    return str(path)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_the_second_answer_comes_from_the_cache_and_is_equal(model: str, tmp_path: Path) -> None:
    first = estimate(EstimateRequest(model, strategies=["zero3"]))
    assert len(list(tmp_path.rglob("estimate-*.json"))) == 2
    assert estimate(EstimateRequest(model, strategies=["zero3"])) == first


def test_every_strategy_with_the_documented_keys(model: str) -> None:
    answer = json.loads(json.dumps(estimate(EstimateRequest(model, gradient_checkpointing=True)).as_json()))
    assert [c["strategy"] for c in answer["candidates"]][:3] == ["ddp", "zero1", "zero2"]
    for candidate in answer["candidates"]:
        assert set(candidate) == {
            "strategy", "gradient_checkpointing", "nodes", "gpu", "host", "nvme", "disk", "fits", "reason",
            "step_seconds",
        }  # fmt: skip
        assert set(candidate["gpu"]) == {"allocated", "reserved", "wanted", "device", "phase", "terms"}


def test_every_term_is_explained(model: str) -> None:
    for row in estimate(EstimateRequest(model, method="lora")).rows + estimate(EstimateRequest(model)).rows:
        assert set(row.memory.gpu.terms) <= set(EXPLANATIONS)


def test_table_and_explanation_are_printed(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    print_table(estimate(EstimateRequest(model, strategies=["zero3"])), explain=True)
    shown = capsys.readouterr().out
    assert "zero3" in shown
    assert "logits and loss" in shown


def test_when_nothing_fits_the_smallest_change_is_said(model: str) -> None:
    answer = estimate(EstimateRequest(model, gpu_memory=3.0, gpus_per_node=1, sequence_length=8192, micro_batch=1))
    assert not any(row.fits for row in answer.rows)
    assert answer.advice is not None
    assert "--sequence-length" in answer.advice


BAD = [
    (EstimateRequest("x", strategies=["zero4"]), r"no strategy 'zero4'.*Did you mean 'zero"),
    (EstimateRequest("x", gpu_memory=81920), "If that were MiB, write 80"),
    (EstimateRequest("x", gpu_memory=0), "memory of one GPU in GiB"),
    (EstimateRequest("x", sequence_length=0), "--sequence-length is 0"),
    (EstimateRequest("x", accelerator="h1000"), r"no accelerator 'h1000'.*Did you mean 'h100"),
]


@pytest.mark.parametrize(("question", "sentence"), BAD, ids=str)
def test_bad_options_are_refused(question: EstimateRequest, sentence: str, model: str) -> None:
    with pytest.raises(ShardmakeError, match=sentence):
        estimate(EstimateRequest(**{**vars(question), "model": model}))
