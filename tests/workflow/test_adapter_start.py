"""Training that continues an adapter: as TRL alone continues it, under every strategy; resumed and merged."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from shardmake.run.paths import RunDir
from shardmake.run.sources import PinnedAdapter, Sources
from tests.fork_server import REPOSITORY
from tests.workflow.conftest import PACKAGES
from tests.workflow.objectives import SCRIPT, Trainings, run_with_two_ranks, settings_of
from tests.workflow.test_objectives import ON_DEMAND, assert_merges_as_peft, assert_resumes, assert_trained_as

pytestmark = pytest.mark.training
LORA: dict[str, Any] = {"rank": 4, "alpha": 2, "targets": ["q_proj", "v_proj", "down_proj"]}
CASES = [f"sft lora {name}" for name in ("ddp", "zero1", "zero2", "zero3", "fsdp")]
CASES += [f"{objective} lora {name}" for objective in ("dpo", "kto") for name in ("ddp", "zero3", "fsdp")]
CASES += [f"{objective} qlora {name}" for objective in ("sft", "dpo") for name in ("ddp", "zero2", "fsdp")]
IN_CI = ("sft lora zero3", "sft lora fsdp", "dpo lora ddp")


def with_adapter(case: str, trainings: Trainings) -> tuple[Path, Path, list[dict[str, float]]]:
    """Return PEFT's folder of an adapter that changes the base model, and TRL's model and log of its continuation."""
    objective, method, _ = case.split()
    root, out = trainings.forked(case).checkout.root, trainings.folder / f"{objective}-{method}-start.json"
    base, folder, (rank, alpha, targets) = root / "resources/demo/base", root / "adapter", LORA.values()
    if not out.exists():
        torch.manual_seed(7)
        sizes = {"r": rank, "lora_alpha": alpha, "target_modules": targets}
        settings = LoraConfig(**sizes, task_type="CAUSAL_LM", init_lora_weights=False)
        get_peft_model(AutoModelForCausalLM.from_pretrained(base), settings).save_pretrained(folder)
        words = [SCRIPT, objective, base, root / "examples.jsonl", f"{method}-precomputed", out, folder]
        run_with_two_ranks(words, out.parent, (REPOSITORY, PACKAGES) if method == "qlora" else ())
    return folder, Path(f"{out}.model"), [line for line in json.loads(out.read_text()) if "loss" in line]


@pytest.mark.parametrize("case", [pytest.param(case, marks=() if case in IN_CI else ON_DEMAND) for case in CASES])
def test_an_adapter_is_continued_as_by_trl(trainings: Trainings, tmp_path: Path, case: str) -> None:
    """The reference of preferences is the adapter before the first step: for DPO, TRL holds a copy of it."""
    (adapter, saved, theirs), forked = with_adapter(case, trainings), trainings.forked(case)
    objective, method, strategy = case.split()
    settings = settings_of(objective, method, "precomputed") | {"lora": LORA | {"adapter": str(adapter)}}
    run = forked.trained(tmp_path, strategy, **settings)
    assert_trained_as(theirs, run)
    assert_resumes(run)
    assert_merges_as_peft(run)
    folders = (run.rundir.root / "whole", saved)
    ours, expected = (load_file(folder / "adapter_model.safetensors") for folder in folders)
    assert ours.keys() == expected.keys()
    if method == "lora":  # TRL rounds adapters on 4 bits to bf16
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)

    last = {"lora": {"adapter": str(run.last)}}
    start = settings_of(objective, "lora", "precomputed") | last
    forked.checkout.configure({"processes_per_node": 2}, strategy="ddp", nodes=1, global_batch_size=12, **start)
    forked.checkout("shardmake", "fetch", "demo")
    fetched = RunDir(forked.checkout.run)
    adapter = load_file(fetched.adapter / "adapter_model.safetensors")
    assert adapter.keys() == ours.keys() and all(torch.equal(adapter[name], ours[name]) for name in ours)
    assert Sources.read(fetched.sources).adapter == PinnedAdapter(
        name=start["lora"]["adapter"], rank=LORA["rank"], alpha=LORA["alpha"], targets=sorted(LORA["targets"])
    )
