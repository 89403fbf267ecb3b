"""Formats and columns: what is recognized, what the examples become, what is refused, and what the docs name."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from trl.data_utils import extract_prompt, maybe_extract_prompt

from shardmake.config.formats import COMPRESSION_SUFFIXES, DATA_SUFFIXES, FORMATS
from shardmake.config.models import Columns, Data
from shardmake.core.errors import DataError
from shardmake.data.examples import check_named
from shardmake.data.layout import Layout, recognize, split_prompt
from shardmake.memory.families import FAMILIES
from tests.mixtures import mixture_configs
from tests.unit.data.test_encode import chat
from tests.unit.wording import Wording

PLACE = "f.jsonl, line 1"
TURNS = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]


def find(example: dict[str, Any], format: Any = "auto", **columns: str) -> Layout:
    data = Data(train="x", format=format, columns=Columns(**columns))
    check_named(data, list(example), "f.jsonl")
    return recognize(data, "sft", example, PLACE)


@pytest.mark.parametrize("column", ["messages", "conversations"])
def test_the_format_sharegpt_reads_its_roles_under_the_keys_of_chat(column: str) -> None:
    """This is what the refusal of such a role advises."""
    example = {column: [{"role": "human", "content": "a"}, {"role": "gpt", "content": "b"}]}
    assert find(example, "sharegpt").standardize(example, PLACE)["messages"] == chat("u:a", "a:b")


def refusal(example: dict[str, Any], format: Any = "auto", **columns: str) -> str:
    with pytest.raises(DataError) as error:
        find(example, format, **columns).standardize(example, PLACE)
    return str(error.value)


RECOGNIZED: list[tuple[dict[str, Any], dict[str, str], str]] = [
    ({"messages": chat("u:a"), "id": 1}, {}, "chat (messages)"),
    ({"messages": chat("u:a"), "prompt": "a"}, {}, "chat (messages)"),
    ({"conversations": TURNS}, {}, "sharegpt (conversations)"),
    ({"instruction": "a", "input": "", "output": "b"}, {}, "alpaca (instruction, output)"),
    ({"prompt": "a", "completion": "b", "id": 1}, {}, "prompt-completion (prompt, completion)"),
    ({"text": "a", "prompt": "b"}, {}, "text (text)"),
    ({"dialog": chat("u:a")}, {"messages": "dialog"}, "chat (dialog)"),
    ({"dialog": TURNS}, {"messages": "dialog"}, "sharegpt (dialog)"),
    ({"conversations": chat("u:a")}, {"messages": "conversations"}, "chat (conversations)"),
    ({"messages": TURNS}, {"role": "from", "content": "value"}, "chat (messages)"),
    ({"conversations": chat("u:a")}, {}, "chat (conversations)"),
    ({"messages": TURNS}, {}, "sharegpt (messages)"),
    ({"conversations": json.dumps(chat("u:a"))}, {}, "chat (conversations)"),  # a cell of CSV
    ({"q": "a", "a": "b"}, {"prompt": "q", "completion": "a"}, "prompt-completion (q, a)"),
    ({"q": "a", "a": "b", "text": "c"}, {"prompt": "q", "completion": "a"}, "prompt-completion (q, a)"),
    ({"task": "a", "output": "b"}, {"instruction": "task"}, "alpaca (task, output)"),
    ({"query": "a", "response": "b", "history": []}, {}, "alpaca (query, response)"),
]


@pytest.mark.parametrize(("example", "columns", "expected"), RECOGNIZED)
def test_the_columns_say_the_format(example: dict[str, Any], columns: dict[str, str], expected: str) -> None:
    assert str(find(example, **columns)) == str(find(example, expected.split()[0], **columns)) == expected


UNCLEAR: dict[str, tuple[dict[str, Any], str, dict[str, str]]] = {
    "chat or text": ({"messages": chat("u:a"), "text": "a"}, "auto", {}),
    "alpaca or text": ({"instruction": "a", "output": "b", "text": "c"}, "auto", {}),
    "chat or sharegpt": ({"dialog": [{"who": "human", "said": "a"}]}, "auto",
        {"messages": "dialog", "role": "who", "content": "said"}),
    "unknown": ({"question": "a", "conversations": [{"who": "a", "what": "b"}]}, "auto", {}),
    "of another objective": ({"prompt": "a", "chosen": "b", "rejected": "c"}, "auto", {}),
    "no such column": ({"question": "a", "reply": "b"}, "auto", {"prompt": "questoin", "completion": "reply"}),
    "an input": ({"instruction": "a", "input": "b", "output": "c"}, "prompt-completion",
        {"prompt": "instruction", "completion": "output"}),
    "not of the format": ({"prompt": "a"}, "chat", {}),
}  # fmt: skip


@pytest.mark.parametrize("case", UNCLEAR)
def test_what_is_not_clear_is_refused(case: str, wording: Wording) -> None:
    example, format, columns = UNCLEAR[case]
    wording(refusal(example, format, **columns))


def test_a_format_of_the_configuration_ends_the_doubt() -> None:
    example = {"instruction": "a", "output": "b", "text": "c"}
    assert find(example, "text").standardize(example, PLACE) == {"text": "c"}


CALL = {"role": "assistant", "tool_calls": [{"id": "1", "name": "clock", "arguments": '{"zone": "UTC"}'}]}
CALLED = {"id": "1", "type": "function", "function": {"name": "clock", "arguments": {"zone": "UTC"}}}
FRAMED = {"type": "function", "function": CALLED["function"]}
OLDER = {"name": "clock", "arguments": '{"zone": "UTC"}'}


def standard(*messages: Any, **more: Any) -> dict[str, Any]:
    """Return a standard conversation."""
    return {"messages": chat(*messages), "tools": None, **more}


CALLING = {"role": "assistant", "content": "", "tool_calls": [FRAMED]}
STANDARD: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("sharegpt",
     {"conversations": [{"from": "system", "value": "s"}, *TURNS, {"from": "function", "value": "t", "id": 1}]},
     standard("s:s", "u:a", "a:b", {"role": "tool", "content": "t", "id": 1})),
    ("sharegpt", {"conversations": TURNS, "system": "s"}, standard("s:s", "u:a", "a:b")),
    ("chat", {"messages": chat("u:a", "a:b"), "system": "s"}, standard("s:s", "u:a", "a:b")),
    *(("chat", {"messages": chat("s:s ", "u:a"), "system": other}, standard("s:s ", "u:a")) for other in ("s", "other", 7)),
    ("chat", {"messages": chat("u:a", "a:b"), "system": True}, standard("u:a", "a:b")),
    ("chat", {"messages": [{"role": "assistant", "content": "", "function_call": OLDER}]}, standard(CALLING)),
    ("chat", {"messages": [{"role": "assistant", "function_call": json.dumps(OLDER)},
                           *({**one, "function_call": {"name": None, "arguments": None}} for one in chat("u:a"))]},
     standard(CALLING, "u:a")),
    ("sharegpt", {"conversations": [{"from": "function_call", "value": json.dumps([OLDER])}]}, standard(CALLING)),
    ("sharegpt", {"conversations": TURNS, "system": ""}, standard("u:a", "a:b")),
    *(("chat", {"messages": json.dumps(chat("u:a", "a:b")), **more}, standard("u:a", "a:b"))  # cells of CSV
      for more in ({}, {"loss_mask": "", "tools": "", "system": ""})),
    ("chat", {"messages": [*chat("u:a", "a:b"), *({"role": "tool_call", "content": json.dumps(OLDER)} for _ in "12"),
                           {"role": "tool_response", "content": "t"}, {"role": "tool_call", "content": json.dumps(OLDER)}]},
     standard("u:a", {**CALLING, "content": "b", "tool_calls": [FRAMED, FRAMED]}, "t:t", CALLING)),  # ms-swift
    ("chat", {"messages": [{**chat("a:b")[0], "loss": False}, {"role": "tool_call", "content": json.dumps(OLDER)}]},
     standard({**chat("a:b")[0], "weight": 0}, CALLING)),
    ("alpaca", {"instruction": "a", "output": "b", "history": [["c", "d"]]}, {"messages": chat("u:c", "a:d", "u:a", "a:b")}),
    ("alpaca", {"instruction": "a", "output": "b", "history": "[]"}, {"messages": chat("u:a", "a:b")}),  # a cell of CSV
    ("alpaca", {"instruction": "a", "input": "b", "output": "c"}, {"messages": chat("u:a\n\nb", "a:c")}),
    ("alpaca", {"instruction": "a", "input": "", "output": "c"}, {"messages": chat("u:a", "a:c")}),
    ("alpaca", {"instruction": "a", "system": "s", "output": "c"}, {"messages": chat("s:s", "u:a", "a:c")}),
    ("chat", {"messages": chat("u:a"), "tools": '[{"name": "clock"}]'}, standard("u:a", tools=[{"name": "clock"}])),
    ("chat", {"messages": [{"role": "user", "content": [{"type": "text", "text": one} for one in "ab"]}]}, standard("u:ab")),
    *(
        ("chat", {"messages": [call]}, standard({"role": "assistant", "content": "", "tool_calls": [CALLED]}))
        for call in (CALL, {**CALL, "content": None}, {**CALL, "tool_calls": [CALLED], "thinking": None})
    ),
    ("chat", {"messages": [{"role": "assistant", "content": "a", "thinking": "t", "tool_calls": [], "name": None}],
              "chat_template_kwargs": {"enable_thinking": True}},
     standard({"role": "assistant", "content": "a", "reasoning_content": "t"}, arguments={"enable_thinking": True})),
    ("preference", {"prompt": "a ", "chosen": chat("s:s", "u:a", "a:b"), "rejected": chat("s:s", "u:a", "a:c")},
     {"prompt": chat("s:s", "u:a"), "chosen": chat("a:b"), "rejected": chat("a:c"), "tools": None}),  # UltraFeedback
    ("preference", {"prompt": chat("u:a"), "chosen": chat("a:b")[0], "rejected": chat("a:c")[0]},
     {"prompt": chat("u:a"), "chosen": chat("a:b"), "rejected": chat("a:c"), "tools": None}),  # Axolotl, LLaMA-Factory
    *(("preference", {"prompt": prompt, "chosen": chat(*more, "a:b"), "rejected": chat(*more, "a:c")},
       {"prompt": chat("u:a"), "chosen": chat("a:b"), "rejected": chat("a:c"), "tools": None})
      for prompt, more in (("a", ()), (chat("u:a"), ("u:a",)))),  # a prompt as text, and one that the answers repeat
    ("preference", {"prompt": "a", "chosen": json.dumps(chat("u:a", "a:b")), "rejected": json.dumps(chat("u:a", "a:c"))},
     {"prompt": chat("u:a"), "chosen": chat("a:b"), "rejected": chat("a:c"), "tools": None}),  # cells of CSV
    ("prompt-completion", {"prompt": json.dumps(chat("u:a")), "completion": json.dumps(chat("a:b"), indent=1)},
     {"prompt": chat("u:a"), "completion": chat("a:b"), "tools": None}),
    ("prompt-completion", {"prompt": json.dumps(chat("u:a")[0]), "completion": json.dumps(chat("a:b")[0])},
     {"prompt": chat("u:a"), "completion": chat("a:b"), "tools": None}),
    ("chat", {"messages": json.dumps(chat("u:a", "a:b")), "loss_mask": "[0, 1]", "tools": ['{"name": "clock"}']},
     standard(*({**one, "weight": at} for at, one in enumerate(chat("u:a", "a:b"))), tools=[{"name": "clock"}])),
    ("chat", {"messages": [{"role": "assistant", "content": None, "tool_calls": json.dumps([OLDER])}]}, standard(CALLING)),
    *(("chat", {"messages": [{"role": "assistant", "tool_calls": [{"name": "now", "arguments": none}]}]},
       standard({**CALLING, "tool_calls": [{"type": "function", "function": {"name": "now", "arguments": {}}}]}))
      for none in (None, "", "null", {})),
    *(("prompt-completion", {"prompt": f"{json.dumps(chat('u:a'))} Say who.", "completion": answer},
       {"prompt": f"{json.dumps(chat('u:a'))} Say who.", "completion": answer, "tools": None})
      for written in ([{"role": "user", "name": "b"}], [{"role": "actor", "content": "b"}], [{"from": "a", "value": 3}],
                      [{"name": "f", "arguments": {"from": "a", "role": "user", "content": "b"}}])
      for answer in (json.dumps(written), f"{json.dumps(written)}\n[]", str(chat("u:a")[0]))),  # not a conversation
    ("prompt-completion", {"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": "b", "tools": None}),
    ("unpaired-preference", {"prompt": "a", "completion": "b", "label": "False"},
     {"prompt": "a", "completion": "b", "label": False, "tools": None}),
]  # fmt: skip


@pytest.mark.parametrize(("format", "example", "expected"), STANDARD)
def test_every_format_becomes_a_standard_one(format: Any, example: dict[str, Any], expected: dict[str, Any]) -> None:
    assert Layout(format, FORMATS[format].columns).standardize(example, PLACE) == expected


@pytest.mark.parametrize(("chosen", "rejected"), [("q: a", "q: b"), ("abc", "abd"), ("abc", "ab"), ("same", "same")])
def test_the_prompt_is_that_of_trl(chosen: str, rejected: str) -> None:
    example: dict[str, Any] = {"chosen": chosen, "rejected": rejected}
    assert split_prompt(chosen, rejected) == extract_prompt(example)


def test_a_repeated_prompt_is_that_of_trl() -> None:
    example = {"prompt": "a", "chosen": chat("u:a", "a:b", "u:c", "a:d"), "rejected": chat("u:a", "a:b", "u:c", "a:e")}
    found = Layout("preference", FORMATS["preference"].columns).standardize(example, PLACE)
    assert found == {**maybe_extract_prompt(example), "tools": None}


@pytest.mark.parametrize(("objective", "more", "expected"), [
    ("dpo", {"rejected_response": "c"}, {"chosen": chat("a:b"), "rejected": chat("a:c")}),
    ("dpo", {"rejected_messages": chat("s:s", "u:a", "a:c")}, {"chosen": chat("a:b"), "rejected": chat("a:c")}),
    ("kto", {"label": True}, {"completion": chat("a:b"), "label": True}),
])  # fmt: skip
def test_preferences_of_ms_swift_begin_with_the_whole_conversation(objective: Any, more: Any, expected: Any) -> None:
    example = {"messages": chat("s:s", "u:a", "a:b"), **more}
    found = recognize(Data(train="x"), objective, example, PLACE).standardize(example, PLACE)
    assert found == {"prompt": chat("s:s", "u:a"), "tools": None, **expected}


def said(role: Any, **keys: Any) -> dict[str, Any]:
    """Return a conversation whose second message has ``role`` and ``keys``."""
    return {"messages": chat("u:a", {"role": role, **keys})}


WRONG: dict[str, tuple[str, dict[str, Any]]] = {
    "a number as content": ("chat", said("user", content=7)),
    "a part that is text": ("chat", said("user", content=["a"])),
    "a part that is an image": ("chat", said("user", content=[{"type": "image", "url": "u"}])),
    "no content": ("chat", said("user")),
    "content null": ("chat", said("user", content=None)),
    "a number as role": ("chat", said(1, content="a")),
    "tools without an end": ("chat", {"messages": chat("u:a"), "tools": "{"}),
    "one tool": ("chat", {"messages": chat("u:a"), "tools": {"name": "clock"}}),
    "an unknown speaker": ("sharegpt", {"conversations": [{"from": "gtp", "value": "a"}]}),
    "a key of chat": ("sharegpt", {"conversations": [{"from": "human", "content": "a"}]}),
    "two system messages": ("sharegpt", {"conversations": [{"from": "system", "value": "a"}], "system": "b"}),
    "a number as input": ("alpaca", {"instruction": "a", "input": 3, "output": "b"}),
    "half a pair": ("text", {"text": "a\ud83d"}),
    "half a pair in content": ("chat", {"messages": chat("u:\udc00")}),
    "half a pair in a call": ("chat", said("assistant", tool_calls=[{"name": "f", "arguments": {"x": "\udc00"}}])),
    "half a pair in tools": ("chat", {"messages": chat("u:a"), "tools": [{"name": "\udc00"}]}),
    "half a pair in arguments": ("chat", {"messages": chat("u:a"), "chat_template_kwargs": {"x": "\udc00"}}),
    **{f"weight {one!r}": ("chat", said("assistant", content="b", weight=one)) for one in (0.5, "0", True)},
    "train of a user": ("chat", said("user", content="a", train=True)),
    "two marks": ("chat", said("assistant", content="b", train=False, weight=1)),
    "a mask of tokens": ("chat", {"messages": chat("u:a", "a:b"), "loss_mask": [0, 0, 1]}),
    "a mask that is not JSON": ("chat", {"messages": chat("u:a", "a:b"), "loss_mask": "0 1"}),
    "a mask of a text": ("text", {"text": "a", "loss_mask": [1]}),
    "a mask of a user": ("chat", {"messages": chat("u:a", "a:b"), "loss_mask": [True, True]}),
    "a part of a message": ("chat", said("assistant", content="b", train_detail=[{"begin_offset": 0}])),
    "history": ("prompt-completion", {"prompt": "a", "completion": "b", "history": [["c", "d"]]}),
    "a flat history": ("alpaca", {"instruction": "a", "output": "b", "history": ["c", "d"]}),
    "a number as history": ("alpaca", {"instruction": "a", "output": "b", "history": 5}),
    "a question beside a pair": ("preference", {"question": "q", "chosen": "The one", "rejected": "The other"}),
    "no answer": ("preference", {"prompt": chat("u:a"), "chosen": chat("u:a", "a:b"), "rejected": chat("u:a")}),
    "other questions": ("preference", {"chosen": chat("s:s", "u:a", "a:b"), "rejected": chat("s:s", "u:c", "a:b")}),
    "a call that is text": ("chat", said("tool_call", content="f(x)")),
    "weight of a user": ("chat", said("user", content="a", weight=1)),
    "weight in a pair": ("preference", {"chosen": said("assistant", content="b", weight=0)["messages"],
                                        "rejected": chat("u:a", "a:c")}),
    "another prompt": ("preference", {"prompt": "x", "chosen": chat("u:a", "a:b"), "rejected": chat("u:a", "a:c")}),
    "a call without an end": ("chat", said("assistant", tool_calls=[{"name": "f", "arguments": "{"}])),
    "tools of a text": ("prompt-completion", {"prompt": "a", "completion": "b", "tools": [{"name": "f"}]}),
    "messages as Python writes them": ("preference", {"chosen": str(chat("u:a", "a:b")), "rejected": str(chat("u:a", "a:c"))}),
    "messages that end too early": ("chat", {"messages": json.dumps(chat("u:a", "a:b"))[:-3]}),
    "a conversation as an answer": ("prompt-completion", {"prompt": "p", "completion": json.dumps(chat("u:a", "a:b"))}),
    "a message as an answer": ("prompt-completion", {"prompt": "p", "completion": json.dumps(chat("a:b")[0])}),
    "a tool that is not JSON": ("chat", {"messages": chat("u:a", "a:b"), "tools": ["clock"]}),
    "a tool without text": ("chat", {"messages": chat("u:a", "a:b"), "tools": [""]}),
    "no common beginning": ("preference", {"chosen": "a", "rejected": "b"}),
    "text and messages": ("preference", {"prompt": "p", "chosen": "a", "rejected": chat("a:b")}),
    "one answer": ("preference", {"prompt": "p", "chosen": "a"}),
    **{f"label {one!r}": ("unpaired-preference", {"prompt": "p", "completion": "a", "label": one})
       for one in (None, "yes", 1)},
    "a completion of messages": ("unpaired-preference", {"prompt": "p", "completion": chat("a:b"), "label": True}),
    "no output": ("alpaca", {"instruction": "a"}),
    "no key": ("prompt-completion", {}),
    "images": ("chat", {"messages": chat("u:<image>a", "a:b"), "images": ["a.png"], "videos": []}),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_value_is_named_with_its_place(case: str, wording: Wording) -> None:
    format, example = WRONG[case]
    wording(refusal(example, format))


def test_a_named_column_of_system_texts_is_not_ignored() -> None:
    layout = find({"messages": chat("s:a", "u:b"), "system": "c"}, "chat", system="system")
    for system, words in (("c", "two system messages"), (7, "system is int, not text")):
        with pytest.raises(DataError, match=words):
            layout.standardize({"messages": chat("s:a", "u:b"), "system": system}, PLACE)


ROOT = Path(__file__).parents[3]
PAGE, KEYS = ((ROOT / name).read_text() for name in ("docs/reference/models-and-data.md", "config/README.md"))
EXAMPLES = dict(re.findall(r"^\| `([\w-]+)` \| `(\{.*?\})` \|", PAGE, re.MULTILINE))


@pytest.mark.parametrize("name", FORMATS)
def test_an_example_is_recognized_by_its_columns(name: str) -> None:
    example = json.loads(EXAMPLES[name])
    objective = {"preference": "dpo", "unpaired-preference": "kto"}.get(name, "sft")
    layout = recognize(Data(train="x"), objective, example, PLACE)
    assert layout.format == name and layout.standardize(example, PLACE) and EXAMPLES.keys() == FORMATS.keys()


@pytest.mark.parametrize("word", [*FAMILIES, *mixture_configs()])
def test_the_page_names_families(word: str) -> None:
    assert f"`{word}`" in PAGE


@pytest.mark.parametrize("suffix", [*DATA_SUFFIXES, *COMPRESSION_SUFFIXES])
def test_the_page_of_keys_names_kinds_of_files(suffix: str) -> None:
    assert f"`{suffix}`" in KEYS
