"""Find out what a model's class can do, without its weights; `shardmake.plan.abilities` runs this as a process.

The class answers for attention kernels and gradient checkpointing. Whether it keeps packed examples apart is stated
nowhere, so a small model of the same class runs `shardmake.data.dataset.check_isolation` with random weights.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from shardmake.checkpoint.formats.lora import UNSUPPORTED
from shardmake.core.errors import ModelError
from shardmake.core.process import answer_request
from shardmake.memory.parameter_inventory import causal_class, parse_config
from shardmake.plan.abilities import KERNELS, check_class
from shardmake.plan.shrink import shrunk

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_FLAGS = {"flash": "_supports_flash_attn", "sdpa": "_supports_sdpa"}
_LARGEST = 100_000_000
"""Parameters of a model that is small enough to run here."""


def answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `shardmake.plan.abilities.Abilities` for the requested model."""
    source, trust_remote_code = request["source"], request["trust_remote_code"]
    config = parse_config(request["config"], source, trust_remote_code)
    _check_kind(config, request["config"], source, trust_remote_code)
    model = _build(config, source, trust_remote_code)
    kernels = [kernel for kernel in KERNELS if _supports(model, kernel)]
    return {
        "model_class": type(model).__name__,
        "attention": kernels,
        "mixing": [kernel for kernel in kernels if kernel != "flash" and _mixes(config, kernel, trust_remote_code)],
        "gradient_checkpointing": bool(model.supports_gradient_checkpointing),
        "unmergeable": _unmergeable(model, request["adapters"]) if request["adapters"] else [],
    }


def _check_kind(config: Any, values: Mapping[str, Any], source: str, trust_remote_code: bool) -> None:
    """Raise a `ModelError` unless training can load the model as a causal language model."""
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(
            f"Model cannot be trained: {source} is an encoder-decoder model ({config.model_type}). Shardmake trains "
            "causal language models, which have a decoder alone. Name one of these, such as a Llama, Qwen or Gemma."
        )
    if trust_remote_code and "AutoModelForCausalLM" in (values.get("auto_map") or {}):
        return
    check_class(values, causal_class(config.model_type, source), source)


def _build(config: Any, source: str, trust_remote_code: bool) -> "PreTrainedModel":
    import torch
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(
                config, attn_implementation="eager", trust_remote_code=trust_remote_code
            )
    except Exception as error:  # a model's code may raise anything for unusual sizes
        raise ModelError(f"{source}: transformers cannot build this model: {error}") from None


def _supports(model: "PreTrainedModel", kernel: str) -> bool:
    """Return True if the class and those of all its parts support ``kernel``."""
    from transformers import PreTrainedModel

    flag = _FLAGS.get(kernel)
    parts = (part for part in model.modules() if isinstance(part, PreTrainedModel))
    return flag is None or all(getattr(part, flag, False) for part in parts)


def _mixes(config: Any, kernel: str, trust_remote_code: bool) -> bool:
    """Return True if a small model of this class mixes packed examples; False if that cannot be tried."""
    import torch

    from shardmake.data.dataset import Collator, check_isolation

    collator = Collator(sequence_length=16, pad_token_id=0, packing=True, flat=False)
    for model in _small_models(config, kernel, trust_remote_code):
        try:
            check_isolation(model, collator, torch.device("cpu"))
        except ModelError:
            return True
        except Exception as error:  # the sizes do not suit this class, or it rejects what a packed batch has
            if "position_ids" in str(error) or "use_cache" in str(error):
                return True
            continue
        return False
    return False


def _small_models(config: Any, kernel: str, trust_remote_code: bool) -> Iterator["PreTrainedModel"]:
    """Yield models of the class with random weights, the smallest first; none if no sizes suit the class."""
    import torch
    from transformers import AutoModelForCausalLM

    for narrow in (True, False):
        try:
            small = type(config).from_dict(shrunk(config.to_dict(), narrow=narrow), name_or_path=config.name_or_path)
            options = {"attn_implementation": kernel, "trust_remote_code": trust_remote_code, "dtype": torch.float32}
            with torch.device("meta"):
                size = AutoModelForCausalLM.from_config(small, **options).num_parameters()
            if size > _LARGEST:
                continue
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(small, **options)
        except Exception:  # the sizes do not suit this class
            continue
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        yield model


def _unmergeable(model: "PreTrainedModel", adapters: Mapping[str, Any]) -> list[str]:
    """Return the features of the adapters that `shardmake consolidate` refuses."""
    import torch
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=adapters["rank"], target_modules=adapters["targets"], task_type="CAUSAL_LM")
    try:
        with torch.device("meta"):
            adapted = get_peft_model(model, config)
    except ValueError as error:
        raise ModelError(f"PEFT cannot adapt this {type(model).__name__}: {error}") from None
    return [feature for feature in UNSUPPORTED if getattr(adapted.peft_config["default"], feature, None)]


if __name__ == "__main__":
    answer_request(answer)
