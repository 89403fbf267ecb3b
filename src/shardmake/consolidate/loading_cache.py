"""Reports of transformers on disk: importing it takes longer than merging gigabytes, and the answer does not change.

A report depends on the configs, on names, types and shapes of the tensors, on the layout, and on the versions of the
libraries and of the code that asks. A digest of all of them is the name of the file. Reports of model code, which may
do anything, and reports with problems are not kept.
"""

import contextlib
import hashlib
import json
import platform
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from shardmake.checkpoint.formats import huggingface
from shardmake.core.atomic import write_json
from shardmake.core.environment import cache_folder
from shardmake.core.errors import ShardmakeError

_CONFIGS = ("config.json", "generation_config.json", "adapter_config.json")
_LIBRARIES = ("torch", "transformers", "peft", "accelerate", "safetensors")


def cached_path(folder: Path, base: Path | None, layout: Path | None, model_class: Any) -> Path | None:
    """Return the file of the report on ``folder``; None if a file that it depends on cannot be read."""
    try:
        parts = {
            "configs": [_content(place / name) for place in (folder, base) if place for name in _CONFIGS],
            "tensors": sorted((t.name, t.dtype, t.shape) for t in huggingface.read(folder).tensors.values()),
            "layout": layout and sorted(huggingface.weight_names(layout)),
            "class": model_class,
            "code": _code(),
        }
    except (ShardmakeError, OSError):
        return None
    key = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
    return cache_folder() / f"loading-{key}.json"


def _content(path: Path) -> str | None:
    return path.read_bytes().hex() if path.is_file() else None


@cache
def _code() -> list[str]:
    package = Path(__file__).parents[1]
    sources = [Path(__file__).with_name("loading.py"), *sorted((package / "checkpoint" / "formats").glob("*.py"))]
    sources += sorted((package / "run").glob("model_class.py"))
    text = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()
    return [platform.python_version(), *(f"{name} {version(name)}" for name in _LIBRARIES), text]


def read(path: Path) -> dict[str, Any] | None:
    """Return the report in ``path``; None if there is none."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def write(path: Path, report: dict[str, Any]) -> None:
    """Keep ``report``, if the cache can be written to."""
    with contextlib.suppress(OSError):
        write_json(path, report)
