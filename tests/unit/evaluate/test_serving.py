"""The smoke test of serving. vLLM is not here: a package of its name with the two classes stands in its place."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from shardmake.core.errors import ConfigError, ModelError
from shardmake.evaluate.backends import Machine
from shardmake.evaluate.serving import as_record, check_serving, serve
from shardmake.evaluate.stage import _answer
from tests.finished_run import make_run

RUN = make_run(evaluation={"serve": "vllm", "max_new_tokens": 4})
PROMPTS = [[1, 2, 3], [4, 5]]
MACHINE = Machine(gpus=0, gpu_memory=0, host_memory=1 << 30)
STAND_IN = """
import sys
from types import SimpleNamespace
from transformers import AutoModelForCausalLM
import torch

class SamplingParams(SimpleNamespace):
    pass

class LLM:
    def __init__(self, model, trust_remote_code, tensor_parallel_size, seed):
        print("gpus:", tensor_parallel_size)
        self.network = AutoModelForCausalLM.from_pretrained(model)

    def generate(self, prompts, sampling):
        assert sampling.temperature == 0.0
        return [self.answer(prompt["prompt_token_ids"], sampling.max_tokens) for prompt in prompts]

    def answer(self, ids, room):
        out = self.network.generate(torch.tensor([ids]), max_new_tokens=room, do_sample=False, pad_token_id=0)
        return SimpleNamespace(outputs=[SimpleNamespace(token_ids=tuple(out[0, len(ids):CUT].tolist()))])
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def install(monkeypatch: pytest.MonkeyPatch, folder: Path, cut: str = "") -> None:
    folder.mkdir()
    (folder / "vllm.py").write_text(STAND_IN.replace("CUT", cut))
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.syspath_prepend(str(folder))


def test_the_answers_are_compared_with_those_of_transformers(
    model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install(monkeypatch, tmp_path / "packages")
    check_serving(RUN.evaluation)
    answers = serve(RUN, model, PROMPTS, MACHINE)
    network = LlamaForCausalLM.from_pretrained(model)
    expected = [_answer(network, prompt, 4) for prompt in PROMPTS]
    assert [len(answer) for answer in answers] == [4, 4]
    assert as_record("vllm", answers, expected).equal == 2
    assert as_record("vllm", [answers[0], [0]], expected).equal == 1


def test_a_model_that_cannot_be_served_ends_the_stage(
    model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install(monkeypatch, tmp_path / "packages", cut="len(ids)")
    with pytest.raises(ModelError, match="answers 2 of 2 prompts with nothing"):
        serve(RUN, model, PROMPTS, MACHINE)
    (model / "config.json").write_text('{"model_type": "llama", "architectures": ["Unknown"], "hidden_size": "wide"}')
    with pytest.raises(ModelError, match=r"(?s)^The final model cannot be served: .*hidden_size.*evaluation\.serve\.$"):
        serve(RUN, model, PROMPTS, MACHINE)


def test_a_package_that_is_missing_is_named_before_the_queue() -> None:
    check_serving(make_run().evaluation)
    with pytest.raises(ConfigError, match=r"^evaluation\.serve: the package vllm is not installed"):
        check_serving(RUN.evaluation)
