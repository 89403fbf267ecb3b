"""The settings that run the same training again, without places that only their author can read."""

from collections.abc import Mapping
from typing import Any, Final

from shardmake.config.models import Run
from shardmake.report.public_text import hide_folders, hide_folders_in_text

_TEXTS: Final = frozenset({"command", "prompts"})
"""Keys of commands and sentences, in which a path is one word."""
_URL_PATHS: Final = frozenset({"health"})


def configuration(runs: Mapping[str, Run]) -> str:
    """Return the entries of ``runs`` in a configuration file, as YAML: every setting that is not the default.

    Of an absolute path only the last part is shown, after three dots.
    """
    import yaml

    entries = {name: _public(run.model_dump(mode="json", exclude_defaults=True)) for name, run in runs.items()}
    return yaml.safe_dump({"runs": entries}, sort_keys=False, allow_unicode=True, width=100)


def _public(value: Any, key: str = "") -> Any:
    if isinstance(value, dict):
        return {name: _public(inner, name) for name, inner in value.items()}
    if isinstance(value, list):
        return [_public(inner, key) for inner in value]
    if not isinstance(value, str) or key in _URL_PATHS:
        return value
    return hide_folders_in_text(value) if key in _TEXTS else hide_folders(value)
