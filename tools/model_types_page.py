"""Write the page of model types to standard output: ``python -m tools.model_types_page``.

Its rows are those that ``python -m tests.model_types tests/model_types.json`` found; `make test-models` compares them.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from shardmake.memory import families
from shardmake.memory.composites import COMPOSITES
from tests.tiers import FAMILIES

ROWS = Path(__file__).parents[1] / "tests/model_types.json"
_LONGEST = 120
_HEADER = """# Model types of transformers

What the plan and a small model of each type gave with the pinned transformers: one training step and its merge, right
except for the problems below. Small models have the default config of their type, or a few published values where that
cannot run, with fewer layers and a smaller vocabulary, so a published model may differ. Those of the types in **bold**
went through every stage with two ranks of ZeRO-3 and of FSDP2 (`make test-families`). Other types have not been tried:
`python -m tests.model_types tests/model_types.json` tries them, and its file also has the class that trains.
`make test-models` repeats all.
"""
_KINDS = {
    "encoder-decoder": "Encoder-decoder models",
    "cannot build this model": "transformers cannot build the default config",
    "cannot be trained without its towers": "The text part cannot be trained without its towers",
    "not shown to train without its towers": "The text part is not shown to train without its towers",
    "its small model has": "The small model is too large to try",
}
"""Titles of refusals and problems, by a part of their text; another one is its own title."""
Row = Mapping[str, Any]


def _title(text: str) -> str:
    """Return the title of a message, or the message as a cell: without the file's name, and cut."""
    if title := next((title for part, title in _KINDS.items() if part in text), None):
        return title
    text = text.removeprefix("config.json: ").removeprefix("config.json. ").replace("|", "/").partition(". ")[0]
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _attention(row: Row) -> str:
    """Return the kernels, in italics those that do not keep packed examples apart."""
    return ", ".join(f"*{kernel}*" if kernel in row["mixing"] else kernel for kernel in row["attention"])


def _problem(row: Row) -> str:
    return "" if row["tested"] == "a step, its merge" else _title(row["tested"])


def _table(title: str, about: str, rows: Iterable[tuple[str, str]]) -> str:
    """Return a section with one line for each value, the most frequent first, and its types."""
    types = defaultdict[str, list[str]](list)
    for kind, value in rows:
        types[value].append(f"**{kind}**" if kind in FAMILIES else kind)
    types.pop("", None)
    lines = [
        f"| {value} | {', '.join(types[value])} |" for value in sorted(types, key=lambda value: -len(types[value]))
    ]
    return "\n".join([f"## {title}\n", *([f"{about}\n"] if about else []), "| | types |", "|---|---|", *lines, ""])


def page() -> str:
    """Return the page."""
    rows: dict[str, Row] = json.loads(ROWS.read_text())
    trained = [(kind, row) for kind, row in rows.items() if row.get("refused") is None]
    refused = [(kind, _title(row["refused"])) for kind, row in rows.items() if row.get("refused") is not None]
    towers = [(kind, ", ".join(row["absent"]).replace("model.", "")) for kind, row in trained]
    kernels = "Those in italics mix packed examples: with `packing`, the plan takes another one, or refuses."
    sizes = "A step is traced for other types, unusual values in config.json, and `lora.train_tokens`."
    known = {*families.FAMILIES, *COMPOSITES}
    names = "They take no memory, and the merge copies them from the base model. Names after `model.`, if they have it."
    return "\n".join([
        _HEADER,
        _table("Attention kernels", kernels, [(kind, _attention(row)) for kind, row in trained]),
        _table("Memory", sizes, [(kind, "estimated without a trace" if kind in known else "") for kind, _ in trained]),
        _table("Towers that are not loaded", names, towers),
        _table("Problems", "", [(kind, _problem(row)) for kind, row in trained]),
        _table("Refused", "", refused),
    ])  # fmt: skip


if __name__ == "__main__":
    print(page(), end="")
