"""A model as the estimates see it: its tensors, their shapes and layers, and which of them train."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property, lru_cache
from math import prod
from typing import Any, Final, Literal

from shardmake.config.methods import METHODS
from shardmake.core.atomic import digest
from shardmake.core.errors import ModelError, nearest
from shardmake.memory.cache import cached_helper
from shardmake.memory.decoder_sizes import Decoder

INVENTORY = "shardmake.memory.parameter_inventory"
Kind = Literal["linear", "embedding", "norm", "other"]
HEADS = ("lm_head", "embed_out")
SCORE_HEAD = "score"
"""The head of transformers' sequence classifiers of a decoder."""
MODELS: Final = 16
"""Models whose sums are kept; a plan compares hundreds of candidates of a few models."""
TRAINED_HEAD = f"{SCORE_HEAD}.modules_to_save"


@dataclass(frozen=True)
class ParameterSpec:
    """One parameter; ``block`` is the index of its decoder or encoder layer, None outside the layers."""

    name: str
    shape: tuple[int, ...]
    kind: Kind
    block: int | None = None

    @cached_property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def module(self) -> str:
        """Name of the module that owns the tensor."""
        return self.name.rpartition(".")[0]

    @property
    def is_hidden_matrix(self) -> bool:
        """Return whether it is the matrix of a linear layer in a decoder or encoder layer."""
        return self.kind == "linear" and self.block is not None and len(self.shape) == 2


@dataclass(frozen=True)
class Model:
    """A model as the estimates see it. Tied tensors are listed once."""

    model_type: str
    architecture: str
    tensors: tuple[ParameterSpec, ...]
    tied: bool
    buffer_bytes: int
    block_classes: tuple[str, ...]
    hidden_size: int
    vocab_size: int
    max_positions: int | None
    decoder: Decoder | None
    config: Mapping[str, Any]
    source: str
    trust_remote_code: bool = False
    leaf_classes: tuple[str, ...] = ()
    """Classes of the blocks that hold experts as separate modules, of which each token runs some."""
    kinds: tuple[int, ...] = ()
    """A number for each layer, the same for layers that are alike; empty if that is not known."""
    whole: int | None = None
    """Elements of the whole model if this is the part that a tensor-parallel rank holds."""
    untied: bool = False
    """config.json ties the head to the embedding, but the files hold both: transformers does not tie them."""

    @cached_property
    def parameters(self) -> int:
        """Elements of all tensors."""
        return sum(tensor.numel for tensor in self.tensors)

    @property
    def whole_parameters(self) -> int:
        """Elements of the whole model."""
        return self.whole or self.parameters

    @cached_property
    def largest_tensor(self) -> int:
        """Elements of the largest tensor."""
        return max(tensor.numel for tensor in self.tensors)

    @cached_property
    def blocks(self) -> tuple[int, ...]:
        """Elements of each layer, in order of the layers."""
        sizes: Counter[int] = Counter()
        for tensor in self.tensors:
            if tensor.block is not None:
                sizes[tensor.block] += tensor.numel
        return tuple(sizes[index] for index in sorted(sizes))

    @property
    def largest_block(self) -> int:
        """Elements of the largest layer; of the whole model if it has no layers."""
        return max(self.blocks, default=self.parameters)

    @cached_property
    def head(self) -> int:
        """Elements of the output head, which may be the embedding."""
        embeddings = (tensor.numel for tensor in self.tensors if tensor.kind == "embedding")
        return next((tensor.numel for tensor in self.tensors if is_head(tensor)), next(embeddings, 0))

    @property
    def is_classifier(self) -> bool:
        """Return True for a sequence classifier, which has `SCORE_HEAD`."""
        return self.architecture.endswith("ForSequenceClassification")

    @property
    def attention_width(self) -> float:
        """Features of the heads of all layers with an attention kernel; hidden ones if they are not known."""
        return self.decoder.attention_width if self.decoder else len(self.blocks) * self.hidden_size

    @property
    def has_all_levers(self) -> bool:
        """Return True if the model is written down with `Decoder.all_levers`."""
        return self.decoder is not None and self.decoder.all_levers

    @property
    def text_config(self) -> Mapping[str, Any]:
        """The config of the text part; of a model of text alone its own."""
        part = self.config.get("text_config")
        return part if isinstance(part, Mapping) else self.config

    @cached_property
    def key(self) -> str:
        """Digest of the config, for cache keys."""
        return digest(dict(self.config))

    def __hash__(self) -> int:
        return hash((self.architecture, self.key))


@dataclass(frozen=True)
class Split:
    """Elements of a model by how they are held.

    ``trainable`` counts trained tensors, adapters included; ``frozen`` counts frozen weights in 16 or 32 bits;
    ``quantized`` counts frozen weights in 4 bits.
    """

    trainable: int
    frozen: int
    quantized: int
    adapters: tuple[ParameterSpec, ...] = ()
    frozen_names: frozenset[str] = frozenset()
    """Weights that full fine-tuning leaves as they are (`freeze`)."""

    @property
    def total(self) -> int:
        """All elements, adapters included."""
        return self.trainable + self.frozen + self.quantized

    def trained(self, model: Model) -> tuple[ParameterSpec, ...]:
        """Return the tensors that the optimizer updates: the adapters if there are any, else those of ``model``."""
        return self.adapters or tuple(tensor for tensor in model.tensors if tensor.name not in self.frozen_names)

    def __hash__(self) -> int:
        return hash((self.trainable, self.frozen, self.quantized))


@lru_cache(maxsize=MODELS)
def matrix_weights(model: Model) -> float:
    """Return the elements of ``model`` that one token is multiplied with: of a mixture, those of the selected experts.

    An embedding is looked up and does not count, unless it is also the head.
    """
    matrices = (t for t in model.tensors if len(t.shape) > 1 and (t.kind != "embedding" or model.tied))
    return sum(t.numel * matrix_share(t, model) for t in matrices)


EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_SELECTED = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts")
"""Names of the number of experts that a token is sent to; the others are those of Kimi, Hunyuan and Gemma 4."""


def matrix_share(tensor: ParameterSpec, model: Model) -> float:
    """Return the part of ``tensor`` that is used for one token; 1 if config.json does not give the experts' numbers."""
    experts = expert_count(model)
    return selected_experts(model) / experts if experts and ".experts." in tensor.name else 1


def expert_count(model: Model) -> int | None:
    """Return the number of experts of a layer, if config.json gives it."""
    return next((model.text_config[name] for name in EXPERTS if model.text_config.get(name)), None)


def selected_experts(model: Model) -> int:
    """Return the number of experts that a token is sent to; all of them if config.json does not give it."""
    counts = (model.text_config.get(name) for name in _SELECTED)
    return next((count for count in counts if isinstance(count, int)), expert_count(model) or 1)


def with_experts(config: Mapping[str, Any], experts: int) -> dict[str, Any]:
    """Return ``config`` with another number of experts per layer."""
    return {**config, **dict.fromkeys((name for name in EXPERTS if config.get(name)), experts)}


def is_head(tensor: ParameterSpec) -> bool:
    """Return True for an output head, which gets no adapters and is not quantized."""
    is_output = tensor.module.endswith(HEADS) or tensor.module == SCORE_HEAD
    return tensor.block is None and tensor.kind == "linear" and is_output


def split(
    model: Model,
    method: str,
    rank: int = 16,
    targets: Iterable[str] | str = "all-linear",
    freeze: Iterable[str] = (),
    rows: int = 0,
) -> Split:
    """Return trained, frozen and quantized elements of ``model`` under ``method`` of the table.

    Under adapters so many ``rows`` of the embedding and the head are trained, for a ``model`` that is to be traced.
    """
    spec = METHODS[method]
    if not spec.has_adapters:
        names = find_frozen([tensor.name for tensor in model.tensors], freeze)
        frozen = sum(tensor.numel for tensor in model.tensors if tensor.name in names)
        return Split(model.parameters - frozen, frozen, 0, frozen_names=names)
    adapters = _adapters(model, method, rank, targets, rows)
    if model.is_classifier:  # PEFT trains a copy of the head in full (``modules_to_save``)
        adapters += (ParameterSpec(f"{TRAINED_HEAD}.weight", (1, model.hidden_size), "linear"),)
    trainable = sum(tensor.numel for tensor in adapters)
    quantized = sum(t.numel for t in model.tensors if is_quantized(t)) if spec.in_four_bits else 0
    return Split(trainable, model.parameters - quantized, quantized, adapters)


def find_frozen(names: Collection[str], patterns: Iterable[str]) -> frozenset[str]:
    """Return those of the parameters ``names`` that ``patterns`` freeze.

    After ``!`` a pattern names exceptions to the patterns before it. Raises `ModelError` if a pattern names no
    parameter, or if all or none are frozen.
    """
    frozen: set[str] = set()
    patterns = list(patterns)
    for pattern in patterns:
        found = _find(names, pattern.removeprefix("!"), "Weights to freeze")
        frozen = frozen - found if pattern.startswith("!") else frozen | found
    if frozen and len(frozen) == len(names):
        raise ModelError("freeze leaves no weight to train. Remove a pattern, or add one with ! for what is trained.")
    if patterns and not frozen:
        raise ModelError("freeze names only exceptions (!). Put what they are exceptions to first, such as '*'.")
    return frozenset(frozen)


def find_rates(names: Collection[str], rates: Mapping[str, float]) -> dict[str, str]:
    """Return the pattern of ``rates`` that gives each of the trained parameters ``names`` its rate; others have none.

    Raises `ModelError` if a pattern names no parameter, or none that later ones leave, or if none is left over.
    """
    found = {name: pattern for pattern in rates for name in _find(names, pattern, "Weights of learning_rates")}
    for pattern in rates.keys() - found.values():
        raise ModelError(f"learning_rates: patterns after {pattern!r} name all its weights. Put it behind them.")
    if len(found) == len(names):
        raise ModelError("learning_rates names every trained weight. Set learning_rate for those of one pattern.")
    return found


def count_rates(model: Model, part: Split, rates: Mapping[str, float]) -> dict[str, int]:
    """Return the trained elements that each pattern of ``rates`` gives its rate, as `find_rates` finds them."""
    trained = {tensor.name: tensor.numel for tensor in part.trained(model)}
    found = find_rates(trained, rates)
    return {pattern: sum(trained[name] for name, one in found.items() if one == pattern) for pattern in rates}


def _find(names: Collection[str], pattern: str, what: str) -> set[str]:
    """Return the parameters that ``pattern`` names; raise `ModelError`, which begins with ``what``, if there is none.

    A pattern is the name of a parameter, or of a module with all its parameters, with the wildcards of a shell.
    """
    if found := {name for name in names if any(fnmatchcase(part, pattern) for part in _parts(name))}:
        return found
    modules = sorted({part for name in names for part in _parts(name)})
    raise ModelError(
        f"{what} not found: {pattern!r}. The model has no parameter or module of that name."
        f"{nearest(pattern, modules)} A pattern has the whole name, such as {next(iter(names))} or *.mlp, and a "
        "head that is the embedding has the embedding's name."
    )


def _parts(name: str) -> Iterator[str]:
    """Yield the name of a parameter and those of the modules that contain it."""
    parts = name.split(".")
    return (".".join(parts[:end]) for end in range(len(parts), 0, -1))


def is_quantized(tensor: ParameterSpec) -> bool:
    """Return True if QLoRA holds ``tensor`` in 4 bits: weights of all linear layers but the head (bitsandbytes)."""
    return tensor.kind == "linear" and len(tensor.shape) == 2 and not is_head(tensor)


def adapted_layers(model: Model, targets: Iterable[str] | str) -> list[ParameterSpec]:
    """Return the weights that PEFT adapts: those of all linear layers but the head, or of the named ones.

    The fused weights of a mixture's experts are named as parameters.
    """
    linear = [t for t in model.tensors if t.kind == "linear" and len(t.shape) == 2 and t.name.endswith("weight")]
    if targets == "all-linear":
        return [tensor for tensor in linear if not is_head(tensor)]
    wanted = [targets] if isinstance(targets, str) else list(targets)
    if not wanted:
        raise ModelError("No adapter target is named. Adapters need layers. Name some, or all-linear.")
    named = [*((f".{t.module}", t) for t in linear), *((f".{t.name}", t) for t in _fused(model))]
    for word in (word for word in wanted if not any(name.endswith(f".{word}") for name, _ in named)):
        if model.tied and word.endswith(HEADS):
            raise ModelError(
                f"Adapter target refused: {word!r}. The head of this {model.architecture} is its embedding "
                "(tie_word_embeddings in config.json), and a merge cannot change one without the other. Remove it "
                "from the targets, or take method: full."
            )
        names = sorted({name.rpartition(".")[2] for name, _ in named})
        raise ModelError(
            f"Adapter target not found: {word!r}. {model.architecture} has no layer or fused weight of that name."
            f"{nearest(word, names)} Layers: {', '.join(names)}, or all-linear."
        )
    ends = tuple(f".{word}" for word in wanted)
    return [tensor for name, tensor in named if name.endswith(ends)]


def _adapters(
    model: Model, method: str, rank: int, targets: Iterable[str] | str, rows: int
) -> tuple[ParameterSpec, ...]:
    """Return the adapters' weights; PEFT itself lists them for an architecture that is not in `families`."""
    layers = adapted_layers(model, targets)
    if model.decoder is None or model.decoder.experts:
        named = {"method": method, "rank": rank, "targets": targets if isinstance(targets, str) else list(targets)}
        named |= {"rows": list(range(rows))} if rows else {}
        request = inventory_request(model.config, model.source, model.trust_remote_code)
        doing = f"Adding adapters to {model.architecture} without memory, to list their weights"
        return tensors_from_json(cached_helper(INVENTORY, {**request, "adapters": named}, doing))
    return tuple(
        ParameterSpec(f"{tensor.module}.lora_{part}.weight", shape, "linear", tensor.block)
        for tensor in layers
        for part, shape in (("A", (rank, tensor.shape[1])), ("B", (tensor.shape[0], rank)))
    )


@lru_cache(maxsize=MODELS)
def fused_experts(model: Model, part: Split) -> tuple[int, frozenset[ParameterSpec]]:
    """Return the elements of the fused weights whose module has adapters, and these adapters."""
    owners = {a: a.module.rpartition(".")[0].replace(".base_layer", "") for a in part.adapters}
    modules = {*owners.values()}
    weights = [tensor for tensor in _fused(model) if tensor.module in modules]
    fused = {tensor.module for tensor in weights}
    return sum(tensor.numel for tensor in weights), frozenset(a for a, owner in owners.items() if owner in fused)


def _fused(model: Model) -> list[ParameterSpec]:
    """Return the weights that stack the matrices of a mixture's experts."""
    return [tensor for tensor in model.tensors if len(tensor.shape) == 3 and tensor.kind == "other"]


def has_own_class(config: Mapping[str, Any], trust_remote_code: bool) -> bool:
    """Return True if the model's class is code beside its config.json, which may run."""
    code = config.get("auto_map")
    return trust_remote_code and isinstance(code, Mapping) and "AutoModelForCausalLM" in code


def inventory_request(config: Mapping[str, Any], source: str, trust_remote_code: bool) -> dict[str, Any]:
    """Return the request that `shardmake.memory.parameter_inventory` takes."""
    return {"config": dict(config), "source": source, "trust_remote_code": trust_remote_code}


def tensors_from_json(values: Iterable[Mapping[str, Any]]) -> tuple[ParameterSpec, ...]:
    """Return the tensors that `dataclasses.asdict` made data of."""
    return tuple(ParameterSpec(t["name"], tuple(t["shape"]), t["kind"], t["block"]) for t in values)
