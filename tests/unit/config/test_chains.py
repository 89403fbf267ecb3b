"""Runs that start from another run's model: what is refused, and what they take from that run."""

from typing import Any

from shardmake.config.checks import chain_of, with_first_model
from shardmake.config.inputs import is_local, local_files
from shardmake.config.load import parse_config
from shardmake.config.models import Config
from tests.unit.config.samples import RUN


def parse(runs: Any, defaults: Any = None) -> Config:
    return parse_config({"cluster": "c.yaml", "defaults": defaults, "runs": runs}, "c.yaml")


def test_a_chain_leads_back_to_the_first_base_model() -> None:
    second = {"base": "first", "model": "run:first"}
    runs = parse({"last": {"model": "run:second"}, "first": {"revision": "v1"}, "second": second}, RUN).runs
    assert chain_of("last", runs) == ["first", "second", "last"] and chain_of("first", runs) == ["first"]
    start = with_first_model("last", runs)
    assert (start.model, start.revision) == ("org/base", "v1")
    assert start.model_copy(update={"model": "run:second", "revision": None}) == runs["last"]
    assert not is_local("run:first") and local_files(runs["last"], "model") == []


def test_the_revision_of_an_inherited_model_is_not_that_of_a_run() -> None:
    with_revision = {**RUN, "revision": "v1"}
    assert parse({"a": {}, "b": {"model": "run:a"}}, with_revision).runs["b"].revision is None
    assert parse({"a": with_revision, "b": {"base": "a", "model": "run:a"}}).runs["b"].revision is None


def test_the_chat_template_comes_from_the_run_before() -> None:
    runs = {
        "a": {"data": {"chat_template": "a.jinja"}}, "b": {"model": "run:a"}, "c": {"model": "run:b"},
        "own": {"model": "run:a", "data": {"chat_template": "own.jinja"}},
        "tokenizers": {"model": "run:a", "data": {"chat_template": None}}, "other": {},
    }  # fmt: skip
    found = {name: run.data.chat_template for name, run in parse(runs, RUN).runs.items()}
    expected = {"a": "a.jinja", "b": "a.jinja", "c": "a.jinja", "own": "own.jinja", "tokenizers": None, "other": None}
    assert found == expected


def test_sweeps_at_both_ends_of_a_chain() -> None:
    sweep = {"model": ["run:sft-s1", "run:sft-s2"], "learning_rate": [1e-4, 1e-5]}
    runs = parse({"sft": {"sweep": {"seed": [1, 2]}}, "dpo": {"base": "sft", "sweep": sweep}}, RUN).runs
    assert sorted(chain_of(name, runs)[0] for name in runs if name.startswith("dpo")) == ["sft-s1"] * 2 + ["sft-s2"] * 2


def test_the_finished_folder_of_a_script_may_be_named() -> None:
    """A script may change sizes or tokenizer, and then only the folder has them."""
    runs = parse({"own": {"script": "train.py"}, "dpo": {"model": "runs/own/model"}}, RUN).runs
    assert runs["dpo"].model == "runs/own/model"


def test_an_adapter_of_another_run_may_be_continued() -> None:
    """Rows of refusals.yaml have those of another base model or kind."""
    lora = {**RUN, "method": "lora"}
    runs = {
        "a": lora,
        "b": {"base": "a", "lora": {"adapter": "run:a"}},
        "c": {"base": "b", "lora": {"adapter": "run:b"}},
    }
    assert chain_of("c", parse(runs).runs) == ["a", "b", "c"]
