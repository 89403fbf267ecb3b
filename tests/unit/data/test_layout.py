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
from shardmake.data.layout import Layout, check_named, recognize, split_prompt
from shardmake.memory.families import FAMILIES
from tests.mixtures import mixture_configs
from tests.unit.data.test_encode import chat

PLACE = "f.jsonl, line 1"
TURNS = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]


def find(example: dict[str, Any], format: Any = "auto", **columns: str) -> Layout:
    data = Data(train="x", format=format, columns=Columns(**columns))
    check_named(data, list(example), "f.jsonl")
    return recognize(data, "sft", example, PLACE)


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
    ({"q": "a", "a": "b"}, {"prompt": "q", "completion": "a"}, "prompt-completion (q, a)"),
    ({"q": "a", "a": "b", "text": "c"}, {"prompt": "q", "completion": "a"}, "prompt-completion (q, a)"),
    ({"task": "a", "output": "b"}, {"instruction": "task"}, "alpaca (task, output)"),
]


@pytest.mark.parametrize(("example", "columns", "expected"), RECOGNIZED)
def test_the_columns_say_the_format(example: dict[str, Any], columns: dict[str, str], expected: str) -> None:
    assert str(find(example, **columns)) == expected


UNCLEAR: list[tuple[dict[str, Any], str, dict[str, str], str]] = [
    (
        {"messages": chat("u:a"), "text": "a"}, "auto", {},
        f"{PLACE}: the columns fit several formats: chat (messages), text (text). Set data.format to one of them.",
    ),
    (
        {"instruction": "a", "output": "b", "text": "c"}, "auto", {},
        f"{PLACE}: the columns fit several formats: alpaca (instruction, output), text (text). Set data.format to one "
        "of them.",
    ),
    (
        {"dialog": [{"who": "human", "said": "a"}]}, "auto", {"messages": "dialog", "role": "who", "content": "said"},
        f"{PLACE}: the columns fit several formats: chat (dialog), sharegpt (dialog). Set data.format to one of them.",
    ),
    (
        {"question": "a", "conversations": [{"who": "a", "what": "b"}]}, "auto", {},
        f"{PLACE}: unknown format. The columns are question, conversations (a list with who, what). Known: chat "
        "(messages), sharegpt (conversations), alpaca (instruction, output), prompt-completion (prompt, completion), "
        "text (text). Name other columns with data.columns.",
    ),
    (
        {"prompt": "a", "chosen": "b", "rejected": "c"}, "auto", {},
        f"{PLACE}: unknown format. The columns are prompt, chosen, rejected. Known: chat (messages), sharegpt "
        "(conversations), alpaca (instruction, output), prompt-completion (prompt, completion), text (text). Set "
        "objective: dpo or reward, which have such data, or name other columns with data.columns.",
    ),
    (
        {"question": "a", "reply": "b"}, "auto", {"prompt": "questoin", "completion": "reply"},
        "data.columns.prompt: 'questoin' is not a column of f.jsonl. Did you mean 'question'? The columns are question, "
        "reply.",
    ),
    ({"prompt": "a"}, "chat", {}, f"{PLACE}: this example (chat) has no messages. Its keys: prompt."),
]  # fmt: skip


@pytest.mark.parametrize(("example", "format", "columns", "message"), UNCLEAR)
def test_what_is_not_clear_is_refused(
    example: dict[str, Any], format: str, columns: dict[str, str], message: str
) -> None:
    assert refusal(example, format, **columns) == message


def test_a_format_of_the_configuration_ends_the_doubt() -> None:
    example = {"instruction": "a", "output": "b", "text": "c"}
    assert find(example, "text").standardize(example, PLACE) == {"text": "c"}


CALL = {"role": "assistant", "tool_calls": [{"id": "1", "name": "clock", "arguments": '{"zone": "UTC"}'}]}
CALLED = {"id": "1", "type": "function", "function": {"name": "clock", "arguments": {"zone": "UTC"}}}
FRAMED = {"type": "function", "function": CALLED["function"]}
OLDER = {"name": "clock", "arguments": '{"zone": "UTC"}'}
STANDARD: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    (
        "sharegpt",
        {"conversations": [{"from": "system", "value": "s"}, *TURNS, {"from": "function", "value": "t", "id": 1}]},
        {"messages": [*chat("s:s", "u:a", "a:b"), {"role": "tool", "content": "t", "id": 1}], "tools": None},
    ),
    ("sharegpt", {"conversations": TURNS, "system": "s"}, {"messages": chat("s:s", "u:a", "a:b"), "tools": None}),
    ("chat", {"messages": chat("u:a", "a:b"), "system": "s"}, {"messages": chat("s:s", "u:a", "a:b"), "tools": None}),
    *(("chat", {"messages": chat("s:s ", "u:a", "a:b"), "system": system},
       {"messages": chat("s:s ", "u:a", "a:b"), "tools": None}) for system in ("s", "other", 7)),
    ("chat", {"messages": chat("u:a", "a:b"), "system": True}, {"messages": chat("u:a", "a:b"), "tools": None}),
    ("chat", {"messages": [{"role": "assistant", "content": "", "function_call": OLDER}]},
     {"messages": [{"role": "assistant", "content": "", "tool_calls": [FRAMED]}], "tools": None}),
    ("chat", {"messages": [{"role": "assistant", "function_call": json.dumps(OLDER)},
                           *({**one, "function_call": {"name": None, "arguments": None}} for one in chat("u:a"))]},
     {"messages": [{"role": "assistant", "content": "", "tool_calls": [FRAMED]}, *chat("u:a")], "tools": None}),
    ("sharegpt", {"conversations": [{"from": "function_call", "value": json.dumps([OLDER])}]},
     {"messages": [{"role": "assistant", "content": "", "tool_calls": [FRAMED]}], "tools": None}),
    ("sharegpt", {"conversations": TURNS, "system": ""}, {"messages": chat("u:a", "a:b"), "tools": None}),
    ("alpaca", {"instruction": "a", "input": "b", "output": "c"}, {"messages": chat("u:a\n\nb", "a:c")}),
    ("alpaca", {"instruction": "a", "input": "", "output": "c"}, {"messages": chat("u:a", "a:c")}),
    ("alpaca", {"instruction": "a", "system": "s", "output": "c"}, {"messages": chat("s:s", "u:a", "a:c")}),
    ("chat", {"messages": chat("u:a"), "tools": '[{"name": "clock"}]'}, {"messages": chat("u:a"),
                                                                         "tools": [{"name": "clock"}]}),
    (
        "chat",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]},
        {"messages": chat("u:ab"), "tools": None},
    ),
    *(
        ("chat", {"messages": [call]}, {"messages": [{"role": "assistant", "content": "", "tool_calls": [CALLED]}],
                                        "tools": None})
        for call in (CALL, {**CALL, "content": None}, {**CALL, "tool_calls": [CALLED], "thinking": None})
    ),
    (
        "chat",
        {"messages": [{"role": "assistant", "content": "a", "thinking": "t", "tool_calls": [], "name": None}],
         "chat_template_kwargs": {"enable_thinking": True}},
        {"messages": [{"role": "assistant", "content": "a", "reasoning_content": "t"}], "tools": None,
         "arguments": {"enable_thinking": True}},
    ),
    (
        "preference",  # as in UltraFeedback
        {"prompt": "a ", "chosen": chat("s:s", "u:a", "a:b"), "rejected": chat("s:s", "u:a", "a:c")},
        {"prompt": chat("s:s", "u:a"), "chosen": chat("a:b"), "rejected": chat("a:c"), "tools": None},
    ),
    (
        "preference",  # one message, as in data of Axolotl and LLaMA-Factory
        {"prompt": chat("u:a"), "chosen": chat("a:b")[0], "rejected": chat("a:c")[0]},
        {"prompt": chat("u:a"), "chosen": chat("a:b"), "rejected": chat("a:c"), "tools": None},
    ),
    ("prompt-completion", {"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": "b", "tools": None}),
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


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("chat", {"messages": [{"role": "user", "content": 7}]}, "messages[0].content is int. Write text, or a list of "
     "parts of type text."),
    ("chat", {"messages": [{"role": "user", "content": ["a"]}]}, "messages[0].content[0] is str. Only text can be "
     "learned: write parts with the keys type (text) and text."),
    ("chat", {"messages": [*chat("u:a"), {"role": "user", "content": [{"type": "image", "url": "u"}]}]},
     "messages[1].content[0] is of type 'image'. Only text can be learned: write parts with the keys type (text) and "
     "text."),
    ("chat", {"messages": [{"role": "user"}]}, "messages[0] has no content. Its keys: role."),
    ("chat", {"messages": [{"role": "user", "content": None}]}, "messages[0] has no content. Its keys: role, content."),
    ("chat", {"messages": [{"role": 1, "content": "a"}]}, "messages[0].role is int, not text."),
    ("chat", {"messages": chat("u:a"), "tools": "{"}, "tools is not valid JSON: Expecting property name enclosed in "
     "double quotes: line 1 column 2 (char 1). Write a list of tools."),
    ("chat", {"messages": chat("u:a"), "tools": {"name": "clock"}}, "tools is dict. Write a list of tools."),
    ("sharegpt", {"conversations": [{"from": "gtp", "value": "a"}]}, "conversations[0].from is 'gtp'. Did you mean "
     "'gpt'? Allowed: system, developer, human, user, gpt, assistant, chatgpt, model, bot, function_call, tool, function, "
     "observation, ipython."),
    ("sharegpt", {"conversations": chat("u:a")}, "conversations is not a list of messages, each with a from and a "
     "value."),
    ("sharegpt", {"conversations": [{"from": "system", "value": "a"}], "system": "b"}, "there are two system messages, "
     "one in system and one in conversations. Remove one."),
    ("alpaca", {"instruction": "a", "input": 3, "output": "b"}, "input is int, not text."),
    ("text", {"text": "a\ud83d"}, "text is not text: \\ud83d is half of a surrogate pair. Write the character whole."),
    *(
        ("chat", row, f"{place} is not text: \\udc00 is half of a surrogate pair. Write the character whole.")
        for place, row in (
            ("messages[0].content", {"messages": chat("u:\udc00")}),
            ("messages[0]", {"messages": [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": {"x": "\udc00"}}]}]}),
            ("tools", {"messages": chat("u:a"), "tools": [{"name": "\udc00"}]}),
            ("chat_template_kwargs", {"messages": chat("u:a"), "chat_template_kwargs": {"x": "\udc00"}}),
        )
    ),
    *(
        ("chat", {"messages": [*chat("u:a"), {"role": "assistant", "content": "b", "weight": weight}]},
         f"messages[1].weight is {weight!r}. Write 0 for a message that is not learned, otherwise 1.")
        for weight in (0.5, "0", True)
    ),
    ("chat", {"messages": [{"role": "user", "content": "a", "weight": 1}]}, "messages[0].weight is 1, but only messages "
     "of the assistant are learned. Remove it."),
    ("preference", {"chosen": [*chat("u:a"), {"role": "assistant", "content": "b", "weight": 0}],
                    "rejected": chat("u:a", "a:c")},
     "chosen[1].weight is 0, which is for supervised fine-tuning alone. Remove it."),
    ("preference", {"prompt": "x", "chosen": chat("u:a", "a:b"), "rejected": chat("u:a", "a:c")}, "prompt is text, and "
     "not the text of a user's message at the start of chosen and rejected. Add that message to both, or write the "
     "prompt as a list of messages."),
    ("chat", {"messages": [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{"}]}]},
     "messages[0].tool_calls[0]: the arguments are not valid JSON: Expecting property name enclosed in double quotes: "
     "line 1 column 2 (char 1). Write an object."),
    ("prompt-completion", {"prompt": "a", "completion": "b", "tools": [{"name": "f"}]}, "tools belongs to a "
     "conversation, and prompt is text. Write both as lists of messages, or remove the tools."),
    ("preference", {"chosen": "a", "rejected": "b"}, "chosen and rejected have no common beginning, so there is no "
     "prompt. Add a prompt."),
    ("preference", {"prompt": "p", "chosen": "a", "rejected": chat("a:b")}, "prompt is text, chosen is text, rejected "
     "is not text. Write all of them as text, or all as lists of messages."),
    ("preference", {"prompt": "p", "chosen": "a"}, "this example (preference) has no rejected. Its keys: prompt, "
     "chosen."),
    ("unpaired-preference", {"prompt": "p", "completion": "a", "label": None}, "this example (unpaired-preference) has "
     "no label. Its keys: prompt, completion."),
    *(
        ("unpaired-preference", {"prompt": "p", "completion": "a", "label": label},
         f"label is {label!r}. Write true or false: is the completion desirable?")
        for label in ("yes", 1)
    ),
    ("unpaired-preference", {"prompt": "p", "completion": chat("a:b"), "label": True}, "completion is list, not text."),
    ("alpaca", {"instruction": "a"}, "this example (alpaca) has no output. Its keys: instruction."),
    ("chat", {"messages": chat("u:<image>a", "a:b"), "images": ["a.png"], "videos": []}, "this example has images. Only "
     "text is trained, also of models that take images or sounds. Remove such examples, or the column if their text "
     "stands alone."),
]  # fmt: skip


@pytest.mark.parametrize(("format", "example", "message"), WRONG)
def test_a_wrong_value_is_named_with_its_place(format: Any, example: dict[str, Any], message: str) -> None:
    assert refusal(example, format) == f"{PLACE}: {message}"


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
