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
from tests.workflow.checkout import Checkout
from tests.workflow.forked import Forked
from tests.workflow.test_recipes import FROZEN, OFTEN

pytestmark = [pytest.mark.training, pytest.mark.usefixtures("loading_in_process")]
NEW = ["<call>", "<never>"]
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture(scope="module")
def extended(forked: Forked, tmp_path_factory: pytest.TempPathFactory) -> Forked:
    """Trainings of the demo's base with a head of its own and new tokens, one of which is in the data."""
    demo, root = forked.inputs, tmp_path_factory.mktemp("tokens")
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
    given: dict[str, Any] = OFTEN | FROZEN | {"freeze": [], "method": method, "weight_decay": 0.0}
    given |= {"lora": {"train_tokens": NEW}} if method == "lora" else {}
    run = extended.trained(tmp_path, strategy, **given).repeat()
    run.merged()
    model, info = AutoModelForCausalLM.from_pretrained(run.rundir.model, output_loading_info=True, dtype=torch.float32)
    assert not any(info.values())
    found, before = model.state_dict(), load_file(run.base / "model.safetensors")
    assert {name: weight.shape for name, weight in found.items()} == {name: w.shape for name, w in before.items()}
    call, never = AutoTokenizer.from_pretrained(run.rundir.model)("<call><never>", add_special_tokens=False).input_ids
    changed = {
        name: set((found[name] != before[name].float()).any(1).nonzero().flatten().tolist())
        for name in (EMBEDDING, HEAD)
    }
    assert call in changed[EMBEDDING] and never not in changed[EMBEDDING]
    if method == "full":
        assert len(changed[HEAD]) == len(found[HEAD]) == never + 1
        return
    reference = extended.once("ddp", **given)
    assert run.losses() == pytest.approx(reference.losses(), abs=2e-4)
    trained = {name: weight.float() for name, weight in reference.merged().items()}
    torch.testing.assert_close({name: found[name] for name in trained}, trained, rtol=1e-3, atol=1e-4)
    assert changed == {EMBEDDING: {call}, HEAD: {call, never}}
    run.merged("adapter", adapter=True)
    settings = json.loads((run.rundir.root / "adapter/adapter_config.json").read_text())
    assert settings["trainable_token_indices"] == {"model.embed_tokens": [call, never], "lm_head": [call, never]}
    plain = AutoModelForCausalLM.from_pretrained(run.base, dtype=torch.float32)
    theirs = PeftModel.from_pretrained(plain, run.rundir.root / "adapter").merge_and_unload().state_dict()
    torch.testing.assert_close({name: found[name] for name in theirs}, theirs, rtol=0, atol=1e-5)
