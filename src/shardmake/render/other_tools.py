"""Programs of other projects that train with settings of their own."""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Tool:
    """A program that trains with settings of its own; ``commands`` are the words that start a training."""

    title: str
    commands: tuple[str, ...] = ()
    has_arguments: bool = False
    """Its options and its YAML file have the names of transformers' training arguments, with other defaults."""


TRL: Final = Tool("TRL", ("sft", "dpo", "grpo", "kto", "reward", "rloo"), has_arguments=True)
_FACTORY: Final = Tool("LLaMA-Factory", ("train",), has_arguments=True)
_TORCHTUNE: Final = Tool("torchtune", ("run",))
TOOLS: Final = {
    "trl": TRL,
    "llamafactory-cli": _FACTORY,
    "llamafactory": _FACTORY,
    "swift": Tool("ms-swift", ("sft", "pt", "rlhf"), has_arguments=True),
    "axolotl": Tool("Axolotl", ("train",)),
    "tune": _TORCHTUNE,
    "torchtune": _TORCHTUNE,
    **{name: Tool(title) for name, title in (("torchtitan", "torchtitan"), ("verl", "verl"), ("openrlhf", "OpenRLHF"))},
    "nemo_automodel": Tool("NeMo Automodel"),
}
"""Tools by the name of their program or module."""
