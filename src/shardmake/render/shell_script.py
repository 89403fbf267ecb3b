"""Shell scripts as a list of simple commands, with the variables and arrays that the script itself sets.

A script is read twice, in its order. What needs a shell to evaluate, such as a substitution, a parameter or a variable
from outside, becomes *unknown* characters within a word: they show what is written, and their value is never guessed.
A variable whose value depends on a branch or on the turn of a loop is unknown as well.
"""

import contextlib
import re
from bisect import bisect_right
from collections import ChainMap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final

from shardmake.core.errors import ConfigError
from shardmake.render.shell_words import HERE, is_unknown, shell_text, spread, unknown, without_content

_RESERVED: Final = ("if", "then", "elif", "else", "fi", "while", "until", "do", "done", "esac", "!", "time", "{", "}")
_DECLARES: Final = ("export", "declare", "local", "readonly", "typeset")
_NAME: Final = re.compile(r"[A-Za-z_]\w*")
_ASSIGNMENT: Final = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_PARAMETER: Final = re.compile(r"\$(?:\w+|[@*#?$!-])")
_VALUE: Final = re.compile(r"([A-Za-z_]\w*)(\[[@*]\])?(?::?[-?=].*)?", re.DOTALL)
_REDIRECTION: Final = re.compile(r"\d*(&>>?|<<<|<<-?|>>|[<>]&|>\||<>|[<>])(?!\()[ \t]*")
_OPERATOR: Final = re.compile(r"&&|\|\||;;&?|;&|\|&|[;&|()]")
_WHOLE_ARRAY: Final = re.compile(r'"\$\{(\w+)\[@\]\}"')
_FUNCTION: Final = re.compile(r"(?:([\w.-]+)\s*\(\s*\)|function\s+([^\s(]+)(?:\s*\(\s*\))?)\s*$")
_SETS: Final = ("read", "let", "mapfile", "readarray", "unset", "getopts")
"""Commands that set the variables that they name."""
_ENVIRONMENT: Final = "/activate"
"""End of the name of a file that changes no variable of a training; any other one may set all of them."""
_ELEMENT: Final = re.compile(r"([A-Za-z_]\w*)\[[^]]*\]\+?=")
_LAST_ENDED: Final = re.compile(r";[;&]+(?:\s|#[^\n]*\n)*esac\s*$")
_BREAKS: Final = " \t\n;&|()<>"
_BLANK: Final = re.compile(r"(?:[ \t\r]|\\\n|#[^\n]*)+")
_Values = ChainMap[str, list[str]]
"""Variables; the first mapping has those that the innermost block set."""


@dataclass(frozen=True)
class ShellCommand:
    """The words of one simple command, and the line on which it begins."""

    line: int
    words: list[str]


def read_commands(name: str, text: str) -> list[ShellCommand]:
    """Return the simple commands of a script in the order of its lines, also those in the text of ``bash -c``.

    Raises `ConfigError` if a quote or a bracket is not closed.
    """
    first = _Reader(name, text)
    list(first.commands())
    only = {name: given[0] for name, given in first.given.items() if len(given) == 1}
    second = _Reader(name, text, loops=first.changed, only=only)
    found = list(second.commands())
    return [replace(one, words=[without_content(word, second.writes) for word in one.words]) for one in found]


@dataclass
class _Block:
    """A part of the script that runs any number of times, and the values before it."""

    kind: str
    start: int
    before: _Values
    name: str = ""
    ends: list[Mapping[str, list[str]]] = field(default_factory=list)
    """Variables that each branch set."""
    otherwise: bool = False
    """One of the branches runs in any case."""


@dataclass
class _Reader:
    """A position in the text of a script, and what its variables hold there."""

    name: str
    text: str
    values: _Values = field(default_factory=ChainMap)
    loops: Mapping[int, set[str]] = field(default_factory=dict)
    """Variables that a loop changes, by its position: they are unknown at its start."""
    only: dict[str, list[str]] = field(default_factory=dict)
    """Variables that the script sets once, which a function has whenever it is called."""
    at: int = 0
    tests: bool = False
    """The commands are the condition of a branch or a loop."""
    changed: dict[int, set[str]] = field(default_factory=dict)
    functions: dict[str, set[str]] = field(default_factory=dict)
    """Variables that each function changes, by its name."""
    given: dict[str, list[list[str]]] = field(default_factory=dict)
    blocks: list[_Block] = field(default_factory=list)
    documents: list[str] = field(default_factory=list)
    """Delimiters of here-documents whose text begins on the next line."""
    writes: set[str] = field(default_factory=set)
    """Files to which the output of a command goes."""

    # --- commands ---

    def commands(self) -> Iterator[ShellCommand]:
        """Yield each command that is not an assignment, and remember the assignments."""
        words: list[str] = []
        start, joined, guarded = 0, "", False
        while (separator := self._separator()) or self.at < len(self.text) or words:
            if separator or self.at >= len(self.text):
                guarded = joined == "||" or (joined == "&&" and guarded)
                yield from self._run(words, start, guarded)
                guarded = separator in ("&&", "||") and (guarded or words[:1] in (["["], ["[["], ["test"]))
                words, joined = [], separator
                if separator == ";;":
                    self._branch(otherwise=False)
                continue
            start = start if words else self.at
            is_first = all(_ASSIGNMENT.match(word) for word in words) or words[0] in _DECLARES
            words = self._keywords([*words, *self._word(at_start=is_first)], start)

    def _run(self, words: list[str], start: int, guarded: bool) -> Iterator[ShellCommand]:
        """Yield a command, or those in the text that a shell gets; set the variables of an assignment."""
        if words == ["*"] and self.blocks:
            self.blocks[-1].otherwise = True
        is_flag = self.tests and bool(words) and is_unknown(words[0])
        if not words or is_flag or words[0] in ("for", "select", "case", "function", "*"):
            return
        names = words[1:] if words[0] in _DECLARES else words
        first = next((at for at, word in enumerate(words) if not _ASSIGNMENT.match(word)), 0)
        if words[first] in _SETS or words[first : first + 2] == ["printf", "-v"]:
            for word in words[first + 1 :]:
                self._forget(re.match(r"\w*", word)[0])  # type: ignore[index]
        elif element := _ELEMENT.match(words[0]):
            self._forget(element[1])
        elif words[0] in _DECLARES or all(_ASSIGNMENT.match(word) for word in words):
            for word in names:
                if found := _ASSIGNMENT.match(word):
                    value = word[found.end() :]
                    values = [value] if value[:1] != "\0" else value[1:].split("\0") if value[1:] else []
                    self._assign(found[1], values, value[:1] == "\0", extends=bool(found[2]), guarded=guarded)
        elif words[0] in ("source", ".") and len(words) > 1:
            if self.values and not words[1].endswith(_ENVIRONMENT):
                yield ShellCommand(self._line(start), words)
                for name in list(self.values):
                    self._forget(name)
        else:
            for name in self.functions.get(words[0], ()):
                self._forget(name)
            if words[0] in ("tee", "cp", "mv"):
                self.writes.add(words[-1])
            line, inner = self._line(start), shell_text(words)
            if inner is None:
                yield ShellCommand(line, words)
            else:
                reader = _Reader(f"{self.name}, line {line}", inner, self.values.new_child())
                with contextlib.suppress(ConfigError):  # its quotes may be in a value that only a shell knows
                    yield from (ShellCommand(line, one.words) for one in reader.commands())

    def _keywords(self, words: list[str], start: int) -> list[str]:
        """Return ``words`` without those that only steer the script, and follow its branches and loops."""
        word = words[0] if words else ""
        if word in ("for", "select") and len(words) == 2:
            self._forget(words[1])
        if word == "case" and words[-1] == "in" and len(words) >= 3:
            self._begin("case", start)
            return []
        if word not in _RESERVED or len(words) > 1:
            return words
        self.tests = word in ("if", "elif", "while", "until") or (self.tests and word not in ("then", "do"))
        if word in ("if", "do", "{"):
            function = _FUNCTION.search(self.text[max(0, start - 200) : start])
            self._begin("function" if function else word, start)
            self.blocks[-1].name = (function[1] or function[2]) if function else ""
            for name in self.loops.get(start, ()) if word == "do" else ():
                self.values[name] = [unknown(f"${name}")]
        elif word in ("elif", "else"):
            self._branch(otherwise=word == "else")
        elif word in ("fi", "done", "esac", "}"):
            self._end()
        return []

    def _begin(self, kind: str, start: int) -> None:
        self.blocks.append(_Block(kind, start, self.values))
        self.values = ChainMap({}, self.only) if kind == "function" else self.values.new_child()

    def _branch(self, *, otherwise: bool) -> None:
        if self.blocks:
            block = self.blocks[-1]
            block.ends.append(self.values.maps[0])
            block.otherwise |= otherwise
            self.values = block.before.new_child()

    def _end(self) -> None:
        """Leave a block: what its branches set to several values is unknown."""
        if not self.blocks:
            return
        block = self.blocks.pop()
        last, self.values = self.values.maps[0], block.before
        before = self.only if block.kind == "function" else block.before
        changed = {name for name, values in last.items() if values != before.get(name)}
        self.changed[block.start] = changed
        if block.kind == "{":
            self.values.update(last)
            return
        if block.kind == "function":
            self.functions[block.name] = changed
            self.values.update({name: [unknown(f"${name}")] for name in changed})
            return
        ends = [*block.ends, last, *([] if block.otherwise else [{}])]
        if block.kind == "case" and block.otherwise and _LAST_ENDED.search(self.text[max(0, self.at - 500) : self.at]):
            ends.remove(last)
        merged = {}
        for key in {name for end in ends for name in end}:
            found = [end.get(key, before.get(key)) for end in ends]
            merged[key] = _common(key, [one for one in found if one is not None], len(found))
        self.values.update(merged)

    # --- variables ---

    def _assign(self, name: str, values: list[str], is_array: bool, *, extends: bool, guarded: bool) -> None:
        if extends:
            before = self.values.get(name, [unknown(f"${name}")])
            values = before + values if is_array else ["".join(before[:1] + values), *before[1:]]
        if guarded:  # as in a branch without else
            known = self.values.get(name)
            values = _common(name, [values] if known is None else [known, values], 2)
        self._set(name, values)

    def _forget(self, name: str) -> None:
        if name:
            self._set(name, [unknown(f"${name}")])

    def _set(self, name: str, values: list[str]) -> None:
        self.values[name] = values
        known = self.given.setdefault(name, [])
        if len(known) < 2 and values not in known:  # two are as good as more
            known.append(values)

    # --- words ---

    def _separator(self) -> str:
        """Skip blanks, comments and redirections; return the operator that ends the command, or an empty text."""
        while self.at < len(self.text):
            rest = self.text[self.at : self.at + 3]
            if found := _BLANK.match(self.text, self.at):
                self.at = found.end()
            elif rest[0] == "\n":
                self._skip_documents()
                return "\n"
            elif rest.startswith("(("):
                start, self.at = self.at, self._matching(self.at, "(", ")")
                for set_here in re.finditer(r"([A-Za-z_]\w*)\s*(?:[-+*/%]?=(?!=)|\+\+|--)", self.text[start : self.at]):
                    self._forget(set_here[1])
            elif found := _REDIRECTION.match(self.text, self.at):
                operator, start = found[1], found.end()
                self.at = start
                words = self._word(at_start=False)
                self.writes.update(words if ">" in operator and "&" not in operator else ())
                if operator in ("<<", "<<-"):
                    self.documents.append(re.sub(r"[\\'\"]", "", self.text[start : self.at]))
            elif found := _OPERATOR.match(rest):
                self.at += len(found[0])
                return found[0][:2] if found[0].startswith(";;") else found[0]
            else:
                return ""
        return ""

    def _skip_documents(self) -> None:
        self.at += 1
        for delimiter in self.documents:
            while self.at < len(self.text):
                start, self.at = self.at, (self.text.find("\n", self.at) + 1) or len(self.text) + 1
                if self.text[start : self.at].strip() == delimiter:
                    break
        self.documents.clear()

    def _word(self, *, at_start: bool) -> list[str]:
        """Return the words that the next word of the text becomes: none, one or several."""
        done: list[str] = []
        word, begun, assigns = "", False, False
        while self.at < len(self.text) and self.text[self.at] not in _BREAKS:
            one = self.text[self.at]
            if one == "'":
                end = self._close("'")
                word, begun = word + self.text[self.at + 1 : end], True
                self.at = end + 1
            elif not begun and (found := _WHOLE_ARRAY.match(self.text, self.at)) and found[1] in self.values:
                done += self.values[found[1]]
                self.at = found.end()
            elif one == '"':
                self.at += 1
                word, begun = self._quoted(word), True
            elif one == "\\":
                word += self.text[self.at + 1 : self.at + 2].replace("\n", "")
                begun, self.at = True, self.at + 2
            elif one in "$`":
                values, is_word = self._expansion()
                if assigns or is_word:
                    word, begun = word + " ".join(values), True
                else:
                    word, begun = spread(word, begun, values, done)
            else:
                word, begun, self.at = word + one, True, self.at + 1
                if one == "=" and at_start and _ASSIGNMENT.fullmatch(word):
                    assigns = True
                    if self.text[self.at : self.at + 1] == "(":
                        return [word + "\0" + "\0".join(self._array())]
        if self.at < len(self.text) and self.text[self.at] in "<>" and self.text[self.at + 1 : self.at + 2] == "(":
            start, self.at = self.at, self._matching(self.at + 1, "(", ")")
            word, begun = word + unknown(self.text[start : self.at]), True
        return [*done, word] if begun else done

    def _array(self) -> list[str]:
        """Return the values of an array in round brackets."""
        self.at += 1
        values: list[str] = []
        while self.at < len(self.text):
            separator = self._separator()
            if separator == ")":
                return values
            if not separator and self.at < len(self.text):
                values += self._word(at_start=False)
        raise self._unclosed(len(self.text), "(")

    def _quoted(self, word: str) -> str:
        """Return ``word`` with the text up to the next double quote."""
        start = self.at
        while self.at < len(self.text):
            one = self.text[self.at]
            if one == '"':
                self.at += 1
                return word
            if one == "\\" and self.text[self.at + 1 : self.at + 2] in '$`"\\\n':
                word += self.text[self.at + 1].replace("\n", "")
                self.at += 2
            elif one in "$`":
                word += " ".join(self._expansion(quoted=True)[0])
            else:
                word, self.at = word + one, self.at + 1
        raise self._unclosed(start, '"')

    def _expansion(self, *, quoted: bool = False) -> tuple[list[str], bool]:
        """Return the values of what begins with a dollar sign or a backquote, and if they are one word.

        ``quoted`` says that it stands in double quotes.
        """
        start, rest = self.at, self.text[self.at + 1 : self.at + 2]
        if self.text[start] == "`":
            self.at = self._close("`") + 1
        elif rest == "(":
            self.at = self._matching(start + 1, "(", ")")
        elif rest == "{":
            self.at = self._matching(start + 1, "{", "}")
            found = _VALUE.fullmatch(self.text[start + 2 : self.at - 1])
            if found and (values := self.values.get(found[1], HERE.get(found[1]))) is not None:
                return (values if found[2] else values[:1] or [""]), False
        elif rest == "'" and not quoted:
            self.at += 1
            end = self._close("'")
            text, self.at = self.text[self.at + 1 : end], end + 1
            return [text], True
        elif found := _PARAMETER.match(self.text, start):
            self.at = found.end()
            if (values := self.values.get(found[0][1:], HERE.get(found[0][1:]))) is not None:
                return values[:1] or [""], False
        else:
            self.at += 1
            return ["$"], True
        return [unknown(self.text[start : self.at])], False

    def _close(self, quote: str) -> int:
        pattern = r"(?:[^\\`]|\\.)*`" if quote == "`" else rf"[^{quote}]*{quote}"
        if (found := re.compile(pattern, re.DOTALL).match(self.text, self.at + 1)) is None:
            raise self._unclosed(self.at, quote)
        return found.end() - 1

    def _matching(self, start: int, opening: str, closing: str) -> int:
        depth, at, quoted = 0, start, False
        while at < len(self.text):
            one = self.text[at]
            if one == "\\":
                at += 1
            elif one == '"':
                quoted = not quoted
            elif one == "'" and not quoted and (end := self.text.find("'", at + 1)) > 0:
                at = end
            depth += (one == opening) - (one == closing)
            at += 1
            if not depth:
                return at
        raise self._unclosed(start, opening)

    def _unclosed(self, at: int, mark: str) -> ConfigError:
        return ConfigError(f"Cannot check {self.name}, line {self._line(at)}: {mark} is not closed. Close it.")

    def _line(self, at: int) -> int:
        return bisect_right(self._ends_of_lines, at - 1) + 1

    @cached_property
    def _ends_of_lines(self) -> list[int]:
        return [found.start() for found in re.finditer("\n", self.text)]


def _common(name: str, found: list[list[str]], ends: int) -> list[str]:
    """Return the values that a variable has after each of the branches; what only some of them add is unknown."""
    least, more = min(found, key=lambda one: (len(one), len("".join(one)))), unknown(f"${{{name}[@]}}")
    if len(found) < ends:
        return [unknown(f"${name}")]
    if all(one == least for one in found):
        return least
    appended = re.compile(re.escape(least[0]) + r"(\s.*)?" if least[0] else ".*", re.DOTALL) if least else None
    if appended and len(least) == 1 and all(len(one) == 1 and appended.fullmatch(one[0]) for one in found):
        return [f"{least[0]} {more}"]
    return [*least, more] if all(one[: len(least)] == least for one in found) else [unknown(f"${name}")]
