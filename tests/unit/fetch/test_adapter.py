"""The adapter whose training continues: its settings are those of the run, and its base model is the run's."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from peft import LoraConfig
from safetensors.numpy import save_file

from shardmake.config.load import parse_config
from shardmake.config.models import Lora, Run
from shardmake.core.errors import ConfigError, ModelError, ShardmakeError
from shardmake.fetch.adapter import describe
from shardmake.fetch.stage import fetch
from shardmake.run import sources
from shardmake.run.paths import RunDir
from tests.finished_run import write_model
from tests.unit.config.samples import RUN
from tests.unit.fetch.test_chain import MERGED, make_runs

Values = dict[str, Any]

MODEL = sources.PinnedSource(name="org/base", path="/hub/base")


def written(folder: Path, **values: Any) -> Path:
    """Write PEFT's settings of an adapter of `MODEL` with these ``values``."""
    settings = {"r": 4, "lora_alpha": 6, "target_modules": ["v_proj", "q_proj"], "base_model_name_or_path": "org/base"}
    LoraConfig(task_type="CAUSAL_LM", **(settings | values)).save_pretrained(folder)
    return folder


def run_of(adapter: Any, model: str = "org/base", train: str = "org/data", **lora: Any) -> Run:
    run = RUN | {"method": "lora", "model": model, "data": {"train": train}, "lora": {"adapter": str(adapter), **lora}}
    return parse_config({"cluster": "c.yaml", "runs": {"chat": run}}, "c.yaml").runs["chat"]


def chained(root: Path) -> Run:
    """Return a run that continues the adapter of the run chat of `make_runs`."""
    run = run_of("x", str(root / "base"), str(root / "train.jsonl"))
    return run.model_copy(update={"lora": Lora(adapter="run:chat")})


def test_rank_alpha_and_targets_are_the_adapters(tmp_path: Path) -> None:
    found = describe(run_of(written(tmp_path), rank=4, targets=["q_proj", "v_proj"]), RunDir(tmp_path), MODEL)
    assert (found.rank, found.alpha, found.targets) == (4, 6, ["q_proj", "v_proj"])
    written(tmp_path, base_model_name_or_path="/hub/base/", target_modules=[], target_parameters=["experts.down_proj"])
    assert describe(run_of(tmp_path), RunDir(tmp_path), MODEL).targets == ["experts.down_proj"]


@pytest.mark.parametrize(("values", "lora", "message"), [
    ({}, {"rank": 16}, r"lora.rank: 16 is not that of lora.adapter .*, 4. Remove lora.rank."),
    ({}, {"targets": "all-linear"}, r"lora.targets: all-linear is not that of .*, \['q_proj', 'v_proj'\]"),
    ({"base_model_name_or_path": "org/other"}, {}, "another base model: org/other, not org/base.*write org/base as"),
    ({"base_model_name_or_path": None}, {}, "another base model: None, not org/base"),
    ({"use_rslora": True}, {}, "use_rslora: True has no key in the section lora.*name it as resume_from"),
    ({"rank_pattern": {"q_proj": 2}}, {}, "rank_pattern: "),
    ({"modules_to_save": ["lm_head"]}, {}, "modules_to_save: "),
    ({"exclude_modules": ["k_proj"]}, {}, "exclude_modules: "),
    ({"target_modules": ".*q_proj"}, {}, "target_modules: "), ({"lora_alpha": 1.5}, {}, "lora_alpha: 1.5"),
    ({"lora_alpha": 0}, {}, "lora_alpha: 0"), ({"lora_alpha": 2_000_000}, {}, "lora_alpha: 2000000"),
    ({"init_lora_weights": "pissa"}, {}, "init_lora_weights pissa is not supported"),
])  # fmt: skip
def test_another_base_or_other_settings_are_refused(tmp_path: Path, values: Values, lora: Values, message: str) -> None:
    with pytest.raises(ShardmakeError, match=message):
        describe(run_of(written(tmp_path, **values), **lora), RunDir(tmp_path), MODEL)


def test_the_adapter_is_recorded_and_identifies_the_training(tmp_path: Path) -> None:
    following, base = make_runs(tmp_path)[1], str(tmp_path / "base")
    folder = written(tmp_path / "adapter", base_model_name_or_path=base)
    run, part, rank = run_of(folder, base, str(tmp_path / "train.jsonl")), "q_proj.lora_A.weight", 4
    targets = ["v_proj", "q_proj"]

    def merge(_: Run, source: Path, found: Path, out: Path) -> None:
        assert (str(source), str(found), out) == (str(folder), base, following.adapter)
        written(out, r=rank, target_modules=targets)
        save_file({part: np.ones(2)}, out / "adapter_model.safetensors")

    with pytest.raises(ConfigError, match=r"Adapter not found: .*shardmake fetch next --part description"):
        sources.localize(run, following)
    fetch(run, following, "description", merge)
    assert sources.localize(run, following).lora.model_dump(exclude={"dropout", "train_tokens"}) == {
        "rank": 4, "alpha": 6, "targets": ["q_proj", "v_proj"], "adapter": str(following.adapter)
    }  # fmt: skip
    with pytest.raises(ConfigError, match="Sources differ: the configuration names other"):
        sources.localize(run_of("other", base, str(tmp_path / "train.jsonl")), following)
    edited = run.model_copy(update={"lora": Lora(adapter=str(folder), rank=64)})
    with pytest.raises(ConfigError, match=r"lora.rank: 64 is not that of lora.adapter .*, 4. Remove lora.rank."):
        sources.localize(edited, following)
    with pytest.raises(ModelError, match=r"does not record the present adapter of .*--part weights"):
        sources.require_weights(following)
    fetch(run, following, "weights", merge)
    sources.require_weights(following)
    digest = sources.content_of_model(following)
    assert str(following.adapter.absolute() / "adapter_model.safetensors") in sources.recorded_weights(following)
    part = "v_proj.lora_A.weight"
    fetch(run, following, "weights", merge)
    assert sources.content_of_model(following) != digest
    part = "embed_tokens.weight"
    with pytest.raises(ModelError, match=r"holds whole weights beside its matrices \(embed_tokens.weight\)"):
        fetch(run, following, "weights", merge)
    rank = 5
    with pytest.raises(ModelError, match=r"other values than planned: .*'rank': 5"):
        fetch(run, following, "weights", merge)
    rank, targets = 4, ["q_proj"]
    with pytest.raises(ModelError, match="other values than planned"):
        fetch(run, following, "weights", merge)
    other, chained = run.model_copy(update={"lora": Lora(adapter="run:next")}), RunDir(tmp_path / "runs/last")
    fetch(other, chained, "description", merge)
    assert sources.Sources.read(chained.sources).adapter == sources.PinnedAdapter(
        name="run:next", rank=4, alpha=6, targets=["q_proj", "v_proj"]
    )
    with pytest.raises(ShardmakeError, match=r"model/receipt.json.*snakemake"):
        fetch(other, chained, "weights", merge)


def test_the_section_of_another_run_describes_its_adapter(tmp_path: Path) -> None:
    """An edit of both runs counts without another fetch, and the commit of the base model is the other run's."""
    first, following = make_runs(tmp_path)
    run = chained(tmp_path)
    fetch(run, following, "description")
    lora = Lora(adapter="run:chat", rank=64, targets=["q_proj"])
    assert sources.localize(run.model_copy(update={"lora": lora}), following).lora == lora.model_copy(
        update={"adapter": str(following.adapter)}
    )
    for rundir, commit in ((first, "old"), (following, "new")):
        pinned = sources.PinnedSource(name="org/base", commit=commit, path=str(tmp_path / "base"))
        sources.Sources.read(rundir.sources).model_copy(update={"model": pinned}).write(rundir.sources)
    assert fetch(run.model_copy(update={"model": "org/base"}), following, "description").model.commit == "old"


def test_the_model_of_an_older_training_is_not_the_finished_one(tmp_path: Path) -> None:
    first, following = make_runs(tmp_path)
    run = chained(tmp_path)
    write_model(first, MERGED)
    first.train_receipt.parent.mkdir(parents=True, exist_ok=True)
    first.train_receipt.write_text("{}")
    os.utime(first.model_receipt, (1, 1))
    with pytest.raises(ModelError, match=r"chat was started again after its model was written.*snakemake .*receipt"):
        fetch(run, following, merge=lambda *_: None)
