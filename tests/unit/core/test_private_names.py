"""Private names of libraries: all in one table, all in the installed versions."""

import ast
import importlib
import inspect
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from shardmake.core import private_names
from shardmake.core.errors import ConfigError
from shardmake.core.private_names import NAMES, SUPPORTED, Names, PrivateNameError, private

REPOSITORY = Path(__file__).resolve().parents[3]
SOURCES = [path for folder in ("src", "tools", "workflow") for path in sorted((REPOSITORY / folder).rglob("*.py"))]
LISTED = {name for one in NAMES for name in one.names}
PUBLIC = {"os._exit"}
"""Documented names with an underscore."""
_PRIVATE = re.compile(r"_[a-zA-Z]\w*")
_READERS = {"getattr", "hasattr", "setattr", "delattr"}


def own_names() -> set[str]:
    """Return the private names that Shardmake gives to its own attributes, functions and modules."""
    found = set()
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and of_self(node):
                found.add(node.attr)
    return {name for name in found if _PRIVATE.fullmatch(name)} - LISTED


def of_self(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def used_names(text: str) -> Iterator[str]:
    """Yield the attributes, imported modules and names, and names in strings, that begin with an underscore."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute) and ast.unparse(node) not in PUBLIC:
            yield node.attr
        elif isinstance(node, ast.ImportFrom) and node.module and not node.module.startswith("shardmake"):
            yield from (*node.module.split("."), *(alias.name for alias in node.names))
        elif isinstance(node, ast.Import):
            yield from (part for alias in node.names for part in alias.name.split("."))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _READERS:
            yield from (one.value for one in node.args if isinstance(one, ast.Constant) and isinstance(one.value, str))


def test_no_other_module_uses_a_private_name_of_a_library() -> None:
    own = own_names()
    table = Path(inspect.getfile(private_names))
    used = {
        f"{path.relative_to(REPOSITORY)}: {name}"
        for path in SOURCES if path != table
        for name in used_names(path.read_text()) if _PRIVATE.fullmatch(name) and name not in own
    }  # fmt: skip
    assert not used, "write private(object).name and list the name in shardmake.core.private_names"


@pytest.mark.parametrize("text", [
    "model._mp_policy", "from torch._utils import x", "from torch.utils import _x", "import torch._dynamo",
    "getattr(model, '_x')", "self._tr_loss",
])  # fmt: skip
def test_each_kind_of_use_is_found(text: str) -> None:
    assert [name for name in used_names(text) if _PRIVATE.fullmatch(name)]


def test_methods_that_replace_a_private_one_of_a_library_are_listed() -> None:
    from shardmake.train import preferences, sharded_trainer

    values = (*vars(preferences).values(), *vars(sharded_trainer).values())
    classes = {kind for kind in values if isinstance(kind, type)}
    replaced = {
        name
        for kind in classes
        if kind.__module__.startswith("shardmake")
        for base in kind.__mro__
        if not base.__module__.startswith("shardmake")
        for name in {name for one in kind.__mro__ if one.__module__.startswith("shardmake") for name in vars(one)}
        if _PRIVATE.fullmatch(name) and name in vars(base) and name != "_abc_impl"
    }
    assert {"_save_checkpoint", "_prepare_dataset"} <= replaced <= LISTED


def holder(path: str) -> Any:
    """Import the longest module that ``path`` begins with, and return the rest of it there."""
    parts = path.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:]:
            found = getattr(found, part)
        return found
    raise AssertionError(path)


def installed(library: str) -> Version:
    return Version(sys.version.split()[0] if library == "python" else version(library))


@pytest.mark.parametrize("listed", NAMES, ids=lambda one: f"{one.holder}-{'-'.join(one.names[:1])}")
def test_the_installed_version_has_the_names(listed: Names) -> None:
    """An attribute that only objects have is in the source of their class."""
    if listed.oldest and installed(listed.library) < Version(listed.oldest):
        return
    found = holder(listed.holder)
    assert [name for name in listed.names if not hasattr(found, name) and not in_source(found, name)] == []


def in_source(found: Any, name: str) -> bool:
    kinds = found.__mro__ if isinstance(found, type) else [found]
    return any(re.search(rf"\b{name}\b", inspect.getsource(kind)) for kind in kinds if kind is not object)


def test_a_missing_name_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    message = r"^torch \S+ does not have the private name torch.*\._mp_policy, .*2\.11"
    with pytest.raises(PrivateNameError, match=message):
        _ = private(object()).mp_policy
    assert not hasattr(private(object()), "mp_policy")


def pretend(monkeypatch: pytest.MonkeyPatch, **versions: str | None) -> None:
    found = {name: newest for name, (_, newest) in SUPPORTED.items()} | versions
    monkeypatch.setattr(private_names, "installed_versions", lambda names: {name: found[name] for name in names})


def test_pyproject_requires_the_oldest_versions_and_the_pins_are_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    required = {one.name: one.specifier for one in map(Requirement, project["dependencies"])}
    for name, (oldest, _) in SUPPORTED.items():
        assert f">={oldest}" in str(required[name]).split(","), name
    pins = dict(re.findall(r"^(\S+)==(\S+)$", (REPOSITORY / "constraints.txt").read_text(), re.MULTILINE))
    pretend(monkeypatch, **{name: pins[name] for name in SUPPORTED})
    private_names.check_libraries()
    assert list(private_names.library_warnings()) == []


def test_a_newer_library_than_was_tested_is_named_and_an_older_one_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, torch="2.11.0+cu130", transformers="5.23.0")
    private_names.check_libraries()
    assert list(private_names.library_warnings()) == []
    pretend(monkeypatch, torch="2.15.0", transformers="5.23.0", peft="0.21.9")
    (warning,) = private_names.library_warnings()
    assert warning.startswith("torch 2.15.0 is newer than 2.14, the newest that was tested.")
    pretend(monkeypatch, transformers="5.24.0")
    (pair,) = private_names.library_warnings()
    pretend(monkeypatch, torch="2.10.1+cu128", trl=None)  # a container may lack what its ranks do not need
    with pytest.raises(ConfigError, match=r": torch 2\.10\.1\+cu128\. .*torch>=2\.11 .*make install"):
        private_names.check_libraries()
    assert pair.startswith("transformers 5.24.0 with peft 0.21: model.add_adapter of a script stops.")
