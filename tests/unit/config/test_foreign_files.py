"""Training files of other tools: recognized, translated key by key, and nothing dropped silently."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardmake.config.foreign_files import TOOLS, TRL, recognize
from shardmake.config.load import parse_config
from shardmake.config.translate import translate
from shardmake.core.errors import ConfigError
from shardmake.render.lint import read_source

AXOLOTL = {
    "base_model": "org/base", "datasets": [{"path": "chats.jsonl", "type": "chat_template", "field_messages": "turns"}],
    "adapter": "lora", "lora_r": 16, "lora_target_linear": True, "sequence_len": 4096, "sample_packing": True,
    "micro_batch_size": 2, "gradient_accumulation_steps": 4, "num_epochs": 2, "learning_rate": 2e-4,
    "optimizer": "adamw_bnb_8bit", "lr_scheduler": "cosine", "deepspeed": "zero2.json", "bf16": "auto",
    "val_set_size": 0.05, "wandb_project": "p", "dataset_prepared_path": "x", "special_tokens": {"pad_token": "<p>"},
    "load_in_8bit": False,
}  # fmt: skip
FACTORY = {
    "model_name_or_path": "org/base", "stage": "dpo", "do_train": True, "finetuning_type": "lora", "lora_target": "all",
    "dataset": "pairs", "template": "qwen", "cutoff_len": 1024, "output_dir": "o", "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 8, "learning_rate": 5e-6, "num_train_epochs": 3.0, "warmup_ratio": 0.1, "bf16": True,
    "pref_beta": 0.2, "pref_loss": "sigmoid", "quantization_bit": 4,
}  # fmt: skip
SMALL_TRL = {
    "model_name_or_path": "org/base", "dataset_name": "org/data", "dataset_train_split": "part", "use_peft": True,
    "warmup_steps": 5, "max_steps": 50, "optim": "adamw_torch_fused", "packing": False, "use_rslora": True,
    "lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"power": 2}, "load_best_model_at_end": True,
    "report_to": "swanlab",
}  # fmt: skip


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working folder, with the description of LLaMA-Factory's data sets."""
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    info = {
        "pairs": {"file_name": "pairs.json", "ranking": True, "columns": {"chosen": "good", "rejected": "rejected"}}
    }
    Path("data/dataset_info.json").write_text(json.dumps(info))


def run_of(values: dict[str, Any], objective: str | None = None) -> tuple[dict[str, Any], set[str], set[str]]:
    """Return the run of a file, valid, and the keys that it does not have."""
    Path("file.yaml").write_text(yaml.safe_dump(values))
    made = translate(Path("file.yaml"), 4, objective)
    run = parse_config({"cluster": "c", "runs": {"r": made.run}}, "test").runs["r"]
    return run.model_dump(exclude_unset=True, exclude_none=True), {*made.planned}, {*made.untranslated}


def translate_of(values: dict[str, Any]) -> set[str]:
    """Return the keys of a file that a run, not complete without them, does not have."""
    Path("file.yaml").write_text(yaml.safe_dump(values))
    return {*translate(Path("file.yaml"), 4).untranslated}


TRANSLATED: dict[str, tuple[dict[str, Any], dict[str, Any], set[str], set[str]]] = {
    "Axolotl": (AXOLOTL, {
        "model": "org/base", "data": {
            "train": [{"source": "chats.jsonl", "format": "chat", "columns": {"messages": "turns"}}],
            "eval_fraction": 0.05,
        },
        "method": "lora", "lora": {"rank": 16, "targets": "all-linear"}, "sequence_length": 4096, "packing": True,
        "global_batch_size": 32, "epochs": 2, "learning_rate": 2e-4, "warmup_ratio": 0.03, "optimizer": "adamw8bit",
        "scheduler": "cosine", "report_to": ["wandb"],
    }, {"deepspeed"}, {"special_tokens"}),
    "LLaMA-Factory": (FACTORY, {
        "model": "org/base", "data": {"train": [{"source": "data/pairs.json", "columns": {"chosen": "good"}}]},
        "objective": "dpo", "dpo": {"beta": 0.2, "loss_type": ["sigmoid"]}, "packing": False, "method": "qlora",
        "lora": {"rank": 8, "alpha": 16, "targets": "all-linear"}, "sequence_length": 1024, "global_batch_size": 32,
        "epochs": 3, "learning_rate": 5e-6, "scheduler": "linear", "warmup_ratio": 0.1, "precision": "bf16",
    }, set(), {"template"}),
    "TRL": (SMALL_TRL, {
        "model": "org/base", "data": {"train": "org/data:part"}, "method": "lora",
        "lora": {"rank": 16, "alpha": 32, "dropout": 0.05, "targets": ["q_proj", "v_proj"]}, "sequence_length": 1024,
        "packing": False, "global_batch_size": 32, "max_steps": 50, "learning_rate": 2e-5, "scheduler": "polynomial",
        "scheduler_arguments": {"power": 2}, "warmup_ratio": 0.1, "optimizer": "adamw", "report_to": ["swanlab"],
        "checkpoints": {"keep_best": True}, "final_checkpoint": "best",
    }, set(), {"use_rslora"}),
}  # fmt: skip
"""A file of each tool, the run that it becomes, the keys that the plan decides, and those that have no counterpart."""


@pytest.mark.parametrize("tool", TRANSLATED)
def test_a_file_becomes_a_run(tool: str) -> None:
    values, *expected = TRANSLATED[tool]
    assert [*run_of(values)] == expected


def test_every_key_of_trl_is_one_of_its_classes() -> None:
    import trl

    names = ("SFTConfig", "DPOConfig", "KTOConfig", "RewardConfig", "ModelConfig", "ScriptArguments")
    known = {field.name for name in names for field in dataclasses.fields(getattr(trl, name))}
    assert {*TRL.keys, *TRL.batch, *TRL.defaults} - known == {"warmup_ratio"}, "of older versions of transformers"
    assert run_of({**SMALL_TRL, "beta": 0.3}, "kto")[0]["kto"] == {"beta": 0.3}


@pytest.mark.parametrize(("values", "key", "value"), [
    (FACTORY, "pref_loss", "simpo"), (FACTORY, "lr_scheduler_type", "warmup_of_tomorrow"), (FACTORY, "val_size", 100),
    (AXOLOTL, "warmup_steps", 123), (SMALL_TRL, "report_to", ["a tracker of tomorrow"]),
    (AXOLOTL, "lora_target_modules", r"layers.\d+.(q|v)_proj"),
])  # fmt: skip
def test_a_value_that_a_run_cannot_have_is_listed(values: dict[str, Any], key: str, value: Any) -> None:
    run, _, untranslated = run_of({**values, key: value})
    assert key in untranslated and repr(value) not in str(run)
    assert key != "warmup_steps" or "warmup_ratio" not in run, "a default that the tool would not use"


def test_what_a_data_set_says_is_translated_or_listed() -> None:
    """Keys of one data set, and those of an objective that the run does not have."""
    pair = {"path": "org/x", "type": "chat_template.default", "field_messages": "turns", "split": "train[:9%]"}
    pairs = {"rl": "dpo", "sample_packing": False, "datasets": [pair | {"roles": {"user": ["u"]}}]}
    run, _, left = run_of({**AXOLOTL, **pairs})
    assert run["data"]["train"] == [{"source": "org/x", "format": "preference", "columns": {"prompt": "turns"}}]
    assert {"datasets[0].split", "datasets[0].roles"} <= left
    assert "datasets[0].type" in run_of({**AXOLOTL, "datasets": [{"path": "x", "type": "alpaca:phi"}]})[2]
    chats = {"file_name": "c.json", "formatting": "sharegpt", "columns": {"messages": "turns"}, "num_samples": 5}
    info = {
        "chats": chats | {"tags": {"role_tag": "who", "content_tag": "what"}},
        "odd": chats | {"key_of_tomorrow": 1},
        "roles": chats | {"tags": {"user_tag": "U", "assistant_tag": "A"}},
        "talks": {"file_name": "t.json", "columns": {"prompt": "q", "history": "history"}},
        "hubs": {"hf_hub_url": "org/x", "ms_hub_url": "o/x", "om_hub_url": "o/x", "columns": None, "tags": None},
    }
    Path("data/dataset_info.json").write_text(json.dumps(info))
    sft = {**FACTORY, "stage": "sft", "dataset": "chats", "enable_thinking": False, "report_to": "none"}
    assert "enable_thinking" in translate_of(sft), "a template that is not here"
    Path("base").mkdir()
    Path("base/chat_template.jinja").write_text("{{ enable_thinking }}")
    run, _, left = run_of({**sft, "model_name_or_path": "./base"})
    columns = {"messages": "turns", "role": "who", "content": "what"}
    assert run["data"]["train"] == [{"source": "data/c.json", "columns": columns, "limit": 5, "format": "sharegpt"}], (
        "the keys alone fit two formats"
    )
    assert run["data"]["template_arguments"] == {"enable_thinking": False}
    assert "report_to" not in left and {"pref_beta", "pref_loss"} <= left
    assert all("dataset" in translate_of({**sft, "dataset": name}) for name in ("odd", "roles"))
    assert run_of({**sft, "dataset": "hubs"})[0]["data"]["train"] == [{"source": "org/x"}]
    talks = [{"source": "data/t.json", "columns": {"instruction": "q"}}]
    assert run_of({**sft, "dataset": "talks"})[0]["data"]["train"] == talks


@pytest.mark.parametrize(("given", "ratio"), [
    ({"warmup_steps": 10, "warmup_ratio": 0.05, "max_steps": 100}, 0.1),
    ({"warmup_ratio": 0.05, "warmup_steps": 10, "max_steps": 100}, 0.1),
    ({"warmup_ratio": 0.1, "warmup_steps": 0}, 0.1), ({"warmup_steps": 0}, 0), ({"warmup_steps": "auto"}, None),
])  # fmt: skip
@pytest.mark.parametrize("values", [AXOLOTL, FACTORY, SMALL_TRL])
def test_steps_of_warm_up_precede_its_ratio(values: dict[str, Any], given: dict[str, Any], ratio: float | None) -> None:
    others = {key: value for key, value in values.items() if not key.startswith("warmup")}
    run, _, untranslated = run_of(others | given)
    assert run.get("warmup_ratio") == ratio and (ratio is not None or "warmup_steps" in untranslated)


@pytest.mark.parametrize("key", ["neftune_noise_alpha", "a_key_of_tomorrow"])
@pytest.mark.parametrize("values", [AXOLOTL, FACTORY, SMALL_TRL])
def test_a_key_without_a_counterpart_is_listed_unless_it_is_off(values: dict[str, Any], key: str) -> None:
    assert key in run_of({**values, key: 5})[2] and key not in run_of({**values, key: None})[2]


def test_values_that_contradict_each_other_are_not_chosen_from() -> None:
    run, _, left = run_of(
        {**SMALL_TRL, "bf16": True, "fp16": True, "completion_only_loss": False, "disable_dropout": False}
    )
    assert "precision" not in run and {"bf16", "fp16", "disable_dropout"} <= left and run["data"]["loss_on"] == "all"
    with pytest.raises(ConfigError, match="no whole number for gradient_accumulation_steps"):
        run_of({**SMALL_TRL, "gradient_accumulation_steps": 0})


def test_files_are_recognized_and_those_of_other_meanings_are_not_judged_as_trainers() -> None:
    assert [recognize(values) for values in (AXOLOTL, FACTORY, SMALL_TRL)] == list(TOOLS)
    assert recognize({"learning_rate": 1}) is None and recognize([1]) is None
    for values, name in ((AXOLOTL, "Axolotl"), (FACTORY, "LLaMA-Factory")):
        Path("file.yaml").write_text(yaml.safe_dump(values))
        with pytest.raises(ConfigError, match=rf"file\.yaml: it is a file of {name}, .* shardmake init --from file"):
            read_source(Path("file.yaml"))
    Path("file.yaml").write_text("learning_rate: 1")
    with pytest.raises(ConfigError, match=r"^--from: file\.yaml is a file of none of the known tools\."):
        translate(Path("file.yaml"), 1)
