"""``from shardmake import estimate, consolidate, verify``, without the cost of torch at ``import shardmake``."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import shardmake
from shardmake.core.errors import ShardmakeError

HEAVY = "print(*sorted({'torch', 'transformers', 'deepspeed', 'datasets', 'pydantic'} & {*sys.modules}))"


@pytest.mark.parametrize("statement", ["import shardmake", "from shardmake import __version__, consolidate"])
def test_importing_the_package_imports_no_large_library(statement: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"{statement}; import sys; {HEAVY}"], capture_output=True, text=True, check=True
    )
    assert done.stdout == "\n"


def test_every_public_name_exists() -> None:
    assert {name for name in shardmake.__all__ if getattr(shardmake, name, None) is None} == set()
    with pytest.raises(AttributeError, match="has no attribute 'merge_everything'"):
        shardmake.merge_everything  # noqa: B018


def test_an_estimate_needs_only_a_config(tmp_path: Path) -> None:
    from shardmake import EstimateRequest, estimate
    from tests.unit.plans import LLAMA

    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    result = estimate(EstimateRequest(model=str(tmp_path), strategies=("zero3",)))
    assert result.rows[0].choice.strategy == "zero3"


def test_consolidate_and_verify_can_be_called_after_their_package_was_imported(tmp_path: Path) -> None:
    import shardmake.consolidate.merge  # noqa: F401
    from shardmake import consolidate, verify

    with pytest.raises(ShardmakeError, match="checkpoint"):
        consolidate(tmp_path / "missing", tmp_path / "out")
    with pytest.raises(ShardmakeError, match="missing"):
        verify(tmp_path / "missing")


def test_main_guards_are_the_last_statement_of_their_module() -> None:
    """A function below the guard does not exist yet when the module runs as a program."""
    for path in Path(shardmake.__file__).parent.rglob("*.py"):
        statements = ast.parse(path.read_text()).body
        guards = [
            node
            for node in statements
            if ast.unparse(node).startswith("if __name__ ==") and "main(" in ast.unparse(node)
        ]
        assert all(node is statements[-1] for node in guards), path
