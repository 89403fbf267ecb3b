"""The content of the small files that a run names, as settings: an edit counts like an edit of the configuration."""

import json
from pathlib import Path
from typing import Any, Final

from shardmake.config.models import Run
from shardmake.config.script_file import script_file
from shardmake.config.user_file_keys import is_tuning, judge
from shardmake.config.user_files import KINDS, Kind, read_user_file
from shardmake.core.atomic import sha256
from shardmake.core.errors import ConfigError

SCRIPT: Final = "script.content"
TEMPLATE: Final = "data.chat_template.content"
RESULT_KEYS: Final = (SCRIPT, TEMPLATE, *(f"{kind}_config.content" for kind in KINDS))
"""Settings that can change what is trained."""
TUNING_KEYS: Final = tuple(f"{kind}_config.tuning" for kind in KINDS)
"""Settings of the user's own files that change memory, speed or logs alone, such as bucket sizes."""
CONTENT_KEYS: Final = (*RESULT_KEYS, *TUNING_KEYS)
_UNREADABLE: Final = "cannot be read"


def file_contents(run: Run) -> dict[str, str]:
    """Return the value of each of `CONTENT_KEYS`.

    These are the digests of a script and of a chat template, and the values of the user's own files as JSON.

    It does not raise: the stage that reads a broken file reports it.
    """
    contents = {SCRIPT: _script(run.script), TEMPLATE: _digest(run.data.chat_template)}
    for kind in KINDS:
        result, tuning = _values(kind, run)
        contents |= {f"{kind}_config.content": result, f"{kind}_config.tuning": tuning}
    return contents


def _script(script: str | None) -> str:
    try:
        return _digest(None if script is None else str(script_file(script)))
    except ConfigError:
        return _UNREADABLE


def _digest(file: str | None) -> str:
    if file is None:
        return "null"
    try:
        return sha256(Path(file))[:16]
    except OSError:
        return _UNREADABLE


def _values(kind: Kind, run: Run) -> tuple[str, str]:
    """Return the values that can change the result and the others, without comments and those without effect."""
    try:
        file = read_user_file(kind, run)
    except ConfigError:
        return _UNREADABLE, _UNREADABLE
    parts: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
    for one in judge(file, run.script is not None) if file else ():
        if not one.is_idle:
            parts[is_tuning(one)][one.key] = one.value
    result, tuning = (json.dumps(dict(sorted(part.items()))) for part in parts)
    return result, tuning
