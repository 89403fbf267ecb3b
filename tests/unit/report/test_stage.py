import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from shardmake.core.errors import ShardmakeError
from shardmake.report.stage import duration, write_report
from shardmake.run.evaluation import Sample
from shardmake.run.receipts import PushedTo, PushReceipt
from tests.finished_run import EVALUATED, make_run, make_rundir

VOID = {"meta", "link", "br", "img", "hr"}


class Balance(HTMLParser):
    """Checks that tags close in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def text_of(page: str) -> str:
    return " ".join(re.sub(r"<style>.*?</style>|<svg.*?</svg>|<[^>]+>", " ", page, flags=re.DOTALL).split())


def test_one_page_holds_everything(tmp_path: Path) -> None:
    page = write_report(make_run(), make_rundir(tmp_path)).read_text()
    parser = Balance()
    parser.feed(page)
    assert parser.open == []
    assert page.count("<svg") == 5 and not re.search(r"""(src|href)=["'](?!#)""", page)
    text = text_of(page)
    for sentence in (
        "9.000 → 2.500 evaluation loss",
        "60 optimizer steps",
        "205 tokens per second",
        "none on CPU MFU",
        "1.00 device hours",
        "10 min 20 s lost to interruptions",
        "After step 30 (interrupted): 10 min 20 s until the next new step",
        "zero2 on 1 node(s) with 2 rank(s) each, bf16. The fastest that fits: 11 GiB of 40 GiB.",
        "Global batch 16 = 2 ranks × 4 sequences × 2 accumulation steps",
        "Predicted 11.0 GiB Measured not on CPU Capacity 40.0 GiB",
        "up to 128 tokens 1,024 2.6000 2.6000",
        "sums acc 0.2500 0.7500",
        "It returns the number of items.",
    ):
        assert sentence in text


def test_ids_of_the_figures_do_not_meet(tmp_path: Path) -> None:
    page = write_report(make_run(), make_rundir(tmp_path)).read_text()
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'url\(#([^)]+)\)|href="#([^"]+)"', page)) and all(
        (first or second) in ids for first, second in re.findall(r'url\(#([^)]+)\)|href="#([^"]+)"', page)
    )


def test_figures_are_files_as_well_and_stay_the_same(tmp_path: Path) -> None:
    rundir = make_rundir(tmp_path)
    write_report(make_run(), rundir)
    files = {path: path.read_bytes() for path in [*rundir.figures.iterdir(), rundir.report]}
    assert {path.stem for path in files} == {"loss", "optimizer", "speed", "memory", "by-length", "report"}
    for path in rundir.figures.iterdir():
        ElementTree.parse(path)
    write_report(make_run(), rundir)
    assert {path: path.read_bytes() for path in files} == files


def test_what_a_model_says_is_no_markup(tmp_path: Path) -> None:
    rundir = make_rundir(tmp_path)
    sample = Sample(prompt="<b>", base="<script>alert(1)</script>", tuned="&")
    EVALUATED.model_copy(update={"samples": [sample]}).write(rundir.evaluation)
    page = write_report(make_run(), rundir).read_text()
    assert "<script>" not in page and "&lt;script&gt;" in page


def test_report_names_no_path_or_host_of_this_machine(tmp_path: Path) -> None:
    base, data = tmp_path / "home/ada/base", tmp_path / "secret-project/train.jsonl"
    page = write_report(make_run(model=str(base), data={"train": str(data)}), make_rundir(tmp_path)).read_text()
    assert [word for word in (str(tmp_path), "/home/", ">ada<", "secret-project", ">n1<") if word in page] == []


def test_report_shows_the_push_target_after_the_push(tmp_path: Path) -> None:
    rundir = make_rundir(tmp_path)
    places = [PushedTo(to="hub:lab/chat", commit="c0ffee"), PushedTo(to="file:x")]
    PushReceipt(destinations=places, files={}).write(rundir.push_receipt)
    assert "hub:lab/chat, commit c0ffee file:x" in text_of(write_report(make_run(), rundir).read_text())


def test_a_stage_that_has_not_run_is_named(tmp_path: Path) -> None:
    rundir = make_rundir(tmp_path)
    rundir.evaluation.unlink()
    with pytest.raises(ShardmakeError, match="shardmake evaluate chat"):
        write_report(make_run(), rundir)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 s"), (59.6, "1 min 00 s"), (250, "4 min 10 s"), (11100, "3 h 05 min")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
