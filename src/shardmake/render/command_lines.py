"""Command lines and shell scripts that start a training: the launcher's options and the program's arguments.

The parsers of the launchers and of TrainingArguments read them. A shell script is read line by line: continuations,
comments, and variables that the script sets once to a plain text. What needs a shell to evaluate is reported and left
out, never guessed.
"""

import argparse
import contextlib
import io
import itertools
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NoReturn

from shardmake.core.errors import ConfigError
from shardmake.core.private_names import private
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
_SHELLS: Final = ("bash", "sh", "dash", "zsh", "ksh")
_FILE_OPTIONS: Final = ("--deepspeed", "--deepspeed_config", "--deepspeed_config_file", "--config_file", "--config")
# fmt: off
_OTHER_PROGRAMS: Final = {
    "pip", "pip3", "git", "module", "echo", "printf", "which", "type", "hash", "grep", "pgrep", "pkill", "killall",
    "ls", "cd", "cp", "mv", "rm", "mkdir", "cat", "tee", "tail", "source", ".", "export",
}
# fmt: on
"""Programs that may name a launcher without starting it."""


@dataclass
class Command:
    """One command that starts a training; ``arguments`` are those of the program that it starts."""

    title: str
    launcher: str
    program: str
    arguments: list[str]
    flags: list[str] = field(default_factory=list)
    config_file: str | None = None
    ranks: int | None = None
    notes: list[str] = field(default_factory=list)


@dataclass
class Arguments:
    """The training arguments of a program, and the files that it names."""

    trainer: dict[str, Any] | None
    deepspeed: str | None = None
    files: list[str] = field(default_factory=list)


# --- shell scripts ----------------------------------------------------------------------------------------------------


def is_script(path: Path, text: str) -> bool:
    """Return whether ``text`` is a shell script."""
    return path.suffix in SCRIPTS or (text.startswith("#!") and "sh" in text.split("\n", 1)[0])


def read_script(name: str, text: str) -> list[Command]:
    """Return the commands of a shell script that start a training."""
    lines = list(_logical_lines(text))
    variables = _variables(lines)
    commands = [
        command
        for number, line in lines
        for words in _commands(name, number, line, variables)
        if (command := _from_line(f"{name}, line {number}", words, variables)) is not None
    ]
    if not commands:
        raise ConfigError(
            f"Cannot check {name}: no line of it starts accelerate, torchrun, deepspeed or python. Name the launcher "
            "in the script itself, or give the command after --."
        )
    return commands


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield each command line with its number: continued lines joined, here-documents left out."""
    until, number, joined = "", 0, ""
    for count, line in enumerate(text.split("\n"), 1):
        if until:
            until = "" if line.strip() == until else until
            continue
        number = number or count
        if line.endswith("\\"):
            joined += line[:-1] + " "
            continue
        joined += line
        if heredoc := re.search(r"<<-?\s*['\"]?(\w+)", joined):
            until = heredoc[1]
        yield number, joined
        number, joined = 0, ""
    if joined:
        yield number, joined


_SHELL: Final = "\ue000"
"""Stands for a dollar sign in single quotes, which the shell does not evaluate."""
_SUBSTITUTION: Final = re.compile(r"\$\((?:[^()]|\([^()]*\))*\)|`[^`]*`")
_HIDDEN: Final = {ord(character): 0xE100 + ord(character) for character in "()<>|&; '\"#"}
"""Stand for what would end a word within a command substitution."""
_SHOWN: Final = {hidden: character for character, hidden in _HIDDEN.items()}


def _split(name: str, number: int, line: str) -> list[list[str]]:
    """Return the words of each simple command of a line, without redirections."""
    quoted = re.sub(r"'[^']*'", lambda found: found[0].replace("$", _SHELL), line)
    quoted = _SUBSTITUTION.sub(lambda found: found[0].translate(_HIDDEN), quoted)
    try:
        lexer = shlex.shlex(quoted, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words = list(lexer)
    except ValueError:
        # A quote that ends on a later line: the lines between do not start a training.
        if any(program in line for program in PROGRAMS[:3]):
            raise ConfigError(f"{name}, line {number}: a quote is not closed. Close it on the same line.") from None
        return []
    commands: list[list[str]] = [[]]
    redirected = False
    for word in words:
        if word and set(word) <= set("<>&|;()"):
            redirected = "<" in word or ">" in word
            if redirected and commands[-1] and commands[-1][-1].isdigit():
                commands[-1].pop()
            if not redirected:
                commands.append([])
        elif redirected:
            redirected = False
        else:
            commands[-1].append(word)
    return [command for command in commands if command]


def _commands(name: str, number: int, line: str, variables: dict[str, str]) -> Iterator[list[str]]:
    """Yield the words of each simple command of a line, also of those in the text of ``bash -c``."""
    for words in _split(name, number, line):
        text = _shell_text(words)
        if text is None:
            yield words
        else:
            yield from _commands(name, number, _expand(text.replace(_SHELL, "$"), variables), variables)


def _shell_text(words: Sequence[str]) -> str | None:
    """Return the commands that a shell gets as a text, as in ``srun bash -lc "torchrun ..."``; None for others."""
    for shell, option, text in zip(words, words[1:], words[2:], strict=False):
        if Path(shell).name in _SHELLS and re.fullmatch(r"-\w*c", option):
            return text
    return None


def _variables(lines: Sequence[tuple[int, str]]) -> dict[str, str]:
    """Return the variables that the script sets to one text only."""
    found: dict[str, set[str]] = {}
    for _, line in lines:
        for words in _split("", 0, line) if "=" in line else []:
            for word in itertools.takewhile(_is_assignment, words[1:] if words[0] == "export" else words):
                key, _, value = word.partition("=")
                found.setdefault(key, set()).add(value)
    known: dict[str, str] = {}
    for key, values in found.items():
        text = _expand(next(iter(values)), known)
        if len(values) == 1 and not _unknown(text):
            known[key] = text
    return known


def _is_assignment(word: str) -> bool:
    return re.match(r"[A-Za-z_]\w*=", word) is not None


def _expand(word: str, variables: dict[str, str]) -> str:
    return re.sub(r"\$(\w+)|\$\{(\w+)\}", lambda found: variables.get(found[1] or found[2], found[0]), word)


def _unknown(word: str) -> bool:
    return "$" in word or "`" in word


def _from_line(title: str, words: list[str], variables: dict[str, str]) -> Command | None:
    """Return the command of a line with its variables evaluated, or None if it starts no training."""
    expanded: list[str] = []
    for word in words:
        text = _expand(word, variables)
        # A variable that stands alone may hold several words. A shell does not evaluate the quotes in it.
        alone = re.fullmatch(r"\$\{?\w+\}?", word) is not None and not _unknown(text)
        expanded += text.split() if alone else [text]
    start = _start(expanded)
    if start is None:
        return None
    kept, left_out = _without_unknown(expanded[start:], title)
    command = read_command([word.replace(_SHELL, "$") for word in kept], title)
    if command is None:
        return None
    notes = [f"{written} is not compared: only a shell can evaluate it." for written in left_out]
    command.notes = [*notes, *command.notes]
    if any(re.split("[ =]", written)[0].replace("-", "_") in _RANK_OPTIONS for written in left_out):
        command.ranks = None
    return command


_RANK_OPTIONS: Final = ("__nproc_per_node", "__nnodes", "__num_gpus", "__num_nodes", "__num_processes")


def _without_unknown(words: list[str], title: str) -> tuple[list[str], list[str]]:
    """Return the words whose value is known, and each option or word that was left out."""
    kept: list[str] = []
    left_out = []
    for word in words:
        if not _unknown(word):
            kept.append(word)
            continue
        is_value = not word.startswith("--") and bool(kept) and kept[-1].startswith("--") and "=" not in kept[-1]
        option = kept.pop() if is_value else ""
        written = f"{option} {word.translate(_SHOWN)}".strip()
        if (option or word).partition("=")[0] in _FILE_OPTIONS:
            raise ConfigError(
                f"Cannot check {title}: {written} names a file that only a shell can find out. Write its path there, "
                "or set the variable once in the script."
            )
        left_out.append(written)
    return kept, left_out


def _start(words: Sequence[str]) -> int | None:
    """Return the index of the word that names the launcher: wrappers such as srun and env may stand before it."""
    program = next((Path(word).name for word in words if not _is_assignment(word)), "")
    if program in _OTHER_PROGRAMS or "install" in words:
        return None
    for index, word in enumerate(words):
        name = Path(word).name
        follows = words[index + 1] if index + 1 < len(words) else ""
        if name == "accelerate" and follows == "launch":
            return index
        if name in ("torchrun", "deepspeed"):
            return index
        if re.fullmatch(r"python[\d.]*", name) and follows and (follows.endswith(".py") or follows in ("-m", "-u")):
            return index
    return None


# --- one command ------------------------------------------------------------------------------------------------------


def read_command(words: Sequence[str], title: str) -> Command | None:
    """Return the command, or None if it starts no training program. Raises `ConfigError` for options it cannot have."""
    start = _start(words)
    if start is None:
        return None
    name, rest = Path(words[start]).name, list(words[start + 1 :])
    if name.startswith("python"):
        rest = rest[1:] if rest[0] == "-u" else rest
        if rest[:1] != ["-m"]:
            return Command(title, "python", rest[0], rest[1:], ranks=1)
        name, rest = MODULES.get(rest[1], "python"), rest[1:] if rest[1] not in MODULES else rest[2:]
        if name == "python":
            return Command(title, "python", rest[0], rest[1:], ranks=1) if "train" in rest[0] else None
    elif name == "accelerate":
        rest = rest[1:]
    return {"accelerate": _accelerate, "torchrun": _torchrun, "deepspeed": _deepspeed}[name](rest, title)


def _parse(parser: argparse.ArgumentParser, words: list[str], title: str) -> argparse.Namespace:
    def refuse(message: str) -> NoReturn:
        raise ConfigError(f"Cannot read the command of {title}: {message}. Correct the launcher's options.")

    parser.error = refuse  # type: ignore[method-assign]
    return parser.parse_args(words)


def _accelerate(words: list[str], title: str) -> Command:
    from accelerate.commands.launch import launch_command_parser

    read = _parse(launch_command_parser(), words, title)
    flags = words[: len(words) - len(read.training_script_args) - 1]
    take(flags, "--config_file")
    command = Command(title, "accelerate", read.training_script, list(read.training_script_args), flags)
    command.config_file, command.ranks = read.config_file, read.num_processes
    return command


def _torchrun(words: list[str], title: str) -> Command:
    from torch.distributed.run import get_args_parser

    read = _parse(get_args_parser(), words, title)
    command = Command(title, "torchrun", read.training_script, list(read.training_script_args))
    nodes, per_node = str(read.nnodes).rpartition(":")[2], str(read.nproc_per_node)
    if re.fullmatch(r"-\d+|0+", per_node):
        raise ConfigError(f"Cannot check {title}: --nproc_per_node {per_node}. Every node needs at least 1 process.")
    if not per_node.isdigit() and per_node not in _BY_DEVICE:
        devices = ", ".join(_BY_DEVICE)
        raise ConfigError(
            f"Cannot check {title}: --nproc_per_node {per_node}. torchrun needs a number or one of {devices}."
        )
    if not re.fullmatch(r"([1-9]\d*:)?[1-9]\d*", str(read.nnodes)):
        raise ConfigError(
            f"Cannot check {title}: --nnodes {read.nnodes}. torchrun needs a number from 1 on, or MIN:MAX."
        )
    command.ranks = int(nodes) * int(per_node) if per_node.isdigit() else None
    return command


_BY_DEVICE: Final = ("auto", "cpu", "gpu", "xpu")
"""Values of ``--nproc_per_node`` with which torchrun counts the devices of the node."""


def _deepspeed(words: list[str], title: str) -> Command:
    from deepspeed.launcher import runner

    output = io.StringIO()
    try:
        with contextlib.redirect_stderr(output):
            read = runner.parse_args(words)
    except SystemExit:
        reason = output.getvalue().strip().rpartition("error: ")[2]
        raise ConfigError(
            f"Cannot read the command of {title}: {reason}. Correct the deepspeed launcher's options."
        ) from None
    ranks = read.num_gpus * max(1, read.num_nodes) if read.num_gpus > 0 else None
    return Command(title, "deepspeed", read.user_script, list(read.user_args), ranks=ranks)


# --- the program's arguments ------------------------------------------------------------------------------------------


def read_arguments(command: Command) -> Arguments:
    """Return the program's training arguments.

    ``trainer`` is None for a program without one of transformers' options, and for one with DeepSpeed's own
    ``--deepspeed_config``.
    """
    words, found = list(command.arguments), Arguments(None)
    named_by_trainer, native = take(words, "--deepspeed"), take(words, "--deepspeed_config")
    found.deepspeed = named_by_trainer or native
    named = take(words, "--config")
    found.files = [
        word for word in [*words[:1], *([named] if named else [])] if word.endswith((".json", ".yaml", ".yml"))
    ]
    values = _training_values(words, command.title)
    found.trainer = values if native is None and (values or found.files or named_by_trainer) else None
    return found


def take(words: list[str], option: str) -> str | None:
    """Remove ``option`` with its value from ``words`` and return the value."""
    for index, word in enumerate(words):
        if word.startswith(f"{option}="):
            del words[index]
            return word.partition("=")[2]
        if word == option:
            has_value = index + 1 < len(words) and not words[index + 1].startswith("-")
            value = words[index + 1] if has_value else None
            del words[index : index + 1 + has_value]
            return value
    return None


def _training_values(words: list[str], title: str) -> dict[str, Any]:
    """Return the options among ``words`` that are transformers', with the values that its parser reads.

    An option that is spelled nearly as one of them is returned as well; the others are the program's own.
    """
    from transformers import HfArgumentParser, TrainingArguments

    # An option of the program, such as --data, does not abbreviate one of transformers'.
    parser = HfArgumentParser(TrainingArguments, allow_abbrev=False)
    for action in private(parser).actions:
        action.default = argparse.SUPPRESS
        action.required = False

    def refuse(message: str) -> NoReturn:
        raise ConfigError(f"Cannot read the arguments of {title}: {message}. Correct the training arguments.")

    parser.error = refuse
    known, rest = parser.parse_known_args(words)
    return vars(known) | dict(_misspelled(rest))


def _misspelled(words: Sequence[str]) -> Iterator[tuple[str, str | bool]]:
    """Yield each option that is spelled nearly as one of transformers', with its value."""
    for word, follows in zip(words, [*words, "--"][1:], strict=True):
        option, sign, value = word.partition("=")
        name = option.removeprefix("--").replace("-", "_")
        if option.startswith("--") and nearest_argument(name) is not None:
            yield name, value if sign else follows if not follows.startswith("--") else True
