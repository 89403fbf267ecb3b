"""The tables of data formats and of data files: one row each.

A format states which columns of an example it reads, and their names unless ``data.columns`` has others.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

RAW: Final[Literal["raw"]] = "raw"
"""``data.format`` of data that a script reads by itself; it has no columns."""
DataFormat = Literal["chat", "sharegpt", "alpaca", "prompt-completion", "text", "preference", "unpaired-preference"]


@dataclass(frozen=True)
class FormatSpec:
    """The columns of one format, each with its usual name."""

    required: Mapping[str, str]
    optional: Mapping[str, str] = field(default_factory=dict)
    turn: Mapping[str, str] = field(default_factory=dict)
    """Keys of one message of a conversation."""
    learned: str = ""
    """Words for what an objective other than sft learns from it; empty: tokens."""

    @property
    def columns(self) -> dict[str, str]:
        """Return all names that ``data.columns`` may replace."""
        return {**self.required, **self.optional, **self.turn}


_MESSAGE: Final = {"role": "role", "content": "content"}
_BESIDE: Final = {"tools": "tools", "template_arguments": "chat_template_kwargs"}
FORMATS: Final[Mapping[DataFormat, FormatSpec]] = {
    "chat": FormatSpec({"messages": "messages"}, {**_BESIDE, "system": "system"}, _MESSAGE),
    "sharegpt": FormatSpec(
        {"messages": "conversations"}, {**_BESIDE, "system": "system"}, {"role": "from", "content": "value"}
    ),
    "alpaca": FormatSpec({"instruction": "instruction", "output": "output"}, {"input": "input", "system": "system"}),
    "prompt-completion": FormatSpec({"prompt": "prompt", "completion": "completion"}, _BESIDE, _MESSAGE),
    "text": FormatSpec({"text": "text"}),
    "preference": FormatSpec(
        {"chosen": "chosen", "rejected": "rejected"}, {"prompt": "prompt", **_BESIDE}, _MESSAGE,
        learned="the difference of the two answers",
    ),
    "unpaired-preference": FormatSpec(
        {"prompt": "prompt", "completion": "completion", "label": "label"}, _BESIDE, _MESSAGE,
        learned="the completions, by their labels",
    ),
}  # fmt: skip

BINARY_SUFFIXES: Final = (".parquet", ".arrow")
DATA_SUFFIXES: Final = (".jsonl", ".json", ".csv", ".tsv", *BINARY_SUFFIXES)
COMPRESSION_SUFFIXES: Final = (".gz", ".bz2", ".xz", ".zst")
_NOT_DATA: Final = (
    "config.json", "dataset_dict.json", "dataset_info.json", "dataset_infos.json", "state.json", "cache-*.arrow",
)  # fmt: skip


def data_kind(name: str) -> str | None:
    """Return the suffix of `DATA_SUFFIXES` that states what the file ``name`` holds, or None.

    A suffix of compression is skipped, except for binary files, which compress themselves.
    """
    stem = name
    for suffix in COMPRESSION_SUFFIXES:
        stem = stem.removesuffix(suffix)
    kind = next((suffix for suffix in DATA_SUFFIXES if stem.endswith(suffix)), None)
    return None if kind in BINARY_SUFFIXES and stem != name else kind


def raw_files(source: Path) -> list[Path]:
    """Return ``source``, or every file below a folder; hidden ones, such as those of git, are left out."""
    if not source.is_dir():
        return [source]
    found = [path for path in sorted(source.rglob("*")) if path.is_file()]
    return [path for path in found if not any(part.startswith(".") for part in path.relative_to(source).parts)]


def data_files(folder: Path) -> list[Path]:
    """Return the data files below ``folder`` in reading order, without hidden ones and those in `_NOT_DATA`."""
    return [path for path in raw_files(folder) if data_kind(path.name) and not any(map(path.match, _NOT_DATA))]
