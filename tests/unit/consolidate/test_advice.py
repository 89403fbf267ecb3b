"""The advice of a refusal is true: a merge that follows it succeeds. `tests/unit/run/test_adapter_settings.py` and
`tests/unit/checkpoint/formats/test_layouts.py` follow the advice about settings, ties, keys and resized vocabularies.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import LlamaConfig, LlamaForCausalLM

from shardmake.consolidate.merge import consolidate
from shardmake.core.errors import ShardmakeError
from tests.workflow.consolidate_checkpoints import check_loading_in_process, load_weights

SHAPE = LlamaConfig(
    vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=2,
)  # fmt: skip
QUERY = "model.layers.0.self_attn.q_proj.weight"
Options = dict[str, Any]
Change = Callable[[Path], object]
"""Changes the folder with ``base``, ``states`` (of the whole model) and ``adapter``."""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    check_loading_in_process(monkeypatch)
    torch.manual_seed(0)
    model = LlamaForCausalLM(SHAPE)
    model.save_pretrained(tmp_path / "base")
    (tmp_path / "states").mkdir()
    torch.save(model.state_dict(), tmp_path / "states" / "a.pt")
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    adapted.save_pretrained(tmp_path / "adapter")
    shutil.copytree(tmp_path / "adapter", tmp_path / "whole")
    (tmp_path / "whole" / "adapter_model.safetensors").unlink()
    torch.save(adapted.state_dict(), tmp_path / "whole" / "a.pt")
    return tmp_path


def states(change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    def write(place: Path) -> None:
        held = torch.load(place / "states" / "a.pt")
        torch.save({**held, QUERY: change(held[QUERY])}, place / "states" / "a.pt")

    return write


def tensors(file: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    def write(place: Path) -> None:
        held = {n: change(t) if "q_proj" in n else t for n, t in load_file(place / file).items()}
        save_file(held, place / file, metadata={"format": "pt"})

    return write


def moved(name: str, to: str) -> Change:
    return lambda place: (place / name).rename(place / to)


def in_columns(place: Path) -> None:
    """Write the whole model as two ranks that hold half of the columns of each matrix."""
    held = torch.load(place / "whole" / "a.pt")
    for rank in range(2):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
        mesh = init_device_mesh("cpu", (2,))
        parts = {
            name: DTensor.from_local(value.chunk(2, 1)[rank].contiguous(), mesh, [Shard(1)])
            if value.dim() == 2
            else value
            for name, value in held.items()
        }
        torch.save(parts, place / "whole" / f"model_world_size_2_rank_{rank}.pt")
        dist.destroy_process_group()
    (place / "whole" / "a.pt").unlink()


def alone(place: Path) -> None:
    consolidate(place / "whole", place / "alone", base=place / "base", adapter=True)


ADAPTER, BASE = "adapter/adapter_model.safetensors", "base/model.safetensors"
ADVICE: dict[str, tuple[str, Change | None, Options, str, Change | None, Options]] = {
    "base": ("states", None, {"base": None}, "Name the base model with --base, or", None, {}),
    "raw": ("states", None, {"base": None}, "or write the weights alone with --raw", None, {"base": None, "raw": True}),
    "raw alone": ("states", None, {"raw": True}, "Leave out --base and", None, {"raw": True, "base": None}),
    "contiguous": ("states", states(lambda t: t.T), {}, r"Call \.contiguous\(\) on it", states(torch.Tensor.contiguous),
        {}),
    "whole model": ("states", None, {"adapter": True}, r"Merge it without --adapter", None, {}),
    "base of an adapter": ("adapter", None, {"base": None}, "Name the base model's folder with --base", None, {}),
    "adapter in float32": ("adapter", tensors(ADAPTER, torch.Tensor.double), {}, "Save it in float32",
        tensors(ADAPTER, torch.Tensor.float), {}),
    "base in bf16": ("adapter", tensors(BASE, lambda t: t.to(torch.float8_e4m3fn)), {}, "Name the model in bf16",
        tensors(BASE, torch.Tensor.bfloat16), {}),
    "settings": ("whole", moved("whole/adapter_config.json", "x"), {}, "It holds the adapter's scale. Copy it there",
        moved("x", "whole/adapter_config.json"), {}),
    "adapter alone": ("whole", in_columns, {}, "Write the adapter alone with --adapter", alone,
        {"checkpoint": "alone"}),
}  # fmt: skip


@pytest.mark.parametrize("advice", ADVICE)
def test_a_merge_that_follows_the_advice_succeeds(advice: str, place: Path) -> None:
    name, damage, options, message, follow, changes = ADVICE[advice]
    if damage is not None:
        damage(place)
    arguments: Options = {"base": place / "base", **options}
    with pytest.raises(ShardmakeError, match=message):
        consolidate(place / name, place / "model", **arguments)
    if follow is not None:
        follow(place)
    followed = {"checkpoint": name, "base": place / "base", **changes}
    consolidate(place / followed.pop("checkpoint"), place / "model", **followed)
    trained, base = load_weights(place / "model"), torch.load(place / "states" / "a.pt")
    update = not torch.allclose(trained[QUERY].float(), base[QUERY].float(), atol=0.01)
    assert trained.keys() == base.keys() and update == (name != "states")
