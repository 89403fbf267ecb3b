"""One comparison of the settings of Trainer, DeepSpeed and Accelerate, behind `render` and `shardmake check`.

`shardmake.render.settings_table` takes what one training is started with, and returns a `Row` for every setting that
more than one of the three libraries has: the value of each side, or the library's default if its key is missing, what
will run, and a verdict. The libraries themselves decide what will run: `shardmake.render.engine_settings` passes the
settings through their own code up to DeepSpeed's config. What a library cannot read becomes a `Problem`.
"""

import json
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from shardmake.config.settings import Setting

Library = Literal["Trainer", "DeepSpeed", "Accelerate"]
LIBRARIES: Final[tuple[Library, ...]] = ("Trainer", "DeepSpeed", "Accelerate")
Verdict = Literal["equal", "stops", "differs"]
"""``stops``: a library ends the run with an error. ``differs``: a written value is not what will run, silently."""


@dataclass(frozen=True)
class Settings:
    """The settings that one training is started with; None for a library whose file it does not have.

    ``trainer`` holds keyword arguments of TrainingArguments, ``flags`` options of `accelerate launch`. With
    ``named_by_trainer`` the training arguments name the DeepSpeed file, otherwise only Accelerate does.
    ``on_cpu`` says that the nodes have no GPU. ``unknown`` names training arguments and options of the launcher whose
    values only a shell knows. The defaults of a library in ``is_open`` may have been replaced.
    """

    trainer: dict[str, Any] | None = None
    deepspeed: dict[str, Any] | None = None
    accelerate: dict[str, Any] | None = None
    flags: list[str] = field(default_factory=list)
    world_size: int = 1
    named_by_trainer: bool = True
    on_cpu: bool = False
    unknown: list[str] = field(default_factory=list)
    is_open: list[Library] = field(default_factory=list)

    def is_unknown(self, setting: Setting) -> bool:
        """Return whether only a shell knows a value of ``setting``, as an option or as one of a variable's options."""
        given, trainer = {*(self.trainer or {})}, [key.partition(".")[0] for key in setting.trainer]
        return (
            any(key in self.unknown for key in (*setting.trainer, setting.option))
            or ("Trainer" in self.is_open and self.trainer is not None and not {*trainer} <= given)
            or ("Accelerate" in self.is_open and setting.option is not None and setting.option not in self.options)
        )

    @property
    def options(self) -> dict[str, str]:
        """Return the flag of each option of `accelerate launch` that ``flags`` give."""
        named = [flag for flag in self.flags if flag.startswith("--")]
        return {flag.removeprefix("--").partition("=")[0].replace("-", "_"): flag for flag in named}


@dataclass(frozen=True)
class Value:
    """The value of a setting in one library: what its file says, or the library's default."""

    value: Any
    written: bool
    key: str


@dataclass(frozen=True)
class Row:
    """One setting: the value of each library that has it, what will run, and the verdict.

    ``runs`` is the value that trains, or None if the run stops. ``effect`` is a sentence, empty if all is equal.
    """

    setting: str
    values: dict[Library, Value]
    runs: Any
    verdict: Verdict
    effect: str = ""

    def sentence(self, names: Mapping[Library, str]) -> str:
        """Return the value of each library, with ``names`` of the files, and the effect."""
        sides = [
            f"{value.key} is {as_text(value.value)}"
            + (f" in {names.get(library, library)}" if value.written else f", {library}'s default")
            for library, value in self.values.items()
            if value.value is not None
        ]
        return f"{self.setting}: {'; '.join(sides)}. {self.effect}" if sides else f"{self.setting}: {self.effect}"


@dataclass(frozen=True)
class Problem:
    """A key that a library refuses (``error``) or silently ignores (``warning``), or one to know about (``note``).

    ``key`` is a text such as ``the options`` if no single key is the cause.
    """

    library: Library
    key: str
    value: Any
    level: Literal["error", "warning", "note"]
    effect: str

    def sentence(self, names: Mapping[Library, str]) -> str:
        """Return the key, its value and file, and the effect."""
        file = names.get(self.library, self.library)
        if self.value is None and self.key.startswith("the "):  # all of it, not one key
            return f"{self.key} in {file}: {self.effect}"
        value = "is missing or null" if self.value is None else f"is {json.dumps(self.value)}"
        return f"{self.key} {value} in {file}. {self.effect}"


def as_text(value: Any) -> str:
    """Return a value as a file would have it."""
    return "-" if value is None else value if isinstance(value, str) else json.dumps(value)


@dataclass
class EngineSettings:
    """Settings as the libraries understood them.

    ``left_to_script`` holds keys of the DeepSpeed file whose "auto" a script's objects fill in. ``data_ranks`` is the
    number of ranks that share the rows. ``stops`` maps a key to a sentence, if the key ends the run.
    """

    arguments: Any = None
    launched: Namespace | None = None
    launcher: str = ""
    config: Any = None
    defaults: Any = None
    fsdp: Any = None
    dynamo: str = "NO"
    ignored: list[str] = field(default_factory=list)
    """Training arguments and keys of ``fsdp_config`` that Trainer never reads."""
    deepspeed: dict[str, Any] = field(default_factory=dict)
    left_to_script: list[str] = field(default_factory=list)
    uses_deepspeed: bool = False
    world_size: int = 1
    data_ranks: int = 1
    problems: list[Problem] = field(default_factory=list)
    stops: dict[str, str] = field(default_factory=dict)

    def refuse(self, library: Library, key: str, value: Any, effect: str) -> None:
        """Record a value that ``library`` refuses."""
        self.problems.append(Problem(library, key, value, "error", effect))


@dataclass(frozen=True)
class Comparison:
    """All settings of one training, and the keys that no comparison can be made of."""

    rows: list[Row]
    problems: list[Problem]

    @property
    def contradictions(self) -> list[Row]:
        """Return the rows that stop the run or train something else than what is written."""
        return [row for row in self.rows if row.verdict != "equal"]
