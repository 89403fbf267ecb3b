"""The adapter_config.json that is written beside a checkpoint is PEFT's own."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from shardmake.core.private_names import library_warnings
from shardmake.train.adapter_config import write_adapter_configs
from tests.unit.train.conftest import tiny_llama

LORA = LoraConfig(r=2, lora_alpha=6, use_rslora=True, target_modules=["q_proj", "v_proj"])


@pytest.fixture
def base(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model that was loaded from a folder."""
    model = tiny_llama()
    model.name_or_path = str(tmp_path_factory.mktemp("base"))
    model.config.save_pretrained(model.name_or_path)
    return model


def read(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "adapter_config.json").read_text())
    return found | {"target_modules": sorted(found["target_modules"])}


@pytest.mark.parametrize("task", [None, "CAUSAL_LM"])
def test_it_is_the_file_of_pefts_save_pretrained(base: Any, tmp_path: Path, task: str | None) -> None:
    write_adapter_configs(base, tmp_path)
    assert not list(tmp_path.iterdir()), "without adapters"
    config = LoraConfig(**LORA.to_dict() | {"task_type": task})
    model = get_peft_model(base, config)
    write_adapter_configs(torch.nn.Sequential(model), tmp_path / "ours")
    assert not config.inference_mode, "the trained adapter stays trainable"
    model.save_pretrained(tmp_path / "theirs")
    assert read(tmp_path / "ours") == read(tmp_path / "theirs")
    assert [path.name for path in (tmp_path / "ours").iterdir()] == ["adapter_config.json"]


@pytest.mark.parametrize(("first", "second"), [("default", "other"), ("mine", "ref")])
def test_the_second_adapter_has_a_folder_of_its_name(base: Any, tmp_path: Path, first: str, second: str) -> None:
    """The default one needs none, nor does the only one beside TRL's reference."""
    model = get_peft_model(base, LORA, adapter_name=first)
    model.add_adapter(second, LoraConfig(r=2, lora_alpha=7, target_modules=["q_proj"]))
    write_adapter_configs(model, tmp_path)
    assert read(tmp_path)["lora_alpha"] == 6 and read(tmp_path / second)["lora_alpha"] == 7
    assert {path.name for path in tmp_path.iterdir()} == {"adapter_config.json", second}


@pytest.mark.skipif(any("add_adapter" in line for line in library_warnings()), reason="with an older PEFT it stops")
def test_an_adapter_of_transformers_own_integration_is_described(base: Any, tmp_path: Path) -> None:
    base.add_adapter(LORA)
    write_adapter_configs(base, tmp_path)
    assert read(tmp_path)["base_model_name_or_path"] == base.name_or_path


def test_a_programs_file_stays_and_is_compared(base: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = get_peft_model(base, LORA)
    for _ in range(2):
        write_adapter_configs(model, tmp_path)
    assert not caplog.records
    path = tmp_path / "adapter_config.json"
    other = json.dumps(json.loads(path.read_text()) | {"lora_alpha": 8})
    words = ("is not of the adapter that is saved beside it: lora_alpha differ", "Cannot read the adapter's settings")
    for text, message in zip((other, "{"), words, strict=True):
        path.write_text(text)
        write_adapter_configs(model, tmp_path)
        assert path.read_text() == text and message in caplog.messages[-1]
