"""Values of configurations: their limits, paths, and what they become."""

from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from shardmake.config import models
from shardmake.config.load import load_config, parse_config
from shardmake.config.models import STRATEGIES, Checkpoints, Cluster, Config
from shardmake.config.schema import Schema
from tests.unit.config.samples import CLUSTER, RUN, make_run


def visible_text(without: str = "") -> st.SearchStrategy[str]:
    characters = st.characters(exclude_characters=without, exclude_categories=["Cs", "Cc"])
    return st.text(characters, min_size=1).filter(str.strip)


runs = st.fixed_dictionaries(
    {
        "model": st.just("org/base"),
        "data": st.fixed_dictionaries(
            {"train": visible_text("~$")}, optional={"eval_fraction": st.floats(0.01, 0.4), "loss_on": st.just("all")}
        ),
        "sequence_length": st.integers(1, 2**20),
        "global_batch_size": st.integers(1, 4096),
        "learning_rate": st.floats(1e-8, 1.0),
        "method": st.sampled_from(["lora", "qlora"]),
    },
    optional={
        "strategy": st.sampled_from([*STRATEGIES, "auto"]),
        "micro_batch_size": st.integers(1, 64) | st.just("auto"),
        "warmup_ratio": st.floats(0, 1),
        "seed": st.integers(0, 2**32 - 1),
        "lora": st.fixed_dictionaries({}, optional={"targets": st.lists(visible_text()) | st.just("all-linear")}),
        "push": st.fixed_dictionaries(
            {"to": st.sampled_from(["file:{run}", "hub:a/{run}", ["file:{run}", "hub:a/{run}"]])}
        ),
    },
).flatmap(lambda run: st.sampled_from([{**run, "max_steps": 3}, {**run, "epochs": 1.5}]))


def names_differ(values: dict[str, Any]) -> bool:
    """Return whether the runs have different names without regard to case, as a hub destination needs."""
    return len({name.lower() for name in values}) == len(values)


names = st.from_regex(r"[A-Za-z0-9][\w.-]{0,8}", fullmatch=True).filter(str.isascii)


@given(values=st.dictionaries(names, runs, min_size=1, max_size=3).filter(names_differ))
def test_a_config_is_equal_after_writing_and_reading(values: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    config = parse_config({"cluster": "c.yaml", "runs": values}, "test")
    path = tmp_path_factory.getbasetemp() / "round-trip.yaml"
    path.write_text(yaml.safe_dump(config.model_dump()))
    assert load_config(path) == config


def test_every_number_has_a_lower_and_an_upper_limit() -> None:
    """Also numbers of types that are added later: no number of the configuration is without limits."""
    found = {where: node for model in (Config, Cluster) for where, node in numbers(Schema(model).root, model.__name__)}
    assert len(found) > 35
    for where, node in found.items():
        assert {"minimum", "exclusiveMinimum"} & set(node), where
        assert {"maximum", "exclusiveMaximum"} & set(node), where


def numbers(node: Any, where: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every part of a schema that is a number."""
    if isinstance(node, dict):
        if node.get("type") in ("integer", "number") and "enum" not in node:
            yield where, node
        for key, inner in node.items():
            yield from numbers(inner, f"{where}.{key}")
    elif isinstance(node, list):
        for index, inner in enumerate(node):
            yield from numbers(inner, f"{where}.{index}")


NOT_PATHS = {
    "Columns": None,  # every key of the section
    "Data": {"subset", "revision"},
    "TrainSource": {"name", "subset", "revision"},
    "EvalSource": {"name", "subset", "revision"},
    "Notify": {"command"},  # the shell expands it
    "Service": {"command", "health"},
    "Push": {"to", "revision"},  # `to` begins with a kind; its paths are tested below
    "Run": {"revision"},
    "Slurm": {
        *("partition", "account", "qos", "constraint", "cpu_partition", "cpu_account", "cpu_qos", "cpu_constraint"),
        *("gpu_type", "wckey", "exclude"),
    },
    "Cluster": {"accelerator", "network_interface"},
}


def test_every_text_is_a_path_that_is_expanded_or_known_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key that is added later must be one or the other."""
    monkeypatch.setenv("HOME", "/home/ada")
    sections = {
        model for model in vars(models).values() if isinstance(model, type) and issubclass(model, models.Section)
    }
    for section in sections:
        known = NOT_PATHS.get(section.__name__, set())
        for name, field in section.model_fields.items():
            if known is not None and name not in known and (read := as_text(field)) is not None:
                assert read == "/home/ada/x", f"{section.__name__}.{name}"


def as_text(field: FieldInfo) -> str | None:
    """Return what a field makes of a path, None if it takes no text."""
    try:
        return str(TypeAdapter(field.rebuild_annotation()).validate_python("~/x"))
    except ValidationError:
        return None


def test_every_path_is_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.setenv("DATA", "/data")
    to = ["file:~/out/{run}", "hub:lab/{run}", "s3://b$DATA/x"]
    run = make_run(model="~/base", data={"train": "$DATA/a.jsonl", "eval": "${DATA}/b.jsonl"}, push={"to": to})
    assert (run.model, run.data.train, run.data.eval) == ("/home/ada/base", "/data/a.jsonl", "/data/b.jsonl")
    assert run.push is not None
    assert run.push.destinations == ["file:/home/ada/out/chat", "hub:lab/chat", "s3://b/data/x"]
    cluster = Cluster(**CLUSTER, nvme_path="$DATA/n", cache="~/c", scratch="~/$JOB", accelerator="A100-80GB")
    assert (cluster.nvme_path, cluster.cache, cluster.scratch) == ("/data/n", "/home/ada/c", "/home/ada/$JOB")
    assert cluster.accelerator == "a100-80gb" and not cluster.scratch_in_memory
    monkeypatch.setenv("DATA", "/dev/shm/ada")
    assert cluster.model_copy(update={"scratch": "$DATA/x"}).scratch_in_memory
    assert parse_config({"cluster": "~/c.yaml", "runs": {"chat": RUN}}, "c").cluster == "/home/ada/c.yaml"
    texts = {"evaluation": {"prompts": ["a\n\tb"]}, "notify": {"command": "date\nhostname"}}
    run = make_run(**texts, script="t.py", script_args=[""])  # several lines, where they have a meaning
    assert (run.evaluation.prompts, run.script_args) == (["a\n\tb"], [""])


@pytest.mark.parametrize(("limit", "minutes"), [
    ("24:00:00", 1440), ("1-00:00:00", 1440), ("00:30:00", 30), ("00:00:01", 1), ("2-03:04:05", 3065), ("100:00:00", 6000),
])  # fmt: skip
def test_a_time_limit_in_minutes_is_rounded_up(limit: str, minutes: int) -> None:
    assert Cluster(**CLUSTER, slurm={"time_limit": limit}).slurm.time_limit_minutes == minutes


@pytest.mark.parametrize(("values", "steps", "most"), [
    ({}, 100, 2), ({"every_steps": 200}, 100, 1), ({"every_steps": 10, "keep": 3}, 100, 3), ({"every_steps": 10}, None, 2),
    ({"every_steps": "auto"}, 5, 2), ({"keep_every_steps": 50, "every_steps": 10}, 100, 4),
])  # fmt: skip
def test_a_run_that_saves_once_keeps_one_checkpoint(values: dict[str, Any], steps: int | None, most: int) -> None:
    assert Checkpoints(**values).most(steps) == most
