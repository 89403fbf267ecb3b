"""Write the page of model types to standard output: ``python -m tools.model_types_page``.

Its rows are those that ``python -m tests.model_types tests/model_types.json`` found; `make test-models` compares them.
"""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from tests.tiers import FAMILIES

ROWS = Path(__file__).parents[1] / "tests/model_types.json"
_LONGEST = 120
_KERNELS = ["varlen", "flash", "sdpa", "eager"]
_HEADER = """# Model types of transformers

What the plan and a small model of each type gave with the pinned transformers: the class that trains, the towers that
are not loaded, the attention kernels (`all`: varlen, flash, sdpa, eager), and those that keep packed examples apart
(`same` is each of them; of flash, the ranks check it). One training step and its merge were right, unless the last
column has a problem. The small models have the default config of their type, or a few published values where that
cannot run, with fewer layers and a smaller vocabulary, so a published model may differ. Those of the types in bold went
through every stage, from fetch to report, with two ranks of ZeRO-3 and of FSDP2 (`make test-families`). Types that are
not on this page have not been tried. `python -m tests.model_types tests/model_types.json` tries them, and
`make test-models` repeats the rows.

| type | class | kernels | packing | towers absent; problem |
|---|---|---|---|---|
"""
_KINDS = {
    "encoder-decoder": "Encoder-decoder models",
    "cannot build this model": "transformers cannot build the default config",
    "cannot be trained without its towers": "The text part cannot be trained without its towers",
    "not shown to train without its towers": "The text part is not shown to train without its towers",
}
"""Titles of refusals, by a part of their text; another refusal is its own title."""


def _short(text: str) -> str:
    """Return a message as a cell: without the file's name, and cut."""
    text = text.removeprefix("config.json: ").removeprefix("config.json. ").replace("|", "/").partition(". ")[0]
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _line(kind: str, row: dict[str, Any]) -> str:
    apart = [kernel for kernel in row["attention"] if kernel not in row["mixing"]]
    problem = "" if row["tested"] == "a step, its merge" else _short(row["tested"])
    name = f"**`{kind}`**" if kind in FAMILIES else f"`{kind}`"
    cells = (
        name, row["model_class"], "all" if row["attention"] == _KERNELS else ", ".join(row["attention"]),
        "same" if apart == row["attention"] else ", ".join(apart) or "none",
        "; ".join(filter(None, (", ".join(row["absent"]), problem))),
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Print the page."""
    lines, refused = list[str](), defaultdict[str, list[str]](list)
    for kind, row in json.loads(ROWS.read_text()).items():
        if (reason := row.get("refused")) is None:
            lines.append(_line(kind, row))
        else:
            title = next((title for part, title in _KINDS.items() if part in reason), _short(reason))
            refused[title].append(f"`{kind}`")
    print(_HEADER + "\n".join(lines) + "\n\nRefused:\n")
    print("\n".join(f"- {title}: {', '.join(kinds)}" for title, kinds in refused.items()))


if __name__ == "__main__":
    main()
