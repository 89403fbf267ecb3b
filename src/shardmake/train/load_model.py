"""Load the base model with as little host memory as the engine allows.

Under ZeRO-3 transformers reads the weights on rank 0 alone. Under FSDP it says so too, but in 5.23 every rank reads
them all; here the ranks of a node other than its first get an empty model, whose weights accelerate then broadcasts.
"""

import os
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from shardmake.config.strategies import FSDP


def load_base(settings: dict[str, Any]) -> PreTrainedModel:
    """The base model of ``training.json``, in the planned data type; empty where another rank's weights will arrive.

    TrainingArguments must exist already: they tell transformers to load sharded.
    """
    model = settings["model"]
    source = {"revision": model["revision"], "trust_remote_code": model["trust_remote_code"]}
    dtype = getattr(torch, model["dtype"])
    how = {"dtype": dtype, "attn_implementation": model["attention"]}
    if settings["method"]["kind"] == "qlora":
        how["quantization_config"] = _four_bits(dtype)
    if settings["expected"]["engine"] == FSDP and os.environ.get("LOCAL_RANK", "0") != "0":
        return _empty(AutoConfig.from_pretrained(model["path"], **source), how, model["trust_remote_code"])
    return AutoModelForCausalLM.from_pretrained(model["path"], **source, **how)


def _four_bits(dtype: torch.dtype) -> Any:
    """NF4 with double quantization (QLoRA, arXiv 2305.14314), stored in ``dtype`` so that FSDP can shard it."""
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
        bnb_4bit_quant_storage=dtype,
    )


def _empty(config: Any, how: dict[str, Any], trust_remote_code: bool) -> PreTrainedModel:
    """A model with right buffers and unwritten weights, which take address space and no memory.

    The weights must not be on the meta device: accelerate tells an optimizer's parameters apart by their addresses,
    which are all 0 there.
    """
    with torch.device("meta"):
        kind = type(AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code))
    model = kind.from_pretrained(None, config=config, state_dict={}, **how)
    reserved: dict[int, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                module._parameters[name] = reserved.setdefault(id(parameter), _reserve(parameter))
    model.tie_weights()
    return model


def _reserve(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.empty_like(parameter, device="cpu"), parameter.requires_grad)
