"""The data stage on real files with a real tokenizer: counts, files, reruns, refusals."""

import errno
import json
import multiprocessing
import os
import re
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import datasets
import pytest
import torch
from transformers import LlamaConfig

from shardmake.config.inputs import check_inputs
from shardmake.config.load import parse_config
from shardmake.config.models import Run
from shardmake.core.atomic import read_json, sha256, unsealed
from shardmake.core.errors import ShardmakeError
from shardmake.core.failures import explain
from shardmake.data import build
from shardmake.data.check import check_first_rows, check_sources
from shardmake.data.dataset import IGNORED, Sequences, collator
from shardmake.data.stage import prepare
from shardmake.run.paths import RunDir
from tests.unit.data.test_encode import MARKED, PLAIN, chat, make_tokenizer, shown, talk
from tests.unit.data.test_files import COMPRESSORS, as_csv
from tests.unit.wording import Wording

LENGTH = 64


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder as far as the data stage reads it: tokenizer and config."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = make_tokenizer(MARKED)
    tokenizer.save_pretrained(folder)
    LlamaConfig(vocab_size=len(tokenizer)).save_pretrained(folder)
    return folder


def write_rows(path: Path, rows: list[Any]) -> str:
    """Write rows in the kind of file and with the compression that the name states."""
    kind = "".join(path.suffixes[:1])
    if kind == ".parquet":
        datasets.Dataset.from_list(rows).to_parquet(str(path))
        return str(path)
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    if kind in (".csv", ".tsv"):
        lines = as_csv(rows, "," if kind == ".csv" else "\t")
    content = {".jsonl": lines, ".json": json.dumps(rows).encode()}.get(kind, lines)
    path.write_bytes(COMPRESSORS["".join(path.suffixes[1:])](content))
    return str(path)


def conversations(count: int, seed: int = 0) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, 25, (count, 2), generator=generator).tolist()
    return [talk("u:" + "q" * asked, "a:" + "w" * answered) for asked, answered in sizes]


def make_run(model: Path, data: dict[str, Any], **changes: Any) -> Run:
    values = {"model": str(model), "data": data, "sequence_length": LENGTH, "global_batch_size": 4, "max_steps": 5}
    run = {**values, "learning_rate": 1e-3, **changes}
    return parse_config({"cluster": "c", "runs": {"chat": run}}, "test").runs["chat"]


def decoded(model: Path, folder: Path, split: Any) -> list[str]:
    """Every example of a split, learned stretches in brackets."""
    tokenizer, found = make_tokenizer(MARKED), []
    for item in (data := Sequences(folder, split)) and [data[i] for i in range(len(data))]:
        starts = (item["position_ids"] == 0).nonzero().flatten().tolist()
        for start, end in zip(starts, [*starts[1:], None], strict=True):
            ids, labels = item["input_ids"][start:end], item["labels"][start:end]
            assert torch.equal(labels[labels != IGNORED], ids[labels != IGNORED])
            found.append(shown(tokenizer, (ids.tolist(), (labels != IGNORED).tolist())))
    return found


@pytest.mark.parametrize(("change", "words"), [
    ({"rms_norm_eps": "1e-6"}, "rms_norm_eps"), ({"dtype": "nope"}, "nope"), ({"attention_bias": 7}, "bool"),
])  # fmt: skip
def test_a_config_that_is_rejected_is_refused(model: Path, tmp_path: Path, change: dict[str, Any], words: str) -> None:
    folder = shutil.copytree(model, tmp_path / "model")
    (folder / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | change))
    run = make_run(folder, {"train": write_rows(tmp_path / "t.jsonl", conversations(4))})
    message = rf"^transformers rejects the config\.json of .*{words}.* Use the config\.json"
    with pytest.raises(ShardmakeError, match=message):
        check_first_rows(run)


@pytest.mark.parametrize("packing", [True, False])
def test_every_example_is_there_once_with_its_answer_learned(model: Path, tmp_path: Path, packing: bool) -> None:
    rows = conversations(60)
    data = {"train": write_rows(tmp_path / "t.jsonl", rows), "eval": write_rows(tmp_path / "e.jsonl", rows[:5])}
    rundir = RunDir(tmp_path / "run")
    receipt = prepare(make_run(model, data, packing=packing), rundir).as_json()
    expected = [f"<user>{r['messages'][0]['content']}</s><assistant>[{r['messages'][1]['content']}</s>]" for r in rows]
    assert sorted(decoded(model, rundir.data, "train")) == sorted(expected)
    assert sorted(decoded(model, rundir.data, "eval")) == sorted(expected[:5])
    rundir.data_receipt.write_text("{")
    assert prepare(make_run(model, data, packing=packing), rundir).as_json() == receipt, "a cut receipt is replaced"
    assert receipt == unsealed(read_json(rundir.data_receipt, "test"))
    words = sum(len(m["content"]) + 2 for r in rows for m in r["messages"])
    learned = sum(len(r["messages"][1]["content"]) + 1 for r in rows)
    counts = {key: receipt["train"][key] for key in ("examples", "tokens", "loss_tokens")}
    assert counts == {"examples": 60, "tokens": words, "loss_tokens": learned}
    assert (receipt["train"]["sequences"] < 60) is packing
    batch = collator(rundir.data, "sdpa")([Sequences(rundir.data, "train")[0]])
    assert batch["input_ids"].shape == (1, LENGTH)
    assert ("position_ids" in batch, "attention_mask" in batch) == (packing, not packing)
    assert not list(tmp_path.glob("run/.data*"))


def test_long_examples_are_cut_and_counted(model: Path, tmp_path: Path) -> None:
    rows = [talk("u:a", "a:" + "b" * 100), talk("u:" + "a" * 100, "a:b"), talk("u:a"), talk("u:a", "a:b")]
    path = write_rows(tmp_path / "t.jsonl", rows)
    rundir = RunDir(tmp_path / "run")
    receipt = prepare(make_run(model, {"train": path, "eval": path}), rundir).as_json()
    counts = {"examples": 4, "truncated": 1, "split": 0, "dropped_without_loss": 1, "dropped_loss_truncated": 1}
    assert {key: receipt["train"][key] for key in counts} == counts
    longest = "<user>a</s><assistant>[" + "b" * (LENGTH - 4) + "]"
    assert sorted(decoded(model, rundir.data, "train")) == sorted([longest, "<user>a</s><assistant>[b</s>]"])
    write_rows(tmp_path / "t.jsonl", [{"text": "a" * 150}, {"text": "b" * 10}])
    split = prepare(make_run(model, {"train": path, "eval": path}), rundir)
    assert (split.train.examples, split.train.split, split.train.truncated, split.train.tokens) == (2, 1, 0, 164)
    assert not split.loss_on_assistant and split.data_format == "text"


@pytest.mark.parametrize("order", ["shuffled", "length", "given"])
def test_the_training_examples_lie_in_the_order_of_the_run(model: Path, tmp_path: Path, order: str) -> None:
    """Held-out examples are missing from the order; `length` shuffles examples of one length by the seed."""
    texts = [f"{i:02}" + "x" * (i * 7 % 5) for i in range(60)]
    data = {"train": write_rows(tmp_path / "t.jsonl", [{"text": text} for text in texts]), "eval_fraction": 0.1}
    made = {}
    for name, seed in (("run", 42), ("again", 42), ("other", 43)):
        rundir = RunDir(tmp_path / name)
        prepare(make_run(model, data | {"order": order}, packing=False, seed=seed), rundir)
        made[name] = [re.sub("[^0-9x]", "", text) for text in decoded(model, rundir.data, "train")]
        evaluated = [re.sub("[^0-9x]", "", text) for text in decoded(model, rundir.data, "eval")]
        assert sorted([*made[name], *evaluated]) == texts and len(evaluated) == 6
    kept = made["run"]
    assert made["again"] == kept != made["other"], "the seed also decides which examples are held out"
    assert (kept == [text for text in texts if text in kept]) == (order == "given")
    assert (list(map(len, kept)) == sorted(map(len, kept))) == (order == "length")
    assert order != "length" or kept != sorted(kept, key=lambda text: (len(text), text))


def files_of(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): sha256(path) for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("packing", [True, False])
def test_repeats_are_counted(model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, packing: bool) -> None:
    rows = conversations(40)
    fresh = [talk(f"u:{'e' * size}", "a:wwe") for size in range(1, 6)]
    data = {
        "train": write_rows(tmp_path / "train.jsonl", rows),
        "eval": write_rows(tmp_path / "eval.jsonl", [*fresh, rows[3], rows[7]]),
    }
    receipt = prepare(make_run(model, data, packing=packing), RunDir(tmp_path / "run"))
    assert receipt.repeated == 2 and "Evaluation examples with the same tokens as a training example: 2." in caplog.text
    write_rows(tmp_path / "eval.jsonl", fresh)
    assert prepare(make_run(model, data, packing=packing), RunDir(tmp_path / "run")).repeated == 0


def test_the_seed_decides_and_not_the_processes(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_POOL_FROM_ROWS", 10)
    data = {"train": write_rows(tmp_path / "t.jsonl", conversations(300))}
    made = {}
    for name, cpus, seed in (("one", 1, 42), ("two", 2, 42), ("other", 1, 43)):
        prepare(make_run(model, data, seed=seed), RunDir(tmp_path / name / "run"), cpus=cpus)
        made[name] = files_of(tmp_path / name / "run")
    arrow = "data/train/data-00000-of-00001.arrow"
    for file in (arrow, "data/receipt.json"):
        assert made["one"][file] == made["two"][file] != made["other"][file]


def test_a_killed_stage_encodes_what_is_missing(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The result is that of a stage that was not killed, and other inputs start again."""
    monkeypatch.setattr(build, "_ROWS_IN_BATCH", 10)
    monkeypatch.setattr(build, "_PARTS", 3)
    run = make_run(model, {"train": write_rows(tmp_path / "t.jsonl", conversations(100))})
    prepare(run, RunDir(tmp_path / "whole" / "run"))
    write, written = build._write_part, []

    def write_or_die(path: Path, batches: Any) -> None:
        if len(written) == 2 and os.getpid() != parent:
            os._exit(9)
        written.append(path)
        write(path, batches)

    monkeypatch.setattr(build, "_write_part", write_or_die)
    rundir, parent = RunDir(tmp_path / "killed" / "run"), os.getpid()
    child = multiprocessing.get_context("fork").Process(target=prepare, args=(run, rundir))
    child.start()
    child.join()
    assert child.exitcode == 9 and not written
    other = make_run(model, run.data.model_dump(), seed=1)
    shutil.copytree(rundir.root, tmp_path / "other" / "run")
    prepare(run, rundir)
    assert len(written) == 2 and files_of(rundir.root) == files_of(tmp_path / "whole" / "run")
    prepare(other, RunDir(tmp_path / "other" / "run"))
    assert len(written) == 6


def test_up_to_date_data_are_not_rewritten(model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "shardmake")
    path = tmp_path / "t.jsonl"
    run = make_run(model, {"train": write_rows(path, conversations(20))})
    rundir = RunDir(tmp_path / "run")
    first = prepare(run, rundir)
    caplog.clear()
    os.utime(rundir.data_receipt, (1, 1))
    arrow = rundir.data / first.train.files[0].path
    assert prepare(run, rundir) == first and caplog.messages == [f"{rundir.data} is up to date."]
    arrow.unlink()
    assert prepare(run, rundir) == first and arrow.exists() and rundir.data_receipt.stat().st_mtime == 1
    write_rows(path, conversations(21))
    assert prepare(run, rundir).digest != first.digest and rundir.data_receipt.stat().st_mtime != 1


@pytest.mark.parametrize("cpus", [1, 2], ids=["one process", "workers"])
def test_a_failure_names_its_line(model: Path, tmp_path: Path, cpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_POOL_FROM_ROWS", 10)
    path = tmp_path / "t.jsonl"
    run = make_run(model, {"train": write_rows(path, conversations(20))})
    rundir = RunDir(tmp_path / "run")
    prepare(run, rundir)
    before = files_of(rundir.root)
    path.write_text(path.read_text() + "{\n")
    assert refusal(run, rundir, cpus).startswith(f"{path}, line 21 is not valid JSON: ")
    assert files_of(rundir.root) == before


def refusal(run: Run, rundir: RunDir, cpus: int = 1) -> str:
    with pytest.raises(ShardmakeError) as error:
        prepare(run, rundir, cpus=cpus)
    return str(error.value)


@pytest.mark.parametrize(("split", "line", "message"), [
    ("eval", "{", r"t\.jsonl, line 151 is not valid JSON: "),
    ("train", '{"messages": [{"role": "user", "content": 7}]}', r"line 151: messages\[0\]\.content is int\. "),
])  # fmt: skip
def test_every_example_of_text_is_checked_without_a_model(tmp_path: Path, split: str, line: str, message: str) -> None:
    path, other = tmp_path / "t.jsonl", write_rows(tmp_path / "o.jsonl", conversations(3))
    run = make_run(tmp_path / "nowhere", {"train": other, "eval": other, split: write_rows(path, conversations(150))})
    check_sources(run)
    path.write_text(f"{path.read_text()}{line}\n")
    with pytest.raises(ShardmakeError, match=message):
        check_sources(run)
    with pytest.raises(ShardmakeError, match=r"No examples in .*e\.json\."):
        check_sources(make_run(tmp_path, {"train": write_rows(tmp_path / "e.json", [])}))


@pytest.mark.parametrize(("held_out", "trained"), [("", False), ("/test.jsonl", False), ("/train.jsonl", True)])
def test_files_of_a_folder_are_for_training_or_for_evaluation(tmp_path: Path, held_out: str, trained: bool) -> None:
    for name in ("train", "test"):
        write_rows(tmp_path / f"{name}.jsonl", conversations(3))
    run = make_run(tmp_path, {"train": str(tmp_path), "eval": f"{tmp_path}{held_out}"})
    check_inputs("chat", run.model_copy(update={"model": "org/base"}))
    if trained:
        with pytest.raises(ShardmakeError, match=r"data\.eval: .*train\.jsonl has the examples of data\.train"):
            check_sources(run)
    else:
        assert check_sources(run) == [3, 3]


def test_the_first_rows_and_a_sample_of_the_others_are_encoded(model: Path, tmp_path: Path) -> None:
    train, held_out = tmp_path / "t.jsonl", tmp_path / "e.jsonl"
    write_rows(train, conversations(40))
    late = train.read_text() + '{"messages": [{"role": "human", "content": "a"}]}\n' * 20
    train.write_text(late)
    with pytest.raises(ShardmakeError, match=r"t\.jsonl, line (4|5|6)\d: message 1 has the role 'human'"):
        check_first_rows(make_run(model, {"train": str(train)}), limit=10)
    write_rows(train, conversations(3))
    assert check_first_rows(make_run(model, {"train": str(train)}), limit=3)[0].rows == 3
    train.write_text(train.read_text() + "{\n")
    write_rows(held_out, [*conversations(1), {"text": "a"}])
    run = make_run(model, {"train": str(train)})
    with pytest.raises(ShardmakeError, match=r"t\.jsonl, line 4 is not valid JSON: "):
        check_first_rows(run)
    with pytest.raises(ShardmakeError, match=r"e\.jsonl, line 2: this example \(chat\) has no messages"):
        check_first_rows(make_run(model, {"train": str(held_out), "eval": str(held_out)}), limit=3)
    write_rows(train, conversations(3))
    held_out.write_text("\n")
    with pytest.raises(ShardmakeError, match=r"No examples in .*e\.jsonl\."):
        check_first_rows(make_run(model, {"train": str(train), "eval": str(held_out)}), limit=3)


def test_bad_rows_are_dropped_up_to_a_limit(model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    bad: list[Any] = [talk("h:a", "a:b"), {"messages": 3}]
    path = write_rows(tmp_path / "t.jsonl", [*conversations(58), *bad])
    data = {"train": path, "eval": write_rows(tmp_path / "e.jsonl", conversations(3))}
    for check in (check_sources, check_first_rows):
        with pytest.raises(ShardmakeError, match=r"t\.jsonl, line (59|60): "):
            check(make_run(model, data))
    run = make_run(model, data | {"on_bad_row": "drop"})
    check_sources(run)
    check_first_rows(run)
    receipt = prepare(run, RunDir(tmp_path / "run"))
    causes = {"an unknown role": 1, "not in the format": 1}
    assert (receipt.train.bad, receipt.train.dropped_bad, receipt.train.examples) == (causes, 2, 60)
    words = "Bad rows of the train data: 2 of 60 (1 an unknown role; 1 not in the format). The first: "
    assert any(message.startswith(f"{words}{path}, line 59: message 1 has the role") for message in caplog.messages)
    write_rows(tmp_path / "t.jsonl", [*conversations(37), *bad, bad[0]])
    for stage in (check_first_rows, lambda run: prepare(run, RunDir(tmp_path / "run"))):
        with pytest.raises(ShardmakeError, match=r"3 of 40 .* data\.on_bad_row: drop allows 5%"):
            stage(run)


def test_turns_apart_and_odd_shares_are_named(model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    rows = [talk("u:a", "a:b", "u:c", "a:d", "u:" + "e" * 40, "a:f")] * 4 + conversations(2)
    data = {"train": write_rows(tmp_path / "t.jsonl", rows), "eval": write_rows(tmp_path / "e.jsonl", conversations(2))}
    receipt = prepare(make_run(model, data | {"turns": "apart"}), RunDir(tmp_path / "run"))
    assert (receipt.train.apart, receipt.train.examples, receipt.eval.apart) == (4, 14, 0)
    assert any("of 4 conversations each turn is an example with its own context" in text for text in caplog.messages)
    together = prepare(make_run(model, data), RunDir(tmp_path / "run"))
    assert (together.train.apart, together.train.examples) == (0, 6)
    long = [talk("u:" + "q" * 900, "a:b")] * 4
    write_rows(tmp_path / "t.jsonl", long)
    check_first_rows(make_run(model, data, sequence_length=2048))
    assert any("data are learned (0." in text and "--show 3" in text for text in caplog.messages)


@pytest.mark.parametrize("agree", [True, False, None])
def test_marks_are_compared(model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, agree: bool | None) -> None:
    others = MARKED.replace("</s>{% endgeneration %}", "{% endgeneration %}</s>")
    marked = {True: MARKED, False: others, None: PLAIN}[agree]
    (tmp_path / "chat.jinja").write_text(marked)
    path = write_rows(tmp_path / "t.jsonl", conversations(4))
    run = make_run(model, {"train": path, "chat_template": str(tmp_path / "chat.jinja")})
    check_first_rows(run)
    warned = any("marks of the chat template are not followed" in text for text in caplog.messages)
    assert warned == (agree is False) and prepare(run, RunDir(tmp_path / "run")).marks_agree is agree


def test_a_column_that_only_later_rows_have_may_be_named(model: Path, tmp_path: Path) -> None:
    rows = [talk("u:a", "a:b"), talk("u:a", "a:b", functions="[]")]
    path = write_rows(tmp_path / "t.jsonl", rows)
    data = {"train": path, "columns": {"tools": "functions"}}
    check_first_rows(make_run(model, data))
    data["columns"] = {"tools": "function"}
    message = rf"data\.columns\.tools: 'function' is not a column of {path}\. Did you mean 'functions'\?"
    with pytest.raises(ShardmakeError, match=message):
        check_first_rows(make_run(model, data))


def test_the_chat_template_of_the_run_replaces_that_of_the_tokenizer(model: Path, tmp_path: Path) -> None:
    rows = conversations(6)
    template = tmp_path / "chat.jinja"
    template.write_text(MARKED.replace("<{{ m.role }}>", "<assistant>"))
    data = {"train": write_rows(tmp_path / "t.jsonl", rows), "eval": write_rows(tmp_path / "e.jsonl", rows)}
    before = prepare(make_run(model, data), RunDir(tmp_path / "one"))
    run, rundir = make_run(model, data | {"chat_template": str(template)}), RunDir(tmp_path / "run")
    after = prepare(run, rundir)
    expected = [f"<assistant>{r['messages'][0]['content']}</s>" for r in rows]
    assert all(text.startswith(tuple(expected)) for text in decoded(model, rundir.data, "train"))
    assert before.digest != after.digest


def test_rows_with_nothing_to_learn_are_named(model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = conversations(40)
    for index in (3, 9, 10, 20, 21, 22, 23):
        rows[index]["messages"][1]["role"] = "user"
    path = write_rows(tmp_path / "t.jsonl", rows)
    run = make_run(model, {"train": path, "eval": write_rows(tmp_path / "e.jsonl", conversations(3))})
    receipt = prepare(run, RunDir(tmp_path / "run"))
    named = [f"{path}, line {number}" for number in (4, 10, 11, 21, 22)]
    assert receipt.train.dropped_without_loss == 7 and receipt.train.first_dropped == named
    words = "Examples of the {} data with nothing to learn are dropped: 7 of 40. The first: "
    words += f"{'; '.join(named)}. Only messages with the role assistant are learned."
    assert words.format("train") in caplog.messages
    check_first_rows(run)
    assert words.format("first rows of the train") in caplog.messages


_CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "now", "arguments": {}}}]}
_SILENT: list[tuple[dict[str, Any], int]] = [
    (talk("u:a", "a:"), 1), (talk("u:a", {**_CALL, "tool_calls": []}), 1), (talk("u:a", "a: \n", "u:b", "a:c"), 1),
    ({"prompt": "a", "completion": ""}, 1),
    ({"instruction": "a", "output": " "}, 1), ({"prompt": chat("u:a"), "completion": chat("a:")}, 1),
    (talk("u:", "a:b"), 0), (talk("u:a", _CALL), 0), (talk("u:a", {**_CALL, "tool_calls": [], "weight": 0}), 0),
    (talk("u:a", {"role": "assistant", "content": "", "reasoning_content": "c"}), 0), ({"text": ""}, 0),
]  # fmt: skip


@pytest.mark.parametrize(("row", "count"), _SILENT)
def test_answers_without_text_are_named(
    row: dict[str, Any], count: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Axolotl does not learn them, and TRL does; the model then ends such answers at once."""
    check_sources(make_run(tmp_path, {"train": (path := write_rows(tmp_path / "t.jsonl", [row, row]))}))
    words = f"{path}: examples with an answer without text: {2 * count}. "
    assert [message.startswith(words) for message in caplog.messages] == [True] * count


@pytest.mark.parametrize("writer", ["Dataset.save_to_disk", "arrow_writer.ArrowWriter.write_examples_on_file"])
def test_a_full_disk_is_reported(model: Path, tmp_path: Path, writer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_rows(tmp_path / "t.jsonl", conversations(5))
    rundir = RunDir(tmp_path / "run")
    monkeypatch.setattr(f"datasets.{writer}", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(OSError, match="No space left") as error:
        prepare(make_run(model, {"train": path}), rundir)
    message = f"Cannot use {rundir.root}. No space is left on its file system. Free some space "
    assert str(explain(error.value, rundir.root)).startswith(message) and not list(tmp_path.glob("run/.data*"))


UNUSABLE: dict[str, tuple[list[Any], str | None, int]] = {
    "nothing to learn": ([talk("u:a")] * 3, MARKED, 128), "one example": (conversations(1), MARKED, 128),
    "another tokenizer": (conversations(4), MARKED, 50), "no tokenizer": (conversations(4), "", 128),
    "no template": (conversations(5), None, 128),
}  # fmt: skip


@pytest.mark.parametrize("case", UNUSABLE)
def test_what_cannot_be_used_is_refused(tmp_path: Path, case: str, wording: Wording) -> None:
    rows, template, vocabulary = UNUSABLE[case]
    folder, path = tmp_path / "model", write_rows(tmp_path / "t.jsonl", rows)
    LlamaConfig(vocab_size=vocabulary).save_pretrained(folder)
    if template != "":
        make_tokenizer(template).save_pretrained(folder)
    run = make_run(folder, {"train": path} | ({"eval": path} if len(rows) == 3 else {}))
    found = refusal(run, RunDir(tmp_path / "run"))
    wording(found.partition(": ")[0] if case == "no tokenizer" else found)  # a library's words follow
    with pytest.raises(ShardmakeError, match=re.escape(found.partition(" data has")[0].partition("train")[0])):
        check_first_rows(run)
