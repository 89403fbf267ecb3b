"""The data stage of several runs: the same content in every format and kind of file, shared files, the preview."""

import json
import shutil
import socket
import threading
from pathlib import Path
from typing import Any

import datasets
import pytest

from shardmake.core.atomic import digest
from shardmake.core.errors import ConfigError, DataError
from shardmake.data import stage
from shardmake.data.check import check_first_rows, check_sources
from shardmake.data.stage import ENCODING, prepare, preview
from shardmake.run.paths import RunDir
from tests.checkpoint_record import flip
from tests.unit.data.test_chat import LEARNED, encoder
from tests.unit.data.test_encode import MARKED, chat
from tests.unit.data.test_stage import conversations, make_run, model, write_rows
from tests.unit.data.test_trl import ADDED, CHAT, TEXT, of_ours, tokenizer_that_adds

__all__ = ["model"]

QUESTIONS = [(f'ask, "{i}"\n{i}', f"say {i}") for i in range(30)]
SHAREGPT = [
    {"conversations": [{"from": "human", "value": q}, {"from": "gpt", "value": a}], "id": i}
    for i, (q, a) in enumerate(QUESTIONS)
]
CHATS = [{"messages": chat(f"u:{q}", f"a:{a}")} for q, a in QUESTIONS]
PARTS = [
    {"dialog": [{"speaker": m["role"], "said": [{"type": "text", "text": m["content"]}]} for m in row["messages"]]}
    for row in CHATS
]
MAPPED: dict[str, Any] = {"columns": {"messages": "dialog", "role": "speaker", "content": "said"}, "format": "chat"}
ALPACA = [{"instruction": q.partition("\n")[0], "input": "", "output": a, "source": "x"} for q, a in QUESTIONS]
SAME: dict[str, tuple[str, list[dict[str, Any]], dict[str, Any]]] = {
    "lines": ("t.jsonl", CHATS, {}), "array": ("t.json", CHATS, {}), "compressed": ("t.json.gz", CHATS, {}),
    "parquet": ("t.parquet", CHATS, {}), "sharegpt": ("t.jsonl.xz", SHAREGPT, {}),
    "sharegpt-parquet": ("t.parquet", SHAREGPT, {"format": "sharegpt"}), "mapped": ("t.json", PARTS, MAPPED),
    "mapped-parquet": ("t.parquet", PARTS, MAPPED),
}  # fmt: skip
PROMPTED: dict[str, tuple[str, list[dict[str, Any]], dict[str, Any]]] = {
    "lines": ("t.jsonl", [{"prompt": q, "completion": a} for q, a in QUESTIONS], {}),
    "csv": ("t.csv", [{"prompt": q, "completion": a} for q, a in QUESTIONS], {}),
    "tsv": ("t.tsv.bz2", [{"completion": a, "prompt": q} for q, a in QUESTIONS], {}),
    "mapped": ("t.csv.zst", [{"id": i, "question": q, "answer": a} for i, (q, a) in enumerate(QUESTIONS)],
               {"columns": {"prompt": "question", "completion": "answer"}}),
}  # fmt: skip
INSTRUCTED: dict[str, tuple[str, list[dict[str, Any]], dict[str, Any]]] = {
    "chat": ("t.jsonl", [{"messages": chat(f"u:{row['instruction']}", f"a:{row['output']}")} for row in ALPACA], {}),
    "lines": ("t.jsonl", ALPACA, {}),
    "csv": ("t.csv.gz", ALPACA, {"format": "alpaca"}),
    "parquet": ("t.parquet", ALPACA, {}),
}


@pytest.mark.parametrize("family", [SAME, PROMPTED, INSTRUCTED], ids=["conversations", "prompts", "instructions"])
def test_formats_give_the_same_data(model: Path, tmp_path: Path, family: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is read from the network or kept outside the run."""
    receipts, cache = {}, tmp_path / "cache"
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("a connection to the network"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    for name, (file, rows, settings) in family.items():
        folder = tmp_path / name
        folder.mkdir()
        run = make_run(model, {"train": write_rows(folder / file, rows), **settings})
        shutil.rmtree(cache, ignore_errors=True)  # writing a Parquet file made it
        check_sources(run)
        check_first_rows(run)
        receipts[name] = prepare(run, RunDir(folder / "run"))
        assert not cache.exists() and {path.name for path in folder.iterdir()} == {file, "run", ".locks"}
        assert [path.name for path in (folder / "run").iterdir()] == ["data"]
    assert len({receipt.digest for receipt in receipts.values()}) == 1
    assert {receipt.train.examples for receipt in receipts.values()} == {29}
    if "mapped" in family:
        assert receipts["mapped"].settings.columns == family["mapped"][2]["columns"]
        assert receipts["mapped"].columns.items() >= family["mapped"][2]["columns"].items()


PROMPTS = [(chat(f"u:{q}"), chat(f"a:{a}"), i % 2 == 0) for i, (q, a) in enumerate(QUESTIONS)]
ALIKE: dict[str, tuple[str, list[list[dict[str, Any]]]]] = {
    "labels as text": ("kto", [[{"prompt": q, "completion": a, "label": label} for (q, a), label in
                                zip(QUESTIONS, kinds * 15, strict=True)] for kinds in ([True, False], ["True", "false"])]),
    "labels of conversations": ("kto", [[{"prompt": p, "completion": a, "label": label} for p, a, label in PROMPTS],
                                        [{"messages": [*p, *a], "label": label} for p, a, label in PROMPTS]]),
    "rejected texts": ("dpo", [[{"prompt": p, "chosen": a, "rejected": chat("a:no")} for p, a, _ in PROMPTS],
                               [{"messages": [*p, *a], "rejected_response": "no"} for p, a, _ in PROMPTS]]),
    "JSON text": ("dpo", [[{"prompt": p, "chosen": a, "rejected": chat("a:no")} for p, a, _ in PROMPTS],
                          [{"chosen": json.dumps([*p, *a]), "rejected": json.dumps([*p, *chat("a:no")])}
                           for p, a, _ in PROMPTS]]),
}  # fmt: skip


@pytest.mark.parametrize("case", ALIKE)
def test_preferences_of_other_tools_give_the_same_data(
    model: Path, tmp_path: Path, case: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "shardmake")
    objective, written = ALIKE[case]
    files = [write_rows(tmp_path / f"{number}.jsonl", rows) for number, rows in enumerate(written)]
    runs = [make_run(model, {"train": file}, objective=objective) for file in files]
    receipts = [prepare(run, RunDir(tmp_path / f"run-{number}")) for number, run in enumerate(runs)]
    assert receipts[0].digest == receipts[1].digest and receipts[0].train.loss_tokens > 0
    assert ("JSON text in chosen, rejected is read as messages." in caplog.text) == (case == "JSON text")


def test_what_was_recognized_is_logged(model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "shardmake")
    path = write_rows(tmp_path / "t.jsonl", [row | {"system_prompt": "Be brief."} for row in ALPACA])
    receipt = prepare(make_run(model, {"train": path}), RunDir(tmp_path / "run"))
    unused = "Columns that are not used: source, system_prompt."
    assert f"{path}: the examples are in the format alpaca (instruction, output). {unused}" in caplog.messages
    (warned,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert "the column system_prompt is not used, from which other tools take the system message" in warned
    assert receipt.data_format == "alpaca" and receipt.loss_on_assistant
    assert receipt.columns == {c: c for c in ("instruction", "output", "input", "system")}


def test_a_column_of_marks_is_not_ignored(model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_rows(
        tmp_path / "t.jsonl", [row | {"keep": [0, 1], "score": [1, 2], "history": [["a", "b"]]} for row in CHATS]
    )
    caplog.set_level("INFO", "shardmake")
    prepare(make_run(model, {"train": path}), RunDir(tmp_path / "run"))
    warned = [message for message in caplog.messages if "is not used, from which other tools" in message]
    assert ["the column keep is not used, from which other tools take what is learned" in one for one in warned] == [
        True
    ]
    assert "Columns that are not used: keep, score, history." in caplog.text


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The workspaces in which data was tokenized."""
    found: list[Path] = []
    original = stage.build

    def build(*arguments: object, **named: object) -> object:
        found.append(arguments[3])  # type: ignore[arg-type]
        return original(*arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(stage, "build", build)
    return found


def test_equal_content_is_tokenized_once(model: Path, tmp_path: Path, built: list[Path]) -> None:
    """Also from a copy in another folder, as of a fetched data set; another seed has other held-out examples."""
    examples = write_rows(tmp_path / "t.jsonl", conversations(30))
    (tmp_path / "copy").mkdir()
    copy = shutil.copy(examples, tmp_path / "copy/t.jsonl")
    first = prepare(make_run(model, {"train": examples}, learning_rate=1e-5), RunDir(tmp_path / "runs/a"))
    second = prepare(make_run(model, {"train": str(copy)}, learning_rate=2e-5), RunDir(tmp_path / "runs/b"))
    assert len(built) == 1 and second.digest == first.digest
    assert second.sources["train"]["files"][0]["path"] == str(copy)
    arrow = second.train.files[0].path
    assert (tmp_path / "runs/a/data" / arrow).samefile(tmp_path / "runs/b/data" / arrow)
    shutil.rmtree(tmp_path / "runs/a")
    assert prepare(make_run(model, {"train": str(copy)}), RunDir(tmp_path / "runs/b")) == second and len(built) == 1
    assert prepare(make_run(model, {"train": examples}, seed=7), RunDir(tmp_path / "runs/c")).digest != first.digest
    assert len(built) == 2


def test_damaged_files_of_another_run_are_not_taken(model: Path, tmp_path: Path, built: list[Path]) -> None:
    run = make_run(model, {"train": write_rows(tmp_path / "t.jsonl", conversations(30))})
    first = prepare(run, RunDir(tmp_path / "runs/a"))
    arrow = tmp_path / "runs/a/data" / first.train.files[0].path
    flip(arrow, -9)
    assert prepare(run, RunDir(tmp_path / "runs/b")) == first and len(built) == 2
    assert (tmp_path / "runs/b/data" / first.train.files[0].path).read_bytes() != arrow.read_bytes()


def test_files_of_other_rules(model: Path, tmp_path: Path, built: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The run that has them keeps them."""
    run = make_run(model, {"train": write_rows(tmp_path / "t.jsonl", conversations(30))})
    first = prepare(run, RunDir(tmp_path / "runs/a"))
    monkeypatch.setattr("shardmake.data.stage.ENCODING", 0)
    assert prepare(run, RunDir(tmp_path / "runs/b")).encoding == 0
    assert prepare(run, RunDir(tmp_path / "runs/a")) == first and len(built) == 2


def test_other_tokens_have_another_version_of_the_encoding() -> None:
    """If tokens or masks change on purpose, raise ENCODING, and write the new digest beside it."""
    chats = [encoder(template)(row, "here") for _, template, row, _ in LEARNED]
    others = [
        of_ours(tokenizer_that_adds(added), "sft" if case == "text" else case, form[case])  # type: ignore[arg-type]
        for added in ADDED.values()
        for form in (TEXT, CHAT)
        for case in form
    ]
    assert (ENCODING, digest([chats, others])) == (5, "ec9ea5c318f21297"), "raise ENCODING: examples have other tokens"


def test_runs_that_start_together_wait_for_the_first_one(model: Path, tmp_path: Path, built: list[Path]) -> None:
    run = make_run(model, {"train": write_rows(tmp_path / "t.jsonl", conversations(30))})
    threads = [threading.Thread(target=prepare, args=(run, RunDir(tmp_path / "runs" / name))) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 1
    assert (tmp_path / "runs/a/data/receipt.json").read_bytes() == (tmp_path / "runs/b/data/receipt.json").read_bytes()


def test_loss_tokens_are_marked_and_a_cut_is_shown(model: Path, tmp_path: Path) -> None:
    rows = [{"messages": chat("u:hi", "a:yes")}, {"messages": chat("u:hi", "a:" + "w" * 9)}, {"messages": []}]
    data = {"train": write_rows(tmp_path / "t.jsonl", rows)}
    shown = preview(make_run(model, data, sequence_length=9), 3, RunDir(tmp_path / "run"))
    first, second = (next(shown).splitlines() for _ in range(2))
    with pytest.raises(DataError, match="line 3: messages is not a list"):
        next(shown)
    assert first[0] == f"{tmp_path / 't.jsonl'}, line 1: 9 tokens, 4 of them learned"
    texts = [text.replace(" ", "") for text in (first[1], second[1])]  # this tokenizer decodes to single characters
    assert texts == ["<user>hi</s><assistant>[[yes</s>]]", "<user>hi</s><assistant>[[wwww]][cut:6tokens]"]


def test_both_answers_of_a_pair_are_shown(model: Path, tmp_path: Path) -> None:
    rows = [{"prompt": "a:", "chosen": " b", "rejected": " c"}]
    run = make_run(model, {"train": write_rows(tmp_path / "t.jsonl", rows)}, objective="dpo", packing=False)
    shown = (text.replace(" ", "").splitlines() for text in preview(run, 1, RunDir(tmp_path / "run")))
    titles, texts = zip(*shown, strict=True)
    assert texts == ("<s>a:[[b</s>]]", "<s>a:[[c</s>]]")
    assert [title.rpartition(":")[0].rpartition(",")[2] for title in titles] == ["chosen", "rejected"]


def test_unread_keys_and_arguments_are_named(model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "shardmake")
    path = write_rows(tmp_path / "t.jsonl", [{"messages": [{**one, "lang": "en"} for one in chat("u:a", "a:b")]}])
    list(preview(make_run(model, {"train": path}), 1, RunDir(tmp_path / "run")))
    words = "the examples are in the format chat (messages). Keys of messages that are not used: lang."
    assert f"{path}: {words}" in caplog.messages
    run = make_run(model, {"train": path, "template_arguments": {"enable_thinkin": False}})
    with pytest.raises(ConfigError, match=r"data\.template_arguments\.enable_thinkin: the chat template does not"):
        list(preview(run, 1, RunDir(tmp_path / "run")))


def test_the_recorded_day_is_shown_and_a_dropped_row_is_named(model: Path, tmp_path: Path) -> None:
    template = "{%- if strftime_now is defined %}{{ strftime_now('%Y-%m-%d') }}</s>{% endif %}" + MARKED
    (tmp_path / "chat.jinja").write_text(template)
    rows = [{"messages": 3}, *({"messages": chat("u:a", f"a:{n}")} for n in range(60))]
    (tmp_path / "t.jsonl").write_text("{\n" + "".join(json.dumps(row) + "\n" for row in rows))
    data = {"train": str(tmp_path / "t.jsonl"), "chat_template": str(tmp_path / "chat.jinja"), "on_bad_row": "drop"}
    run, rundir = make_run(model, data), RunDir(tmp_path / "run")
    receipt = prepare(run, rundir)
    today = receipt.settings.day
    assert today and receipt.shown[0].startswith("Dropped: ") and today in receipt.shown[1].replace(" ", "")
    past = receipt.model_copy(update={"settings": receipt.settings.model_copy(update={"day": "1999-05-05"})})
    past.write(rundir.data_receipt)
    dropped, text = preview(run, 2, rundir)
    assert dropped.startswith(f"Dropped: {tmp_path}/t.jsonl, line 2: messages is not a list")
    assert "1999-05-05" in text.replace(" ", "") and check_first_rows(run, rundir=rundir)
    assert prepare(run, rundir) == past
