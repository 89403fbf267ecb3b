"""What a model consists of, from its config.json alone: every tensor, its shape, its place, what it shares.

The Llama, Mistral, Qwen and Gemma families are written down here, so that nothing heavy is imported; every other
architecture is built by transformers on the meta device in a process of its own
(`shardmake.memory.parameter_inventory`), once per config and version. Both give the same tensors, which the tests
check.
"""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property
from importlib.metadata import version
from math import prod
from pathlib import Path
from typing import Any, Literal

from shardmake.core.atomic import digest, write_json
from shardmake.core.errors import ModelError, nearest

Kind = Literal["linear", "embedding", "norm", "other"]
SIZE_FIELDS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
LARGEST_SIZE = 1 << 31


@dataclass(frozen=True)
class Tensor:
    """One parameter; ``block`` is the index of its decoder or encoder layer, None outside of them."""

    name: str
    shape: tuple[int, ...]
    kind: Kind
    block: int | None = None

    @property
    def numel(self) -> int:
        """Elements."""
        return prod(self.shape)

    @property
    def module(self) -> str:
        """Name of the module that owns it."""
        return self.name.rpartition(".")[0]


@dataclass(frozen=True)
class Decoder:
    """The sizes that the closed form of a Llama-like decoder needs, in the notation of the papers.

    h hidden, f intermediate, a heads, k key-value heads, d head dimension, L layers, v vocabulary.
    """

    h: int
    f: int
    a: int
    k: int
    d: int
    layers: int
    v: int
    norms: int = 2
    """Norms per layer on the residual stream."""
    qk_norm: bool = False
    plus_one_norm: bool = False
    """Gemma's norm multiplies in fp32 before it casts back."""
    gelu: bool = False
    scaled_embedding: bool = False
    softcap: bool = False


@dataclass(frozen=True)
class Model:
    """A model as the estimates see it. Tied tensors stand once."""

    model_type: str
    architecture: str
    tensors: tuple[Tensor, ...]
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

    @cached_property
    def parameters(self) -> int:
        """Elements of all tensors."""
        return sum(tensor.numel for tensor in self.tensors)

    @cached_property
    def largest_tensor(self) -> int:
        """Elements of the largest tensor."""
        return max(tensor.numel for tensor in self.tensors)

    @cached_property
    def blocks(self) -> tuple[int, ...]:
        """Elements of each layer, in order."""
        sizes: dict[int, int] = {}
        for tensor in self.tensors:
            if tensor.block is not None:
                sizes[tensor.block] = sizes.get(tensor.block, 0) + tensor.numel
        return tuple(sizes[index] for index in sorted(sizes))

    @property
    def largest_block(self) -> int:
        """Elements of the largest layer; of the whole model where it has none."""
        return max(self.blocks, default=self.parameters)

    @cached_property
    def outside_blocks(self) -> int:
        """Elements of embeddings, final norm and head."""
        return self.parameters - sum(self.blocks)

    @cached_property
    def embedding(self) -> int:
        """Elements of all embeddings and of an output head of its own."""
        return sum(tensor.numel for tensor in self.tensors if tensor.kind == "embedding" or is_head(tensor))

    @cached_property
    def largest_module(self) -> int:
        """Elements of the largest module that owns parameters itself, which DeepSpeed calls the largest layer."""
        sizes: dict[str, int] = {}
        for tensor in self.tensors:
            sizes[tensor.module] = sizes.get(tensor.module, 0) + tensor.numel
        return max(sizes.values())

    @property
    def key(self) -> str:
        """Digest of the config, for caches."""
        return digest(dict(self.config))


@dataclass(frozen=True)
class Split:
    """Which elements of a model train, and how those that do not are held.

    ``trainable`` are elements of trained tensors (adapters included), ``frozen`` are 16 or 32-bit elements that stay,
    ``quantized`` are elements held in 4 bits.
    """

    trainable: int
    frozen: int
    quantized: int
    adapters: tuple[Tensor, ...] = ()

    @property
    def total(self) -> int:
        """All elements, adapters included."""
        return self.trainable + self.frozen + self.quantized


def is_head(tensor: Tensor) -> bool:
    """Whether ``tensor`` belongs to an output head over the vocabulary, which adapters and 4-bit weights leave out."""
    return tensor.block is None and tensor.kind == "linear" and tensor.module.endswith(("lm_head", "embed_out"))


def split(model: Model, method: str, rank: int = 16, targets: Iterable[str] | str = "all-linear") -> Split:
    """Trained, frozen and quantized elements of ``model`` under ``method`` (`full`, `lora` or `qlora`)."""
    if method == "full":
        return Split(model.parameters, 0, 0)
    adapters = _adapters(model, rank, targets)
    trainable = sum(tensor.numel for tensor in adapters)
    if method == "lora":
        return Split(trainable, model.parameters, 0, adapters)
    quantized = sum(t.numel for t in model.tensors if is_quantized(t))
    return Split(trainable, model.parameters - quantized, quantized, adapters)


def is_quantized(tensor: Tensor) -> bool:
    """Whether QLoRA holds ``tensor`` in 4 bits: weights of linear layers but the head (bitsandbytes' rule)."""
    return tensor.kind == "linear" and len(tensor.shape) == 2 and not is_head(tensor)


def adapted_layers(model: Model, targets: Iterable[str] | str) -> list[Tensor]:
    """Weights of the layers that get adapters: PEFT's rule, all linear layers but the head, or matching last names."""
    linear = [t for t in model.tensors if t.kind == "linear" and len(t.shape) == 2 and t.name.endswith("weight")]
    if targets == "all-linear":
        return [tensor for tensor in linear if not is_head(tensor)]
    wanted = [targets] if isinstance(targets, str) else list(targets)
    chosen = [t for t in linear if any(t.module == w or t.module.endswith("." + w) for w in wanted)]
    for word in wanted:
        if not any(t.module == word or t.module.endswith("." + word) for t in chosen):
            names = sorted({tensor.module.rpartition(".")[2] for tensor in linear})
            raise ModelError(
                f"No layer of {model.architecture} is called {word!r}, named in the adapters' targets."
                f"{nearest(word, names)} Layers: {', '.join(names)}, or all-linear."
            )
    return chosen


def _adapters(model: Model, rank: int, targets: Iterable[str] | str) -> tuple[Tensor, ...]:
    """PEFT's LoRA weights; where the architecture is not written down here, those that PEFT itself makes."""
    layers = adapted_layers(model, targets)
    if model.decoder is None:
        named = {"rank": rank, "targets": targets if isinstance(targets, str) else list(targets)}
        return _tensors(cached_helper("shardmake.memory.parameter_inventory", {**_request(model), "adapters": named}))
    return tuple(adapter for tensor in layers for adapter in _pair(tensor, rank))


def _pair(tensor: Tensor, rank: int) -> Iterator[Tensor]:
    out_features, in_features = tensor.shape
    yield Tensor(f"{tensor.module}.lora_A.weight", (rank, in_features), "linear", tensor.block)
    yield Tensor(f"{tensor.module}.lora_B.weight", (out_features, rank), "linear", tensor.block)


def _request(model: Model) -> dict[str, Any]:
    return {"config": dict(model.config), "source": model.source, "trust_remote_code": model.trust_remote_code}


def _tensors(values: Iterable[Mapping[str, Any]]) -> tuple[Tensor, ...]:
    return tuple(Tensor(t["name"], tuple(t["shape"]), t["kind"], t["block"]) for t in values)


def read_model(source: str, *, revision: str | None = None, trust_remote_code: bool = False) -> Model:
    """The model at ``source``: a hub id (from the local cache, else its config.json is fetched), a folder or a file."""
    path = find_config(source, revision)
    config = _read_config(path)
    return from_config(config, source=str(path), trust_remote_code=trust_remote_code)


def from_config(config: Mapping[str, Any], *, source: str = "", trust_remote_code: bool = False) -> Model:
    """The model that a parsed config.json describes; ``source`` is the file, named in errors."""
    _check_config(config, source, trust_remote_code)
    family = FAMILIES.get(config["model_type"])
    if family is not None and _is_plain(config):
        return _written_down(family, config, source)
    return replace(_built(config, source, trust_remote_code), trust_remote_code=trust_remote_code)


def find_config(source: str, revision: str | None = None) -> Path:
    """Where the config.json of ``source`` lies; a hub id is looked up in the local cache first."""
    path = Path(source)
    if path.is_file():
        return path
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(f"The folder {source} has no config.json. Name a folder that transformers has saved.")
        return path / "config.json"
    if source.startswith((".", "/", "~")) or source.count("/") > 1 or source.endswith(".json"):
        raise ModelError(
            f"There is no model at {source} (looked in {Path.cwd()}). Name a folder, or a hub id org/name."
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
            f"The model {source!r} is neither a folder here nor in the hub's cache, and fetching its config.json failed"
            f" ({type(error).__name__}). Where there is internet, run: hf download {source}; or name a folder."
        ) from None


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise ModelError(f"{path} holds no settings; it should be the config.json of a transformers model.")
    return config


def _check_config(config: Mapping[str, Any], source: str, trust_remote_code: bool) -> None:
    if not config.get("model_type"):
        raise ModelError(f"{source or 'The config'} has no model_type; it is no config.json of a transformers model.")
    for field in SIZE_FIELDS:
        value = config.get(field, 1)
        if value is None or isinstance(value, list | str):
            continue
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < LARGEST_SIZE:
            raise ModelError(f"{source}: {field} is {value!r}; it must be a whole number above 0.")
    _check_sizes(config, source)
    if config.get("auto_map") and config["model_type"] not in FAMILIES and not trust_remote_code:
        raise ModelError(
            f"{source}: this model brings its own code ({', '.join(config['auto_map'])}), which no formula here knows. "
            "Read that code, then set trust_remote_code: true, and it is built and traced."
        )


SIZE_NAMES = (
    ("hidden_size", "n_embd", "d_model", "dim"),
    ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "encoder_layers"),
    ("vocab_size",),
)


def _check_sizes(config: Mapping[str, Any], source: str) -> None:
    """Refuse a config that leaves a size to transformers' default, or whose heads do not divide."""
    if any(isinstance(value, Mapping) and value.get("model_type") for value in config.values()):
        return  # the sizes stand in the parts' own configs
    wanted = [(field,) for field in SIZE_FIELDS] if config["model_type"] in FAMILIES else SIZE_NAMES
    for names in wanted:
        if all(config.get(name) is None for name in names):
            raise ModelError(f"{source}: the config gives no {' or '.join(names)}. Take the model's whole config.json.")
    heads = config.get("num_attention_heads")
    groups = config.get("num_key_value_heads") or heads
    if isinstance(heads, int) and isinstance(groups, int) and heads % groups:
        raise ModelError(f"{source}: {heads} num_attention_heads cannot share {groups} num_key_value_heads evenly.")
    if config["model_type"] in FAMILIES and not config.get("head_dim") and config["hidden_size"] % heads:
        raise ModelError(
            f"{source}: hidden_size is no multiple of {heads} num_attention_heads, and head_dim is not given."
        )


# ---------------------------------------------------------------------------------------------------------------------
# Families that are written down


@dataclass(frozen=True)
class Family:
    """How a family differs from Llama; defaults are those of its transformers config class."""

    architecture: str
    block_class: str
    tied: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    norms: int = 2
    head_dim: int | None = None
    kv_heads: int | None = None
    plus_one_norm: bool = False
    gelu: bool = False


FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM", "LlamaDecoderLayer"),
    "mistral": Family("MistralForCausalLM", "MistralDecoderLayer", kv_heads=8),
    "qwen2": Family("Qwen2ForCausalLM", "Qwen2DecoderLayer", qkv_bias=True, kv_heads=32),
    "qwen3": Family("Qwen3ForCausalLM", "Qwen3DecoderLayer", qk_norm=True, head_dim=128, kv_heads=32),
    "gemma": Family(
        "GemmaForCausalLM", "GemmaDecoderLayer", tied=True, head_dim=256, kv_heads=16, plus_one_norm=True, gelu=True
    ),
}


def _is_plain(config: Mapping[str, Any]) -> bool:
    """Whether every size is given and nothing is set that the closed form does not know."""
    return all(isinstance(config.get(field), int) for field in SIZE_FIELDS) and not config.get("quantization_config")


def _written_down(family: Family, config: Mapping[str, Any], source: str) -> Model:
    tied = bool(config.get("tie_word_embeddings", family.tied))
    decoder = _decoder(family, config)
    tensors = tuple(_decoder_tensors(decoder, _biases(family, config), tied))
    rotary = 4 * (decoder.d // 2) * 2  # inv_freq and its original, fp32
    return Model(
        model_type=config["model_type"],
        architecture=family.architecture,
        tensors=tensors,
        tied=tied,
        buffer_bytes=rotary + (4 if family.plus_one_norm else 0),
        block_classes=(family.block_class,),
        hidden_size=decoder.h,
        vocab_size=decoder.v,
        max_positions=config.get("max_position_embeddings"),
        decoder=decoder,
        config=config,
        source=source,
    )


def _decoder(family: Family, config: Mapping[str, Any]) -> Decoder:
    heads = config["num_attention_heads"]
    default_kv = heads if family.architecture.startswith("Llama") else family.kv_heads
    return Decoder(
        h=config["hidden_size"],
        f=config["intermediate_size"],
        a=heads,
        k=config.get("num_key_value_heads") or default_kv or heads,
        d=config.get("head_dim") or family.head_dim or config["hidden_size"] // heads,
        layers=config["num_hidden_layers"],
        v=config["vocab_size"],
        norms=family.norms,
        qk_norm=family.qk_norm,
        plus_one_norm=family.plus_one_norm,
        gelu=family.gelu,
        scaled_embedding=family.plus_one_norm,
    )


@dataclass(frozen=True)
class _Biases:
    qkv: bool
    out: bool
    mlp: bool


def _biases(family: Family, config: Mapping[str, Any]) -> _Biases:
    attention = bool(config.get("attention_bias", False)) and not family.qkv_bias
    return _Biases(attention or family.qkv_bias, attention, bool(config.get("mlp_bias", False)))


def _decoder_tensors(shape: Decoder, biases: _Biases, tied: bool) -> Iterator[Tensor]:
    yield Tensor("model.embed_tokens.weight", (shape.v, shape.h), "embedding")
    for block in range(shape.layers):
        yield from _block_tensors(shape, biases, block)
    yield Tensor("model.norm.weight", (shape.h,), "norm")
    if not tied:
        yield Tensor("lm_head.weight", (shape.v, shape.h), "linear")


def _block_tensors(shape: Decoder, biases: _Biases, block: int) -> Iterator[Tensor]:
    prefix = f"model.layers.{block}"
    q, kv = shape.a * shape.d, shape.k * shape.d
    linears = [
        ("self_attn.q_proj", q, shape.h, biases.qkv),
        ("self_attn.k_proj", kv, shape.h, biases.qkv),
        ("self_attn.v_proj", kv, shape.h, biases.qkv),
        ("self_attn.o_proj", shape.h, q, biases.out),
        ("mlp.gate_proj", shape.f, shape.h, biases.mlp),
        ("mlp.up_proj", shape.f, shape.h, biases.mlp),
        ("mlp.down_proj", shape.h, shape.f, biases.mlp),
    ]
    for name, rows, columns, bias in linears:
        yield Tensor(f"{prefix}.{name}.weight", (rows, columns), "linear", block)
        if bias:
            yield Tensor(f"{prefix}.{name}.bias", (rows,), "linear", block)
        if name == "self_attn.o_proj" and shape.qk_norm:
            yield Tensor(f"{prefix}.self_attn.q_norm.weight", (shape.d,), "norm", block)
            yield Tensor(f"{prefix}.self_attn.k_norm.weight", (shape.d,), "norm", block)
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield Tensor(f"{prefix}.{name}.weight", (shape.h,), "norm", block)


# ---------------------------------------------------------------------------------------------------------------------
# Everything else: built on the meta device in another process


def cache_folder() -> Path:
    """Where results that cost a process are kept, by config and versions."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "shardmake"


def run_helper(module: str, request: Mapping[str, Any]) -> Any:
    """Run ``python -m module`` with ``request`` as JSON on its input; its JSON output. Its errors are ModelError.

    A process of its own keeps torch out of this one, and a model's broken code from taking this one down.
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", module],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        env={**os.environ, "TRANSFORMERS_VERBOSITY": "error", "CUDA_VISIBLE_DEVICES": ""},
        check=False,
    )
    if done.returncode == 2:
        raise ModelError(done.stdout.strip())
    if done.returncode:
        raise RuntimeError(f"{module} failed:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout)


def cached_path(module: str, request: Mapping[str, Any]) -> Path:
    """Where the answer to ``request`` is kept: by its content, the libraries' versions and these formulas' text."""
    key = digest([dict(request), _versions()])
    return cache_folder() / f"{module.rpartition('.')[2]}-{key}.json"


@cache
def _versions() -> list[str]:
    sources = sorted(Path(__file__).parent.rglob("*.py"))
    text = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()
    return [version("torch"), version("transformers"), text]


def read_cached(module: str, request: Mapping[str, Any]) -> Any:
    """The answer to ``request`` that is kept."""
    return json.loads(cached_path(module, request).read_text())


def cached_helper(module: str, request: Mapping[str, Any]) -> Any:
    """`run_helper`, with its answer kept on disk."""
    path = cached_path(module, request)
    if not path.is_file():
        write_json(path, run_helper(module, request))
    return json.loads(path.read_text())


def _built(config: Mapping[str, Any], source: str, trust_remote_code: bool) -> Model:
    request = {"config": dict(config), "source": source, "trust_remote_code": trust_remote_code}
    values = cached_helper("shardmake.memory.parameter_inventory", request)
    tensors = _tensors(values.pop("tensors"))
    return Model(
        **{**values, "block_classes": tuple(values["block_classes"])},
        tensors=tensors,
        decoder=None,
        config=config,
        source=source,
    )


def tensor_json(tensor: Tensor) -> dict[str, Any]:
    """``tensor`` as JSON data."""
    return asdict(tensor)
