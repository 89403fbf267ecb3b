"""A tiny model of each of the most used families goes through every stage, from fetch to report, on two ranks."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from transformers import AutoConfig

from shardmake.consolidate import loading
from shardmake.consolidate.stage import consolidate_run
from shardmake.data.stage import prepare
from shardmake.evaluate.stage import evaluate
from shardmake.fetch.stage import fetch
from shardmake.plan.small_config import shrunk
from shardmake.report.stage import write_report
from shardmake.run.paths import RunDir
from shardmake.run.sources import localize
from tests.mixtures import save_model
from tests.model_types import default_values, in_this_process
from tests.plan_in_process import plan_in_this_process
from tests.tiers import FAMILIES, SAMPLED_FAMILIES
from tests.workflow.checkout import PROFILE, Checkout
from tests.workflow.forked import Forked

pytestmark = pytest.mark.training
CASES = [pytest.param(name, marks=() if name in SAMPLED_FAMILIES else pytest.mark.families) for name in FAMILIES]
_MOST = {
    "hidden_size": 512, "intermediate_size": 512, "intermediate_size_mlp": 512, "moe_intermediate_size": 256,
    "moe_shared_expert_intermediate_size": 256, "chunk_size": 16, "mamba_chunk_size": 16, "mamba_d_state": 16,
    "ssm_state_size": 16, "mamba_num_heads": 16, "linear_num_heads": 4, "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
}  # fmt: skip
"""Sizes that `shrunk` leaves as they are, with which a step takes seconds on a CPU."""


def small_config(family: str, tokenizer: Path) -> Any:
    """Return a config of ``family`` with a few layers, and the vocabulary and special tokens of ``tokenizer``."""
    values = default_values(family)
    of_images = {name: value for name, value in values.items() if name.endswith("_token_id")}
    small = _capped(shrunk(values, narrow="all"))
    config = type(AutoConfig.for_model(family)).from_dict(small | of_images)
    text, known = config.get_text_config(), json.loads((tokenizer / "config.json").read_text())
    sizes = [name for name in text.to_dict() if name.startswith("vocab_size")]
    tokens = {name: known.get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    text.update(tokens | dict.fromkeys(sizes, known["vocab_size"]) | {"max_position_embeddings": 256})
    return config


def _capped(values: dict[str, Any]) -> dict[str, Any]:
    """Return ``values`` and those of its parts, none larger than in `_MOST`."""
    parts = {name: _capped(value) for name, value in values.items() if isinstance(value, dict)}
    small = {name: min(value, _MOST[name]) for name, value in values.items() if name in _MOST and value is not None}
    return values | parts | small


def test_snakemake_runs_every_stage(checkout: Checkout) -> None:
    """A mixture of experts that is the text part of a composite, with the processes that users start."""
    demo = checkout.root / "resources/demo/base"
    save_model(small_config("qwen3_5_moe", demo), demo, checkout.root / "base")
    checkout.configure(model="base", push=None, packing=False, global_batch_size=12, micro_batch_size=6, max_steps=4)
    checkout("snakemake", *PROFILE)
    assert sorted(checkout.losses()) == [1, 2, 3, 4]


@pytest.mark.parametrize("family", CASES)
def test_every_stage(forked: Forked, checkout: Checkout, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    """ZeRO-3 and FSDP, which the configuration refuses without GPUs, end with the same model."""
    plan_in_this_process(monkeypatch)
    monkeypatch.setattr(loading, "run_module", in_this_process)
    monkeypatch.chdir(checkout.root)
    demo, rundir = Path("resources/demo/base"), RunDir(checkout.run)
    save_model(small_config(family, demo), demo, Path("base"))
    for split, rows in (("train", 100), ("eval", 12)):
        file = Path("resources/demo", f"{split}.jsonl")
        file.write_text("".join(file.read_text().splitlines(keepends=True)[:rows]))
    here, found = Forked(checkout, forked.server, forked.environments), []
    for strategy in ("zero3", "fsdp"):
        _, run, cluster = planned = here.plan(strategy, 2, model="base", packing=False)
        fetch(run, rundir)
        prepare(localize(run, rundir), rundir)
        here.drive(planned)
        assert consolidate_run(localize(run, rundir), rundir, workers=1).output_bytes_compared
        scores = evaluate(run, rundir, cluster)
        assert scores.base and scores.tuned and scores.tuned.loss < scores.base.loss
        write_report(run, rundir)
        merged = load_file(rundir.model / "model.safetensors")
        found.append((checkout.losses(), {name: tensor.shape for name, tensor in merged.items()}, scores.tuned.loss))
    (losses, shapes, loss), other = found
    assert sorted(losses) == [1, 2, 3, 4]
    assert other == (pytest.approx(losses, abs=2e-4), shapes, pytest.approx(loss, abs=2e-3))
