"""Mixtures of several sources: shares, repetition, limits, held-out examples, refusals."""

import re
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from shardmake.config.models import Data
from shardmake.core.errors import DataError
from shardmake.data.check import check_first_rows, check_sources
from shardmake.data.stage import prepare, preview
from shardmake.run.length import estimate_length
from shardmake.run.paths import RunDir
from tests.unit.data.test_encode import chat
from tests.unit.data.test_stage import decoded, make_run, model, write_rows

__all__ = ["model"]


def sources(folder: Path, **counts: int) -> list[dict[str, Any]]:
    """One file for each name, whose examples begin with the name."""
    found = []
    for name, count in counts.items():
        rows = [{"messages": chat(f"u:{name}", f"a:{number:03}")} for number in range(count)]
        found.append({"source": write_rows(folder / f"{name}.jsonl", rows)})
    return found


def names_in(model: Path, rundir: RunDir, split: str) -> list[str]:
    return re.findall(r"<user>(\w+)</s>", "".join(decoded(model, rundir.data, split)))


def test_without_weights_every_example_is_used_as_often_as_its_source_says(model: Path, tmp_path: Path) -> None:
    train = sources(tmp_path, one=40, two=60, three=30)
    train[0]["repeat"], train[2]["limit"] = 3, 10
    rundir = RunDir(tmp_path / "run")
    receipt = prepare(make_run(model, {"train": train, "eval_fraction": 0.1}), rundir)
    assert Counter(names_in(model, rundir, "train")) == {"one": 3 * 36, "two": 54, "three": 10}
    assert names_in(model, rundir, "eval") == ["one"] * 4 + ["two"] * 6 + ["three"] * 3, "source by source"
    assert [(s.name, s.examples) for s in receipt.train.sources] == [("one", 108), ("two", 54), ("three", 10)]
    assert sum(source.share for source in receipt.train.sources) == pytest.approx(1)
    assert sum(source.tokens for source in receipt.train.sources) == receipt.train.tokens
    assert sum(source.loss_tokens for source in receipt.eval.sources) == receipt.eval.loss_tokens
    assert sum(source.sequences or 0 for source in receipt.eval.sources) == receipt.eval.sequences


def test_weights_give_the_shares_and_every_example_is_read(model: Path, tmp_path: Path) -> None:
    train = [one | {"weight": weight} for one, weight in zip(sources(tmp_path, a=400, b=50), (1, 3), strict=True)]
    held_out = sources(tmp_path, held=4)[0]["source"]
    rundir = RunDir(tmp_path / "run")
    receipt = prepare(make_run(model, {"train": train, "eval": held_out}, packing=False), rundir)
    found = Counter(names_in(model, rundir, "train"))
    assert 0.70 < found["b"] / found.total() < 0.80
    assert len({text for text in decoded(model, rundir.data, "train") if "<user>a<" in text}) == 400
    assert not receipt.eval.sources
    again = prepare(make_run(model, {"train": train, "eval": held_out}, packing=False), RunDir(tmp_path / "again"))
    assert again.digest == receipt.digest


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize(
    "keys", [({}, {}), ({"repeat": 3}, {"limit": 20}), ({"weight": 1}, {"weight": 3})], ids=["all", "repeat", "weight"]
)
@pytest.mark.parametrize("held_out", [False, True])
def test_the_plan_estimates_the_sequences(
    keys: tuple[dict[str, Any], ...], packing: bool, held_out: bool, model: Path, tmp_path: Path
) -> None:
    train = [one | more for one, more in zip(sources(tmp_path, a=300, b=200), keys, strict=True)]
    data = {"train": train, **({"eval": sources(tmp_path, held=4)[0]["source"]} if held_out else {})}
    run = make_run(model, data, packing=packing, sequence_length=64)
    found = estimate_length(run, check_sources(run), check_first_rows(run), 2)
    made = prepare(run, RunDir(tmp_path / "run")).train
    assert found is not None
    tolerance = 0.15 if "weight" in keys[0] else 0.02  # sources are drawn at random
    assert found.examples == pytest.approx(sum(source.examples for source in made.sources), rel=tolerance)
    assert found.tokens == pytest.approx(made.tokens, rel=tolerance)
    assert found.sequences == pytest.approx(made.sequences, rel=tolerance, abs=1)


@pytest.mark.parametrize("key", ["train", "eval"])
def test_sources_have_names_and_formats_of_their_own(model: Path, tmp_path: Path, key: str) -> None:
    """One of two sources has another format; the model is trained or evaluated on both."""
    other, chats = sources(tmp_path, other=40, chats=30)
    texts = {"source": write_rows(tmp_path / "t.jsonl", [{"body": "xyz"}] * 9), "name": "texts"}
    texts |= {"format": "text", "columns": {"text": "body"}}
    data = {"train": other["source"], "eval": other["source"], key: [chats, texts]}
    run, rundir = make_run(model, data, packing=False), RunDir(tmp_path / "run")
    check_sources(run)
    check_first_rows(run)
    receipt = prepare(run, rundir)
    split, whole = getattr(receipt, key), receipt.train if key == "eval" else receipt.eval
    assert (whole.examples, whole.sources) == (40, [])
    found = [(one.name, one.format, one.examples) for one in split.sources]
    assert found == [("chats", "chat (messages)", 30), ("texts", "text (body)", 9)]
    assert sum(one.tokens for one in split.sources) == split.tokens
    again = prepare(make_run(model, data | {key: [texts, chats]}, packing=False), rundir)
    assert [one.name for one in getattr(again, key).sources] == ["texts", "chats"]
    assert (again.digest == receipt.digest) == (key == "eval")
    if key == "eval":
        assert ["user" in text for text in decoded(model, tmp_path / "run/data", "eval")] == [False] * 9 + [True] * 30
        assert [one.sequences for one in split.sources] == [30, 9]
    else:
        assert "chat (messages); text (body)" in receipt.describe_format()
        shown = [text.split(",")[0].rpartition("/")[2] for text in preview(run, 1, RunDir(tmp_path / "run"))]
        assert shown == ["chats.jsonl", "t.jsonl"]


@pytest.mark.parametrize("change", [{"weight": 2.0}, {"weight": 1.0, "limit": 3}])
def test_another_mixture_is_other_data(model: Path, tmp_path: Path, change: dict[str, float]) -> None:
    train = [one | {"weight": 1.0} for one in sources(tmp_path, a=20, b=20)]
    rundir = RunDir(tmp_path / "run")
    before = prepare(make_run(model, {"train": train}), rundir)
    after = prepare(make_run(model, {"train": [train[0] | change, train[1]]}), rundir)
    assert before.digest != after.digest


def test_a_wrong_example_of_a_later_source_is_found_before_anything_is_queued(model: Path, tmp_path: Path) -> None:
    wrong = write_rows(tmp_path / "wrong.jsonl", [{"messages": chat("u:a", "a:b")}, {"messages": 3}])
    (good,) = sources(tmp_path, a=9)
    mixture = {"train": [good, {"source": wrong}]}
    evaluated = {"train": good["source"], "eval": [*sources(tmp_path, b=9), {"source": wrong}]}
    for data, check in product((mixture, evaluated), (check_sources, check_first_rows)):
        with pytest.raises(DataError, match=r"wrong\.jsonl, line 2: messages is not a list"):
            check(make_run(model, data))


def test_labels_come_from_the_last_part_of_the_source() -> None:
    named = ["d/a.jsonl.gz", "org/chats", "folder/", "x.parquet"]
    data = Data.model_validate({"train": [{"source": name} for name in named]})
    assert [one.label for one in data.sources] == ["a", "chats", "folder", "x"]
