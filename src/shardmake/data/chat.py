"""Conversations as a chat template renders them: the context of each turn, and what the model must say in it.

The context of an assistant's turn is what the template renders for the messages before it with the generation prompt,
as at inference. What must follow is learned, up to and including a token at which generation stops. If all turns share
one rendering, the conversation is one example. Otherwise, each turn is an example with a context of its own.

Each shape of conversations is rendered with placeholders instead of its texts, which shows what the template loses and
where the learned spans are. A conversation of that shape is rendered once and compared with the filled placeholders. If
they differ, its own renderings are analysed.
"""

import json
import logging
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import date
from functools import cached_property, partial
from itertools import groupby
from operator import itemgetter
from typing import Any, Final, Literal, NamedTuple

from transformers import PreTrainedTokenizerBase

from shardmake.config.chat_template import fix_clock
from shardmake.core.errors import ModelError
from shardmake.data.layout import REASONING_KEYS, Message, is_learned
from shardmake.data.placeholders import (
    PLACEHOLDER,
    BadRowError,
    Piece,
    Rendered,
    Span,
    any_of,
    as_written,
    common_length,
    excerpt,
    fill,
    find,
    hide_texts,
    in_real_words,
    lost,
    placeholder,
    seam,
)

ROLES: Final = ("system", "developer", "user", "assistant", "tool")
_MOVED: Final = ("system", "developer")
"""Roles whose text a template may move to another place."""
_MARK: Final = r"<\|[^<>|\s]{1,40}\|>|</?\w{1,20}>|\[/?\w{1,20}\]"
"""Pattern of texts that look like tokens of a template."""
_MOST_SHAPES: Final = 1024
_NEXT: Final = 10**6
"""Number of the placeholder of a message that follows."""
logger = logging.getLogger(__name__)
_Check = tuple[int, bool, str]
"""The text that a rendering of the first messages must be: their number, if with the prompt of generation, the text."""


class _Shape(NamedTuple):
    """The examples of a conversation, and the renderings that they come from."""

    examples: list[Rendered]
    checks: list[_Check]


class _Conversation(NamedTuple):
    """Messages in the form that the template takes, what is rendered beside them, and their texts."""

    messages: list[dict[str, Any]]
    tools: Any
    arguments: Mapping[str, Any]
    pieces: list[Piece]


@dataclass
class ChatTemplate:
    """The chat template of a tokenizer with its ``arguments``; ``stops`` are texts of tokens that end generation."""

    tokenizer: PreTrainedTokenizerBase
    stops: frozenset[str]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    turns: Literal["auto", "together", "apart"] = "auto"
    day: date | None = None
    """The day for a template that reads the clock."""
    _shapes: dict[str, _Shape | BadRowError] = field(default_factory=dict, repr=False)
    _opened: set[str] = field(default_factory=set, repr=False)
    """Marks of generation prompts of which a warning was logged."""

    def examples(
        self, messages: Sequence[Message], beside: Mapping[str, Any], start: int, *, learn_all: bool, is_answer: bool
    ) -> list[Rendered]:
        """Return the examples of a conversation, whose turns from message ``start`` on are learned.

        ``beside`` may have tools and template arguments. With ``learn_all``, all tokens are learned. An answer is one
        example, learned from its first turn to the last. Raises `BadRowError` if the template rejects the conversation,
        loses a part of it, or has no end of a turn, and `ModelError` if there is no template.
        """
        tools, arguments = beside.get("tools"), beside.get("arguments", {})
        self._check_roles(messages)
        learned = [i for i, message in enumerate(messages) if i >= start and is_learned(message)]
        analyse = partial(self._analyse, learned=learned, learn_all=learn_all, is_answer=is_answer)
        hidden, pieces = hide_texts(messages, tools)
        key = repr((hidden, tools, arguments, learned, learn_all, is_answer))
        if (shape := self._shapes.get(key)) is None:
            if len(self._shapes) >= _MOST_SHAPES:
                self._shapes.clear()
            shown = [piece._replace(text=piece.stand_in or piece.text) for piece in pieces]
            try:
                shape = analyse(_Conversation(self._adapted(hidden), tools, arguments, shown))
            except BadRowError as error:
                shape = error
            self._shapes[key] = shape
        if isinstance(shape, BadRowError) and (real := in_real_words(shape, pieces)):
            raise real
        conversation = _Conversation(self._adapted(messages), tools, arguments, pieces)
        if isinstance(shape, BadRowError) or any(map(self._begins_as_prompt, pieces)):
            return analyse(conversation).examples
        return self._filled(shape, conversation) or analyse(conversation).examples

    def question(self, text: str) -> str:
        """Return ``text`` as a user's only message, with the generation prompt. It may raise `BadRowError`."""
        return self._render(None, self._adapted([{"role": "user", "content": text}]), header=True)

    def _filled(self, shape: _Shape, conversation: _Conversation) -> list[Rendered] | None:
        """Return the examples of ``shape`` with the texts of ``conversation``; None if it is rendered otherwise."""
        texts: Sequence[str] = [piece.text for piece in conversation.pieces]
        for count, header, text in shape.checks:
            rendered = self._render(conversation, conversation.messages[:count], header=header)
            if (written := as_written(text, texts, rendered)) is None:
                return None
            texts = written
        return [fill(example, texts) for example in shape.examples]

    def _analyse(self, conversation: _Conversation, *, learned: list[int], learn_all: bool, is_answer: bool) -> _Shape:
        count, last = len(conversation.messages), learned[-1] if learned else -1
        turns = [self._turn(conversation, index) for index in learned]
        examples = [example for turn in turns for example in turn.examples]
        spans = [span for example in examples for span in example.learned]
        if last == count - 1:
            text, checks = examples[-1].text, turns[-1].checks
        else:
            text = self._render(conversation, conversation.messages)
            self._locate(text, conversation, count, ())
            checks = [(count, False, text)]
        if learn_all:
            return _Shape([Rendered(text, ((0, len(text)),))], checks)
        shared = all(text.startswith(turn.text[:end]) for turn, (_, end) in zip(examples, spans, strict=True))
        if shared and (self.turns != "apart" or is_answer or len(turns) < 2):
            if is_answer and spans:
                end = spans[-1][1]
                spans, text = [(spans[0][0], end)], text[: len(text) - len(text[end:].lstrip())]
            return _Shape([Rendered(text, tuple(spans))], checks)
        if len(turns) > 1 and (self.turns == "together" or is_answer):
            raise BadRowError(
                "turns that do not share one rendering",
                "the chat template renders a turn differently when others follow, so the turns cannot be learned "
                "together. Use data.turns: auto, or for an answer with several turns only its last one.",
            )
        return _Shape(examples, [check for turn in turns for check in turn.checks])

    def _turn(self, conversation: _Conversation, index: int) -> _Shape:
        """Return the turn of message ``index``, which is learned, after its context."""
        messages, count = conversation.messages, index + 1
        try:
            whole = self._render(conversation, messages[:count])
        except BadRowError:  # such as a template that demands a user's message, which comes later
            whole, count = self._render(conversation, messages), len(messages)
        checks, text = [(count, False, whole)], whole
        context, prompt = self._context(conversation, index)
        if context is not None and whole.startswith(context):
            start = len(context)
        else:
            regions = self._locate(whole, conversation, index + 1, None)
            floor, start = regions[index - 1][1] if index else 0, regions[index][0]
            if not any(piece.message == index for piece in conversation.pieces):
                start = self._place_of_text(conversation, index, whole, count)
            if context is None:
                start = self._start_without_prompt(conversation, index, whole, (floor, start))
            else:
                after = seam(context, whole, (floor, start), prompt, self._marks)
                self._warn_of_open(prompt, whole[floor:start], whole[after:start])
                text, start = context + whole[after:], len(context)
                checks.append((index, True, context))
        is_begun = any(self._begins_as_prompt(piece) for piece in conversation.pieces if piece.message == index)
        begin = text.rfind(self._opening, 0, start) if is_begun else start
        end = self._locate(text, conversation, index + 1, {index}, begin)[index][1]
        self._check_thought(text, conversation, index, start - len(prompt if context else ""), start)
        end = max(start, end)
        stop, mark = self._ends.search(text, end), self._marks.search(prompt)
        after = text.find(mark[0], end) if mark else -1
        if stop and 0 <= after < stop.start() and (context or "").removesuffix(prompt).endswith(text[after:]):
            text, stop = text[:after], None  # the template writes this after every conversation
        if stop is None:
            text += self._end_after(conversation, index, whole)
        elif count > index + 1:
            text = text[: stop.end()]
        return _Shape([Rendered(text, ((start, stop.end() if stop else len(text)),))], checks)

    def _place_of_text(self, conversation: _Conversation, index: int, whole: str, count: int) -> int:
        """Return where message ``index``, which is empty, would have a text in ``whole``, the first ``count``."""
        shown = conversation.messages[:count]
        shown[index : index + 1] = self._adapted([{**shown[index], "content": placeholder(_NEXT)}])
        return common_length(whole, self._render(conversation, shown))

    def _start_without_prompt(self, conversation: _Conversation, index: int, whole: str, between: Span) -> int:
        """Return where message ``index`` begins in ``whole`` if the template has no generation prompt for it.

        It is after the header of an answer, or after the messages before it if no header follows there.
        """
        floor, start = between
        if self._header and (found := whole.rfind(self._header, floor, start)) >= 0:
            return found + len(self._header)
        with suppress(BadRowError):
            before = self._render(conversation, conversation.messages[:index], header=True) if index else ""
            mark = self._marks.search(self._header)
            if before and whole.startswith(before) and not (mark and mark[0] in whole[len(before) : start]):
                return len(before)
        return start

    def _warn_of_open(self, prompt: str, header: str, rest: str) -> None:
        """Log a warning once if the ``prompt`` of generation opens what ``header`` lacks and ``rest`` does not end."""
        mark = next(iter(self._marks.findall(prompt)[::-1]), "")
        is_open = re.fullmatch(r"<[\w:]+>", mark) and mark not in header and not self._marks.search(rest)
        if is_open and mark not in self._opened:
            self._opened.add(mark)
            logger.warning(
                f"The generation prompt opens {mark}, and answers without reasoning do not end it, so the model "
                "learns to answer where servers expect reasoning. Give each answer its reasoning, or set "
                "data.template_arguments or data.chat_template so that the prompt does not open it."
            )

    def _check_thought(self, text: str, conversation: _Conversation, index: int, head: int, start: int) -> None:
        """Raise `BadRowError` if the mark that ends the reasoning of message ``index`` is before it, from ``head`` on.

        The generation prompt may have it, without the template argument that asks for reasoning, or the template writes
        an empty reasoning before one that is in the text.
        """
        thought = next((one.text for one in conversation.pieces if one[:2] == (index, "reasoning")), "")
        span = find(text, thought, start) if thought else None
        closing = self._marks.search(text, span[1]) if span else None
        if span and closing and closing[0] in text[head : span[0]]:
            raise BadRowError(
                "reasoning after its end",
                f"before the reasoning of message {index + 1} ({excerpt(thought)!r}), the chat template writes "
                f"{closing[0]}, which ends it. Write the reasoning under reasoning_content and not in the text, and "
                "let the generation prompt open it with data.template_arguments, such as enable_thinking: true.",
            )

    def _context(self, conversation: _Conversation, index: int) -> tuple[str | None, str]:
        """Return the context of message ``index``, and the generation prompt that ends it.

        There is no context if the template does not render the messages before it, or has no generation prompt after
        the last of them, one for which models do not generate an answer.
        """
        if not index:
            return None, self._header
        try:
            context, prompt = self._prompted(conversation, conversation.messages[:index])
        except BadRowError:
            return None, self._header
        is_asked = prompt or not self._header or conversation.messages[index - 1]["role"] in ("user", "tool")
        return (context, prompt) if is_asked else (None, self._header)

    def _prompted(self, conversation: _Conversation | None, messages: list[dict[str, Any]]) -> tuple[str, str]:
        """Return the text of ``messages`` with the generation prompt, and that prompt."""
        text, bare = (self._render(conversation, messages, header=header) for header in (True, False))
        return text, text[common_length(text, bare) :]

    def _end_after(self, conversation: _Conversation, index: int, whole: str) -> str:
        """Return what ends the turn of message ``index`` when another message follows, such as the next role's mark."""
        following = {**(conversation.messages[index + 1 : index + 2] or [{"role": "user"}])[0]}
        following["content"], tail = placeholder(_NEXT), ""
        with suppress(BadRowError):
            longer = self._render(conversation, [*conversation.messages[: index + 1], *self._adapted([following])])
            tail = longer[len(whole) :].partition(placeholder(_NEXT))[0] if longer.startswith(whole) else ""
        found = next((one[: stop.end()] for one in (tail, self._tails[1]) if (stop := self._ends.search(one))), None)
        if found is None:
            raise BadRowError(
                "no end of a turn",
                "after the assistant's message, the chat template renders no token at which generation stops "
                f"({', '.join(sorted(self.stops)) or 'none is known'}). Write one at the end of the turn in a template "
                "of your own (data.chat_template), or its id into eos_token_id of generation_config.json.",
            )
        return found

    def _locate(
        self, text: str, conversation: _Conversation, count: int, demanded: Collection[int] | None, start: int = 0
    ) -> list[Span]:
        """Return where each of the first ``count`` messages is in ``text``; raise `BadRowError` for a lost part.

        The reasoning of the messages that are not in ``demanded`` may be missing; with None, everything may. The last
        message is not before ``start``.
        """
        regions, at = list[Span](), 0
        named = (piece for piece in conversation.pieces if piece.kind != "id")  # many templates leave ids out
        pieces = {index: list(held) for index, held in groupby(named, key=itemgetter(0))}
        outside = PLACEHOLDER.sub(lambda found: " " * len(found[0]), text)  # a key may be a part of a placeholder
        for index in range(-1, count):
            role = conversation.messages[index]["role"] if index >= 0 else ""
            is_moved = index < 0 or role in _MOVED
            at = max(at, start) if index == count - 1 else at
            spans = []
            for piece in pieces.get(index, ()):
                span = find(text if piece.stand_in else outside, piece.text, 0 if is_moved else at)
                if span is None:
                    if demanded is not None and (piece.kind != "reasoning" or index in demanded):
                        raise lost(piece, role)
                elif piece.stand_in.startswith("Q"):
                    spans.append(span)
            is_found = spans and not is_moved
            regions.append((min(spans)[0], max(span[1] for span in spans)) if is_found else (at, at))
            at = regions[-1][1]
        return regions[1:]

    def _check_roles(self, messages: Sequence[Message]) -> None:
        for index, message in enumerate(messages):
            role = message["role"]
            if role not in ROLES and not any(f"{mark}{role}{mark}" in self._templates[0] for mark in "'\""):
                raise BadRowError(
                    "an unknown role",
                    f"message {index + 1} has the role {role!r}, which the chat template does not name. Write one of "
                    f"{', '.join(ROLES)}, or set data.format: sharegpt for names such as human and gpt.",
                )

    def _adapted(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Return ``messages`` with the keys and types that the template reads."""
        found = [dict(message) for message in messages]
        for message in found:
            if "reasoning_content" in message:
                message |= dict.fromkeys(REASONING_KEYS, message["reasoning_content"])
            if self._wants_parts:
                message["content"] = [{"type": "text", "text": message["content"]}]
            if "tool_calls" in message and self._wants_text:
                message["tool_calls"] = [_with_text(call) for call in message["tool_calls"]]
        return found

    @cached_property
    def _wants_parts(self) -> bool:
        """The template renders lists of parts, and no text."""
        parts = [{"type": "text", "text": placeholder(0)}]
        return not self._renders([_asked(0)]) and self._renders([{"role": "user", "content": parts}])

    @cached_property
    def _wants_text(self) -> bool:
        """The template renders a tool's arguments only if they are JSON text."""
        call = {"type": "function", "function": {"name": placeholder(1), "arguments": {placeholder(2): 3}}}
        forms = ([{"role": "assistant", "content": "", "tool_calls": [one]}] for one in (call, _with_text(call)))
        takes_dict, takes_text = (self._renders([_asked(0), *form], at=2) for form in forms)
        return takes_text and not takes_dict

    def _renders(self, messages: list[dict[str, Any]], at: int = 0) -> bool:
        with suppress(BadRowError):
            text = self._render(None, messages)
            return placeholder(at) in text and "'type': 'text'" not in text  # a list as Python writes it
        return False

    @cached_property
    def _header(self) -> str:
        """The generation prompt; empty if there is none."""
        with suppress(BadRowError):
            return self._prompted(None, self._adapted([_asked(0)]))[1]
        return ""

    def _begins_as_prompt(self, piece: Piece) -> bool:
        """Return True if the template may leave out the mark with which the text of ``piece`` begins."""
        return bool(self._opening) and piece.text.startswith(self._opening)

    @cached_property
    def _opening(self) -> str:
        """The mark that is the last text before an answer, if one is."""
        with suppress(BadRowError):
            before = self.question(placeholder(0)).rstrip()
            return next((mark for mark in self._marks.findall(before)[-1:] if before.endswith(mark)), "")
        return ""

    @cached_property
    def _tails(self) -> list[str]:
        """The texts after an assistant's message that is the last, and between one and the next user's."""
        messages = self._adapted([_asked(0), {"role": "assistant", "content": placeholder(1)}, _asked(2)])
        try:
            texts = [self._render(None, messages[:count]) for count in (2, 3)]
        except BadRowError:
            return ["", ""]
        return [text.partition(placeholder(1))[2].partition(placeholder(2))[0] for text in texts]

    @cached_property
    def _marks(self) -> re.Pattern[str]:
        """Pattern of special tokens, and of texts that look like them; not Gemma's added tokens of space."""
        added = {*self.tokenizer.get_added_vocab(), *self.tokenizer.all_special_tokens}
        special = any_of([token for token in added if token.strip(" \n\t▁")])
        return re.compile(f"{special.pattern}|{_MARK}")

    @cached_property
    def _ends(self) -> re.Pattern[str]:
        """Pattern of the tokens that end a turn: those that stop generation, or else the template's own."""
        first, second = ([found[0] for found in self._marks.finditer(tail)][:1] for tail in self._tails)
        if not first or first != second or any_of(self.stops).search(self._tails[1]):
            return any_of(self.stops)
        known = ", ".join(map(repr, sorted(self.stops))) or "no token"
        cure = "Write it into eos_token_id of generation_config.json, or stop there when the model is served."
        if len(pieces := self.tokenizer.tokenize(first[0])) > 1:
            cure = (
                f"It is not a token of this tokenizer but {len(pieces)}. Add it to a copy of the base (shardmake fetch "
                "NAME --add-tokens FOLDER --token TOKEN), or name the template of the base with data.chat_template."
            )
        logger.warning(
            f"The chat template ends a turn with {first[0]!r}, and generation stops at {known}. The model learns the "
            f"former. {cure}"
        )
        return any_of({*self.stops, first[0]})

    @cached_property
    def _templates(self) -> list[str]:
        """The template of conversations without tools, and of those with tools."""
        if self.tokenizer.chat_template is None:
            raise ModelError(
                f"The tokenizer of {self.tokenizer.name_or_path!r} has no chat template, and the data are "
                "conversations. Name a template with data.chat_template, use an instruction-tuned model, or provide "
                "the data as prompt and completion text."
            )
        try:
            found = [str(self.tokenizer.get_chat_template(tools=tools)) for tools in (None, list[Any]())]
        except ValueError as error:  # several templates, none of which is the default
            raise ModelError(f"{' '.join(str(error).split())} Name a file with one in data.chat_template.") from None
        return [fix_clock(one, self.day) if self.day else one for one in found]

    def _render(self, conversation: _Conversation | None, messages: Sequence[Message], *, header: bool = False) -> str:
        """Return the text of ``messages`` with what ``conversation`` has beside them; ``header`` adds the prompt."""
        tools: Any = conversation.tools if conversation else None
        arguments = {**self.arguments, **(conversation.arguments if conversation else {})}
        settings = {"chat_template": self._templates[bool(tools)], "add_generation_prompt": header, "tokenize": False}
        try:
            return str(self.tokenizer.apply_chat_template(list(messages), tools=tools, **settings, **arguments))
        except Exception as error:  # a template may raise anything
            raise BadRowError(
                "rejected by the chat template",
                f"the tokenizer's chat template rejects this conversation: {(str(error) or repr(error)).rstrip('.')}. "
                "Change the conversation, or name another template with data.chat_template.",
            ) from None


def _asked(number: int) -> dict[str, Any]:
    return {"role": "user", "content": placeholder(number)}


def _with_text(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}
