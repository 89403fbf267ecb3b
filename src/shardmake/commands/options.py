"""Options of a command from the fields of a record."""

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import fields
from operator import getitem
from types import GenericAlias
from typing import Annotated, Any, get_args, get_origin


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
