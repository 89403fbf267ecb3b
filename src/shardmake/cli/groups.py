"""The commands in groups, each imported when it is asked for."""

from collections import UserDict
from collections.abc import Mapping
from importlib import import_module
from typing import Any, Final

from typer.core import TyperGroup
from typer.main import get_group

GROUPS: Final = {
    "Stages": "fetch plan render data train consolidate evaluate push report",
    "Your files and models": "init demo estimate check verify reshard config",
    "Runs": "run submit status list logs compare stop cancel retrain",
    "Administration": "doctor clean",
}
"""Commands by the heading under which the help lists them."""
MODULES: Final = {"Stages": "stages", "Your files and models": "files", "Runs": "runs", "Administration": "runs"}
"""Modules with the commands of each heading."""


class Commands(UserDict[str, Any]):
    """Commands by name; the module of one is imported when it is asked for."""

    def __init__(self, others: Mapping[str, Any]) -> None:
        super().__init__({name: MODULES[heading] for heading, names in GROUPS.items() for name in names.split()})
        self.update(others)

    def __getitem__(self, name: str) -> Any:
        found = self.data[name]
        if isinstance(found, str):
            self.update(get_group(import_module(f"shardmake.cli.{found}").app).commands)
        return self.data[name]


class Grouped(TyperGroup):
    """The command line, whose help lists the commands in groups."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = Commands(self.commands)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write a section for each group; a command of none is in the last one."""
        grouped = " ".join(GROUPS.values()).split()
        for heading, names in GROUPS.items():
            others = [name for name in self.commands if name not in grouped] if heading == [*GROUPS][-1] else []
            rows = [(name, self.commands[name].get_short_help_str(60)) for name in (*names.split(), *others)]
            with formatter.section(heading):
                formatter.write_dl(rows)
