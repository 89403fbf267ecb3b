"""Abilities of a model: attention kernels, packing, gradient checkpointing, adapters that can be merged.

`shardmake.memory.families` has those of the families that it writes down, so that no library is imported for them. Of
any other model, `shardmake.plan.inspect_model` asks the class in a process of its own, once per config and version.
"""

import ast
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Literal

from shardmake.checkpoint.formats import quantized
from shardmake.config.attention import FLASH_KERNELS, KERNELS, Attention, head_limit
from shardmake.config.models import Run
from shardmake.core.errors import ModelError
from shardmake.memory.cache import cached_helper
from shardmake.memory.composites import COMPOSITES, absent_towers, text_type
from shardmake.memory.decoder_sizes import Decoder
from shardmake.memory.families import FAMILIES, NOT_TAKEN
from shardmake.memory.model import Model, inventory_request
from shardmake.run.model_class import is_same_class

MIXING_UNKNOWN: tuple[Attention, ...] = ("flash",)
"""Kernels that run on a GPU only, so that the ranks check whether they keep packed examples apart."""
DEQUANTIZED_BY_FETCH = frozenset({"compressed-tensors", "fp8", "mxfp4"})
"""Methods of `shardmake.fetch.dequantize`."""
DEQUANTIZED_BY_LOADING = frozenset({"compressed-tensors", "fp8", "metal", "mxfp4", "mxfp8"})
"""Methods whose configuration in transformers has the setting ``dequantize``."""
DEQUANTIZED_AFTER_LOADING = frozenset({"bitsandbytes", "higgs"})
"""Methods for which transformers implements ``PreTrainedModel.dequantize``."""
_SOURCES = tuple(
    Path(__file__).parents[1] / name
    for name in (
        "plan/inspect_model.py", "data/dataset.py", "data/varlen.py", "checkpoint/formats/hub_layout.py",
        "config/methods.py", "run/adapter_settings.py", "run/model_class.py", "run/text_part.py",
    )
)  # fmt: skip
"""The code that answers, so that an edit is not answered from the cache."""


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
    adapted_experts: tuple[str, ...] = ()
    """The fused weights of a mixture's experts that get adapters; empty without any."""
    frozen_experts: tuple[str, ...] = ()
    """Those that get none."""
    text_part: bool = False
    """The text part of a composite model is trained."""
    absent: tuple[str, ...] = ()
    """Towers of a composite model, which are not loaded: the merge takes their weights from the base model."""

    def describe_absent(self) -> list[str]:
        """Return a line about the towers of a composite model."""
        if not self.text_part:
            return []
        names = ", ".join(self.absent) or "the model has none"
        return [f"towers: absent ({names}): they take no memory, and the merge takes them from the base model"]

    def describe_experts(self) -> list[str]:
        """Return a line about the adapters of a mixture's experts."""
        adapted, frozen = (", ".join(names) for names in (self.adapted_experts, self.frozen_experts))
        held = [f"each has its own adapters of {adapted}" * bool(adapted), f"{frozen} stay as they are" * bool(frozen)]
        named = f" (to adapt them, name them in lora.targets: [..., {frozen}])" * bool(frozen)
        return [f"experts: {'; '.join(filter(None, held))}{named}"] if adapted or frozen else []

    def best_attention(self, available: Iterable[Attention], *, packing: bool) -> Attention:
        """Return the first of the ``available`` kernels that the class supports and, if possible, that can pack."""
        supported = [kernel for kernel in available if kernel in self.attention] or ["eager"]
        return next((kernel for kernel in supported if not (packing and kernel in self.mixing)), supported[0])


def find_abilities(model: Model, run: Run) -> Abilities:
    """Return what ``model`` can do with the run's method.

    Raises `ModelError` if transformers has no causal language model for this config, or a script trains a composite
    model.
    """
    if model.decoder is not None:
        check_class(model.config, model.architecture, model.source)
        _check_names(model.text_config, model.source)
    known = model.decoder if model.decoder is not None and _is_known(model) else None
    trusted = run.trust_remote_code
    abilities = _of_family(model, known) if known else Abilities(**_ask(model, trusted, "class"))
    if run.method_spec.has_adapters and (known is None or known.experts):
        named = {"method": run.method, **run.lora.model_dump(exclude={"alpha", "adapter", "train_tokens"})}
        abilities = replace(abilities, **_ask(model, trusted, "adapters", adapters=named))
    elif known and _may_be_renamed(model, known):
        _ask(model, trusted, "layout")  # a merge must be able to write it
    if run.script and abilities.text_part:
        raise ModelError(
            f"script cannot be used for {model.source}, a composite model: of its towers "
            f"({', '.join(abilities.absent)}), a script may train any part, and the memory estimate counts none. "
            "Remove script, so that the text part is trained, or name a text model."
        )
    return abilities


def _is_known(model: Model) -> bool:
    """Return True for a model of text alone, and for a composite of known towers whose class is in transformers."""
    is_composite = model.model_type in COMPOSITES
    return not is_composite or (absent_towers(model.config) is not None and bool(_class_body(model)))


def _class_body(model: Model) -> str:
    """Return the source of the class of ``model``; empty if transformers does not have it."""
    file = _folder("transformers") / "models" / model.model_type / f"modeling_{model.model_type}.py"
    text = file.read_text() if file.is_file() else ""
    return text.partition(f"\nclass {model.architecture}(")[2].partition("\nclass ")[0]


def _of_family(model: Model, decoder: Decoder) -> Abilities:
    """Return what a ``model`` of a family can do."""
    is_part, family = model.model_type in COMPOSITES, FAMILIES[text_type(model.text_config)]
    limit = family.varlen_limit or _decoder_limit(decoder)
    barred: tuple[Attention, ...] = ("varlen",) if limit else ()
    if is_part and "_supports_flash_attn = False" in _class_body(model):  # of Gemma, since transformers 5.24
        limit, barred = NOT_TAKEN, FLASH_KERNELS
    kernels = tuple(kernel for kernel in family.kernels if kernel not in barred)
    absent = absent_towers(model.config) or () if is_part else ()
    return Abilities(model.architecture, kernels, family.mixing, limit, text_part=is_part, absent=absent)


def _may_be_renamed(model: Model, decoder: Decoder) -> bool:
    """Return True if files beside the config hold a mixture, or weights under other names than the class.

    A class of text alone with plain attention has the names of its files.
    """
    folder, is_part = Path(model.source).parent, model.model_type in COMPOSITES
    if not (decoder.experts or decoder.linear or is_part):
        return False
    from shardmake.checkpoint.formats import huggingface

    if not huggingface.recognise(folder):
        return False
    return bool(decoder.experts) or not {tensor.name for tensor in model.tensors} <= {*huggingface.weight_names(folder)}


def has_plain_head(model: Model) -> bool:
    """Return True if the loss follows from the last hidden states and the head's weight alone."""
    if model.decoder is not None:
        return not (model.decoder.scaled_branches or model.decoder.caps_logits)
    return bool(_ask(model, model.trust_remote_code, "head")["plain"])


def attends_in_kernel(model: Model) -> bool:
    """Return True if tokens meet in the attention kernel alone, with heads that ranks can share."""
    if (decoder := model.decoder) is not None:  # DeepSpeed takes heads of one width and number (``ulysses_sp.py``)
        sizes = {(one.k, one.d, one.width) for one in (decoder, *decoder.of_layers)}
        return not (decoder.sinks or decoder.linear) and len(sizes) == 1 and decoder.width == decoder.d
    return bool(_ask(model, model.trust_remote_code, "tokens")["in_kernel"])


def _ask(model: Model, trust_remote_code: bool, about: str, **more: Any) -> dict[str, Any]:
    request = inventory_request(model.config, model.source, trust_remote_code)
    doing = f"Building a small {model.architecture}, to find which kernels and methods it supports"
    request |= {"about": about, **more}
    found = cached_helper("shardmake.plan.inspect_model", request, doing, _SOURCES)
    return {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}


def _decoder_limit(decoder: Decoder) -> str:
    """Return why a model of the known families cannot train with varlen; empty if it can."""
    if decoder.dropout[0]:
        return "has dropout in its attention (attention_dropout in config.json)"
    return head_limit(max(one.d for one in (decoder, *decoder.of_layers)))


def describe_quantized_base(model: Model, run: Run) -> list[str]:
    """Return a line about how the estimate counts the weights of a base whose files hold quantized ones.

    Only a script may train such a base, because it may dequantize it, or merge its adapters in its own way. Others get
    an estimate, with the base that they need.
    """
    found = quantized.declared(model.config)
    counted = "16 or 32 bits, as if it were dequantized"
    if run.method_spec.in_four_bits:
        counted = f"4 bits, as for method: {run.method}"
    line = f"the memory estimate counts the base in {counted}; its files hold quantized weights"
    return [f"{line} ({_named(*found)}){'' if run.script else f'. {_other_bases(found[1])}'}"] if found else []


def _named(key: str, declared: Any) -> str:
    method = declared.get("quant_method", "an unnamed method") if isinstance(declared, Mapping) else declared
    return f"{key}: {method}"


def check_not_quantized(model: Model) -> None:
    """Raise a `ModelError` for a base whose files hold quantized weights, such as FP8 or MXFP4.

    Training them in 16 or 32 bits and merging would pair the new weights with a config that declares the old format.
    """
    if found := quantized.declared(model.config):
        raise ModelError(
            f"Model cannot be trained: {model.source} declares quantized weights ({_named(*found)}). "
            f"{_other_bases(found[1])}"
        )


def _other_bases(declared: Any) -> str:
    return (
        f"Name the same model in 16 or 32 bits{_how_to_dequantize(declared)}. For adapters on a base in 4 bits name "
        "that model with method: qlora, which quantizes it."
    )


def _how_to_dequantize(declared: Any) -> str:
    """Return how a user gets the model in 16 bits from its quantized weights; empty if transformers cannot do it."""
    method = declared.get("quant_method") if isinstance(declared, Mapping) else None
    saved = "save one: load it with"
    ways = (
        (DEQUANTIZED_BY_FETCH,
         "write them once, for all runs: shardmake fetch NAME --dequantize FOLDER, then set model: FOLDER"),
        (DEQUANTIZED_BY_LOADING,
         f"{saved} dequantize=True in transformers' quantization config, call save_pretrained"),
        (DEQUANTIZED_AFTER_LOADING, f"{saved} transformers, call the model's dequantize() and save_pretrained"),
    )  # fmt: skip
    return next((f", or {way}" for methods, way in ways if method in methods), "")


def check_class(config: Any, trained: str, source: str) -> None:
    """Raise a `ModelError` if config.json names another class than ``trained``, which is the one that trains."""
    named = next(iter(config.get("architectures") or []), trained)
    if not is_same_class(named, trained):
        raise ModelError(
            f"Model cannot be trained: {source} names the class {named}, but causal language models of this type are "
            f"{trained}. Some weights of that class would be missing or left over. Name a model that was saved as "
            f"{trained}."
        )


def _check_names(config: Mapping[str, Any], source: str) -> None:
    """Raise a `ModelError` for an activation or a kind of RoPE that transformers lacks: every rank would fail."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    by_layer = [one for one in (rope, *(rope.values() if isinstance(rope, dict) else ())) if isinstance(one, dict)]
    ropes = table_keys("transformers", "modeling_rope_utils.py", "ROPE_INIT_FUNCTIONS")
    named = [("hidden_act", config.get("hidden_act"), table_keys("transformers", "activations.py", "ACT2CLS"))]
    named += [("rope_type", one.get("rope_type", one.get("type")), ropes and ropes | _ROPES) for one in by_layer]
    for key, name, known in named:
        if name is not None and known and not (isinstance(name, str) and name in known):
            raise ModelError(
                f"Model cannot be trained: {source} has the {key} {name!r}, which transformers "
                f"{version('transformers')} does not know. Use the config.json that came with the weights. It knows "
                f"{', '.join(sorted(known))}."
            )
    for one in by_layer:
        kind = one.get("rope_type", one.get("type"))
        if missing := sorted(key for key in _required(kind) if one.get(key) is None):
            raise ModelError(
                f"Model cannot be trained: {source} has the rope_type {kind!r} without {', '.join(missing)}, which "
                f"transformers {version('transformers')} requires. Use the config.json that came with the weights."
            )


def _required(rope: str | None) -> set[str]:
    """Return the keys that transformers' validation of a kind of RoPE requires, without those that it adds itself."""
    source = _folder("transformers") / "modeling_rope_utils.py"
    text = source.read_text() if source.is_file() else ""
    body = text.partition(f"def _validate_{rope}_rope_parameters(")[2].partition("\n    def ")[0]
    required = re.findall(r'"(\w+)"', body.partition("required_keys = {")[2].partition("}")[0])
    return {*required} - {"rope_type", "rope_theta", "original_max_position_embeddings"}


_ROPES: Final = frozenset({"default", "su", "mrope"})
"""Kinds of RoPE that transformers reads as another one."""


@cache
def parallel_styles(model_type: str, kind: Literal["tp", "ep"]) -> frozenset[str]:
    """Return the styles of transformers' tensor- or expert-parallel plan for ``model_type``, read from its source."""
    models, name = _folder("transformers") / "models", model_type.replace("-", "_")
    named = models / name / f"configuration_{name}.py"
    for file in [named] if named.is_file() else models.glob("*/configuration_*.py"):
        if f'model_type = "{model_type}"' not in (text := file.read_text()):
            continue
        for body in (node.body for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)):
            set_here = {ast.unparse(item.targets[0]): item.value for item in body if isinstance(item, ast.Assign)}
            if getattr(set_here.get("model_type"), "value", None) == model_type:
                styles = getattr(set_here.get(f"base_model_{kind}_plan"), "values", ())
                return frozenset(style.value for style in styles)
    return frozenset()


def table_keys(package: str, file: str, table: str) -> set[str] | None:
    """Return the keys of a dictionary in the source of an installed package; None if it is not there."""
    return _table_keys(_folder(package) / file, table)


@cache
def _table_keys(source: Path, table: str) -> set[str] | None:
    found = re.search(rf"^{table}\b.*?(?=^[\w@]|\Z)", source.read_text() if source.is_file() else "", re.M | re.S)
    if found is None:
        return None
    keys = getattr(getattr(ast.parse(found[0]).body[0], "value", None), "keys", ())
    return {key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str)}


def _folder(package: str) -> Path:
    """Return the folder of a package's source; a path without files if it is not installed."""
    found = find_spec(package)
    return Path(found.origin).parent if found and found.origin else Path(os.devnull)
