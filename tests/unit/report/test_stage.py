import re
import shutil
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml

from shardmake.config.load import parse_config
from shardmake.core.errors import ShardmakeError
from shardmake.core.units import format_duration
from shardmake.report.stage import configuration, write_report
from shardmake.run.evaluation import Sample
from shardmake.run.paths import RunDir
from shardmake.run.plan import PlaceEstimate
from shardmake.run.receipts import DataReceipt, PushedTo, PushReceipt
from shardmake.run.sources import PinnedSource, Sources
from tests.finished_run import EVALUATED, MEMORY, TRAINED, make_run, make_rundir, write_history

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
    page = write_report(make_run(), rundir).read_text()
    parser = Balance()
    parser.feed(page)
    assert parser.open == []
    assert page.count("<svg") == 5 and not re.search(r"""(src|href)=["'](?!#)""", page)
    text = text_of(page)
    for sentence in (
        "9.000 → 2.500 evaluation loss",
        "60 optimizer steps",
        "205 tokens per second",
        "1.00 process-hours",
        "10 min 20 s lost to interruptions",
        "is 60 optimizer steps of 16 sequences, each sequence used",
        'model = AutoModelForCausalLM.from_pretrained("runs/chat/model")',
        "shardmake compare chat OTHER",
        "Time of a step, predicted",
        "Time of a step, measured (median)",
        "After step 30 (interrupted): 10 min 20 s until the next new step",
        "The ranks ran on CPUs: the share of a GPU's peak (MFU) and the allocator's memory are not defined there.",
        "Strategy zero2, no checkpointing, micro batch 4, 1 node: the fastest of 2 candidates that fit (11 of 40 GiB).",
        "Global batch 16 sequences = 4 per forward pass x 2 accumulation steps x 2 ranks",
        "Optimizer AdamW of PyTorch, betas 0.9 and 0.999, epsilon 1e-08",
        "On 4,096 tokens of 10 % of the examples of train.jsonl, which were held out. None of these examples has the same",
        "up to 128 tokens 1,024 2.6000 2.6000",
        "sums acc 0.2500 0.7500",
        "It returns the number of items.",
        "Attempt Started Ran Ranks Process-hours Steps that count Ended",
        f"all {format_duration(1800)} 1.00",
        "snakemake --profile slurm runs/chat/report.html",
        "runs: chat: model: lab/base data: train: resources/demo/train.jsonl sequence_length: 256",
    ):
        assert sentence in text


def test_a_run_without_metrics_says_so_and_has_no_empty_figure(rundir: RunDir) -> None:
    write_report(make_run(), rundir)
    rundir.metrics.write_text("")
    TRAINED.model_copy(update={"steps": None, "tokens": None, "loss": None}).write(rundir.train_receipt)
    page = write_report(make_run(script="train.py"), rundir).read_text()
    text = text_of(page)
    assert "The training script logged no metrics (it wrote nothing to SHARDMAKE_METRICS)" in text
    assert page.count("<svg") == page.count("<figure>") == 2
    assert sorted(path.name for path in rundir.figures.iterdir()) == ["by-length.svg", "memory.svg"], (
        "earlier figures are removed"
    )
    tiles = re.findall(r"<div><b>[^<]*</b>([^<]*)</div>", page)
    assert tiles == ["evaluation loss", "perplexity", "process-hours"]


def test_metrics_that_a_script_did_not_log_are_listed(rundir: RunDir) -> None:
    rundir.metrics.write_text("".join(f'{{"step": {step}, "loss": {9 / step}}}\n' for step in (1, 2, 3)))
    page = write_report(make_run(script="train.py"), rundir).read_text()
    assert "Not logged, and therefore not shown: learning rate, gradient norm, tokens per second." in text_of(page)
    assert {path.stem for path in rundir.figures.iterdir()} == {"loss", "memory", "by-length"}


@pytest.mark.parametrize(
    ("measured", "said"),
    [(10 << 30, "GPU memory, measured on rank 0, held by the allocator 10.0 GiB"), (None, "no peak was logged")],
)
def test_memory_is_shown_for_gpus(rundir: RunDir, measured: int | None, said: str) -> None:
    write_history(rundir, [(0, 900, range(1, 3), "finished")] * 2, accelerator="a100-80gb")
    memory = f', "memory": {{"allocated": 1, "reserved": {measured}}}' if measured else ""
    rundir.metrics.write_text(f'{{"step": 1, "attempt": 1, "time": 1, "loss": 2{memory}}}\n')
    page = write_report(make_run(), rundir).read_text()
    text = text_of(page)
    assert "GPU memory, predicted, held by the allocator 10.0 GiB" in text, (
        "of the estimate, what the measurement counts as well"
    )
    assert "GPU memory, predicted, with CUDA context and NCCL 11.0 GiB GPU memory, limit 40.0 GiB" in text
    assert "RAM of a node, predicted 0 bytes RAM of a node, limit 64.0 GiB" in text
    assert "1.00 GPU-hours" in text and "Ranks GPU-hours Steps" in text
    assert said in text and "fullest rank. Measured" in text and "MFU" not in text
    assert rundir.figure("memory").exists()


def test_the_ram_of_a_node_is_shown_for_cpus(rundir: RunDir) -> None:
    (candidate,) = MEMORY.candidates
    gpu = candidate.gpu.model_copy(
        update={"reserved": 90 << 20, "terms": {"weights": 60 << 20, "activations": 30 << 20}}
    )
    host = PlaceEstimate(total=1300 << 20, terms={"processes": 1290 << 20, "loading": 10 << 20})
    changed = candidate.model_copy(update={"gpu": gpu, "host": host})
    MEMORY.model_copy(update={"candidates": [changed], "host_memory": 6 << 30}).write(rundir.memory)
    page = write_report(make_run(), rundir).read_text()
    assert "RAM of a node, predicted 1.4 GiB RAM of a node, limit 6.0 GiB" in text_of(page)
    drawn = rundir.figure("memory").read_text()
    for label in ("processes 1.3 GiB", "weights 120 MiB", "activations 60 MiB", "limit: RAM of a node 6.0 GiB →"):
        assert f">{label}</text>" in drawn
    assert "allocator" not in drawn and "CUDA" not in drawn


def test_what_is_not_recorded_without_the_attempts_is_said(rundir: RunDir) -> None:
    shutil.rmtree(rundir.attempts)
    page = write_report(make_run(), rundir).read_text()
    text = text_of(page)
    assert "hardware is not known, and its memory is not shown" in text
    assert "hours and interruptions are not known" in text and "hours not recorded, 2 attempts" in text
    assert not re.search(r"\b0\.00\b|GPU|process-hours|no metrics", text)
    drawn = {path.stem for path in rundir.figures.iterdir()}
    assert drawn == {"loss", "optimizer", "speed", "by-length"}, "what metrics.jsonl has is shown, and no memory"


def test_ids_of_the_figures_do_not_meet(rundir: RunDir) -> None:
    page = write_report(make_run(), rundir).read_text()
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'url\(#([^)]+)\)|href="#([^"]+)"', page)) and all(
        (first or second) in ids for first, second in re.findall(r'url\(#([^)]+)\)|href="#([^"]+)"', page)
    )


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


def test_what_a_model_says_is_no_markup(rundir: RunDir) -> None:
    sample = Sample(prompt="<b>", base="<script>alert(1)</script>", tuned="&")
    EVALUATED.model_copy(update={"samples": [sample]}).write(rundir.evaluation)
    page = write_report(make_run(), rundir).read_text()
    assert "<script>" not in page and "&lt;script&gt;" in page


def test_two_training_examples_are_shown_without_folders(rundir: RunDir) -> None:
    receipt = DataReceipt.read(rundir.data_receipt)
    shown = [f"/home/ada/t.jsonl, line {n}: 3 tokens, 1 of them learned\n<user>{n}[[</s>]]" for n in (1, 2)]
    receipt.model_copy(update={"shown": shown}).write(rundir.data_receipt)
    page = write_report(make_run(), rundir).read_text()
    assert (
        "/home/" not in page
        and "t.jsonl, line 2: 3 tokens" in page
        and "<pre>&lt;user&gt;2[[&lt;/s&gt;]]</pre>" in page
    )


def test_report_names_no_path_or_host_of_this_machine(tmp_path: Path, rundir: RunDir) -> None:
    base, data = tmp_path / "home/ada/base", tmp_path / "secret-project/train.jsonl"
    page = write_report(make_run(model=str(base), data={"train": str(data)}), rundir).read_text()
    assert [word for word in (str(tmp_path), "/home/", ">ada<", "secret-project", ">n1<") if word in page] == []


def test_report_shows_the_push_target_after_the_push(rundir: RunDir) -> None:
    places = [PushedTo(to="hub:lab/chat", commit="c0ffee"), PushedTo(to="file:///scratch/ada/x")]
    PushReceipt(destinations=places, files={}, model={}).write(rundir.push_receipt)
    assert "hub:lab/chat, commit c0ffee file:.../x" in text_of(write_report(make_run(), rundir).read_text())


def test_a_stage_that_has_not_run_is_named(rundir: RunDir) -> None:
    rundir.evaluation.unlink()
    with pytest.raises(ShardmakeError, match="shardmake evaluate chat"):
        write_report(make_run(), rundir)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 s"), (59.6, "1 min 00 s"), (250, "4 min 10 s"), (11100, "3 h 05 min")]
)
def test_durations(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


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


def test_private_folders_are_not_in_the_settings() -> None:
    run = make_run(model="/home/ada/base", push={"to": ["file:/scratch/ada/out", "s3://lab/a/b"]})
    text = configuration({"chat": run})
    entry = yaml.safe_load(text)["runs"]["chat"]
    assert entry["model"] == ".../base" and entry["push"]["to"][1] == "s3://lab/a/b"
    assert "ada" not in text
