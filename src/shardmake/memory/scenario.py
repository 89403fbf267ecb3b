"""One training setup as the input of the memory model."""

from dataclasses import dataclass
from typing import Literal

from shardmake.config.attention import Attention
from shardmake.config.methods import DEFAULT_METHOD, METHODS, MethodSpec
from shardmake.config.models import Loss, Method, Optimizer, Precision, Strategy
from shardmake.config.optimizers import DEFAULT_OPTIMIZER
from shardmake.config.strategies import STRATEGY_SPECS, StrategySpec
from shardmake.memory.calibration import Calibration
from shardmake.memory.model import Model, Split

BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
EXPANDS_FLASH_KEYS = ("mistral", "mixtral", "qwen2", "qwen2_moe")
"""Model types whose ``...FlashAttention2`` of transformers 4.45 calls ``repeat_kv``; that of Llama does not."""


@dataclass(frozen=True)
class LibraryBehavior:
    """Differences between versions of the libraries; the defaults are transformers 5 and its Trainer.

    `shardmake.memory.stack` derives them from versions.
    """

    keeps_output: bool = False
    """The training loop keeps the model's output during the backward pass."""
    returns_wide_logits: bool = False
    """Logits are returned in fp32 (transformers before 4.46)."""
    keeps_logits_narrow: bool = False
    """Only autocast casts logits to fp32 for the loss, not the model (custom code such as Qwen 1's)."""
    copies_shifted_logits: bool = False
    """The loss makes a contiguous copy of the shifted logits (transformers before 4.49)."""
    expands_keys: bool = False
    """SDPA gets repeated keys and values (transformers before 4.54)."""
    expands_flash_keys: bool = False
    """FlashAttention gets repeated keys and values in the models of `EXPANDS_FLASH_KEYS` (transformers before 4.48)."""
    copies_attention: bool = False
    """SDPA's output is copied to be contiguous (transformers before 4.48)."""
    foreach_optimizer: bool = False
    """The optimizer is torch's foreach implementation; its temporaries are as large as the trained weights."""
    keeps_gradients: bool = False
    """Gradients are zeroed, not dropped, after a step (torch before 2.0)."""
    softmax_saves_input: bool = False
    """The backward pass of softmax uses its input (torch before 1.12)."""
    autocast: bool = True
    """A 16-bit precision uses autocast; without it the type of the trained weights is used."""
    widens_frozen: bool = True
    """QLoRA's weights that are not in 4 bits are cast to fp32 (PEFT's ``prepare_model_for_kbit_training``)."""
    narrows_embedding: bool = False
    """Of these, embedding and head are cast back to 16 bits (TRL's ``peft_module_casting_to_bf16``)."""
    wide_base: bool = False
    """LoRA's frozen weights are loaded in fp32 and stay in it, except under DeepSpeed, which casts them."""
    recomputes_whole: bool = False
    """A recomputed layer runs to its end, and its output stays during its backward pass (reentrant checkpointing)."""
    loops_over_experts: bool = False
    """Experts of a mixture run one after the other, each as a module of its own (transformers before 5.0)."""
    checks_any_type: bool = False
    """ZeRO-3 looks for infinities in gradients of any type, not only of fp16 (DeepSpeed 0.9.5 to 0.11.1)."""
    checkpoints_units: bool = False
    """Reentrant checkpointing is around FSDP1's units, whose forward pass then runs without gradients.

    So no unit expects a backward pass (``_register_pre_backward_hooks``), and none is gathered ahead of it
    (``_get_handle_to_prefetch``). Of frozen layers FSDP1 keeps the inputs, and their gradients, until the backward pass
    ends: its hook on an input (``_register_post_backward_reshard_only_hook``) then sees the leaf that reentrant
    checkpointing makes, and the leaf holds its data and its gradient.
    """


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
    adapter_weights: Precision = "fp32"
    fsdp_version: Literal[1, 2] = 2
    """FSDP1 holds one flat weight per unit without a copy; embedding, norm and head stay gathered."""
    on_cpu: bool = False
    checkpoint_in_memory: bool = False
    """Saves go through a scratch folder in RAM."""
    gathers_on_save: bool = False
    """A user's script may gather the whole model of ZeRO-3 on rank 0 to save it."""
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
    behavior: LibraryBehavior = LibraryBehavior()
    calibration: Calibration | None = None
    """A probe's measurement on this kind of GPU."""

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
    def shards(self) -> int:
        """Number of ranks that share one copy of the sharded states."""
        return self.ranks_per_node if self.spec.hybrid else self.world_size // self.tensor_parallel

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
        """Bytes per element of frozen weights that are not in 4 bits.

        PEFT casts embedding, norms, biases and head of a 4-bit model to fp32. DeepSpeed casts them back.
        """
        widened = self.widens_frozen and not self.behavior.narrows_embedding
        return 4 if widened or self.wide_base else self.compute

    @property
    def wide_base(self) -> bool:
        """True if frozen weights that are not in 4 bits are held in fp32."""
        spec = self.method_spec
        return spec.has_adapters and not spec.in_four_bits and self.behavior.wide_base and not self.zero_stage

    @property
    def widens_frozen(self) -> bool:
        """True if weights that are not in 4 bits are cast to fp32, the norms at least."""
        return self.method_spec.in_four_bits and self.behavior.widens_frozen and not self.zero_stage

    @property
    def recomputes_units(self) -> bool:
        """True if whole units of FSDP1 are recomputed, each gathered when its turn comes and none ahead."""
        return self.is_fsdp and self.fsdp_version == 1 and self.checkpointing and self.behavior.checkpoints_units

    @property
    def holds_inputs(self) -> bool:
        """True if FSDP1 keeps the inputs of recomputed layers until the backward pass ends."""
        return self.recomputes_units and not self.activation_offload and self.method_spec.has_adapters

    @property
    def gradient(self) -> int:
        """Bytes per element of ZeRO's and FSDP's accumulated and reduced gradients."""
        return BYTES[self.gradient_dtype or self.precision]

    @property
    def widens_gradients(self) -> bool:
        """True if gradients leave the backward pass in 16 bits and are accumulated and reduced in fp32."""
        return not self.spec.is_ddp and self.gradient > self.compute

    @property
    def zero_stage(self) -> int:
        """DeepSpeed's stage, 0 for other libraries."""
        return self.spec.zero_stage

    @property
    def checks_overflow(self) -> bool:
        """True if ZeRO-3 looks for infinities in this rank's flat gradients before each step."""
        return self.zero_stage == 3 and (self.precision == "fp16" or self.behavior.checks_any_type)

    @property
    def is_fsdp(self) -> bool:
        """True if FSDP shards it."""
        return self.spec.is_fsdp

    @property
    def autocast(self) -> bool:
        """True if the forward pass casts fp32 weights under autocast."""
        held = self.adapter_weights if self.method_spec.has_adapters else self.weights
        return self.behavior.autocast and self.spec.is_ddp and self.precision != "fp32" and held == "fp32"

    @property
    def fused_layers(self) -> bool:
        """True if the layers use Liger's kernels, which come with its fused loss (Trainer's default)."""
        return self.loss == "fused"

    @property
    def adapter_compute(self) -> Precision:
        """Data type of adapters in the forward pass: DeepSpeed and FSDP's mixed precision cast them, DDP does not."""
        casts = self.zero_stage > 0 or (self.is_fsdp and self.behavior.autocast)
        return self.precision if casts else self.adapter_weights

    @property
    def expands_keys(self) -> bool:
        """True if the attention kernel gets keys and values that are repeated for the heads of each group."""
        if self.attention == "sdpa":
            return self.masked or self.behavior.expands_keys
        return self.behavior.expands_flash_keys and self.model.model_type in EXPANDS_FLASH_KEYS

    @property
    def gathers_parameters(self) -> bool:
        """True if a rank holds only its part of the weights between uses."""
        return self.spec.gathers_parameters

    @property
    def offloads_optimizer(self) -> bool:
        """True if optimizer states are in host RAM or on NVMe."""
        return self.spec.offload_optimizer is not None

    @property
    def offloads_parameters(self) -> bool:
        """True if sharded weights are in host RAM or on NVMe."""
        return self.spec.offload_param is not None
