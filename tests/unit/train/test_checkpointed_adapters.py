"""Adapters in layers that are wrapped for activation checkpointing are saved and loaded."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from peft.tuners import tuners_utils
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from shardmake.train import script_hooks
from shardmake.train.library_patches import name_checkpointed_adapters
from tests.unit.train.conftest import tiny_llama
from tests.unit.train.test_script_hooks import make_context


@pytest.fixture(autouse=True)
def original(monkeypatch: pytest.MonkeyPatch) -> Any:
    """PEFT's own function, as before any other test."""
    find = tuners_utils._get_tuner_state_dict_key_prefixes
    find = getattr(find, "__wrapped__", find)
    monkeypatch.setattr(tuners_utils, "_get_tuner_state_dict_key_prefixes", find)
    return find


def checkpointed_model() -> Any:
    """Return a model with adapters, wrapped as Accelerate wraps its layers under FSDP, and the adapters' names."""
    model: Any = get_peft_model(tiny_llama(num_hidden_layers=2), LoraConfig(target_modules=["q_proj"]))
    names = get_peft_model_state_dict(model).keys()
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, LlamaDecoderLayer))
    return model, names


def test_adapters_of_checkpointed_layers_are_saved_and_loaded() -> None:
    name_checkpointed_adapters(tuners_utils)
    model, names = checkpointed_model()
    saved = get_peft_model_state_dict(model)
    assert saved.keys() == names and len(saved) == 4
    set_peft_model_state_dict(model, {name: torch.full_like(value, 0.5) for name, value in saved.items()})
    assert all((value == 0.5).all() for value in get_peft_model_state_dict(model).values())


def test_peft_is_changed_once(original: Any) -> None:
    for _ in range(3):
        name_checkpointed_adapters(tuners_utils)
    assert tuners_utils._get_tuner_state_dict_key_prefixes.__wrapped__ is original


def test_a_users_script_saves_them_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting: dict[str, Callable[[Any], None]] = {}

    class Recorded:
        def after(self, name: str, install: Callable[[Any], None]) -> None:
            waiting[name] = install

    monkeypatch.setattr(script_hooks, "ImportHooks", Recorded)
    script_hooks.install_hooks(make_context(tmp_path))
    model, names = checkpointed_model()
    assert not get_peft_model_state_dict(model), "PEFT has fixed it: remove name_checkpointed_adapters"
    waiting[tuners_utils.__name__](tuners_utils)
    assert get_peft_model_state_dict(model).keys() == names
