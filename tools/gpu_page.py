"""Write the tables of docs/gpu.md from the files below ``benchmarks/results/gpu``: ``python -m tools.gpu_page``."""

from pathlib import Path

from shardmake.doctor.gpu_report import COLUMNS, TRAINING_COLUMNS, GpuReport, as_row

REPOSITORY = Path(__file__).resolve().parents[1]
PAGE, RESULTS = REPOSITORY / "docs/gpu.md", REPOSITORY / "benchmarks/results/gpu"


def tables() -> list[str]:
    """Return the two tables of docs/gpu.md, of all reports in `RESULTS`."""
    reports = sorted((GpuReport.read(path) for path in RESULTS.glob("*.json")), key=lambda report: report.time)
    trainings = [row for report in reports for row in report.training_rows()]
    return [
        "\n".join([as_row(columns), f"|{'---|' * len(columns)}", *rows])
        for columns, rows in ((COLUMNS, [report.row() for report in reports]), (TRAINING_COLUMNS, trainings))
    ]


def page(text: str) -> str:
    """Return the page ``text`` with the tables in place of those that it has."""
    for columns, table in zip((COLUMNS, TRAINING_COLUMNS), tables(), strict=True):
        before, head, old = text.partition(as_row(columns))
        assert head, f"docs/gpu.md lacks the table {as_row(columns)}"
        text = f"{before}{table}\n{old[old.index(chr(10) * 2) + 1 :]}"
    return text


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
