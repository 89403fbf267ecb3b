"""Compare the size of each room with its budget: ``make size``, a part of ``make check``.

``tools/budgets.yaml`` holds lines and statements of each package of ``src/shardmake``, lines of each part of the tests
and tools, and words of the documents. No file may have more than 450 lines and no function more than 60, but those
that the table exempts by name. ``python -m tools.size --write`` sets every budget to the present size; a commit that
raises one states why.
"""

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

BUDGETS = Path(__file__).with_name("budgets.yaml")
FILE_LINES, FUNCTION_LINES = 450, 60
SOURCE = Path("src/shardmake")
ROOMS = ("tests/unit", "tests/workflow", "tests/cluster", "tests", "tools", "benchmarks", "examples")
"""Folders that are counted apart from the source; a file belongs to the first that holds it."""
PAGES = ("top level", "config", "docs", "examples")
"""Folders whose documents are counted."""


def sizes(root: Path) -> dict[str, int]:
    """Return the size of each room below ``root``: ``lines ROOM``, ``statements ROOM`` and ``words ROOM``."""
    found: Counter[str] = Counter()
    for path in python_files(root):
        text = path.read_text()
        room = room_of(path.relative_to(root))
        found[f"lines {room}"] += len(text.splitlines())
        if room.startswith("src/"):
            found[f"statements {room}"] += sum(isinstance(node, ast.stmt) for node in ast.walk(ast.parse(text)))
    for room in PAGES:
        pages = root.glob("*.md") if room == "top level" else (root / room).rglob("*.md")
        found[f"words {room}"] += sum(len(page.read_text().split()) for page in pages if not page.is_symlink())
    return {room: found[room] for room in sorted(found) if found[room]}


def python_files(root: Path) -> list[Path]:
    """Return the Python files of the source, the tests and the tools."""
    tops = ("src", "tests", "tools", "benchmarks", "examples")
    return [path for top in tops for path in sorted((root / top).rglob("*.py"))]


def room_of(path: Path) -> str:
    """Return the room of a file: its package in the source, else the folder of `ROOMS` that holds it."""
    if path.is_relative_to(SOURCE):
        return str(SOURCE / path.relative_to(SOURCE).parts[0])
    return next(room for room in ROOMS if path.is_relative_to(room))


def functions(path: Path) -> Iterator[tuple[str, int]]:
    """Return the name and the lines of every function in a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno
            yield node.name, node.end_lineno - node.lineno + 1


def findings(root: Path, table: dict[str, Any]) -> list[str]:
    """Return a sentence for every room, file and function that is larger than ``table`` allows."""
    budgets: dict[str, int] = table["budgets"]
    found = [
        f"{room}: {size}, {size - budgets.get(room, 0)} over its budget of {budgets.get(room, 0)}"
        for room, size in sizes(root).items()
        if size > budgets.get(room, 0)
    ]
    found += [f"{room}: has a budget, but does not exist" for room in budgets.keys() - sizes(root).keys()]
    for path in python_files(root):
        name = str(path.relative_to(root))
        lines = len(path.read_text().splitlines())
        if lines > FILE_LINES and name not in table["larger files"]:
            found.append(f"{name}: {lines} lines, more than {FILE_LINES}")
        found += [
            f"{name}: {function} has {size} lines, more than {FUNCTION_LINES}"
            for function, size in functions(path)
            if size > FUNCTION_LINES and f"{name}:{function}" not in table["larger functions"]
        ]
    return found


def main(arguments: list[str]) -> str:
    """Return the findings, one a line, empty if there are none; with ``--write`` write the budgets."""
    root = Path(__file__).resolve().parents[1]
    table = yaml.safe_load(BUDGETS.read_text())
    if "--write" in arguments:
        table["budgets"] = sizes(root)
        BUDGETS.write_text(yaml.safe_dump(table, sort_keys=False))
    return "\n".join(findings(root, table))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]) or 0)
