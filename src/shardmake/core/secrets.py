"""Secrets: detect known ones and text in the form of a token, and remove them from files and from printed text."""

import base64
import contextlib
import hashlib
import json
import os
import re
import select
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, TextIO, cast
from urllib.parse import quote, quote_plus

from shardmake.core.environment import hub_token_file
from shardmake.core.run_folder import open_file

_NAMES = re.compile(
    r"TOKEN(?!IZ)|SECRET|PASSWORD|PASSWD|PASSPHRASE|PGPASS|CREDENTIAL|(?:^|_)KEY(?:_|$)|(?:ACCESS|API)_?KEY",
    re.IGNORECASE,
)
_SHAPES = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{20,}|api_org_[A-Za-z0-9]{30,}"
    r"|gh[pousr]_[A-Za-z0-9]{30,}|github_pat_\w{30,}|gl(?:pat|oas|rtr?|dt|ptt|cbt|ft|imt|agent|soat|ffct)-[\w-]{20,}"
    r"|A[KS]IA[0-9A-Z]{16}\b|AIza[\w-]{35,}|ya29\.[\w-]{20,}|GOCSPX-[\w-]{20,}|\w{3}8Q~[\w.~-]{31,}"
    r"|pypi-AgE[\w-]{20,}|npm_[A-Za-z0-9]{30,}|dckr_pat_[\w-]{20,}|xox[a-z]-[\w-]{10,}"
    r"|sk-(?:\w{1,16}-){0,4}[A-Za-z0-9]{20,}[\w-]*|gsk_[A-Za-z0-9]{30,}|nvapi-[\w-]{40,}|wandb_v1_\w{20,}"
    r"|eyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]{10,})"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY(?: BLOCK)?-----"
    r"(?:(?:(?!-----)[\s\S]){1,16384}-----END [A-Z ]*PRIVATE KEY(?: BLOCK)?-----|(?:(?:\s|\\n)*[A-Za-z0-9+/=]{16,})*)"
)
"""Texts that are secrets wherever they stand. Of a private key, the lines that follow belong to it."""
_SHORTEST = 8
_PHRASE = 16
"""A value without digits and capitals is a passphrase from this length."""
_USER = re.compile(r"(?<=://)(?!(?:localhost|[\w.-]+\.[\w-]+):\d{1,5}/)(?:[^/@\s:]*:[^@\s]*|[^/@\s]+)@")
"""User and password of a URL; a password may have slashes. After a host's port, ``@`` belongs to the path."""
_QUOTE = r"""(?:\\?["']|&(?:quot|apos|\#34|\#39);)?"""
"""Of text, of JSON and YAML in quotes, or of HTML, where a quote is an entity."""
_NAME = (
    rf"(?:password|passwd|pwd(?!{_QUOTE}[\s=:]{{1,9}}{_QUOTE}[/~.])|passphrase|secret"
    r"|(?:secret|access|api|account|private|signing|encryption)[_-]?key"
    r"|(?:auth|access|refresh|session|security|identity|registry|hub|hf|bearer|deploy|bot|job)[_-]?token"
    r"|SharedAccessSignature)"
)
_PASSWORD = re.compile(
    rf"""({_NAME}{_QUOTE}[^\S\n]*[=:][^\S\n]*{_QUOTE})(?!\$\{{?(?-i:[A-Z_]+)\b)([^\s"',;]{{6,}})""", re.IGNORECASE
)
"""A password in running text, not the name of a variable; shorter values are most likely words about passwords.

The pattern begins with a fixed word. Any number of characters before it would take quadratic time on a long line.
"""
_VARIABLE = re.compile(r"""(TOKEN=["']?)(?![$<\[]|\d+\b)[^\s"',;]{8,}""")
"""A variable like ``MY_TOKEN=...``; a tokenizer's, such as ``EOS_TOKEN=<s>`` or its number, is not secret."""
_HTTP_LOGIN = re.compile(
    rf"""(authorization{_QUOTE}\s*[=:]\s*{_QUOTE}(?:bearer|basic|token|digest)\s+)(?![$\[])[^\s"']+""", re.IGNORECASE
)
_BEARER = re.compile(r"""(\b[Bb]earer\s+)(?=[^\s"']*\d)[\w.~+/-]{16,}=*""")
_BASIC = re.compile(r"(\b[Bb]asic\s+)((?:[A-Za-z0-9+/]{4}){2,}(?:[A-Za-z0-9+/]{2,3}={1,2})?)(?![\w+/=])")
"""A login of HTTP if its text is ``USER:PASSWORD`` in base64."""
_CURL_LOGIN = re.compile(
    r"""(\bcurl\b[^\n]{0,300}?\s(?:-[a-z]{0,8}u|--(?:proxy-)?user)[\s=]{0,9}(["'])?[^\s:"']{1,128}:)(?![$\[])"""
    r"""(?(2)[^"'\n]+|[^\s"']+)""",
    re.IGNORECASE,
)
"""User and password of curl. The name of a variable after ``:``, as in ``ada:$PASSWORD``, is not a password."""
_SHORT_OPTION = re.compile(
    r"""(\b(?:sshpass|(?:docker|podman|registry|oras|twine)\s+(?:login|upload))\b[^\n]{0,300}?\s-p[\s=]{0,9}["']?)"""
    r"""(?![$\[-])[^\s"']+"""
)
_LONG_OPTION = re.compile(
    rf"""((?<![\w-])--?(?i:[\w-]{{0,64}}?(?:{_NAME}|(?<=-)pass))(?:=|[^\S\n]{{1,9}})["']?)"""
    rf"""(?![$\[-])(?=[^\s"',]*[^a-z\s"',]|[a-z]{{{_PHRASE},}})[^\s"',]{{6,}}"""
)
"""The value of an option like ``--http-password``; a word in small letters after it is most likely text."""
_SIGNED_URL = re.compile(
    r"""([?&;](?:X-(?:Amz|Goog)-)?(?:Signature|Security-Token|Credential|sig)=)(?![$\[])[^&;\s"'<>]{8,}""",
    re.IGNORECASE,
)
_SECRET_PATH = re.compile(
    r"(hooks\.slack\.com/\w+/|discord(?:app)?\.com/api/webhooks/|api\.telegram\.org/bot)(?!\$)[\w:/-]{16,}"
    r"|(anaconda\.org/t/)[\w-]{16,}"
)
"""Addresses whose paths are secrets: of chat programs, and of conda's channels with a token."""
_NETRC = re.compile(
    r"(\b(?:machine\s{1,9}\S{1,128}|default)\s{1,9}login\s{1,9}\S{1,128}\s{1,9}password\s{1,9})\S+"
    r"|^([^\S\n]*(?:login[^\S\n]+\S{1,128}[^\S\n]+)?password[^\S\n]+)(?=\S*[^a-z\s])\S{6,}$",
    re.MULTILINE,
)
_AUTH_FILE = re.compile(
    r"""((?:\\?["']auth\\?["']\s{0,9}:\s{0,9}\\?["']|\b_auth\s{0,9}=\s{0,9}))[A-Za-z0-9+/=]{8,}"""
    r"""|(\bpass\s{0,9}=\s{0,9})[\w-]{20,}|(\baws_(?:secret_access_key|session_token)\s{1,9})[A-Za-z0-9+/=]{16,}"""
)
"""Logins of Docker's ``config.json``, ``.npmrc``, ``rclone.conf`` and of ``aws configure set``."""
_OPTION = re.compile(rf"--?[\w-]*{_NAME}", re.IGNORECASE)
_SHORTEST_PASSWORD = 6
_WANDB = re.compile(r"(wandb\b[^\n]{0,60}?)\b[0-9a-f]{40}\b", re.IGNORECASE)
"""W&B's keys look like any digest, so they are known by what stands before them, as in ``~/.netrc``."""
_LOGINS = (_CURL_LOGIN, _HTTP_LOGIN, _BEARER, _SHORT_OPTION, _LONG_OPTION, _SIGNED_URL)
"""Logins that are refused in a configuration; what stands before each is in a group of its pattern and stays."""
_IN_TEXT = (_WANDB, *_LOGINS, _SECRET_PATH, _NETRC, _AUTH_FILE, _PASSWORD, _VARIABLE)
_ASSIGNED = re.compile(
    r"""((?:token(?!s|iz|_id)|secret|passw(?:or)?d|(?:access|api|wandb)[_-]?key|credential|signature)[\w-]{0,64}"""
    r"""(?:["']?\s*[=:,]\s*["']?|\s+))([^\s"',;&]+)""",
    re.IGNORECASE,
)
"""A value beside a name like a secret's: ``HF_TOKEN=...``, ``--password ...``, ``"api_key": "..."``."""


def find_secrets(text: str, known: Iterable[str] | None = None) -> list[str]:
    """Return the secrets in ``text``: those that are ``known``, by default of this process, and text like a token."""
    return [*_SHAPES.findall(text), *_known_in(text, known)]


def _known_in(text: str, known: Iterable[str] | None) -> list[str]:
    """Return the known secrets in ``text``, the longest first."""
    values = known_secrets(os.environ) if known is None else known
    return sorted((value for value in values if value in text), key=len, reverse=True)


def is_secret(name: str) -> bool:
    """Return whether a variable of this name holds a secret."""
    return bool(_NAMES.search(name))


def redact(text: str, known: Iterable[str] | None = None) -> str:
    """Return ``text`` with each secret replaced; those that are ``known`` are by default this process's."""
    for secret in _known_in(text, known):
        text = text.replace(secret, "[removed]")
    return _without_forms(text)


def _without_forms(text: str) -> str:
    text = _BASIC.sub(_without_login, _USER.sub("[removed]@", _SHAPES.sub("[removed]", text)))
    for pattern in _IN_TEXT:
        text = pattern.sub(lambda found: f"{next(filter(None, found.groups()))}[removed]", text)
    return text


def _without_login(found: re.Match[str]) -> str:
    """Return ``found`` without its base64 text if that holds a user and a password."""
    try:
        login = base64.b64decode(found[2], validate=True).decode()
    except ValueError:
        return found[0]
    return f"{found[1]}[removed]" if ":" in login and login.isprintable() else found[0]


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
    return any(pattern.search(text) for pattern in (_SHAPES, *_LOGINS))


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
    masked = _ASSIGNED.sub(r"\1[removed]", _without_forms(text))
    return masked if masked == text else f"{masked} #{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def known_secrets(environment: Mapping[str, str]) -> set[str]:
    """Return the values of variables that are named like secrets, and the hub's token, without plain words.

    Each value is also there as JSON, Python, a URL and HTML write it.
    """
    values = {_hub_token(), *(value.strip() for name, value in environment.items() if is_secret(name))}
    return {form for value in values if not _is_plain(value) for form in _forms(value)}


def _forms(value: str) -> set[str]:
    import html

    page = html.escape(value)
    jinja = page.replace("&quot;", "&#34;").replace("&#x27;", "&#39;")
    return {value, json.dumps(value)[1:-1], repr(value)[1:-1], quote(value, safe=""), quote_plus(value), page, jinja}


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


class RedactedStream:
    """A text stream that removes secrets from each text written to it, and is the inner stream in all else.

    A secret that a program writes in several parts is not found, nor is what it writes to ``buffer`` or from another
    process.
    """

    def __init__(self, inner: TextIO) -> None:
        self._inner = inner

    def write(self, text: str) -> int:
        """Write ``text`` without its secrets; return the length of ``text``, as streams do."""
        self._inner.write(redact(text))
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Write each of ``lines``."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def redact_output() -> None:
    """Redact standard output and standard error of this process, tracebacks that Python prints at its end included."""
    sys.stdout, sys.stderr = cast(TextIO, RedactedStream(sys.stdout)), cast(TextIO, RedactedStream(sys.stderr))


@contextlib.contextmanager
def redacted_output() -> Iterator[None]:
    """Redact standard output and standard error of this process meanwhile."""
    out, err = (cast(TextIO, RedactedStream(stream)) for stream in (sys.stdout, sys.stderr))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        yield


_IDLE_SECONDS = 1.0
"""How long the beginning of a line waits for the rest, which may be the rest of a secret."""
_MOST_BYTES = 1 << 16
_END_SECONDS = 2.0
_LINE_ENDS = re.compile(rb"(?<=[\r\n])")


class LogCopy:
    """A thread that appends the output of ``process`` and its children to ``log`` without their secrets.

    The secrets are those of their ``environment``. The thread ends when all of them have ended. They never wait for the
    log: what a full disk does not take is lost.
    """

    def __init__(self, process: subprocess.Popen[bytes], log: Path, environment: Mapping[str, str]) -> None:
        assert process.stdout is not None, "it is a pipe"
        self._output = process.stdout
        self._secrets = known_secrets(environment)
        self._log = open_file(log, "ab", buffering=0)
        self._thread = threading.Thread(target=self._copy, daemon=True)
        self._thread.start()

    def wait(self, seconds: float = _END_SECONDS) -> None:
        """Wait for the rest of the output of a program that has ended; another one may hold the pipe open."""
        self._thread.join(seconds)

    def _copy(self) -> None:
        with self._output, self._log:
            for lines in _read_lines(self._output.fileno()):
                text = redact(b"".join(lines).decode(errors="replace"), self._secrets)
                with contextlib.suppress(OSError):
                    self._log.write(text.encode())


def _read_lines(pipe: int) -> Iterator[list[bytes]]:
    """Yield the lines that can be read from ``pipe``, and the beginning of one whose rest is late or long."""
    ready = select.poll()
    ready.register(pipe, select.POLLIN)
    held = b""
    while True:
        if held and not ready.poll(_IDLE_SECONDS * 1000):
            yield [held]
            held = b""
        if not (read := os.read(pipe, _MOST_BYTES)):
            break
        *lines, held = _LINE_ENDS.split(held + read)
        if len(held) >= _MOST_BYTES:
            lines, held = [*lines, held], b""
        yield lines
    if held:
        yield [held]
