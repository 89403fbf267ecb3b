"""What the driver tells of a training while it runs."""

import json
from pathlib import Path

from shardmake.launch.progress import ProgressPrinter
from shardmake.run.metrics import parse_metrics


def line(step: int, **values: object) -> str:
    return json.dumps({"step": step, "loss": 2.0, "learning_rate": 1e-3} | values) + "\n"


def test_a_script_may_log_what_it_likes(tmp_path: Path) -> None:
    metrics, told = tmp_path / "metrics.jsonl", list[str]()
    follower = ProgressPrinter(metrics, told.append)
    metrics.write_text('{"step": 1, "loss": 2.5}\n"words"\nno JSON\n[1]\n{"loss": 1.0}\n{"step": 9, "lo')
    follower.tell_news()
    assert told == ["step      1  loss 2.5000"]


def test_a_file_that_was_written_anew_between_two_looks(tmp_path: Path) -> None:
    metrics, told = tmp_path / "metrics.jsonl", list[str]()
    metrics.write_text(line(10) * 3)
    follower = ProgressPrinter(metrics, told.append)
    metrics.write_text(line(5) + line(6, eval_loss=1.5) * 4)
    follower.tell_news()
    assert told[0] == "step      6  evaluation loss 1.5000"


def test_bytes_that_are_no_text_do_not_end_the_driver(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    follower = ProgressPrinter(metrics, print)
    metrics.write_bytes(b"\xff\xfe\n" + line(1).encode())
    follower.tell_news()
    assert [found["step"] for found in parse_metrics(metrics.read_text(errors="replace"))] == [1]
