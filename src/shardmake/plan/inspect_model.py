"""Find out what a model's class can do, without its weights; `shardmake.plan.abilities` runs this as a process.

The class answers for attention kernels and gradient checkpointing. Whether it keeps packed examples apart is stated
nowhere, so a small model of the same class runs `shardmake.data.dataset.check_isolation` with random weights. With the
kernel varlen, whose operator gets a CPU implementation here, it must give the same logits as with eager attention.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args

import torch

from shardmake.checkpoint.formats import huggingface
from shardmake.checkpoint.formats.hub_layout import HubWeight, hub_weights, stacked_parameters
from shardmake.config.attention import KERNELS
from shardmake.config.methods import METHODS
from shardmake.core.errors import ModelError
from shardmake.core.private_names import private
from shardmake.data.dataset import IGNORED, Collator, check_isolation
from shardmake.data.varlen import KernelLimitError, register_cpu_kernel, register_varlen
from shardmake.memory import parameter_inventory as inventory
from shardmake.memory.families import NOT_TAKEN
from shardmake.plan.abilities import MIXING_UNKNOWN, check_class
from shardmake.plan.small_config import Narrow, shrunk
from shardmake.run.adapter_settings import AdapterSettings
from shardmake.run.model_class import ModelClass
from shardmake.run.text_part import towers

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_FLAGS = {
    "varlen": ("supports_flash_attn", "supports_attention_backend"),
    "flash": ("supports_flash_attn",),
    "sdpa": ("supports_sdpa",),
}
Found = TypeVar("Found")
_TOLERANCE = 1e-3
_LARGEST = 200_000_000
"""Parameters of a model that is small enough to run here."""


def answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the request is about: fields of `shardmake.plan.abilities.Abilities`, or one answer."""
    values, source, trust_remote_code = request["config"], request["source"], request["trust_remote_code"]
    config = inventory.parse_config(values, source, trust_remote_code)
    kind = _check_kind(config, values, source, trust_remote_code)
    match request["about"]:
        case "adapters":
            return _adapters(kind, config, source, request["adapters"])
        case "layout":
            _files_layout(_build(kind, config, source), source)
            return {}
        case "head":
            return {"plain": _has_plain_head(kind, config)}
        case "tokens":
            return {"in_kernel": _attends_in_kernel(kind, config)}
        case _:
            return _class(kind, config, source)


def _class(kind: ModelClass, config: Any, source: str) -> dict[str, Any]:
    model = _build(kind, config, source)
    _files_layout(model, source)
    kernels = [kernel for kernel in KERNELS if _supports(model, kernel)]
    limit, mixes = NOT_TAKEN, False
    if "varlen" in kernels:
        limit, mixes = _try_varlen(kind, config)
    unusable = ["varlen"] * bool(limit) + ["sdpa"] * ("(softcap)" in limit and _sdpa_ignores_softcap())
    kernels = [kernel for kernel in kernels if kernel not in unusable]
    others = [kernel for kernel in kernels if kernel not in ("varlen", *MIXING_UNKNOWN)]
    return {
        "model_class": type(model).__name__,
        "text_part": kind.text_part,
        "absent": _absent(kind, config, source) if kind.text_part else [],
        "attention": kernels,
        "varlen_limit": limit,
        "mixing": [*["varlen"] * mixes, *(kernel for kernel in others if _mixes(kind, config, kernel))],
        "gradient_checkpointing": bool(model.supports_gradient_checkpointing),
    }


def _sdpa_ignores_softcap() -> bool:
    """Return True if transformers computes other scores than a model with softcap asks for (5.17), in silence."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    module, states = torch.nn.Module(), torch.arange(8.0).reshape(1, 1, 2, 4)
    module.is_causal = True  # type: ignore[assignment]
    try:
        outputs = [sdpa_attention_forward(module, *[states] * 3, None, softcap=cap)[0] for cap in (0.1, None)]
    except Exception:  # newer versions refuse it themselves
        return False
    return torch.equal(*outputs)


def _adapters(kind: ModelClass, config: Any, source: str, adapters: Mapping[str, Any]) -> dict[str, Any]:
    model = _build(kind, config, source)
    weights = _files_layout(model, source)
    fused = {parameter.name.rpartition(".")[2] for parameter in stacked_parameters(model) if len(parameter.shape) == 3}
    unmergeable, experts = _unmergeable(model, adapters, weights)
    unmergeable += _turned(model, Path(source).parent, experts)
    return {
        "unmergeable": unmergeable,
        "mergeable_targets": _mergeable_targets(_build(kind, config, source), adapters, weights) if unmergeable else [],
        "adapted_experts": experts,
        "frozen_experts": sorted(fused - {*experts}),
    }


def _turned(model: "PreTrainedModel", folder: Path, experts: Sequence[str]) -> list[str]:
    """Return a line about fused ``experts`` whose files hold them transposed under the name that the class has."""
    held = huggingface.read(folder).tensors if huggingface.recognise(folder) else {}
    weights = (one for one in stacked_parameters(model) if one.name.rpartition(".")[2] in experts and one.name in held)
    found = [one.name for one in weights if held[one.name].shape != one.shape]
    return [f"{name}, which its files store transposed" for name in found[:1]]


def _tried(
    kind: ModelClass, config: Any, kernel: str, trial: "Callable[[PreTrainedModel], Found]", untried: Found
) -> Found:
    """Return what ``trial`` finds with the first small model whose sizes suit the class; ``untried`` without any."""
    for model in _small_models(kind, config, kernel):
        with suppress(Exception):  # the sizes do not suit this class, or its parts have other names
            return trial(model)
    return untried


def _has_plain_head(kind: ModelClass, config: Any) -> bool:
    """Return True if a small model's loss is the cross entropy of its last hidden states times its head."""
    ids = torch.arange(1, 24)[None]

    @torch.no_grad()
    def is_plain(model: Any) -> bool:
        wanted = model.eval()(input_ids=ids, labels=ids, use_cache=False).loss
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
        logits = hidden[0, :-1] @ model.lm_head.weight.T
        return bool(torch.isclose(torch.nn.functional.cross_entropy(logits, ids[0, 1:]), wanted, rtol=_TOLERANCE))

    return _tried(kind, config, "eager", is_plain, False)


def _attends_in_kernel(kind: ModelClass, config: Any) -> bool:
    """Return True if, with a kernel that returns each token's own value, no token changes the logits of others."""
    from transformers import AttentionInterface

    even = True

    def blind(_: Any, query: Any, key: Any, value: Any, *__: Any, **others: Any) -> tuple[Any, None]:
        nonlocal even
        per_head = any(isinstance(other, torch.Tensor) and other.dim() == 1 for other in others.values())
        even = even and not per_head and query.shape[-1] == value.shape[-1]
        return value.repeat_interleave(query.shape[1] // value.shape[1], 1).transpose(1, 2).contiguous(), None

    AttentionInterface.register("shardmake_blind", blind)
    ids = torch.arange(1, 24)[None]
    moved = torch.cat([ids[:, :-1] + 1, ids[:, -1:]], dim=1)  # other tokens, but for the last one

    @torch.no_grad()
    def is_apart(model: Any) -> bool:
        model.set_attn_implementation("shardmake_blind")
        found = [model.eval()(input_ids=one, use_cache=False).logits[0, -1] for one in (ids, moved)]
        has_groups = isinstance(getattr(model.config.get_text_config(), "num_key_value_heads", None), int)
        return even and has_groups and bool(torch.allclose(found[0], found[1], rtol=_TOLERANCE))

    return _tried(kind, config, "eager", is_apart, False)


def _check_kind(config: Any, values: Mapping[str, Any], source: str, trust_remote_code: bool) -> ModelClass:
    """Return the class that trains; raise a `ModelError` unless it generates text and is the one in config.json."""
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(
            f"Model cannot be trained: {source} is an encoder-decoder model ({config.model_type}). Shardmake trains "
            "causal language models, which have a decoder alone. Name one of these, such as a Llama, Qwen or Gemma."
        )
    kind = inventory.find_class(values, config, source, trust_remote_code)
    if not kind.own_code:
        check_class(values, kind.name, source)
    return kind


def _build(kind: ModelClass, config: Any, source: str) -> "PreTrainedModel":
    with inventory.explained(f"{source}: transformers cannot build this model"), torch.device("meta"):
        model = kind.build(config, attn_implementation="eager")
    if not huggingface.recognise(Path(source).parent):  # else its files name all layers
        _drop_alike(model)
    return model


def _drop_alike(model: "PreTrainedModel") -> None:
    """Keep one layer of each kind, which answers for all: each expert of each layer may be a weight in the files."""
    paths = inventory.block_paths(model)
    kinds = inventory.layer_kinds(model, paths)
    parent, _, name = next(iter(paths), "").rpartition(".")[0].rpartition(".")
    if kinds:
        layers: Any = model.get_submodule(f"{parent}.{name}".lstrip("."))
        kept = sorted({kinds.index(kind) for kind in kinds})
        setattr(model.get_submodule(parent), name, torch.nn.ModuleList(layers[index] for index in kept))


def _absent(kind: ModelClass, config: Any, source: str) -> list[str]:
    """Return the names of the towers that are not loaded, after a step of a small model on text alone.

    Raises a `ModelError` unless the class gives the same logits without them, and a loss that is a mean over the tokens
    that the ranks count.
    """
    why = "no small model of it could be built"
    for part in _small_models(kind, config, "eager"):
        try:
            whole = kind.whole.build(part.config, attn_implementation="eager", dtype=torch.float32).eval()
            whole.load_state_dict(part.state_dict(), strict=False)
            ids = torch.arange(1, 25).view(2, 12)
            with torch.no_grad():
                logits = [model(input_ids=ids, use_cache=False).logits for model in (whole, part.eval())]
                few, many = (part(input_ids=ids, labels=ids, num_items_in_batch=count).loss for count in (22, 44))
        except Exception as error:  # the class needs images or sounds, or the sizes do not suit it
            why = f"it does not take text alone ({inventory.in_one_line(error)})"
            continue
        if not torch.equal(*logits):
            why = "its text passes through them"
        elif not torch.isclose(few, 2 * many):
            why = "its loss does not take the number of tokens of all ranks"
        else:
            return towers(whole)
    raise ModelError(
        f"Model cannot be trained: {source}. The text part of {kind.name} is not shown to train without its towers: "
        f"{why}. Name a text model."
    )


def _files_layout(model: "PreTrainedModel", source: str) -> list[HubWeight]:
    """Return the weights that the files beside ``source`` name or shape otherwise than the model.

    Without weights there, the layout is the one that transformers saves. Raises a `ModelError` if a merge cannot write
    it.
    """
    folder = Path(source).parent
    return hub_weights(model, huggingface.weight_names(folder) if huggingface.recognise(folder) else None)


def _supports(model: "PreTrainedModel", kernel: str) -> bool:
    """Return True if the class and those of all its parts support ``kernel``."""
    from transformers import PreTrainedModel

    parts = (part for part in model.modules() if isinstance(part, PreTrainedModel))
    return all(getattr(private(part), flag, False) for part in parts for flag in _FLAGS.get(kernel, ()))


def _try_varlen(kind: ModelClass, config: Any) -> tuple[str, bool]:
    """Return why the class cannot train with varlen, empty if it can, and whether it then mixes packed examples.

    A small model must give the logits of eager attention, for rows of one example and for packed ones.
    """
    register_varlen()
    register_cpu_kernel()

    def trial(model: "PreTrainedModel") -> tuple[str, bool]:
        try:
            if not _logits_agree(model, packing=False):
                return "gives other logits with it than with attention eager", False
        except KernelLimitError as error:
            return error.limit, False
        try:
            return "", not _logits_agree(model, packing=True)
        except Exception:  # it rejects what a packed batch has
            return "", True

    return _tried(kind, config, "varlen", trial, ("cannot be tried with it in a small size", False))


def _logits_agree(model: "PreTrainedModel", *, packing: bool) -> bool:
    """Return True if two examples of a batch, rows or packed, get the logits that eager attention gives each alone."""
    first, second = torch.arange(1, 8), torch.arange(8, 24)
    texts = (first, second)
    items = [{"input_ids": ids, "labels": ids.clone(), "position_ids": torch.arange(len(ids))} for ids in texts]
    if packing:
        items = [{name: torch.cat([item[name] for item in items]) for name in items[0]}]
    batch = Collator(sequence_length=32, pad_token_id=0, packing=packing, flat=packing)(items)
    real = batch.pop("labels").flatten() != IGNORED
    with torch.no_grad():
        model.train()(**batch)  # dropout is on in training only
        found = model.eval()(**batch).logits.flatten(0, 1)[real]
        model.set_attn_implementation("eager")
        alone = torch.cat([model(input_ids=ids[None], use_cache=False).logits[0] for ids in texts])
        model.set_attn_implementation("varlen")
    return bool((found - alone).abs().max() <= _TOLERANCE * alone.abs().max())


def _mixes(kind: ModelClass, config: Any, kernel: str) -> bool:
    """Return True if a small model of this class mixes packed examples; False if that cannot be tried."""
    collator = Collator(sequence_length=16, pad_token_id=0, packing=True, flat=False)

    def mixes(model: "PreTrainedModel") -> bool:
        try:
            check_isolation(model, collator, torch.device("cpu"))
        except Exception as error:
            if isinstance(error, ModelError) or "position_ids" in str(error) or "use_cache" in str(error):
                return True  # it rejects what a packed batch has
            raise
        return False

    return _tried(kind, config, kernel, mixes, False)


def _small_models(kind: ModelClass, config: Any, kernel: str) -> Iterator["PreTrainedModel"]:
    """Yield models of the class with random weights, the smallest first; none if no sizes suit the class."""
    for narrow in get_args(Narrow):
        try:
            small = type(config).from_dict(shrunk(config.to_dict(), narrow=narrow), name_or_path=config.name_or_path)
            options = {"attn_implementation": kernel, "dtype": torch.float32}
            with torch.device("meta"):
                size = kind.build(small, **options).num_parameters()
            if size > _LARGEST:
                continue
            torch.manual_seed(0)
            model = kind.build(small, **options)
        except Exception:  # the sizes do not suit this class
            continue
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        yield model


def _mergeable_targets(
    model: "PreTrainedModel", adapters: Mapping[str, Any], weights: Sequence[HubWeight]
) -> list[str]:
    """Return the names of linear layers whose adapters `shardmake consolidate` merges.

    Layers with fewer rows or columns than the rank are left out, and names that PEFT refuses alone or takes for the
    experts' fused weights.
    """
    head = model.get_output_embeddings()
    layers = {
        name.rpartition(".")[2]: module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and module is not head
    }
    names = [name for name, layer in layers.items() if min(layer.in_features, layer.out_features) >= adapters["rank"]]
    found = []
    for name in names:
        with suppress(ModelError):  # PEFT takes the name only together with others
            found += [name] * (not _unmergeable(model, {**adapters, "targets": [name]}, weights)[0])
    return found


def _unmergeable(
    model: "PreTrainedModel", adapters: Mapping[str, Any], weights: Sequence[HubWeight]
) -> tuple[list[str], list[str]]:
    """Return the features of the adapters that are refused, and the fused weights of experts that get adapters.

    ``model`` stays as it is.
    """
    from peft import get_peft_model
    from peft.tuners.lora.layer import ParamWrapper

    method = METHODS[adapters["method"]]
    values = {key: adapters[key] for key in ("rank", "targets", "dropout")}
    config = method.peft_config("CAUSAL_LM", model, **values)
    try:
        with torch.device("meta"):
            adapted = get_peft_model(model, config)
    except ValueError as error:
        raise ModelError(f"PEFT cannot adapt this {type(model).__name__}: {error} Change the section lora.") from None
    layers = [layer for layer in adapted.modules() if isinstance(layer, ParamWrapper)]
    experts = sorted({layer.parameter_name for layer in layers if layer.num_experts > 1})
    features = list(AdapterSettings.parse(adapted.peft_config["default"].to_dict()).refused(holds_base=False))
    modules = {
        inventory.plain_name(name).partition(".lora_A")[0]
        for name, _ in adapted.named_parameters()
        if ".lora_A." in name
    }
    single = {layer.parameter_name for layer in layers if layer.num_experts == 1 and layer.get_param().dim() == 3}
    adapted.unload()
    in_turn = {part.parameter for weight in weights if not weight.is_range for part in weight.parts}
    features += sorted(
        f"{name.removesuffix('.weight')}, which its files store in parts"
        for name in in_turn
        if name.rpartition(".")[2] in experts or name.removesuffix(".weight") in modules
    )[:1]
    features += sorted(f"{name} of a single expert" for name in single)
    features += [f"{name} of the experts, not proved on a base in 4 bits" for name in experts if method.in_four_bits]
    return features, experts
