"""List the parameters of any transformers model, built on the meta device so that no weight takes memory.

`shardmake.memory.cache` asks this module in a process of its own.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardmake.config.methods import METHODS
from shardmake.core.errors import ModelError
from shardmake.core.private_names import private
from shardmake.memory.model import ParameterSpec, has_own_class
from shardmake.run.model_class import TIE, ModelClass
from shardmake.run.text_part import composite_class

if TYPE_CHECKING:
    from torch import nn


def answer(request: Mapping[str, Any]) -> Any:
    """Return the inventory of the requested model, or of its adapters."""
    model = build(request["config"], request["source"], request["trust_remote_code"])
    wanted = request.get("adapters")
    return adapters(model, **wanted) if wanted else inventory(model)


def build(config: Mapping[str, Any], source: str, trust_remote_code: bool = False) -> "nn.Module":
    """Return the transformers model that ``config`` describes, on the meta device.

    Its class is that of the code beside the config if it may run, else the text part of a composite, else the config's
    own architecture if transformers has it, else the causal language model. A plan refuses all but one of them
    (`shardmake.plan.abilities`).
    """
    import torch
    import transformers

    parsed = parse_config(config, source, trust_remote_code)
    named = next(iter(config.get("architectures") or []), "")
    with explained(f"{source}: transformers cannot build this model"):
        own = has_own_class(config, trust_remote_code) or composite_class(parsed)
        is_named = hasattr(transformers, named) and not own
        chosen = ModelClass(name=named) if is_named else find_class(config, parsed, source, trust_remote_code)
        with torch.device("meta"):
            return chosen.build(parsed)


def find_class(values: Mapping[str, Any], config: Any, source: str, trust_remote_code: bool) -> ModelClass:
    """Return the class that trains: of a composite model, the text part of its own class.

    ``values`` are those of the config.json, ``config`` is the object of transformers. Raises `ModelError`, which names
    ``source``, if transformers has no class that generates text for it.
    """
    if has_own_class(values, trust_remote_code):
        return ModelClass(name="AutoModelForCausalLM", own_code=True)
    composite = composite_class(config)
    return ModelClass(name=composite or causal_class(config.model_type, source), text_part=composite is not None)


def causal_class(model_type: str, source: str) -> str:
    """Return the name of the causal language model for ``model_type``; raise `ModelError` if there is none."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)
    if name is None:
        raise ModelError(
            f"Model cannot be trained: transformers has no causal language model for the model type {model_type!r} of "
            f"{source}. Name a model that AutoModelForCausalLM can load."
        )
    return str(name)


def parse_config(config: Mapping[str, Any], source: str, trust_remote_code: bool) -> Any:
    """Return the config object of transformers for a config.json; raise `ModelError` if transformers rejects it."""
    from transformers import CONFIG_MAPPING, AutoConfig

    if trust_remote_code and config.get("auto_map"):
        try:
            changes = {TIE: config[TIE]} if TIE in config else {}  # it may be untied (`Model.untied`)
            return AutoConfig.from_pretrained(Path(source).parent, trust_remote_code=True, **changes)
        except Exception as error:  # the code may be elsewhere on the hub, need other packages, or raise anything
            raise ModelError(
                f"{source}: the model's own code cannot be loaded ({type(error).__name__}: {error}). Download it with "
                "the model, or leave out trust_remote_code if transformers has this model type."
            ) from None
    if config["model_type"] not in CONFIG_MAPPING:
        from importlib.metadata import version

        raise ModelError(
            f"{source}: transformers {version('transformers')} has no model type {config['model_type']!r}. "
            "Check the spelling, or install a version of transformers that has it."
        )
    with explained(f"{source}: transformers rejects this config"):
        return AutoConfig.for_model(**config)


@contextmanager
def explained(failure: str) -> Iterator[None]:
    """Raise a `ModelError` for any error: a model's code and PEFT may raise anything for unusual values and layers."""
    try:
        yield
    except Exception as error:
        raise ModelError(f"{failure}: {in_one_line(error)}") from None


def in_one_line(error: Exception) -> str:
    """Return the words of an error of a library without the frames of C++ code that torch appends."""
    return " ".join(str(error).partition("\nException raised from")[0].split())


def inventory(model: "nn.Module") -> dict[str, Any]:
    """Return the fields of `shardmake.memory.model.Model` for a built model, as JSON data."""
    config: Any = model.config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    blocks = block_paths(model)
    unique = parameters(model)
    return {
        "model_type": config.model_type,
        "architecture": type(model).__name__,
        "tensors": [asdict(tensor) for tensor in unique],
        "tied": sum(1 for _ in model.named_parameters(remove_duplicate=False)) > len(unique),
        "buffer_bytes": sum(b.numel() * b.element_size() for b in model.buffers()),
        "block_classes": sorted({type(model.get_submodule(path)).__name__ for path in blocks}),
        "leaf_classes": leaf_classes(model),
        "kinds": layer_kinds(model, blocks),
        "hidden_size": _first(text, "hidden_size", "d_model", "n_embd", "dim"),
        "vocab_size": _first(text, "vocab_size"),
        "max_positions": getattr(text, "max_position_embeddings", None) or getattr(text, "n_positions", None),
    }


def layer_kinds(model: "nn.Module", blocks: Mapping[str, int]) -> list[int]:
    """Return a number for each layer; layers of one number have the same modules, sizes and settings.

    A setting that is the layer's own index in every layer does not count. Empty if the layers are in several lists.
    """
    if len({path.rpartition(".")[0] for path in blocks}) != 1:
        return []
    layers = [_described(model, path, len(blocks)) for path in blocks]
    keys = {key for layer in layers for key in layer if len(layers) > 1}
    own_index = {key for key in keys if all(one.get(key, n) == n for n, one in enumerate(layers))}
    texts = [repr(sorted((k, v) for k, v in layer.items() if k not in own_index)) for layer in layers]
    return [texts.index(text) for text in texts]


def _described(model: "nn.Module", path: str, count: int) -> dict[str, Any]:
    """Return the settings of a layer by name: those of its modules, and its items of the config's lists."""
    found: dict[str, Any] = {}
    for name, module in model.get_submodule(path).named_modules():
        found[f"{name} class"] = type(module).__name__
        for key, value in vars(module).items():
            if isinstance(value, int | str | None) and key != "training":
                found[f"{name}.{key}"] = value
    for name, tensor in model.get_submodule(path).state_dict().items():
        found[f"{name} shape"] = tuple(tensor.shape)
    index = int(path.rpartition(".")[2])
    config: Any = model.config
    for name, value in vars(config.get_text_config()).items():
        if isinstance(value, list) and len(value) == count:
            found[f"config {name}"] = repr(value[index])
    return found


def leaf_classes(model: "nn.Module") -> list[str]:
    """Return the classes that run other modules on ranks whose tokens take other experts.

    ZeRO-3 must gather them as a whole (a leaf module): the ranks would gather in different order and wait for each
    other forever. These are blocks that hold experts as separate modules, as models with code of their own do, and
    experts in one parameter that call their activation once for each, such as those of Step 3.7. For most of the
    latter, transformers multiplies all experts at once.
    """
    from torch import nn

    found = set()
    for block in model.modules():
        experts = getattr(block, "experts", None)
        if isinstance(experts, nn.ModuleList | nn.ModuleDict):
            found |= {type(block).__name__} if len(experts) > 1 else set()
        elif isinstance(experts, nn.Module) and any(experts.children()) and not hasattr(experts, "is_concatenated"):
            found.add(type(experts).__name__)
    return sorted(found)


def adapters(
    model: "nn.Module", method: str, rank: int, targets: str | list[str], rows: Sequence[int] = ()
) -> list[dict[str, Any]]:
    """Return the weights that PEFT's LoRA adds, named without its wrapping; experts and routers get some too."""
    import torch
    from peft import get_peft_model

    blocks = block_paths(model)
    config = METHODS[method].peft_config(None, model, rows, rank=rank, targets=targets)
    with explained(f"PEFT cannot adapt this {type(model).__name__}"), torch.device("meta"):
        adapted = get_peft_model(model, config)
    found = {plain_name(n): tuple(p.shape) for n, p in adapted.named_parameters() if p.requires_grad}
    return [asdict(ParameterSpec(name, shape, "linear", _block_of(name, blocks))) for name, shape in found.items()]


def plain_name(name: str) -> str:
    """Return a parameter's name without PEFT's wrapping."""
    return name.removeprefix("base_model.model.").replace(".default.", ".")


def _first(config: Any, *names: str) -> int:
    if values := [value for name in names if isinstance(value := getattr(config, name, None), int)]:
        return values[0]
    raise ModelError(
        f"The config of this {config.model_type} model has none of {', '.join(names)}. Use its complete config.json."
    )


def block_paths(model: "nn.Module") -> dict[str, int]:
    """Return the path and index of each layer: the modules that transformers does not split, in model order."""
    wanted = set(getattr(private(model), "no_split_modules", None) or ())
    found = (name for name, module in model.named_modules() if type(module).__name__ in wanted)
    return {name: index for index, name in enumerate(one for one in found if one.rpartition(".")[2].isdigit())}


def parameters(model: "nn.Module") -> list[ParameterSpec]:
    """Return each parameter once, with its whole shape under ZeRO-3 too."""
    kinds, blocks = {name: _kind(module) for name, module in model.named_modules()}, block_paths(model)
    shapes = {name: tuple(getattr(one, "ds_shape", one.shape)) for name, one in model.named_parameters()}
    return [
        ParameterSpec(name, shape, kinds[name.rpartition(".")[0]], _block_of(name, blocks))  # type: ignore[arg-type]
        for name, shape in shapes.items()
    ]


def _block_of(name: str, blocks: Mapping[str, int]) -> int | None:
    parts = name.split(".")
    prefixes = (".".join(parts[:end]) for end in range(1, len(parts)))
    return next((blocks[prefix] for prefix in prefixes if prefix in blocks), None)


def _kind(module: "nn.Module") -> str:
    from torch import nn

    name = type(module).__name__.lower()
    if isinstance(module, nn.Linear) or name == "conv1d":
        return "linear"
    if isinstance(module, nn.Embedding):
        return "embedding"
    return "norm" if "norm" in name else "other"
