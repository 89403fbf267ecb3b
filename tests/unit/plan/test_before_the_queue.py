"""`shardmake plan` ends with one message for everything that can be known before a job is queued."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardmake import cli
from tests.plan_in_process import plan_in_this_process
from tests.unit.data.test_encode import MARKED, make_tokenizer
from tests.unit.plan.test_abilities import BLOOM, GPT2
from tests.unit.plans import LLAMA

Values = dict[str, Any]

TEXTS = [{"text": "a b c"}, {"text": "d e f g"}] * 3
CHAT = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b c"}]}] * 4
CLUSTER = {"executor": "local", "processes_per_node": 2, "cpus_per_node": 2, "memory_gib_per_node": 4}


def lines(rows: list[Any]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.fixture
def plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """Plan a run of the model ``config`` and the rows of ``data`` in this process; return status and output."""

    def run(config: Values, data: str, template: str | None, settings: Values) -> tuple[int, str]:
        make_tokenizer(template).save_pretrained("base")
        Path("base/config.json").write_text(json.dumps(config))
        Path("train.jsonl").write_text(data)
        values = {
            "model": "./base", "data": {"train": "train.jsonl"}, "sequence_length": 16, "global_batch_size": 2,
            "micro_batch_size": 1, "max_steps": 2, "learning_rate": 1e-3, "strategy": "ddp",
            "gradient_checkpointing": False, **settings,
        }  # fmt: skip
        Path("cluster.json").write_text(json.dumps(CLUSTER))
        Path("config.json").write_text(json.dumps({"cluster": "cluster.json", "runs": {"ours": values}}))
        monkeypatch.setattr(sys, "argv", ["shardmake", "plan", "ours", "--config", "config.json"])
        with pytest.raises(SystemExit) as end:
            cli.main()
        return int(end.value.code or 0), "".join(capfd.readouterr())

    monkeypatch.chdir(tmp_path)
    plan_in_this_process(monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return run


BROKEN_LIST = [{"messages": "hello"}]
SHORT = [{"role": "user", "content": "a"}]
Case = tuple[Values, str, str | None, Values, str]
REFUSED: dict[str, Case] = {
    "no template": (LLAMA, lines(CHAT), None, {}, "has no chat template"),
    "no list": (LLAMA, lines(BROKEN_LIST * 2), MARKED, {}, "line 1"),
    "empty": (LLAMA, "\n", MARKED, {}, "No examples in train.jsonl"),
    "one row": (LLAMA, lines(TEXTS[:1]), MARKED, {}, "has one example, and evaluation needs another"),
    "format": (LLAMA, lines(TEXTS), MARKED, {"data": {"train": "train.jsonl", "format": "chat"}}, "line 1"),
    "evaluation": (LLAMA, lines(TEXTS), MARKED, {"data": {"train": "train.jsonl", "eval": "./train.jsonl"}},
        "has the examples of data.train"),
    "columns": (LLAMA, lines([{"body": "a"}] * 2), MARKED, {}, "unknown format. The columns are"),
    "nothing to learn": (LLAMA, lines([{"messages": SHORT}] * 2), MARKED, {}, "has a token to learn"),
    "bloom": (BLOOM, lines(TEXTS), MARKED, {}, "packing: true cannot be used: BloomForCausalLM"),
    "protocol": (LLAMA, lines(TEXTS), MARKED, {"push": {"to": "s4://x/y"}}, "does not know the protocol s4://"),
    "folder": (LLAMA, lines(TEXTS), MARKED, {"push": {"to": "file:/proc/x"}}, "no folder can be created in /proc"),
    "no learning": (LLAMA, lines(TEXTS), MARKED, {"max_steps": None, "epochs": 1, "global_batch_size": 64},
        "training learns nothing"),
    "seed": (LLAMA, lines(TEXTS), MARKED, {"seed": -1}, "seed"),
    "fsdp": (LLAMA, lines(TEXTS), MARKED, {"strategy": "fsdp"}, "strategy: fsdp needs GPUs"),
    "prompt": (LLAMA, lines(TEXTS), "{{ raise_exception('no') }}", {"evaluation": {"prompts": ["a"]}},
        "evaluation.prompts"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED.values(), ids=list(REFUSED))
def test_a_mistake_is_refused_at_plan(case: Case, plan: Callable[..., tuple[int, str]]) -> None:
    *inputs, sentence = case
    status, printed = plan(*inputs)
    assert status == 2, printed
    assert sentence in printed and "Traceback" not in printed, printed
    assert not Path("runs/ours/plan/plan.json").exists()


ACCEPTED: dict[str, tuple[Values, Values]] = {
    "llama": (LLAMA, {}), "gpt2 lora": (GPT2, {"method": "lora"}), "bloom": (BLOOM, {"packing": False}),
}  # fmt: skip


@pytest.mark.parametrize(("config", "settings"), ACCEPTED.values(), ids=list(ACCEPTED))
def test_a_sound_run_is_planned(config: Values, settings: Values, plan: Callable[..., tuple[int, str]]) -> None:
    status, printed = plan(config, lines(CHAT), MARKED, settings)
    assert status == 0, printed
    assert "max_steps: 2 is 2 optimizer steps of 2 sequences" in printed
    assert "only 2 optimizer steps. Set max_steps: 10 or more." in printed
    assert Path("runs/ours/plan/plan.json").is_file()
