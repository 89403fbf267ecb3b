"""Read a model's config.json into a `Model`.

transformers builds an architecture that is not in `shardmake.memory.families` on the meta device. That happens in a
separate process, once per config and version.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardmake.core.errors import CheckpointError, ModelError
from shardmake.memory.cache import cached_helper
from shardmake.memory.composites import COMPOSITES, text_part
from shardmake.memory.families import FAMILIES, MOST_LAYERS, OPTIONAL_SIZES, SIZE_FIELDS, family_of, written_down
from shardmake.memory.model import HEADS, INVENTORY, MODELS, Model, has_own_class, inventory_request, tensors_from_json
from shardmake.memory.parameter_inventory import causal_class
from shardmake.run.model_class import TIE

if TYPE_CHECKING:
    from shardmake.checkpoint.formats.contents import StoredTensor

COUNTS = ("sliding_window", "num_experts_per_tok", "num_local_experts", "num_experts", "n_routed_experts")
"""Whole numbers with one meaning for all models; no value, 0 and false mean that the model has no such part."""
ROTARY = ("rope_theta", "factor", "low_freq_factor", "high_freq_factor", "partial_rotary_factor")
"""Numbers of the rotary position embedding."""
LARGEST_SIZE = (1 << 31) - 1
_LARGEST_FILE = 16 << 20


def read_model(source: str, *, revision: str | None = None, trust_remote_code: bool = False) -> Model:
    """Return the model at ``source``: a folder, a config.json or a hub id.

    The config.json of a hub id is downloaded unless it is in the local cache.
    """
    path = find_config(source, revision)
    config = _read_config(path)
    model = from_config(config, source=str(path), trust_remote_code=trust_remote_code)
    if not _has_own_head(model, path.parent):
        return model
    untied = from_config({**config, TIE: False}, source=str(path), trust_remote_code=trust_remote_code)
    return replace(untied, untied=True)


def from_config(config: Mapping[str, Any], *, source: str = "", trust_remote_code: bool = False) -> Model:
    """Return the model that a parsed config.json describes; errors name the file ``source``."""
    _check_config(config, source, trust_remote_code)
    if not has_own_class(config, trust_remote_code):
        if (family := family_of(config)) is not None:
            return written_down(family, config, source)
        if (model := text_part(config, source)) is not None:
            return model
    return replace(_built(config, source, trust_remote_code), trust_remote_code=trust_remote_code)


def _has_own_head(model: Model, folder: Path) -> bool:
    """Return True if the files in ``folder`` hold a head that is not the embedding, although the config ties them.

    transformers unties the two when it has read both (Mistral Small 3.1, whose config leaves it to its class).
    """
    if not model.tied:
        return False
    from shardmake.checkpoint.formats import huggingface

    try:
        held = huggingface.read(folder).tensors.values() if huggingface.is_complete(folder) else ()
    except CheckpointError:  # such as files of an older torch, which transformers reads
        return False
    ends = tuple(".".join(["", *it.name.split(".")[-2:]]) for it in model.tensors if it.kind == "embedding")
    heads = [one for one in held if f".{one.name}".endswith(tuple(f".{head}.weight" for head in HEADS))]
    owners = [one for one in held if f".{one.name}".endswith(ends) and [one.shape] == [head.shape for head in heads]]
    return len(owners) == 1 and _are_apart(
        *heads, *owners, *(piece.record.path.stat().st_mtime_ns for one in heads + owners for piece in one.pieces)
    )


@lru_cache(maxsize=MODELS)
def _are_apart(head: "StoredTensor", embedding: "StoredTensor", *_changed: int) -> bool:
    """Return `are_apart`, which reads both whole; an estimate asks again for each change that it suggests."""
    from shardmake.checkpoint.formats.contents import are_apart

    return are_apart(head, embedding)


def _kind_of_adapters(folder: Path) -> str:
    """Return the kind that the file of the adapters in ``folder`` names, else PEFT."""
    try:
        return str(json.loads((folder / "adapter_config.json").read_text()).get("peft_type", "PEFT"))
    except (ValueError, AttributeError):
        return "PEFT"


def find_config(source: str, revision: str | None = None) -> Path:
    """Return the path of the config.json of ``source``; a hub id is looked up in the local cache first."""
    path = Path(source)
    if path.is_file():
        return path
    if path.is_dir():
        if not (path / "config.json").is_file():
            if (path / "adapter_config.json").is_file():
                raise ModelError(
                    f"Not a base model: {source}. The folder holds {_kind_of_adapters(path)} adapters; LoRA and QLoRA "
                    "are estimated with --method. Name their base model."
                )
            raise ModelError(
                f"There is no config.json in the folder {source}. Name a folder written by save_pretrained."
            )
        return path / "config.json"
    if source.startswith((".", "/", "~")) or source.count("/") > 1 or source.endswith(".json"):
        raise ModelError(
            f"There is no model at {source} (current folder: {Path.cwd()}). Name a folder, or a hub id (org/name)."
        )
    return _from_hub(source, revision)


def _from_hub(source: str, revision: str | None) -> Path:
    from huggingface_hub import hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        cached = try_to_load_from_cache(source, "config.json", revision=revision)
        return Path(cached if isinstance(cached, str) else hf_hub_download(source, "config.json", revision=revision))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ModelError(
            f"Cannot download the config.json of {source!r} ({type(error).__name__}). It is neither a folder nor in "
            f"the hub's cache. Run `hf download {source}` on a machine with internet access, or name a folder."
        ) from None


def _read_config(path: Path) -> dict[str, Any]:
    if path.stat().st_size > _LARGEST_FILE:
        raise ModelError(f"{path} is larger than 16 MiB. A config.json is not. Use the one that came with the weights.")
    try:
        config = json.loads(path.read_text(), object_hook=float_or_object)
    except (ValueError, RecursionError) as error:  # a number of thousands of digits is a ValueError, too
        raise _invalid(f"{path} is not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise ModelError(f"{path} is not a JSON object. Name the config.json of a transformers model.")
    return config


def float_or_object(value: dict[str, Any]) -> Any:
    """Return the number for an object such as ``{"__float__": "Infinity"}``, which transformers writes for it."""
    return float(value["__float__"]) if value.get("__float__") in ("NaN", "Infinity", "-Infinity") else value


def _invalid(what: str) -> ModelError:
    return ModelError(f"{what}. Use the config.json that came with the weights.")


def _wrong(source: str, field: str, value: Any, must: str) -> ModelError:
    return _invalid(f"{source}: {field} is {value!r}. It must be {must}")


def _check_config(config: Mapping[str, Any], source: str, trust_remote_code: bool) -> None:
    kind = config.get("model_type")
    if not kind or not isinstance(kind, str):
        raise ModelError(f"{source or 'The config'} has no model_type. Name the config.json of a transformers model.")
    for field in (*SIZE_FIELDS, *(OPTIONAL_SIZES if kind in FAMILIES else ())):
        value = config.get(field)
        if value is None or (isinstance(value, list | str) and kind not in FAMILIES):
            continue
        largest = MOST_LAYERS if field == "num_hidden_layers" else LARGEST_SIZE
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= largest:
            raise _wrong(source, field, value, f"a whole number from 1 to {largest:,}")
    text = config.get("text_config")
    layers = text.get("num_hidden_layers") if isinstance(text, Mapping) else None
    if isinstance(layers, int) and layers > MOST_LAYERS:
        raise _wrong(source, "num_hidden_layers of text_config", layers, f"at most {MOST_LAYERS:,}")
    _check_types(config, source)
    _check_sizes(config, source)
    code = config.get("auto_map")
    if not code or _is_known_to_transformers(kind):
        return
    if not isinstance(code, Mapping):
        raise _wrong(source, "auto_map", code, "an object that names the model's own code")
    if not trust_remote_code:
        raise ModelError(
            f"{source}: this model needs its own Python code ({', '.join(code)}). "
            "Read that code; if you trust it, set trust_remote_code: true."
        )


def _check_types(config: Mapping[str, Any], source: str) -> None:
    """Raise a `ModelError` if a value that is read for every model has a wrong type.

    Text in place of a number of the rotary embedding would fail on the ranks.
    """
    for field in COUNTS:
        value = config.get(field)
        if value and (isinstance(value, bool) or not isinstance(value, int) or value > LARGEST_SIZE):
            raise _wrong(source, field, value, "a whole number")
    classes = config.get("architectures") or []
    if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
        raise _wrong(source, "architectures", classes, "a list of names of classes")
    settings = [one for key in ("rope_parameters", "rope_scaling") if isinstance(one := config.get(key), Mapping)]
    settings += [one for held in settings for one in held.values() if isinstance(one, Mapping)]  # by kind of layer
    for holder in (config, *settings):
        for key in ROTARY:
            value = holder.get(key)
            if isinstance(value, str | bool) or (isinstance(value, int | float) and value <= 0):
                raise _wrong(source, key, value, "a number above 0")


def _is_known_to_transformers(model_type: str) -> bool:
    """Return True if transformers has the model's code itself; it then ignores code that comes with the weights."""
    if model_type in FAMILIES or model_type in COMPOSITES:
        return True
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    return model_type in MODEL_MAPPING_NAMES


SIZE_NAMES = (
    ("hidden_size", "n_embd", "d_model", "dim"),
    ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "encoder_layers", "layers_block_type"),
    ("vocab_size",),
)


def _check_sizes(config: Mapping[str, Any], source: str) -> None:
    """Raise a `ModelError` if a size is missing or the attention heads do not divide evenly."""
    parts = (value for value in config.values() if isinstance(value, Mapping))
    if "text_config" in config or any(part.get("model_type") for part in parts):
        return  # each part has a config of its own
    family = FAMILIES.get(config["model_type"])
    for names in [(one,) for one in SIZE_FIELDS if one not in family.defaults] if family else SIZE_NAMES:
        if all(config.get(name) is None for name in names):
            if family is None and _is_known_to_transformers(config["model_type"]):
                causal_class(config["model_type"], source)  # a model of images or sounds has other sizes
            raise ModelError(f"{source}: {' or '.join(names)} is missing. Use the complete config.json of the model.")
    padding, words = config.get("pad_token_id"), config.get("vocab_size")
    if isinstance(padding, int) and isinstance(words, int) and padding >= words:
        raise _invalid(f"{source}: pad_token_id is {padding}, but vocab_size is {words}")
    heads, given = config.get("num_attention_heads"), config.get("num_key_value_heads")
    groups = config.get("num_key_value_heads", family and family.defaults.get("num_key_value_heads")) or heads
    if isinstance(heads, int) and isinstance(groups, int) and heads % groups:
        shared = f"{groups} num_key_value_heads" + ("" if given else f", the default of {config['model_type']},")
        raise _invalid(f"{source}: {heads} num_attention_heads cannot share {shared} evenly")
    if family and not (config.get("head_dim") or family.defaults.get("head_dim")) and config["hidden_size"] % heads:
        raise ModelError(
            f"{source}: hidden_size is not a multiple of {heads} num_attention_heads, and head_dim is not given."
        )


def _built(config: Mapping[str, Any], source: str, trust_remote_code: bool) -> Model:
    doing = f"Building a model of type {config['model_type']} without memory, to list its weights"
    values = cached_helper(INVENTORY, inventory_request(config, source, trust_remote_code), doing)
    values["tensors"] = tensors_from_json(values["tensors"])
    lists = {name: tuple(value) for name, value in values.items() if isinstance(value, list | tuple)}
    return Model(**{**values, **lists}, decoder=None, config=config, source=source)
