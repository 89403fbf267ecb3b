"""Secrets: detect known secrets and text in the form of a token before files leave the cluster."""

import contextlib
import hashlib
import os
import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from shardmake.core.environment import hub_token_file

_NAMES = re.compile(
    r"TOKEN(?!IZ)|SECRET|PASSWORD|PASSWD|PASSPHRASE|PGPASS|CREDENTIAL|(?:^|_)KEY(?:_|$)|(?:ACCESS|API)_?KEY",
    re.IGNORECASE,
)
_SHAPES = re.compile(
    r"\bhf_[A-Za-z0-9]{20,}|\bgh[pousr]_[A-Za-z0-9]{30,}|\bgithub_pat_\w{30,}|\bglpat-[\w-]{20,}"
    r"|\bA[KS]IA[0-9A-Z]{16}\b|\bsk-[A-Za-z0-9_-]{20,}|\bxox[a-z]-[\w-]{10,}"
    r"|\bwandb_v1_\w{20,}|\beyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]{10,}|-----BEGIN [A-Z ]*PRIVATE KEY-----"
)
_SHORTEST = 8
_PHRASE = 16
"""A value without digits and capitals is a passphrase from this length."""
_USER = re.compile(r"(?<=://)(?:[^/@\s:]*:[^@\s]*|[^/@\s]+)@")
"""User and password of a URL; a password may have slashes."""
_QUOTE = r"""(?:\\?["']|&(?:quot|apos|\#34|\#39);)?"""
"""Of text, of JSON and YAML in quotes, or of HTML, where a quote is an entity."""
_PASSWORD = re.compile(
    r"""((?:password|passwd|pwd|secret|(?:secret|access|api)[_-]?key|(?:auth|access|refresh)[_-]?token)"""
    rf"""{_QUOTE}\s*[=:]\s*{_QUOTE})([^\s"',;]{{6,}})""",
    re.IGNORECASE,
)
"""A password in running text; shorter values are most likely words about passwords.

The pattern begins with a fixed word. Any number of characters before it would take quadratic time on a long line.
"""
_HTTP_LOGIN = re.compile(
    rf"""(authorization{_QUOTE}\s*[=:]\s*{_QUOTE}(?:bearer|basic|token|digest)\s+)(?![$\[])[^\s"']+""", re.IGNORECASE
)
_CURL_LOGIN = re.compile(
    r"""(\bcurl\b[^\n]{0,300}?\s(?:-[a-z]{0,8}u|--(?:proxy-)?user)[\s=]{0,9}(["'])?[^\s:"']{1,128}:)(?![$\[])"""
    r"""(?(2)[^"'\n]+|[^\s"']+)""",
    re.IGNORECASE,
)
"""User and password of curl. The name of a variable after ``:``, as in ``ada:$PASSWORD``, is not a password."""
_OPTION = re.compile(
    r"--?[\w-]*(?:password|passwd|secret|(?:secret|access|api)[_-]?key|(?:hub|auth|access|refresh)[_-]?token)",
    re.IGNORECASE,
)
_SHORTEST_PASSWORD = 6
_WANDB = re.compile(r"(wandb\b[^\n]{0,60}?)\b[0-9a-f]{40}\b", re.IGNORECASE)
"""W&B's keys look like any digest, so they are known by what stands before them, as in ``~/.netrc``."""
_ASSIGNED = re.compile(
    r"""((?:token(?!s|iz|_id)|secret|passw(?:or)?d|(?:access|api|wandb)[_-]?key|credential|signature)[\w-]{0,64}"""
    r"""(?:["']?\s*[=:,]\s*["']?|\s+))([^\s"',;&]+)""",
    re.IGNORECASE,
)
"""A value beside a name like a secret's: ``HF_TOKEN=...``, ``--password ...``, ``"api_key": "..."``."""


def find_secrets(text: str, known: Iterable[str] | None = None) -> list[str]:
    """Return the secrets in ``text``: those that are ``known``, by default of this process, and text like a token."""
    values = known_secrets(os.environ) if known is None else known
    return [*_SHAPES.findall(text), *(value for value in values if value in text)]


def is_secret(name: str) -> bool:
    """Return whether a variable of this name holds a secret."""
    return bool(_NAMES.search(name))


def redact(text: str, known: Iterable[str] | None = None) -> str:
    """Return ``text`` with each secret replaced; those that are ``known`` are by default this process's."""
    for secret in find_secrets(text, known):
        text = text.replace(secret, "[removed]")
    text = _USER.sub("[removed]@", text)
    for before_secret in (_WANDB, _CURL_LOGIN, _HTTP_LOGIN, _PASSWORD):
        text = before_secret.sub(r"\1[removed]", text)
    return text


def keys_of_tokens(values: Any, before: str = "") -> list[str]:
    """Return the dotted keys of nested ``values`` at which a secret is written, whatever the environment.

    That is a text in the form of a token, a login of HTTP, or in a list the value of an option like ``--db-password``.
    """
    if isinstance(values, Mapping):
        return [key for name, value in values.items() for key in keys_of_tokens(value, f"{before}.{name}".lstrip("."))]
    if isinstance(values, list | tuple):
        found = [key for value in values for key in keys_of_tokens(value, before)]
        return list(dict.fromkeys([*found, *([before] if _has_secret_option(values) else [])]))
    return [before] if isinstance(values, str) and _has_secret_form(values) else []


def _has_secret_form(text: str) -> bool:
    return any(pattern.search(text) for pattern in (_SHAPES, _HTTP_LOGIN, _CURL_LOGIN))


def _has_secret_option(arguments: Iterable[Any]) -> bool:
    """Return if the words of a command have curl's login, or an option named like a secret with its value.

    The value stands after ``=`` or a space.
    """
    words = [word if isinstance(word, str) else "" for word in arguments]
    if _has_secret_form(" ".join(words)):
        return True
    for word, following in zip(words, [*words[1:], ""], strict=False):  # no word, no pair
        name, equals, value = word.partition("=")
        secret = value if equals else following
        if _OPTION.fullmatch(name) and len(secret) >= _SHORTEST_PASSWORD and not secret.startswith("-"):
            return True
    return False


def public_url(url: str) -> str:
    """Return ``url`` without user and password."""
    return _USER.sub("", url)


def mask(text: str) -> str:
    """Return a setting without its secrets, with a digest if it has any, by which a changed secret is noticed.

    The result depends on the text alone, not on the environment, because settings of different days are compared.
    """
    masked = _USER.sub("[removed]@", _SHAPES.sub("[removed]", text))
    for before_secret in (_CURL_LOGIN, _HTTP_LOGIN, _ASSIGNED):
        masked = before_secret.sub(r"\1[removed]", masked)
    return masked if masked == text else f"{masked} #{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def known_secrets(environment: Mapping[str, str]) -> set[str]:
    """Return the values of variables that are named like secrets, and the hub's token, without plain words."""
    values = {_hub_token(), *(value for name, value in environment.items() if is_secret(name))}
    return {value for value in values if not _is_plain(value)}


def _is_plain(value: str) -> bool:
    """Return if ``value`` may occur in ordinary text: a short one, a word in small letters, the path of a file."""
    if len(value) < _SHORTEST:
        return True
    without_digit = not any(character.isdigit() for character in value)
    return without_digit and (value.startswith("/") or (value.islower() and len(value) < _PHRASE))


@cache
def _hub_token() -> str:
    """Return the token that ``hf auth login`` stored; empty without one, or if its file belongs to somebody else.

    The hub's library is not asked: it reads its variables at import, and this may run before they are set.
    """
    with contextlib.suppress(OSError, ValueError):
        return hub_token_file().read_text().strip()
    return ""
