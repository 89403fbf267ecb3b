"""Options of a command from the fields of a record, and the list of all commands in groups."""

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import fields
from operator import getitem
from types import GenericAlias
from typing import Annotated, Any, Final, get_args, get_origin

from typer.core import TyperGroup

GROUPS: Final = {
    "Stages": "fetch plan render data train consolidate evaluate push report",
    "Your files and models": "init demo estimate check verify reshard config",
    "Runs": "run submit status list logs compare stop cancel retrain",
    "Administration": "doctor clean",
}
"""Commands by the heading under which the help lists them."""


class Grouped(TyperGroup):
    """The command line, whose help lists the commands in groups."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write a section for each group; a command of none is in the last one."""
        grouped = " ".join(GROUPS.values()).split()
        for heading, names in GROUPS.items():
            others = [name for name in self.commands if name not in grouped] if heading == [*GROUPS][-1] else []
            known = [name for name in (*names.split(), *others) if name in self.commands]
            with formatter.section(heading):
                formatter.write_dl([(name, self.commands[name].get_short_help_str(60)) for name in known])


def options_of(record: type[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command one option for each field of ``record``, whose annotation has typer's help, and then its own.

    The command takes the record as its first parameter.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        names = [field.name for field in fields(record)]
        _, *own = inspect.signature(command, eval_str=True).parameters.values()
        options = [_option(one) for one in inspect.signature(record, eval_str=True).parameters.values()]

        @functools.wraps(command)
        def call(**values: Any) -> None:
            command(record(**{name: values.pop(name) for name in names}), **values)

        parameters = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in (*options, *own)]
        call.__dict__["__signature__"] = inspect.Signature(parameters)
        call.__annotations__ = {one.name: one.annotation for one in parameters}
        return call

    return decorate


def _option(parameter: inspect.Parameter) -> inspect.Parameter:
    """Return a parameter that typer takes: it knows lists, but no sequences."""
    kind, *help_text = get_args(parameter.annotation)
    if get_origin(kind) is not Sequence:
        return parameter
    return parameter.replace(annotation=getitem(Annotated, (GenericAlias(list, get_args(kind)), *help_text)))
