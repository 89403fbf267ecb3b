"""Write docs/llms.txt, the list of pages for language models: ``python -m tools.llms_text``."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

REPOSITORY = Path(__file__).resolve().parents[1]
PAGE = REPOSITORY / "docs/llms.txt"
HEAD = "# Shardmake\n\n> Fine-tuning with DeepSpeed ZeRO and FSDP on Slurm, as a Snakemake workflow.\n"


def pages(entries: list[Any]) -> Iterator[str]:
    """Yield the path of each page of the menu below ``docs``, in its order."""
    for entry in entries:
        value = next(iter(entry.values())) if isinstance(entry, dict) else entry
        yield from pages(value) if isinstance(value, list) else [value]


def text() -> str:
    """Return the list: title, path and first sentence of each page."""
    menu = yaml.safe_load((REPOSITORY / "mkdocs.yml").read_text())["nav"]
    return "\n".join([HEAD, *map(_line, pages(menu))]) + "\n"


def _line(path: str) -> str:
    blocks = (REPOSITORY / "docs" / path).read_text().split("\n\n")
    title = next(line for line in blocks[0].splitlines() if line.startswith("# "))
    prose = next((" ".join(block.split()) for block in blocks[1:] if block[:1].isalpha()), "")
    return f"- [{title[2:]}]({path}): {prose.split('. ')[0].rstrip('.:')}"


if __name__ == "__main__":
    PAGE.write_text(text())
