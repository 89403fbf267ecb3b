"""Packages: what is imported is declared, what is declared is used, what is pinned is needed."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPOSITORY = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
EVERYTHING = [text for texts in (PROJECT["dependencies"], *EXTRAS.values()) for text in texts]
OWN = {"shardmake", "tests", "tools", "benchmarks"}
WITHOUT_EXTRA = {
    "flash_attn": "has no binary package; users install it for `attention: flash`",
    "trackio": "make test-trackers installs it",
    "triton": "a part of torch's builds for CUDA",
    "wandb": "make test-trackers installs it",
}
DISTRIBUTIONS = {"bitsandbytes": "bitsandbytes", "liger_kernel": "liger-kernel", "pynvml": "nvidia-ml-py"}
"""Of modules whose package may be missing on a machine without a GPU."""
CUDA = re.compile("cuda-|nvidia-|triton")
"""Packages that torch's builds for CUDA pin themselves."""
NOT_IMPORTED = {"ninja": "torch builds extensions with it"}
INSTALLED_BEFORE = {"setuptools", "shardmake"}


def names(requirements: Iterable[str]) -> set[str]:
    return {canonicalize_name(Requirement(text).name) for text in requirements}


def imported(folder: str) -> dict[str, Path]:
    """Return the top-level modules that files below ``folder`` import anywhere, each with one file that does.

    Programs import modules of their own folder.
    """
    found = {}
    for path in (REPOSITORY / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                modules = [node.module]
            tops = {module.partition(".")[0] for module in modules}
            beside = {module for module in tops if path.with_name(f"{module}.py").exists()}
            found |= dict.fromkeys(tops - beside, path.relative_to(REPOSITORY))
    return {module: path for module, path in found.items() if module not in {*sys.stdlib_module_names, *OWN}}


by_module = cache(packages_distributions)


def distributions_of(module: str) -> set[str]:
    found = by_module().get(module) or [DISTRIBUTIONS.get(module, module)]
    return {canonicalize_name(name) for name in found}


@pytest.mark.parametrize(("folder", "extras"), [
    ("src", ["evaluation", "gpu", "trackers"]), ("tools", ["test", "site"]), ("benchmarks", ["gpu"]),
    ("tests", ["test", "gpu"]),
])  # fmt: skip
def test_what_is_imported_is_declared(folder: str, extras: list[str]) -> None:
    declared = names(PROJECT["dependencies"]).union(*(names(EXTRAS[extra]) for extra in extras))
    missing = {
        module: str(path)
        for module, path in imported(folder).items()
        if module not in WITHOUT_EXTRA and not distributions_of(module) & declared
    }
    assert not missing, "declare these in pyproject.toml"


def test_what_is_declared_is_used() -> None:
    used = set().union(*(distributions_of(module) for module in imported("src")))
    assert names(PROJECT["dependencies"]) - used == NOT_IMPORTED.keys() & names(PROJECT["dependencies"])


def pins() -> set[str]:
    lines = (REPOSITORY / "constraints.txt").read_text().splitlines()
    return {canonicalize_name(line.partition("==")[0]) for line in lines}


def needed(requirements: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield each package that ``requirements`` need, directly or not, with the package that names it."""
    todo, seen = [(Requirement(text), "shardmake") for text in requirements], set()
    while todo:
        requirement, by = todo.pop()
        yield canonicalize_name(requirement.name), by
        for extra in {"", *requirement.extras} - {extra for name, extra in seen if name == requirement.name}:
            seen.add((requirement.name, extra))
            try:
                texts = distribution(requirement.name).requires or []
            except PackageNotFoundError:
                continue
            wanted = [Requirement(text) for text in texts if not CUDA.match(text)]
            todo += [
                (one, requirement.name) for one in wanted if not one.marker or one.marker.evaluate({"extra": extra})
            ]


def test_every_pin_is_needed_and_every_need_is_pinned() -> None:
    found = {name for name, _ in needed(EVERYTHING)}
    installed = {name for name in pins() if is_installed(name)}
    assert installed - found == set(), "nothing needs these pins any more"
    assert {name for name in found if is_installed(name)} - pins() - INSTALLED_BEFORE == set(), "pin these"


@cache
def is_installed(name: str) -> bool:
    try:
        return bool(distribution(name))
    except PackageNotFoundError:
        return False


def test_old_packages_stay_only_where_a_library_needs_them() -> None:
    """They had no release for years. CONTRIBUTING.md says who needs them."""
    old = {"word2number": "lm_eval", "sqlitedict": "lm_eval", "hjson": "deepspeed", "py-cpuinfo": "deepspeed"}
    assert {name: by for name, by in needed(EVERYTHING) if name in old} == old
    text = (REPOSITORY / "CONTRIBUTING.md").read_text()
    assert all(name in text and by in text for name, by in old.items())
