"""The configurations of the section "You have, you write", as its readers copy them."""

import re
from pathlib import Path
from typing import Any

import yaml

PAGE = Path(__file__).resolve().parents[1] / "docs/how-to/user-script.md"


def _keys_of_run(block: str) -> dict[str, Any]:
    """Return the keys of the run in a block of YAML, which may name the run."""
    values = yaml.safe_load(block)
    return next(iter(values["runs"].values())) if "runs" in values else values


def _sections() -> tuple[str, dict[str, str]]:
    """Return the text before the first command, and the text about each command by its title."""
    (section,) = re.findall(r"^## You have, you write\n(.*?)^## ", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    start, *parts = re.split(r"^### (.+)\n", section, flags=re.MULTILINE)
    return start, dict(zip(parts[::2], parts[1::2], strict=True))


def _only_block(text: str) -> dict[str, Any]:
    (block,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    return _keys_of_run(block)


COMMON = _only_block(_sections()[0])
"""Keys that all runs of the page have."""
RUNS = {title: _only_block(text) for title, text in _sections()[1].items()}
"""The keys of the run in each section, by its title."""


def arguments_of(title: str, **replaced: str) -> list[str]:
    """Return the ``script_args`` of a section; ``replaced`` has other values by the name of an option without dashes."""
    words = list(RUNS[title].get("script_args", []))
    for name, value in replaced.items():
        words[words.index(f"--{name}") + 1] = value
    return words
