"""Check the rendered files with the libraries' own parsers, before anything is queued.

Accelerate, transformers and DeepSpeed read the files as they will on the nodes, at the planned world size
(`shardmake.render.engine_settings`). A key that a parser refuses, understands differently from the plan or silently
drops is an error.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from pydantic import TypeAdapter

import shardmake
from shardmake.core.atomic import digest, write_json
from shardmake.core.environment import UNUSED, cache_folder, hidden, installed_versions, kernel_caches
from shardmake.core.errors import ConfigError
from shardmake.core.library_process import run_module
from shardmake.core.private_names import named_arguments
from shardmake.core.temporary import temporary_folder
from shardmake.render.comparison import EngineSettings, Library, Settings
from shardmake.render.settings_table import compare
from shardmake.run.plan import Choice
from shardmake.run.training_settings import TrainingSettings

_LIBRARIES = ("torch", "transformers", "accelerate", "deepspeed", "trl", "peft", "pydantic")


def ask_once(module: str, request: Mapping[str, Any], ask: Callable[[], list[list[str]]]) -> list[list[str]]:
    """Return the problems that ``ask`` finds in ``request``, a list for each rendering.

    A check imports torch and DeepSpeed, which takes up to 20 s and half a gigabyte. Content without problems is not
    asked for again with the same libraries and the same source of this package. A problem is never kept, because its
    cause may be outside the content, such as a full disk.
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
    "Trainer": "training.json", "DeepSpeed": "deepspeed.json", "Accelerate": "accelerate.yaml",
}  # fmt: skip
_RENDERINGS = TypeAdapter(list[Rendering])


def check_rendered(renderings: Sequence[Rendering], scratch: str) -> None:
    """Check the files of a plan's choice and of its fallbacks, in this order, with the libraries' parsers.

    Raises `ConfigError` with everything that the parsers refuse or understand differently.
    """
    problems = read_with_libraries(renderings, scratch)
    lines = [
        f"  {f'fallback {number} ({rendering.choice.strategy}): ' if number else ''}{line}"
        for number, (rendering, found) in enumerate(zip(renderings, problems, strict=True))
        for line in found
    ]
    if lines:
        raise ConfigError("\n".join(["The rendered files do not fit together:", *lines]))


def read_with_libraries(renderings: Sequence[Rendering], scratch: str) -> list[list[str]]:
    """Return what the libraries' parsers refuse or understand differently, for each of ``renderings``.

    One process reads them, unless the same content was accepted before. ``scratch`` is the folder for compiled kernels:
    DeepSpeed builds one for the CPU as soon as it reads a configuration.
    """
    request = {"renderings": _RENDERINGS.dump_python(list(renderings), mode="json")}
    environment = {**os.environ, **kernel_caches(scratch), "CUDA_VISIBLE_DEVICES": ""}
    try:
        return ask_once(__name__, request, lambda: run_module(__name__, request, environment))
    except RuntimeError as error:
        raise ConfigError(f"Cannot check the files: {error}") from None


# --- in the child process ---------------------------------------------------------------------------------------------


def answer(request: dict[str, Any]) -> list[list[str]]:
    """Return the problems of each of the request's renderings."""
    renderings = _RENDERINGS.validate_python(request["renderings"])
    with temporary_folder("check") as folder, hidden("peft", "mlflow", *UNUSED):
        return [_find_problems(one, folder) for one in renderings]


def _find_problems(rendering: Rendering, folder: Path) -> list[str]:
    """Return what the libraries refuse, ignore or understand differently, as `shardmake check` reads the files."""
    files, choice = rendering.files, rendering.choice
    # The script decides whether it uses the optimizer and the schedule of its file.
    sections = ("optimizer", "scheduler") if files.training.program.kind == "script" else ()
    settings = Settings(
        trainer=named_arguments(files.training.arguments),
        deepspeed={key: value for key, value in files.deepspeed.items() if key not in sections} or None,
        accelerate=files.accelerate,
        flags=rendering.flags,
        world_size=choice.world_size,
    )
    try:
        compared, found = compare(settings, folder)
        return [
            *(row.sentence(NAMES) for row in compared.contradictions),
            *(problem.sentence(NAMES) for problem in compared.problems if problem.level != "note"),
            *(f"training.json: transformers does not read {key}" for key in found.ignored),
            *_unplanned(files, choice, found),
        ]
    except Exception as error:  # a library refuses a file by raising an exception of any class
        return [f"{type(error).__module__.split('.')[0]}.{type(error).__name__}: {error}"]


def _unplanned(files: Files, choice: Choice, found: EngineSettings) -> Iterator[str]:
    """Yield what the libraries understood otherwise than the plan: launcher, batch and ZeRO stage."""
    from accelerate import ParallelismConfig

    mesh = files.accelerate.get("parallelism_config", {}).items()
    ParallelismConfig(**{key.removeprefix("parallelism_config_"): value for key, value in mesh})
    if (launched := found.launched) is not None:
        separate = {"compute_environment", "distributed_type", "main_training_function"}
        parts = (value if isinstance(value, dict) else {key: value} for key, value in files.accelerate.items())
        for key, value in ((key, value) for part in parts for key, value in part.items() if key not in separate):
            yield from _unequal(f"accelerate.yaml: {key}", vars(launched).get(key, value), value)
        per_node, engine = launched.num_processes // launched.num_machines, choice.spec.distributed_type
        yield from _unequal("accelerate.yaml: processes per node", per_node, choice.processes_per_node)
        yield from _unequal("accelerate.yaml: distributed_type", files.accelerate["distributed_type"], engine)
    if found.config is not None:
        # Read without a mesh, the file counts the ranks of a group one by one.
        batch = found.config.train_batch_size // choice.group_size
        yield from _unequal("deepspeed.json: train_batch_size", batch, choice.global_batch_size)
        yield from _unequal("deepspeed.json: stage", int(found.config.zero_optimization_stage), choice.zero_stage)
    if found.arguments is not None:
        one = found.arguments.per_device_train_batch_size * found.arguments.gradient_accumulation_steps
        batch = found.data_ranks // choice.group_size * one
        yield from _unequal("training.json: sequences per optimizer step", batch, choice.global_batch_size)


def _unequal(subject: str, understood: object, planned: object) -> Iterator[str]:
    if understood != planned:
        yield f"{subject} is understood as {understood!r}; planned is {planned!r}"
