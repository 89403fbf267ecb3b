"""Card and page of runs with other records and settings, as lines that differ from those of a plain run."""

import re
import shutil
from collections.abc import Callable
from difflib import unified_diff
from html import unescape
from typing import Any

import pytest
from huggingface_hub import ModelCard

from shardmake.config.models import Run
from shardmake.config.optimizers import OPTIMIZERS
from shardmake.report import figures
from shardmake.report.card import render_card
from shardmake.report.stage import write_report
from shardmake.run.engine import Engine, LearningSettings
from shardmake.run.evaluation import Sample, SourceScore, TaskScore
from shardmake.run.paths import RunDir
from shardmake.run.plan import PlaceEstimate
from shardmake.run.receipts import PushedTo, PushReceipt
from shardmake.run.sources import PinnedSource, Sources
from shardmake.run.training_settings import AdapterMethod, OptimizerSettings, ScriptProgram
from tests import finished_run
from tests.unit.wording import Wording

SAMPLES = {"to": "file:out", "samples": True}
DATA = PinnedSource(name="resources/demo/train.jsonl", path="resources/demo/train.jsonl")
FETCHED = PinnedSource(name="lab/base", revision="main", commit="c0ffee", path="hub")
SFT = PinnedSource(name="run:sft", path="runs/a/fetched/model", origin=FETCHED)
DPO = PinnedSource(name="run:dpo", path="runs/b/fetched/model", origin=SFT)
BY_SOURCE = finished_run.SCORES.model_copy(
    update={"by_source": [SourceScore(name="a|b<i>.jsonl", loss=1.0, perplexity=2.72, tokens=3, exact=0.0)]}
)
LEARNED = LearningSettings(
    optimizer="AdamW", learning_rate=0.004, betas=[0.9, 0.999], epsilon=1e-8, weight_decay=0.2, decays_vectors=True,
    schedule="linear", warmup_steps=7, steps=60, rates=[], max_grad_norm=0.25, dtype="bfloat16", autocast="bfloat16",
    micro_batch_size=4, gradient_accumulation_steps=2, global_batch_size=16,
)  # fmt: skip
LONGER = LEARNED.model_copy(update={"steps": 90})
SMALLER = finished_run.make_plan().choice.model_copy(update={"micro_batch_size": 2, "gradient_accumulation_steps": 4})
LORA = AdapterMethod(kind="lora", rank=8, alpha=16, dropout=0.1, targets=["q_proj", "v_proj"])
OWN = {"zero_optimization.reduce_bucket_size": 1000, "aio.path": "/scratch/ada"}
FOUND = Engine(
    api="accelerate", engine="deepspeed", zero_stage=3, world_size=2, dtype="float32", offload_optimizer="cpu",
    micro_batch_size=1, gradient_accumulation_steps=4, global_batch_size=8,
)  # fmt: skip
COMPARED = FOUND.model_copy(update={"rows_compared": True})
CONVERSATIONS = {"data_format": "sharegpt", "columns": {"messages": "dialog"}, "loss_on_assistant": True}
CHECKSUMS = {"train": {"files": [{"sha256": "a" * 64}]}, "eval": {"files": [{"sha256": "b" * 64}]}}
SHOWN = [f"/home/ada/t.jsonl, line {n}: 3 tokens, 1 of them learned\n<user>{n}[[</s>]]" for n in (1, 2)]
TARGETS = [PushedTo(to="hub:lab/chat", commit="c0ffee"), PushedTo(to="file:///scratch/ada/x")]
ENDLESS = finished_run.SCORES.model_copy(update={"loss": 1234.5, "perplexity": None})
BEST = {"checkpoints": {"keep_best": True, "early_stopping": 2}, "final_checkpoint": "best"}


def sources(at: RunDir, model: PinnedSource) -> None:
    Sources(model=model, train=[DATA]).write(at.sources)


def data(at: RunDir, **changes: Any) -> None:
    finished_run.make_data_receipt("d").model_copy(update=changes).write(at.data_receipt)


def evaluated(at: RunDir, **changes: Any) -> None:
    finished_run.EVALUATED.model_copy(update=changes).write(at.evaluation)


def trained(at: RunDir, **changes: Any) -> None:
    finished_run.TRAINED.model_copy(update=changes).write(at.train_receipt)


def settings(at: RunDir, **changes: Any) -> None:
    finished_run.SETTINGS.model_copy(update=changes).write(at.training)


def by_script(at: RunDir, found: Engine | None, metrics: str = "") -> None:
    """A script trained the run; ``metrics`` are the lines that it wrote."""
    settings(at, program=ScriptProgram(path="/home/ada/train.py", args=["--token", "x"], sha256="e" * 64))
    trained(at, steps=None, tokens=None, loss=None, trained=found)
    at.metrics.write_text(metrics)


def on_gpus(at: RunDir, memory: str = "") -> None:
    finished_run.write_history(at, [(0, 900, range(1, 3), "finished")] * 2, accelerator="a100-80gb")
    at.metrics.write_text(f'{{"step": 1, "attempt": 1, "time": 1, "loss": 2{memory}}}\n')


def little_memory(at: RunDir) -> None:
    (candidate,) = finished_run.MEMORY.candidates
    terms = {"weights": 60 << 20, "activations": 30 << 20}
    gpu = candidate.gpu.model_copy(update={"reserved": 90 << 20, "terms": terms})
    host = PlaceEstimate(total=1300 << 20, terms={"processes": 1290 << 20, "loading": 10 << 20})
    changed = candidate.model_copy(update={"gpu": gpu, "host": host})
    finished_run.MEMORY.model_copy(update={"candidates": [changed], "host_memory": 6 << 30}).write(at.memory)


LEARNING_RATES = '{"step": 1, "learning_rate": 0.25}\n{"step": 2, "learning_rate": 0.125}\n'
LOSSES = "".join(f'{{"step": {step}, "loss": {9 / step}}}\n' for step in (1, 2, 3))
HTML = "data/a|b<i>.jsonl"
CASES: dict[str, tuple[Callable[[RunDir], object], dict[str, Any]]] = {
    "conversations": (lambda at: data(at, **CONVERSATIONS), {}),
    "after a run": (lambda at: sources(at, SFT), {"model": "run:sft"}),
    "after two runs": (lambda at: sources(at, DPO), {"model": "run:dpo"}),
    "a fetched model": (lambda at: sources(at, FETCHED), {"revision": "main"}),
    "pairs": (lambda at: evaluated(at, preferences=finished_run.PREFERENCES), {}),
    "completions with labels": (lambda at: evaluated(at, completions=finished_run.COMPLETIONS), {}),
    # The base model has no head for rewards: there is no number of it, and no loss or perplexity.
    "a reward model": (lambda at: finished_run.RATED.write(at.evaluation), {}),
    # The loss is the metric then, and a task without a finite value is left out of the model's index.
    "a perplexity that overflows": (
        lambda at: evaluated(
            at, tuned=ENDLESS, tasks=[TaskScore(task="texts", metric="word_perplexity", base=2.0, tuned=None)]
        ),
        {},
    ),
    "samples that are published": (lambda at: None, {"push": SAMPLES}),
    "prompts of the configuration": (lambda at: None, {"evaluation": {"prompts": ["What does len do?"]}}),
    "a push without samples": (lambda at: None, {"push": {"to": "file:out"}}),
    "a chat template": (lambda at: (at.model / "chat_template.jinja").write_text("{{ messages }}"), {"push": SAMPLES}),
    "a prompt of several lines": (
        lambda at: evaluated(at, samples=[Sample(prompt='Say "é"\n\\and ```stop```', base="a", tuned="b")]),
        {"push": SAMPLES},
    ),
    "markup in a sample": (
        lambda at: evaluated(at, samples=[Sample(prompt="<b>", base="<script>alert(1)</script>", tuned="&")]),
        {"push": SAMPLES},
    ),
    "a hub data set": (lambda at: None, {"data": {"train": "lab/talk:train_sft"}}),
    "private folders": (
        lambda at: None, {"model": "/home/ada/my-base", "data": {"train": "/home/ada/secret-project/train.jsonl"}},
    ),
    "names with markup": (
        lambda at: evaluated(at, base=BY_SOURCE, tuned=BY_SOURCE),
        {"model": "bases/x|<b>", "data": {"train": HTML, "eval": HTML}},
    ),
    "checksums of the data": (
        lambda at: data(at, sources=CHECKSUMS), {"data": {"train": "data/x/train.jsonl", "eval": "data/x/eval.jsonl"}},
    ),
    "a repeated example": (lambda at: data(at, repeated=1), {}),
    "repeated examples": (lambda at: data(at, repeated=30), {}),
    "training examples": (lambda at: data(at, shown=SHOWN), {}),
    "values of own files": (lambda at: settings(at, own_files=OWN), {}),
    "other rates": (lambda at: settings(at, learning_rates={"*.mlp": 1e-5, "lm_head": 0.002}), {}),
    "Muon": (
        lambda at: settings(at, optimizer=OptimizerSettings(class_name=OPTIMIZERS["muon"].own_class, arguments={})), {},
    ),
    "frozen weights": (lambda at: settings(at, freeze=["model.embed_tokens", "*.mlp"]), {"freeze": ["x"]}),
    "adapters": (lambda at: settings(at, method=LORA), {"method": "lora"}),
    "trained tokens": (lambda at: settings(at, method=LORA.model_copy(update={"train_tokens": ["<a>"]})), {}),
    **{
        f"arguments {', '.join(map(str, values.values()))}": (
            lambda at, values=values: finished_run.with_arguments(finished_run.SETTINGS, **values).write(at.training),  # type: ignore[misc]
            {},
        )
        for values in (
            {"lr_scheduler_type": "constant"},
            {"warmup_steps": 0.05},
            {"num_train_epochs": 2.0},
            {"optim": "adafactor", "weight_decay": 0.0},
            {"optim": "adamw_torch_fused"},
            *({"optim": spec.optim} for spec in OPTIMIZERS.values()),
        )
    },
    # What the ranks found is stated rather than what was rendered.
    "what the ranks found": (lambda at: trained(at, learning=LEARNED), {}),
    "an early end": (lambda at: trained(at, learning=LONGER), BEST),
    "a fallback": (
        lambda at: finished_run.make_plan().model_copy(update={"choice": SMALLER}).write(at.attempts / "002/plan.json"),
        {},
    ),
    "a commit of the workflow": (
        lambda at: (
            finished_run.make_attempt(2, at, "cpu")
            .model_copy(update={"commit": "c0ffee123456"})
            .write(at.attempts / "002/attempt.json")
        ),
        {},
    ),
    "GPUs": (on_gpus, {}),
    "GPUs and their memory": (lambda at: on_gpus(at, f', "memory": {{"allocated": 1, "reserved": {10 << 30}}}'), {}),
    "little memory": (little_memory, {}),
    "attempts that are lost": (lambda at: shutil.rmtree(at.attempts), {}),
    "a script as its ranks found it": (lambda at: by_script(at, COMPARED), {"script": "train.py"}),
    "a script without an engine": (lambda at: by_script(at, None), {"script": "train.py"}),
    "a script with learning rates": (lambda at: by_script(at, FOUND, LEARNING_RATES), {"script": "train.py"}),
    "a script with losses": (lambda at: at.metrics.write_text(LOSSES), {"script": "train.py"}),
    "a pushed model": (lambda at: PushReceipt(destinations=TARGETS, files={}, model={}).write(at.push_receipt), {}),
}  # fmt: skip


@pytest.fixture(autouse=True)
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the figures out of the page: drawing them takes longer than all the rest."""
    monkeypatch.setattr(figures, "as_svg", lambda name, drawing: f"<svg>{name}</svg>")


def texts(run: Run, rundir: RunDir) -> str:
    """Return the card, and the page's text with the elements' ends as lines, but for rows that the card has as well."""
    page = re.sub(r"<style>.*?</style>|<svg>|</svg>", " ", write_report(run, rundir).read_text(), flags=re.DOTALL)
    ends = re.sub(r"</(?:p|tr|h\d|pre|div|li|figure|figcaption|title)>", "\n", page)
    lines = (" ".join(unescape(re.sub(r"<[^>]+>", " ", line)).split()) for line in ends.splitlines())
    card = render_card(run, rundir)
    rows = {" ".join(re.sub(r"[|`]", " ", row).split()) for row in card.splitlines()}
    return f"{card}\n=== page\n" + "\n".join(line for line in lines if line not in rows)


def assert_public(text: str, rundir: RunDir) -> None:
    """Raise an `AssertionError` if a text names a folder or host of this machine, or has an example that is not Python."""
    private = (str(rundir.root.parents[1]), "/home/", "ada/", "/ada", "secret-project", "--token", " n1 ")
    assert [word for word in private if word in text] == []
    block = text.partition("```python\n")[2].partition("\n```\n")[0]
    compile(block, "card", "exec")


def test_a_plain_run(rundir: RunDir, wording: Wording) -> None:
    text = texts(finished_run.make_run(), rundir)
    assert_public(text, rundir)
    wording(text)


@pytest.mark.parametrize("case", CASES)
def test_what_differs_from_a_plain_run(rundir: RunDir, case: str, wording: Wording) -> None:
    before = texts(finished_run.make_run(), rundir).splitlines()
    write, changes = CASES[case]
    write(rundir)
    model = {"model": changes["model"]} if str(changes.get("model", "")).startswith("run:") else {}
    run = finished_run.make_run(**{key: value for key, value in changes.items() if key not in model}).model_copy(
        update=model
    )
    text = texts(run, rundir)
    assert_public(text, rundir)
    assert "<script>" not in rundir.report.read_text() and ModelCard(text.partition("\n=== page")[0]).data
    lines = [
        line for line in unified_diff(before, text.splitlines(), n=0, lineterm="") if line[:2] not in ("--", "++", "@@")
    ]
    wording("\n".join(lines))
