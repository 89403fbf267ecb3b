"""The data stage on real files with a real tokenizer: counts, files, reruns, refusals."""

import json
import os
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from transformers import LlamaConfig

from shardmake.config.load import parse_config
from shardmake.config.models import Run
from shardmake.core.atomic import read_json, sha256
from shardmake.core.errors import ShardmakeError
from shardmake.data import check_first_rows, check_sources, prepare, stage
from shardmake.data.dataset import IGNORED, collator, load
from shardmake.run.paths import RunDir
from tests.unit.data.test_encode import MARKED, chat, make_tokenizer

LENGTH = 64


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder as far as the data stage reads it: tokenizer and config."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = make_tokenizer(MARKED)
    tokenizer.save_pretrained(folder)
    LlamaConfig(vocab_size=len(tokenizer)).save_pretrained(folder)
    return folder


def write_jsonl(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def conversations(count: int, seed: int = 0) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, 25, (count, 2), generator=generator).tolist()
    return [{"messages": chat("u:" + "q" * asked, "a:" + "w" * answered)} for asked, answered in sizes]


def make_run(model: Path, data: dict[str, Any], **changes: Any) -> Run:
    values = {"model": str(model), "data": data, "sequence_length": LENGTH, "global_batch_size": 4, "max_steps": 5}
    run = {**values, "learning_rate": 1e-3, **changes}
    return parse_config({"cluster": "c", "runs": {"chat": run}}, "test").runs["chat"]


def decoded(model: Path, folder: Path, split: Any) -> list[str]:
    """Every example of a split, learned stretches in brackets."""
    from tests.unit.data.test_encode import shown

    tokenizer, found = make_tokenizer(MARKED), []
    for item in (data := load(folder, split)) and [data[i] for i in range(len(data))]:
        starts = (item["position_ids"] == 0).nonzero().flatten().tolist()
        for start, end in zip(starts, [*starts[1:], None], strict=True):
            ids, labels = item["input_ids"][start:end], item["labels"][start:end]
            assert torch.equal(labels[labels != IGNORED], ids[labels != IGNORED])
            found.append(shown(tokenizer, (ids.tolist(), (labels != IGNORED).tolist())))
    return found


@pytest.mark.parametrize("packing", [True, False])
def test_every_example_is_there_once_with_its_answer_learned(model: Path, tmp_path: Path, packing: bool) -> None:
    rows = conversations(60)
    data = {"train": write_jsonl(tmp_path / "t.jsonl", rows), "eval": write_jsonl(tmp_path / "e.jsonl", rows[:5])}
    rundir = RunDir(tmp_path / "run")
    receipt = prepare(make_run(model, data, packing=packing), rundir).as_json()
    expected = [f"<user>{r['messages'][0]['content']}</s><assistant>[{r['messages'][1]['content']}</s>]" for r in rows]
    assert sorted(decoded(model, rundir.data, "train")) == sorted(expected)
    assert sorted(decoded(model, rundir.data, "eval")) == sorted(expected[:5])
    assert receipt == read_json(rundir.data_receipt, "test")
    words = sum(len(m["content"]) + 2 for r in rows for m in r["messages"])
    learned = sum(len(r["messages"][1]["content"]) + 1 for r in rows)
    counts = {key: receipt["train"][key] for key in ("examples", "tokens", "loss_tokens")}
    assert counts == {"examples": 60, "tokens": words, "loss_tokens": learned}
    assert (receipt["train"]["sequences"] < 60) is packing
    batch = collator(rundir.data, "sdpa")([load(rundir.data, "train")[0]])
    assert batch["input_ids"].shape == (1, LENGTH)
    assert ("position_ids" in batch, "attention_mask" in batch) == (packing, not packing)
    assert not list(tmp_path.glob("run/.data*"))


def test_long_examples_are_cut_and_counted(model: Path, tmp_path: Path) -> None:
    rows = [
        {"messages": chat("u:a", "a:" + "b" * 100)},
        {"messages": chat("u:" + "a" * 100, "a:b")},
        {"messages": chat("u:a")},
        {"messages": chat("u:a", "a:b")},
    ]
    path = write_jsonl(tmp_path / "t.jsonl", rows)
    rundir = RunDir(tmp_path / "run")
    receipt = prepare(make_run(model, {"train": path, "eval": path}), rundir).as_json()
    counts = {"examples": 4, "truncated": 1, "split": 0, "dropped_without_loss": 1, "dropped_loss_truncated": 1}
    assert {key: receipt["train"][key] for key in counts} == counts
    longest = "<user>a</s><assistant>[" + "b" * (LENGTH - 4) + "]"
    assert sorted(decoded(model, rundir.data, "train")) == sorted([longest, "<user>a</s><assistant>[b</s>]"])


def test_long_texts_are_split_and_nothing_is_lost(model: Path, tmp_path: Path) -> None:
    texts = ["a" * 150, "b" * 10]
    path = write_jsonl(tmp_path / "t.jsonl", [{"text": text} for text in texts])
    rundir = RunDir(tmp_path / "run")
    receipt = prepare(make_run(model, {"train": path, "eval": path}), rundir).as_json()
    assert (receipt["train"]["examples"], receipt["train"]["split"], receipt["train"]["truncated"]) == (2, 1, 0)
    assert receipt["train"]["tokens"] == sum(len(text) + 2 for text in texts)
    assert not receipt["loss_on_assistant"] and receipt["format"] == "text"


def test_part_of_the_training_data_is_set_aside(model: Path, tmp_path: Path) -> None:
    rows = [{"text": f"{i:04}"} for i in range(100)]
    rundir = RunDir(tmp_path / "run")
    data = {"train": write_jsonl(tmp_path / "t.jsonl", rows), "eval_fraction": 0.1}
    receipt = prepare(make_run(model, data), rundir).as_json()
    assert (receipt["train"]["examples"], receipt["eval"]["examples"]) == (90, 10)
    parts = [set(decoded(model, rundir.data, split)) for split in ("train", "eval")]
    assert not parts[0] & parts[1] and len(parts[0] | parts[1]) == 100


def files_of(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): sha256(path) for path in sorted(folder.rglob("*")) if path.is_file()}


def test_the_result_depends_on_the_seed_and_not_on_the_processes(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage, "_POOL_FROM_ROWS", 10)
    data = {"train": write_jsonl(tmp_path / "t.jsonl", conversations(300))}
    made = {}
    for name, cpus, seed in (("one", 1, 42), ("two", 2, 42), ("other", 1, 43)):
        prepare(make_run(model, data, seed=seed), RunDir(tmp_path / name), cpus=cpus)
        made[name] = files_of(tmp_path / name)
    arrow = "data/train/data-00000-of-00001.arrow"
    for file in (arrow, "data/receipt.json"):
        assert made["one"][file] == made["two"][file] != made["other"][file]


def test_up_to_date_data_are_not_rewritten(model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "shardmake")
    path = tmp_path / "t.jsonl"
    run = make_run(model, {"train": write_jsonl(path, conversations(20))})
    rundir = RunDir(tmp_path / "run")
    first = prepare(run, rundir)
    caplog.clear()
    os.utime(rundir.data_receipt, (1, 1))
    arrow = rundir.data / first.train.files[0].path
    assert prepare(run, rundir) == first
    assert caplog.messages == [f"{rundir.data} is up to date."]
    arrow.unlink()
    assert prepare(run, rundir) == first
    assert arrow.exists() and rundir.data_receipt.stat().st_mtime == 1
    write_jsonl(path, conversations(21))
    assert prepare(run, rundir).digest != first.digest
    assert rundir.data_receipt.stat().st_mtime != 1


def test_a_failure_leaves_what_was_there(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    run = make_run(model, {"train": write_jsonl(path, conversations(20))})
    rundir = RunDir(tmp_path / "run")
    prepare(run, rundir)
    before = files_of(rundir.root)
    path.write_text(path.read_text() + "{\n")
    with pytest.raises(ShardmakeError, match="line 21 is not valid JSON"):
        prepare(run, rundir)
    assert files_of(rundir.root) == before


def refusal(run: Run, rundir: RunDir, cpus: int = 1) -> str:
    with pytest.raises(ShardmakeError) as error:
        prepare(run, rundir, cpus=cpus)
    return str(error.value)


def test_a_broken_line_is_named_by_a_worker_process_too(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage, "_POOL_FROM_ROWS", 10)
    path = tmp_path / "t.jsonl"
    write_jsonl(path, conversations(20))
    path.write_text(path.read_text() + "{\n")
    message = refusal(make_run(model, {"train": str(path)}), RunDir(tmp_path / "run"), cpus=2)
    assert message.startswith(f"{path}, line 21 is not valid JSON: ")


def test_sources_are_checked_without_a_model(tmp_path: Path) -> None:
    path = tmp_path / "e.jsonl"
    data = {"train": write_jsonl(tmp_path / "t.jsonl", conversations(3)), "eval": write_jsonl(path, conversations(2))}
    run = make_run(tmp_path / "nowhere", data)
    check_sources(run)
    path.write_text(path.read_text() + "{\n")
    with pytest.raises(ShardmakeError, match=r"e\.jsonl, line 3 is not valid JSON: "):
        check_sources(run)


def test_the_first_rows_are_encoded_without_reading_the_rest(model: Path, tmp_path: Path) -> None:
    train, held_out = tmp_path / "t.jsonl", tmp_path / "e.jsonl"
    write_jsonl(train, conversations(3))
    train.write_text(train.read_text() + "{\n")
    write_jsonl(held_out, [*conversations(1), {"text": "a"}])
    run = make_run(model, {"train": str(train)})
    assert check_first_rows(run, limit=3).format == "chat"
    with pytest.raises(ShardmakeError, match=r"t\.jsonl, line 4 is not valid JSON: "):
        check_first_rows(run)
    with pytest.raises(ShardmakeError, match=r"e\.jsonl, line 2: this example \(chat\) has no messages"):
        check_first_rows(make_run(model, {"train": str(train), "eval": str(held_out)}), limit=3)
    held_out.write_text("\n")
    with pytest.raises(ShardmakeError, match=r"No examples in .*e\.jsonl\."):
        check_first_rows(make_run(model, {"train": str(train), "eval": str(held_out)}), limit=3)


@pytest.mark.parametrize("limit", [1, 2, 64])
def test_the_first_rows_of_parquet_files_are_encoded(model: Path, tmp_path: Path, limit: int) -> None:
    for name, text in (("a", "x"), ("b", "y")):
        datasets.Dataset.from_dict({"text": [text]}).to_parquet(str(tmp_path / f"{name}.parquet"))
    assert check_first_rows(make_run(model, {"train": str(tmp_path)}), limit=limit).format == "text"


def test_data_with_nothing_to_learn_is_refused(model: Path, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "t.jsonl", [{"messages": chat("u:a")}] * 3)
    assert refusal(make_run(model, {"train": path, "eval": path}), RunDir(tmp_path / "run")) == (
        "No example in the train data has a token to learn: 3 examples; 3 dropped, with nothing to learn. The first: "
        f"{path}, line 1; {path}, line 2; {path}, line 3. Only messages with the role assistant are learned. Check data.format and data.loss_on, or raise sequence_length."
    )


def test_one_example_cannot_be_split(model: Path, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "t.jsonl", conversations(1))
    assert refusal(make_run(model, {"train": path}), RunDir(tmp_path / "run")) == (
        f"Too little data: {path} has one example, and evaluation needs another one. Set data.eval or add data."
    )


def test_a_tokenizer_of_another_model_is_refused(model: Path, tmp_path: Path) -> None:
    make_tokenizer(MARKED).save_pretrained(tmp_path / "small")
    LlamaConfig(vocab_size=50).save_pretrained(tmp_path / "small")
    path = write_jsonl(tmp_path / "t.jsonl", conversations(4))
    message = refusal(make_run(tmp_path / "small", {"train": path}), RunDir(tmp_path / "run"))
    assert message.startswith(f"The tokenizer of '{tmp_path}/small' produces token id ")
    assert "but the model's vocab_size is 50. " in message


def test_a_model_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    LlamaConfig().save_pretrained(tmp_path / "bare")
    path = write_jsonl(tmp_path / "t.jsonl", conversations(4))
    message = refusal(make_run(tmp_path / "bare", {"train": path}), RunDir(tmp_path / "run"))
    assert message.startswith(f"Cannot load the tokenizer of '{tmp_path}/bare': ")
