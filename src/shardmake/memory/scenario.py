"""One training setup as the input of the memory model."""

from dataclasses import dataclass
from math import ceil
from typing import ClassVar

from shardmake.config.attention import Attention
from shardmake.config.choices import Loss, Method, Optimizer, Precision, Strategy
from shardmake.config.methods import DEFAULT_METHOD, METHODS, MethodSpec
from shardmake.config.optimizers import DEFAULT_OPTIMIZER
from shardmake.config.strategies import STRATEGY_SPECS, StrategySpec
from shardmake.memory.calibration import Calibration
from shardmake.memory.model import Model, Split

BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}


@dataclass(frozen=True)
class Scenario:
    """Model, method, parallelism and settings of one candidate.

    ``weights`` is the data type of trained weights under DDP and FSDP, which keep no master copy. With fp32 weights and
    a 16-bit precision the forward pass runs under autocast.
    """

    model: Model
    split: Split
    strategy: Strategy
    nodes: int
    ranks_per_node: int
    micro_batch: int
    """Sequences of one forward pass; a pair of answers is two."""
    sequence_length: int
    sequence_parallel: int = 1
    """Ranks that share each sequence; outside of attention, each has its part of the tokens."""
    tensor_parallel: int = 1
    """Ranks that share each matrix; ``model`` and ``split`` are then a rank's part (`families.part_of`)."""
    expert_parallel: int = 1
    """Ranks that share the experts of each layer; each gathers its part of them."""
    local_model: Model | None = None
    """The model with the experts of one rank, if others have the rest."""
    accumulation: int = 1
    checkpointing: bool = False
    activation_offload: bool = False
    """The inputs of layers, which checkpointing keeps, are in host RAM."""
    attention: Attention = "flash"
    masked: bool = False
    precision: Precision = "bf16"
    gradient_dtype: Precision | None = None
    """Data type in which gradients are accumulated and reduced; None: that of the computation."""
    tf32: bool = False
    weights: Precision = "fp32"
    optimizer: Optimizer = DEFAULT_OPTIMIZER
    method: Method = DEFAULT_METHOD
    loss: Loss = "plain"
    lora_rank: int = 16
    lora_targets: str | tuple[str, ...] = "all-linear"
    lora_dropout: float = 0.0
    token_rows: int = 0
    """Rows of the embedding and the head that are trained beside adapters; the step is then traced."""
    adapter_weights: Precision = "fp32"
    on_cpu: bool = False
    checkpoint_in_memory: bool = False
    """Saves go through a scratch folder in RAM."""
    keeps_ready: bool = False
    """The ranks of the next attempt import their libraries meanwhile, for a restart in place."""
    has_script: bool = False
    """A user's script trains: it may gather the whole model of ZeRO-3 on rank 0 to save it, and may call PEFT's
    `prepare_model_for_kbit_training`, which casts all that is not in 4 bits to fp32."""
    loads_on_gpu: bool = False
    """Each rank loads the whole model to its GPU, tensor by tensor, and not to host RAM first."""
    log_probs: bool = False
    """The loss reads the log-probabilities of tokens, which are made in parts, as in TRL's trainers."""
    extra_forwards: int = 0
    """Forward passes without gradients in each micro batch, such as that of a reference model."""
    reference_weights: bool = False
    """The reference is a second model on every rank, not the trained one without its adapters."""
    gpu_memory: int | None = None
    """Memory of a GPU in bytes, if it is known."""
    gpu_capability: float | None = None
    """Compute capability of the GPU, if it is known."""
    calibration: Calibration | None = None
    """A probe's measurement on this kind of GPU."""
    checks_network: ClassVar[bool] = True
    """Even a single rank makes a process group, whose network it checks."""

    @property
    def spec(self) -> StrategySpec:
        """Return the strategy's row of the table."""
        return STRATEGY_SPECS[self.strategy]

    @property
    def method_spec(self) -> MethodSpec:
        """Return the method's row of the table."""
        return METHODS[self.method]

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.nodes * self.ranks_per_node

    @property
    def held_model(self) -> Model:
        """Return the model with the weights that a rank gathers and runs; ``model`` has those of all ranks."""
        return self.local_model or self.model

    @property
    def shards(self) -> int:
        """Number of ranks that share one copy of the sharded states."""
        return self.ranks_per_node if self.spec.hybrid else self.world_size // self.tensor_parallel

    @property
    def part(self) -> int:
        """Trained elements of a rank's part."""
        return ceil(self.split.trainable / self.shards)

    @property
    def row_tokens(self) -> int:
        """Tokens of one sequence on a rank."""
        return self.sequence_length // self.sequence_parallel

    @property
    def tokens(self) -> int:
        """Tokens of one micro batch on a rank."""
        return self.micro_batch * self.row_tokens

    @property
    def compute(self) -> int:
        """Bytes per element of the compute data type."""
        return BYTES[self.precision]

    @property
    def frozen(self) -> int:
        """Bytes per element of frozen weights that are not in 4 bits; in full fine-tuning those of the trained ones."""
        if not (self.spec.zero_stage or self.method_spec.has_adapters):
            return BYTES[self.weights]
        return 4 if self.widens_frozen else self.compute

    @property
    def widens_frozen(self) -> bool:
        """True if weights that are not in 4 bits are cast to fp32, the norms at least; DeepSpeed casts them back."""
        return self.has_script and self.method_spec.in_four_bits and not self.spec.zero_stage

    @property
    def gradient(self) -> int:
        """Bytes per element of ZeRO's and FSDP's accumulated and reduced gradients."""
        return BYTES[self.gradient_dtype or self.precision]

    @property
    def widens_gradients(self) -> bool:
        """True if gradients leave the backward pass in 16 bits and are accumulated and reduced in fp32."""
        return not self.spec.is_ddp and self.gradient > self.compute

    @property
    def autocast(self) -> bool:
        """True if the forward pass casts fp32 weights under autocast."""
        held = self.adapter_weights if self.method_spec.has_adapters else self.weights
        return self.spec.is_ddp and self.precision != "fp32" and held == "fp32"

    @property
    def fused_layers(self) -> bool:
        """True if the layers use Liger's kernels, which come with its fused loss (Trainer's default)."""
        return self.loss == "fused"

    @property
    def adapter_compute(self) -> Precision:
        """Data type of adapters in the forward pass: DeepSpeed and FSDP's mixed precision cast them, DDP does not."""
        return self.adapter_weights if self.spec.is_ddp else self.precision

    @property
    def expands_keys(self) -> bool:
        """True if the attention kernel gets keys and values that are repeated for the heads of each group."""
        return self.attention == "sdpa" and self.masked
