"""Kinds of chat templates and of conversations: the context of each turn, what is learned, and what is refused."""

from datetime import date
from typing import Any

import pytest

from shardmake.config.chat_template import fix_clock
from shardmake.config.formats import FORMATS
from shardmake.core.errors import DataError, ModelError
from shardmake.data.chat import ChatTemplate
from shardmake.data.encode import Encoder
from shardmake.data.layout import Layout
from shardmake.data.placeholders import BadRowError, placeholder
from tests.unit.data.test_encode import MARKED, PLAIN, chat, make_tokenizer, shown, talk
from tests.unit.wording import Wording

Row = dict[str, Any]


def loop(message: str, prompt: str = "") -> str:
    """Return a template that renders each message by ``message``, and behind the header of an answer ``prompt``."""
    header = "{% if add_generation_prompt %}<assistant>" + prompt + "{% endif %}"
    return "{% for m in messages %}" + message + "{% endfor %}" + header


MESSAGE = "<{{ m.role }}>{{ m.content }}</s>"
DEFAULT_SYSTEM = "{% if messages[0].role != 'system' %}<system>ok</s>{% endif %}" + PLAIN
AFTER = (
    "{% for m in messages %}<m>{{ m.role }} {{ m.content }}{{ m.tool_calls[0].function.name if m.tool_calls else '</s>' }}"
    "{% endfor %}<m>go</s>{% if add_generation_prompt %}<m>assistant {% endif %}"
)


def calling(*calls: Row) -> Row:
    return {"role": "assistant", "tool_calls": [*calls]}


NAMED = calling({"name": "f", "arguments": {}})
NO_END = loop("<{{ m.role }}>{{ m.content }}")
NEXT_ENDS = loop(
    "{% if not loop.first and messages[loop.index0 - 1].role == 'assistant' %}</s>{% endif %}<{{ m.role }}>"
    "{{ m.content }}{% if m.role != 'assistant' %}</s>{% endif %}"
)
OPENS = loop(
    "<{{ m.role }}>{% if m.role == 'assistant' %}T{{ m.reasoning_content or '' }}/{% endif %}{{ m.content }}</s>",
    "T",
)
THINKS = loop(
    "<{{ m.role }}>{% if m.role == 'assistant' %}<think>{{ m.reasoning_content or '' }}</think>{% endif %}"
    "{{ m.content }}</s>",
    "<think></think>",
)
ENDS_LAST = loop("<{{ m.role }}>{{ m.content }}{% if loop.last or m.role != 'assistant' %}</s>{% endif %}")
OPENS_NO_MORE = loop(MESSAGE, "T")
LAST_THINKS = loop(
    "<{{ m.role }}>{% if m.role == 'assistant' and loop.last %}T{{ m.reasoning_content or '' }}/{% endif %}"
    "{{ m.content }}</s>"
)
KNOWN = loop("{% if m.role in ('system', 'user', 'assistant') %}" + MESSAGE + "{% endif %}")
PARTS = loop("<{{ m.role }}>{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}</s>")
LATE_SYSTEM = (
    "{% set sys = messages[0].content if messages[0].role == 'system' else '' %}{% for m in messages %}"
    "{% if m.role == 'user' %}<user>{% if loop.last and sys %}{{ sys }}:{% endif %}{{ m.content }}<assistant>"
    "{% elif m.role == 'assistant' %}{{ m.content }}</s>{% endif %}{% endfor %}"
)
CALLS = loop(
    "<{{ m.role }}>{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
    "{{ m.content }}</s>"
)
TEXT_CALLS = CALLS.replace(" | tojson", " + ''")
NEEDS_USER = (
    "{% if messages | selectattr('role', 'equalto', 'user') | list | length == 0 %}{{ raise_exception('no user') }}{% endif %}"
    + PLAIN
)
OWN_NUMBERS = CALLS.replace(
    "{{ c.function.arguments | tojson }}",
    "{% for k, v in c.function.arguments.items() %}{{ k }}{{ '%.1f' | format(v) }}{% endfor %}",
)
CALLS_NO_MORE = CALLS.replace("<{{ m.role }}>", "({{ m.role }})").replace("<assistant>", "(assistant)T")
BY_ID = loop(  # the name of a call is in its id, and that of a result in the call with its id
    "<{{ m.role }}>{% for c in m.tool_calls or [] %}{{ c.id }}{{ c.function.arguments | tojson }}{% endfor %}"
    "{% if m.role == 'tool' %}{{ (messages | map(attribute='tool_calls', default=[]) | sum(start=[]) "
    "| selectattr('id', 'equalto', m.tool_call_id) | first).function.name }}:{% endif %}{{ m.content }}</s>"
)
NO_SECOND_HEADER = (
    "{% for m in messages %}{% if m.role == 'user' %}<user>{{ m.content }}</s>{% else %}{% if not loop.first and "
    "messages[loop.index0 - 1].role == 'user' %}<assistant>{% endif %}{{ '(' ~ m.tool_calls[0].function.name ~ ')' if "
    "m.tool_calls else m.content }}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt and messages[-1].role == 'user' %}<assistant>{% endif %}"
)
CLOCK = "<system>{{ strftime_now('%Y') }}</s>" + PLAIN
SWITCH = loop(MESSAGE, "{% if think %}T{% endif %}")
EVERYTHING = "{{ tools | tojson }}{{ more | tojson }}" + CALLS.replace(
    "{{ m.role }}>", "{{ m.role }}>{{ m.name or '' }}{{ m.reasoning_content or '' }}{{ m.tool_call_id or '' }}"
).replace("{{ c.function.name }}", "{{ c.id }}{{ c.function.name }}")
OTHER_DIGITS = str.maketrans("0123456789", "1234567890")
CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": '{"x": "y"}'}}]}
QUOTED = {"function": {"name": "f", "arguments": {"n": 'y"'}}}
THOUGHT = {"role": "assistant", "content": "b", "thinking": "z"}

TOOLS = "{% for t in tools or [] %}{{ t.name }}</s>{% endfor %}" + MARKED
LEARNED: list[tuple[str, str, Row, list[str]]] = [
    ("tools", TOOLS, talk("u:a", "a:b", tools=[{"name": "clock"}]), ["clock</s><user>a</s><assistant>[b</s>]"]),
    ("two turns", MARKED, talk("s:be", "u:a", "a:b", "u:c", "a:d"),
     ["<system>be</s><user>a</s><assistant>[b</s>]<user>c</s><assistant>[d</s>]"]),
    ("two answers", PLAIN, talk("u:a", "a:b", "a:c", "u:d"),
     ["<user>a</s><assistant>[b</s>]<assistant>[c</s>]<user>d</s>"]),
    ("assistant first", PLAIN, talk("a:b", "u:c", "a:d"), ["<assistant>[b</s>]<user>c</s><assistant>[d</s>]"]),
    ("a prompt after questions alone", PLAIN.replace("prompt %}", "prompt and messages[-1].role == 'user' %}"),
     talk("s:x", "a:b", "a:c", "u:d", "a:e"),
     ["<system>x</s><assistant>[b</s>]<assistant>[c</s>]<user>d</s><assistant>[e</s>]"]),
    ("a text after every conversation", AFTER, talk("u:a", NAMED, "u:c", "a:d"),
     ["<m>user a</s><m>go</s><m>assistant [f</s>]",
      "<m>user a</s><m>assistant f<m>user c</s><m>go</s><m>assistant [d</s>]<m>go</s>"]),
    ("assistant first, default system", DEFAULT_SYSTEM, talk("a:b", "u:c"),
     ["<system>ok</s><assistant>[b</s>]<user>c</s>"]),
    ("a user must come", NEEDS_USER, talk("a:b", "u:c", "a:d"), ["<assistant>[b</s>]<user>c</s><assistant>[d</s>]"]),
    ("the next role ends a turn", NEXT_ENDS, talk("u:a", "a:b", "u:c", "a:d"),
     ["<user>a</s><assistant>[b</s>]<user>c</s><assistant>[d</s>]"]),
    ("the header opens thoughts", OPENS, talk("u:a", THOUGHT), ["<user>a</s><assistant>T[z/b</s>]"]),
    ("empty thoughts", OPENS, talk("u:a", "a:b"), ["<user>a</s><assistant>T[/b</s>]"]),
    ("only the last answer ends", ENDS_LAST, talk("u:a", "a:b", "a:c"),
     ["<user>a</s><assistant>[b</s>]<assistant>[c</s>]"]),
    ("a call that follows without a header", NO_SECOND_HEADER, talk("u:a", "a:b", NAMED, "u:c", NAMED),
     ["<user>a</s><assistant>[b</s>(f)</s>]<user>c</s><assistant>[(f)</s>]"]),
    ("a text that begins as the prompt ends", loop(MESSAGE, "<think>"), talk("u:a", "a:<think>z", "u:c", "a:<think>z"),
     ["<user>a</s><assistant><think>[z</s>]<user>c</s><assistant><think>[z</s>]"]),
    ("a text that begins as each question ends", loop("{% if m.role == 'user' %}<user>{{ m.content }}</s><assistant>"
     "<think>{% else %}{{ m.content.removeprefix('<think>') }}</s>{% endif %}").partition("{% if add_gen")[0],
     talk("u:a", "a:<think>z</think>b</think>c"), ["<user>a</s><assistant><think>[z</think>b</think>c</s>]"]),
    ("an empty answer of which only the last ends", ENDS_LAST, talk("u:a", "a:b", "a:"),
     ["<user>a</s><assistant>[b</s>]<assistant>[</s>]"]),
    ("thoughts that history lacks", OPENS_NO_MORE, talk("u:a", "a:b", "u:c", "a:d"),
     ["<user>a</s><assistant>T[b</s>]", "<user>a</s><assistant>b</s><user>c</s><assistant>T[d</s>]"]),
    ("only the last turn thinks", LAST_THINKS, talk("u:a", THOUGHT, "u:c", "a:d", "u:e"),
     ["<user>a</s><assistant>[Tz/b</s>]", "<user>a</s><assistant>b</s><user>c</s><assistant>[T/d</s>]"]),
    ("turns counted from the last", loop("<{{ m.role }}>{{ loop.revindex + 8 }}:{{ m.content }}</s>", "8:"),
     talk("u:a", "a:b", "u:", "a:d"),
     ["<user>9:a</s><assistant>8:[b</s>]", "<user>11:a</s><assistant>10:b</s><user>9:</s><assistant>8:[d</s>]"]),
    ("a call without the words of the prompt", CALLS_NO_MORE.replace("T", "so: ").replace("{{ c.f", " <call>{{ c.f", 1),
     talk("u:a", NAMED), ["(user)a</s>(assistant)so: [ <call>f{}</s>]"]),
    ("words after a header without a line end", loop("<{{ m.role }}>{% if m.role == 'assistant' %}said {% endif %}"
     "{{ m.content }}</s>", "\n"), talk("u:a", "a:b"), ["<user>a</s><assistant> [said b</s>]"]),
    ("parts", PARTS, talk("u:a", "a:b"), ["<user>a</s><assistant>[b</s>]"]),
    ("the system text moves", LATE_SYSTEM, talk("s:x", "u:a", "a:b"), ["<user>x:a<assistant>[b</s>]"]),
    ("a call with JSON in text", CALLS, talk("u:a", CALL, "t:r", "a:b"),
     ['<user>a</s><assistant>[f{"x": "y"}</s>]<tool>r</s><assistant>[b</s>]']),
    ("a call with numbers", CALLS, talk("u:a", calling({"name": "f", "arguments": {"x": 3, "y": -1.5}})),
     ['<user>a</s><assistant>[f{"x": 3, "y": -1.5}</s>]']),
    ("numbers in the template's own form", OWN_NUMBERS, talk("u:a", calling({"name": "f", "arguments": {"x": 5.0}})),
     ['<user>a</s><assistant>[fx5.0</s>]']),
    ("a key that is also in the header", CALLS_NO_MORE, talk("u:a", calling(QUOTED)),
     ['(user)a</s>(assistant)T[f{"n": "y\\""}</s>]']),
    ("a call by its id", BY_ID,
     talk("u:a", calling({**QUOTED, "id": "n.f:0"}), {"role": "tool", "tool_call_id": "n.f:0", "content": "r"}),
     ['<user>a</s><assistant>[n.f:0{"n": "y\\""}</s>]<tool>f:r</s>']),
    ("a template that wants text", TEXT_CALLS, talk("u:a", CALL), ['<user>a</s><assistant>[f{"x": "y"}</s>]']),
    ("no calls, no thoughts", CALLS, talk("u:a", {**THOUGHT, "thinking": None, "tool_calls": []}),
     ["<user>a</s><assistant>[b</s>]"]),
    ("arguments of a row", SWITCH, talk("u:a", "a:b", chat_template_kwargs={"think": True}),
     ["<user>a</s><assistant>T[b</s>]"]),
    ("the day", CLOCK, talk("u:a", "a:b"), ["<system>1999</s><user>a</s><assistant>[b</s>]"]),
    ("a mark of thoughts in the default system text", DEFAULT_SYSTEM.replace("ok", "use </think>"),
     talk("a:<think>z</think>b"), ["<system>use </think></s><assistant>[<think>z</think>b</s>]"]),
    ("a text that is also markup", PLAIN, talk("u:a", "a:s", "u:user", "a:</s>"),
     ["<user>a</s><assistant>[s</s>]<user>user</s><assistant>[</s></s>]"]),
    ("thoughts in the text", PLAIN, talk("u:a", "a:<think>z</think> b"),
     ["<user>a</s><assistant>[<think>z</think> b</s>]"]),
    ("a prompt of whose two marks the turn has the last", THINKS.replace("<think>{{ m.reasoning_content or '' }}", ""),
     talk("u:a", "a:b"), ["<user>a</s><assistant><think></think>[b</s>]"]),
    ("an end that is text", PLAIN.replace("</s>", "<|e|>"), talk("u:a", "a:b", "u:c"),
     ["<user>a<|e|><assistant>[b<|e|>]<user>c<|e|>"]),
    ("nothing to learn", PLAIN, talk("u:a"), ["<user>a</s>"]),
]  # fmt: skip
REFUSING = "{% if messages[0].role != 'user' %}{{ raise_exception('the user must begin') }}{% endif %}" + PLAIN
REFUSED: dict[str, tuple[str, Row]] = {
    "no end": (NO_END, talk("u:a", "a:b")), "another order": (REFUSING, talk("s:be", "u:a", "a:b")),
    "an error of the template": (PLAIN.replace("m.role", "m.role + 1"), talk("u:a", "a:b")),
    "cut texts": (loop("<{{ m.role }}>{{ m.content[:30] }}</s>"), talk("u:a", "a:b")),
    "role human": (KNOWN, talk("h:a", "a:b")), "role developer": (KNOWN, talk("d:a", "u:c", "a:b")),
    "lost result": (KNOWN, talk("u:a", "a:b", "t:b", "a:a b")), "lost call": (PLAIN, talk("u:a", CALL)),
    "lost text beside a call": (CALLS.replace("{{ m.content }}<", "{{ '' if m.tool_calls else m.content }}<"),
        talk("u:a", {**CALL, "content": "b"})),
    "lost key": (CALLS.replace("{{ c.function.arguments | tojson }}", "x{{ c.function.arguments.x }}"),
        talk("u:a", calling({"name": "f", "arguments": {"x": "y", "z": None}}))),
    "lost tools": (PLAIN, talk("u:a", "a:b", tools=[{"function": {"name": "f"}}])),
    "another header": (loop("<{{ m.role }}>said {{ m.content }}</s>", "says "), talk("u:a", "a:b")),
    "thoughts after a prompt that ends them": (THINKS, talk("u:a", THOUGHT)),
    "thoughts in the text after empty ones": (THINKS.replace("<assistant><think></think>", "<assistant>"),
        talk("u:a", "a:<think>z</think>b")),
    "a text about marks of thoughts": (loop("<{{ m.role }}>{{ m.content.split('</think>')[-1] }}</s>"),
        talk("u:a", "a:b<think>z</think>c")),
    "lost thoughts": (PLAIN, talk("u:a", THOUGHT)),
}  # fmt: skip


def encoder(template: str, turns: Any = "auto", **more: Any) -> Encoder:
    chat_template = ChatTemplate(make_tokenizer(template), frozenset({"</s>"}), more, turns, date(1999, 5, 5))
    return Encoder(chat_template, Layout("chat", FORMATS["chat"].columns), assistant_only=True)


def encoded(encoder: Encoder, row: Row) -> list[str]:
    return [shown(encoder.chat.tokenizer, tokens).replace("�", "") for tokens in encoder(row, "here")]


@pytest.mark.parametrize(("name", "template", "row", "expected"), LEARNED, ids=[case[0] for case in LEARNED])
def test_what_follows_the_context_of_inference_is_learned(name: str, template: str, row: Row, expected: Any) -> None:
    assert encoded(encoder(template), row) == expected


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_template_loses_is_named(case: str, wording: Wording) -> None:
    template, row = REFUSED[case]
    with pytest.raises(BadRowError) as error:
        encoded(encoder(template), row)
    wording(error.value)


def test_named_templates_without_a_default_are_refused() -> None:
    named: Any = {"rag": PLAIN}
    with pytest.raises(
        ModelError, match=r"no default specified.*\['rag'\]\. Name a file with one in data\.chat_template"
    ):
        encoded(encoder(named), talk("u:a", "a:b"))


def test_an_answer_inside_thoughts_that_the_prompt_opens_is_a_warning_once(caplog: pytest.LogCaptureFixture) -> None:
    opens = encoder(loop(MESSAGE, "<think>"))
    for answer in "bc":
        assert encoded(opens, talk("u:a", f"a:{answer}")) == [f"<user>a</s><assistant><think>[{answer}</s>]"]
    assert ["The generation prompt opens <think>" in message for message in caplog.messages] == [True]
    encoded(encoder(THINKS), talk("u:a", "a:b"))
    assert len(caplog.messages) == 1


@pytest.mark.parametrize(
    ("end", "cure"), [("<user>", "Write it into eos_token_id"), ("<|e|>", "but 5. Add it to a copy")]
)
def test_an_end_at_which_generation_does_not_stop_is_a_warning(
    caplog: pytest.LogCaptureFixture, end: str, cure: str
) -> None:
    assert encoded(encoder(PLAIN.replace("</s>", end)), talk("u:a", "a:b"))[0].endswith(f"[b{end}]")
    assert [cure in message for message in caplog.messages] == [True]


def test_an_answer_ends_with_its_turn() -> None:
    """Some templates, such as Command R7B's, write the generation prompt behind every conversation."""
    always = PLAIN.replace("{% if add_generation_prompt %}<assistant>{% endif %}", "<assistant>")
    own = ChatTemplate(make_tokenizer(always), frozenset({"</s>"}))
    (answer,) = own.examples(chat("u:a", "a:b"), {}, 1, learn_all=False, is_answer=True)
    assert answer.text == "<user>a</s><assistant>b</s>"


def test_turns_are_together_or_apart_as_configured() -> None:
    two = talk("u:a", "a:b", "u:c", "a:d")
    apart = ["<user>a</s><assistant>[b</s>]", "<user>a</s><assistant>b</s><user>c</s><assistant>[d</s>]"]
    assert encoded(encoder(PLAIN, "apart"), two) == apart
    assert encoded(encoder(PLAIN, "together"), two) == ["<user>a</s><assistant>[b</s>]<user>c</s><assistant>[d</s>]"]
    with pytest.raises(DataError, match=r"here: the chat template renders a turn differently.*data\.turns: auto"):
        encoded(encoder(LAST_THINKS, "together"), two)


def test_a_fixed_clock_says_what_that_of_transformers_says() -> None:
    calls = "{% set f = '%Y' ~ '-%m' %}{{ strftime_now('%d %B %Y, %-d %a %j %U %%') }}{{ strftime_now(f) | trim }}"
    template = "\n  {% if strftime_now is defined %}" + calls + "\n{% endif %}" + PLAIN
    tokenizer = make_tokenizer(template)
    texts = [tokenizer.apply_chat_template(chat("u:a"), tokenize=False)]
    for day in (date.today(), date(1999, 5, 5)):
        tokenizer.chat_template = fix_clock(template, day)
        texts.append(tokenizer.apply_chat_template(chat("u:a"), tokenize=False))
    assert texts[0] == texts[1] and texts[2].strip().startswith("05 May 1999, 5 Wed 125 18 %1999-05")


def test_a_row_like_others_is_encoded_as_alone() -> None:
    """Rows of one shape are rendered once; what the template does with their texts must not be lost by that."""
    contents = ["b", "b</s>", " b ", "<think>z</think>b", "\n\nb", "Qz0zQ", '"b"']
    rows = [talk("u:a", f"a:{content}", "u:c", "a:d") for content in contents]
    trims = PLAIN.replace("m.content", "(m.content.split('</think>')[-1] | trim)")
    for template in (PLAIN, trims):
        used = encoder(template)
        for row in rows:
            alone = _outcome(encoder(template), row)
            assert [_outcome(used, row) for _ in range(2)] == [alone, alone]


LIKE = {
    "first": "Qz0zQ", "beyond": "Qz99zQ", "number": f"77{9:026}77", "random": placeholder(0).translate(OTHER_DIGITS),
}  # fmt: skip


@pytest.mark.parametrize("kind", LIKE)
def test_text_like_a_placeholder_is_text_in_every_place(kind: str) -> None:
    """The tokens are those of a row with other words in its place."""

    def row(word: str) -> Row:
        call = {"id": word, "function": {"name": word, "arguments": {word: [word, 7], "n": int(LIKE["number"])}}}
        answer = {"role": "assistant", "reasoning_content": word, "content": word, "name": word, "tool_calls": [call]}
        result = {"role": "tool", "tool_call_id": word, "content": word}
        messages = chat(f"s:{word}", f"u:{word}", answer, result, f"a:{word}")
        tools = [{"name": word, "description": word, "parameters": {word: {"default": int(LIKE["number"])}}}]
        return {"messages": messages, "tools": tools, "chat_template_kwargs": {"more": {word: word}}}

    used, text = encoder(EVERYTHING), LIKE[kind]
    expected = [shown.replace("unlike", text) for shown in encoded(encoder(EVERYTHING), row("unlike"))]
    assert expected[0].count(text) >= 17
    assert [encoded(used, row(one)) for one in ("x", text, text)][1:] == [expected, expected]


def _outcome(used: Encoder, row: Row) -> Any:
    try:
        return encoded(used, row)
    except DataError as error:
        return str(error)


def test_arguments_of_the_run_reach_the_template_and_those_of_a_row_replace_them() -> None:
    used = encoder(SWITCH, think=True)
    assert encoded(used, talk("u:a", "a:b")) == ["<user>a</s><assistant>T[b</s>]"]
    row = talk("u:a", "a:b", chat_template_kwargs={"think": False})
    assert encoded(used, row) == ["<user>a</s><assistant>[b</s>]"]
