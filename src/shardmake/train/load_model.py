"""Load the base model with as little host memory as the engine allows, and add adapters for LoRA.

Under FSDP and ZeRO-3 rank 0 alone reads the files, which are mapped; the others get an empty model, and accelerate or
DeepSpeed sends them weight by weight. transformers itself lets every rank read them under FSDP (5.23). Under ZeRO-3 it
gathers and writes every weight of a model that DeepSpeed has sharded without content, which takes two copies. Engines
that keep whole weights on each GPU get them there: the files are mapped, and tensor by tensor is copied to the GPU.
"""

import ctypes
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import fsdp_utils
from torch.nn import functional
from torch.nn.functional import pad
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel, TrainingArguments, set_seed
from transformers.initialization import no_init_weights
from transformers.integrations import HfDeepSpeedConfig, set_hf_deepspeed_config, unset_hf_deepspeed_config
from transformers.modeling_outputs import CausalLMOutputWithPast

from shardmake.config.methods import METHODS
from shardmake.config.strategies import FSDP
from shardmake.core.errors import CheckpointError, ModelError
from shardmake.core.private_names import private
from shardmake.core.units import plural
from shardmake.data.dataset import IGNORED
from shardmake.data.varlen import register_varlen
from shardmake.memory.model import find_frozen
from shardmake.memory.size_tensors import fused_chunk
from shardmake.run.model_class import load_complete
from shardmake.run.tokenizer import token_rows
from shardmake.run.training_settings import FullMethod, TrainingSettings
from shardmake.train.fsdp_precision import fsdp_policy
from shardmake.train.library_patches import broadcast_saved_buffers, name_checkpointed_adapters, wrap

# ``loss: chunked``: torch 2.13's linear cross entropy or `ChunkedLosses`, which hold the logits of some tokens at a
# time.
#
# Both multiply a part of the hidden states by the head, and do so again in the backward pass. They give one loss per
# token in the type of the hidden states. Those are added up in fp32: torch's own sum of 16-bit losses has 8 bits.


def use_chunked_loss(model: Any) -> None:
    """Let ``model``, a decoder whose head is ``lm_head``, compute its loss in chunks and return no logits with it.

    Without labels, the model returns logits as before. The loss is computed in the head's own forward pass, because
    ZeRO-3 gathers a module's weights for that pass and for its backward pass only.
    """
    whole, head = model.forward, model.lm_head
    logits = head.forward

    def head_forward(hidden: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        return logits(hidden) if targets is None else token_losses(hidden, head.weight, targets)

    def forward(
        *arguments: Any,
        labels: torch.Tensor | None = None,
        shift_labels: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        **inputs: Any,
    ) -> CausalLMOutputWithPast:
        if labels is None:
            return whole(*arguments, **inputs)
        outputs = model.model(*arguments, **inputs)
        targets = pad(labels, (0, 1), value=IGNORED)[:, 1:] if shift_labels is None else shift_labels
        losses = head(outputs.last_hidden_state, targets)
        count = (targets != IGNORED).sum() if num_items_in_batch is None else num_items_in_batch
        return CausalLMOutputWithPast(loss=losses.float().sum() / count)

    head.forward = head_forward
    model.forward = forward


def token_losses(hidden: torch.Tensor, head: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the cross entropy of each token, [batch x tokens]; zero where ``targets`` is -100.

    ``hidden`` has the shape [batch, tokens, width], ``head`` [vocabulary, width] and ``targets`` [batch, tokens].
    """
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        hidden, head = hidden.to(dtype), head.to(dtype)
    rows = hidden.flatten(0, 1).to(head.dtype)
    if not hasattr(functional, "linear_cross_entropy"):
        return ChunkedLosses.apply(rows, head, targets.flatten())
    options = torch.nn.LinearCrossEntropyOptions()
    return functional.linear_cross_entropy(
        rows, head, targets.flatten(), reduction="none", ignore_index=IGNORED, options=options
    )


class ChunkedLosses(torch.autograd.Function):
    """torch 2.13's `linear_cross_entropy` for older versions: the losses of ``rows``, [tokens, width], by token.

    As there, the logits of a chunk of rows are made in both passes, products are in the type of the weights, and the
    softmax is in fp32. The gradient of the head is added up in the type of the weights.
    """

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, head: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the loss of each row."""
        ctx.save_for_backward(rows, head, targets)
        losses = [
            functional.cross_entropy((part @ head.T).float(), wanted, reduction="none", ignore_index=IGNORED)
            for part, wanted in _chunks(rows, head, targets)
        ]
        return torch.cat(losses).to(rows.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        """Return the gradients of the rows and, if it is trained, of the head."""
        rows, head, targets = ctx.saved_tensors
        to_rows = torch.empty_like(rows)
        to_head = torch.zeros_like(head) if ctx.needs_input_grad[1] else None
        begin = 0
        for part, wanted in _chunks(rows, head, targets):
            here = slice(begin, begin := begin + len(part))
            slope = (part @ head.T).float().softmax(-1)
            slope.scatter_add_(1, wanted.clamp(min=0)[:, None], slope.new_full((len(part), 1), -1.0))
            slope *= (grads[0][here].float() * (wanted != IGNORED))[:, None]
            narrow = slope.to(head.dtype)
            to_rows[here] = narrow @ head
            if to_head is not None:
                to_head.addmm_(narrow.T, part)
        return to_rows, to_head, None


def _chunks(
    rows: torch.Tensor, head: torch.Tensor, targets: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield parts of rows and targets; their number is that by which the vocabulary is wider than a row."""
    size = fused_chunk(len(rows), head.shape[1], head.shape[0])
    return zip(rows.split(size), targets.split(size), strict=True)


def load_model(settings: TrainingSettings, arguments: TrainingArguments) -> PreTrainedModel:
    """Return the model to train: the base model, with adapters if the method is LoRA; the same on every rank."""
    set_seed(settings.arguments["seed"])
    method = settings.method
    model = load_base(settings, arguments)
    model.config.use_cache = False
    average_router_loss(model, settings)
    if settings.loss == "chunked":
        use_chunked_loss(model)
    if isinstance(method, FullMethod):
        parameters = dict(model.named_parameters())
        for name in find_frozen(parameters, settings.freeze):
            parameters[name].requires_grad_(False)
        refuse_partial_states(model)
        return model
    from peft import get_peft_model
    from peft.tuners import tuners_utils

    task = "SEQ_CLS" if settings.model.model_class.new_head else "CAUSAL_LM"
    rows = token_rows(load_tokenizer(settings), method.train_tokens) if method.train_tokens else ()
    shape = method.model_dump(exclude={"kind", "adapter", "train_tokens"})
    adapters = METHODS[method.kind].peft_config(task, model, rows, **shape)
    name_checkpointed_adapters(tuners_utils)
    adapted = get_peft_model(model, adapters)
    for weight in adapted.parameters():
        if weight.requires_grad:  # PEFT leaves a new head in the type of the base
            weight.data = weight.data.float()
    if absent := getattr(model, "absent", None):  # in the base's class, layers of its towers may have the same names
        adapted.peft_config["default"].exclude_modules = rf"({'|'.join(map(re.escape, absent))})(\..*)?"
    refuse_partial_states(adapted)
    if method.adapter is not None:
        try:
            adapted.load_adapter(method.adapter, "default", is_trainable=True)
        except CheckpointError as error:
            raise CheckpointError(
                f"lora.adapter {method.adapter} is not one of the targets {method.targets}. Merge it into the base "
                f"model instead, and train a new adapter: name it as resume_from. {error}"
            ) from error
    return adapted


_ROUTER_LOSS = "load_balancing_loss_func"


def average_router_loss(model: PreTrainedModel, settings: TrainingSettings) -> None:
    """Let the routers' loss of a mixture of experts count with the coefficient in its config, however a batch is split.

    transformers adds coefficient x loss in every forward pass. The loss of the tokens is their part of a mean over the
    global batch, and the passes of a step are added up. Without this, the coefficient would grow with ranks and
    accumulation steps.
    """
    expected = settings.expected
    groups = expected.world_size // (expected.tensor_parallel or 1)
    passes = groups * settings.arguments["gradient_accumulation_steps"]
    code = sys.modules[type(model).__module__]
    if (coefficient := getattr(model, "router_aux_loss_coef", None)) is not None:
        model.router_aux_loss_coef = coefficient / passes
    elif hasattr(code, _ROUTER_LOSS):  # the coefficient is read from the config, which is saved
        wrap(code, _ROUTER_LOSS, lambda function, *given, **options: function(*given, **options) / passes)


def refuse_partial_states(model: torch.nn.Module) -> None:
    """Let ``load_state_dict`` of ``model`` raise a `CheckpointError` for weights that are missing or left over.

    Trainer, PEFT and DeepSpeed load checkpoints with ``strict=False`` and at most warn. Of an adapted model, a
    checkpoint may leave out the frozen weights and hold more of them, such as the scales of 4-bit weights.
    """
    model.register_load_state_dict_post_hook(check_names)


def check_names(model: torch.nn.Module, names: Any) -> None:
    """Raise a `CheckpointError` for ``names``, the result of ``load_state_dict``, that make the checkpoint partial."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    trained = {name for name, parameter in parameters.items() if parameter.requires_grad}
    missing, unexpected = set(names.missing_keys), set(names.unexpected_keys)
    if hasattr(model, "peft_config"):
        missing &= trained
        parents = {name: accumulate(name.split("."), "{}.{}".format) for name in unexpected}
        unexpected = {name for name, above in parents.items() if parameters.keys().isdisjoint(above)}
    held = {id(parameter) for name, parameter in parameters.items() if name not in missing}
    missing = {name for name in missing if id(parameters.get(name)) not in held}  # the other name of a tied weight
    if missing or unexpected:
        raise CheckpointError(
            f"The checkpoint does not fit {type(model).__name__}: {_count('missing', missing)}"
            f"{_count('not part of the model', unexpected)}training would continue with other weights. Resume with the "
            "version of transformers that wrote the checkpoint, or from an older checkpoint."
        )


def _count(kind: str, names: set[str]) -> str:
    """Return how many ``names`` there are, and the first of them; empty if there are none."""
    return f"{plural(len(names), 'name')} {kind} ({', '.join(sorted(names)[:3])}); " if names else ""


def load_tokenizer(settings: TrainingSettings) -> Any:
    """Return the base model's tokenizer with the run's chat template, which is saved with the checkpoints."""
    model = settings.model
    tokenizer = AutoTokenizer.from_pretrained(
        model.path, revision=model.revision, trust_remote_code=model.trust_remote_code
    )
    if model.chat_template is not None:
        tokenizer.chat_template = model.chat_template
    return tokenizer


def model_configs(model: Any) -> list[Any]:
    """Return the parts of a model that describe it and contain no weights: configs, adapter configs."""
    adapters = getattr(model, "peft_config", {}).values()
    generation = [model.generation_config] if getattr(model, "generation_config", None) else []
    return [model.config, *generation, *adapters]


def load_base(settings: TrainingSettings, arguments: TrainingArguments) -> PreTrainedModel:
    """Return the base model of ``training.json`` in the planned class and data type.

    Under ZeRO-3 it is sharded. Under FSDP it is empty if another rank sends the weights. Raises `ModelError` if a
    weight is missing or left over.
    """
    model = settings.model
    source: dict[str, Any] = {"revision": model.revision, "trust_remote_code": model.trust_remote_code}
    dtype = getattr(torch, model.dtype)
    if model.attention == "varlen":
        register_varlen()
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": model.attention}
    if settings.expected.expert_parallel is not None:
        return _spread_experts(settings, source | options)
    in_four_bits = METHODS[settings.method.kind].in_four_bits
    if in_four_bits:
        options["quantization_config"] = _four_bit_config(dtype)
    if model.on_gpu:
        options["device_map"] = {"": int(os.environ.get("LOCAL_RANK", "0"))}
    kind, shards = model.model_class, settings.expected.zero_stage == 3
    load = partial(kind.load_base, model.path, **source, **options)
    # Accelerate does not broadcast 4-bit weights, so every rank quantizes its own.
    if not shards and (settings.expected.engine != FSDP or in_four_bits):
        return load()
    build = partial(kind.build, AutoConfig.from_pretrained(model.path, **source, **kind.config_changes), **options)
    if shards:
        return load_sharded(load, build, arguments.hf_deepspeed_config, dtype)
    broadcast_saved_buffers(fsdp_utils)
    return send_buffers(read_on_rank_0(load, build), arguments.device)


def _spread_experts(settings: TrainingSettings, options: dict[str, Any]) -> PreTrainedModel:
    """Return the base model sharded by transformers: FSDP2 over all ranks, and experts over groups of ranks.

    Each rank reads its part of the weights. Trainer would refuse to save the optimizer of a model that it knows to be
    sharded at loading (transformers 5.23). Without that mark Accelerate takes the model as one that it has sharded.
    """
    from transformers.distributed import DistributedConfig, fsdp

    expected = settings.expected
    policy = fsdp_policy(expected)
    private(fsdp).get_fsdp_policy_kwargs = lambda _: {"mp_policy": policy} if policy else {}
    layout = DistributedConfig(fsdp_size=expected.world_size, ep_size=expected.expert_parallel)
    kind = settings.model.model_class.find()
    changes = settings.model.model_class.config_changes
    base = load_complete(kind, settings.model.path, **changes, **options, distributed_config=layout)
    private(base).is_distributed_loading_by_transformers = False
    del base.config.distributed_config
    return base


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


Make = Callable[[], PreTrainedModel]
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h


def read_on_rank_0(load: Make, build: Make) -> PreTrainedModel:
    """Return the model that ``load`` reads on rank 0, and elsewhere that of ``build`` with unwritten weights.

    Those use address space but no memory. They are not on the meta device: accelerate identifies an optimizer's
    parameters by their addresses, which are all 0 there.
    """
    unset_hf_deepspeed_config()
    if os.environ.get("RANK", "0") == "0":
        return match_rank_0(load())
    with no_init_weights():
        model = build()
    model.tie_weights()
    return match_rank_0(model.eval())


def match_rank_0(model: PreTrainedModel) -> PreTrainedModel:
    """Return ``model`` with the data types and ties of rank 0, which transformers has compared with the files.

    Ranks with other weights would wait for each other forever.
    """
    weights = dict(model.named_parameters(remove_duplicate=False))
    owners = {id(weight): name for name, weight in reversed(weights.items())}
    own = {name: (weight.shape, owners[id(weight)], weight.dtype) for name, weight in weights.items()}
    sent = [own]
    dist.broadcast_object_list(sent)
    shapes, wanted = ({(name, shape) for name, (shape, *_) in part.items()} for part in (own, sent[0]))
    if differing := sorted(name for name, _ in shapes ^ wanted):
        raise ModelError(
            f"Cannot load {type(model).__name__}: rank {dist.get_rank()} builds other weights than rank 0, such as "
            f"{differing[0]}. The model's code must build the same weights on every rank."
        )
    made: dict[str, torch.nn.Parameter] = {}
    for name, (_, owner, dtype) in sent[0].items() if own != sent[0] else ():
        if owner not in made:
            made[owner] = torch.nn.Parameter(torch.empty_like(weights[name], dtype=dtype), weights[name].requires_grad)
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, made[owner])
    return model


def load_sharded(load: Make, build: Make, config: HfDeepSpeedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Return the model of `read_on_rank_0`, sharded by ZeRO-3 as ``config`` says; transformers is in its mode again.

    DeepSpeed requires weights of one data type; transformers keeps some in fp32.
    """
    from deepspeed import zero

    with no_cached_blocks():
        base = read_on_rank_0(load, build)
        for weight in base.parameters():
            weight.data = weight.data.to(dtype)
        sharded = zero.Init(module=base, config_dict_or_path=config.config)
    set_hf_deepspeed_config(config)
    return send_buffers(base, sharded.local_device)


@contextmanager
def no_cached_blocks() -> Iterator[None]:
    """Let glibc return freed blocks to the system at once, of which it keeps those below 32 MiB.

    Rank 0 would keep a third of a mixture's weights. The last thresholds are those that glibc reaches by itself. Those
    that the environment sets stay.
    """
    is_set = re.search("(?i)(mmap|trim)_threshold", " ".join([*os.environ, os.environ.get("GLIBC_TUNABLES", "")]))
    set_option = getattr(None if is_set else ctypes.CDLL(None), "mallopt", lambda *_: None)
    set_option(_MMAP_THRESHOLD, 1 << 16)
    yield
    set_option(_MMAP_THRESHOLD, 1 << 25)
    set_option(_TRIM_THRESHOLD, 1 << 26)


def send_buffers(base: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    """Return ``base`` with the buffers of rank 0 on ``device``; transformers keeps some that it reads in fp32."""
    buffers = list(base.buffers())
    types = [[buffer.dtype for buffer in buffers]]
    dist.broadcast_object_list(types)
    for buffer, dtype in zip(buffers, types[0], strict=True):
        buffer.data = buffer.data.to(device, dtype).contiguous()
        dist.broadcast(buffer.data, src=0)
    return base
