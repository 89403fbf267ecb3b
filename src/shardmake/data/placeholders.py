"""Texts of messages, placeholders for them while the shape of a conversation is rendered, and rows that lose one."""

import json
import re
import secrets
from bisect import bisect_right
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any, Final, NamedTuple

from shardmake.core.errors import DataError
from shardmake.data.layout import Message

Span = tuple[int, int]
_LOST: Final = "a part that the chat template does not render"
_TEMPLATE: Final = "with data.chat_template."
_KINDS: Final = {
    "content": ("the text", "Use a role that the template renders (data.format: sharegpt reads names such as human and "
                f"gpt), or name a template that does {_TEMPLATE}"),
    "marked": ("the text", f"Remove </think> from it, or name a template that does not cut there {_TEMPLATE}"),
    "beside": ("the text beside a call of a tool", f"Remove it, or name a template that renders both {_TEMPLATE}"),
    "reasoning": ("the reasoning", f"Remove the reasoning, or name a template that renders it {_TEMPLATE}"),
    "call": ("a call of a tool", f"Name a template that renders calls of tools {_TEMPLATE}"),
    "tools": ("the tools", f"Name a template that renders tools {_TEMPLATE}"),
}  # fmt: skip
"""Kinds of pieces, in words, and cures for their loss."""
_SALT: Final = f"{secrets.randbelow(10**20):020}"
"""Random digits: no text or number of a row is a placeholder."""
PLACEHOLDER: Final = re.compile(rf"((?:Qz|77){_SALT}\d{{9}}(?:zQ|77))")
"""Pattern of what stands for a text, or for a number."""


class BadRowError(DataError):
    """A row that cannot be learned, with a cause and a message; rows of one cause are counted together."""

    def __str__(self) -> str:
        return str(self.args[1])


@dataclass(frozen=True)
class Rendered:
    """The text of one example, and the spans of its characters that are learned."""

    text: str
    learned: tuple[Span, ...]
    is_plain: bool = False
    """No template rendered it: the tokenizer adds its special tokens, and an end of sequence."""


class Piece(NamedTuple):
    """A text of a message that the rendered conversation must have; -1 is the message of the tools."""

    message: int
    kind: str
    text: str
    stand_in: str = ""
    """The placeholder that may stand for it; one of a text, with Q, shows where the message is."""


@lru_cache(1024)
def placeholder(number: int) -> str:
    """Return the text that stands for piece ``number``."""
    return f"Qz{_SALT}{number:09}zQ"


def hide_texts(messages: Sequence[Message], tools: Any) -> tuple[list[dict[str, Any]], list[Piece]]:
    """Return ``messages`` with placeholders, numbered as the pieces, for their texts without the space around them."""
    named = [tool.get("function", tool) for tool in tools or [] if isinstance(tool, dict)]
    pieces = [Piece(-1, "tools", tool["name"]) for tool in named if isinstance(tool, dict) and tool.get("name")]
    hidden, ids = [], dict[str, str]()  # a template may look for the call of a result by its id

    def hide(index: int, kind: str, value: Any) -> Any:
        if isinstance(value, str):
            core, stand_in = value.strip(), placeholder(len(pieces))
            pieces.extend([Piece(index, kind, core, stand_in)] if core else [])
            return value.replace(core, stand_in, 1) if core else value
        if isinstance(value, dict):
            pieces.extend(Piece(index, kind, key) for key in value if key)
            return {key: hide(index, kind, item) for key, item in value.items()}
        if isinstance(value, list):
            return [hide(index, kind, item) for item in value]
        if isinstance(value, int | float) and not isinstance(value, bool):
            pieces.append(Piece(index, kind, json.dumps(value), f"77{_SALT}{len(pieces):09}77"))
            return int(pieces[-1].stand_in)
        return value

    for index, message in enumerate(messages):
        found, content = dict(message), message["content"]
        kind = "beside" if message.get("tool_calls") else "content"
        if message.get("reasoning_content"):
            found["reasoning_content"] = hide(index, "reasoning", message["reasoning_content"])
        head, mark, answer = content.rpartition("</think>") if message["role"] == "assistant" else ("", "", content)
        before, tag, thought = head.rpartition("<think>")
        if mark and not before.strip():  # else, the answer is about these marks
            found["content"] = before + tag + hide(index, "reasoning", thought) + mark + hide(index, kind, answer)
        else:
            found["content"] = hide(index, "marked" if mark else kind, content)
        if isinstance(made := message.get("tool_call_id"), str):
            found["tool_call_id"] = ids.get(made) or hide(index, "id", made)
        if "tool_calls" in message:
            found["tool_calls"] = []
        for written in message.get("tool_calls", ()):
            function = {key: hide(index, "call", part) for key, part in written["function"].items()}
            found["tool_calls"].append(call := {**written, "function": function})
            if isinstance(made := written.get("id"), str):  # some templates render the id, with the name in it
                shaped = re.sub(rf"\b{re.escape(written['function']['name'])}\b", str(function["name"]), made)
                ids[made] = call["id"] = shaped if shaped != made else hide(index, "id", made)
        hidden.append(found)
    return hidden, pieces


def in_real_words(error: BadRowError, pieces: Sequence[Piece]) -> BadRowError | None:
    """Return an ``error`` about a lost part with excerpts of the ``pieces`` in place of their placeholders.

    None for another cause, and for a call that has a number, which a template may write in its own form.
    """
    is_number = _KINDS["call"][0] in str(error) and any(piece.stand_in.startswith("77") for piece in pieces)
    if error.args[0] != _LOST or is_number:
        return None
    return BadRowError(_LOST, PLACEHOLDER.sub(lambda found: excerpt(pieces[_number_of(found[0])].text), str(error)))


def excerpt(text: str) -> str:
    """Return the beginning of ``text`` for an error."""
    return text if len(text) <= 60 else f"{text[:57]}..."


def lost(piece: Piece, role: str) -> BadRowError:
    """Return the error for a ``piece`` of a message with this ``role`` that is not in the rendered text."""
    where = f" of message {piece.message + 1} (role {role!r})" if piece.message >= 0 else ""
    words, cure = _KINDS[piece.kind]
    return BadRowError(_LOST, f"the chat template does not render {words}{where}: {excerpt(piece.text)!r}. {cure}")


def _number_of(text: str) -> int:
    """Return the number of the piece for which the placeholder ``text`` stands."""
    return int(text[2 + len(_SALT) : -2])


def find(text: str, part: str, start: int) -> Span | None:
    """Return where ``part`` is in ``text`` from ``start`` on, as it is or as a template writes JSON."""
    found = ((text.find(form, start), len(form)) for form in _forms(part))
    return next(((at, at + size) for at, size in found if at >= 0), None)


def _forms(text: str) -> Iterator[str]:
    """Yield ``text`` as it is, and as a template writes it in JSON."""
    yield text
    yield json.dumps(text, ensure_ascii=False)[1:-1]
    yield json.dumps(text)[1:-1]


@lru_cache(4096)
def _split(text: str) -> tuple[list[str], list[int], list[int]]:
    """Return ``text`` split at its placeholders, their numbers, and where each part begins."""
    parts = PLACEHOLDER.split(text)
    return parts, [_number_of(part) for part in parts[1::2]], list(accumulate(map(len, parts), initial=0))


def _fill_text(text: str, texts: Sequence[str]) -> list[str]:
    """Return the parts of ``text`` with ``texts`` in place of its placeholders."""
    parts, numbers, _ = _split(text)
    filled = parts.copy()
    filled[1::2] = [texts[number] for number in numbers]
    return filled


def as_written(text: str, texts: Sequence[str], real: str) -> list[str] | None:
    """Return ``texts`` in the form in which ``real`` has them in place of the placeholders of ``text``.

    None if ``real`` is another text.
    """
    if "".join(_fill_text(text, texts)) == real:
        return list(texts)
    parts, numbers, _ = _split(text)
    found, at = list(texts), len(parts[0])
    for number, after in zip(numbers, parts[2::2], strict=True):
        form = next((form for form in _forms(texts[number]) if real.startswith(form + after, at)), None)
        if form is None:
            return None
        found[number], at = form, at + len(form) + len(after)
    return found if "".join(_fill_text(text, found)) == real else None


def fill(example: Rendered, texts: Sequence[str]) -> Rendered:
    """Return ``example`` with ``texts`` in place of its placeholders."""
    before, parts = _split(example.text)[2], _fill_text(example.text, texts)
    after = list(accumulate(map(len, parts), initial=0))

    def moved(at: int) -> int:
        part = bisect_right(before, at) - 1
        return after[part] + at - before[part]

    learned = tuple((moved(start), moved(end)) for start, end in example.learned)
    return Rendered("".join(parts), learned, example.is_plain)


def common_length(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return the length of the common beginning of two texts, or of two lists of tokens."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (left, right) in pairs if left != right), min(len(one), len(other)))


def seam(context: str, whole: str, between: Span, prompt: str, marks: re.Pattern[str]) -> int:
    """Return where an answer follows in ``whole``, which does not begin with its ``context``.

    It is after the longest beginning of the generation ``prompt`` that is ``between`` the message before and the
    answer, whatever its numbers, and after an end of the prompt that follows there, or else after the common beginning
    of both texts, if that has all messages, or else after the longest end of ``context``. No special token, of the
    pattern ``marks``, is cut. Raises `BadRowError` if other words follow than in the prompt.
    """
    floor, start = between
    for end in [found.end() for found in re.finditer(f"{marks.pattern}|(?s:.)", prompt)][::-1]:
        numbered = re.sub(r"\d+", r"\\d+", re.escape(prompt[:end]))  # turns may be counted from the last one
        if found := re.compile(f"(?s:.*){numbered}").match(whole, floor, start):
            at, left, other = found.end(), prompt[end:].lstrip(), whole[found.end() : start].lstrip()
            if left and other and not marks.match(left) and not marks.match(other):
                raise BadRowError(
                    "another header than at inference",
                    f"before an answer the chat template writes {excerpt(prompt[:end] + other)!r}, and its generation "
                    f"prompt is {excerpt(prompt)!r}, so the model would be asked in another way than it was trained. "
                    "Let both agree in a template of your own (data.chat_template), or change what differs.",
                )
            rest = [prompt[mark.start() :] for mark in marks.finditer(prompt, end)]
            return at + next((len(one) for one in rest if whole.startswith(one, at)), 0)
    common = common_length(context, whole)
    if common >= floor:
        return next((mark.start() for mark in marks.finditer(whole) if mark.start() < common < mark.end()), common)
    ends = range(max(0, start - 200), start + 1)
    return max(ends, key=lambda at: (common_length(context[::-1], whole[:at][::-1]), at))


def any_of(tokens: Collection[str]) -> re.Pattern[str]:
    """Return a pattern of ``tokens`` that prefers longer ones, and matches nothing if there are none."""
    return re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or "(?!)")
