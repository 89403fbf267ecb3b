"""The libraries that a training runs with: versions, and a training loop other than Trainer's.

``shardmake estimate --stack`` takes them as text, such as ``transformers=4.38,peft=0.9``. A library that is not named
behaves as the installed one.
"""

from dataclasses import dataclass, fields
from typing import Any, Final, Literal

from packaging.version import InvalidVersion, Version

from shardmake.config.models import Precision
from shardmake.core.errors import ConfigError, nearest
from shardmake.memory.scenario import LibraryBehavior

WORDS: Final[dict[str, tuple[str, ...]]] = {
    "logits": ("own", "library"),
    "adapters": ("bf16", "fp16", "fp32"),
    "optimizer": ("foreach", "fused"),
    "outputs": ("kept", "dropped"),
    "autocast": ("yes", "no"),
    "kbit": ("widened", "norms", "plain"),
    "base": ("fp32", "precision"),
    "checkpoint": ("around", "inside", "plain"),
    "mask": ("padding", "none"),
    "load": ("gpu", "host"),
}
"""The entries that are not versions, with their values."""


@dataclass(frozen=True)
class Stack:
    """Versions, None for the installed one; and what a loop of its own does, None for what the versions do."""

    torch: Version | None = None
    transformers: Version | None = None
    peft: Version | None = None
    deepspeed: Version | None = None
    logits: Literal["own", "library"] | None = None
    """``own``: custom model code that leaves the logits in 16 bits (such as Qwen 1's)."""
    adapters: Precision | None = None
    """Data type of the adapters."""
    optimizer: Literal["foreach", "fused"] | None = None
    """torch's implementation of AdamW."""
    outputs: Literal["kept", "dropped"] | None = None
    """``kept``: the loop holds the model's output during the backward pass."""
    autocast: Literal["yes", "no"] | None = None
    """``no``: the weights' type is the type of the computation."""
    kbit: Literal["widened", "norms", "plain"] | None = None
    """``plain``: QLoRA without ``prepare_model_for_kbit_training``, which casts the rest to fp32. ``norms``: embedding
    and head are cast back to 16 bits, as TRL's SFTTrainer did on one GPU."""
    base: Literal["fp32", "precision"] | None = None
    """``fp32``: LoRA on a base that was loaded in fp32, which DDP and FSDP keep in it; else in the precision's type."""
    checkpoint: Literal["around", "inside", "plain"] | None = None
    """``around`` and ``inside``: reentrant checkpointing, of FSDP1's units or inside them. ``plain``: not reentrant."""
    mask: Literal["padding", "none"] | None = None
    """``none``: SDPA gets no mask, because all sequences of a batch are equally long."""
    load: Literal["gpu", "host"] | None = None
    """``host``: weights go to host RAM first, also those in 4 bits."""

    def adapter_weights(self, precision: Precision) -> Precision:
        """Return the data type of adapters on weights in ``precision``.

        Source: ``LoraLayer.update_layer`` and pull request 1706 of PEFT (``autocast_adapter_dtype``). Adapters have the
        base weights' type from 0.7 to 0.10, and fp32 before and after that.
        """
        if self.adapters:
            return self.adapters
        casts = self.peft is not None and Version("0.7") <= self.peft < Version("0.11")
        return precision if casts else "fp32"

    def behavior(self) -> LibraryBehavior:
        """Return how these libraries behave.

        Sources in transformers: ``modeling_llama.py`` returns fp32 logits up to 4.45. ``ForCausalLMLoss`` copies the
        shifted logits up to 4.48 (pull request 35646). SDPA takes grouped heads from 4.54 on (39412) and contiguous
        inputs before 4.48. FlashAttention takes grouped heads in all models from 4.48 on (35235). Trainer takes the
        fused AdamW from 4.55 and torch 2.8 on. Checkpointing is reentrant before 5.0 (43203); its function calls FSDP's
        units before 4.52, later layers checkpoint themselves (37223). Before 5.0 the experts of a mixture are modules
        in a loop (``modeling_mixtral.py``).
        In DeepSpeed: ZeRO-3 checks all flat gradients for overflow up to 0.11.1, then only those in fp16 (pull request
        4512). Before 0.9.5 it checks one gradient at a time.
        """
        own = self.logits == "own"
        checkpoint = self.checkpoint or self._checkpoint()
        fused = self._has("transformers", "4.55") and self._has("torch", "2.8")
        return LibraryBehavior(
            keeps_output=self.outputs == "kept",
            returns_wide_logits=not own and not self._has("transformers", "4.46"),
            keeps_logits_narrow=own,
            copies_shifted_logits=not self._has("transformers", "4.49"),
            expands_keys=not self._has("transformers", "4.54"),
            expands_flash_keys=not self._has("transformers", "4.48"),
            copies_attention=not self._has("transformers", "4.48"),
            foreach_optimizer=self.optimizer == "foreach" or (self.optimizer is None and not fused),
            keeps_gradients=not self._has("torch", "2.0"),
            softmax_saves_input=not self._has("torch", "1.12"),
            autocast=self.autocast != "no",
            widens_frozen=self.kbit != "plain",
            narrows_embedding=self.kbit == "norms",
            wide_base=self.base == "fp32",
            checks_any_type=self._has("deepspeed", "0.9.5") and not self._has("deepspeed", "0.11.2"),
            recomputes_whole=checkpoint != "plain",
            loops_over_experts=not self._has("transformers", "5.0"),
            checkpoints_units=checkpoint == "around",
        )

    def _checkpoint(self) -> str:
        if self._has("transformers", "5.0"):
            return "plain"
        return "inside" if self._has("transformers", "4.52") else "around"

    def _has(self, library: str, version: str) -> bool:
        """Return True if the library is at least ``version``, as the installed ones are."""
        given: Version | None = getattr(self, library)
        return given is None or given >= Version(version)


def parse_stack(text: str) -> Stack:
    """Return the stack that ``text`` describes; the empty text is the installed one.

    Raises:
        ConfigError: An entry has an unknown name or value.
    """
    entries = [entry.strip().partition("=") for entry in text.split(",") if entry.strip()]
    return Stack(**{name.strip(): _value(name.strip(), value.strip()) for name, _, value in entries})


def _value(name: str, value: str) -> Any:
    names = [field.name for field in fields(Stack)]
    if name not in names:
        raise ConfigError(
            f"--stack has an unknown entry: {name!r}.{nearest(name, names)} Write NAME=VALUE with one of "
            f"{', '.join(names)}."
        )
    if words := WORDS.get(name):
        if value not in words:
            raise ConfigError(f"--stack has an unknown value: {name}={value}. Write one of {', '.join(words)}.")
        return value
    try:
        return Version(value)
    except InvalidVersion:
        raise ConfigError(
            f"--stack has an unknown value: {name}={value}. It is not a version. Write one such as 4.38."
        ) from None
