"""Report words that a reader of Slurm, DeepSpeed and transformers would have to learn; CONTRIBUTING.md lists the style.

``python -m tools.check_words`` checks names, messages, docstrings and comments in the repository, and the length of the
changelog's entries.
"""

import re
import sys
from pathlib import Path

CHECKED = ("src", "workflow", "profiles", "envs", "config", "docs", "tests", "benchmarks", "examples", ".")
SUFFIXES = (".py", ".smk", ".md", ".rst", ".yaml", ".sh", ".jinja")
BANNED = re.compile(
    r"(?<![a-z])(tell|tells|telling|told|hear|hears|heard|hearing|doz(?:e|es|ed|ing)|mend(?:s|ed|ing)?|heed(?:s|ed)?"
    r"|ladders?|rungs?|census|ghosts?|nursery|in peace|calm|lifeline|ledger|disguises?|unmask(?:s|ed)?|last words"
    r"|complaints?|without a word|for ever|in vain|acted out|go on|goes on|going on|went on|lives on|one's own"
    r"|(?<!there )(?:is|are|was|were) no(?= )(?! (?:longer|more|fewer))|\"\"\"(?:what|whether|where|who))(?![a-z])",
    re.IGNORECASE,
)
ENTRY = len("- ") + 100
"""The longest line of the changelog."""
ALLOWED = (".tell()", "Tell me about {name}.")
"""Exact text that holds one of these words and stays, such as a quotation of another program's output."""


def findings(root: Path) -> list[str]:
    """Return ``FILE:LINE: WORD: text`` for every banned word and long entry below ``root``."""
    files = [path for top in CHECKED for path in sorted((root / top).glob("*" if top == "." else "**/*"))]
    found = []
    for path in files:
        if path.suffix not in SUFFIXES and path.name not in ("Makefile", "Snakefile"):
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            for match in BANNED.finditer(line):
                if not any(text in line for text in ALLOWED):
                    found.append(f"{path.relative_to(root)}:{number}: {match[0]!r}: {line.strip()[:100]}")
            if path.name == "CHANGELOG.md" and len(line) > ENTRY:
                found.append(f"{path.relative_to(root)}:{number}: over 100 characters: {line}")
    return found


if __name__ == "__main__":
    found = findings(Path(__file__).resolve().parents[1])
    sys.exit("\n".join([*found, f"{len(found)} findings."]) if found else 0)
