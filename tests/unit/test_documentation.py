"""The pages name what exists: files and headings that they link, commands, options, targets, modules."""

import re
import subprocess
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import typer

from shardmake.cli import app
from tools import llms_text

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = [
    REPOSITORY / name
    for name in subprocess.run(
        ["git", "ls-files", "*.md"], cwd=REPOSITORY, capture_output=True, text=True, check=True
    ).stdout.split()
]
COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
TARGETS = set(re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))
START = r"(?:^|&& |; |srun .* )(?:\S*/)?"
"""The text that may precede the name of a program."""
OPTION = r"(?<![\w-])(--?[a-z][a-z-]*)"


@cache
def _options_of_snakemake() -> set[str]:
    from snakemake.cli import get_argument_parser  # takes a second

    return {name for action in get_argument_parser()._actions for name in action.option_strings}


def _anchors(page: Path) -> set[str]:
    """Return the anchors of a page: of headings that GitHub and mkdocs spell alike, and those in HTML."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    words = [re.sub(r"[^\w\s-]", "", title).strip().lower() for title in titles]
    both = {re.sub(r"\s", "-", text) for text in words} & {re.sub(r"[-\s]+", "-", text) for text in words}
    return both | set(re.findall(r'id="([^"]+)"', page.read_text()))


def _code(page: Path) -> Iterator[str]:
    """Yield every line of a block of code and every code span, without a comment at its end."""
    text = page.read_text()
    blocks = re.findall(r"^ *```.*?\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE) + re.findall(
        r"^ {4}(.*)", text, re.MULTILINE
    )
    spans = re.findall(r"`([^`]+)`", re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE))
    lines = [line for block in blocks for line in block.splitlines()] + [" ".join(span.split()) for span in spans]
    yield from (re.sub(r"\s# .*", "", line) for line in lines)


def _missing(line: str) -> list[str]:
    """Return what a command names that does not exist: commands, options, targets of make, modules."""
    if found := re.search(START + r"shardmake ([a-z]+)(.*)", line):
        command, rest = found[1], found[2].split(" -- ")[0]
        if command not in COMMANDS:
            return [command]
        known = {name for item in COMMANDS[command].params for name in (*item.opts, *item.secondary_opts)} | {"--help"}
        return sorted(
            set(re.findall(OPTION, rest)) - known - (_options_of_snakemake() if command in ("submit", "run") else set())
        )
    if found := re.search(START + r"snakemake (.*)", line):
        return sorted(set(re.findall(OPTION, found[1])) - _options_of_snakemake())
    if found := re.search(START + r"make ([a-z][a-z-]*)", line):
        return sorted({found[1]} - TARGETS)
    if found := re.search(r"python -m ((?:benchmarks|shardmake|tests|tools)[\w.]*)(.*)", line):
        module = find_spec(found[1])
        source = Path(module.origin).read_text() if module and module.origin else ""
        return [] if module and all(f'"{name}"' in source for name in re.findall(OPTION, found[2])) else [found[0]]
    return []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_every_command_exists_with_its_options(page: Path) -> None:
    wrong = {line: missing for line in _code(page) if (missing := _missing(line))}
    assert wrong == {}


def test_what_does_not_exist_is_found() -> None:
    assert _missing("shardmake trian NAME") == ["trian"]
    assert _missing(".venv/bin/shardmake status NAME --jsn") == ["--jsn"]
    assert _missing("shardmake check -- accelerate launch --config_file f") == []
    assert _missing("shardmake submit --configfile f --dryrum") == ["--dryrum"]
    assert _missing("snakemake -n --profil slurm") == ["--profil"] and _missing("make demos") == ["demos"]
    assert _missing("python -m benchmarks.saving --speed 3") == ["python -m benchmarks.saving --speed 3"]
    assert _missing("python -m tools.picture") == ["python -m tools.picture"]


def test_every_test_in_the_table_of_evidence_exists() -> None:
    named = re.findall(r"`(\w+/\w+\.py)::(\w+)`", (REPOSITORY / "docs/evidence.md").read_text())
    missing = [name for file, name in named if f"def {name}(" not in (REPOSITORY / "tests" / file).read_text()]
    assert len(named) >= 33 and missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_every_link_within_the_repository_leads_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        assert not anchor or anchor in _anchors(target), link


def test_the_index_links_every_page_of_the_website() -> None:
    navigation = (REPOSITORY / "mkdocs.yml").read_text().split("\nnav:\n")[1]
    pages = set(re.findall(r"\S+\.md$", navigation, re.MULTILINE)) - {"index.md"}
    links = re.findall(r"\]\(([^)\s]+)\)", (REPOSITORY / "docs/index.md").read_text())
    linked = {link.partition("#")[0] for link in links}
    assert len(pages) > 25 and pages - linked == set()


def test_the_list_of_pages_for_language_models_is_up_to_date() -> None:
    assert llms_text.PAGE.read_text() == llms_text.text(), "run: python -m tools.llms_text"
