"""Write the tables of docs/gpu.md from the files below ``benchmarks/results/gpu``: ``python -m tools.gpu_page``."""

from tests.gpu.results import COLUMNS, REPOSITORY, TRAINING_COLUMNS, as_row, tables

PAGE = REPOSITORY / "docs/gpu.md"


def page(text: str) -> str:
    """Return the page ``text`` with the tables in place of those that it has."""
    for columns, table in zip((COLUMNS, TRAINING_COLUMNS), tables(), strict=True):
        before, head, old = text.partition(as_row(columns))
        assert head, f"docs/gpu.md lacks the table {as_row(columns)}"
        text = f"{before}{table}\n{old[old.index(chr(10) * 2) + 1 :]}"
    return text


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
