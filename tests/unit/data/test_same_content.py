"""The data stage on the same content in every format and kind of file."""

import shutil
import socket
from pathlib import Path
from typing import Any

import datasets
import pytest

from shardmake.data.check import check_first_rows, check_sources
from shardmake.data.stage import prepare
from shardmake.run.paths import RunDir
from tests.unit.data.test_encode import chat
from tests.unit.data.test_stage import make_run, model, write_rows

__all__ = ["model"]

QUESTIONS = [(f'ask, "{i}"\n{i}', f"say {i}") for i in range(30)]
SHAREGPT = [
    {"conversations": [{"from": "human", "value": q}, {"from": "gpt", "value": a}], "id": i}
    for i, (q, a) in enumerate(QUESTIONS)
]
CHAT = [{"messages": chat(f"u:{q}", f"a:{a}")} for q, a in QUESTIONS]
PARTS = [
    {"dialog": [{"speaker": m["role"], "said": [{"type": "text", "text": m["content"]}]} for m in row["messages"]]}
    for row in CHAT
]
MAPPED: dict[str, Any] = {"columns": {"messages": "dialog", "role": "speaker", "content": "said"}, "format": "chat"}
ALPACA = [{"instruction": q.partition("\n")[0], "input": "", "output": a, "source": "x"} for q, a in QUESTIONS]
SAME: dict[str, tuple[str, list[dict[str, Any]], dict[str, Any]]] = {
    "lines": ("t.jsonl", CHAT, {}),
    "array": ("t.json", CHAT, {}),
    "compressed": ("t.json.gz", CHAT, {}),
    "parquet": ("t.parquet", CHAT, {}),
    "sharegpt": ("t.jsonl.xz", SHAREGPT, {}),
    "sharegpt-parquet": ("t.parquet", SHAREGPT, {"format": "sharegpt"}),
    "mapped": ("t.json", PARTS, MAPPED),
    "mapped-parquet": ("t.parquet", PARTS, MAPPED),
}
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
def test_the_same_content_gives_the_same_data_in_every_format(model: Path, tmp_path: Path, family: Any) -> None:
    receipts = {}
    for name, (file, rows, settings) in family.items():
        folder = tmp_path / name
        folder.mkdir()
        run = make_run(model, {"train": write_rows(folder / file, rows), **settings})
        check_sources(run)
        check_first_rows(run)
        receipts[name] = prepare(run, RunDir(folder / "run"))
    assert len({receipt.digest for receipt in receipts.values()}) == 1
    assert {receipt.train.examples for receipt in receipts.values()} == {29}
    if "mapped" in family:
        assert receipts["mapped"].settings.columns == family["mapped"][2]["columns"]
        assert receipts["mapped"].columns.items() >= family["mapped"][2]["columns"].items()


def test_what_was_recognized_is_logged(model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "shardmake")
    path = write_rows(tmp_path / "t.jsonl", ALPACA)
    receipt = prepare(make_run(model, {"train": path}), RunDir(tmp_path / "run"))
    message = f"{path}: the examples are in the format alpaca (instruction, output). Columns that are not used: source."
    assert message in caplog.messages
    assert receipt.data_format == "alpaca" and receipt.loss_on_assistant
    assert receipt.columns == {c: c for c in ("instruction", "output", "input", "system")}


def test_nothing_is_read_from_the_network_or_kept_outside_the_run(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object) -> None:
        raise AssertionError("a connection to the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    for name, (file, rows, settings) in {**SAME, **{f"p-{key}": value for key, value in PROMPTED.items()}}.items():
        (tmp_path / name).mkdir()
        data = {"train": write_rows(tmp_path / name / file, rows), **settings}
        shutil.rmtree(tmp_path / "cache", ignore_errors=True)  # writing a Parquet file made it
        prepare(make_run(model, data), RunDir(tmp_path / name / "run"))
        assert not (tmp_path / "cache").exists()
        assert {path.name for path in (tmp_path / name).iterdir()} == {file, "run", ".locks"}
        assert {path.name for path in (tmp_path / name / "run").iterdir()} == {"data"}
