"""A run's own chat template, from the file that ``data.chat_template`` names, and the clock of any template."""

import re
from datetime import date, datetime, time
from pathlib import Path
from typing import Final

from shardmake.core.errors import ConfigError

_CODES: Final = ("-d", "-m", "-H", "-I", "-M", "-S", "-j", *"aAbBcdDeFGHIjklmMpPrRsSTuUVwWxXyYzZ%")
"""Codes of `strftime`."""
_TAGS_OF_TRANSFORMERS: Final = re.compile(r"\{%[-+]?\s*(end)?generation\s*[-+]?%\}")


def read_template(path: Path) -> str:
    """Return the text of a chat template; raise `ConfigError` if it is empty, not text, or not valid Jinja."""
    from jinja2 import Environment, TemplateSyntaxError

    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"data.chat_template: cannot read {path}: {error}. Name a text file in UTF-8.") from None
    if not text.strip():
        raise ConfigError(f"data.chat_template: {path} is empty. Write a Jinja template into it.")
    try:
        # The tag that marks the assistant's tokens is transformers' own, and unknown to Jinja itself.
        Environment(extensions=["jinja2.ext.loopcontrols"]).parse(_TAGS_OF_TRANSFORMERS.sub("", text))
    except TemplateSyntaxError as error:
        raise ConfigError(
            f"data.chat_template: {path}, line {error.lineno}, is not valid Jinja: {error.message} Correct the "
            "template."
        ) from None
    return text


def fix_clock(template: str, day: date) -> str:
    """Return ``template`` with a clock that always says the first second of ``day``.

    transformers takes no function for a template, so a macro of the template itself hides that of transformers.
    """
    if "strftime_now" not in template:
        return template
    moment = datetime.combine(day, time())
    filters = "".join(f" | replace('%{code}', {moment.strftime(f'%{code}')!r})" for code in _CODES)
    return f"{{% macro strftime_now(format) %}}{{{{ format{filters} }}}}{{% endmacro %}}\n{template}"
