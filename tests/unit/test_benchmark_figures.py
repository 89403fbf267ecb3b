"""The measured figures in the pages are those of the files in ``benchmarks/results``."""

import json
import re
from collections.abc import Callable
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path
from statistics import median
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
RESULTS = REPOSITORY / "benchmarks/results"
README = " ".join((REPOSITORY / "README.md").read_text().split())
BENCHMARKS = " ".join((REPOSITORY / "docs/design/benchmarks.md").read_text().split())
MEMORY_MODEL = " ".join((REPOSITORY / "docs/design/memory-model.md").read_text().split())
FAMILIES = {
    "one copy of the model per GPU": "unsharded", "sharded: ZeRO and FSDP": "sharded", "QLoRA": "quantized",
    "offloaded to host RAM": "offloaded", "all": "all", "grade B (something is not stated), all sharded": r"all \(B\)",
}  # fmt: skip
"""The name in memory_accuracy.txt by the name in the pages."""
HELD_OUT = {"one copy of the model per GPU": "unsharded", "FSDP1": "sharded", "QLoRA": "quantized", "all": "all"}
"""The name in memory_held_out.txt by the name in docs/design/memory-model.md."""


def _text(name: str) -> str:
    return (RESULTS / name).read_text()


def _rounded(value: float | Decimal, digits: int) -> Decimal:
    """Round halves up, as people do."""
    return Decimal(str(value)).quantize(Decimal(10) ** -digits, ROUND_HALF_UP)


def _json(name: str) -> Any:
    return json.loads(_text(name))


@pytest.mark.parametrize("label", FAMILIES)
def test_the_errors_of_the_memory_estimate(label: str) -> None:
    row = rf"^{FAMILIES[label]} +(\d+) +(\S+) % +(\S+) % +(\d+) of +\d+ +(\S+) % +(\S+) %$"
    (found,) = re.findall(row, _text("memory_accuracy.txt"), re.MULTILINE)
    number, median, ninth, low, least, largest = found
    expected = f"| {label} | {number} | {median} % | {ninth} % | {low} | {least} % | {largest} % |"
    assert expected in BENCHMARKS


@pytest.mark.parametrize("label", HELD_OUT)
def test_the_errors_of_the_held_out_rows(label: str) -> None:
    """The page has each figure before and after the changes that these rows showed; the file has those after."""
    row = rf"^{HELD_OUT[label]} +(\d+) +(\S+) % +(\S+) % +(\d+) of"
    ((number, median, ninth, low),) = re.findall(row, _text("memory_held_out.txt"), re.MULTILINE)
    expected = rf"\| {label} \| {number} \| \S+ %, {median} % \| \S+ %, {ninth} % \| \d+, {low} \|"
    assert re.search(expected, MEMORY_MODEL)


def _merge() -> str:
    tools = _json("consolidate.json")["tools"]
    names = ("shardmake, ZeRO-3, verified", "shardmake, ZeRO-3, verified, first", "zero_to_fp32")
    ours, first, theirs = (tools[f"{name} (warm)"] for name in names)
    return (
        f"{ours['anonymous_mib']:.0f} MiB and {ours['seconds']:.1f} s, "
        f"with the check by transformers {first['anonymous_mib']:.0f} MiB and {first['seconds']:.1f} s; "
        f"DeepSpeed's `zero_to_fp32`: {theirs['anonymous_mib']:,.0f} MiB and {theirs['seconds']:.1f} s"
    )


def _limits() -> str:
    exits = {name: found["exit"] for name, found in _json("consolidate_limits.json")["in_512_mib"].items()}
    assert exits == {"shardmake": 0, "shardmake to bf16": 0, "accelerate merge-weights": -9, "zero_to_fp32": -9}
    return "finishes; `zero_to_fp32` and `accelerate merge-weights` are killed"


def _fault_kinds() -> str:
    rows = re.findall(r"^.+ s[*~]?$", _text("fault_matrix.txt"), re.MULTILINE)
    return f"{len(rows)} kinds of faults and stops"


def _fault_tests() -> str:
    pattern = r"^((\d+) of (\d+) tests passed, \d+ of them compared with an undisturbed training)\.$"
    ((summary, passed, all_tests),) = re.findall(pattern, _text("fault_matrix.txt"), re.MULTILINE)
    assert passed == all_tests
    return str(summary)


def _first_step() -> str:
    """The medians of the ratios of each round."""
    rounds = _json("first_step.json")["rounds"]

    def ratio(one: str, other: str) -> str:
        return f"{median(a / b for a, b in zip(rounds[one], rounds[other], strict=True)):.2f} times"

    return (
        f"{ratio('shardmake train', 'bare sbatch')} a bare `sbatch` of torchrun; from a killed rank to the next step in "
        f"a new job {ratio('killed, new job', 'killed, torchrun')}, and restarted in place "
        f"{ratio('killed, in place', 'killed, torchrun')} torchrun's own restart, "
        f"{ratio('killed, in place', 'killed, new job')} a new job"
    )


def _data_speed() -> str:
    plain, trl = [], []
    for file in ("data_speed_large.json", "data_speed_50_turns.json"):
        for processes in ("1 processes", "2 processes"):
            found = _json(file)["cases"][0][processes]
            plain.append(f"{found['times_plain']:.2f}")
            trl.append(f"{found['times_faster_than_trl']:.2f}")
    few, many = " and ".join(plain[:2]), " and ".join(plain[2:])
    return (
        f"{few}, {many} times a plain `datasets.map`; "
        f"TRL takes {' and '.join(trl[:2])}, {' and '.join(trl[2:])} times as long"
    )


def _step_time() -> str:
    row = r"^{}, all +(\d+) .* ([\d.]+)% +\S+$"
    ((held_out, error),) = re.findall(row.format("held out"), _text("step_time_accuracy.txt"), re.MULTILINE)
    ((fitted, of_fitted),) = re.findall(row.format("mosaicml"), _text("step_time_accuracy.txt"), re.MULTILINE)
    return f"{held_out} published rows without ZeRO, LoRA or offload | median error {error} %; {of_fitted} % for {fitted} rows"


def test_the_demo_ends_as_the_readme_says() -> None:
    assert " ".join(_text("demo.txt").split("\n\n", 1)[1].split()) in README


@pytest.mark.parametrize("figures", [
    _merge, _limits, _fault_kinds, _fault_tests, _first_step, _data_speed, _step_time,
], ids=lambda figures: figures.__name__.strip("_"))  # fmt: skip
def test_a_figure_is_that_of_its_result(figures: Callable[[], str]) -> None:
    assert figures() in BENCHMARKS


MERGES = {
    "ZeRO-3, the copy alone": ("shardmake, ZeRO-3", "copy"),
    "ZeRO-3 to bf16, the copy alone": ("shardmake, ZeRO-3 to bf16", "copy"),
    "DCP, the copy alone": ("shardmake, DCP", "copy"),
    "`shardmake consolidate` of ZeRO-3, with every check": ("shardmake, ZeRO-3, verified", "seconds"),
    "the same, the first merge of a model": ("shardmake, ZeRO-3, verified, first", "seconds"),
    "DeepSpeed's `zero_to_fp32`": ("zero_to_fp32", "seconds"),
    "`accelerate merge-weights` of DCP": ("accelerate merge-weights", "seconds"),
    "`dcp_to_torch_save`": ("dcp_to_torch_save", "seconds"),
    "torch's `consolidate_safetensors_files`": ("consolidate_safetensors_files", "seconds"),
}
"""Tool and key of its seconds in consolidate.json, by the row of the table of merges."""


@pytest.mark.parametrize("label", MERGES)
def test_the_table_of_merges(label: str) -> None:
    name, key = MERGES[label]
    tools = _json("consolidate.json")["tools"]
    ratio = "copy_times_cp" if key == "copy" else "times_cp"
    warm, cold = tools[f"{name} (warm)"], tools[f"{name} (cold)"]
    seconds = " | ".join(f"{_rounded(found[key], 1)} | {_rounded(found[ratio], 1)}" for found in (warm, cold))
    assert f"| {label} | {seconds} | {max(warm['anonymous_mib'], cold['anonymous_mib']):.0f} MiB |" in BENCHMARKS


@pytest.mark.parametrize(("label", "name"), [
    ("70B, 16 ranks, ZeRO-3", "70B, 16 ranks, ZeRO-3"), ("405B, 64 ranks, ZeRO-3", "405B, 64 ranks, ZeRO-3"),
    ("70B, 512 ranks, ZeRO-1 or 2", "70B, 512 ranks, ZeRO-2"), ("70B, 512 ranks, ZeRO-3", "70B, 512 ranks, ZeRO-3"),
])  # fmt: skip
def test_the_table_of_planned_merges(label: str, name: str) -> None:
    found = _json("consolidate_limits.json")["plan"][name]
    numbers = f"{found['pieces']:,} | {found['cpu_seconds']:.1f} | {found['anonymous_mib']:.0f} MiB"
    assert f"| {label} | {numbers} |" in BENCHMARKS


@pytest.mark.parametrize(("label", "strategy"), [("ZeRO-3", "zero3"), ("FSDP2", "fsdp")])
def test_the_table_of_saves(label: str, strategy: str) -> None:
    saves = _json("saving.json")["saves"][strategy]
    ways = ("at once", "through /dev/shm", "through disk")
    waits = " | ".join(f"{_rounded(saves[way]['waits_seconds'], 2)} s" for way in ways)
    assert f"| {label}: training waits | {waits} |" in BENCHMARKS
