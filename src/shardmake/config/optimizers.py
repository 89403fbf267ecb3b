"""The table of optimizers: one row each.

Every other file asks for an attribute of a row and never tests an optimizer's name. A new optimizer is one row here. If
its states are not moments of Adam, `shardmake.checkpoint.reshard` must know them as well.
"""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class OptimizerSpec:
    """One optimizer: its names in the libraries, the memory of its states, and where it cannot train."""

    optim: str
    """transformers' name of it, for the training argument ``optim``."""
    class_name: str
    """Class that transformers builds for ``optim``, without its module."""
    label: str
    """Name in the report and in the model card."""
    moments: int = 0
    """States per trained weight that have the shape and the data type of the weight."""
    matrix_moments: int | None = None
    """The same of a trained matrix of a layer, if it takes an update of its own; it is made from the whole matrix."""
    state_bytes: float = 0
    """Further bytes of state per trained element."""
    temporaries: int = 0
    """Temporary fp32 tensors of torch's kernel for CPUs, which updates one weight at a time."""
    has_betas: bool = False
    """It takes the betas and the epsilon of Adam."""
    fused: str = ""
    """transformers' name of its fused kernel, which trains on GPUs."""
    aliases: tuple[str, ...] = ()
    """Further names of it in transformers, of other versions too."""
    own_class: str = ""
    """Import path of Shardmake's class, which trains instead of the one that transformers builds for ``optim``."""
    host_class: str = ""
    """Import path of DeepSpeed's vectorized class, for states that a GPU node keeps on the host."""
    package: str = ""
    """Optional package, and module, that it needs; its kernels need a GPU."""
    smaller: tuple[str, ...] = ()
    """Optimizers with smaller states, which a plan without enough memory tries."""
    fails: str = ""
    """Why it cannot train under any strategy, and what to do."""
    fails_flat: str = ""
    """Why and where it does not compute the same on ZeRO's flat vectors, and what to do."""
    fails_sharded: str = ""
    """Why and where its first step fails with the sharded tensors of FSDP2, and what to do."""
    fails_on_host: str = ""
    """Why and where its first step fails if the strategy keeps the optimizer on the host, and what to do."""


DEFAULT_OPTIMIZER: Final = "adamw"
STATELESS: Final = "sgd"
"""An optimizer without states, for the step that `shardmake estimate --probe` measures."""
_TAKE: Final = "Take optimizer: adamw, or one of the strategies {others}."

OPTIMIZERS: Final[dict[str, OptimizerSpec]] = {
    DEFAULT_OPTIMIZER: OptimizerSpec(
        "adamw_torch", "AdamW", "AdamW of PyTorch", moments=2, temporaries=2, has_betas=True, fused="adamw_torch_fused",
        aliases=("adamw_hf",), host_class="deepspeed.ops.adam.DeepSpeedCPUAdam", smaller=("adamw8bit",),
    ),
    "adamw8bit": OptimizerSpec(
        "adamw_bnb_8bit", "AdamW", "8-bit AdamW of bitsandbytes", state_bytes=2 * (1 + 4 / 256), has_betas=True,
        aliases=("adamw_8bit",), package="bitsandbytes",
        fails_sharded=f"{{strategy}}, because its kernels do not take the sharded tensors of FSDP2. {_TAKE}",
        fails_on_host="{strategy}, because it runs on the GPU, and this strategy keeps the optimizer on the host. "
        + _TAKE,
    ),
    "adafactor": OptimizerSpec(
        "adafactor", "Adafactor", "Adafactor", state_bytes=0.01,
        fails_flat="{strategy}, whose flat vectors have no rows and columns: it would keep a whole second moment. "
        + _TAKE,
        fails_sharded=f"{{strategy}}, because transformers' Adafactor cannot add sharded tensors to its own. {_TAKE}",
    ),
    "muon": OptimizerSpec(
        "adamw_torch", "MuonWithAdamW", "Muon of PyTorch, with AdamW for embeddings, head, norms and biases",
        moments=2, matrix_moments=1, temporaries=2, has_betas=True, fused="adamw_torch_fused",
        own_class="shardmake.train.muon.MuonWithAdamW",
        fails_on_host="{strategy}, which keeps the optimizer on the host: Muon's products of matrices are slow there. "
        + _TAKE,
    ),
    STATELESS: OptimizerSpec("sgd", "SGD", "SGD"),
}  # fmt: skip


TRIED: Final = (
    "rmsprop", "adagrad", "lion_32bit", "lion_8bit", "ademamix", "ademamix_8bit", "stable_adamw", "adamw_torch_4bit",
    "adamw_torch_8bit", "adamw_anyprecision", "grokadamw", "schedule_free_adamw", "schedule_free_radam",
    "schedule_free_sgd", "paged_adamw_32bit", "paged_adamw_8bit", "paged_ademamix_32bit", "paged_ademamix_8bit",
    "paged_lion_32bit", "paged_lion_8bit", "rmsprop_bnb", "rmsprop_bnb_8bit", "rmsprop_bnb_32bit", "lomo", "adalomo",
    "galore_adamw", "galore_adamw_8bit", "galore_adafactor", "galore_adamw_layerwise", "galore_adamw_8bit_layerwise",
    "galore_adafactor_layerwise", "apollo_adamw", "apollo_adamw_layerwise", "adamw_torch_xla", "adamw_torch_npu_fused",
)  # fmt: skip
"""transformers' other optimizers, with which a plan takes steps first (`shardmake.memory.optimizer_trial`)."""


def find_built(optim: str, own_class: str = "") -> OptimizerSpec:
    """Return the row of ``own_class``, else of the optimizer that transformers builds for ``optim``.

    It has no class if the table lacks ``optim``.
    """
    own = (spec for spec in OPTIMIZERS.values() if own_class and spec.own_class == own_class)
    rows = {name: spec for spec in OPTIMIZERS.values() if not spec.own_class for name in (spec.optim, spec.fused)}
    return next(own, rows.get(optim)) or OptimizerSpec(optim, "", f"{optim} of transformers")


def describe_optimizers() -> str:
    """Return what the table demands of a run, for the reference of the configuration."""
    needs = [f"`{name}` needs {spec.package} and a GPU. " for name, spec in OPTIMIZERS.items() if spec.package]
    unsharded = " and ".join(f"`{name}`" for name, spec in OPTIMIZERS.items() if spec.fails_sharded)
    flat = " and ".join(f"`{name}`" for name, spec in OPTIMIZERS.items() if spec.fails_flat)
    return (
        f"{''.join(needs)}{unsharded} do not work with FSDP2, {flat} not with ZeRO. For every other name the "
        "plan takes steps on a small model, which show the bytes of its states and where it can train."
    )
