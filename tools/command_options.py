"""Write ``docs/reference/command-options.md``, every option of every command: ``python -m tools.command_options``."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import typer

from shardmake.cli import app

PAGE = Path("docs/reference/command-options.md")
HEAD = """# Options of the commands

What `shardmake COMMAND --help` prints. [Commands](commands.md) explains what each command does. This page is generated:
`make docs`.
"""


def page() -> str:
    """Return the whole page."""
    group: Any = typer.main.get_command(app)
    lines = [HEAD, *_section("shardmake", group)]
    for name in sorted(group.commands):
        lines += _section(name, group.commands[name])
    return "\n".join(lines).rstrip() + "\n"


def _section(name: str, command: Any) -> Iterator[str]:
    """Yield the section of a command: its first sentence, and a table of arguments and options."""
    yield from (f"## {name}", "", (command.help or "").split("\n\n")[0].replace("\n", " "), "")
    parameters = [parameter for parameter in command.params if parameter.name != "help"]
    if not parameters:
        return
    yield from ("| argument or option | value | meaning |", "|---|---|---|")
    for parameter in parameters:
        yield f"| {_names(parameter)} | {_value(parameter)} | {_cell(getattr(parameter, 'help', None) or '')} |"
    yield ""


def _names(parameter: Any) -> str:
    """Return the name of an argument in capitals, or the spellings of an option."""
    if parameter.param_type_name == "argument":
        return f"`{parameter.name.upper()}`"
    return ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))


def _value(parameter: Any) -> str:
    """Return the type of a value and its default."""
    parts = [] if getattr(parameter, "is_flag", False) else [_kind(parameter.type_descriptor.annotation)]
    default = parameter.default
    if parameter.required:
        parts.append("required")
    elif default not in (None, (), [], "", False) and not callable(default):
        shown = " ".join(map(str, default)) if isinstance(default, list | tuple) else default
        parts.append(f"default `{shown}`")
    return ", ".join(parts)


def _kind(annotation: Any) -> str:
    """Return the values of an annotation in words."""
    if get_origin(annotation) is Literal:
        return " ".join(f"`{choice}`" for choice in get_args(annotation))
    if get_args(annotation):
        return _kind(get_args(annotation)[0])
    return {"str": "text", "int": "integer", "float": "number", "Path": "path"}.get(annotation.__name__, "value")


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page())
