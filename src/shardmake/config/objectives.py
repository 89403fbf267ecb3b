"""The table of objectives: one row each. A new objective is one row here and the module that trains it."""

from dataclasses import dataclass
from typing import Final

from shardmake.config.formats import FORMATS, DataFormat


@dataclass(frozen=True)
class ObjectiveSpec:
    """One objective: its name for readers, and the examples that it learns from."""

    label: str
    data_formats: tuple[DataFormat, ...]
    """Formats that ``data.format: auto`` may recognize."""


_PREFERENCE: Final[DataFormat] = "preference"
OBJECTIVES: Final = {
    "sft": ObjectiveSpec("supervised fine-tuning", tuple(name for name in FORMATS if name != _PREFERENCE)),
    "dpo": ObjectiveSpec("direct preference optimization", (_PREFERENCE,)),
}
