"""The table of objectives: one row each. A new objective is one row here and the module that trains it."""

from dataclasses import dataclass
from typing import Final, Literal

DataFormat = Literal["chat", "prompt-completion", "text"]


@dataclass(frozen=True)
class ObjectiveSpec:
    """One objective: its name for readers, and the examples that it learns from."""

    label: str
    data_formats: tuple[DataFormat, ...]
    """In the order in which ``data.format: auto`` tries them."""


OBJECTIVES: Final = {"sft": ObjectiveSpec("supervised fine-tuning", ("chat", "prompt-completion", "text"))}
