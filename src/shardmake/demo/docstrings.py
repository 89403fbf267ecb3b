"""A chat data set from the docstrings of Python's standard library.

The sources are parsed, never imported, so modules have no side effects.
"""

import ast
import hashlib
import inspect
import random
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from shardmake.core.errors import DataError

EVAL_FRACTION = 0.05
_FEWEST = 1000
_ANSWER_CHARACTERS = range(20, 500)
_SIGNATURE_CHARACTERS = 80
_SKIPPED = {"test", "tests", "idlelib", "idle_test", "lib2to3", "turtledemo", "site-packages", "dist-packages"}
_QUESTIONS = (
    "What does the {kind} {name} do?",
    "What is {name} for?",
    "Explain the {kind} {name}.",
    "Tell me about {name}.",
    "How is the {kind} {name} documented?",
    "What does Python's documentation say about {name}?",
    "Describe the {kind} {name} in a few words.",
    "When would I use {name}?",
)
_Node = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True)
class DocstringEntry:
    """A documented function, method or class."""

    name: str
    """Dotted name from the module on."""
    kind: str
    """function, method or class."""
    signature: str
    """Parameters in parentheses; empty if they are long."""
    answer: str
    """The opening paragraphs of its documentation."""

    @property
    def fingerprint(self) -> int:
        """Number that depends only on the name."""
        return int.from_bytes(hashlib.sha256(self.name.encode()).digest()[:8], "big")

    def conversation(self) -> dict[str, list[dict[str, str]]]:
        """Return question and answer as chat messages; the name determines the phrasing."""
        phrasing = _QUESTIONS[self.fingerprint % len(_QUESTIONS)]
        question = phrasing.format(kind=self.kind, name=f"{self.name}{self.signature}")
        return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": self.answer}]}


def collect(library: Path | None = None) -> list[DocstringEntry]:
    """Return documented entries of the standard library (or of modules in ``library``), each answer once, by name.

    Raises `DataError` if there are too few, for example without the sources of the standard library.
    """
    folder = library or Path(sysconfig.get_paths()["stdlib"])
    by_answer: dict[str, DocstringEntry] = {}
    for path in _modules(folder):
        for entry in _entries(path, ".".join(path.relative_to(folder).with_suffix("").parts)):
            by_answer.setdefault(entry.answer, entry)
    if len(by_answer) < _FEWEST and library is None:
        raise DataError(
            f"Too few Python sources in {folder}. Install those of the standard library (libpython3-stdlib)."
        )
    return sorted(by_answer.values(), key=lambda entry: entry.name)


def split(entries: Iterable[DocstringEntry], seed: int) -> tuple[list[DocstringEntry], list[DocstringEntry]]:
    """Split entries into training and evaluation sets in random order, without overlap."""
    shuffled = sorted(entries, key=lambda entry: entry.name)
    random.Random(seed).shuffle(shuffled)
    count = round(len(shuffled) * EVAL_FRACTION)
    return shuffled[count:], shuffled[:count]


def _modules(folder: Path) -> list[Path]:
    paths = sorted(folder.rglob("*.py"))
    return [path for path in paths if not any(_is_skipped(part) for part in path.relative_to(folder).parts)]


def _is_skipped(part: str) -> bool:
    return part in _SKIPPED or (part.startswith("_") and part != "__init__.py")


def _entries(path: Path, module: str) -> Iterator[DocstringEntry]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tree = ast.parse(path.read_bytes())
    yield from _entries_in(tree, module.removesuffix(".__init__"), "function")


def _entries_in(node: ast.AST, prefix: str, kind: str) -> Iterator[DocstringEntry]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _Node) and not child.name.startswith("_"):
            yield from _entry(child, f"{prefix}.{child.name}", kind)


def _entry(node: _Node, name: str, kind: str) -> Iterator[DocstringEntry]:
    is_class = isinstance(node, ast.ClassDef)
    answer = _opening(ast.get_docstring(node) or "")
    if len(answer) in _ANSWER_CHARACTERS:
        yield DocstringEntry(name, "class" if is_class else kind, _signature(node), answer)
    if is_class:
        yield from _entries_in(node, name, "method")


def _signature(node: _Node) -> str:
    if isinstance(node, ast.ClassDef):
        return ""
    signature = f"({ast.unparse(node.args)})"
    return signature if len(signature) <= _SIGNATURE_CHARACTERS else ""


def _opening(documentation: str) -> str:
    """Return as many paragraphs from the beginning as fit a short answer."""
    opening = ""
    for paragraph in inspect.cleandoc(documentation).split("\n\n"):
        longer = f"{opening}\n\n{paragraph.rstrip()}" if opening else paragraph.rstrip()
        if len(longer) not in range(_ANSWER_CHARACTERS.stop):
            break
        opening = longer
    return opening
