"""A tiny model of each of the most used families goes through every stage, from fetch to report, on two ranks."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from transformers import AutoConfig

from shardmake.consolidate.merge import consolidate
from shardmake.plan.small_config import shrunk
from shardmake.run.paths import RunDir
from tests.mixtures import save_model
from tests.model_types import default_values
from tests.plan_in_process import plan_in_this_process
from tests.workflow.checkout import Checkout
from tests.workflow.forked import Forked, log
from tests.workflow.test_mixtures import losses

pytestmark = pytest.mark.training
SAMPLE = ("deepseek_v3", "gemma4", "gpt_oss", "qwen3_5_moe", "smollm3")
"""Those that CI trains; the demo and other tests are Llamas."""
FAMILIES = (*SAMPLE, "cohere2", "deepseek_v2", "gemma2", "gemma3", "glm4", "granite")
CASES = [pytest.param(name, marks=() if name in SAMPLE else pytest.mark.families) for name in FAMILIES]


def small_config(family: str, tokenizer: Path) -> Any:
    """Return a config of ``family`` with a few layers, and the vocabulary and special tokens of ``tokenizer``."""
    values = default_values(family)
    of_images = {name: value for name, value in values.items() if name.endswith("_token_id")}
    config = type(AutoConfig.for_model(family)).from_dict(shrunk(values, narrow="all") | of_images)
    text, known = config.get_text_config(), json.loads((tokenizer / "config.json").read_text())
    sizes = [name for name in text.to_dict() if name.startswith("vocab_size")]
    tokens = {name: known.get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    text.update(tokens | dict.fromkeys(sizes, known["vocab_size"]) | {"max_position_embeddings": 256})
    return config


@pytest.mark.parametrize("family", CASES)
def test_every_stage(forked: Forked, checkout: Checkout, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    """Snakemake runs all stages with ZeRO-3; FSDP, which the plan refuses without GPUs, trains with its losses."""
    demo, base = checkout.root / "resources/demo/base", checkout.root / "base"
    save_model(small_config(family, demo), demo, base)
    sizes = {"global_batch_size": 12, "micro_batch_size": 6, "max_steps": 4}
    checkout.configure(model="base", strategy="zero3", push=None, packing=False, **sizes)
    checkout("snakemake", "--profile", "profiles/local")
    assert sorted(checkout.losses()) == [1, 2, 3, 4]

    plan_in_this_process(monkeypatch)
    rundir, planned = RunDir(checkout.root / "fsdp"), forked.plan("fsdp", 2, model=str(base), packing=False)
    shutil.copytree(checkout.run / "data", rundir.data)
    assert forked.train(rundir, planned) == [0, 0], log(rundir)
    assert losses(rundir) == pytest.approx(checkout.losses(), abs=2e-4)
    consolidate(rundir.checkpoints / "checkpoint-4", rundir.model, base=base)
    merged, other = (load_file(folder / "model.safetensors") for folder in (rundir.model, checkout.run / "model"))
    assert {name: tensor.shape for name, tensor in merged.items()} == {n: t.shape for n, t in other.items()}
