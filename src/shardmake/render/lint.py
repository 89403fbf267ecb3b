"""`shardmake check`: find contradictions in existing configuration files, command lines and shell scripts.

The files are Accelerate files, DeepSpeed files, training arguments (YAML or JSON) and shell scripts. Each combination
of the files, and each command that starts a training, is compared by `shardmake.render.settings_table` in a process of
its own.
"""

import itertools
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import yaml
from pydantic import TypeAdapter

from shardmake.config.foreign_files import recognize
from shardmake.config.load import read_file
from shardmake.config.parse_text import parse_json
from shardmake.config.settings import ACCUMULATION, MICRO_BATCH, SETTINGS, TOTAL_BATCH
from shardmake.config.user_files import SIGNS, Kind, UserFile
from shardmake.core.environment import kernel_caches
from shardmake.core.errors import ConfigError
from shardmake.core.library_process import run_module
from shardmake.core.nested import leaves
from shardmake.core.tables import plain_table
from shardmake.core.temporary import temporary_folder
from shardmake.core.units import plural
from shardmake.render import command_lines
from shardmake.render.comparison import LIBRARIES, Comparison, Library, Problem, Row, Settings, Value, as_text
from shardmake.render.shell_words import is_unknown, written

OWNERS: Final[dict[Library, Kind]] = {"Trainer": "training", "DeepSpeed": "deepspeed", "Accelerate": "accelerate"}


@dataclass(frozen=True)
class Report:
    """The comparison of one combination of files or of one command, and what could not be compared."""

    title: str
    names: dict[Library, str]
    comparison: Comparison
    notes: list[str] = field(default_factory=list)

    @property
    def errors(self) -> int:
        """Return the number of errors."""
        wrong = [problem for problem in self.comparison.problems if problem.level == "error"]
        return len(self.comparison.contradictions) + len(wrong)


# --- reading ----------------------------------------------------------------------------------------------------------


def read_source(path: Path, by: command_lines.Tool | None = None) -> UserFile:
    """Read one file and determine its kind from its keys; ``by`` is the tool whose command names it."""
    values = read_file(path, parse_json if path.suffix == ".json" else _parse_yaml)
    if not isinstance(values, dict):
        held = "nothing" if values is None else "a list" if isinstance(values, list) else "one value"
        raise ConfigError(f"Cannot check {path}: it holds {held} instead of keys with values.")
    if (tool := recognize(values)) and tool.is_apart and by is None:
        raise ConfigError(
            f"Cannot check {path}: it is a file of {tool.name}, which gives keys of Trainer other meanings. Translate "
            f"it into a run: shardmake init --from {path}"
        )
    kind = _kind_of_file(path, values)
    inner = values.get("arguments") if kind == "training" else None
    return UserFile(kind, str(path), inner if isinstance(inner, dict) else values)


def _kind_of_file(path: Path, values: dict[str, Any]) -> Kind:
    """Return the kind of file that has these keys. DeepSpeed files and training arguments have some in common."""
    from transformers import TrainingArguments

    for kind, signs in SIGNS.items():
        if any(sign in values for sign in signs):
            return kind
    if values.keys() & {"arguments", *TrainingArguments.__dataclass_fields__}:
        return "training"
    raise ConfigError(
        f"Cannot check {path}: it is not a known configuration file. An Accelerate file has one of "
        f"{', '.join(SIGNS['accelerate'])}; a DeepSpeed file one of {', '.join(SIGNS['deepspeed'])}; training "
        "arguments one of those of transformers."
    )


def _parse_yaml(text: str) -> Any:
    """Return the content as the libraries read it: YAML reads 5e8 as text, JSON as a number."""
    values = yaml.safe_load(text)
    json.dumps(values, default=str)  # an alias may lead to the section in which it stands
    return values


# --- checking ---------------------------------------------------------------------------------------------------------


def check(
    words: Sequence[str], ranks: int | None = None, *, on_cpu: bool = False, scratch: str = "/tmp"
) -> list[Report]:
    """Return a report for each combination of the files and for each command; ``words`` may end with a command.

    ``ranks`` is the number of ranks, if neither a file nor a command says it. ``on_cpu`` says that the nodes have no
    GPU. Raises `ConfigError` for a file that cannot be read or whose kind is unknown.
    """
    request = {"words": list(words), "ranks": ranks, "on_cpu": on_cpu}
    environment = {**os.environ, **kernel_caches(scratch), "CUDA_VISIBLE_DEVICES": ""}
    try:
        return _REPORTS.validate_python(run_module(__name__, request, environment))
    except RuntimeError as error:
        last = str(error).strip().split("\n")[-1]
        raise ConfigError(f"Cannot check {' '.join(words)}: the comparison failed. Report this line: {last}") from None


_REPORTS: Final = TypeAdapter(list[Report])


def answer(request: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a report for each combination of the request's files and for its command."""
    files, command = _split_words(request["words"])
    sources: list[UserFile] = []
    commands = [] if command is None else [command]
    for path in files:
        text = read_file(path, str, "Name existing files.")
        if command_lines.is_script(path, text):
            commands += command_lines.read_script(str(path), text)
        else:
            sources.append(read_source(path))
    trainings = [_of_command(one, sources) for one in commands] or list(_combinations(sources))
    # A line such as `python prepare.py` may start anything.
    trainings = [one for one in trainings if one.files or one.notes or one.flags or not commands] or trainings
    return [asdict(_report(training, request["ranks"], on_cpu=request["on_cpu"])) for training in trainings]


def _split_words(words: Sequence[str]) -> tuple[list[Path], command_lines.Command | None]:
    for index, word in enumerate(words):
        if Path(word).name.split(".")[0] in (*command_lines.PROGRAMS, "srun", "env") and not Path(word).suffix:
            command = command_lines.read_command(words[index:], "the command line")
            if command is None:
                raise ConfigError(f"Cannot check the command {' '.join(words[index:])}: it starts no training program.")
            return [Path(one) for one in words[:index]], command
    if any(word.startswith("-") for word in words):
        raise ConfigError("Cannot check this command: it starts with none of accelerate, torchrun, deepspeed, python.")
    return [Path(word) for word in words], None


# --- one training -----------------------------------------------------------------------------------------------------


@dataclass
class Training:
    """The files of one training, and the command that starts it."""

    title: str
    files: dict[Kind, UserFile]
    flags: list[str] = field(default_factory=list)
    ranks: int | None = None
    named_by_trainer: bool = True
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unknown: dict[str, str] = field(default_factory=dict)
    """Texts in place of values that only a shell knows, by training argument or option of the launcher."""
    is_open: list[Library] = field(default_factory=list)


def _combinations(sources: Sequence[UserFile]) -> Iterator[Training]:
    """Yield each combination of one file of a kind, with the files that they name."""
    kinds: list[Kind] = ["accelerate", "deepspeed", "training"]
    groups = [[source for source in sources if source.kind == kind] for kind in kinds]
    for combined in itertools.product(*(group for group in groups if group)):
        files = {source.kind: source for source in combined}
        training = Training(" + ".join(source.name for source in files.values()), files)
        _add_named(training)
        if files.keys() == {"accelerate", "deepspeed"} and training.named_by_trainer:
            training.flags = ["--deepspeed_config_file", files["deepspeed"].name]
            training.named_by_trainer = False
            training.notes.append(f"{files['deepspeed'].name} is read as --deepspeed_config_file of the launcher.")
        yield training


def _of_command(command: command_lines.Command, sources: Sequence[UserFile]) -> Training:
    from transformers import TrainingArguments

    training = Training(command.title, {source.kind: source for source in sources}, command.flags, command.ranks)
    training.notes += command.notes
    if not command.launcher:
        training.files.clear()
        return training
    arguments = command_lines.read_arguments(command)
    training.notes += arguments.notes
    training.unknown = dict.fromkeys(command.unknown, "") | arguments.unknown
    by_library: dict[Library, bool] = {"Trainer": arguments.is_open, "Accelerate": command.is_open}
    training.is_open = [library for library, is_open in by_library.items() if is_open]
    if command.config_file is not None:
        _add(training, command.config_file, "Accelerate", "config_file", Path())
    values: dict[str, Any] = {}
    for name in arguments.files:
        source = _add(training, name, "Trainer", "the first argument", Path(), command.tool)
        given = source.values if source is not None and source.kind == "training" else {}
        known = given if command.tool is None else TrainingArguments.__dataclass_fields__  # a tool has further keys
        values |= {key: value for key, value in given.items() if key in known}
    if arguments.trainer is not None:
        names = [*arguments.files, command.title]
        training.files["training"] = UserFile("training", " + ".join(names), values | arguments.trainer)
    elif command.tool is not None and not command.tool.has_arguments:  # its DeepSpeed file alone
        own = training.files.pop("training", UserFile("training", "", {}))
        training.is_open, training.flags = [*OWNERS], []
        if isinstance(file := own.values.get("deepspeed"), str):
            _add(training, file, "Trainer", "deepspeed", Path(own.name).parent)
    if arguments.deepspeed is not None:
        source = _add(training, arguments.deepspeed, "Trainer", "deepspeed", Path())
        if source is not None and arguments.is_native:
            training.notes.append(
                f"{source.name} is read as deepspeed.initialize reads it. No Trainer has arguments to compare."
            )
            effect = "Only Trainer and Accelerate fill it in; deepspeed.initialize stops. Write a value."
            unfilled = [key for key, value in leaves(source.values) if value == "auto"]
            training.problems += [Problem("DeepSpeed", key, "auto", "error", effect) for key in unfilled]
            training.files["deepspeed"] = replace(source, values={"zero_optimization": {"stage": 0}} | source.values)
    for index, flag in enumerate(command.flags):
        if flag.replace("-", "_") == "__deepspeed_config_file" and arguments.deepspeed is None:
            _add(training, command.flags[index + 1], "Accelerate", "deepspeed_config_file", Path())
            training.named_by_trainer = False
    _add_named(training, arguments.deepspeed)
    return training


def _add(
    training: Training, name: Any, library: Library, key: str, folder: Path, by: command_lines.Tool | None = None
) -> UserFile | None:
    """Add the file ``name``, or a problem if it is none."""
    if is_unknown(str(name)):
        kind: Kind = "accelerate" if key == "config_file" else "deepspeed"
        if kind not in training.files:
            training.unknown["deepspeed"] = ""
            opened: list[Library] = ["Accelerate"] if kind == "accelerate" else []
            training.is_open = sorted({*training.is_open, *opened})
            advice = "Give the file beside the script, or set the variable once in the script."
            training.notes.append(f"{key} names the file {written(str(name))}, which only a shell knows. {advice}")
        return training.files.get(kind)
    places = [path for path in (Path(str(name)), folder / str(name)) if path.exists()]
    if file := next((path for path in places if path.is_file()), None):
        source = read_source(file, by)
        training.files[source.kind] = source
        return source
    effect = f"{f'{places[0]} is not a file' if places else 'The file does not exist'}, and the run stops."
    training.problems.append(Problem(library, key, name, "error", effect))
    return None


def _add_named(training: Training, by_option: str | None = None) -> None:
    """Add the DeepSpeed file that the training arguments or the Accelerate file name; theirs is the one that runs.

    The program's option names ``by_option``, whose file is already added.
    """
    values = training.files["training"].values if "training" in training.files else {}
    section = training.files["accelerate"].values.get("deepspeed_config") if "accelerate" in training.files else None
    by_accelerate = section.get("deepspeed_config_file") if isinstance(section, dict) else None
    by_trainer = values.get("deepspeed") if by_option is None else by_option
    if isinstance(by_trainer, dict):
        training.files["deepspeed"] = UserFile("deepspeed", training.files["training"].name, by_trainer)
    elif by_trainer and by_option is None:
        _add(training, by_trainer, "Trainer", "deepspeed", Path(training.files["training"].name).parent)
    if by_trainer and by_accelerate and by_accelerate != by_trainer:
        effect = "Nothing reads this file: the one that the training arguments name is used."
        key = "deepspeed_config.deepspeed_config_file"
        training.problems.append(Problem("Accelerate", key, by_accelerate, "warning", effect))
    elif by_accelerate and not by_trainer:
        key, folder = "deepspeed_config.deepspeed_config_file", Path(training.files["accelerate"].name).parent
        training.named_by_trainer = _add(training, by_accelerate, "Accelerate", key, folder) is None


def _report(training: Training, ranks: int | None, *, on_cpu: bool) -> Report:
    from shardmake.render.settings_table import compare

    values = {kind: source.values for kind, source in training.files.items()}
    size, note = _ranks(training, ranks)
    settings = Settings(
        trainer=values.get("training"), deepspeed=values.get("deepspeed"), accelerate=values.get("accelerate"),
        flags=training.flags, world_size=size, named_by_trainer=training.named_by_trainer, on_cpu=on_cpu,
        unknown=list(training.unknown), is_open=training.is_open,
    )  # fmt: skip
    plain = json.loads(json.dumps(asdict(settings), default=str))
    with temporary_folder("check") as folder:
        found, _ = compare(Settings(**plain), folder)
    names = {library: training.files[kind].name for library, kind in OWNERS.items() if kind in training.files}
    if training.flags and "Accelerate" not in names:
        names["Accelerate"] = training.title
    found = Comparison(found.rows, [*training.problems, *found.problems])
    return Report(training.title, names, found, [*training.notes, *_unknown_values(training), *note])


def _unknown_values(training: Training) -> Iterator[str]:
    """Yield each training argument whose value only a shell knows, with the value that the DeepSpeed file has."""
    file = training.files.get("deepspeed")
    given = dict(leaves(file.values)) if file is not None else {}
    for argument, text in training.unknown.items():
        if text and (rows := [row for row in SETTINGS.values() if argument in row.trainer]):
            held = [f"{key} is {as_text(given[key])}" for row in rows for key in row.deepspeed_keys if key in given]
            beside = f" In {file.name}, {' and '.join(held)}." if file is not None and held else ""
            yield f"{command_lines.UNKNOWN.format(argument, text)}{beside}"


def _ranks(training: Training, ranks: int | None) -> tuple[int, list[str]]:
    """Return the number of ranks, and a note if no file and no command says it."""
    in_file = training.files["accelerate"].values.get("num_processes") if "accelerate" in training.files else None
    for known in (training.ranks, in_file, ranks):
        if isinstance(known, int) and not isinstance(known, bool) and 0 < known < 1 << 20:
            return known, []
    batch = SETTINGS["total batch"].trainer
    if "deepspeed" not in training.files or training.unknown.keys() & {*batch}:
        return 1, []
    unknown = 1, ["No file and no command has the number of ranks. The total batch is that of 1: give --ranks N."]
    file, total = training.files["deepspeed"].values, training.files["deepspeed"].values.get(TOTAL_BATCH)
    if "training" in training.files:
        arguments = training.files["training"].values
        one = [arguments.get(key, default) for key, default in (("per_device_train_batch_size", 8), (ACCUMULATION, 1))]
    else:
        unknown, one = (1, []), [file.get(MICRO_BATCH), file.get(ACCUMULATION)]
    if not all(isinstance(size, int) and size > 0 for size in (total, *one)) or total % (one[0] * one[1]):
        return unknown
    implied = min(total // (one[0] * one[1]), 1 << 20)
    return implied, [f"train_batch_size {total} suits {implied} ranks. Give --ranks N to check another number."]


# --- printing ---------------------------------------------------------------------------------------------------------


def format_report(report: Report, *, every_row: bool) -> str:
    """Return the table of a report as text, and a line for each error and warning."""
    rows = report.comparison.contradictions
    if every_row:
        rows = [row for row in report.comparison.rows if any(value.value is not None for value in row.values.values())]
    lines = [report.title, *(f"note: {note}" for note in report.notes)]
    if rows:
        names = ("setting", *LIBRARIES, "what will run")
        lines += ["", plain_table(names, [_cells(row) for row in rows]), ""]
    lines += [f"error: {row.sentence(report.names)}" for row in report.comparison.contradictions]
    lines += [f"{problem.level}: {problem.sentence(report.names)}" for problem in report.comparison.problems]
    compared = len(report.comparison.rows)
    agree = f"{plural(compared, 'setting')} {'agrees' if compared == 1 else 'agree'}"
    scope = " in what was compared" if report.notes else ""
    agreed = f"No errors{scope}: {agree}." if compared else "Nothing was compared."
    lines.append(f"{plural(report.errors, 'error')}." if report.errors else agreed)
    return "\n".join(lines)


def _cells(row: Row) -> list[str]:
    values = [row.values.get(library) or Value(None, False, "") for library in LIBRARIES]
    cells = [as_text(one.value) + ("" if one.written or one.value is None else " (default)") for one in values]
    return [row.setting, *cells, "stops" if row.verdict == "stops" else as_text(row.runs)]
