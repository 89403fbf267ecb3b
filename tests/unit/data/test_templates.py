"""Every chat template of the installed TRL with conversations as people have them, against the reference.

`python -m tests.unit.data.test_templates` writes the table of the docs.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from shardmake.config.formats import FORMATS
from shardmake.core.errors import DataError
from shardmake.data.chat import ChatTemplate
from shardmake.data.encode import Encoder
from shardmake.data.layout import Layout
from tests.unit.data.reference import TEMPLATES, expected, in_parts, stops_of, tokenizer_for
from tests.unit.data.test_encode import chat, talk

Row = dict[str, Any]
_FUNCTION = {"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}
_CALL = {"type": "function", "id": "abcdefghi", "function": _FUNCTION}
_PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
_DESCRIBED = {"name": "get_weather", "description": "Weather of a city.", "parameters": _PARAMETERS}
_TOOL: Row = {"type": "function", "function": _DESCRIBED}
_CALLED = chat(
    "u:What is the weather in Paris?", {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {"role": "tool", "name": "get_weather", "tool_call_id": "abcdefghi", "content": "sunny"}, "a:It is sunny.",
)  # fmt: skip
_THOUGHT = {"role": "assistant", "content": "It is sunny.", "reasoning_content": "The window shows it."}
CONVERSATIONS: dict[str, Row] = {
    "one turn": talk("u:What is it?", "a:It is sunny."),
    "system": talk("s:Be brief.", "u:What is it?", "a:It is sunny."),
    "two turns": talk("u:What is it?", "a:It is sunny.", "u:Where?", "a:In Paris."),
    "three turns, system": talk("s:Be brief.", "u:What?", "a:Sun.", "u:Where?", "a:In Paris.", "u:Why?", "a:It is so."),
    "last turn of the user": talk("u:What is it?", "a:It is sunny.", "u:Thank you"),
    "assistant first": talk("a:Hello, traveller.", "u:What is it?", "a:It is sunny."),
    "answer with line breaks": talk("u:What is it?", "a:\n\nIt is\n\n\nsunny.\n"),
    "two answers": talk("u:What is it?", "a:It is sunny.", "a:In Paris."), "reasoning": talk("u:What is it?", _THOUGHT),
    "reasoning in two turns": talk("u:What is it?", _THOUGHT, "u:Where?", _THOUGHT),
    "reasoning in the text": talk("u:What?", "a:<think>\nThe window shows it.\n</think>\n\nIt is sunny."),
    "tool call": {"messages": _CALLED, "tools": [_TOOL]}, "tool call without tools": {"messages": _CALLED},
    "developer": talk("d:Be brief.", "u:What is it?", "a:It is sunny."),
    "unknown role": talk("h:What is it?", "a:It is sunny."),
}  # fmt: skip


def _encoder(tokenizer: Any, name: str) -> Encoder:
    template = ChatTemplate(tokenizer, frozenset(stops_of(name)))
    return Encoder(template, Layout("chat", FORMATS["chat"].columns), assistant_only=True)


def _learned(tokenizer: Any, ids: list[int], mask: list[bool]) -> list[tuple[list[int], list[int]]]:
    """Return each learned run of tokens with all tokens before it."""
    starts = [n for n, on in enumerate(mask) if on and not mask[n - 1]]
    ends = [n for n, on in enumerate(mask, start=1) if on and not (mask[n] if n < len(mask) else False)]
    return [(ids[:a], ids[a:b]) for a, b in zip(starts, ends, strict=True)]


def outcome(name: str, row: Row, tokenizer: Any = None) -> str:
    """Return right, apart, refused with its reason, or what is wrong."""
    tokenizer = tokenizer or tokenizer_for(name)
    encoder = _encoder(tokenizer, name)
    try:
        encoded = encoder(row, "here")
    except DataError as error:
        return f"refused: {error}"
    found = [pair for ids, mask in encoded for pair in _learned(tokenizer, ids, mask)]
    answers = [index for index, message in enumerate(row["messages"]) if message["role"] == "assistant"]
    if len(found) != len(answers):
        return f"wrong: {len(found)} turns of {len(answers)}"
    for index, (before, said) in zip(answers, found, strict=True):
        try:
            context, follows = expected(tokenizer, in_parts(name, row), index, stops_of(name))
        except Exception as error:  # the template takes this turn only with what follows
            context, follows = "", str(error)
            if not tokenizer.decode(said).strip().endswith(tuple(stops_of(name))):
                return f"wrong: {tokenizer.decode(said)!r}"
            continue
        if before + said != tokenizer(context + follows, add_special_tokens=False)["input_ids"]:
            return f"wrong: {tokenizer.decode(before)!r} + {tokenizer.decode(said)!r}, not {context!r} + {follows!r}"
        if len(tokenizer.decode(before)) > len(context):
            return f"wrong: {tokenizer.decode(said)!r} is less than {follows!r}"
    return "apart" if len(encoded) > 1 else "right"


PAGE = Path(__file__).parents[3] / "docs/reference/chat-templates.md"
REASONS = {
    "which ends it": "closed", "rejects this conversation": "rejected", "does not name": "role", "the text of": "text",
    "the reasoning of": "reasoning", "a call of a tool": "call", "render the tools": "tools",
}  # fmt: skip

SAME = dict.fromkeys(("one turn", "last turn of the user", "answer with line breaks"), "right") | {
    "unknown role": "role"
}
"""Outcomes that every template has, which the page states in words."""


def cells_of(name: str, tokenizer: Any = None) -> tuple[str, ...]:
    """Return the cells of a template in the page, by a small tokenizer or by ``tokenizer``."""
    cells = []
    for title, row in CONVERSATIONS.items():
        found = outcome(name, row, tokenizer)
        assert not found.startswith("wrong"), f"{title}: {found}"
        is_refused = found.startswith("refused")
        words = [word for reason, word in REASONS.items() if reason in found]
        assert words or not is_refused, found
        cells.append(words[0] if is_refused else found)
    return tuple(cells)


def read_page() -> dict[str, tuple[str, ...]]:
    """Return the outcomes of each template in the page, in the order of the conversations."""
    lines = [line for line in PAGE.read_text("utf-8").splitlines() if line.startswith("| ")]
    (_, *titles), *rows = [line.removeprefix("| ").removesuffix(" |").split(" | ") for line in lines]
    found = {}
    for names, *cells in rows:
        outcomes = SAME | dict(zip(titles, [cell or "right" for cell in cells], strict=True))
        ends = [(name.rstrip("+"), end) for name in names.split(", ") for end in ("", "_training")[: 1 + ("+" in name)]]
        found |= {name + end: tuple(outcomes[title] for title in CONVERSATIONS) for name, end in ends}
    return found


def table(outcomes: dict[str, tuple[str, ...]]) -> str:
    """Return the table of the page for the cells of each template."""
    titles = [title for title in CONVERSATIONS if title not in SAME]
    rows: dict[tuple[str, ...], list[str]] = {}
    for name, cells in sorted(outcomes.items()):
        shown = dict(zip(CONVERSATIONS, cells, strict=True))
        assert SAME.items() <= shown.items(), name
        names = rows.setdefault(tuple(shown[title].replace("right", "") for title in titles), [])
        if (plain := name.removesuffix("_training")) in names:
            names[names.index(plain)] += "+"
        else:
            names.append(name)
    lines = [f"| {' | '.join((', '.join(names), *cells))} |" for cells, names in rows.items()]
    return "\n".join([f"| template | {' | '.join(titles)} |", f"|---{'|---' * len(titles)}|", *lines, ""])


def test_the_table_is_read_as_it_is_written() -> None:
    assert PAGE.read_text("utf-8").endswith(f"\n\n{table(read_page())}")


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_a_template_of_trl_gives_what_the_model_must_say_or_a_reason(name: str) -> None:
    assert read_page()[name] == cells_of(name)


def test_added_tokens_of_space_are_not_marks() -> None:
    """As Gemma's, whose line break does not end a reasoning."""
    tokenizer = tokenizer_for("gemma3")
    tokenizer.add_tokens(["\n", "\n\n"])
    assert cells_of("gemma3", tokenizer) == read_page()["gemma3"]


def test_few_of_the_pairs_that_trl_trains_are_refused() -> None:
    """A pair counts where TRL's training template keeps all texts; rows with a role that is none are refused by name."""
    page = read_page()
    cells = {name: dict(zip(CONVERSATIONS, held, strict=True)) for name, held in page.items()}
    trained, refused = 0, []
    for name in [name for name in TEMPLATES if f"{name}_training" in TEMPLATES]:
        for title, row in CONVERSATIONS.items():
            if title != "unknown role" and _trl_keeps_all(name, in_parts(name, row)):
                trained += 1
                refused += [f"{name}, {title}"] if cells[name][title] not in ("right", "apart") else []
    assert trained > 330 and len(refused) <= 0.02 * trained, refused


def _trl_keeps_all(name: str, row: Row) -> bool:
    tokenizer = tokenizer_for(name)
    settings = {"tools": row.get("tools"), "chat_template": TEMPLATES[f"{name}_training"], "return_dict": True}
    try:
        found = tokenizer.apply_chat_template(row["messages"], return_assistant_tokens_mask=True, **settings)
    except Exception:  # a template may raise anything
        return False
    said = json.dumps([row["messages"], [tool["function"]["description"] for tool in row.get("tools", [])]])
    words = ("What", "Where", "Why", "sunny", "In Paris", "brief", "window", "traveller", "Thank you", "get_weather")
    text = tokenizer.decode(found["input_ids"])
    return any(found["assistant_masks"]) and all(word in text for word in (*words, "Weather of a city") if word in said)


if __name__ == "__main__":
    head, _, _ = PAGE.read_text("utf-8").partition("| template |")
    PAGE.write_text(head + table({name: cells_of(name) for name in TEMPLATES}), "utf-8")
