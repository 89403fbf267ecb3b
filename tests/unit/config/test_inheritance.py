"""Inheritance between runs, the origin of values in messages, and sweeps."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from shardmake.cli import app
from shardmake.config.inheritance import Layer, expand_sweep
from shardmake.config.invocation import write_merged
from shardmake.config.load import get_run, load_config, parse_config
from shardmake.config.models import Config
from shardmake.core.errors import ConfigError
from tests.unit.config.samples import RUN, make_run, write


def parse(runs: Any, defaults: Any = None, **more: Any) -> Config:
    return parse_config({"cluster": "c.yaml", "defaults": defaults, "runs": runs, **more}, "c.yaml")


def test_a_run_has_the_values_of_the_defaults_of_its_bases_and_its_own() -> None:
    runs = {
        "plain": None, "far": {"base": "near", "seed": 7, "data": {"eval": "org/held-out"}},
        "near": {"base": "plain", "lora": {"rank": 8}, "seed": 5}, "epochs": {"max_steps": None, "epochs": 2},
    }  # fmt: skip
    parsed = parse(runs, {**RUN, "method": "lora", "lora": {"alpha": 64, "targets": ["a", "b"]}})
    assert list(parsed.runs) == list(runs)
    lora = {"alpha": 64, "targets": ["a", "b"]}
    assert parsed.runs["plain"] == make_run(method="lora", lora=lora)
    assert parsed.runs["near"] == make_run(method="lora", lora={**lora, "rank": 8}, seed=5)
    data = {"train": "org/data", "eval": "org/held-out"}
    assert parsed.runs["far"] == make_run(method="lora", lora={**lora, "rank": 8}, seed=7, data=data)
    assert parsed.runs["epochs"] == make_run(method="lora", lora=lora, max_steps=..., epochs=2)


def test_an_error_names_the_file_of_the_value_if_there_are_several() -> None:
    values = {"cluster": "c", "defaults": {**RUN, "seed": -1}, "runs": {"a": {}}}
    layers = [Layer("one.yaml", values), Layer("two.yaml", {"defaults": {"seed": -1}})]
    with pytest.raises(ConfigError, match=r"This value is from defaults in two\.yaml\.$"):
        parse_config(values, "one.yaml + two.yaml", layers)


def test_a_sweep_is_the_product_of_its_values() -> None:
    sweep = {"learning_rate": ["1e-5", 2e-5], "seed": [1, 2]}
    parsed = parse({"x": {"base": "s", "seed": 9}, "s": {**RUN, "sweep": sweep}})
    names = ["s-lr1e-5-s1", "s-lr1e-5-s2", "s-lr2e-5-s1", "s-lr2e-5-s2"]
    assert list(parsed.runs) == ["x", *names] and parsed.sweeps == {"s": names}
    assert parsed.runs["s-lr2e-5-s1"] == make_run(learning_rate=2e-5, seed=1)
    assert parsed.runs["x"] == make_run(seed=9), "a base gives its values without its sweep"
    with pytest.raises(ConfigError, match=r"^Run 's' is a sweep\. Name one of its runs: s-lr1e-5-s1, "):
        get_run(parsed, "s")


def test_a_sweep_may_be_a_list_of_points_in_sections() -> None:
    first, second = {"lora": {"rank": 4}, "strategy": "zero2"}, {"data": {"train": "org/a very long name of data/x"}}
    points = expand_sweep("s", [first, {"lora.rank": 8, **second}])
    assert list(points.values()) == [first, {"lora": {"rank": 8}, **second}]
    assert list(points) == ["s-r4-strategy-zero2", "s-r8-data-train-org-a-very-long-name-of-data-x"]


@pytest.mark.parametrize(("value", "text"), [
    (1e-5, "1e-5"), ("1e-5", "1e-5"), ("1.0E-05", "1e-5"), (0.00015, "1.5e-4"), (0.001, "1e-3"), (0.1, "0.1"), (0.25, "0.25"),
    (1, "1"), (1.0, "1"), (1000, "1000"), (0, "0"), (2**31, "2147483648"), (1.5, "1.5"),
])  # fmt: skip
def test_every_spelling_of_a_number_gives_one_name(value: Any, text: str) -> None:
    assert list(expand_sweep("n", {"learning_rate": [value]})) == [f"n-lr{text}"]


def test_the_merged_file_holds_the_resolved_runs(tmp_path: Path) -> None:
    parsed = parse({"a": {}, "s": {"sweep": {"seed": [1, 2]}}}, {**RUN, "push": {"to": "file:out/{run}"}})
    push = parsed.runs["s-s2"].push
    assert push and push.destinations == ["file:out/s-s2"]
    assert load_config(write_merged(parsed, "c.yaml", tmp_path)) == parsed


def test_the_command_prints_every_value_with_its_origin(tmp_path: Path) -> None:
    runs = {"a": {"seed": 1}, "b": {"base": "a", "method": "lora", "lora": {"rank": 8}}}
    values = {"cluster": "c", "defaults": RUN, "runs": runs}
    first, second = write(tmp_path / "a.yaml", values), write(tmp_path / "b.yaml", {"defaults": {"max_steps": 5}})
    shown = CliRunner().invoke(app, ["config", "b", "--config", str(first)]).stdout
    lines = {line.split("#")[0].strip(): line.split("# ")[-1] for line in shown.splitlines()}
    assert lines["model: org/base"] == "defaults" and lines["seed: 1"] == "runs.a" and lines["rank: 8"] == "runs.b"
    assert lines["packing: true"] == "default of Shardmake"
    assert make_run(**yaml.safe_load(shown)) == load_config(first).runs["b"]
    shown = CliRunner().invoke(app, ["config", "b", "--config", str(first), "--config", str(second)]).stdout
    assert f"# defaults in {second}" in shown and f"# runs.b in {first}" in shown
