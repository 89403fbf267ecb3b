"""Write the page of model types to standard output: ``python -m tools.model_types_page``.

Its rows are those that ``python -m tests.model_types tests/model_types.json`` found; `make test-models` compares them.
"""

import json
from pathlib import Path
from typing import Any

ROWS = Path(__file__).parents[1] / "tests/model_types.json"
_LONGEST = 120
_KERNELS = ["varlen", "flash", "sdpa", "eager"]
_HEADER = """# Model types of transformers

What the plan and a small model of each type gave with the pinned transformers: the class that trains, the towers that
are not loaded, the attention kernels (`all`: varlen, flash, sdpa, eager), those that keep packed examples apart (`same`
is each of them; of flash, the ranks check it), and if one training step and its merge were right. Some default configs
of transformers cannot be built at all. The small models have the default config of their type, or a few published
values where that cannot run, with fewer layers and a smaller vocabulary, so a published model may differ. Types that
are not in the table have not been tried. `python -m tests.model_types tests/model_types.json` tries them, and `make
test-models` repeats the rows.

| type | class | towers absent | kernels | packing | memory | tested |
|---|---|---|---|---|---|---|
"""


def _short(text: str) -> str:
    """Return a message as a cell: without the file's name, and cut."""
    text = text.removeprefix("config.json: ").removeprefix("config.json. ").replace("|", "/").partition(". ")[0]
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _line(kind: str, row: dict[str, Any]) -> str:
    if "refused" in row:
        return f"| `{kind}` | | | | | | refused: {_short(row['refused'])} |"
    apart = [kernel for kernel in row["attention"] if kernel not in row["mixing"]]
    cells = (
        f"`{kind}`", row["model_class"], ", ".join(row["absent"]),
        "all" if row["attention"] == _KERNELS else ", ".join(row["attention"]),
        "same" if apart == row["attention"] else ", ".join(apart) or "none", row["planned"],
        "yes" if row["tested"] == "a step, its merge" else _short(row["tested"]),
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Print the page."""
    rows = json.loads(ROWS.read_text())
    print(_HEADER + "\n".join(_line(kind, row) for kind, row in rows.items()))


if __name__ == "__main__":
    main()
