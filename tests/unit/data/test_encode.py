"""Chat template and loss mask: which tokens are learned, and what is refused."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from shardmake.config.formats import FORMATS
from shardmake.config.models import Data
from shardmake.core.errors import ShardmakeError
from shardmake.data.chat import ChatTemplate
from shardmake.data.encode import Encoder, Tokens, _by_bytes, _by_offsets, loss_on_assistant
from shardmake.data.layout import Layout
from shardmake.data.placeholders import Rendered
from tests.unit.data.reference import tokenizer_for

MARKED = (
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}</s>{% endgeneration %}"
    "{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
PLAIN = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")

ROLES = ("<system>", "<user>", "<assistant>")


def make_tokenizer(template: str | None = None) -> PreTrainedTokenizerFast:
    """One token a character, and one for each role; `<s>` opens plain text."""
    characters = [chr(i) for i in range(32, 127)]
    vocabulary = {token: i for i, token in enumerate(["<s>", "</s>", *ROLES, *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", additional_special_tokens=list(ROLES),
        chat_template=template,
    )  # fmt: skip


def shown(tokenizer: PreTrainedTokenizerFast, tokens: tuple[list[int], list[bool]]) -> str:
    """The text with learned stretches in brackets."""
    ids, mask = tokens
    assert len(ids) == len(mask)
    words = [f"[{t}]" if m else t for t, m in zip(tokenizer.convert_ids_to_tokens(ids), mask, strict=True)]
    return "".join(words).replace("][", "")


def make_encoder(tokenizer: Any, format: Any, *, assistant_only: bool = True) -> Encoder:
    return Encoder(chat_template(tokenizer), Layout(format, FORMATS[format].columns), assistant_only)


def chat_template(tokenizer: Any) -> ChatTemplate:
    return ChatTemplate(tokenizer, frozenset({"</s>"}))


def encode(encoder: Encoder, example: dict[str, Any]) -> Tokens:
    (tokens,) = encoder(example, "here")
    return tokens


def chat(*turns: str | dict[str, Any]) -> list[dict[str, Any]]:
    """Return messages; a text such as ``u:a`` stands for one."""
    roles = {"s": "system", "u": "user", "a": "assistant", "t": "tool", "d": "developer", "h": "human"}
    return [one if isinstance(one, dict) else {"role": roles[one[0]], "content": one[2:]} for one in turns]


def talk(*turns: str | dict[str, Any], **more: Any) -> dict[str, Any]:
    """Return a row with a conversation, and the keys ``more``."""
    return {"messages": chat(*turns), **more}


@pytest.mark.parametrize("template", [MARKED, PLAIN], ids=["marked", "by difference"])
def test_the_completion_is_learned(template: str) -> None:
    encoder = make_encoder(make_tokenizer(template), "prompt-completion")
    chats = {"prompt": chat("u:a", "a:b", "u:c"), "completion": chat("a:d")}
    rows = (chats, {"prompt": "2+", "completion": "4"})
    found = [shown(encoder.chat.tokenizer, encode(encoder, one)) for one in rows]
    assert found == ["<user>a</s><assistant>b</s><user>c</s><assistant>[d</s>]", "<s>2+[4</s>]"]


@pytest.mark.parametrize(("template", "key"), [
    (MARKED, "weight"), (PLAIN, "weight"), (PLAIN, "train"), (PLAIN, "loss"), (PLAIN, "loss_mask"), (PLAIN, "column"),
])  # fmt: skip
def test_a_message_with_weight_0_is_not_learned(template: str, key: str) -> None:
    tokenizer = make_tokenizer(template)
    messages: list[dict[str, Any]] = [dict(message) for message in chat("u:a", "a:b", "u:c", "a:d", "u:e", "a:f")]
    example: dict[str, Any] = {"messages": messages}
    for at, weight in ((1, 0), (2, 0), (3, 1)):
        messages[at] |= {} if key == "column" else {key: bool(weight) if key in ("train", "loss") else weight}
    if key == "column":
        example["loss_mask"] = [0, 0, 0, 1, 0, 1]
    found = encode(make_encoder(tokenizer, "chat"), example)
    expected = "<user>a</s><assistant>b</s><user>c</s><assistant>[d</s>]<user>e</s><assistant>[f</s>]"
    assert shown(tokenizer, found) == expected
    with pytest.raises(ShardmakeError, match=r"^here: a message has weight 0, but data\.loss_on: all learns every"):
        make_encoder(tokenizer, "chat", assistant_only=False)(example, "here")


def test_all_words_are_learned_but_the_first_token() -> None:
    tokenizer = make_tokenizer(PLAIN)
    encoder = make_encoder(tokenizer, "chat", assistant_only=False)
    assert shown(tokenizer, encode(encoder, {"messages": chat("u:a", "a:b")})) == "<user>[a</s><assistant>b</s>]"


def test_a_token_across_the_seam_is_learned() -> None:
    vocabulary = {"<s>": 0, "</s>": 1, "a": 2, "b": 3, "ab": 4}
    backend = Tokenizer(models.BPE(vocabulary, [("a", "b")]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    encoder = make_encoder(tokenizer, "prompt-completion")
    assert shown(tokenizer, encode(encoder, {"prompt": "aa", "completion": "ba"})) == "a[aba</s>]"


@pytest.mark.parametrize("answer", ["b", " b", ""])
def test_special_tokens_that_take_the_space_after_them_are_learned_at_the_end_alone(answer: str) -> None:
    """As those of Phi-3: the end of a turn has the line break, and the header a space before the answer."""
    tokenizer = make_tokenizer(PLAIN.replace("</s>", "</s>\n"))
    strips = [AddedToken(token, special=True, normalized=False, rstrip=True) for token in (*ROLES, "</s>")]
    tokenizer.backend_tokenizer.add_special_tokens(strips)
    found = encode(make_encoder(tokenizer, "chat"), {"messages": chat("u:a", f"a:{answer}", "u:c", "a:d")})
    expected = f"<user>a</s><assistant>[{answer.strip()}</s>]<user>c</s><assistant>[d</s>]"
    assert shown(tokenizer, found) == expected


@pytest.mark.parametrize("example", [
    {"prompt": "ab ", "completion": "cé"}, {"prompt": chat("u:a", "a:b", "u:ab "), "completion": chat("a:cé")},
])  # fmt: skip
def test_a_tokenizer_without_offsets_gives_the_same(example: dict[str, Any]) -> None:
    tokenizer = ByT5Tokenizer()
    tokenizer.chat_template = PLAIN
    ids, mask = encode(make_encoder(tokenizer, "prompt-completion"), example)
    assert tokenizer.decode([token for token, on in zip(ids, mask, strict=True) if on]) == "cé</s>"


@settings(max_examples=200, deadline=None)
@given(
    text=st.lists(st.sampled_from([*"a .,7", "sunny", "\n", "  ", "e\u0301", "\u0958", "日本", "🙂", "<|im_end|>"])),
    cuts=st.tuples(st.integers(0, 60), st.integers(0, 60)),
)
@pytest.mark.parametrize("normalizer", [None, normalizers.NFC()], ids=["as it is", "NFC"])
def test_offsets_in_bytes_are_those_of_the_tokenizer(normalizer: Any, text: list[str], cuts: tuple[int, int]) -> None:
    tokenizer, text = tokenizer_for("qwen3"), "".join(text)
    tokenizer.backend_tokenizer.normalizer = normalizer
    start, end = sorted(min(cut, len(text)) for cut in cuts)
    rendered = [Rendered(text, ((start, end),))]
    (ids, mask), (expected_ids, expected) = (next(read(tokenizer, rendered)) for read in (_by_bytes, _by_offsets))
    assert (ids.tolist(), mask.tolist()) == (expected_ids.tolist(), expected.tolist())


def test_a_space_that_offsets_leave_out_is_learned() -> None:
    tokenizer = tokenizer_for("qwen3")
    tokenizer.chat_template = PLAIN
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    found = encode(make_encoder(tokenizer, "chat"), {"messages": chat("u:a", "a:  \nb")})
    assert tokenizer.decode([token for token, on in zip(*found, strict=True) if on]) == "  \nb</s>"


@pytest.mark.parametrize(("format", "row", "expected"), [
    ("prompt-completion", {"prompt": "a: ", "completion": "b"}, "<s>a:[ b</s>]"),
    ("chat", talk("u:a", "a:b", "u:c", "a:d"), "<user>a</s><assistant>x[ b</s>]<user>c</s><assistant>x[ d</s>]"),
])  # fmt: skip
def test_space_that_a_context_alone_loses_is_learned(format: Any, row: Any, expected: str) -> None:
    """As with T5's tokenizer, which strips the end of a text: the model must say that space at inference."""
    tokenizer = make_tokenizer(PLAIN.replace("<{{ m.role }}>", "<{{ m.role }}>{{ 'x ' if m.role == 'assistant' }}"))
    tokenizer.chat_template = tokenizer.chat_template.replace("%}<assistant>{%", "%}<assistant>x {%")
    tokenizer.backend_tokenizer.normalizer = normalizers.Strip(left=False)
    assert shown(tokenizer, encode(make_encoder(tokenizer, format), row)) == expected


@pytest.mark.parametrize(("opens", "row", "learned"), [
    (True, talk("u:a", "a:b"), ["Ġ", "b", "</s>"]), (False, {"prompt": "a ", "completion": "é"}, ["Ã", "©", "</s>"]),
])  # fmt: skip
def test_a_space_that_offsets_trim_to_nothing_is_before_what_follows(opens: bool, row: Any, learned: list[str]) -> None:
    """As of RoBERTa, which has a space before each text, and of GPT-NeoX."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({token: at for at, token in enumerate(["</s>", *ROLES, *letters])}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=opens)
    backend.post_processor = processors.ByteLevel(trim_offsets=True)
    backend.add_special_tokens(["</s>", *ROLES])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", chat_template=PLAIN)
    ids, mask = encode(make_encoder(tokenizer, "chat" if opens else "prompt-completion"), row)
    assert tokenizer.convert_ids_to_tokens([token for token, on in zip(ids, mask, strict=True) if on]) == learned


def test_loss_is_where_the_config_says() -> None:
    cases: list[tuple[Any, Any]] = [("auto", "chat"), ("auto", "prompt-completion"), ("auto", "text"), ("all", "chat")]
    found = [loss_on_assistant(Data(train="x", loss_on=loss_on), format) for loss_on, format in cases]
    assert found == [True, True, False, False]
    assert loss_on_assistant(Data(train="x", loss_on="assistant"), "prompt-completion")
    with pytest.raises(ShardmakeError, match="the examples are text"):
        loss_on_assistant(Data(train="x", loss_on="assistant"), "text")
