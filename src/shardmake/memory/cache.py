"""Helper processes that import torch or run a model's own code, and their results on disk."""

import hashlib
import json
import os
import platform
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from shardmake.config import methods
from shardmake.core.atomic import digest, write_json
from shardmake.core.environment import cache_folder, library_version
from shardmake.core.library_process import run_module
from shardmake.core.log import warn_while_slow

_LIBRARIES = (
    "transformers.models.auto.modeling_auto", "transformers.models.llama.modeling_llama",
    "torch.fx.experimental.symbolic_shapes", "shardmake.memory.tracer", "shardmake.plan.inspect_model",
)  # fmt: skip
"""Imports of the helpers besides a model's own classes: those of a Llama, of a first trace and of a plan's questions.

An import in a fork would copy up to 30 MiB of what was imported before, as some libraries look at all modules.
"""


def cached_path(module: str, request: Mapping[str, Any], sources: tuple[Path, ...] = ()) -> Path:
    """Return the file of the result of ``request``.

    Its name is a digest of the request, the versions of the libraries, and the source of this package, of the adapters
    and of ``sources``.
    """
    key = digest([dict(request), _versions(sources)])
    return cache_folder() / f"{module.rpartition('.')[2]}-{key}.json"


@cache
def _versions(more: tuple[Path, ...]) -> list[str]:
    sources = [*sorted(Path(__file__).parent.rglob("*.py")), Path(methods.__file__), *more]
    text = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()
    libraries = map(library_version, ("torch", "transformers", "peft", "accelerate", "safetensors"))
    return [platform.python_version(), *libraries, text]


def cached_helper(module: str, request: Mapping[str, Any], doing: str, sources: tuple[Path, ...] = ()) -> Any:
    """Return the result of ``request`` from disk; if it is not there, run the helper first, as `run_helper` does."""
    path = cached_path(module, request, sources)
    if not path.is_file():
        write_json(path, run_helper(module, request, doing))
    return json.loads(path.read_text())


def run_helper(module: str, request: Mapping[str, Any], doing: str) -> Any:
    """Run ``module`` on ``request`` in a child process that sees no GPU; log ``doing`` while it is slow.

    More threads would only wait for each other in models as small as these.
    """
    alone = {"TRANSFORMERS_VERBOSITY": "error", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    kind = request.get("config", {}).get("model_type")
    own = [f"transformers.models.{kind}.modeling_{kind}"] if kind else []
    with warn_while_slow(f"{doing}. The result is kept for the next time."):
        return run_module(module, request, {**os.environ, **alone}, libraries=(*_LIBRARIES, *own))
