"""Abilities of a model: attention kernels, packing, gradient checkpointing, adapters that can be merged.

The families that `shardmake.memory.families` writes down can do everything, so that no library is imported for them. Of
any other model, `shardmake.plan.inspect_model` asks the class in a process of its own, once per config and version.
"""

import ast
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from shardmake.config.attention import KERNELS, Attention, head_limit
from shardmake.config.models import Cluster, Run
from shardmake.core.errors import ConfigError, ModelError
from shardmake.memory.cache import cached_helper
from shardmake.memory.model import Decoder, Model, adapted_layers, inventory_request, is_head

MIXING_UNKNOWN: tuple[Attention, ...] = ("flash",)
"""Kernels that run on a GPU only, so that the ranks check whether they keep packed examples apart."""
DEQUANTIZED_BY_LOADING = frozenset({"compressed-tensors", "fp8", "metal", "mxfp4", "mxfp8"})
"""Methods whose configuration in transformers has the setting ``dequantize``."""
DEQUANTIZED_AFTER_LOADING = frozenset({"bitsandbytes", "higgs"})
"""Methods for which transformers implements ``PreTrainedModel.dequantize``."""
_ACTIVATION_TABLE = "ACT2CLS"
_LIGER_TABLE = "MODEL_TYPE_TO_APPLY_LIGER_FN"
_HELPER = "shardmake.plan.inspect_model"
_SOURCES = (
    "plan/inspect_model.py", "data/dataset.py", "data/varlen.py", "checkpoint/formats/hub_layout.py",
    "config/methods.py",
)  # fmt: skip


@dataclass(frozen=True)
class Abilities:
    """Abilities of one model in training."""

    model_class: str
    """The class that trains."""
    attention: tuple[Attention, ...] = KERNELS
    """Kernels that the class supports, the fastest first."""
    mixing: tuple[Attention, ...] = ()
    """Kernels with which packed examples see each other; never those of `MIXING_UNKNOWN`."""
    varlen_limit: str = ""
    """Why the class cannot train with varlen, as the rest of a sentence about it; empty if it can."""
    gradient_checkpointing: bool = True
    unmergeable: tuple[str, ...] = ()
    """Features of the run's adapters that the merge does not support; empty without adapters."""
    mergeable_targets: tuple[str, ...] = ()
    """Values of ``lora.targets`` whose adapters the merge supports; empty if those of the run are supported."""

    def best_attention(self, available: Iterable[Attention], *, packing: bool) -> Attention:
        """Return the first of the ``available`` kernels that the class supports and, if possible, that can pack."""
        supported = [kernel for kernel in available if kernel in self.attention] or ["eager"]
        return next((kernel for kernel in supported if not (packing and kernel in self.mixing)), supported[0])


def find_abilities(model: Model, run: Run) -> Abilities:
    """Return what ``model`` can do with the run's method.

    Raises:
        ModelError: transformers has no causal language model for this config, or its weights are quantized.
    """
    if not run.script:
        check_not_quantized(model)
    if model.decoder is not None:
        check_class(model.config, model.architecture, model.source)
        _check_activation(model.config, model.source)
        limit = _decoder_limit(model.config, model.decoder)
        return Abilities(model.architecture, KERNELS[1:] if limit else KERNELS, varlen_limit=limit)
    request = inventory_request(model.config, model.source, run.trust_remote_code)
    named = {"method": run.method, "rank": run.lora.rank, "targets": run.lora.targets}
    adapters = named if run.method_spec.has_adapters else None
    doing = f"Building a small {model.architecture}, to find which kernels and methods it supports"
    found = cached_helper(_HELPER, {**request, "adapters": adapters, "code": _code()}, doing)
    values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in found.items()}
    return Abilities(**values)


def _decoder_limit(config: Mapping[str, Any], decoder: Decoder) -> str:
    """Return why a model of the known families cannot train with varlen; empty if it can."""
    if config.get("attention_dropout"):
        return "has dropout in its attention (attention_dropout in config.json)"
    return head_limit(decoder.d)


def describe_quantized_base(model: Model, run: Run) -> list[str]:
    """Return a line about how the estimate counts the weights of a base whose files hold quantized ones.

    Only a script may train such a base, because it may dequantize it, or merge its adapters in its own way.
    """
    found = _declared_quantization(model.config)
    if not found:
        return []
    counted = "16 or 32 bits, as if it were dequantized"
    if run.method_spec.in_four_bits:
        counted = f"4 bits, as for method: {run.method}"
    return [f"the memory estimate counts the base in {counted}; its files hold quantized weights ({_named(*found)})"]


def _named(key: str, declared: Any) -> str:
    method = declared.get("quant_method", "an unnamed method") if isinstance(declared, Mapping) else declared
    return f"{key}: {method}"


def check_not_quantized(model: Model) -> None:
    """Raise a `ModelError` for a base whose files hold quantized weights, such as FP8 or MXFP4.

    Training them in 16 or 32 bits and merging would pair the new weights with a config that declares the old format.
    """
    if found := _declared_quantization(model.config):
        raise ModelError(
            f"Model cannot be trained: {model.source} declares quantized weights ({_named(*found)}). Name "
            f"the same model in 16 or 32 bits{_how_to_dequantize(found[1])}. For adapters on a base in 4 bits "
            "name that model with method: qlora, which quantizes it."
        )


def _how_to_dequantize(declared: Any) -> str:
    """Return how a user gets the model in 16 bits from its quantized weights; empty if transformers cannot do it."""
    method = declared.get("quant_method") if isinstance(declared, Mapping) else None
    if method in DEQUANTIZED_BY_LOADING:
        return ", or save one: load it with dequantize=True in transformers' quantization config, call save_pretrained"
    if method in DEQUANTIZED_AFTER_LOADING:
        return ", or save one: load it with transformers, call the model's dequantize() and save_pretrained"
    return ""


def _declared_quantization(config: Mapping[str, Any]) -> tuple[str, Any] | None:
    """Return the key of config.json about quantized weights, of the whole model or of its text part, and its value.

    ``compression_config`` is what compressed-tensors wrote before its format had a place in transformers.
    """
    text = config.get("text_config")
    parts = [config, text] if isinstance(text, Mapping) else [config]
    keys = ("quantization_config", "compression_config")
    return next(((key, part[key]) for part in parts for key in keys if part.get(key)), None)


def check_class(config: Any, trained: str, source: str) -> None:
    """Raise a `ModelError` if config.json names another class than ``trained``, which is the one that trains."""
    named = next(iter(config.get("architectures") or []), trained)
    if named != trained:
        raise ModelError(
            f"Model cannot be trained: {source} names the class {named}, but causal language models of this type are "
            f"{trained}. Some weights of that class would be missing or left over. Name a model that was saved as "
            f"{trained}."
        )


def _check_activation(config: Mapping[str, Any], source: str) -> None:
    """Raise a `ModelError` for an activation that transformers lacks, at which every rank would fail."""
    known = _table_keys("transformers", "activations.py", _ACTIVATION_TABLE)
    name = config.get("hidden_act")
    if name is not None and known and not (isinstance(name, str) and name in known):
        raise ModelError(
            f"Model cannot be trained: {source} has the hidden_act {name!r}, which transformers "
            f"{version('transformers')} does not know. Use the config.json that came with the weights. It knows "
            f"{', '.join(sorted(known))}."
        )


def check_settings(run: Run, abilities: Abilities) -> None:
    """Raise a `ConfigError` if the run asks for something that the model's class does not support.

    A user's script loads the model in its own way, so only its adapters are checked.
    """
    if abilities.unmergeable:
        targets = ", ".join(abilities.mergeable_targets)
        raise ConfigError(
            f"method: {run.method} with lora.targets {run.lora.targets} cannot be merged for {abilities.model_class}: "
            f"PEFT adapts it with {', '.join(abilities.unmergeable)}. "
            + (f"Set lora.targets: [{targets}], or take method: full." if targets else "Take method: full.")
        )
    if run.script:
        return
    if run.attention == "varlen" and abilities.varlen_limit:
        raise ConfigError(
            f"attention: varlen cannot be used: {abilities.model_class} {abilities.varlen_limit}. "
            f"Use {' or '.join(abilities.attention)}, or auto."
        )
    if run.attention != "auto" and run.attention not in abilities.attention:
        raise ConfigError(
            f"attention: {run.attention} cannot be used: {abilities.model_class} does not support it in transformers "
            f"{version('transformers')}. Use {' or '.join(abilities.attention)}, or auto."
        )
    if run.gradient_checkpointing is True and not abilities.gradient_checkpointing:
        raise ConfigError(
            f"gradient_checkpointing: true cannot be used: {abilities.model_class} does not support it. "
            "Use false, or auto."
        )


def check_packing(run: Run, abilities: Abilities, attention: Attention) -> None:
    """Raise a `ConfigError` if packed examples would see each other with the kernel ``attention``."""
    if not run.packing or run.script or attention not in abilities.mixing:
        return
    others = [kernel for kernel in abilities.attention if kernel not in (*abilities.mixing, *MIXING_UNKNOWN)]
    alternative = f", or attention: {others[0]}" if others else ""
    raise ConfigError(
        f"packing: true cannot be used: {abilities.model_class} mixes packed examples with attention {attention}, "
        f"because it does not keep them apart by their position ids. Set packing: false{alternative}."
    )


def check_loss(run: Run, model: Model) -> None:
    """Raise a `ConfigError` if the model or the run has no such loss; Liger would silently keep the plain one."""
    if run.loss == "chunked":
        _check_chunked(run, model)
    _check_adapted_head(run, model)
    if run.loss == "fused" and run.tensor_parallel > 1:
        raise ConfigError(
            "loss: fused cannot be used: with tensor_parallel each rank holds a part of the head, which Liger's loss "
            "would take for the whole. Set loss: plain."
        )
    model_type = model.model_type
    supported = _fused_model_types() if run.loss == "fused" and not run.script else None
    if supported is not None and model_type not in supported:
        raise ConfigError(
            f"loss: fused cannot be used: liger-kernel {version('liger-kernel')} has no kernels for the model type "
            f"{model_type!r}. Set loss: plain. It has kernels for {', '.join(sorted(supported))}."
        )


def _check_chunked(run: Run, model: Model) -> None:
    wrong = [
        (model.decoder is None, f"{model.architecture} is not of the Llama, Mistral, Qwen or Gemma family"),
        (run.script is not None, "a script computes its own loss"),
        (run.tensor_parallel > 1, "the ranks of a tensor-parallel group share the head"),
        (run.torch_compile, "torch's chunked loss does not run in compiled code"),
    ]
    for is_wrong, why in wrong:
        if is_wrong:
            raise ConfigError(f"loss: chunked cannot be used: {why}. Set loss: plain.")


def _check_adapted_head(run: Run, model: Model) -> None:
    """Raise a `ConfigError` for an adapter of the head, if the loss multiplies by the head's weights alone."""
    if run.loss == "plain" or not run.method_spec.has_adapters or run.script:
        return
    for layer in adapted_layers(model, run.lora.targets):
        if is_head(layer):
            raise ConfigError(
                f"loss: {run.loss} cannot be used with {layer.module} in lora.targets: this loss takes the head's own "
                f"weights, so its adapter would silently get no gradient. Set loss: plain, or remove {layer.module} "
                "from lora.targets."
            )


def check_activation_offload(run: Run, cluster: Cluster, model: Model) -> None:
    """Raise a `ConfigError` if this run, cluster or model cannot hold the inputs of layers on the host."""
    if not run.activation_offload:
        return
    wrong = [
        (cluster.is_cpu, "with accelerator: cpu all activations are in host memory"),
        (model.decoder is None, f"{model.architecture} is not of the Llama, Mistral, Qwen or Gemma family"),
        (run.gradient_checkpointing is False, "it offloads what gradient checkpointing keeps"),
        (run.script is not None, "a script sets up its own checkpointing"),
        (run.objective != "sft", f"it is not tested with objective: {run.objective}"),
        (run.tensor_parallel > 1, "it is not tested with tensor_parallel"),
        (run.torch_compile, "it is not tested with torch_compile"),
    ]
    for is_wrong, why in wrong:
        if is_wrong:
            raise ConfigError(f"activation_offload: true cannot be used: {why}. Remove activation_offload.")


def _fused_model_types() -> set[str] | None:
    """Return the model types in the table of the installed Liger; None if there is no such table.

    The table is read from the source, because importing it needs Triton and a GPU.
    """
    return _table_keys("liger_kernel", "transformers/monkey_patch.py", _LIGER_TABLE)


def _table_keys(package: str, file: str, table: str) -> set[str] | None:
    """Return the keys of a dictionary in the source of an installed package; None if it is not there."""
    found = find_spec(package)
    source = Path(found.origin).parent / file if found and found.origin else None
    if source is None or not source.is_file():
        return None
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == table:
            keys = getattr(node.value, "keys", ())
            return {key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str)}
    return None


def _code() -> str:
    """Return a digest of the code that answers, so that an edit is not answered from the cache."""
    import shardmake

    package = Path(shardmake.__file__).parent
    digests = (hashlib.sha256((package / name).read_bytes()).hexdigest() for name in _SOURCES)
    return "-".join([*digests, version("peft")])
