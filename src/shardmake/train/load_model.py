"""Load the base model with as little host memory as the engine allows, and add adapters for LoRA.

Under ZeRO-3 transformers reads the weights on rank 0 only. Its documentation promises the same under FSDP, but in 5.23
every rank reads them all. Here only the first rank of a node does; the others get an empty model, and accelerate
broadcasts the weights to them.
"""

import os
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, set_seed

from shardmake.config.strategies import FSDP
from shardmake.run.training_settings import FullMethod, TrainingSettings


def load_model(settings: TrainingSettings) -> PreTrainedModel:
    """Return the model to train: the base model, with adapters if the method is LoRA; the same on every rank."""
    set_seed(settings.arguments["seed"])
    method = settings.method
    model = load_base(settings)
    model.config.use_cache = False
    if isinstance(method, FullMethod):
        return model
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training

    if method.kind == "qlora":
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    adapters = LoraConfig(
        r=method.rank,
        lora_alpha=method.alpha,
        lora_dropout=method.dropout,
        target_modules=method.targets,
        task_type="CAUSAL_LM",
    )
    return get_peft_model(model, adapters)


def load_tokenizer(settings: TrainingSettings) -> Any:
    """Return the base model's tokenizer, which is saved with the checkpoints."""
    model = settings.model
    return AutoTokenizer.from_pretrained(model.path, revision=model.revision, trust_remote_code=model.trust_remote_code)


def model_configs(model: Any) -> list[Any]:
    """Return the parts of a model that describe it and contain no weights: configs, adapter configs."""
    adapters = getattr(model, "peft_config", {}).values()
    generation = [model.generation_config] if getattr(model, "generation_config", None) else []
    return [model.config, *generation, *adapters]


def load_base(settings: TrainingSettings) -> PreTrainedModel:
    """Return the base model of ``training.json`` in the planned data type; empty if another rank sends the weights.

    TrainingArguments must exist already: transformers reads them to load the model sharded.
    """
    model = settings.model
    source = {"revision": model.revision, "trust_remote_code": model.trust_remote_code}
    dtype = getattr(torch, model.dtype)
    options = {"dtype": dtype, "attn_implementation": model.attention}
    if settings.method.kind == "qlora":
        options["quantization_config"] = _four_bit_config(dtype)
    # Accelerate does not broadcast 4-bit weights, so every rank quantizes its own.
    receives = settings.expected.engine == FSDP and settings.method.kind != "qlora"
    if receives and os.environ.get("LOCAL_RANK", "0") != "0":
        return _empty_model(AutoConfig.from_pretrained(model.path, **source), options, model.trust_remote_code)
    return AutoModelForCausalLM.from_pretrained(model.path, **source, **options)


def _four_bit_config(dtype: torch.dtype) -> Any:
    """Return NF4 with double quantization (QLoRA, arXiv 2305.14314), stored in ``dtype`` so that FSDP can shard it."""
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
        bnb_4bit_quant_storage=dtype,
    )


def _empty_model(config: Any, options: dict[str, Any], trust_remote_code: bool) -> PreTrainedModel:
    """Return a model with correct buffers and unwritten weights, which use address space but no memory.

    The weights must not be on the meta device: accelerate identifies an optimizer's parameters by their addresses,
    which are all 0 there.
    """
    with torch.device("meta"):
        model_class = type(AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code))
    model = model_class.from_pretrained(None, config=config, state_dict={}, **options)
    reserved: dict[int, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                module._parameters[name] = reserved.setdefault(id(parameter), _reserve(parameter))
    model.tie_weights()
    return model


def _reserve(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.empty_like(parameter, device="cpu"), parameter.requires_grad)
