"""Words of a shell's commands: how values are split into them, and which of them hold commands."""

import re


def spread(word: str, begun: bool, values: list[str], done: list[str]) -> tuple[str, bool]:
    """Split ``values`` at blanks, as a shell does without quotes; return the last word, which may be continued."""
    for text in values:
        if text[:1].isspace() and begun:
            done.append(word)
            word, begun = "", False
        parts = text.split()
        for number, part in enumerate(parts):
            if number and begun:
                done.append(word)
                word = ""
            word, begun = word + part, True
        if (text[-1:].isspace() or text is not values[-1]) and begun:
            done.append(word)
            word, begun = "", False
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
