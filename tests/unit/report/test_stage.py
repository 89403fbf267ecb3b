import re
import shutil
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import yaml

from shardmake.config.load import parse_config
from shardmake.report.history import attempt_of
from shardmake.report.stage import configuration, write_report
from shardmake.run.attempt import GpuUse
from shardmake.run.evaluation import Sample
from shardmake.run.paths import RunDir
from shardmake.run.sources import PinnedSource, Sources
from tests.finished_run import EVALUATED, TRAINED, make_run, make_rundir, publish_heartbeat
from tests.unit.report.test_wording import little_memory

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
    return unescape(" ".join(re.sub(r"<style>.*?</style>|<svg.*?</svg>|<[^>]+>", " ", page, flags=re.DOTALL).split()))


def test_one_page_holds_everything(rundir: RunDir) -> None:
    use = [GpuUse(number="0", percent=90, watts=None)]
    publish_heartbeat(attempt_of(rundir, TRAINED.attempts), "end", 4, use, compute_seconds=[0.25] * 5)
    page = write_report(make_run(), rundir).read_text()
    assert "GPU use, last attempt kernels ran 90% of the time on 1 GPU; least" in text_of(page)
    assert "Slow ranks at the end rank 1 on c1 computes 1.6 times as long as the median rank" in text_of(page)
    parser = Balance()
    parser.feed(page)
    assert parser.open == [] and page.count("<svg") == 5 and not re.search(r"""(src|href)=["'](?!#)""", page)
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids)), "ids of the figures do not meet"
    used = re.findall(r'url\(#([^)]+)\)|href="#([^"]+)"', page)
    assert used and all((first or second) in ids for first, second in used)


def test_a_run_without_metrics_says_so_and_has_no_empty_figure(rundir: RunDir) -> None:
    write_report(make_run(), rundir)
    rundir.metrics.write_text("")
    TRAINED.model_copy(update={"steps": None, "tokens": None, "loss": None}).write(rundir.train_receipt)
    page = write_report(make_run(script="train.py"), rundir).read_text()
    assert "The training script logged no metrics (it wrote nothing to SHARDMAKE_METRICS)" in text_of(page)
    assert page.count("<svg") == page.count("<figure>") == 2
    drawn = sorted(path.name for path in rundir.figures.iterdir())
    assert drawn == ["by-length.svg", "memory.svg"], "earlier figures are removed"
    tiles = re.findall(r"<div><b>[^<]*</b>([^<]*)</div>", page)
    assert tiles == ["evaluation loss", "perplexity", "process-hours"]


def test_the_ram_of_a_node_is_drawn_for_cpus(rundir: RunDir) -> None:
    little_memory(rundir)
    write_report(make_run(), rundir)
    drawn = rundir.figure("memory").read_text()
    for label in ("processes 1.3 GiB", "weights 120 MiB", "activations 60 MiB", "limit: RAM of a node 6.0 GiB →"):
        assert f">{label}</text>" in drawn
    assert "allocator" not in drawn and "CUDA" not in drawn


def test_what_is_not_recorded_without_the_attempts_is_said(rundir: RunDir) -> None:
    shutil.rmtree(rundir.attempts)
    text = text_of(write_report(make_run(), rundir).read_text())
    assert "hardware is not known" in text and not re.search(r"\b0\.00\b|GPU|process-hours|no metrics", text)
    drawn = {path.stem for path in rundir.figures.iterdir()}
    assert drawn == {"loss", "optimizer", "speed", "by-length"}, "what metrics.jsonl has is shown, and no memory"


def test_figures_are_files_as_well_and_stay_the_same(rundir: RunDir) -> None:
    write_report(make_run(), rundir)
    files = {path: path.read_bytes() for path in [*rundir.figures.iterdir(), rundir.report]}
    assert {path.stem for path in files} == {"loss", "optimizer", "speed", "memory", "by-length", "report"}
    for path in rundir.figures.iterdir():
        ElementTree.parse(path)
    write_report(make_run(), rundir)
    assert {path: path.read_bytes() for path in files} == files


def test_a_prompt_of_several_lines_keeps_its_lines(rundir: RunDir) -> None:
    prompt = "def double(x):\n    return " + "x" * 300
    EVALUATED.model_copy(update={"samples": [Sample(prompt=prompt, base="a", tuned="b")]}).write(rundir.evaluation)
    page = write_report(make_run(), rundir).read_text()
    assert f"<pre>{prompt}</pre>" in page
    assert re.search(r"\npre {[^}]*white-space: pre-wrap; overflow-wrap: anywhere", page)


def test_the_settings_make_the_same_run_again(tmp_path: Path) -> None:
    run = make_run(method="lora", lora={"rank": 4}, push={"to": "s3://lab/{run}"})
    entries = yaml.safe_load(configuration({"chat": run}))["runs"]
    assert parse_config({"cluster": "c.yaml", "runs": entries}, "test").runs["chat"] == run


def test_the_settings_of_a_chained_run_include_the_runs_before_it(rundir: RunDir) -> None:
    before = make_run(model="/home/ada/base")
    run = before.model_copy(update={"model": "run:first"})
    model = PinnedSource(name="run:first", path="fetched/model", origin=PinnedSource(name="base", path="base"))
    data = "resources/demo/train.jsonl"
    Sources(model=model, train=[PinnedSource(name=data, path=data)]).write(rundir.sources)
    written = write_report(run, rundir, before={"first": before}).read_text()
    found = re.findall(r"<pre>(runs:.*?)</pre>", written, flags=re.DOTALL)
    config = parse_config({"cluster": "c.yaml", **yaml.safe_load(unescape(found[0]))}, "test")
    assert {name: run.model for name, run in config.runs.items()} == {"first": ".../base", "chat": "run:first"}


def test_the_command_that_repeats_a_local_run_is_local(tmp_path: Path, rundir: RunDir) -> None:
    text = text_of(write_report(make_run(model="/home/ada/base"), rundir, "profiles/local").read_text())
    assert "snakemake --profile profiles/local runs/chat/report.html" in text
    assert "with your own folders in place of the three dots" in text
    text = text_of(write_report(make_run(), make_rundir(tmp_path / "public")).read_text())
    assert "Write this into the configuration file, name a cluster file above it" in text
