"""Write ``docs/evidence.md``: for which runs a test shows what. ``python -m tools.evidence [REPORT...]``.

REPORT is a JUnit file of the tests. Its results replace those of the same tests in
``benchmarks/results/evidence.json``, from which the page is written, except those of changes without
a commit. Reports of `make gpu-check` are read from ``benchmarks/results/gpu``.
"""

import json
import platform
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from shardmake.config.models import STRATEGIES
from shardmake.config.objectives import OBJECTIVES
from shardmake.core.atomic import write_json
from shardmake.core.environment import installed_versions

REPOSITORY = Path(__file__).resolve().parents[1]
STORE = REPOSITORY / "benchmarks/results/evidence.json"
PAGE = REPOSITORY / "docs/evidence.md"
GPU_RESULTS = REPOSITORY / "benchmarks/results/gpu"
PROPERTY = "proves"
"""Name of the property of a JUnit test case that holds its claims."""
SHOWS = {
    "trains": ("trains", "Real ranks train from the rendered files to the last step."),
    "fp32": ("loss equals DDP, fp32", "The loss of every step is that of DDP on the same data, within 0.0002."),
    "bf16": ("loss equals DDP, bf16", "The same in bf16, within 0.006 for losses of about 8.5, which is its rounding."),
    "resumed": (
        "resumed, same losses",
        "Repeated from a checkpoint, steps have exactly the losses of the first time, or end with exactly its weights.",
    ),
    "killed": (
        "killed and resumed bit for bit",
        "After a SIGKILL, losses and saved states are those of a training without the kill, bit for bit.",
    ),
    "resharded": (
        "resharded",
        "Training continues on other ranks, from another strategy or for another one, with the same losses within "
        "0.0002 (0.001 on Slurm).",
    ),
    "merged": (
        "merged bit for bit",
        "The merged weights are those that the ranks held, or that the library's own tool returns, bit for bit.",
    ),
    "saved": ("merged equal to `save_pretrained`", "They are bit for bit what `save_pretrained` writes."),
    "opened": (
        "opened by transformers",
        "transformers loads the merged folder (PEFT an adapter) with no tensor missing or left over.",
    ),
    "slurm": ("on Slurm", "A Slurm of three nodes, all on one machine, runs the training to its end, on CPUs."),
    "gpu": ("on a GPU", "`make gpu-check` trained it on a GPU."),
}
"""Heading and meaning of each column."""
METHODS = ("full", "lora", "qlora")
LIBRARIES = ("torch", "deepspeed", "accelerate", "transformers", "peft", "trl", "snakemake")
_IMPLIES_TRAINING = ("fp32", "bf16", "resumed", "killed", "resharded", "slurm", "gpu")
_NOT_PASSED = ("failure", "error", "skipped")
_AXES = ("strategy", "method", "objective")
HEAD = """# What the tests show

A number leads to the test below that shows the property of the column; an empty cell has no recorded result. All
trainings are of small models on CPUs with gloo, unless the last column says otherwise. A test marks what it shows with
`@pytest.mark.proves`. `make docs` writes this page from the reports of `make test`, `make test-all` and the commands
for longer tests, without results of changes that have no commit.

Shardmake refuses FSDP and QLoRA without GPUs. The tests bypass these refusals. For FSDP they also patch Accelerate and
torch (`tests/fsdp_on_cpu.py`): Accelerate takes the CPU ranks for GPUs, and offload does not
pin memory. Sharding, collectives and checkpoints are torch's own.
"""


class Claim(NamedTuple):
    """A property that a test shows."""

    shows: str
    strategy: str
    method: str
    objective: str
    family: str
    node: str


def main() -> None:
    """Add the reports to the results and write the page."""
    if sys.argv[1:]:
        update(stored(), map(Path, sys.argv[1:]))
    PAGE.write_text(page(stored(), gpu_claims()))


def stored() -> dict[str, Any]:
    """Return the results so far."""
    return json.loads(STORE.read_text()) if STORE.exists() else {"tests": {}}


def update(results: dict[str, Any], reports: Iterable[Path]) -> None:
    """Replace the results of the reports' tests and write them; a test that did not pass shows nothing.

    Results at a commit that nobody can check out change nothing; a line names their report.
    """
    for report in reports:
        found = read_results(report)
        recorded = [result for result in found if has_commit(result)]
        if left_out := len(found) - len(recorded):
            print(f"{report}: results left out, because the tests ran on changes without a commit: {left_out}")
        for result in recorded:
            results["tests"].pop(result["node"], None)
            if result["passed"]:
                results["tests"][result["node"]] = {"commit": result["commit"], "claims": result["claims"]}
    results["tests"] = dict(sorted(results["tests"].items()))
    results["versions"] = {"Python": platform.python_version(), **installed_versions(LIBRARIES)}
    write_json(STORE, results)


def read_results(report: Path) -> list[dict[str, Any]]:
    """Return node, commit, claims and outcome of each test of a JUnit file that makes claims."""
    return [
        {**json.loads(entry.attrib["value"]), "passed": not any(case.find(kind) is not None for kind in _NOT_PASSED)}
        for case in ElementTree.parse(report).iter("testcase")
        for entry in case.iter("property")
        if entry.attrib["name"] == PROPERTY
    ]


def has_commit(result: dict[str, Any]) -> bool:
    """Return whether the commit of a result has the code that was tested."""
    return result["commit"] != "unknown" and not result["commit"].endswith("-dirty")


def gpu_claims() -> list[Claim]:
    """Return a claim for each strategy that a result of `make gpu-check` lists."""
    reports = [(path, json.loads(path.read_text())) for path in sorted(GPU_RESULTS.glob("*.json"))]
    return [
        Claim("gpu", one["strategy"], "full", "sft", "llama", str(path.relative_to(REPOSITORY)))
        for path, report in reports
        for one in report["trained"]
    ]


def page(results: dict[str, Any], further: Sequence[Claim] = ()) -> str:
    """Return the page of the results in ``evidence.json`` and of ``further`` claims."""
    tests = results["tests"]
    claims = [Claim(**claim, node=node) for node, found in tests.items() for claim in found["claims"]] + list(further)
    claims += [claim._replace(shows="trains") for claim in claims if claim.shows in _IMPLIES_TRAINING]
    numbers = {name: number for number, name in enumerate(sorted({_function(claim.node) for claim in claims}), 1)}
    return "\n".join(
        [
            HEAD,
            _origin(results),
            "\n## Strategy, method and objective\n\nThe models are small ones of the tests.\n",
            *_table(("strategy", "method", "objective"), claims, numbers),
            *_without_tests(claims),
            "\n## Model family\n\nUnder at least one strategy each.\n",
            *_table(("family",), claims, numbers),
            "\n## Columns\n",
            *(f"- **{heading}**: {meaning}" for heading, meaning in SHOWS.values()),
            "\n## Tests\n",
            *_list(numbers, claims),
            "",
        ]
    )


def _function(node: str) -> str:
    return node.partition("[")[0]


def _origin(results: dict[str, Any]) -> str:
    """Return the sentence with commits and versions."""
    commits = [found["commit"] for found in results["tests"].values()]
    ran = ", ".join(f"{commits.count(commit)} tests at commit {commit}" for commit in dict.fromkeys(commits))
    return f"Ran: {ran}. " + ", ".join(f"{name} {version}" for name, version in results["versions"].items()) + "."


def _table(axes: tuple[str, ...], claims: Sequence[Claim], numbers: dict[str, int]) -> list[str]:
    """Return a table with a row for each combination of ``axes`` that has a test."""
    rows: dict[tuple[str, ...], dict[str, set[int]]] = {}
    for claim in claims:
        row = rows.setdefault(tuple(getattr(claim, axis) for axis in axes), {})
        row.setdefault(claim.shows, set()).add(numbers[_function(claim.node)])
    heads = [*axes, *(heading for heading, _ in SHOWS.values())]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for names in sorted(rows, key=_position):
        cells = [_cell(shows, rows[names].get(shows, set())) for shows in SHOWS]
        lines.append(f"| {' | '.join([*names, *cells])} |")
    return lines


def _position(names: tuple[str, ...]) -> tuple[Any, ...]:
    """Return the place of a row: strategies in the order of the configuration, other names by the alphabet."""
    if len(names) == 1:
        return names
    strategy, method, objective = names
    return [*OBJECTIVES].index(objective), METHODS.index(method), STRATEGIES.index(strategy)


def _cell(shows: str, found: set[int]) -> str:
    if shows == "gpu" and not found:
        return "never"
    return ", ".join(f"[{number}](#test-{number})" for number in sorted(found))


def _without_tests(claims: Sequence[Claim]) -> list[str]:
    """Return a line for each method and objective with the strategies that have no test."""
    known = {tuple(getattr(claim, axis) for axis in _AXES) for claim in claims}
    lines = []
    for objective in OBJECTIVES:
        for method in METHODS:
            missing = [strategy for strategy in STRATEGIES if (strategy, method, objective) not in known]
            if missing:
                lines.append(f"- `method: {method}`, `objective: {objective}`: {', '.join(missing)}")
    return ["\nNo recorded test shows anything for these, some of which the plan refuses:\n", *lines]


def _list(numbers: dict[str, int], claims: Sequence[Claim]) -> list[str]:
    """Return a line for each test with its parameters."""
    lines = []
    for name, number in numbers.items():
        nodes = sorted({claim.node for claim in claims if _function(claim.node) == name})
        parameters = ", ".join(f"`{node.removeprefix(name)}`" for node in nodes if node != name)
        lines.append(f'- <a id="test-{number}"></a>{number}: `{name}`' + (f" with {parameters}" if parameters else ""))
    return lines


if __name__ == "__main__":
    main()
