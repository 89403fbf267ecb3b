"""Checkpoints that lack weights of a model or hold others: refused for models and adapters."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel, TrainingArguments

from shardmake.core.errors import CheckpointError
from shardmake.run.training_settings import AdapterMethod
from shardmake.train import load_model
from shardmake.train.load_model import refuse_partial_states
from shardmake.train.preferences import WithReference, read_log_probs
from shardmake.train.script_hooks import ScriptObserver
from shardmake.train.sharded_trainer import ShardedTrainer, save_weights
from tests.mixtures import mixture_configs
from tests.unit.train.conftest import tiny_llama


def tied_llama() -> PreTrainedModel:
    return tiny_llama(tie_word_embeddings=True)


def adapted_llama() -> Any:
    return get_peft_model(tied_llama(), LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))


def guarded(model: Any) -> Any:
    refuse_partial_states(model)
    return model


def load(model: Any, folder: Path) -> None:
    """Load as `ShardedTrainer._load_from_checkpoint` does under DDP."""
    accelerator = SimpleNamespace(unwrap_model=lambda wrapped, **_: wrapped)
    trainer = SimpleNamespace(is_deepspeed_enabled=False, is_fsdp_enabled=False, accelerator=accelerator, model=model)
    ShardedTrainer._load_from_checkpoint(trainer, str(folder))


def change(folder: Path, **changes: torch.Tensor | None) -> None:
    """Add, replace or (None) remove weights of the only file in ``folder``."""
    path = next(folder.glob("*.safetensors"))
    held = {**load_file(path), **changes}
    save_file({name: value for name, value in held.items() if value is not None}, path, metadata={"format": "pt"})


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_trained_experts_come_back(family: str, tmp_path: Path) -> None:
    """transformers' Trainer resumes a mixture with the experts of the base model (transformers issue 48805)."""
    trained, resumed = (AutoModelForCausalLM.from_config(mixture_configs()[family]) for _ in range(2))
    refuse_partial_states(resumed)
    save_weights(trained, tmp_path)
    load(resumed, tmp_path)
    saved, found = trained.state_dict(), resumed.state_dict()
    assert [name for name in saved if not torch.equal(saved[name], found[name])] == []


def test_tied_weights_are_stored_once(tmp_path: Path) -> None:
    model = guarded(tied_llama())
    save_weights(tied_llama(), tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    load(model, tmp_path)


@pytest.mark.parametrize(("changes", "message"), [
    ({"model.norm.weight": None}, r"LlamaForCausalLM: 1 name missing \(model\.norm\.weight\); training would"),
    ({"model.embed_tokens.weight": None}, "2 names missing"),
    ({"extra": torch.ones(1)}, r"1 name not part of the model \(extra\)"),
])  # fmt: skip
def test_a_checkpoint_of_another_model_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    model = guarded(tied_llama())
    save_weights(model, tmp_path)
    change(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=message):
        load(model, tmp_path)


def test_an_adapter_must_be_complete_and_the_frozen_weights_need_not_be_there(tmp_path: Path) -> None:
    model = guarded(adapted_llama())
    save_weights(model, tmp_path)
    load(model, tmp_path)
    name = next(iter(load_file(tmp_path / "adapter_model.safetensors")))
    change(tmp_path, **{name: None})
    with pytest.raises(CheckpointError, match=r"PeftModelForCausalLM: 1 name missing \(base_model"):
        load(model, tmp_path)


def test_an_adapter_of_other_layers_is_not_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapted_llama().save_pretrained(tmp_path)
    monkeypatch.setattr(load_model, "load_base", lambda *_: tied_llama())
    monkeypatch.setattr(load_model, "average_router_loss", lambda *_: None)
    method = AdapterMethod(kind="lora", rank=8, alpha=16, dropout=0, targets=["up_proj"], adapter=str(tmp_path))
    model = SimpleNamespace(model_class=SimpleNamespace(new_head=False))
    settings: Any = SimpleNamespace(arguments={"seed": 1}, method=method, loss="", model=model)
    with pytest.raises(CheckpointError, match=r"lora.adapter .* is not one of the targets \['up_proj'\].*resume_from"):
        load_model.load_model(settings, TrainingArguments(str(tmp_path)))


def test_scales_of_frozen_weights_in_four_bits_belong_to_the_model() -> None:
    """DeepSpeed's checkpoint of QLoRA has them without the weight."""
    model = guarded(adapted_llama())
    state = {name: value for name, value in model.state_dict().items() if "lora" in name}
    weight = next(name for name in model.state_dict() if name.endswith("q_proj.base_layer.weight"))
    model.load_state_dict(state | {f"{weight}.absmax": torch.ones(1)}, strict=False)
    with pytest.raises(CheckpointError, match="not part of the model"):
        model.load_state_dict(state | {"extra.absmax": torch.ones(1)}, strict=False)


def test_the_trainer_of_a_script_refuses_them_too() -> None:
    class Trainer:
        model = tied_llama()
        _get_num_items_in_batch = _save_optimizer_and_scheduler = None

    trainer = Trainer()
    ScriptObserver.hook_trainer(SimpleNamespace(), SimpleNamespace(Trainer=Trainer))  # type: ignore[arg-type]
    complete = SimpleNamespace(missing_keys=["lm_head.weight"], unexpected_keys=[])
    Trainer._issue_warnings_after_load(trainer, complete)  # type: ignore[attr-defined]
    with pytest.raises(CheckpointError, match="1 name not part of the model"):
        partial = SimpleNamespace(missing_keys=[], unexpected_keys=["model.layers.0.mlp.experts.0.up_proj.weight"])
        Trainer._issue_warnings_after_load(trainer, partial)  # type: ignore[attr-defined]


NAMES = ("ref_chosen_logps", "ref_rejected_logps")
STORED = {"train": torch.tensor([[-1.0, -2.5], [-3.0, -4.0]]), "eval": torch.tensor([[-5.0, -6.0]])}


def splits(train: int = 2) -> dict[str, WithReference]:
    return {
        "train": WithReference([{"prompt_ids": [n]} for n in range(train)], NAMES),
        "eval": WithReference([{"prompt_ids": [9]}], NAMES),
    }


@pytest.mark.parametrize("step", [0, 4])
def test_what_was_computed_is_read_and_each_example_has_that_of_its_answers(tmp_path: Path, step: int) -> None:
    save_file(STORED, tmp_path / "r.safetensors")
    found = read_log_probs(tmp_path / "r.safetensors", splits(), step)
    assert found is not None and found.keys() == STORED.keys()
    assert all(torch.equal(found[name], values) for name, values in STORED.items())
    split = splits()["train"]
    split.log_probs = STORED["train"]
    assert split[0] == {"prompt_ids": [0], "ref_chosen_logps": -1.0, "ref_rejected_logps": -2.5}


@pytest.mark.parametrize(("damage", "train", "message"), [
    (lambda file: file.unlink(), 2, "No such file"), (lambda file: file.write_bytes(file.read_bytes()[:-3]), 2, r"\w+"),
    (lambda file: None, 3, "belongs to other data"),
], ids=["missing", "cut", "other data"])  # fmt: skip
def test_without_a_whole_file_only_step_1_may_follow(tmp_path: Path, damage: object, train: int, message: str) -> None:
    """Later the trained model is not the reference any more."""
    file = tmp_path / "r.safetensors"
    save_file(STORED, file)
    assert callable(damage)
    damage(file)
    assert read_log_probs(file, splits(train), 0) is None
    with pytest.raises(CheckpointError, match=rf"r\.safetensors\. .*{message}.*has 4 steps\. Restore the file"):
        read_log_probs(file, splits(train), 4)
