"""The table of methods: what of the model a run trains, one row each.

Every other file asks for an attribute of a row and never tests a method's name. A new kind of adapter is one row here.
If its weights are not LoRA's two factors, `shardmake.memory.model` must count them and
`shardmake.checkpoint.formats.lora` must merge them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

_PEFT_NAMES: Final = {"rank": "r", "alpha": "lora_alpha", "dropout": "lora_dropout", "targets": "target_modules"}
"""PEFT's name of each key of the section `lora`."""


@dataclass(frozen=True)
class MethodSpec:
    """One method: the weights that it trains, and PEFT's configuration of its adapters."""

    label: str
    """Name in the report and in the model card."""
    trains: str
    """Its part of the sentence "Train ..." in the reference of the configuration."""
    learning_rate: float
    """Peak learning rate that `shardmake init` writes."""
    peft_class: str = ""
    """PEFT's class of configurations; empty if all weights are trained."""
    peft_options: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of PEFT's class."""
    unquantized: str = ""
    """The same method on a base in 16 bits; empty if the method does not quantize its base to 4 bits."""
    package: str = ""
    """Optional package, and module, that it needs; its kernels need a GPU."""
    smaller: tuple[str, ...] = ()
    """Methods that take less memory, which a plan without enough memory tries."""

    @property
    def has_adapters(self) -> bool:
        """Return whether adapters are trained and the base is frozen."""
        return bool(self.peft_class)

    @property
    def in_four_bits(self) -> bool:
        """Return whether the linear layers of the base are held in 4 bits (NF4)."""
        return bool(self.unquantized)

    def peft_config(self, task_type: str | None, model: Any, rows: Sequence[int] = (), **adapters: Any) -> Any:
        """Return PEFT's configuration of ``adapters``, which are keys of the section `lora` with their values.

        A target that is a parameter of ``model``, such as a mixture's fused experts, becomes one of PEFT's
        ``target_parameters``. The ``rows`` of the embedding and of the head are trained in full; PEFT ties them itself.
        """
        import peft

        values = {_PEFT_NAMES[key]: value for key, value in adapters.items()}
        if not isinstance(targets := values["target_modules"], str):
            modules, parameters = (
                [name for name in targets if any(f".{held}".endswith(f".{name}") for held, _ in named())]
                for named in (model.named_modules, model.named_parameters)
            )
            values["target_modules"] = [name for name in targets if name in modules or name not in parameters]
            values["target_parameters"] = parameters or None
        if rows:
            embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
            ends = [embedding] if head is None or head.weight is embedding.weight else [embedding, head]
            names = [name for name, module in model.named_modules() if any(module is end for end in ends)]
            values["trainable_token_indices"] = {name: list(rows) for name in names}
        return getattr(peft, self.peft_class)(task_type=task_type, **values, **self.peft_options)


DEFAULT_METHOD: Final = "full"

METHODS: Final[dict[str, MethodSpec]] = {
    DEFAULT_METHOD: MethodSpec("full fine-tuning", "all weights", 1e-5, smaller=("lora", "qlora")),
    "lora": MethodSpec("LoRA", "low-rank adapters", 2e-4, "LoraConfig"),
    "qlora": MethodSpec(
        "QLoRA", "adapters on a 4-bit base", 2e-4, "LoraConfig", unquantized="lora", package="bitsandbytes"
    ),
}


def describe_methods() -> str:
    """Return what the methods train, for the reference of the configuration."""
    *others, last = (spec.trains for spec in METHODS.values())
    return f"Train {', '.join(others)}, or {last}."
