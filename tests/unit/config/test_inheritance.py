"""Inheritance between runs, the origin of values in messages, and sweeps."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from shardmake.cli import app
from shardmake.config.inheritance import Layer
from shardmake.config.invocation import write_merged
from shardmake.config.load import get_run, load_config, parse_config
from shardmake.config.models import Config
from shardmake.config.sweeps import expand_sweep
from shardmake.core.errors import ConfigError
from tests.unit.config.samples import RUN, make_run, write


def parse(runs: Any, defaults: Any = None, **more: Any) -> Config:
    return parse_config({"cluster": "c.yaml", "defaults": defaults, "runs": runs, **more}, "c.yaml")


def error_of(runs: Any, defaults: Any = None, **more: Any) -> list[str]:
    with pytest.raises(ConfigError) as error:
        parse(runs, defaults, **more)
    first, *lines = str(error.value).splitlines()
    assert first == "c.yaml cannot be used:"
    return [line.strip() for line in lines]


def test_a_run_has_the_values_of_the_defaults_of_its_bases_and_its_own() -> None:
    runs = {
        "plain": None,
        "far": {"base": "near", "seed": 7, "data": {"eval": "org/held-out"}},
        "near": {"base": "plain", "lora": {"rank": 8}, "seed": 5},
        "epochs": {"max_steps": None, "epochs": 2},
    }
    parsed = parse(runs, {**RUN, "method": "lora", "lora": {"alpha": 64, "targets": ["a", "b"]}})
    assert list(parsed.runs) == list(runs)
    lora = {"alpha": 64, "targets": ["a", "b"]}
    assert parsed.runs["plain"] == make_run(method="lora", lora=lora)
    assert parsed.runs["near"] == make_run(method="lora", lora={**lora, "rank": 8}, seed=5)
    data = {"train": "org/data", "eval": "org/held-out"}
    assert parsed.runs["far"] == make_run(method="lora", lora={**lora, "rank": 8}, seed=7, data=data)
    assert parsed.runs["epochs"] == make_run(method="lora", lora=lora, max_steps=..., epochs=2)


def test_values_of_one_run_never_reach_another_one() -> None:
    parsed = parse({"a": {}, "b": {"lora": {"rank": 3}}, "c": {}}, {**RUN, "method": "lora", "lora": {"rank": 2}})
    assert [run.lora.rank for run in parsed.runs.values()] == [2, 3, 2]


def test_an_error_in_an_inherited_value_is_one_line_with_its_origin() -> None:
    assert error_of({"a": {}, "b": {}, "c": {"seed": -2}}, {**RUN, "seed": -1}) == [
        "runs.a.seed: -1 is not allowed. Allowed: a whole number from 0 to 4,294,967,295. This value is from defaults. "
        "It is also in another run.",
        "runs.c.seed: -2 is not allowed. Allowed: a whole number from 0 to 4,294,967,295.",
    ]
    assert error_of({"a": RUN, "b": {"base": "a", "epochs": 2}}) == [
        "runs.b: set exactly one of max_steps and epochs. max_steps is from runs.a."
    ]
    assert error_of({"a": {**RUN, "sweep": {"seed": [-1]}}}) == [
        "runs.a-s-1.seed: -1 is not allowed. Allowed: a whole number from 0 to 4,294,967,295. "
        "This value is from runs.a.sweep."
    ]


def test_an_error_names_the_file_of_the_value_if_there_are_several() -> None:
    values = {"cluster": "c", "defaults": {**RUN, "seed": -1}, "runs": {"a": {}}}
    layers = [Layer("one.yaml", values), Layer("two.yaml", {"defaults": {"seed": -1}})]
    with pytest.raises(ConfigError, match=r"This value is from defaults in two\.yaml\.$"):
        parse_config(values, "one.yaml + two.yaml", layers)


@pytest.mark.parametrize(
    ("runs", "defaults", "expected"),
    [
        ({"a": {"base": "bb"}, "b": RUN}, None,
         "runs.a.base: run 'bb' does not exist. Did you mean 'b'? The runs are: a, b."),
        ({"a": {"base": ["b"]}, "b": RUN}, None, "runs.a.base: run ['b'] does not exist. The runs are: a, b."),
        ({"a": {"base": "b"}, "b": {"base": "a"}}, None,
         "runs.b.base: 'a' has this run as its own base (a -> b -> a). Remove one `base`."),
        ({"a": {"base": "a"}}, None, "runs.a.base: 'a' has this run as its own base (a -> a). Remove one `base`."),
        ({"a": RUN}, 3, "defaults: 3 is not a section. Write the keys of a run in it."),
        ({"a": {**RUN, "sweep": 3}}, None,
         "runs.a.sweep: 3 is not allowed. Write a list of values for each key, or a list of points."),
        ({"a": {**RUN, "sweep": {"seed": 3}}}, None,
         "runs.a.sweep: seed is 3. Write a list of values, such as [1, 2, 3]."),
        ({"a": {**RUN, "sweep": [3]}}, None,
         "runs.a.sweep: the point 3 is not a section. Write the keys that it sets."),
        ({"a": {**RUN, "sweep": {"seed": [1, 1]}}}, None,
         "runs.a.sweep: two points have the name 'a-s1'. Remove one of them."),
        ({"a": {**RUN, "sweep": {"seed": [1]}}, "a-s1": RUN}, None,
         "runs.a: there are two runs with the name 'a-s1'. Rename one of them."),
        ({"a": {**RUN, "sweep": {"seed": [*range(40)], "max_steps": [*range(40)]}}}, None,
         "runs.a.sweep: it has 1,600 points, more than 1,000. Write fewer values."),
    ],
)  # fmt: skip
def test_what_cannot_be_resolved_is_refused(runs: Any, defaults: Any, expected: str) -> None:
    assert error_of(runs, defaults) == [expected]


@pytest.mark.parametrize("runs", [None, 3, [], {"a": 3}, {"a": None}, {1: RUN}])
def test_a_wrong_form_is_left_to_the_validation(runs: Any) -> None:
    assert all(line.startswith("runs") for line in error_of(runs))


def test_a_list_of_sweeps_is_not_a_key_of_a_file() -> None:
    assert error_of({"a": RUN}, sweeps={"a": ["b"]}) == [
        "sweeps: 'b' is not a run. Write `sweep` in a run in place of this key."
    ]


def test_a_sweep_is_the_product_of_its_values() -> None:
    parsed = parse(
        {"x": {"base": "s", "seed": 9}, "s": {**RUN, "sweep": {"learning_rate": ["1e-5", 2e-5], "seed": [1, 2]}}}
    )
    names = ["s-lr1e-5-s1", "s-lr1e-5-s2", "s-lr2e-5-s1", "s-lr2e-5-s2"]
    assert list(parsed.runs) == ["x", *names] and parsed.sweeps == {"s": names}
    assert parsed.runs["s-lr2e-5-s1"] == make_run(learning_rate=2e-5, seed=1)
    assert parsed.runs["x"] == make_run(seed=9), "a base gives its values without its sweep"
    with pytest.raises(ConfigError, match=r"^Run 's' is a sweep\. Name one of its runs: s-lr1e-5-s1, "):
        get_run(parsed, "s")


def test_a_sweep_may_be_a_list_of_points_in_sections() -> None:
    sweep = [
        {"lora": {"rank": 4}, "strategy": "zero2"},
        {"lora.rank": 8, "data": {"train": "org/a very long name of data/x"}},
    ]
    points = expand_sweep("s", sweep)
    assert list(points.values()) == [
        {"lora": {"rank": 4}, "strategy": "zero2"},
        {"lora": {"rank": 8}, "data": {"train": "org/a very long name of data/x"}},
    ]
    assert list(points) == ["s-r4-strategy-zero2", "s-r8-data-train-org-a-very-long-name-of-data-x"]


@pytest.mark.parametrize(
    ("value", "text"),
    [(1e-5, "1e-5"), ("1e-5", "1e-5"), ("1.0E-05", "1e-5"), (0.00015, "1.5e-4"), (0.001, "1e-3"), (0.1, "0.1"), (0.25, "0.25"),
     (1, "1"), (1.0, "1"), (1000, "1000"), (0, "0"), (2**31, "2147483648"), (1.5, "1.5")],
)  # fmt: skip
def test_every_spelling_of_a_number_gives_one_name(value: Any, text: str) -> None:
    assert list(expand_sweep("n", {"learning_rate": [value]})) == [f"n-lr{text}"]


def test_the_merged_file_holds_the_resolved_runs(tmp_path: Path) -> None:
    parsed = parse({"a": {}, "s": {"sweep": {"seed": [1, 2]}}}, {**RUN, "push": {"to": "file:out/{run}"}})
    push = parsed.runs["s-s2"].push
    assert push and push.destinations == ["file:out/s-s2"]
    assert load_config(write_merged(parsed, "c.yaml", tmp_path)) == parsed


def test_the_command_prints_every_value_with_its_origin(tmp_path: Path) -> None:
    values = {
        "cluster": "c",
        "defaults": RUN,
        "runs": {"a": {"seed": 1}, "b": {"base": "a", "method": "lora", "lora": {"rank": 8}}},
    }
    first, second = write(tmp_path / "a.yaml", values), write(tmp_path / "b.yaml", {"defaults": {"max_steps": 5}})
    shown = CliRunner().invoke(app, ["config", "b", "--config", str(first)]).stdout
    lines = {line.split("#")[0].strip(): line.split("# ")[-1] for line in shown.splitlines()}
    assert lines["model: org/base"] == "defaults" and lines["seed: 1"] == "runs.a" and lines["rank: 8"] == "runs.b"
    assert lines["packing: true"] == "default of Shardmake"
    assert make_run(**yaml.safe_load(shown)) == load_config(first).runs["b"]
    shown = CliRunner().invoke(app, ["config", "b", "--config", str(first), "--config", str(second)]).stdout
    assert f"# defaults in {second}" in shown and f"# runs.b in {first}" in shown
