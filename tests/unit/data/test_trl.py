"""Tokens of each objective are TRL's, with one end-of-sequence token, and so are batches of examples that are too long."""

import json
import random
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from tokenizers import processors
from transformers import LlamaConfig, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer
from trl.trainer import dpo_trainer, kto_trainer, reward_trainer

from shardmake.config.models import Data, Objective
from shardmake.data.dataset import Preferences
from shardmake.data.encode import Encoder, Tokens, encode_prompt, loss_on_assistant
from shardmake.data.layout import recognize
from shardmake.data.stage import prepare
from shardmake.evaluate.prompts import as_prompt
from shardmake.run.paths import RunDir
from shardmake.train.preferences import PreferenceCollator, WithMismatched
from tests.unit.data.test_chat import LATE_SYSTEM, OPENS_NO_MORE
from tests.unit.data.test_encode import PLAIN, chat, chat_template, make_tokenizer
from tests.unit.plans import make_run

Rows = list[dict[str, Any]]
START, END, SEPARATOR = 0, 1, "<system>"
BATCH, PAD = 4, 3
TRAINERS: dict[Objective, tuple[Any, Any, Any]] = {
    "sft": (SFTTrainer, SFTConfig, None),
    "dpo": (DPOTrainer, DPOConfig, dpo_trainer.DataCollatorForPreference),
    "kto": (KTOTrainer, KTOConfig, kto_trainer.DataCollatorForUnpairedPreference),
    "reward": (RewardTrainer, RewardConfig, reward_trainer.DataCollatorForPreference),
}
TEXT: dict[str, Rows] = {
    "sft": [{"prompt": "a:", "completion": "b"}, {"prompt": "a:", "completion": "b</s>"}],
    "text": [{"text": "ab"}, {"text": "ab</s>"}, {"text": "ab "}],
    "dpo": [{"prompt": "a:", "chosen": a, "rejected": b} for a, b in (("b", "c</s>"), ("b </s>", "bc "))],
    "kto": [{"prompt": "a:", "completion": one, "label": one == "b"} for one in ("b", "c</s>")],
}
CHAT: dict[str, Rows] = {
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


def of_trl(tokenizer: Any, objective: Objective, rows: Rows, length: int = 64, **changes: Any) -> datasets.Dataset:
    """Return what TRL's own preparation makes of ``rows``."""
    kind, config, _ = TRAINERS[objective]
    trainer = kind.__new__(kind)
    settings = {"calculate_KL": False, "_tokenizer": tokenizer, "chat_template": None, "completion_only_loss": True}
    settings |= {"desirable_weight": 1, "undesirable_weight": 1, "_is_vision_dataset": False, **changes}
    for name, value in settings.items():
        setattr(trainer, name, value)
    arguments = config("unused", use_cpu=True, bf16=False, max_length=length, per_device_train_batch_size=BATCH)
    more = (False, None) if objective == "sft" else ()
    return trainer._prepare_dataset(datasets.Dataset.from_list(rows), tokenizer, arguments, *more, "train")


def ids_of_trl(tokenizer: Any, objective: Objective, rows: Rows) -> Rows:
    """Return the tokens of each row, and which of them are learned."""
    found = of_trl(tokenizer, objective, rows)
    return [{key: row[key] for key in row if key.endswith(("ids", "labels"))} for row in found]


def of_ours(tokenizer: PreTrainedTokenizerFast, objective: Objective, rows: Rows) -> Rows:
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


@pytest.mark.parametrize("form", [TEXT, CHAT], ids=["text", "chat"])
@pytest.mark.parametrize("added", ADDED)
@pytest.mark.parametrize("case", ["sft", "text", "dpo", "kto", "reward"])
def test_tokens_are_those_of_trl_with_one_end(case: str, added: str, form: dict[str, Rows]) -> None:
    """A second end-of-sequence token of TRL, which the prompt has nowhere, is all that differs."""
    objective: Objective = "sft" if case == "text" else case  # type: ignore[assignment]
    rows, tokenizer = form[case], tokenizer_that_adds(ADDED[added])
    ours, theirs = of_ours(tokenizer, objective, rows), ids_of_trl(tokenizer, objective, rows)
    for row in theirs if added in ("end", "both") and form is TEXT else ():
        for name, ids in row.items():
            assert name == "prompt_ids" or (ids[-2:] == [END, END] and ids.pop() == END)
    (empty,) = of_ours(tokenizer, "kto", [{"prompt": "a", "completion": "", "label": True}])
    assert empty["completion_ids"][0] == END, "an empty answer is the end"
    if case == "text":  # no loss on the first token, and in a conversation only on the assistant's tokens
        ours, theirs = ([{"input_ids": row["input_ids"]} for row in rows] for rows in (ours, theirs))
    assert ours == theirs


@pytest.mark.parametrize(("template", "prompt", "of_theirs"), [
    (OPENS_NO_MORE, "<user>a</s><assistant>T", "<user>a</s><assistant>"),
    (LATE_SYSTEM, "<user>x:a<assistant>", "<user>"),
], ids=["a header that the answer lacks", "a system text that moves"])  # fmt: skip
def test_the_prompt_of_a_pair_is_that_of_inference_where_trl_cuts(template: str, prompt: str, of_theirs: str) -> None:
    """TRL takes what the prompt has in common with the answered conversation, and loses a system text with the rest."""
    tokenizer, asked = make_tokenizer(template), chat("s:x", "u:a") if "x" in prompt else chat("u:a")
    pair = {"prompt": asked, "chosen": chat("a:b"), "rejected": chat("a:c")}
    (ours,), (theirs,) = of_ours(tokenizer, "dpo", [pair]), ids_of_trl(tokenizer, "dpo", [pair])
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


@pytest.mark.parametrize("as_chat", [False, True], ids=["text", "chat"])
@pytest.mark.parametrize("length", [9, 19])
@pytest.mark.parametrize("objective", ["dpo", "kto", "reward"])
def test_batches_equal_those_of_trl(tmp_path: Path, objective: Objective, length: int, as_chat: bool) -> None:
    """Many rows are longer than a sequence. TRL cuts what its collators put together, or drops the row of a reward."""
    rows = [_row(number, objective, length, as_chat=as_chat) for number in range(62)]
    found = of_trl(make_tokenizer(PLAIN), objective, rows, length, calculate_KL=True)
    collator = partial(TRAINERS[objective][2], PAD)
    theirs = _batches(found, collator() if objective == "reward" else collator(length))
    ours = _of_stage(rows, objective, length, tmp_path)
    assert 1 < len(ours) == len(theirs), "with a remainder of a batch, and without the rows that are dropped"
    for batch, expected in zip(ours, theirs, strict=True):
        assert sorted(batch) == sorted(expected)
        for name, values in expected.items():
            assert torch.equal(batch[name], values), name


def _row(number: int, objective: str, length: int, *, as_chat: bool) -> dict[str, Any]:
    """Return an example. Two answers differ from their first token on, because pairs of equal ones are dropped."""
    draw, most = random.Random(f"{number} {length}"), length // 2 + 1 if objective == "reward" else length

    def words(role: str, first: str = "") -> Any:
        text = first + "".join(draw.choices("abcdef", k=draw.randint(1, most)))
        return chat(f"{role}:{text}") if as_chat else text

    if objective == "kto":
        return {"prompt": words("u"), "completion": words("a"), "label": draw.random() < 0.5}
    return {"prompt": words("u"), "chosen": words("a", "x"), "rejected": words("a", "y")}


def _of_stage(rows: Rows, objective: str, length: int, folder: Path) -> Rows:
    tokenizer, file = make_tokenizer(PLAIN), folder / "rows.jsonl"
    tokenizer.save_pretrained(folder / "model")
    LlamaConfig(vocab_size=len(tokenizer)).save_pretrained(folder / "model")
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"train": str(file), "eval": str(file), "order": "given"}
    run = make_run(model=str(folder / "model"), data=data, objective=objective, packing=False, sequence_length=length)
    prepare(run, rundir := RunDir(folder / "run"))
    examples = Preferences(rundir.data, "train")
    collate = PreferenceCollator(objective, length, PAD)
    return _batches(WithMismatched(examples, BATCH) if objective == "kto" else examples, collate)


def _batches(examples: Any, collate: Any) -> Rows:
    rows = [examples[number] for number in range(len(examples))]
    return [collate(rows[start : start + BATCH]) for start in range(0, len(rows), BATCH)]
