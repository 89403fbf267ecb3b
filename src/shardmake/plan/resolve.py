"""The settings of a run that do not depend on memory, and contradictions between them."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

from shardmake.config.attention import FLASH_KERNELS, KERNELS, Attention
from shardmake.config.models import Cluster, Objective, Precision, Run
from shardmake.config.objectives import OBJECTIVES
from shardmake.config.user_files import UserFiles, read_user_files
from shardmake.memory.families import as_classifier
from shardmake.memory.hardware import Hardware, from_cluster
from shardmake.memory.model import MODELS, Model, Split, count_rates, has_own_class, split
from shardmake.memory.read_config import read_model
from shardmake.plan import refusals
from shardmake.plan.abilities import Abilities, check_not_quantized, find_abilities
from shardmake.plan.parallelism import wrong_expert_parallel, wrong_sequence_parallel, wrong_tensor_parallel
from shardmake.plan.refusals import has_flash_attention_2, needed_for_flash, refuse
from shardmake.run.model_class import ModelClass
from shardmake.run.own_files import check_refused
from shardmake.run.plan import Workload

_first = lru_cache(maxsize=MODELS)(lambda one: one)
"""Returns the first of equal models or splits, which caches find without comparing all tensors."""


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
    user_files: UserFiles = field(default_factory=dict)
    """The run's own DeepSpeed and Accelerate files."""
    rate_groups: Mapping[str, int] = field(default_factory=dict)
    """Trained elements of each pattern of ``learning_rates``."""

    @property
    def workload(self) -> Workload:
        """The training itself, which is the same for every candidate."""
        shared = self.run.model_dump(include=Workload.model_fields.keys() & Run.model_fields.keys())
        found = ModelClass(
            name=self.abilities.model_class,
            own_code=has_own_class(self.model.config, self.run.trust_remote_code),
            text_part=self.abilities.text_part,
            new_head=OBJECTIVES[self.run.objective].new_head,
            untied=self.model.untied,
        )
        return Workload(**shared | {"model_class": found, "attention": self.attention})


def resolve(run: Run, cluster: Cluster) -> ResolvedRun:
    """Return ``run`` on ``cluster`` with precision and attention decided.

    Raises:
        ConfigError: The run needs something that the cluster's accelerator or the model's class does not have.
        ModelError: The model's config.json cannot be used, or is not that of a causal language model.
    """
    hardware = from_cluster(cluster)
    refuse(refusals.wrong_on_cpu(run) if hardware.is_cpu else ())
    model = read_model(run.model, revision=run.revision, trust_remote_code=run.trust_remote_code)
    refuse(refusals.wrong_model(run, model))
    abilities = find_abilities(model, run)
    refuse(refusals.wrong_abilities(run, abilities), refusals.wrong_train_tokens(run, abilities.text_part))
    if OBJECTIVES[run.objective].new_head:
        model = as_classifier(model)
        abilities = replace(abilities, model_class=model.architecture)
    precision = _precision(run, hardware)
    refuse(refusals.wrong_precision(run, precision, hardware))
    attention = _attention(run, hardware, precision, abilities)
    rows = len(run.lora.train_tokens)
    if rows and model.decoder is not None:  # PEFT's copies of embedding and head are not written down
        model = replace(model, decoder=None)
    part = split(model, run.method, run.lora.rank, run.lora.targets, run.freeze, rows)
    return ResolvedRun(
        run=run,
        model=_first(model),
        split=_first(part),
        cluster=cluster,
        hardware=hardware,
        precision=precision,
        attention=attention,
        abilities=abilities,
        attention_reason=_why_not_varlen(run, hardware, precision, abilities) if attention != "varlen" else "",
        user_files=read_user_files(run),
        rate_groups=count_rates(model, part, run.learning_rates),
    )


def check(settings: ResolvedRun, *, packages: bool = True) -> None:
    """Raise a `ConfigError` if the run contradicts itself, the cluster, the model or the installed packages.

    Without ``packages`` a missing package is not a contradiction: a suggestion may name what is to be installed, and a
    plan away from the cluster is made without what trains there.
    """
    run, cluster, model = settings.run, settings.cluster, settings.model
    if not run.script:
        check_not_quantized(model)
    refuse(
        refusals.wrong_nodes(run, cluster),
        refusals.wrong_optimizer(run, model),
        refusals.wrong_strategy(run, cluster, settings.precision, model.tied),
        wrong_tensor_parallel(run, cluster, model),
        wrong_expert_parallel(run, cluster, model, settings.precision),
        wrong_sequence_parallel(run, cluster, model, settings.attention),
    )
    check_refused(settings.user_files, run)
    refuse(
        refusals.wrong_packing(run, settings.abilities, settings.attention),
        refusals.wrong_packages(run) if packages else (),
        refusals.wrong_loss(run, model),
        refusals.wrong_activation_offload(run, cluster),
    )


def _precision(run: Run, hardware: Hardware) -> Precision:
    if run.precision == "auto":
        return "fp32" if hardware.is_cpu else "bf16" if hardware.accelerator.bf16 else "fp16"
    return run.precision


def _attention(run: Run, hardware: Hardware, precision: Precision, abilities: Abilities) -> Attention:
    usable = kernels_of(hardware, precision, run.objective)
    if run.attention != "auto":
        return run.attention
    # A user's script loads its own model, so it does not know the kernel that Shardmake registers.
    left_out = {kernel for kernel, out in (("varlen", run.script), ("flash", not has_flash_attention_2())) if out}
    available = (kernel for kernel in usable if kernel not in left_out)
    return abilities.best_attention(available, packing=run.packing and not run.script)


def _why_not_varlen(run: Run, hardware: Hardware, precision: Precision, abilities: Abilities) -> str:
    """Return why `auto` does not take varlen on a GPU; empty on CPU, and if the run or its script decides."""
    if run.attention != "auto" or run.script or hardware.is_cpu:
        return ""
    if OBJECTIVES[run.objective].trl:
        return f"varlen does not take the padded examples of objective: {run.objective}"
    if needed := needed_for_flash(hardware, precision):
        return f"varlen needs {needed}"
    if abilities.varlen_limit:
        return f"varlen cannot be used: {abilities.model_class} {abilities.varlen_limit}"
    return f"with varlen, {abilities.model_class} mixes packed examples"


def kernels_of(hardware: Hardware, precision: Precision, objective: Objective) -> tuple[Attention, ...]:
    """Return the attention kernels that run on the cluster's accelerator in ``precision``, the fastest first.

    FlashAttention's do not take the padded examples of TRL's objectives.
    """
    without_flash = needed_for_flash(hardware, precision) or OBJECTIVES[objective].trl
    return tuple(kernel for kernel in KERNELS if not (without_flash and kernel in FLASH_KERNELS))
