from pathlib import Path

from tools.size import findings, sizes

LONG = "def long():\n" + "    x = 1\n" * 61


def checkout(root: Path, source: str) -> Path:
    file = root / "src" / "shardmake" / "core" / "disk.py"
    file.parent.mkdir(parents=True)
    file.write_text(source)
    (root / "README.md").write_text("two words")
    return root


def test_a_room_a_file_and_a_function_over_their_limits_are_named(tmp_path: Path) -> None:
    root = checkout(tmp_path, LONG * 8)
    budgets = sizes(root) | {"lines src/shardmake/core": 490, "words docs": 10}
    table = {"budgets": budgets, "larger files": [], "larger functions": []}
    file = "src/shardmake/core/disk.py"
    assert findings(root, table) == [
        "lines src/shardmake/core: 496, 6 over its budget of 490", "words docs: has a budget, but does not exist",
        f"{file}: 496 lines, more than 450", *[f"{file}: long has 62 lines, more than 60"] * 8,
    ]  # fmt: skip


def test_exempted_files_and_functions_and_sizes_within_their_budgets_pass(tmp_path: Path) -> None:
    root = checkout(tmp_path, LONG * 8)
    file = "src/shardmake/core/disk.py"
    assert findings(root, {"budgets": sizes(root), "larger files": [file], "larger functions": [f"{file}:long"]}) == []


def test_a_new_room_needs_a_budget(tmp_path: Path) -> None:
    assert findings(checkout(tmp_path, ""), {"budgets": {}, "larger files": [], "larger functions": []}) == [
        "words top level: 2, 2 over its budget of 0",
    ]
