"""Refusals of a plan: settings of a run that contradict each other, the cluster, the model or the packages.

Each function yields the messages about one subject, the first to correct first. `refuse` raises the first of them.
"""

from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from itertools import chain

from shardmake.config.attention import FLASH_CAPABILITY, FLASH_KERNELS, Attention
from shardmake.config.models import Cluster, Precision, Run, Strategy
from shardmake.config.objectives import OBJECTIVES
from shardmake.config.strategies import STRATEGY_SPECS, StrategySpec
from shardmake.core.errors import ConfigError
from shardmake.core.units import plural
from shardmake.memory.hardware import Hardware
from shardmake.memory.model import Model, adapted_layers, find_frozen, is_head
from shardmake.memory.optimizer_trial import optimizer_spec
from shardmake.plan.abilities import MIXING_UNKNOWN, Abilities, has_plain_head, table_keys

_LIGER_TABLE = "MODEL_TYPE_TO_APPLY_LIGER_FN"


def refuse(*messages: Iterable[str]) -> None:
    """Raise a `ConfigError` with the first of ``messages`` that is not empty; later ones are not computed."""
    for message in filter(None, chain.from_iterable(messages)):
        raise ConfigError(message)


def applying(*rows: tuple[object, str]) -> Iterator[str]:
    """Return the messages of the rows whose first value is true."""
    return (message for holds, message in rows if holds)


def together(setting: str, wrong: Iterable[str]) -> Iterator[str]:
    """Yield one message with all that is ``wrong`` about a setting, a line each."""
    if lines := [f"\n  {line}" for line in wrong]:
        yield f"{setting} cannot be used with this run:{''.join(lines)}"


def refuse_before_fetch(run: Run, cluster: Cluster) -> None:
    """Raise a `ConfigError` for what the configuration and the cluster file alone decide."""
    refuse(wrong_fsdp(run, cluster), wrong_on_cpu(run) if cluster.is_cpu else (), _wrong_batch(run, cluster))


def _wrong_batch(run: Run, cluster: Cluster) -> Iterator[str]:
    readers = cluster.processes_per_node // (run.tensor_parallel * run.sequence_parallel)
    nodes = [run.nodes] if run.nodes else range(1, cluster.max_nodes + 1)
    if readers and all(run.global_batch_size % (readers * count) for count in nodes):
        yield undivided(run, readers * nodes[0], nodes[0])


def undivided(run: Run, ranks: int, nodes: int) -> str:
    """Return what to do about a global batch that ``ranks`` of so many nodes cannot share."""
    batch = run.global_batch_size
    return (
        f"global_batch_size {batch} cannot be divided over {ranks} ranks ({plural(nodes, 'node')}). Use "
        f"{multiples(batch, ranks)}, or another number of nodes."
    )


def multiples(size: int, step: int) -> str:
    """Return the multiples of ``step`` next to ``size``, as text."""
    return " or ".join(str(multiple) for multiple in (size // step * step, -(-size // step) * step) if multiple)


def wrong_on_cpu(run: Run) -> Iterator[str]:
    """Return the settings that need a GPU."""
    needs_gpu = {
        f"optimizer: {run.optimizer}": optimizer_spec(run.optimizer).package,
        f"method: {run.method}": run.method_spec.package,
        f"attention: {run.attention}": run.attention in FLASH_KERNELS,
        "precision: fp16": run.precision == "fp16",
        "loss: fused": run.loss == "fused",
        "memory_snapshot: true": run.memory_snapshot,
    }
    why = "needs a GPU, but the cluster file has accelerator: cpu. Change one of them."
    return (f"{setting} {why}" for setting, wanted in needs_gpu.items() if wanted)


def wrong_model(run: Run, model: Model) -> Iterator[str]:
    """Return why the model is too short, or why TRL does not train it with the objective yet."""
    objective, positions = OBJECTIVES[run.objective], model.max_positions
    refused = f"objective: {run.objective} is not supported for {model.architecture}"
    return applying(
        (positions is not None and run.sequence_length > positions,
         f"sequence_length is {run.sequence_length}, but {model.architecture} has only {positions} positions "
         "(max_position_embeddings). Lower sequence_length."),
        (objective.trl and "router_aux_loss_coef" in model.text_config,
         f"{refused}, a mixture of experts: the routers' loss would depend on the micro batch. Use a dense model."),
        (objective.trl and objective.new_head and not model.has_all_levers,
         f"{refused}. Use a model of the Llama, Mistral, Qwen2, Qwen3 or Gemma family."),
        (objective.trl and run.attention in FLASH_KERNELS,
         f"attention: {run.attention} cannot be combined with objective: {run.objective}, whose examples are padded. "
         "Use sdpa, or auto."),
    )  # fmt: skip


def wrong_abilities(run: Run, abilities: Abilities) -> Iterator[str]:
    """Return what the model's class does not support; a script loads it in its own way, but is merged like others."""
    targets = ", ".join(abilities.mergeable_targets)
    refused = f"attention: {run.attention} cannot be used: {abilities.model_class}"
    instead = f"Use {' or '.join(abilities.attention)}, or auto."
    checkpoints = run.script or abilities.gradient_checkpointing
    return applying(
        (abilities.unmergeable,
         f"method: {run.method} with lora.targets {run.lora.targets} cannot be merged for {abilities.model_class}: "
         f"PEFT adapts it with {', '.join(abilities.unmergeable)}. "
         + (f"Set lora.targets: [{targets}], or take method: full." if targets else "Take method: full.")),
        (abilities.text_part and run.lora.adapter,
         "lora.adapter: it is not tested with the text part of a composite model. Remove it, or set resume_from."),
        (not run.script and run.attention == "varlen" and abilities.varlen_limit,
         f"{refused} {abilities.varlen_limit}. {instead}"),
        (not run.script and run.attention not in ("auto", *abilities.attention),
         f"{refused} does not support it in transformers {version('transformers')}. {instead}"),
        (run.gradient_checkpointing is True and not checkpoints,
         f"gradient_checkpointing: true cannot be used: {abilities.model_class} does not support it. Use false, or "
         "auto."),
        (run.activation_offload and not checkpoints,
         f"activation_offload: true cannot be used: {abilities.model_class} does not support gradient checkpointing, "
         "whose inputs it offloads. Remove activation_offload."),
    )  # fmt: skip


def wrong_train_tokens(run: Run, text_part: bool) -> Iterator[str]:
    """Yield what `lora.train_tokens` is not tested with."""
    keys, fields = ("objective", "loss", "torch_compile", "tensor_parallel", "sequence_parallel"), Run.model_fields
    wrong = [f"{key}: {getattr(run, key)}" for key in keys if getattr(run, key) != fields[key].default]
    wrong += [f"method: {run.method}"] * run.method_spec.in_four_bits
    wrong += [f"lora.adapter: {run.lora.adapter}"] * bool(run.lora.adapter)
    wrong += [f"{name} in lora.targets" for name in ("lm_head", "embed_tokens") if name in run.lora.targets]
    wrong += ["the text part of a composite model"] * text_part
    if run.lora.train_tokens:
        yield from together("lora.train_tokens", (f"{one}: it is not tested. Take method: full." for one in wrong))


def wrong_precision(run: Run, precision: Precision, hardware: Hardware) -> Iterator[str]:
    """Return what the accelerator lacks for ``precision``, TF32 and the attention kernel, or why TF32 has no effect."""
    accelerator, needed = hardware.accelerator, needed_for_flash(hardware, precision)
    return applying(
        (precision == "bf16" and not accelerator.bf16,
         f"precision: bf16 needs Ampere or later, and {accelerator.name} is older. Use fp16, or auto."),
        (run.tf32 and precision != "fp32",
         f"tf32: true is for precision: fp32, and this run computes in {precision}. Set precision: fp32, or remove "
         "tf32."),
        (run.tf32 and not accelerator.has_tf32,
         f"tf32: true needs a GPU of the Ampere generation or later, and the cluster file has accelerator: "
         f"{accelerator.name}. Remove tf32."),
        (run.tf32 and run.script, "tf32: true has no effect on a script. Remove tf32, and set it in the script."),
        (run.attention in FLASH_KERNELS and not run.script and needed,
         f"attention: {run.attention} needs {needed}. Use sdpa, or auto."),
    )  # fmt: skip


def needed_for_flash(hardware: Hardware, precision: Precision) -> str:
    """Return what FlashAttention needs and is not there; empty if it can run."""
    if hardware.accelerator.capability < FLASH_CAPABILITY:
        return f"Ampere or later, and {hardware.accelerator.name} is older"
    return "precision bf16 or fp16, and this run computes in fp32" if precision == "fp32" else ""


def wrong_nodes(run: Run, cluster: Cluster) -> Iterator[str]:
    """Return why the cluster does not have the nodes of the run and its service."""
    service, nodes, is_local = run.service_nodes or 0, run.nodes or 1, cluster.executor != "slurm"
    allowed = (
        f"but the cluster file allows {cluster.max_nodes} (max_nodes). Lower nodes, or raise max_nodes if the cluster "
        "has them."
    )
    return applying(
        (nodes > cluster.max_nodes, f"The run asks for {nodes} nodes, {allowed}"),
        (service and cluster.slurm.spare_nodes,
         "slurm.spare_nodes cannot be combined with a service, whose job never restarts in place. Remove the key."),
        (service and not is_local and nodes + service > cluster.max_nodes,
         f"The run asks for {nodes + service} nodes, {service} of them for its service, {allowed}"),
        (service and is_local and not cluster.is_cpu,
         "service_nodes cannot be used with executor: local and GPUs, because all GPUs of this machine belong to the "
         "ranks. Use a cluster file with executor: slurm."),
        (service > 1 and is_local,
         f"service_nodes: {service} cannot be used with executor: local, which runs one service beside the ranks. "
         "Set service_nodes: 1."),
    )  # fmt: skip


def wrong_strategy(run: Run, cluster: Cluster, precision: Precision, tied: bool = False) -> Iterator[str]:
    """Return why the run's strategy cannot train it on the cluster, or accumulates gradients in another data type."""
    spec, wanted = STRATEGY_SPECS.get(run.strategy), run.gradient_dtype
    why = "" if run.strategy == "auto" else unsuitable(run, run.strategy, tied)
    return applying(
        (spec and spec.uses_nvme and cluster.nvme_path is None,
         f"Strategy {run.strategy} needs node-local NVMe; set nvme_path in the cluster file."),
        (spec and spec.hpz and min(run.nodes or cluster.max_nodes, cluster.processes_per_node) == 1,
         f"Strategy {run.strategy} keeps a second shard of the weights in each node. It needs several nodes with "
         "several ranks each. Raise nodes or max_nodes, or take the strategy without a second shard."),
        (why, why),
        (wanted == "bf16" and precision != "bf16",
         f"gradient_dtype: bf16 needs precision: bf16, but the run computes in {precision}. Remove gradient_dtype."),
        (spec and wanted == "bf16" and spec.is_ddp,
         f"gradient_dtype: bf16 has no effect with strategy: {run.strategy}, which accumulates and reduces gradients "
         "in fp32. Remove gradient_dtype, or take a ZeRO or FSDP strategy."),
        (spec and wanted == "fp32" and precision != "fp32" and not spec.accumulates_in_fp32,
         f"gradient_dtype: fp32 does not work with strategy: {run.strategy}, because DeepSpeed's ZeRO-1 accumulates "
         f"gradients in {precision}. Take zero2, or remove gradient_dtype."),
    )  # fmt: skip


def unsuitable(run: Run, strategy: Strategy, tied: bool = False) -> str:
    """Return why ``strategy`` cannot train ``run``, whose head is the embedding if ``tied``, and what to do; or ""."""
    spec, unquantized, tokens = STRATEGY_SPECS[strategy], run.method_spec.unquantized, run.lora.train_tokens
    where = "" if run.script else _optimizer_fails(run, spec)
    others = [name for name, other in STRATEGY_SPECS.items() if where and not _optimizer_fails(run, other)]
    four_bits = [name for name, other in STRATEGY_SPECS.items() if other.four_bits]
    no_tokens = f"lora.train_tokens cannot be used under {strategy}"
    key = "freeze" if run.freeze else "learning_rates" if run.learning_rates else ""
    messages = applying(
        (not OBJECTIVES[run.objective].is_proven(spec),
         f"objective: {run.objective} is not tested under {strategy}. Take another strategy."),
        (run.script and spec.uses_nvme,
         f"Strategy {strategy} is not for a script: its checkpoints, written by DeepSpeed alone, cannot be merged and "
         "resume without the optimizer's moments. Take zero3-offload, or let Shardmake train."),
        (where,
         f"optimizer: {run.optimizer} cannot train under {where.format(strategy=strategy, others=', '.join(others))}"),
        (key and spec.uses_nvme, f"{key} is not tested under {strategy}. Take zero3-offload, or remove {key}."),
        (tokens and spec.zero_stage == 3,
         f"{no_tokens}: PEFT then reads the rows on GPUs alone. Take ddp or zero2."),
        (tokens and spec.is_fsdp and tied,
         f"{no_tokens}: its tied head is then sharded twice. Take ddp or zero2."),
        (run.loss == "chunked" and spec.is_fsdp,
         f"loss: chunked is not tested under {strategy}. Take ddp or a ZeRO strategy, or loss: fused."),
        (unquantized and not spec.four_bits,
         f"method: {run.method} cannot train under {strategy}, because {_unsuitable_for_4_bits(spec)}. Take method: "
         f"{unquantized}, or one of {', '.join(four_bits)}."),
    )  # fmt: skip
    return next(messages, "")


def _unsuitable_for_4_bits(spec: StrategySpec) -> str:
    """Return why a strategy does not train 4-bit weights.

    Sources: ``get_init_context`` of transformers' ``modeling_utils.py``, ``fsdp2_prepare_model`` of Accelerate.
    """
    if spec.zero_stage == 3:
        return "transformers loads 4-bit weights without zero.Init, and each GPU holds all of them, as under ddp"
    if spec.zero_stage:
        return "it offloads the adapters' optimizer states alone, which are small, and not the 4-bit weights"
    return "4-bit weights have not been trained and saved with this kind of FSDP"


def _optimizer_fails(run: Run, spec: StrategySpec) -> str:
    """Return where and why the run's optimizer cannot train under a strategy; empty if it can."""
    optimizer = optimizer_spec(run.optimizer)
    sharded = optimizer.fails_sharded if spec.is_fsdp else optimizer.fails_flat if spec.is_deepspeed else ""
    return sharded or (optimizer.fails_on_host if spec.offload_optimizer else "")


def wrong_fsdp(run: Run, cluster: Cluster) -> Iterator[str]:
    """Yield a message for FSDP without GPUs, which Accelerate silently ignores."""
    spec = STRATEGY_SPECS.get(run.strategy)
    if cluster.is_cpu and spec and spec.is_fsdp:
        yield (
            f"strategy: {run.strategy} needs GPUs, but the cluster file has accelerator: cpu. Without GPUs Accelerate "
            "ignores FSDP and trains with DDP. Use ddp, a ZeRO strategy, or auto."
        )


def wrong_packing(run: Run, abilities: Abilities, attention: Attention) -> Iterator[str]:
    """Yield a message if packed examples would see each other with the kernel ``attention``."""
    others = [kernel for kernel in abilities.attention if kernel not in (*abilities.mixing, *MIXING_UNKNOWN)]
    alternative = f", or attention: {others[0]}" if others else ""
    if run.packing and not run.script and attention in abilities.mixing:
        yield (
            f"packing: true cannot be used: {abilities.model_class} mixes packed examples with attention {attention}, "
            f"because it does not keep them apart by their position ids. Set packing: false{alternative}."
        )


def wrong_optimizer(run: Run, model: Model) -> Iterator[str]:
    """Yield why steps with the run's optimizer failed, or what it is not tested with."""
    spec = optimizer_spec(run.optimizer)
    for other in _untested(run, model) if run.script is None else ():
        yield f"optimizer: {run.optimizer} cannot be combined with {other}. Take another optimizer."
    if why := spec.fails:
        todo = "Install it, or take" if "ImportError" in why else "Take"
        yield f"optimizer: {run.optimizer} cannot train: {why}. {todo} another optimizer."


def _untested(run: Run, model: Model) -> Iterator[str]:
    """Return settings of the run that need ZeRO, and what Shardmake's own optimizer is not tested with."""
    spec = optimizer_spec(run.optimizer)
    why = "because it does not train under ZeRO" if spec.fails_flat else "with which it is not tested"
    stacked = next((tensor.name for tensor in model.tensors if len(tensor.shape) > 2), None)
    frozen = find_frozen([tensor.name for tensor in model.tensors], run.freeze) if spec.own_class and run.freeze else ()
    trained = (tensor for tensor in model.tensors if tensor.is_hidden_matrix and tensor.name not in frozen)
    return applying(
        *(((spec.fails_flat or spec.own_class) and getattr(run, key) > 1, f"{key}: {getattr(run, key)}, {why}")
          for key in ("tensor_parallel", "sequence_parallel")),
        (spec.own_class and stacked, f"{stacked}, because it updates matrices, and this weight has more dimensions"),
        (frozen and not any(trained), f"freeze: {', '.join(run.freeze)}, because no matrix of a layer is trained"),
        (spec.own_class and OBJECTIVES[run.objective].trl, f"objective: {run.objective}, with which it is not tested"),
    )  # fmt: skip


def wrong_loss(run: Run, model: Model) -> Iterator[str]:
    """Yield why the model or the run has no such loss; Liger would silently keep the plain one.

    Liger's table is read from its source, because importing it needs Triton and a GPU.
    """
    if run.loss == "plain":
        return
    refused, is_chunked = f"loss: {run.loss} cannot be used", run.loss == "chunked"
    for why in applying(
        (is_chunked and run.script is not None, "a script computes its own loss"),
        (is_chunked and run.tensor_parallel > 1, "the ranks of a tensor-parallel group share the head"),
        (is_chunked and run.torch_compile, "torch's chunked loss does not run in compiled code"),
        (is_chunked and run.script is None and not has_plain_head(model),
         f"that of {model.architecture} was not shown to follow from its last hidden states and head alone"),
        (not is_chunked and run.tensor_parallel > 1,
         "with tensor_parallel each rank holds a part of the head, which Liger's loss would take for the whole"),
    ):  # fmt: skip
        yield f"{refused}: {why}. Set loss: plain."
    adapted = adapted_layers(model, run.lora.targets) if run.method_spec.has_adapters and not run.script else ()
    for layer in filter(is_head, adapted):
        yield (
            f"{refused} with {layer.module} in lora.targets: this loss takes the head's own weights, so its adapter "
            f"would silently get no gradient. Set loss: plain, or remove {layer.module} from lora.targets."
        )
    without_liger = is_chunked or run.script is not None
    supported = None if without_liger else table_keys("liger_kernel", "transformers/monkey_patch.py", _LIGER_TABLE)
    if supported is not None and model.model_type not in supported:
        yield (
            f"{refused}: liger-kernel {version('liger-kernel')} has no kernels for the model type "
            f"{model.model_type!r}. Set loss: plain. It has kernels for {', '.join(sorted(supported))}."
        )


def wrong_activation_offload(run: Run, cluster: Cluster) -> Iterator[str]:
    """Return why this run or cluster cannot hold the inputs of layers on the host."""
    wrong = applying(
        (cluster.is_cpu, "with accelerator: cpu all activations are in host memory"),
        (run.gradient_checkpointing is False, "it offloads what gradient checkpointing keeps"),
        (run.script is not None, "a script sets up its own checkpointing"),
        (run.objective != "sft", f"it is not tested with objective: {run.objective}"),
        (run.tensor_parallel > 1, "it is not tested with tensor_parallel"),
        (run.torch_compile, "it is not tested with torch_compile"),
    )
    refused = "activation_offload: true cannot be used"
    return (f"{refused}: {why}. Remove activation_offload." for why in wrong if run.activation_offload)


def missing_packages(run: Run) -> list[tuple[str, str]]:
    """Return each setting of ``run`` whose optional package is not installed, with the package's name."""
    wanted = {
        "loss: fused": "liger-kernel" if run.loss == "fused" else "",
        f"optimizer: {run.optimizer}": optimizer_spec(run.optimizer).package,
        f"method: {run.method}": run.method_spec.package,
    }
    return [(key, package) for key, package in wanted.items() if package and not find_spec(package.replace("-", "_"))]


def has_flash_attention_2() -> bool:
    """Return True if flash-attn 2 is installed; flash-attn 4 has the same import name and is another package.

    transformers accepts the same versions, but only where it finds a GPU. The nodes ask it, and import the package.
    """
    if find_spec("flash_attn") is None:
        return False
    from packaging.version import Version

    try:
        return (2, 3, 3) <= Version(version("flash-attn")).release < (3,)
    except PackageNotFoundError:
        return False


def wrong_packages(run: Run) -> Iterator[str]:
    """Yield the missing packages, without which the ranks would fail or fall back."""
    for setting, package in missing_packages(run):
        yield f"{setting} needs the package {package}, which is not installed. Run: pip install {package}"
    if run.attention == "flash" and not run.script and not has_flash_attention_2():
        yield (
            "attention: flash needs the package flash-attn 2 (2.3.3 or newer), which is not installed. "
            "Take attention: varlen, which is a part of torch, or run: pip install flash-attn --no-build-isolation"
        )
