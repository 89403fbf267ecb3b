"""Layout of the examples: their format, and the columns that it reads.

`recognize` determines the layout once, from the configuration and the first rows. The layout then converts each example
into one of five standard forms: messages with role and content, prompt and completion, the same with a label, prompt
with a chosen and a rejected answer, or text.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product, zip_longest
from typing import Any, Final, TypeVar

from shardmake.config.formats import FORMATS, RAW, DataFormat
from shardmake.config.models import Data, Objective
from shardmake.config.objectives import OBJECTIVES
from shardmake.core.errors import DataError, nearest
from shardmake.data.json_text import holds_messages, keys_of_messages, parse, read_json

Example = Mapping[str, Any]
Message = Mapping[str, Any]
_Value = TypeVar("_Value")
REASONING_KEYS: Final = ("reasoning_content", "thinking", "reasoning")
"""Keys of a message that hold what the model thinks before it answers."""
MASK: Final = "loss_mask"
"""Column of what is learned: one entry for each message."""
HISTORY: Final = "history"
"""Column of earlier turns beside an instruction, as LLaMA-Factory and ms-swift write them."""
_MARKS: Final = ("train", "training", "train_detail", "loss", "loss_scale", MASK, "step_loss_mask", "weight")
"""Keys of Axolotl, ms-swift, VeOmni, slime and OpenAI that are 0 or false for a message that is not learned."""
MESSAGE_KEYS: Final = (*REASONING_KEYS, *_MARKS, "tool_calls", "function_call", "tool_call_id")
"""Keys of a message with a meaning of their own, beside its role and its text."""
_CALL: Final = '{"function": {"name": "...", "arguments": {...}}}'
_ROLES: Final[Mapping[str, str]] = {
    "system": "system", "developer": "developer", "human": "user", "user": "user", "gpt": "assistant",
    "assistant": "assistant", "chatgpt": "assistant", "model": "assistant", "bot": "assistant",
    "function_call": "assistant", "tool": "tool", "function": "tool", "observation": "tool", "ipython": "tool",
    "tool_call": "assistant", "tool_response": "tool",
}  # fmt: skip
"""Roles of ShareGPT and ms-swift, and the roles that chat templates use for them."""
_CALLING: Final = ("function_call", "tool_call")
"""Roles of messages whose text is a call of a tool, or a list of calls, as JSON."""
_OTHER_COLUMNS: Final[Sequence[tuple[DataFormat, Mapping[str, str]]]] = (
    ("sharegpt", {"messages": "messages"}), ("alpaca", {"instruction": "query", "output": "response"}),
    *(("sharegpt", {"messages": of, "role": "role", "content": "content"}) for of in ("messages", "conversations")),
    ("chat", {"messages": "conversations"}), ("preference", {"chosen": "messages", "rejected": "rejected_response"}),
    ("preference", {"chosen": "messages", "rejected": "rejected_messages"}),
    ("unpaired-preference", {"prompt": "messages", "completion": "messages"}),
)  # fmt: skip
"""Columns of one kind of conversation with the keys of the other, and those of ms-swift."""
_QUESTIONS: Final = ("instruction", "question", "query", "input")
"""Columns that hold the prompt of a pair in data sets for other tools."""
_MEDIA: Final = ("image", "images", "video", "videos", "audio", "audios")
"""Columns of data sets whose conversations refer to images, films or sounds."""
ELSEWHERE: Final[Mapping[str, str]] = {
    **dict.fromkeys(("system", "system_prompt", "system_message"), "the system message"), "functions": "the tools",
    "context": "the input", "margin": "the margin of a pair's rewards",
}  # fmt: skip
"""Columns from which other tools take something that changes the training."""


@dataclass(frozen=True)
class Layout:
    """A format with the name of every column that it reads."""

    format: DataFormat
    columns: Mapping[str, str]
    named: frozenset[str] = frozenset()
    """Columns that ``data.columns`` names."""

    def __str__(self) -> str:
        required = ", ".join(dict.fromkeys(self.columns[column] for column in FORMATS[self.format].required))
        return f"{self.format} ({required})"

    def standardize(self, example: Example, place: str) -> dict[str, Any]:
        """Return ``example`` in the standard form of its format, with tools where a chat template takes them.

        ``place`` names the example in errors. Raises `DataError` for a missing column and for a value of another type.
        """
        try:
            return self._standard({name: value for name, value in example.items() if value is not None})
        except DataError as error:
            raise DataError(f"{place}: {error}") from None

    def written(self, example: Example) -> dict[str, Any]:
        """Return the columns of ``example`` that have messages as text, such as JSON in a cell of CSV, and that JSON.

        The JSON is None if the text cannot be read.
        """
        names = {self.columns.get(column) for column in ("messages", "prompt", "completion", "chosen", "rejected")}
        keys = {"role", "from", self.columns.get("role", "role")}
        contents = {"content", "value", "tool_calls", self.columns.get("content", "content")}
        texts = {name: value for name, value in example.items() if name in names and isinstance(value, str)}
        found = {name: (text, read_json(text)) for name, text in texts.items() if text.lstrip()[:1] in ("[", "{")}
        whole = {self.columns.get("messages")}  # never text
        return {
            name: value
            for name, (text, value) in found.items()
            if (name in whole and text.lstrip()[0] == "[") or holds_messages(text, value, keys, contents, _ROLES)
        }

    def _standard(self, example: Example) -> dict[str, Any]:
        for name, value in self.written(example).items():
            example = {**example, name: value or parse(example[name], f"{name} is", "a list of messages", None)}
        mask = parse(example.get(MASK), f"{MASK} is", "a list of 0 and 1", None)
        example = {name: value for name, value in {**example, MASK: mask}.items() if value is not None}
        if media := [name for name in _MEDIA if example.get(name) and name not in self.columns.values()]:
            raise DataError(
                f"this example has {' and '.join(media)}. Only text is trained, also of models that take images or "
                "sounds. Remove such examples, or the column if their text stands alone."
            )
        parts = {HISTORY: list, **({"input": str} if self.columns.get("prompt") == "instruction" else {})}
        beside = [name for name, kind in parts.items() if isinstance(example.get(name), kind) and example[name]]
        if "prompt" in self.columns and beside:
            raise DataError(
                f"this example has {' and '.join(beside)} beside {self.columns['prompt']}, which answers would lack. "
                "Write the whole conversation as messages, or all of the prompt into one text."
            )
        masked = example.get(MASK, []), example.get(self.columns.get("messages", ""), [])
        if MASK in example and not (all(isinstance(one, list) for one in masked) and len({*map(len, masked)}) == 1):
            raise DataError(
                f"{MASK} says what is learned of this example, and has no entry for each of its messages. Write "
                "weight: 0 in messages that are not learned, and remove the column."
            )
        missing = [self.columns[c] for c in FORMATS[self.format].required if self.columns[c] not in example]
        if missing:
            raise DataError(
                f"this example ({self.format}) has no {' and no '.join(missing)}. Its keys: "
                f"{', '.join(example) or 'none'}."
            )
        if self.format == "text":
            return {"text": self._text(example, "text")}
        if self.format == "alpaca":
            return {"messages": self._instruction(example)}
        found: dict[str, Any] = {"tools": _tools(example.get(self.columns["tools"]), self.columns["tools"])}
        name = self.columns["template_arguments"]
        if arguments := parse(example.get(name), f"{name} is", "an object of template arguments", None):
            if not isinstance(arguments, dict):
                raise DataError(f"{name} is {type(arguments).__name__}. Write an object of template arguments.")
            found["arguments"] = _encodable(arguments, name)
        if self.format == "preference":
            found |= self._pair(example)
        elif self.format == "chat" or self.format == "sharegpt":
            found["messages"] = self._with_system(example, self._messages(example, "messages"))
        elif self.columns["prompt"] == self.columns["completion"]:
            messages = self._messages(example, "completion")
            found |= {"prompt": messages[:-1], "completion": messages[-1:]}
        else:
            read = self._text if isinstance(example[self.columns["prompt"]], str) else self._messages
            found |= {column: read(example, column) for column in ("prompt", "completion")}
        if self.format == "unpaired-preference":
            label = example[name := self.columns["label"]]
            found["label"] = label_of(label)
            if found["label"] is None:
                raise DataError(f"{name} is {label!r}. Write true or false: is the completion desirable?")
        if isinstance(found.get("prompt"), str) and found["tools"]:
            raise DataError(
                f"{self.columns['tools']} belongs to a conversation, and {self.columns['prompt']} is text. Write both "
                "as lists of messages, or remove the tools."
            )
        return found

    def _text(self, example: Example, column: str, *, optional: bool = False) -> str:
        name = self.columns.get(column, column)
        if optional and name not in example:
            return ""
        if not isinstance(example[name], str):
            is_talk = isinstance(example[name], list | dict)
            both = " Write all as text, or all as lists of messages." if is_talk else ""
            raise DataError(f"{name} is {type(example[name]).__name__}, not text.{both}")
        return _encodable(example[name], name)

    def _instruction(self, example: Example) -> list[Message]:
        """Return an Alpaca example as a conversation; the input follows the instruction after an empty line.

        The column history may have pairs of earlier texts, which LLaMA-Factory and ms-swift learn as well.
        """
        asked, given = self._text(example, "instruction"), self._text(example, "input", optional=True)
        last = [f"{asked}\n\n{given}" if given else asked, self._text(example, "output")]
        earlier = parse(example.get(HISTORY), f"{HISTORY} is", "a list of pairs", None) or []
        roles = ("user", "assistant")
        turns = [*earlier, last] if isinstance(earlier, list) else [earlier]
        if not all(isinstance(turn, list) and [type(text) for text in turn] == [str, str] for turn in turns):
            raise DataError(
                f"{HISTORY} is not a list of pairs, each a question and its answer as texts. Write it so, or remove it."
            )
        said = [pair for turn in turns for pair in zip(roles, _encodable(turn, HISTORY), strict=True)]
        return self._with_system(example, [{"role": role, "content": text} for role, text in said])

    def _with_system(self, example: Example, messages: list[Message]) -> list[Message]:
        """Return ``messages`` after the system message of a column of its own, if there is one.

        In the format chat, a column that ``data.columns`` does not name counts only as text, and for conversations
        without such a message.
        """
        name, has_own = self.columns["system"], messages[0]["role"] == "system"
        if self.format == "chat" and "system" not in self.named and (has_own or not isinstance(example.get(name), str)):
            return messages
        text = self._text(example, "system", optional=True)
        if not text or (has_own and messages[0]["content"].strip() == text.strip()):
            return messages
        if has_own:
            raise DataError(
                f"there are two system messages, one in {name} and one in {self.columns['messages']}. Remove one."
            )
        return [{"role": "system", "content": text}, *messages]

    def _pair(self, example: Example) -> dict[str, Any]:
        """Return prompt, chosen and rejected, all text or all messages; a prompt of their own is their common start.

        A text as the prompt of two conversations, as in UltraFeedback, must be that of a user's message in their common
        start, so that no other prompt is ignored; before answers alone it is that message.
        """
        prompt, chosen, rejected = (example.get(self.columns[column]) for column in ("prompt", "chosen", "rejected"))
        if isinstance(chosen, list) and isinstance(rejected, str):  # ms-swift's: in place of the last message
            other = dict(zip((self.columns["role"], self.columns["content"]), ("assistant", rejected), strict=True))
            example = {**example, self.columns["rejected"]: [*chosen[:-1], other]}
        is_apart = isinstance(prompt, str) and isinstance(chosen, list | dict)
        columns = ["prompt"] * (prompt is not None and not is_apart) + ["chosen", "rejected"]
        kinds = {self.columns[column]: isinstance(example[self.columns[column]], str) for column in columns}
        if len(set(kinds.values())) > 1:
            described = ", ".join(f"{name} is {'text' if text else 'not text'}" for name, text in kinds.items())
            raise DataError(f"{described}. Write all of them as text, or all as lists of messages.")
        read = self._text if all(kinds.values()) else self._messages
        found: dict[str, Any] = {column: read(example, column) for column in columns}
        if is_apart and {found[column][0]["role"] for column in columns} == {"assistant"}:
            return {"prompt": [{"role": "user", "content": self._text(example, "prompt")}], **found}
        pair = found if "prompt" in found else split_prompt(found["chosen"], found["rejected"])
        if isinstance(pair["chosen"], list):
            pair = self._answers(pair)
        is_text = isinstance(pair["prompt"], str)
        asked = pair["prompt"] if is_text else [m["content"].strip() for m in pair["prompt"] if m["role"] == "user"]
        beside = [self.columns["prompt"]] if is_apart else _QUESTIONS if is_text and prompt is None else ()
        for name in beside:
            if isinstance(text := example.get(name), str) and text.strip() not in asked:
                raise DataError(
                    f"{' and '.join(kinds)} do not begin with the text of {name}. Write both with it, "
                    f"{'' if is_apart else 'name it with data.columns.prompt, '}or remove it."
                )
        return pair

    def _answers(self, pair: dict[str, Any]) -> dict[str, Any]:
        """Return a ``pair`` of messages without a prompt that both answers repeat; raise `DataError` for no answers."""
        size = len(pair["prompt"])
        answers = {column: pair[column] for column in ("chosen", "rejected")}
        if all(answer[:size] == pair["prompt"] for answer in answers.values()):
            answers = {column: answer[size:] for column, answer in answers.items()}
        first = next((both for both in zip_longest(*answers.values()) if both[0] != both[1]), ())
        if any(message and message["role"] != "assistant" for message in first):
            raise DataError(
                f"{self.columns['chosen']} and {self.columns['rejected']} differ before a message of the assistant. "
                "Only answers to one prompt can be compared. Write the same messages before both."
            )
        for column, answer in answers.items():
            if all(message["role"] != "assistant" for message in answer):
                raise DataError(
                    f"{self.columns[column]} has no message of the assistant after the prompt. Add its answer."
                )
        return {"prompt": pair["prompt"], **answers}

    def _messages(self, example: Example, column: str) -> list[Message]:
        role, content, name = self.columns["role"], self.columns["content"], self.columns[column]
        messages = [example[name]] if isinstance(example[name], dict) else example[name]
        if not (isinstance(messages, list) and messages and all(isinstance(m, dict) and role in m for m in messages)):
            raise DataError(f"{name} is not a list of messages, each with a {role} and a {content}.")
        if column == "messages" and MASK in example:
            messages = [{**message, MASK: entry} for message, entry in zip(messages, example[MASK], strict=True)]
        found = list[Message]()
        for number, message in enumerate(messages):
            try:
                made, before = self._message(message, role, content), (found or [{"role": ""}])[-1]
            except DataError as error:
                raise DataError(f"{name}[{number}]{error}") from None
            is_alike = before["role"] == made["role"] and is_learned(before) == is_learned(made)
            if message[role] == "tool_call" and is_alike:
                found[-1] = {**before, "tool_calls": [*before.get("tool_calls", ()), *made["tool_calls"]]}
            else:
                found.append(made)
        return found

    def _message(self, message: Message, role: str, content: str) -> Message:
        """Return ``message`` under the usual keys; errors begin with the rest of its place."""
        if len(message) == 2 and message[role] not in _CALLING and isinstance(message.get(content), str):
            return {"role": self._role(message[role], role), "content": _encodable(message[content], f".{content}")}
        rest = {key: value for key, value in message.items() if key not in (role, content) and value is not None}
        older = parse(rest.pop("function_call", None), ".function_call is", _CALL, None)
        if isinstance(older, dict) and all(value is None for value in older.values()):  # as Parquet returns none
            older = None
        calls = _calls(parse(rest.pop("tool_calls", None), ".tool_calls is", f"[{_CALL}]", None), ".tool_calls")
        calls = calls or _calls([older] if older else None, ".function_call")
        if message[role] in _CALLING:
            made = parse(message.get(content), f".{content} is", _CALL, None)
            message, calls = {**message, content: ""}, _calls(made if isinstance(made, list) else [made], f".{content}")
        if message.get(content) is None and not calls:
            raise DataError(f" has no {content}. Its keys: {', '.join(message)}.")
        found = {"role": self._role(message[role], role), "content": _join(message.get(content), f".{content}"), **rest}
        if rest and any(thoughts := [found.pop(key) for key in REASONING_KEYS if key in found]):
            found["reasoning_content"] = _join(next(filter(None, thoughts)), ".reasoning_content")
        if calls:
            found["tool_calls"] = calls
        marks = [key for key in _MARKS if key in rest]
        for key in marks:
            self._check_weight(found, rest[key], key)
        if len({rest[key] for key in marks}) > 1:
            raise DataError(f": {' and '.join(f'{key} is {rest[key]}' for key in marks)}. Keep one of them.")
        if marks:
            found = {key: value for key, value in found.items() if key not in marks} | {"weight": int(rest[marks[0]])}
        return _encodable(found, "") if rest or calls else found

    def _check_weight(self, message: Message, weight: Any, key: str) -> None:
        """Raise `DataError` for a weight that is not followed; 0 leaves an assistant's message unlearned."""
        if (isinstance(weight, bool) and key == "weight") or weight not in (0, 1):
            raise DataError(f".{key} is {weight!r}. Write 0 for a message that is not learned, otherwise 1.")
        if message["role"] != "assistant" and weight == 1:
            raise DataError(f".{key} is {weight}, but only messages of the assistant are learned. Remove it.")
        if message["role"] == "assistant" and weight == 0 and "preference" in self.format:
            raise DataError(f".{key} is {weight}, which is for supervised fine-tuning alone. Remove it.")

    def _role(self, role: Any, name: str) -> str:
        if not isinstance(role, str):
            raise DataError(f".{name} is {type(role).__name__}, not text.")
        if self.format != "sharegpt" and name != "from" and role not in (*_CALLING, "tool_response"):
            return role
        if role not in _ROLES:
            raise DataError(f".{name} is {role!r}.{nearest(role, _ROLES)} Allowed: {', '.join(_ROLES)}.")
        return _ROLES[role]


def is_learned(message: Message) -> bool:
    """Return True for a message of the assistant, unless it has weight 0, as in OpenAI's format."""
    return message["role"] == "assistant" and message.get("weight") != 0


def label_of(value: Any) -> bool | None:
    """Return a label, which is text in CSV; None for another value."""
    return {"true": True, "false": False}.get(str(value).lower())


def split_prompt(chosen: Any, rejected: Any) -> dict[str, Any]:
    """Return the common beginning of two texts or two conversations as the prompt, and the rest of each.

    If one is the beginning of the other, its last character or message is an answer. A space before the answers belongs
    to them, as in TRL, because most tokenizers join it with the next word. Raises `DataError` if nothing is common.
    """
    limit = min(len(chosen), len(rejected))
    length = next((i for i in range(limit) if chosen[i] != rejected[i]), limit)
    if length == limit or (length > 0 and chosen[length - 1] == " "):
        length -= 1
    if length <= 0:
        raise DataError("chosen and rejected begin differently, without a prompt. Add one, or set data.columns.prompt.")
    return {"prompt": chosen[:length], "chosen": chosen[length:], "rejected": rejected[length:]}


def _join(content: Any, place: str) -> str:
    """Return the text of a message: text as it is, a list of text parts joined, nothing for a call of a tool."""
    if isinstance(content, str):
        return _encodable(content, place)
    if not isinstance(content, list | None):
        raise DataError(f"{place} is {type(content).__name__}. Write text, or a list of parts of type text.")
    for index, part in enumerate(content or []):
        if not (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)):
            kind = f"of type {part.get('type')!r}" if isinstance(part, dict) else type(part).__name__
            raise DataError(
                f"{place}[{index}] is {kind}. Only text can be learned: write parts with the keys type (text) and text."
            )
    return _encodable("".join(part["text"] for part in content or []), place)


def _encodable(value: _Value, place: str) -> _Value:
    """Return ``value``; raise `DataError` for half of a surrogate pair, which JSON can hold and no tokenizer takes."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"{ascii(text[error.start])[1:-1]} is half of a surrogate pair. Write the character whole."
        raise DataError(f"{place} is not text: {half}") from None
    return value


def _calls(calls: Any, place: str) -> list[dict[str, Any]]:
    """Return calls of tools in OpenAI's form, with arguments as objects; they may be JSON in text, or lack a frame."""
    if calls is not None and not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
        raise DataError(f"{place} is not a list of calls. Write each as {_CALL}.")
    found = []
    for index, call in enumerate(calls or []):
        function = call["function"] if isinstance(call.get("function"), dict) else call
        arguments = function.get("arguments", function.get("parameters", {}))
        arguments = parse(arguments, f"{place}[{index}]: the arguments are", "an object", None)
        arguments = {} if arguments is None else arguments
        if not isinstance(arguments, dict) or not isinstance(function.get("name"), str):
            raise DataError(f"{place}[{index}] is not a call with a name and arguments. Write {_CALL}.")
        frame = call if function is not call else {key: call[key] for key in ("id",) if key in call}
        found.append({"type": "function", **frame, "function": {"name": function["name"], "arguments": arguments}})
    return found


def _tools(tools: Any, place: str) -> list[Any] | None:
    """Return the descriptions of tools, which may be JSON in text, together or each."""
    tools = parse(tools, f"{place} is", "a list of tools", None)
    if isinstance(tools, list):
        tools = [parse(tool, f"{place}[{at}] is", "a description of a tool", None) for at, tool in enumerate(tools)]
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise DataError(f"{place} is not a list of objects. Write a list of tools.")
    return _encodable(tools, place) if tools else None


def recognize(data: Data, objective: Objective, first: Example, place: str) -> Layout:
    """Return the layout of examples, of which ``first`` at ``place`` is the first.

    Raises `DataError` if no format fits, and if several do.
    """
    named, given = data.columns.named, data.format
    assert given != RAW, "raw data has no layout"

    def layouts_of(objective: Objective) -> list[Layout]:
        allowed = OBJECTIVES[objective].data_formats if given == "auto" else (given,)
        fit = {one: FORMATS[one].columns for one in allowed if named.keys() <= FORMATS[one].columns.keys()}
        return [Layout(format, {**columns, **named}, frozenset(named)) for format, columns in fit.items()]

    layouts = layouts_of(objective)
    fitting = [layout for layout in layouts if _fits(layout, first)]
    if not fitting:
        rows = [row for row in _OTHER_COLUMNS if given != "auto" or "role" not in row[1]]  # else they are those of chat
        pairs = ((one, other) for one, (format, other) in product(layouts, rows) if one.format == format)
        swapped = [replace(one, columns={**one.columns, **other, **named}) for one, other in pairs]
        fitting = [layout for layout in swapped if _fits(layout, first)] or (layouts if given != "auto" else [])
    if len(fitting) > 1:
        raise DataError(
            f"{place}: the columns fit several formats: {', '.join(map(str, fitting))}. Set data.format to one of them."
        )
    if not fitting:
        others = [name for name in OBJECTIVES if any(_fits(layout, first) for layout in layouts_of(name))]
        hint = f"Set objective: {' or '.join(others)}, which have such data, or name" if others else "Name"
        raise DataError(
            f"{place}: unknown format. The columns are {_describe(first)}. Known: "
            f"{', '.join(map(str, layouts))}. {hint} other columns with data.columns."
        )
    return fitting[0]


def _fits(layout: Layout, first: Example) -> bool:
    has_all = all(layout.columns[column] in first for column in FORMATS[layout.format].required)
    keys = keys_of_messages(first.get(layout.columns.get("messages", "")))
    return has_all and (not keys or layout.columns["role"] in keys)


def _describe(first: Example) -> str:
    """Return the columns, and for a list of messages the keys of a message."""
    keys = {column: ", ".join(keys_of_messages(value)) for column, value in first.items()}
    return ", ".join(f"{column} (a list with {of})" if of else column for column, of in keys.items())
