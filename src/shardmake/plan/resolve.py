"""The settings of a run that do not depend on memory, and contradictions between them."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from packaging.version import Version

from shardmake.config.attention import FLASH_CAPABILITY, FLASH_KERNELS, KERNELS, Attention
from shardmake.config.models import Cluster, Objective, Precision, Run, Strategy
from shardmake.config.objectives import OBJECTIVES
from shardmake.config.optimizers import OPTIMIZERS
from shardmake.config.strategies import STRATEGY_SPECS, StrategySpec
from shardmake.config.user_files import UserFiles, read_user_files
from shardmake.core.errors import ConfigError
from shardmake.memory.families import as_classifier
from shardmake.memory.hardware import Hardware, from_cluster
from shardmake.memory.model import Model, Split, has_own_class, split
from shardmake.memory.read_config import read_model
from shardmake.plan.abilities import (
    Abilities,
    check_activation_offload,
    check_loss,
    check_packing,
    check_settings,
    find_abilities,
)
from shardmake.plan.sequence_parallel import attention_heads, check_sequence_parallel
from shardmake.run.model_class import ModelClass
from shardmake.run.own_files import check_refused
from shardmake.run.plan import Workload

AUTOTP_STYLES = frozenset({
    "colwise", "colwise_rep", "colwise_gather_output", "rowwise", "replicated_with_grad_allreduce", "embedding_rowwise"
})  # fmt: skip
"""Styles of transformers' tensor-parallel plans that DeepSpeed's AutoTP takes; it stops at every other one."""


@dataclass(frozen=True)
class ResolvedRun:
    """A run with every `auto` that does not depend on memory resolved."""

    run: Run
    model: Model
    split: Split
    cluster: Cluster
    hardware: Hardware
    precision: Precision
    attention: Attention
    abilities: Abilities
    attention_reason: str = ""
    """Why varlen, the fastest kernel, does not run; empty if it does, on CPU, or if the run names a kernel."""
    weights: Precision = "fp32"
    """Data type of the trained weights under DDP and FSDP; only `shardmake estimate` changes it."""
    user_files: UserFiles = field(default_factory=UserFiles)
    """The run's own DeepSpeed and Accelerate files."""

    @property
    def workload(self) -> Workload:
        """The training itself, which is the same for every candidate."""
        return Workload(
            model=self.run.model,
            model_class=ModelClass(
                name=self.abilities.model_class,
                own_code=has_own_class(self.model.config, self.run.trust_remote_code),
                new_head=OBJECTIVES[self.run.objective].new_head,
            ),
            sequence_length=self.run.sequence_length,
            packing=self.run.packing,
            objective=self.run.objective,
            method=self.run.method,
            optimizer=self.run.optimizer,
            attention=self.attention,
            loss=self.run.loss,
            activation_offload=self.run.activation_offload,
            tf32=self.run.tf32,
        )


def resolve(run: Run, cluster: Cluster) -> ResolvedRun:
    """Return ``run`` on ``cluster`` with precision and attention decided.

    Raises:
        ConfigError: The run needs something that the cluster's accelerator or the model's class does not have.
        ModelError: The model's config.json cannot be used, or is not that of a causal language model.
    """
    hardware = from_cluster(cluster)
    if hardware.is_cpu:
        _check_cpu(run)
    model = read_model(run.model, revision=run.revision, trust_remote_code=run.trust_remote_code)
    _check_length(run, model)
    _check_objective(run, hardware, model)
    abilities = find_abilities(model, run)
    check_settings(run, abilities)
    if OBJECTIVES[run.objective].new_head:
        model = as_classifier(model)
        abilities = replace(abilities, model_class=model.architecture)
    precision = _precision(run, hardware)
    check_tf32(run, precision, hardware)
    attention = _attention(run, hardware, precision, abilities)
    return ResolvedRun(
        run=run,
        model=model,
        split=split(model, run.method, run.lora.rank, run.lora.targets),
        cluster=cluster,
        hardware=hardware,
        precision=precision,
        attention=attention,
        abilities=abilities,
        attention_reason=_why_not_varlen(run, hardware, precision, abilities) if attention != "varlen" else "",
        user_files=read_user_files(run),
    )


def _check_length(run: Run, model: Model) -> None:
    if model.max_positions is not None and run.sequence_length > model.max_positions:
        raise ConfigError(
            f"sequence_length is {run.sequence_length}, but {model.architecture} has only {model.max_positions} "
            "positions (max_position_embeddings). Lower sequence_length."
        )


def _check_objective(run: Run, hardware: Hardware, model: Model) -> None:
    """Raise a `ConfigError` if TRL trains ``run`` and its objective is not supported with model or hardware yet."""
    if OBJECTIVES[run.objective].trl is None:
        return
    if "router_aux_loss_coef" in model.config:
        raise ConfigError(
            f"objective: {run.objective} is not supported for {model.architecture}, a mixture of experts: the routers' "
            "loss would depend on the micro batch. Use a dense model."
        )
    if OBJECTIVES[run.objective].new_head and model.decoder is None:
        raise ConfigError(
            f"objective: {run.objective} is not supported for {model.architecture}. Use a model of the Llama, Mistral, "
            "Qwen2, Qwen3 or Gemma family."
        )
    if not hardware.is_cpu and model.decoder is None:
        raise ConfigError(
            f"objective: {run.objective} is not supported on GPUs for {model.architecture}, because its memory cannot "
            "be estimated. Use a model of the Llama, Mistral, Qwen2, Qwen3 or Gemma family, or a cluster file with "
            "accelerator: cpu."
        )
    if run.attention in FLASH_KERNELS:
        raise ConfigError(
            f"attention: {run.attention} cannot be combined with objective: {run.objective}, whose examples are "
            "padded. Use sdpa, or auto."
        )


def check(settings: ResolvedRun, *, packages: bool = True) -> None:
    """Raise a `ConfigError` if the run contradicts itself, the cluster, the model or the installed packages.

    Without ``packages`` a missing package is no contradiction: a suggestion may name what is to be installed, and a
    plan away from the cluster is made without what trains there.
    """
    run, cluster, model = settings.run, settings.cluster, settings.model
    if run.nodes is not None and run.nodes > cluster.max_nodes:
        raise ConfigError(
            f"The run asks for {run.nodes} nodes, but the cluster file allows {cluster.max_nodes} (max_nodes). "
            "Lower nodes, or raise max_nodes if the cluster has them."
        )
    _check_service(run, cluster)
    spec = STRATEGY_SPECS.get(run.strategy)
    if spec and spec.uses_nvme and settings.hardware.nvme is None:
        raise ConfigError(f"Strategy {run.strategy} needs node-local NVMe; set nvme_path in the cluster file.")
    if spec and spec.hpz and min(run.nodes or cluster.max_nodes, cluster.processes_per_node) == 1:
        raise ConfigError(
            f"Strategy {run.strategy} keeps a second shard of the weights in each node. It needs several nodes with "
            "several ranks each. Raise nodes or max_nodes, or take the strategy without a second shard."
        )
    if run.strategy != "auto":
        check_strategy(run, run.strategy)
    check_gradient_dtype(settings, spec)
    check_tensor_parallel(run, cluster, model)
    check_sequence_parallel(run, cluster, model, settings.attention)
    check_refused(settings.user_files, run)
    check_packing(run, settings.abilities, settings.attention)
    if packages:
        _check_packages(run)
    check_loss(run, model)
    check_activation_offload(run, cluster, model)


def _check_service(run: Run, cluster: Cluster) -> None:
    """Raise a `ConfigError` if the cluster does not have the nodes of the run's service."""
    if not run.service_nodes:
        return
    if cluster.executor == "local":
        if not cluster.is_cpu:
            raise ConfigError(
                "service_nodes cannot be used with executor: local and GPUs, because all GPUs of this machine belong "
                "to the ranks. Use a cluster file with executor: slurm."
            )
        if run.service_nodes > 1:
            raise ConfigError(
                f"service_nodes: {run.service_nodes} cannot be used with executor: local, which runs one service "
                "beside the ranks. Set service_nodes: 1."
            )
        return
    nodes = (run.nodes or 1) + run.service_nodes
    if nodes > cluster.max_nodes:
        raise ConfigError(
            f"The run asks for {nodes} nodes, {run.service_nodes} of them for its service, but the cluster file allows "
            f"{cluster.max_nodes} (max_nodes). Lower nodes, or raise max_nodes if the cluster has them."
        )


def check_gradient_dtype(settings: ResolvedRun, spec: StrategySpec | None = None) -> None:
    """Raise a `ConfigError` if no engine accumulates gradients as the run asks."""
    wanted, precision = settings.run.gradient_dtype, settings.precision
    if wanted == "bf16" and precision != "bf16":
        raise ConfigError(
            f"gradient_dtype: bf16 needs precision: bf16, but the run computes in {precision}. Remove gradient_dtype."
        )
    if spec and wanted == "bf16" and spec.is_ddp:
        raise ConfigError(
            f"gradient_dtype: bf16 has no effect with strategy: {settings.run.strategy}, which accumulates and reduces "
            "gradients in fp32. Remove gradient_dtype, or take a ZeRO or FSDP strategy."
        )
    if spec and wanted == "fp32" and precision != "fp32" and not spec.accumulates_in_fp32:
        raise ConfigError(
            f"gradient_dtype: fp32 does not work with strategy: {settings.run.strategy}, because DeepSpeed's ZeRO-1 "
            f"accumulates gradients in {precision}. Take zero2, or remove gradient_dtype."
        )


def check_strategy(run: Run, strategy: Strategy) -> None:
    """Raise a `ConfigError` if ``strategy`` cannot train ``run``, however much memory there is."""
    if reason := unsuitable(run, strategy):
        raise ConfigError(reason)


def unsuitable(run: Run, strategy: Strategy) -> str:
    """Return why ``strategy`` cannot train ``run`` and what to do, whatever the memory; empty if it can."""
    spec, objective = STRATEGY_SPECS[strategy], OBJECTIVES[run.objective]
    if not objective.is_proven(spec):
        return f"objective: {run.objective} is not tested under {strategy}. Take another strategy."
    if run.script and spec.uses_nvme:
        return (
            f"Strategy {strategy} is not for a script: its checkpoints, written by DeepSpeed alone, cannot be merged "
            "and resume without the optimizer's moments. Take zero3-offload, or let Shardmake train."
        )
    if not run.script and (where := _optimizer_fails(run, spec)):
        others = [name for name, other in STRATEGY_SPECS.items() if not _optimizer_fails(run, other)]
        where = where.format(strategy=strategy, others=", ".join(others))
        return f"optimizer: {run.optimizer} fails at the first step under {where}"
    if run.loss == "chunked" and spec.is_fsdp:
        return f"loss: chunked is not tested under {strategy}. Take ddp or a ZeRO strategy, or loss: fused."
    unquantized = run.method_spec.unquantized
    if unquantized and not spec.four_bits:
        others = [name for name, other in STRATEGY_SPECS.items() if other.four_bits]
        return (
            f"method: {run.method} cannot train under {strategy}, because {_unsuitable_for_4_bits(spec)}. Take method: "
            f"{unquantized}, or one of {', '.join(others)}."
        )
    return ""


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
    optimizer = OPTIMIZERS[run.optimizer]
    if spec.is_fsdp:
        return optimizer.fails_sharded
    return optimizer.fails_on_host if spec.offload_optimizer else ""


def check_fsdp(run: Run, cluster: Cluster) -> None:
    """Raise a `ConfigError` for FSDP without GPUs, which Accelerate silently ignores."""
    spec = STRATEGY_SPECS.get(run.strategy)
    if cluster.is_cpu and spec and spec.is_fsdp:
        raise ConfigError(
            f"strategy: {run.strategy} needs GPUs, but the cluster file has accelerator: cpu. Without GPUs Accelerate "
            "ignores FSDP and trains with DDP. Use ddp, a ZeRO strategy, or auto."
        )


def check_tensor_parallel(run: Run, cluster: Cluster, model: Model) -> None:
    """Raise a `ConfigError` if this run, cluster or model cannot use its ``tensor_parallel``.

    Each layer's matrices are then shared between ranks (docs/how-to/parallelism.md).
    """
    size = run.tensor_parallel
    if size == 1:
        return
    wrong = [*_wrong_run(run), *_wrong_sizes(size, cluster, model), *_wrong_styles(run, model)]
    if wrong:
        raise ConfigError(
            "\n".join([f"tensor_parallel: {size} cannot be used with this run:", *(f"  {w}" for w in wrong)])
        )


def _wrong_run(run: Run) -> Iterator[str]:
    spec = STRATEGY_SPECS.get(run.strategy)
    if spec is not None and not spec.tensor_parallel:
        yield f"strategy {run.strategy}: take zero1 or zero2 (DeepSpeed AutoTP), or fsdp with a script of your own."
    elif spec is not None and spec.is_fsdp and run.script is None:
        yield (
            f"strategy {run.strategy}: transformers shards a model for it at loading and then cannot save the "
            "optimizer, so a run could not be resumed. Take zero1 or zero2, or a script that loads its own model."
        )
    if run.method_spec.has_adapters:
        yield f"method {run.method}: adapters on sharded matrices are not merged here. Take method: full."


def _wrong_sizes(size: int, cluster: Cluster, model: Model) -> Iterator[str]:
    if cluster.processes_per_node % size:
        yield f"a group is within a node, and {cluster.processes_per_node} ranks per node are not a multiple of {size}."
    for name, count in attention_heads(model).items():
        if count % size:
            yield f"{model.architecture} has {count} {name} heads, which {size} ranks cannot share evenly."


def _wrong_styles(run: Run, model: Model) -> Iterator[str]:
    from transformers import CONFIG_MAPPING

    known = model.model_type in CONFIG_MAPPING
    styles = (CONFIG_MAPPING[model.model_type].base_model_tp_plan if known else None) or {}
    if not styles:
        yield f"transformers has no tensor-parallel plan for {model.model_type}."
    spec = STRATEGY_SPECS.get(run.strategy)
    unknown = sorted(set(styles.values()) - AUTOTP_STYLES)
    if (spec is None or spec.is_deepspeed) and unknown:
        yield (
            f"transformers' tensor-parallel plan for {model.model_type} has {', '.join(unknown)}, at which DeepSpeed's "
            "AutoTP stops. Take tensor_parallel: 1; ZeRO-3 and FSDP shard every weight."
        )


def missing_packages(run: Run) -> list[tuple[str, str]]:
    """Return each setting of ``run`` whose optional package is not installed, with the package's name."""
    wanted = {
        "loss: fused": "liger-kernel" if run.loss == "fused" else "",
        f"optimizer: {run.optimizer}": OPTIMIZERS[run.optimizer].package,
        f"method: {run.method}": run.method_spec.package,
    }
    return [
        (setting, package)
        for setting, package in wanted.items()
        if package and find_spec(package.replace("-", "_")) is None
    ]


def _check_packages(run: Run) -> None:
    """Raise a `ConfigError` if a package is missing; without it the ranks would fail or fall back."""
    for setting, package in missing_packages(run):
        raise ConfigError(f"{setting} needs the package {package}, which is not installed. Run: pip install {package}")
    if run.attention == "flash" and not run.script and not has_flash_attention_2():
        raise ConfigError(
            "attention: flash needs the package flash-attn 2 (2.3.3 or newer), which is not installed. "
            "Take attention: varlen, which is a part of torch, or run: pip install flash-attn --no-build-isolation"
        )


def _check_cpu(run: Run) -> None:
    needs_gpu = {
        f"optimizer: {run.optimizer}": bool(OPTIMIZERS[run.optimizer].package),
        f"method: {run.method}": bool(run.method_spec.package),
        f"attention: {run.attention}": run.attention in FLASH_KERNELS,
        "precision: fp16": run.precision == "fp16",
        "loss: fused": run.loss == "fused",
    }
    for setting, wanted in needs_gpu.items():
        if wanted:
            raise ConfigError(f"{setting} needs a GPU, but the cluster file has accelerator: cpu. Change one of them.")


def check_tf32(run: Run, precision: Precision, hardware: Hardware) -> None:
    """Raise a `ConfigError` if ``tf32`` would have no effect, or is not the plan's to decide."""
    if run.tf32 and precision != "fp32":
        raise ConfigError(
            f"tf32: true is for precision: fp32, and this run computes in {precision}. Set precision: fp32, or remove "
            "tf32."
        )
    if run.tf32 and not hardware.accelerator.has_tf32:
        raise ConfigError(
            f"tf32: true needs a GPU of the Ampere generation or later, and the cluster file has accelerator: "
            f"{hardware.accelerator.name}. Remove tf32."
        )
    if run.tf32 and run.script:
        raise ConfigError("tf32: true has no effect on a script. Remove tf32, and set it in the script.")


def _precision(run: Run, hardware: Hardware) -> Precision:
    has_bf16 = hardware.accelerator.bf16 > 0
    if run.precision == "auto":
        return "fp32" if hardware.is_cpu else "bf16" if has_bf16 else "fp16"
    if run.precision == "bf16" and not has_bf16:
        raise ConfigError(
            f"precision: bf16 needs Ampere or later, and {hardware.accelerator.name} is older. Use fp16, or auto."
        )
    return run.precision


def _attention(run: Run, hardware: Hardware, precision: Precision, abilities: Abilities) -> Attention:
    usable = kernels_of(hardware, precision, run.objective)
    if run.attention == "auto":
        # A user's script loads its own model, so it does not know the kernel that Shardmake registers.
        left_out = {kernel for kernel, out in (("varlen", run.script), ("flash", not has_flash_attention_2())) if out}
        available = (kernel for kernel in usable if kernel not in left_out)
        return abilities.best_attention(available, packing=run.packing and not run.script)
    if run.attention not in usable and not run.script:
        needed = _needed_for_flash(hardware, precision)
        raise ConfigError(f"attention: {run.attention} needs {needed}. Use sdpa, or auto.")
    return run.attention


def _why_not_varlen(run: Run, hardware: Hardware, precision: Precision, abilities: Abilities) -> str:
    """Return why `auto` does not take varlen on a GPU; empty on CPU, and if the run or its script decides."""
    if run.attention != "auto" or run.script or hardware.is_cpu:
        return ""
    if OBJECTIVES[run.objective].trl:
        return f"varlen does not take the padded examples of objective: {run.objective}"
    if needed := _needed_for_flash(hardware, precision):
        return f"varlen needs {needed}"
    if abilities.varlen_limit:
        return f"varlen cannot be used: {abilities.model_class} {abilities.varlen_limit}"
    return f"with varlen, {abilities.model_class} mixes packed examples"


def kernels_of(hardware: Hardware, precision: Precision, objective: Objective) -> tuple[Attention, ...]:
    """Return the attention kernels that run on the cluster's accelerator in ``precision``, the fastest first.

    FlashAttention's do not take the padded examples of TRL's objectives.
    """
    without_flash = _needed_for_flash(hardware, precision) or OBJECTIVES[objective].trl
    return tuple(kernel for kernel in KERNELS if not (without_flash and kernel in FLASH_KERNELS))


def _needed_for_flash(hardware: Hardware, precision: Precision) -> str:
    """Return what FlashAttention needs and is not there; empty if it can run."""
    if hardware.accelerator.capability < FLASH_CAPABILITY:
        return f"Ampere or later, and {hardware.accelerator.name} is older"
    return "precision bf16 or fp16, and this run computes in fp32" if precision == "fp32" else ""


def has_flash_attention_2() -> bool:
    """Return True if flash-attn 2 is installed; flash-attn 4 has the same import name and is another package.

    transformers accepts the same versions, but only where it finds a GPU. The nodes ask it, and import the package.
    """
    try:
        return find_spec("flash_attn") is not None and (2, 3, 3) <= Version(version("flash-attn")).release < (3,)
    except PackageNotFoundError:
        return False
