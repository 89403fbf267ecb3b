"""Text for a page that others read: an absolute path in it shows its last part only, after three dots."""

import re
from typing import Final

_ROOT: Final = r"(?:~|\$\{?[A-Za-z_]\w*\}?|\.\.(?=/)|/(?!/))"
"""The start of a path outside the checkout; a URL and a path relative to the checkout do not start like this."""
_SLASHES: Final = r"(?:(?<=file:)//)?"
_WHOLE: Final = re.compile(rf"((?:--?[\w-]+=)?(?:file:)?){_SLASHES}{_ROOT}[^\n]*/([^/\n]+/?)")
_QUOTED: Final = re.compile(rf"(?<=([\"'])){_ROOT}[^\"'\n]*/([^\"'/\n]+)(?=\1)")
_WORD: Final = re.compile(rf"(?<![\w./-]){_SLASHES}{_ROOT}[^\s:\"']*/([^\s:/\"']+)")


def hide_folders(value: str) -> str:
    """Return ``value``, the whole of which may be a path with spaces, without the folders of absolute paths.

    Before such a path may stand ``file:`` or the name of an option.
    """
    whole = _WHOLE.fullmatch(value)
    return f"{whole[1]}.../{whole[2]}" if whole else hide_folders_in_text(value)


def hide_folders_in_text(text: str) -> str:
    """Return a command or a sentence without the folders of absolute paths; one with spaces must be in quotes."""
    return _WORD.sub(r".../\1", _QUOTED.sub(r".../\2", text))
