"""A base with new tokens, trained on two ranks: the merged model has their rows, trained, and the others as they were."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from shardmake.config.models import Strategy
from shardmake.consolidate.merge import consolidate
from shardmake.run.paths import RunDir
from tests.workflow.checkout import Checkout
from tests.workflow.forked import Forked
from tests.workflow.test_freeze import train

pytestmark = pytest.mark.training
NEW = ["<call>", "<never>"]
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture(scope="module")
def extended(forked: Forked, tmp_path_factory: pytest.TempPathFactory) -> Forked:
    """Trainings of the demo's base with a head of its own and new tokens, one of which is in the data."""
    demo, root = forked.checkout.root / "resources/demo", tmp_path_factory.mktemp("tokens")
    plain = AutoModelForCausalLM.from_pretrained(demo / "base")
    plain.config.tie_word_embeddings = False
    plain.lm_head.weight = torch.nn.Parameter(plain.lm_head.weight * 0.9)
    tokenizer = AutoTokenizer.from_pretrained(demo / "base")
    plain.resize_token_embeddings(len(tokenizer))  # the demo's base has rows of padding
    plain.save_pretrained(root / "inputs/base")
    tokenizer.save_pretrained(root / "inputs/base")
    for name in ("train.jsonl", "eval.jsonl"):
        (root / "inputs" / name).write_text((demo / name).read_text().replace(" the ", "<call>"))
    checkout = Checkout.create(root / "checkout", root / "inputs")
    (checkout.root / "tokens").write_text(f"{NEW[1]}\n")
    checkout("shardmake", "fetch", "demo", "--add-tokens", "extended", "--token", NEW[0], "--token", "@tokens")
    for folder in ("runs", "resources/demo/base"):
        shutil.rmtree(checkout.root / folder)
    (checkout.root / "extended").rename(checkout.root / "resources/demo/base")
    checkout("shardmake", "data", "demo")
    return Forked(checkout, forked.server)


@pytest.mark.parametrize(("method", "strategy"), [("full", "zero3"), ("lora", "fsdp"), ("lora", "fsdp-offload")])
def test_new_rows_are_trained_and_merged(extended: Forked, tmp_path: Path, method: str, strategy: Strategy) -> None:
    """The embedding learns the row of a token in the data, the head those of all tokens."""
    rundir, base = RunDir(tmp_path / "run"), extended.checkout.root / "resources/demo/base"
    lora: dict[str, Any] = {"lora": {"train_tokens": NEW}} if method == "lora" else {}
    losses, _ = train(extended, rundir, strategy, method=method, weight_decay=0.0, **lora)
    model, info = AutoModelForCausalLM.from_pretrained(rundir.model, output_loading_info=True, dtype=torch.float32)
    assert not any(info.values())
    found, before = model.state_dict(), load_file(base / "model.safetensors")
    assert {name: weight.shape for name, weight in found.items()} == {name: w.shape for name, w in before.items()}
    call, never = AutoTokenizer.from_pretrained(rundir.model)("<call><never>", add_special_tokens=False).input_ids
    changed = {
        name: set((found[name] != before[name].float()).any(1).nonzero().flatten().tolist())
        for name in (EMBEDDING, HEAD)
    }
    assert call in changed[EMBEDDING] and never not in changed[EMBEDDING]
    if method == "full":
        assert len(changed[HEAD]) == len(found[HEAD]) == never + 1
        return
    expected, weights = train(extended, RunDir(tmp_path / "ddp"), "ddp", method=method, weight_decay=0.0, **lora)
    assert losses == pytest.approx(expected, abs=2e-4)
    trained = {name: weight.float() for name, weight in weights.items()}
    torch.testing.assert_close({name: found[name] for name in trained}, trained, rtol=1e-3, atol=1e-4)
    assert changed == {EMBEDDING: {call}, HEAD: {call, never}}
    consolidate(rundir.checkpoints / "checkpoint-4", tmp_path / "adapter", adapter=True)
    settings = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert settings["trainable_token_indices"] == {"model.embed_tokens": [call, never], "lm_head": [call, never]}
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    theirs = PeftModel.from_pretrained(plain, tmp_path / "adapter").merge_and_unload().state_dict()
    torch.testing.assert_close({name: found[name] for name in theirs}, theirs, rtol=0, atol=1e-5)
