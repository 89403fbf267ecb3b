import re
from pathlib import Path

import pytest

from tests.tiers import LONG, QUICK, SLOW_UNIT, belongs_to_make_test, group_of, takes_long

TESTS = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize(("table", "file"), [(table, file) for table in (QUICK, SLOW_UNIT, LONG) for file in table])
def test_the_files_and_tests_of_the_tables_exist(table: dict[str, str], file: str) -> None:
    source = (TESTS / file).read_text()
    names = [name.split(".")[0] for name in re.sub(r"\([^)]*\)", "", table[file]).split("|")]
    assert [name for name in names if name.isidentifier() and "_" in name and name not in source] == []


def test_the_tier_follows_from_file_and_name() -> None:
    assert belongs_to_make_test("tests/unit/core/test_atomic.py::test_any")
    assert belongs_to_make_test("tests/workflow/test_recipes.py::test_trains_as_ddp_resumes_and_merges[fp32-zero3]")
    assert not belongs_to_make_test(
        "tests/workflow/test_recipes.py::test_trains_as_ddp_resumes_and_merges[fp32-zero3-offload]"
    )
    assert not belongs_to_make_test("tests/cluster/test_queue.py::test_any")
    assert takes_long("tests/cluster/test_container.py::test_any")
    assert takes_long("tests/workflow/test_loading.py::test_two_ranks_under_zero3_take_one_copy")
    assert not takes_long("tests/workflow/test_loading.py::test_fsdp_loads_on_the_first_rank_only")
    assert not takes_long("tests/cluster/test_queue.py::test_any")


def test_faults_of_a_strategy_share_a_process() -> None:
    file = "cluster/test_faults.py"
    assert group_of(f"tests/{file}::test_any[zero2-kill]") == group_of(f"tests/{file}::test_other[zero2]")
    assert group_of(f"tests/{file}::test_any[zero2-kill]") != group_of(f"tests/{file}::test_any[fsdp-kill]")
    assert group_of(f"tests/{file}::test_any") == group_of("tests/cluster/test_queue.py::test_any") == "cluster"
