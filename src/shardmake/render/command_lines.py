"""Command lines and shell scripts that start a training: the launcher's options and the program's arguments.

The parsers of the launchers and of TrainingArguments read them. A value that only a shell knows passes each parser, is
reported, and its setting is not compared (`shardmake.render.shell_script`).
"""

import argparse
import contextlib
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, wraps
from pathlib import Path
from typing import Any, Final, NoReturn
from unittest import mock

from shardmake.config.settings import SETTINGS
from shardmake.core.errors import ConfigError
from shardmake.core.private_names import private
from shardmake.render.shell_script import read_commands
from shardmake.render.shell_words import is_unknown, written
from shardmake.render.trainer_settings import nearest_argument

SCRIPTS: Final = (".sh", ".bash", ".sbatch", ".slurm")
PROGRAMS: Final = ("accelerate", "torchrun", "deepspeed", "python", "python3")
MODULES: Final = {
    "accelerate.commands.launch": "accelerate",
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
    "deepspeed.launcher.runner": "deepspeed",
}
"""Modules that are launchers when they are started by ``python -m``."""
# fmt: off
_OTHER_PROGRAMS: Final = {
    "pip", "pip3", "git", "module", "echo", "printf", "which", "type", "hash", "grep", "pgrep", "pkill", "killall",
    "ls", "cd", "cp", "mv", "rm", "mkdir", "cat", "tee", "tail", "source", ".", "export", "[", "[[", "test",
}
# fmt: on
"""Programs that may name a launcher without starting it."""
_WRAPPERS: Final = ("srun", "mpirun", "mpiexec", "exec", "nohup", "apptainer", "singularity")


@dataclass(frozen=True)
class Tool:
    """A program of another project that trains with settings of its own, and the words that start a training."""

    title: str
    commands: tuple[str, ...] = ()
    has_arguments: bool = False
    """Its options and its YAML file have the names of transformers' training arguments, with other defaults."""


TRL: Final = Tool("TRL", ("sft", "dpo", "grpo", "kto", "reward", "rloo"), has_arguments=True)
_FACTORY: Final = Tool("LLaMA-Factory", ("train",), has_arguments=True)
_TORCHTUNE: Final = Tool("torchtune", ("run",))
TOOLS: Final = {
    "trl": TRL, "llamafactory-cli": _FACTORY, "llamafactory": _FACTORY, "axolotl": Tool("Axolotl", ("train",)),
    "swift": Tool("ms-swift", ("sft", "pt", "rlhf"), has_arguments=True), "tune": _TORCHTUNE, "torchtune": _TORCHTUNE,
    "torchtitan": Tool("torchtitan"), "verl": Tool("verl"), "openrlhf": Tool("OpenRLHF"),
    "nemo_automodel": Tool("NeMo Automodel"),
}  # fmt: skip
"""Tools by the name of their program or module."""


@dataclass
class Command:
    """One command that starts a training; ``arguments`` are those of the program that it starts.

    ``unknown`` are the options of the launcher whose values only a shell knows; ``is_open``, if it may have others.
    A command without a launcher starts what only a shell knows.
    """

    title: str
    launcher: str
    program: str
    arguments: list[str]
    flags: list[str] = field(default_factory=list)
    config_file: str | None = None
    ranks: int | None = None
    notes: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    is_open: bool = False
    tool: Tool | None = None


@dataclass
class Arguments:
    """The training arguments of a program, and the files that it names.

    ``unknown`` are those whose value only a shell knows; ``is_open``, if it may have others that are not read.
    """

    trainer: dict[str, Any] | None
    deepspeed: str | None = None
    files: list[str] = field(default_factory=list)
    unknown: dict[str, str] = field(default_factory=dict)
    is_open: bool = False
    notes: list[str] = field(default_factory=list)
    is_native: bool = False
    """``deepspeed`` is named by DeepSpeed's own ``--deepspeed_config``."""


# --- shell scripts ----------------------------------------------------------------------------------------------------


def is_script(path: Path, text: str) -> bool:
    """Return whether ``text`` is a shell script."""
    return path.suffix in SCRIPTS or (text.startswith("#!") and "sh" in text.split("\n", 1)[0])


def read_script(name: str, text: str) -> list[Command]:
    """Return the commands of a shell script that start a training, and those that only a shell knows."""
    found = [
        command
        for line in read_commands(name, text)
        if (command := _from_line(f"{name}, line {line.line}", line.words)) is not None
    ]
    commands = [one for one in found if one.launcher]
    if not commands:
        notes = " ".join(note for one in found for note in one.notes)
        raise ConfigError(
            f"Cannot check {name}: no line of it starts accelerate, torchrun, deepspeed or python. {notes} Name the "
            "launcher in the script itself, or give the command after --.".replace("  ", " ")
        )
    return found


def _from_line(title: str, words: list[str]) -> Command | None:
    """Return the command of a line, or None if it starts no training."""
    command = read_command(words, title)
    reads = words[0] in ("source", ".")
    if command is None and (reads or _may_start(words)):
        line = shlex.join(map(written, words)).replace("'", "")
        why = "the file may set any variable" if reads else "only a shell knows what it starts"
        command = Command(title, "", "", [], notes=[f"{line} is not compared: {why}."])
    return command


def _may_start(words: Sequence[str]) -> bool:
    """Return whether a variable stands for the program of a line that may start a training."""
    first, *others = words
    hidden = [word for word in words if is_unknown(word) and written(word).startswith("$")]
    has_program = any(word.endswith(".py") for word in others)
    if first in hidden:
        return has_program or not others
    return Path(first).name in _WRAPPERS and not has_program and words[-1] in hidden


def _start(words: Sequence[str]) -> int | None:
    """Return the index of the word that names the launcher: wrappers such as srun and env may stand before it."""
    program = next((Path(word).name for word in words if not re.match(r"[A-Za-z_]\w*=", word)), "")
    if program in _OTHER_PROGRAMS or "install" in words:
        return None
    for index, (word, follows) in enumerate(zip(words, [*words[1:], ""], strict=True)):
        name = Path(word).name
        commands = TOOLS[name].commands if name in TOOLS else ("launch",) if name == "accelerate" else ()
        is_program = follows.endswith(".py") or follows in ("-m", "-u") or is_unknown(follows)
        is_python = re.fullmatch(r"python[\d.]*", name) is not None and is_program
        if name in ("torchrun", "deepspeed") or follows in commands or is_python:
            return index
    return None


# --- one command ------------------------------------------------------------------------------------------------------


def read_command(words: Sequence[str], title: str) -> Command | None:
    """Return the command, or None if it starts no training program. Raises `ConfigError` for options it cannot have."""
    start = _start(words)
    if start is None:
        return None
    name, rest = Path(words[start]).name, list(words[start + 1 :])
    if name in TOOLS:
        return _of_tool(Command(title, name, f"{name} {rest[0]}", rest[1:]), TOOLS[name])
    if name.startswith("python"):
        rest = rest[1:] if rest[0] == "-u" else rest
        if rest[:1] == ["-m"] and rest[1:] and rest[1] in MODULES:
            name, rest = MODULES[rest[1]], rest[2:]
        else:
            return _python(rest, title, any(Path(word).name in _WRAPPERS for word in words[:start]))
    elif name == "accelerate":
        rest = rest[1:]
    command = {"accelerate": _accelerate, "torchrun": _torchrun, "deepspeed": _deepspeed}[name](rest, title)
    return _of_tool(command, _tool_of(command.program))


def _python(words: list[str], title: str, many: bool) -> Command | None:
    """Return the program that Python starts; a wrapper such as srun may start it ``many`` times."""
    is_module = words[:1] == ["-m"]
    words = words[1:] if is_module else words
    tool = _tool_of(words[0]) if words else None
    if not words or (is_module and tool is None and "train" not in words[0]):
        return None
    return _of_tool(Command(title, "python", words[0], words[1:], ranks=None if many else 1), tool)


def _tool_of(program: str) -> Tool | None:
    """Return the tool to which a module or a program belongs, or whose trainers a program imports."""
    path = Path(program)
    with contextlib.suppress(OSError, UnicodeDecodeError):
        if path.suffix == ".py" and re.search(r"^\s*(from|import) trl\b", path.read_text(), re.MULTILINE):
            return TRL
    names = path.parts[:-1] if path.suffix == ".py" else (program.partition(".")[0],)
    return next((TOOLS[name] for name in names if name in TOOLS), None)


def _of_tool(command: Command, tool: Tool | None) -> Command:
    """Return ``command`` with the tool that it starts, and a note of what is compared then."""
    command.tool = tool
    if tool is not None:
        compared = "Only the options that are written are compared."
        own = "Its settings are not compared, only the DeepSpeed file that it names."
        defaults = "whose defaults are not those of Trainer" if tool.has_arguments else "which has settings of its own"
        start = f"{command.program} starts a training of {tool.title}, {defaults}."
        command.notes.append(f"{start} {compared if tool.has_arguments else own}")
    return command


def _refuse(parser: argparse.ArgumentParser, read: str, correct: str) -> None:
    """Let ``parser`` raise a `ConfigError` for what it cannot read."""

    def refuse(message: str) -> NoReturn:
        raise ConfigError(f"Cannot read the {read}: {written(message)}. Correct {correct}.")

    parser.error = refuse  # type: ignore[method-assign]


def _relax(parser: argparse.ArgumentParser) -> None:
    """Let every option of ``parser`` take a value that only a shell knows."""
    for action in private(parser).actions:
        if isinstance(action.type, type) or callable(action.type):
            action.type = _or_unknown(action.type)
        if action.choices is not None:
            action.choices = _Choices(action.choices)


def _or_unknown(read: Callable[[str], Any]) -> Callable[[str], Any]:
    return wraps(read, updated=())(lambda text: text if is_unknown(text) else read(text))


class _Choices(list[Any]):
    """The values of an option, and every unknown one."""

    def __contains__(self, value: object) -> bool:
        return super().__contains__(value) or (isinstance(value, str) and is_unknown(value))


def _parse(parser: argparse.ArgumentParser, words: list[str], title: str, command: Command) -> argparse.Namespace:
    """Return what ``parser`` reads, without its unknown values, which become those of ``command``."""
    _relax(parser)
    _refuse(parser, f"command of {title}", "the launcher's options")
    return _known(parser.parse_args, words, command)


def _known(parse: Callable[[list[str]], argparse.Namespace], words: list[str], command: Command) -> argparse.Namespace:
    """Return what ``parse`` reads. A variable in place of the program, before a Python file, holds further options."""
    read = parse(words)
    names = (("user_script", "user_args"), ("training_script", "training_script_args"))
    name, others = next(pair for pair in names if hasattr(read, pair[0]))
    program, arguments = getattr(read, name), getattr(read, others)
    if is_unknown(program) and any(word.endswith(".py") for word in arguments):
        command.is_open = True
        command.notes.append(_OPEN.format(written(program), "the launcher"))
        words.remove(program)
        return _known(parse, words, command)
    for key, value in vars(read).items():
        if key not in (name, others) and isinstance(value, str) and is_unknown(value):
            command.unknown.append(key)
            if key in _COMPARED:
                command.notes.append(UNKNOWN.format(key, written(value)))
    command.program, command.arguments = program, list(arguments)
    return read


_COMPARED: Final = (
    *("nnodes", "nproc_per_node", "num_gpus", "num_nodes", "num_processes"),
    *(row.option for row in SETTINGS.values() if row.option),
)
"""Options of launchers that are compared, or that the number of ranks follows from."""
UNKNOWN: Final = "{} is {}, and cannot be compared: only a shell knows its value."
_OPEN: Final = (
    "{} is not compared: only a shell knows its options. They may replace any option of {}, whose defaults are not "
    "compared either."
)


def _accelerate(words: list[str], title: str) -> Command:
    from accelerate.commands.launch import launch_command_parser

    command = Command(title, "accelerate", "", [])
    read = _parse(launch_command_parser(), words, title, command)
    flags = words[: len(words) - len(command.arguments) - 1]
    command.config_file = take(flags, "--config_file")
    for index, word in reversed(list(enumerate(flags))):
        if is_unknown(word):
            del flags[index - (not word.startswith("--")) : index + 1]
    command.flags = flags
    command.ranks = None if "num_processes" in command.unknown else read.num_processes
    return command


def _torchrun(words: list[str], title: str) -> Command:
    from torch.distributed.run import get_args_parser

    command = Command(title, "torchrun", "", [])
    read = _parse(get_args_parser(), words, title, command)
    nodes, per_node = str(read.nnodes).rpartition(":")[2], str(read.nproc_per_node)
    wrong = ""
    if re.fullmatch(r"-\d+|0+", per_node):
        wrong = f"--nproc_per_node {per_node}. Every node needs at least 1 process."
    elif not per_node.isdigit() and per_node not in _BY_DEVICE and not is_unknown(per_node):
        wrong = f"--nproc_per_node {per_node}. torchrun needs a number or one of {', '.join(_BY_DEVICE)}."
    elif not re.fullmatch(r"([1-9]\d*:)?[1-9]\d*", str(read.nnodes)) and not is_unknown(str(read.nnodes)):
        wrong = f"--nnodes {read.nnodes}. torchrun needs a number from 1 on, or MIN:MAX."
    if wrong:
        raise ConfigError(f"Cannot check {title}: {wrong}")
    command.ranks = int(nodes) * int(per_node) if per_node.isdigit() and nodes.isdigit() else None
    return command


_BY_DEVICE: Final = ("auto", "cpu", "gpu", "xpu")
"""Values of ``--nproc_per_node`` with which torchrun counts the devices of the node."""


def _deepspeed(words: list[str], title: str) -> Command:
    from deepspeed.launcher import runner

    command, parse = Command(title, "deepspeed", "", []), argparse.ArgumentParser.parse_args

    def parse_relaxed(parser: argparse.ArgumentParser, *given: Any, **named: Any) -> Any:
        _relax(parser)
        _refuse(parser, f"command of {title}", "the deepspeed launcher's options")
        return parse(parser, *given, **named)

    with mock.patch.object(argparse.ArgumentParser, "parse_args", parse_relaxed):
        read = _known(runner.parse_args, words, command)
    sizes = [read.num_gpus, read.num_nodes]
    counted = all(isinstance(size, int) for size in sizes) and read.num_gpus > 0
    command.ranks = read.num_gpus * max(1, read.num_nodes) if counted else None
    return command


# --- the program's arguments ------------------------------------------------------------------------------------------


def read_arguments(command: Command) -> Arguments:
    """Return the program's training arguments.

    ``trainer`` is None for a program without one of transformers' options, and for one with DeepSpeed's own
    ``--deepspeed_config``.
    """
    words, found = list(command.arguments), Arguments(None)
    named_by_trainer, native = take(words, "--deepspeed"), take(words, "--deepspeed_config")
    found.deepspeed, found.is_native = named_by_trainer or native, native is not None and not named_by_trainer
    named = take(words, "--config")
    found.files = [
        word for word in [*words[:1], *([named] if named else [])] if word.endswith((".json", ".yaml", ".yml"))
    ]
    if command.tool is not None and not command.tool.has_arguments:
        return found
    found.is_open = command.tool is not None
    values = _training_values(words, command.title, found)
    if named is not None and named not in found.files and is_unknown(named):
        _open(named, found)
    found.trainer = values if native is None and (values or found.files or named_by_trainer) else None
    return found


def _open(word: str, found: Arguments) -> None:
    found.is_open = True
    found.notes.append(_OPEN.format(written(word), "the program"))


def take(words: list[str], option: str) -> str | None:
    """Remove each ``option`` with its value from ``words``, and return the last value, which argparse takes."""
    values: list[str | None] = []
    for index in reversed(range(len(words))):
        name, sign, text = words[index].partition("=")
        if name == option:
            has_value = not sign and index + 1 < len(words) and not words[index + 1].startswith("-")
            values.append(words[index + 1] if has_value else text or None)
            del words[index : index + 1 + has_value]
    return next(iter(values), None)


def _training_values(words: list[str], title: str, found: Arguments) -> dict[str, Any]:
    """Return the options among ``words`` that are transformers', with the values that its parser reads.

    An option that is spelled nearly as one of them is returned as well; the others are the program's own. A value that
    only a shell knows becomes one of ``found``.
    """
    parser = _trainer_parser()
    _refuse(parser, f"arguments of {title}", "the training arguments")
    before = dict(zip(words[1:], words, strict=False))
    for word in [word for word in words if is_unknown(word) and written(word).startswith(("$", "`"))]:
        option = before.get(word, "")
        if not option.startswith("--") or "=" in option or _SEVERAL.search(written(word)):
            _open(word, found)
            words.remove(word)
    known, rest = parser.parse_known_args(words)
    values = vars(known)
    for key, value in list(values.items()):
        if any(isinstance(one, str) and is_unknown(one) for one in (value if isinstance(value, list) else [value])):
            found.unknown[key] = written(str(values.pop(key)))
    misspelled = {} if found.is_open else dict(_misspelled(rest))
    return values | {key: written(value) if isinstance(value, str) else value for key, value in misspelled.items()}


@cache
def _trainer_parser() -> argparse.ArgumentParser:
    """Return transformers' own parser, which accepts unknown values and needs no option."""
    from transformers import HfArgumentParser, TrainingArguments

    # An option of the program, such as --data, does not abbreviate one of transformers'.
    parser = HfArgumentParser(TrainingArguments, allow_abbrev=False)
    for action in private(parser).actions:
        action.default = argparse.SUPPRESS
        action.required = False
    _relax(parser)
    return parser


_SEVERAL: Final = re.compile(
    r"\$\{?(@|\*|\w+\[[@*]\]|\w*(args|arguments|options|opts|flags|params|extra)\b)", re.IGNORECASE
)
"""Variables that hold options by their name, also behind an option whose value may be left out."""


def _misspelled(words: Sequence[str]) -> Iterator[tuple[str, str | bool]]:
    """Yield each option that is spelled nearly as one of transformers', with its value."""
    for word, follows in zip(words, [*words, "--"][1:], strict=True):
        option, sign, value = word.partition("=")
        name = option.removeprefix("--").replace("-", "_")
        if option.startswith("--") and nearest_argument(name) is not None:
            yield name, value if sign else follows if not follows.startswith("--") else True
