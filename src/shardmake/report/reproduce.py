"""The settings that run the same training again, without places that only their author can read."""

import re
from typing import Any

from shardmake.config.models import Run

_PRIVATE = re.compile(r"(?<![\w./-])(?:~|/(?!/))[^\s:]*/([^/\s:]+)")
"""An absolute path; a URL and a path relative to the checkout are not."""


def configuration(name: str, run: Run) -> str:
    """Return the entry of ``name`` in a configuration file, as YAML: every setting that is not the default.

    Of an absolute path only the last part is shown, after three dots.
    """
    import yaml

    values = run.model_dump(mode="json", exclude_defaults=True)
    return yaml.safe_dump({"runs": {name: _public(values)}}, sort_keys=False, allow_unicode=True, width=100)


def _public(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _public(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_public(inner) for inner in value]
    return _PRIVATE.sub(r".../\1", value) if isinstance(value, str) else value
