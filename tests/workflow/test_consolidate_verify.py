"""Verification detects every kind of damage in a model."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from shardmake.consolidate.merge import consolidate
from shardmake.consolidate.verify import verify
from shardmake.core.errors import ShardmakeError
from tests.workflow.consolidate_checkpoints import SHAPE, check_loading_in_process

pytestmark = pytest.mark.usefixtures("loading_in_process")
Q = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain folder as DDP training saves it, with tokenizer files and a chat template."""
    folder = tmp_path_factory.mktemp("run") / "checkpoint-5"
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SHAPE, attention_bias=True)).save_pretrained(folder, max_shard_size="30KB")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "optimizer.pt").write_bytes(b"not part of the model")
    return folder


@pytest.fixture(scope="module")
def merged(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("out") / "model"
    with pytest.MonkeyPatch.context() as patch:
        check_loading_in_process(patch)
        consolidate(checkpoint, out, base=checkpoint, dtype="bf16", max_shard_size="20KB")
    return out


@pytest.fixture
def model(merged: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(merged, tmp_path / "model"))


def test_folder_equals_the_output_of_save_pretrained(checkpoint: Path, model: Path) -> None:
    assert {path.name for path in model.iterdir() if path.suffix != ".safetensors"} == {
        "config.json", "generation_config.json", "model.safetensors.index.json", "tokenizer.json",
        "chat_template.jinja", "receipt.json",
    }  # fmt: skip
    config = json.loads((model / "config.json").read_text())
    assert config["dtype"] == "bfloat16" and "torch_dtype" not in config
    loaded = LlamaForCausalLM.from_pretrained(model)
    original = LlamaForCausalLM.from_pretrained(checkpoint).to(torch.bfloat16)
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), original.parameters(), strict=True))


def test_valid_model_and_its_receipt(checkpoint: Path, model: Path) -> None:
    found = verify(model, checkpoint)
    receipt = json.loads((model / "receipt.json").read_text())
    assert receipt["verification"] == {**found.model_dump(), "compared_with": None}
    assert found.compared_with == str(checkpoint)
    assert receipt["step"] == 5 and found.architecture == "LlamaForCausalLM" and found.dtype == "bfloat16"
    assert set(found.files) == {path.name for path in model.iterdir()} - {"receipt.json"}
    assert all(".bias" in name for name in found.zero) and found.zero


def change(
    name: str, value: Callable[[torch.Tensor], torch.Tensor], new: str | None = None
) -> Callable[[Path], None]:  # fmt: skip
    """Rewrite one tensor, under a ``new`` name, and remove the receipt, whose checksums would detect the change."""

    def damage(model: Path) -> None:
        (model / "receipt.json").unlink()
        file = model / "model.safetensors.index.json"
        index = json.loads(file.read_text())
        path = model / index["weight_map"][name]
        index["weight_map"][new or name] = index["weight_map"].pop(name)
        tensors = load_file(path)
        tensors[new or name] = value(tensors.pop(name)).contiguous()
        file.write_text(json.dumps(index))
        save_file(tensors, path, metadata={"format": "pt"})

    return damage


def poison(tensor: torch.Tensor) -> torch.Tensor:
    tensor[1, 2] = float("nan")
    return tensor


def append(pattern: str) -> Callable[[Path], None]:
    def damage(model: Path) -> None:
        with sorted(model.glob(pattern))[0].open("ab") as file:
            file.write(b" ")

    return damage


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (change(Q, poison), f"{Q} holds values that are not finite"),
        (change(Q, lambda tensor: tensor[:12]), rf"shape of {Q} is \[12, 24\], the model's \[24, 24\]"),
        (
            change(Q, torch.clone, Q.replace("q_proj", "query")),
            rf"{Q} is missing(.|\n)*self_attn\.query\.weight is not part of LlamaForCausalLM",
        ),
        (append("tokenizer.json"), r"tokenizer\.json differs from the receipt"),
        (lambda model: (model / "chat_template.jinja").unlink(), "in the receipt, but not in the folder"),
        (append("model-00001-*.safetensors"), "is not a complete safetensors file"),
        (lambda model: next(model.glob("model-00002-*")).unlink(), "is missing. The model is not complete"),
        (lambda model: (model / "notes.txt").touch(), r"notes\.txt is not in the receipt"),
        (lambda model: (model / "old.safetensors").touch(), r"old\.safetensors is not part of the model"),
    ],
)
def test_damage_is_reported(model: Path, damage: Callable[[Path], None], message: str) -> None:
    damage(model)
    with pytest.raises(ShardmakeError, match=message):
        verify(model)


def test_unusual_values_are_reported(model: Path) -> None:
    """A banned token has a row of -inf, and some models are published with a matrix of zeros."""
    change(Q, torch.zeros_like)(model)

    def ban(tensor: torch.Tensor) -> torch.Tensor:
        tensor[3] = -torch.inf
        return tensor

    (model / "receipt.json").touch()  # it is removed again
    change("lm_head.weight", ban)(model)
    found = verify(model)
    assert found.remarks() == [f"{Q} is all zero.", "1 rows of lm_head.weight are -inf."]


def test_one_different_bit_is_detected(checkpoint: Path, model: Path) -> None:
    def flip(tensor: torch.Tensor) -> torch.Tensor:
        tensor.view(torch.int16)[3, 3] ^= 1
        return tensor

    change(Q, flip)(model)
    verify(model)
    with pytest.raises(ShardmakeError, match=f"{Q} differs"):
        verify(model, checkpoint)
