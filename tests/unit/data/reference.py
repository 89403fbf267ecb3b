"""The reference of the data stage: a few lines that use nothing of the package.

The context of a turn is what the template renders before it with the generation prompt. What must follow is the rest
of the finished turn, up to and including a token at which generation stops.
"""

import re
from functools import cache
from pathlib import Path
from typing import Any

import trl
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEMPLATES = {
    path.stem: path.read_text("utf-8") for path in (Path(trl.__file__).parent / "chat_templates").glob("*.jinja")
}
_SPECIAL = re.compile(
    r"<[|｜][^<>{}'\"\n]{1,40}[|｜]>|</?[a-z_|]+\|?>|<[a-z_]+\|>|<\|[a-z_]+>|</?s>|\[/?[A-Z_]+\]|\[gMASK\]|<\|\w+\|>"
)
STOPS = {
    # generation_config.eos_token_id of the published models, beside the template's own end of a turn
    "glm4moe": ["<|user|>", "<|observation|>", "<|endoftext|>"], "gptoss": ["<|return|>", "<|call|>"],
    "muse_glimmer": ["<|return|>", "<|call|>", "<|eot|>"], "gemma4": ["<turn|>", "<|tool_response>"],
    "diffusion_gemma": ["<turn|>", "<|tool_response>"], "gemma": ["<end_of_turn>"],
    "phi3": ["<|end|>", "<|endoftext|>"], "cohere": ["<|END_OF_TURN_TOKEN|>"], "deepseek": ["<｜end▁of▁sentence｜>"],
    "llama3": ["<|eot_id|>", "<|eom_id|>"], "idefics3": ["<end_of_utterance>"], "smolvlm": ["<end_of_utterance>"],
    "llava_next": ["</s>"], "": ["<|im_end|>"],
}  # fmt: skip


def stops_of(name: str) -> list[str]:
    """Return the texts at which generation of the model of a template stops."""
    return next(stops for prefix, stops in STOPS.items() if name.startswith(prefix))


@cache
def _core() -> str:
    core = Tokenizer(models.BPE())
    words = pre_tokenizers.Split(Regex(r"\s*[\r\n]+|\s+|\w+|[^\w\s]+"), "isolated")  # line breaks stick together
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    core.train_from_iterator(["What is the weather in Paris?\n\nIt is sunny.\n\n\nYou are an assistant. "] * 9, trainer)
    return str(core.to_str())


def tokenizer_for(name: str) -> PreTrainedTokenizerFast:
    """Return a small tokenizer with the template ``name`` of TRL, and the special tokens that are in it."""
    core, template = Tokenizer.from_str(_core()), TEMPLATES[name]
    special = dict.fromkeys([*stops_of(name), *_SPECIAL.findall(template), "<bos>", "<|pad|>"])
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<bos>", eos_token=stops_of(name)[0], pad_token="<|pad|>",
        chat_template=template,
    )  # fmt: skip


def expected(tokenizer: Any, row: dict[str, Any], index: int, stops: list[str]) -> tuple[str, str]:
    """Return the context of message ``index`` and what must follow."""

    def render(messages: list[Any], *, prompt: bool) -> str:
        settings = {"tools": row.get("tools"), **row.get("chat_template_kwargs", {})}
        named = ("reasoning_content", "thinking")  # some templates read the other name; newer transformers give both
        messages = [m | dict.fromkeys(named, m[named[0]]) if named[0] in m else m for m in messages]
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt, **settings))

    messages = row["messages"]
    before, whole = messages[:index], render(messages[: index + 1], prompt=False)
    context, bare = render(before, prompt=True), render(before, prompt=False)
    if whole.startswith(bare):
        same = next(
            (i for i, (a, b) in enumerate(zip(context, whole, strict=False)) if a != b), min(len(context), len(whole))
        )
        same = next((mark.start() for mark in _SPECIAL.finditer(whole) if mark.start() < same < mark.end()), same)
    else:  # the template renders the messages before it otherwise once it follows
        same = whole.rfind(context[len(bare) :]) + len(context[len(bare) :])
    follows = whole[same:].removeprefix(_text(messages[index - 1]) if index else "")  # of a template that joins both
    said = "Paris" if messages[index].get("tool_calls") else _text(messages[index])
    said = said.rpartition("</think>")[2].strip()
    at = follows.rfind(said) + len(said)
    if found := [follows.find(stop, at) + len(stop) for stop in stops if stop in follows[at:]]:
        return context, follows[: min(found)]
    following = messages[index + 1] if index + 1 < len(messages) else {"role": "user", "content": "x"}
    rest = render([*messages[: index + 1], following], prompt=False)[len(whole) :]
    return context, follows + rest[: min(rest.find(stop) + len(stop) for stop in stops if stop in rest)]


def _text(message: dict[str, Any]) -> str:
    content = message["content"]
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def in_parts(name: str, row: dict[str, Any]) -> dict[str, Any]:
    """Return ``row`` with lists of parts for a template that renders no text."""
    if not name.startswith(("idefics3", "smolvlm", "llava_next")):
        return row
    parts = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in row["messages"]]
    return {**row, "messages": parts}
