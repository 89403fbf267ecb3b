"""Which ranks read the weights of the base model, and which get an empty model for others to fill."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from shardmake.config.models import Strategy
from shardmake.train import load_model
from tests.unit.plans import make_training_settings


@pytest.mark.parametrize(
    ("strategy", "method", "local_rank", "reads"),
    [
        ("fsdp", "full", "0", True),
        ("fsdp", "full", "1", False),
        ("fsdp", "lora", "1", False),
        ("fsdp", "qlora", "0", True),
        ("fsdp", "qlora", "1", True),  # accelerate does not broadcast 4-bit weights
        ("ddp", "full", "1", True),
        ("ddp", "qlora", "1", True),
        ("zero3", "full", "1", True),  # transformers reads on rank 0 alone
    ],
)
def test_ranks_that_read_the_weights(
    monkeypatch: pytest.MonkeyPatch, strategy: Strategy, method: str, local_rank: str, reads: bool
) -> None:
    source = SimpleNamespace(from_pretrained=lambda *names, **options: options)
    monkeypatch.setattr(load_model, "AutoModelForCausalLM", source)
    monkeypatch.setattr(load_model, "AutoConfig", source)
    monkeypatch.setattr(load_model, "_empty_model", lambda *given: None)
    monkeypatch.setattr(load_model, "_four_bit_config", lambda dtype: "four bits")
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    loaded = cast(dict[str, Any] | None, load_model.load_base(make_training_settings(strategy, method=method)))
    assert (loaded is not None) is reads
    if loaded is not None:
        assert loaded.get("quantization_config") == ("four bits" if method == "qlora" else None)
