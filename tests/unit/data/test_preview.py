"""The preview of training examples."""

import json
from pathlib import Path

import pytest

from shardmake.core.errors import ConfigError, DataError
from shardmake.data.check import check_first_rows
from shardmake.data.stage import prepare, preview
from shardmake.run.paths import RunDir
from tests.unit.data.test_encode import MARKED, chat
from tests.unit.data.test_stage import make_run, model, write_rows

__all__ = ["model"]


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


def test_keys_of_messages_and_arguments_that_nothing_reads_are_named(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "shardmake")
    path = write_rows(tmp_path / "t.jsonl", [{"messages": [{**one, "train": False} for one in chat("u:a", "a:b")]}])
    list(preview(make_run(model, {"train": path}), 1, RunDir(tmp_path / "run")))
    words = "the examples are in the format chat (messages). Keys of messages that are not used: train."
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
