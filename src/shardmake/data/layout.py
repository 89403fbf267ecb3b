"""Layout of the examples: their format, and the columns that it reads.

`recognize` determines the layout once, from the configuration and the first rows. The layout then converts each example
into one of five standard forms: messages with role and content, prompt and completion, the same with a label, prompt
with a chosen and a rejected answer, or text.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from shardmake.config.formats import FORMATS, RAW, DataFormat
from shardmake.config.models import Data, Objective
from shardmake.config.objectives import OBJECTIVES
from shardmake.core.errors import DataError, nearest

Example = Mapping[str, Any]
Message = Mapping[str, Any]
_REASONING: Final = ("reasoning_content", "thinking", "reasoning")
"""Keys of a message that hold what the model thinks before it answers."""
_CALL: Final = '{"function": {"name": "...", "arguments": {...}}}'
_ROLES: Final[Mapping[str, str]] = {
    "system": "system",
    "developer": "developer",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "ipython": "tool",
}
"""Roles of ShareGPT, and the roles that chat templates use for them."""
_MEDIA: Final = ("image", "images", "video", "videos", "audio", "audios")
"""Columns of data sets whose conversations refer to images, films or sounds."""


@dataclass(frozen=True)
class Layout:
    """A format with the name of every column that it reads."""

    format: DataFormat
    columns: Mapping[str, str]

    def __str__(self) -> str:
        required = ", ".join(self.columns[column] for column in FORMATS[self.format].required)
        return f"{self.format} ({required})"

    def standardize(self, example: Example, place: str) -> dict[str, Any]:
        """Return ``example`` in the standard form of its format, with tools where a chat template takes them.

        ``place`` names the example in errors. Raises `DataError` for a missing column and for a value of another type.
        """
        example = {name: value for name, value in example.items() if value is not None}
        if media := [name for name in _MEDIA if example.get(name) and name not in self.columns.values()]:
            raise DataError(
                f"{place}: this example has {' and '.join(media)}. Only text is trained, also of models that take "
                "images or sounds. Remove such examples, or the column if their text stands alone."
            )
        missing = [self.columns[c] for c in FORMATS[self.format].required if self.columns[c] not in example]
        if missing:
            raise DataError(
                f"{place}: this example ({self.format}) has no {' and no '.join(missing)}. "
                f"Its keys: {', '.join(example) or 'none'}."
            )
        if self.format == "text":
            return {"text": self._text(example, "text", place)}
        if self.format == "alpaca":
            return {"messages": self._instruction(example, place)}
        found = self._tools_and_arguments(example, place)
        if self.format == "preference":
            found |= self._pair(example, place)
        elif self.format == "chat" or self.format == "sharegpt":
            messages = self._messages(example, "messages", place)
            found["messages"] = [*self._system(example, messages, place), *messages]
        else:
            found |= self._prompt_and_completion(example, place)
        if self.format == "unpaired-preference":
            found["label"] = self._label(example, place)
        if found and isinstance(found.get("prompt"), str) and found["tools"]:
            raise DataError(
                f"{place}: {self.columns['tools']} belongs to a conversation, and {self.columns['prompt']} is text. "
                "Write both as lists of messages, or remove the tools."
            )
        return found

    def _tools_and_arguments(self, example: Example, place: str) -> dict[str, Any]:
        name = self.columns["template_arguments"]
        arguments = example.get(name)
        if arguments is not None and not isinstance(arguments, dict):
            raise DataError(f"{place}: {name} is {type(arguments).__name__}. Write an object of template arguments.")
        tools = _tools(example.get(self.columns["tools"]), f"{place}: {self.columns['tools']}")
        return {"tools": tools} | ({"arguments": arguments} if arguments else {})

    def _text(self, example: Example, column: str, place: str) -> str:
        name = self.columns[column]
        if not isinstance(example[name], str):
            raise DataError(f"{place}: {name} is {type(example[name]).__name__}, not text.")
        return _encodable(example[name], f"{place}: {name}")

    def _optional_text(self, example: Example, column: str, place: str) -> str:
        name = self.columns.get(column)
        return self._text(example, column, place) if name and example.get(name) is not None else ""

    def _instruction(self, example: Example, place: str) -> list[Message]:
        """Return an Alpaca example as a conversation; the input follows the instruction after an empty line."""
        asked, given = self._text(example, "instruction", place), self._optional_text(example, "input", place)
        turns = [
            {"role": "user", "content": f"{asked}\n\n{given}" if given else asked},
            {"role": "assistant", "content": self._text(example, "output", place)},
        ]
        return [*self._system(example, turns, place), *turns]

    def _system(self, example: Example, messages: Sequence[Message], place: str) -> list[Message]:
        """Return the system message of a column of its own, if there is one."""
        text = self._optional_text(example, "system", place)
        if text and messages[0]["role"] == "system":
            raise DataError(
                f"{place}: there are two system messages, one in {self.columns['system']} and one in "
                f"{self.columns['messages']}. Remove one."
            )
        return [{"role": "system", "content": text}] if text else []

    def _prompt_and_completion(self, example: Example, place: str) -> dict[str, Any]:
        columns = ("prompt", "completion")
        if isinstance(example[self.columns["prompt"]], str):
            return {column: self._text(example, column, place) for column in columns}
        return {column: self._messages(example, column, place) for column in columns}

    def _label(self, example: Example, place: str) -> bool:
        name = self.columns["label"]
        if not isinstance(example[name], bool):
            raise DataError(f"{place}: {name} is {example[name]!r}. Write true or false: is the completion desirable?")
        return bool(example[name])

    def _pair(self, example: Example, place: str) -> dict[str, Any]:
        """Return prompt, chosen and rejected, all text or all messages; a prompt of their own is their common start."""
        columns = ["chosen", "rejected"]
        if example.get(self.columns["prompt"]) is not None:
            columns.insert(0, "prompt")
            if isinstance(example[self.columns["prompt"]], str) and isinstance(example[self.columns["chosen"]], list):
                return self._repeated_prompt(example, place)
        kinds = {self.columns[column]: isinstance(example[self.columns[column]], str) for column in columns}
        if len(set(kinds.values())) > 1:
            described = ", ".join(f"{name} is {'text' if text else 'not text'}" for name, text in kinds.items())
            raise DataError(f"{place}: {described}. Write all of them as text, or all as lists of messages.")
        read = self._text if all(kinds.values()) else self._messages
        found = {column: read(example, column, place) for column in columns}
        return found if "prompt" in found else split_prompt(found["chosen"], found["rejected"], place)

    def _repeated_prompt(self, example: Example, place: str) -> dict[str, Any]:
        """Return a pair of conversations that begin with the prompt, which is also a text, as in UltraFeedback.

        As in TRL, their common start is the prompt. It must have the text, so that no other prompt is ignored.
        """
        chosen, rejected = (self._messages(example, column, place) for column in ("chosen", "rejected"))
        pair = split_prompt(chosen, rejected, place)
        text = self._text(example, "prompt", place)
        if not any(m["role"] == "user" and m["content"].strip() == text.strip() for m in pair["prompt"]):
            names = self.columns
            raise DataError(
                f"{place}: {names['prompt']} is text, and not the text of a user's message at the start of "
                f"{names['chosen']} and {names['rejected']}. Add that message to both, or write the prompt as a list "
                "of messages."
            )
        return pair

    def _messages(self, example: Example, column: str, place: str) -> list[Message]:
        name = self.columns[column]
        role, content = self.columns["role"], self.columns["content"]
        messages = example[name]
        if (
            not isinstance(messages, list)
            or not messages
            or not all(isinstance(m, dict) and role in m for m in messages)
        ):
            raise DataError(f"{place}: {name} is not a list of messages, each with a {role} and a {content}.")
        return [self._message(message, f"{place}: {name}[{i}]") for i, message in enumerate(messages)]

    def _message(self, message: Message, place: str) -> Message:
        role, content = self.columns["role"], self.columns["content"]
        rest = {key: value for key, value in message.items() if key not in (role, content) and value is not None}
        calls = _calls(rest.pop("tool_calls", None), f"{place}.tool_calls")
        thoughts = [rest.pop(key) for key in _REASONING if key in rest]
        if message.get(content) is None and not calls:
            raise DataError(f"{place} has no {content}. Its keys: {', '.join(message)}.")
        text = _join(message.get(content), f"{place}.{content}")
        found = {"role": self._role(message[role], f"{place}.{role}"), "content": text, **rest}
        if any(thoughts):
            found["reasoning_content"] = _join(next(filter(None, thoughts)), f"{place}.reasoning_content")
        if calls:
            found["tool_calls"] = calls
        self._check_weight(found, place)
        return found

    def _check_weight(self, message: Message, place: str) -> None:
        """Raise `DataError` for a weight that is not followed; 0 leaves an assistant's message unlearned."""
        weight = message.get("weight")
        if weight is None or (message["role"] != "assistant" and weight == 0):
            return
        if isinstance(weight, bool) or weight not in (0, 1):
            raise DataError(f"{place}.weight is {weight!r}. Write 0 for a message that is not learned, otherwise 1.")
        if message["role"] != "assistant":
            raise DataError(f"{place}.weight is 1, but only messages of the assistant are learned. Remove it.")
        if weight == 0 and self.format in ("preference", "unpaired-preference"):
            raise DataError(f"{place}.weight is 0, which is for supervised fine-tuning alone. Remove it.")

    def _role(self, role: Any, place: str) -> str:
        if not isinstance(role, str):
            raise DataError(f"{place} is {type(role).__name__}, not text.")
        if self.format != "sharegpt":
            return role
        if role not in _ROLES:
            raise DataError(f"{place} is {role!r}.{nearest(role, _ROLES)} Allowed: {', '.join(_ROLES)}.")
        return _ROLES[role]


def is_unlearned(message: Message) -> bool:
    """Return True for a message of the assistant with weight 0, as in OpenAI's format."""
    return message["role"] == "assistant" and message.get("weight") == 0


def split_prompt(chosen: Any, rejected: Any, place: str) -> dict[str, Any]:
    """Return the common beginning of two texts or two conversations as the prompt, and the rest of each.

    If one is the beginning of the other, its last character or message is an answer. A space before the answers belongs
    to them, as in TRL, because most tokenizers join it with the next word. Raises `DataError` if nothing is common.
    """
    limit = min(len(chosen), len(rejected))
    length = next((i for i in range(limit) if chosen[i] != rejected[i]), limit)
    if length == limit or (length > 0 and chosen[length - 1] == " "):
        length -= 1
    if length <= 0:
        raise DataError(f"{place}: chosen and rejected have no common beginning, so there is no prompt. Add a prompt.")
    return {"prompt": chosen[:length], "chosen": chosen[length:], "rejected": rejected[length:]}


def _join(content: Any, place: str) -> str:
    """Return the text of a message: text as it is, a list of text parts joined, nothing for a call of a tool."""
    if content is None or isinstance(content, str):
        return _encodable(content or "", place)
    if not isinstance(content, list):
        raise DataError(f"{place} is {type(content).__name__}. Write text, or a list of parts of type text.")
    for index, part in enumerate(content):
        if not (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)):
            kind = f"of type {part.get('type')!r}" if isinstance(part, dict) else type(part).__name__
            raise DataError(
                f"{place}[{index}] is {kind}. Only text can be learned: write parts with the keys type (text) and text."
            )
    return _encodable("".join(part["text"] for part in content), place)


def _encodable(text: str, place: str) -> str:
    """Return ``text``; raise `DataError` for half of a surrogate pair, which JSON can hold and no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        found = text[error.start].encode(errors="backslashreplace").decode()
        raise DataError(
            f"{place} is not text: {found} is half of a surrogate pair. Write the character whole."
        ) from None
    return text


def _calls(calls: Any, place: str) -> list[dict[str, Any]]:
    """Return calls of tools in OpenAI's form, with arguments as objects; they may be JSON in text, or lack a frame."""
    if calls is not None and not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
        raise DataError(f"{place} is not a list of calls. Write each as {_CALL}.")
    found = []
    for index, call in enumerate(calls or []):
        function = call["function"] if isinstance(call.get("function"), dict) else call
        arguments = function.get("arguments", function.get("parameters", {}))
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments) if arguments.strip() else {}
            except ValueError as error:
                raise DataError(
                    f"{place}[{index}]: the arguments are not valid JSON: {error}. Write an object."
                ) from None
        if not isinstance(arguments, dict) or not isinstance(function.get("name"), str):
            raise DataError(f"{place}[{index}] is not a call with a name and arguments. Write {_CALL}.")
        frame = call if function is not call else {key: call[key] for key in ("id",) if key in call}
        found.append({"type": "function", **frame, "function": {"name": function["name"], "arguments": arguments}})
    return found


def _tools(tools: Any, place: str) -> list[Any] | None:
    """Return the descriptions of tools, which may be JSON in text."""
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else None
        except ValueError as error:
            raise DataError(f"{place} is not valid JSON: {error}. Write a list of tools.") from None
    if tools is not None and not isinstance(tools, list):
        raise DataError(f"{place} is {type(tools).__name__}. Write a list of tools.")
    return tools or None


def recognize(data: Data, objective: Objective, first: Example, place: str) -> Layout:
    """Return the layout of examples, of which ``first`` at ``place`` is the first.

    Raises `DataError` if no format fits, and if several do.
    """
    named = data.columns.named
    assert data.format != RAW, "raw data has no layout"
    allowed = OBJECTIVES[objective].data_formats if data.format == "auto" else (data.format,)
    layouts = [
        Layout(format, {**FORMATS[format].columns, **named})
        for format in allowed
        if named.keys() <= FORMATS[format].columns.keys()
    ]
    fitting = [layout for layout in layouts if data.format != "auto" or _fits(layout, first)]
    if len(fitting) > 1:
        raise DataError(
            f"{place}: the columns fit several formats: {', '.join(map(str, fitting))}. Set data.format to one of them."
        )
    if not fitting:
        raise DataError(
            f"{place}: unknown format. The columns are {_describe(first)}. Known: "
            f"{', '.join(map(str, layouts))}. Name other columns with data.columns."
        )
    return fitting[0]


def check_named(data: Data, columns: Sequence[str], source: str) -> None:
    """Raise `DataError` if ``data.columns`` names a column that is not among ``columns``, those of ``source``."""
    for column, name in data.columns.named.items():
        is_key = any(column in spec.turn for spec in FORMATS.values())
        if not is_key and name not in columns:
            raise DataError(
                f"data.columns.{column}: {name!r} is not a column of {source}.{nearest(name, columns)} "
                f"The columns are {', '.join(columns)}."
            )


def _fits(layout: Layout, first: Example) -> bool:
    spec = FORMATS[layout.format]
    if not all(layout.columns[column] in first for column in spec.required):
        return False
    keys = _keys_of_messages(first.get(layout.columns.get("messages", "")))
    return not keys or layout.columns["role"] in keys


def _keys_of_messages(value: Any) -> list[str]:
    """Return the keys of the first message, none for a value that is not a list of messages."""
    return list(value[0]) if isinstance(value, list) and value and isinstance(value[0], dict) else []


def _describe(first: Example) -> str:
    """Return the columns, and for a list of messages the keys of a message."""
    keys = {column: ", ".join(_keys_of_messages(value)) for column, value in first.items()}
    return ", ".join(f"{column} (a list with {of})" if of else column for column, of in keys.items())
