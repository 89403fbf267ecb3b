"""Tokenizers whose post-processor adds tokens: the tokens of each objective are TRL's, with one end-of-sequence token."""

from typing import Any

import datasets
import pytest
from tokenizers import processors
from transformers import PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

from shardmake.config.models import Data, Objective
from shardmake.data.encode import Encoder, Tokens, encode_prompt, loss_on_assistant
from shardmake.data.layout import recognize
from shardmake.evaluate.prompts import as_prompt
from tests.unit.data.test_chat import LATE_SYSTEM, OPENS_NO_MORE
from tests.unit.data.test_encode import PLAIN, chat, chat_template, make_tokenizer

Rows = list[dict[str, list[int]]]
START, END, SEPARATOR = 0, 1, "<system>"
TRAINERS: dict[Objective, tuple[Any, Any]] = {
    "sft": (SFTTrainer, SFTConfig),
    "dpo": (DPOTrainer, DPOConfig),
    "kto": (KTOTrainer, KTOConfig),
    "reward": (RewardTrainer, RewardConfig),
}
TEXT: dict[str, list[dict[str, Any]]] = {
    "sft": [{"prompt": "a:", "completion": "b"}, {"prompt": "a:", "completion": "b</s>"}],
    "text": [{"text": "ab"}, {"text": "ab</s>"}, {"text": "ab "}],
    "dpo": [
        {"prompt": "a:", "chosen": "b", "rejected": "c</s>"},
        {"prompt": "a:", "chosen": "b </s>", "rejected": "bc "},
    ],
    "kto": [
        {"prompt": "a:", "completion": "b", "label": True},
        {"prompt": "a:", "completion": "c</s>", "label": False},
    ],
}
CHAT: dict[str, list[dict[str, Any]]] = {
    "sft": [{"prompt": chat("u:a"), "completion": chat("a:b")}],
    "text": [{"messages": chat("u:a", "a:b")}],
    "dpo": [{"prompt": chat("u:a"), "chosen": chat("a:b"), "rejected": chat("a:c")}],
    "kto": [{"prompt": chat("u:a"), "completion": chat("a:b"), "label": True}],
}
TEXT["reward"], CHAT["reward"] = TEXT["dpo"], CHAT["dpo"]
ADDED = {"none": "$A", "start": "<s> $A", "end": "$A </s>", "both": "<s> $A </s>", "separator": f"<s> $A {SEPARATOR}"}


def tokenizer_that_adds(template: str) -> PreTrainedTokenizerFast:
    tokenizer = make_tokenizer(PLAIN)
    special = [(token, tokenizer.convert_tokens_to_ids(token)) for token in ("<s>", "</s>", SEPARATOR)]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)
    return tokenizer


def of_trl(tokenizer: PreTrainedTokenizerFast, objective: Objective, rows: list[dict[str, Any]]) -> Rows:
    """Return the tokens that TRL's own preparation makes of each row, and which of them are learned."""
    kind, config = TRAINERS[objective]
    trainer = kind.__new__(kind)
    trainer.calculate_KL, trainer._tokenizer, trainer.chat_template, trainer.completion_only_loss = (
        False,
        tokenizer,
        None,
        True,
    )
    trainer.desirable_weight, trainer.undesirable_weight, trainer._is_vision_dataset = 1, 1, False
    arguments = config(output_dir="unused", use_cpu=True, bf16=False, max_length=64)
    more = (False, None) if objective == "sft" else ()
    found = trainer._prepare_dataset(datasets.Dataset.from_list(rows), tokenizer, arguments, *more, "train")
    return [{key: row[key] for key in row if key.endswith(("ids", "labels"))} for row in found]


def of_ours(tokenizer: PreTrainedTokenizerFast, objective: Objective, rows: list[dict[str, Any]]) -> Rows:
    """Return our tokens of each row under TRL's names."""
    layout = recognize(Data(train="x"), objective, rows[0], "here")
    encoder = Encoder(chat_template(tokenizer), layout, loss_on_assistant(Data(train="x"), layout.format))
    encoded = [encoder(row, "here") for row in rows]
    if objective == "reward":
        return [{"chosen_ids": chosen, "rejected_ids": rejected} for (chosen, _), (rejected, _) in encoded]
    if objective == "sft":
        return [{"input_ids": ids, "labels": [i if on else -100 for i, on in zip(ids, mask, strict=True)]}
                for ((ids, mask),) in encoded]  # fmt: skip
    names = ("chosen_ids", "rejected_ids") if objective == "dpo" else ("completion_ids",)
    return [
        {"prompt_ids": parts(row[0])[0]} | {name: parts(one)[1] for name, one in zip(names, row, strict=True)}
        for row in encoded
    ]


def parts(tokens: Tokens) -> tuple[list[int], list[int]]:
    """Return the tokens of the prompt, and those of the answer."""
    ids, mask = tokens
    return ids[: mask.index(True)], ids[mask.index(True) :]


def without_second_end(rows: Rows) -> Rows:
    """Return TRL's rows without the token that it has twice; the prompt has it nowhere."""
    for row in rows:
        for name, ids in row.items():
            if name != "prompt_ids":
                assert ids[-2:] == [END, END], name
                del ids[-1]
    return rows


@pytest.mark.parametrize("form", [TEXT, CHAT], ids=["text", "chat"])
@pytest.mark.parametrize("added", ADDED)
@pytest.mark.parametrize("case", ["sft", "text", "dpo", "kto", "reward"])
def test_tokens_are_those_of_trl_with_one_end(case: str, added: str, form: dict[str, list[dict[str, Any]]]) -> None:
    """TRL's second end-of-sequence token is all that differs."""
    objective: Objective = "sft" if case == "text" else case  # type: ignore[assignment]
    rows, tokenizer = form[case], tokenizer_that_adds(ADDED[added])
    ours, theirs = of_ours(tokenizer, objective, rows), of_trl(tokenizer, objective, rows)
    if added in ("end", "both") and form is TEXT:
        theirs = without_second_end(theirs)
    if (
        case == "text"
    ):  # nothing predicts the first token, and in a conversation only the assistant's tokens are learned
        ours, theirs = ([{"input_ids": row["input_ids"]} for row in rows] for rows in (ours, theirs))
    assert ours == theirs


@pytest.mark.parametrize(
    ("template", "prompt", "of_theirs"),
    [
        (OPENS_NO_MORE, "<user>a</s><assistant>T", "<user>a</s><assistant>"),
        (LATE_SYSTEM, "<user>x:a<assistant>", "<user>"),
    ],
    ids=["a header that the answer lacks", "a system text that moves"],
)
def test_the_prompt_of_a_pair_is_that_of_inference_where_trl_cuts_it(
    template: str, prompt: str, of_theirs: str
) -> None:
    """TRL takes what the prompt has in common with the answered conversation, and loses a system text with the rest."""
    tokenizer = make_tokenizer(template)
    pair = {
        "prompt": chat("s:x", "u:a") if "x" in prompt else chat("u:a"),
        "chosen": chat("a:b"),
        "rejected": chat("a:c"),
    }
    (ours,), (theirs,) = of_ours(tokenizer, "dpo", [pair]), of_trl(tokenizer, "dpo", [pair])
    found = ["".join(tokenizer.convert_ids_to_tokens(ids)) for ids in (*ours.values(), theirs["prompt_ids"])]
    assert found == [prompt, "b</s>", "c</s>", of_theirs]


@pytest.mark.parametrize(
    ("added", "expected"), [("none", [70]), ("end", [70]), ("both", [START, 70]), ("separator", [START, 70])]
)
def test_a_prompt_has_no_token_that_is_appended(added: str, expected: list[int]) -> None:
    """Samples continue the prompt as training does."""
    tokenizer = tokenizer_that_adds(ADDED[added])
    assert encode_prompt(tokenizer, "a") == expected
    tokenizer.chat_template = None
    assert as_prompt(tokenizer, "a") == expected


@pytest.mark.parametrize("added", ADDED)
def test_an_empty_answer_is_the_end_token(added: str) -> None:
    tokenizer = tokenizer_that_adds(ADDED[added])
    (row,) = of_ours(tokenizer, "kto", [{"prompt": "a", "completion": "", "label": True}])
    assert row["completion_ids"][0] == END
