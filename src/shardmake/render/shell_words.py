"""Words of a shell's commands: how values are split into them, and which of them hold commands."""

import re
from typing import Final

_UNKNOWN: Final = 0xE100
"""Start of the private characters that stand for those of a text whose value is unknown."""
HERE: Final = {"PWD": ["."], "SLURM_SUBMIT_DIR": ["."]}
"""Variables that a shell sets to the folder in which a script starts, where files are looked for."""


def unknown(text: str) -> str:
    """Return ``text`` in characters that stand for a value that only a shell knows."""
    return "".join(chr(_UNKNOWN + ord(one)) if ord(one) < 256 else one for one in text)


def is_unknown(word: str) -> bool:
    """Return whether a part of ``word`` is unknown."""
    return re.search("[\ue100-\ue1ff]", word) is not None


def written(word: str) -> str:
    """Return ``word`` as the script has it."""
    return "".join(chr(ord(one) - _UNKNOWN) if _UNKNOWN <= ord(one) < _UNKNOWN + 256 else one for one in word)


def spread(word: str, begun: bool, values: list[str], done: list[str]) -> tuple[str, bool]:
    """Split ``values`` at blanks, as a shell does without quotes; return the last word, which may be continued."""
    first, *others = re.split(r"\s+", " ".join(values))
    word, begun = word + first, begun or bool(first)
    for part in others:
        done += [word] if begun else []
        word, begun = part, bool(part)
    return word, begun


def shell_text(words: list[str]) -> str | None:
    """Return the commands that a shell gets as a text, as in ``srun bash -lc "torchrun ..."``; None for others."""
    if words[0] == "eval":
        return " ".join(words[1:])
    for word, text in zip(words, [*words[1:], ""], strict=True):
        if word.startswith("--wrap"):
            return word.partition("=")[2] or text
    for shell, option, text in zip(words, words[1:], words[2:], strict=False):
        if re.fullmatch(r"(?:.*/)?(?:ba|da|z|k)?sh", shell) and re.fullmatch(r"-\w*c", option):
            return text
    return None


def without_content(word: str, files: set[str]) -> str:
    """Return ``word`` with the name of one of ``files``, which the script writes itself, as what only a shell knows."""
    name = word.rpartition("=")[2]
    return word[: -len(name)] + unknown(name) if name in files else word
