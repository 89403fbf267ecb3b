"""The text part of a composite whose tower's files are more than ranges of its parameters."""

from pathlib import Path

import pytest
import torch
from peft import get_peft_model
from transformers import AutoConfig, logging

from shardmake.config.methods import METHODS
from shardmake.consolidate.merge import consolidate
from shardmake.consolidate.verify import verify
from shardmake.run.model_class import ModelClass
from tests.unit.consolidate.test_mixtures import in_process

SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 64}
VISION = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
__all__ = ["in_process"]


@pytest.fixture
def whole(tmp_path: Path) -> ModelClass:
    """Write a Step 3.7 in a small size, and return its text part's class."""
    logging.disable_progress_bar()
    text = SIZES | {
        "num_key_value_heads": 1, "num_sliding_attention_heads": 2, "head_dim": 8, "n_routed_experts": 2,
        "num_experts_per_tok": 1, "moe_intermediate_size": 8, "sliding_window": 4, "layer_types": ["full_attention"],
    }  # fmt: skip
    config = AutoConfig.for_model("step3p7", text_config=text, vision_config=VISION)
    kind = ModelClass(name="Step3p7ForConditionalGeneration", text_part=True)
    torch.manual_seed(0)
    kind.whole.build(config, dtype=torch.float32).save_pretrained(tmp_path / "base")
    return kind


def test_an_adapter_of_the_text_is_merged_and_the_model_verified(whole: ModelClass, tmp_path: Path) -> None:
    base, adapter, out = (tmp_path / name for name in ("base", "adapter", "model"))
    part = whole.load(str(base), dtype=torch.float32)
    adapted = get_peft_model(part, METHODS["lora"].peft_config("CAUSAL_LM", part, rank=2, targets=["o_proj"]))
    for name, value in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(value)
    adapted.save_pretrained(adapter)
    consolidate(adapter, out, base=base, model_class=whole, workers=1)
    verify(base)
    verify(out, adapter, base=base)
    found, wanted = whole.load(str(out), dtype=torch.float32).state_dict(), adapted.merge_and_unload().state_dict()
    assert found.keys() == wanted.keys()
    assert all(torch.allclose(found[name], wanted[name], atol=1e-6) for name in wanted)
