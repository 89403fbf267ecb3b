"""Check the rendered files with the libraries' own parsers, before anything is queued.

Accelerate's config class and argument parser, transformers' TrainingArguments and DeepSpeed's config class read the
files as they will on the nodes, at the planned world size (`shardmake.render.parsers`). A key that a parser refuses,
understands differently from the plan or silently drops is an error.
"""

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Final

from pydantic import TypeAdapter

import shardmake
from shardmake.config.settings import ACCUMULATION, MICRO_BATCH
from shardmake.core.atomic import digest, write_json
from shardmake.core.environment import cache_folder, hidden, installed_versions, kernel_caches
from shardmake.core.errors import ConfigError
from shardmake.core.library_process import run_module
from shardmake.core.temporary import temporary_folder
from shardmake.render import parsers
from shardmake.render.comparison import Library, Settings
from shardmake.render.launcher_settings import VARIABLES
from shardmake.render.settings_table import compare
from shardmake.run.plan import Choice
from shardmake.run.training_settings import TrainingSettings

# Ask the libraries' parsers once for the same content.
#
# A check imports torch and DeepSpeed, which takes up to 20 s and half a gigabyte, and a repeated rendering asks for
# files that were accepted before.

_LIBRARIES = ("torch", "transformers", "accelerate", "deepspeed", "trl", "peft", "pydantic")


def ask_once(module: str, request: Mapping[str, Any], ask: Callable[[], list[list[str]]]) -> list[list[str]]:
    """Return the problems that ``ask`` finds in ``request``, a list for each rendering.

    Content without problems is not asked for again with the same libraries and the same source of this package. A
    problem is never kept, because its cause may be outside the content, such as a full disk.
    """
    key = digest([module, dict(request), _software()])
    accepted = cache_folder() / "checks" / f"{key}.json"
    if accepted.exists():
        return [[] for _ in range(json.loads(accepted.read_text()))]
    problems = ask()
    if not any(problems):
        write_json(accepted, len(problems))
    return problems


@cache
def _software() -> list[Any]:
    """Return what decides on an answer besides the request: versions of libraries, and the source of this package."""
    package = Path(shardmake.__file__).parent
    sources = (source.read_bytes() for source in sorted(package.rglob("*.py")))
    return [installed_versions(_LIBRARIES), hashlib.sha256(b"".join(sources)).hexdigest()]


@dataclass(frozen=True)
class Files:
    """The three rendered files as data."""

    accelerate: dict[str, Any]
    deepspeed: dict[str, Any]
    training: TrainingSettings


@dataclass(frozen=True)
class Rendering:
    """The files of one choice, and the options of `accelerate launch` beside them."""

    files: Files
    choice: Choice
    flags: list[str]


NAMES: Final[dict[Library, str]] = {
    "Trainer": "training.json",
    "DeepSpeed": "deepspeed.json",
    "Accelerate": "accelerate.yaml",
}
_RENDERINGS = TypeAdapter(list[Rendering])


def check_rendered(renderings: Sequence[Rendering], hidden_size: int, scratch: str) -> None:
    """Check the files of a plan's choice and of its fallbacks, in this order, with the libraries' parsers.

    Raises `ConfigError` with everything that the parsers refuse or understand differently.
    """
    problems = read_with_libraries(renderings, hidden_size, scratch)
    lines = [
        f"  {f'fallback {number} ({rendering.choice.strategy}): ' if number else ''}{line}"
        for number, (rendering, found) in enumerate(zip(renderings, problems, strict=True))
        for line in found
    ]
    if lines:
        raise ConfigError("\n".join(["The rendered files do not fit together:", *lines]))


def read_with_libraries(renderings: Sequence[Rendering], hidden_size: int, scratch: str) -> list[list[str]]:
    """Return what the libraries' parsers refuse or understand differently, for each of ``renderings``.

    One process reads all renderings of one world size, unless the same content was accepted before. ``hidden_size`` is
    the model's, from which Trainer fills in bucket sizes. ``scratch`` is the folder for compiled kernels: DeepSpeed
    builds one for the CPU as soon as it reads a configuration.
    """
    problems: dict[int, list[str]] = {}
    for world_size in sorted({rendering.choice.world_size for rendering in renderings}):
        group = {n: one for n, one in enumerate(renderings) if one.choice.world_size == world_size}
        request = {
            "world_size": world_size,
            "hidden_size": hidden_size,
            "renderings": _RENDERINGS.dump_python(list(group.values()), mode="json"),
        }
        deepspeed = any(one.files.deepspeed for one in group.values())
        answers = ask_once(__name__, request, partial(_ask_libraries, request, deepspeed, scratch))
        problems |= dict(zip(group, answers, strict=True))
    return [problems[number] for number in range(len(renderings))]


def _ask_libraries(request: Mapping[str, Any], deepspeed: bool, scratch: str) -> Any:
    """Ask in a process with the environment of rank 0, so that the libraries see the planned world size."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(VARIABLES)}
    world = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(request["world_size"]), "MASTER_ADDR": "localhost"}
    engine = {"ACCELERATE_USE_DEEPSPEED": "true", "DS_ACCELERATOR": "cpu"} if deepspeed else {}
    try:
        return run_module(__name__, request, inherited | world | engine | kernel_caches(scratch))
    except RuntimeError as error:
        raise ConfigError(f"Cannot check the files: {error}") from None


# --- in the child process ---------------------------------------------------------------------------------------------


def _problems_of(check: Callable[[], list[str]]) -> list[str]:
    """Return what ``check`` finds. A library refuses a file by raising an exception of any class."""
    try:
        return check()
    except Exception as error:
        return [f"{type(error).__module__.split('.')[0]}.{type(error).__name__}: {error}"]


def answer(request: dict[str, Any]) -> list[list[str]]:
    """Return the problems of each of the request's renderings."""
    renderings = _RENDERINGS.validate_python(request["renderings"])
    with temporary_folder("check") as folder, hidden("peft", "mlflow", "boto3", "scipy", "sklearn"):
        return [_find_problems(one, request["hidden_size"], folder) for one in renderings]


def _find_problems(rendering: Rendering, hidden_size: int, folder: Path) -> list[str]:
    """Return what the libraries find in the files of one rendering, whatever they left in the environment before."""
    files, choice = rendering.files, rendering.choice
    parsers.pretend_world(choice.world_size)
    for name in [name for name in os.environ if name.startswith(VARIABLES)]:
        del os.environ[name]
    if files.deepspeed:
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    return [
        *_problems_of(lambda: _check_accelerate(files, choice, rendering.flags, folder)),
        *_problems_of(lambda: _check_deepspeed(files, choice)),
        *_problems_of(lambda: _check_training(files, choice, hidden_size, folder)),
        *_check_settings(rendering, folder),
    ]


def _deepspeed_beside_arguments(files: Files) -> dict[str, Any]:
    """Return DeepSpeed's file without the sections that a script may use or not, whatever its own arguments are."""
    is_script = files.training.program.kind == "script"
    sections = ("optimizer", "scheduler") if is_script else ()
    return {key: value for key, value in files.deepspeed.items() if key not in sections}


def _check_settings(rendering: Rendering, folder: Path) -> list[str]:
    """Compare the settings of the three files, as `shardmake check` does."""
    files = rendering.files
    settings = Settings(
        trainer=files.training.arguments,
        deepspeed=_deepspeed_beside_arguments(files) or None,
        accelerate=files.accelerate,
        flags=rendering.flags,
        world_size=rendering.choice.world_size,
    )
    found = compare(settings, folder)
    errors = [problem.sentence(NAMES) for problem in found.problems if problem.level == "error"]
    return [*(row.sentence(NAMES) for row in found.contradictions), *errors]


def _check_accelerate(files: Files, choice: Choice, flags: list[str], folder: Path) -> list[str]:
    """Check that each key of the file reaches the launch arguments, and that the planned ranks are started."""
    launched, ignored = parsers.launch_arguments(files.accelerate, flags, folder)
    parsers.check_replicas(files.accelerate.get("parallelism_config", {}))
    per_node, engine = launched.num_processes // launched.num_machines, choice.spec.distributed_type
    flat = {key: value for key, value in _flat(files.accelerate).items() if key not in ignored}
    return [
        *(
            line
            for key, value in flat.items()
            for line in _unequal(f"accelerate.yaml: {key}", vars(launched)[key], value)
        ),
        *(f"accelerate.yaml: accelerate ignores {key}" for key in ignored),
        *_unequal("accelerate.yaml: processes per node", per_node, choice.processes_per_node),
        *_unequal("accelerate.yaml: distributed_type", files.accelerate["distributed_type"], engine),
    ]


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the file's keys under the names of the launcher's arguments, without those it handles separately."""
    separate = {"compute_environment", "distributed_type", "main_training_function"}
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat.update(value if isinstance(value, dict) else {key: value})
    return {key: value for key, value in flat.items() if key not in separate}


def _check_deepspeed(files: Files, choice: Choice) -> list[str]:
    """Check keys, types, and the batch arithmetic at the planned world size."""
    if not files.deepspeed:
        return []
    filled = {MICRO_BATCH: choice.micro_batch_size, ACCUMULATION: choice.gradient_accumulation_steps}
    read, ignored = parsers.deepspeed_settings(files.deepspeed, filled)
    # Read without a mesh, the file counts the ranks of a group one by one.
    batch = read.train_batch_size // choice.group_size
    return [
        *_unequal("deepspeed.json: train_batch_size", batch, choice.global_batch_size),
        *_unequal("deepspeed.json: stage", int(read.zero_optimization_stage), choice.zero_stage),
        *(f"deepspeed.json: DeepSpeed ignores {key}" for key in ignored),
    ]


def _check_training(files: Files, choice: Choice, hidden_size: int, folder: Path) -> list[str]:
    """Check that TrainingArguments accepts every argument and agrees on the batch and with DeepSpeed's file."""
    deepspeed = _deepspeed_beside_arguments(files)
    arguments, ignored = parsers.training_arguments(files.training.arguments, deepspeed, folder)
    data_parallel = arguments.world_size // choice.group_size
    batch = data_parallel * arguments.train_batch_size * arguments.gradient_accumulation_steps
    return [
        *_unequal("training.json: sequences per optimizer step", batch, choice.global_batch_size),
        *(f"training.json: transformers ignores {key}" for key in ignored),
        *(parsers.unfilled(arguments, hidden_size) if files.deepspeed else []),
    ]


def _unequal(subject: str, understood: object, planned: object) -> list[str]:
    return [] if understood == planned else [f"{subject} is understood as {understood!r}; planned is {planned!r}"]
