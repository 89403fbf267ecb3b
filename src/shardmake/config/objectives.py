"""The table of objectives: one row each. A new objective is one row here and the module that trains it.

An objective other than sft has a section of a run of the same name, if it has settings.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from shardmake.config.formats import FORMATS, DataFormat
from shardmake.config.strategies import StrategySpec


@dataclass(frozen=True)
class ObjectiveSpec:
    """One objective: its name for readers, the examples that it learns from, and what it is proven with."""

    label: str
    data_formats: tuple[DataFormat, ...]
    """Formats that ``data.format: auto`` may recognize."""
    trl: str | None = None
    """How the names of TRL's classes that train it begin, as in `DPOTrainer` and `DPOConfig`; None: Trainer's own loss.

    TRL's trainers pad the examples of a batch, have a loss of their own, and turn dropout off.
    """
    sequences: int = 1
    """Sequences of one example in a training step."""
    has_reference: bool = False
    """A training step also runs the base model, without gradients."""
    forwards: int = 1
    """Forward passes of each model in a micro batch; all but one of the trained model are without gradients."""
    compares_batch: bool = False
    """The loss of an example depends on the others of its micro batch, on all ranks.

    A micro batch then needs two examples, its size is a part of the result, and every epoch has the same order.
    """
    new_head: str = ""
    """Layer that replaces the base model's output head and is trained from random weights; empty: the head is kept.

    The model is then transformers' sequence classifier with one output, and does not generate text.
    """
    cuts: bool = True
    """Examples longer than the sequence length are cut; else they are dropped."""
    head_adapter: str = ""
    """Why an adapter of the layer lm_head has no effect; empty if it has one."""
    is_proven: Callable[[StrategySpec], bool] = lambda spec: True
    """Return whether training under a strategy is tested."""

    @property
    def least_micro_batch(self) -> int:
        """Return the smallest size of a micro batch."""
        return 2 if self.compares_batch else 1


def _shards_evenly(spec: StrategySpec) -> bool:
    """Return True for a strategy that treats all ranks alike and does not use NVMe."""
    return not (spec.uses_nvme or spec.hpz or spec.hybrid)


OBJECTIVES: Final = {
    "sft": ObjectiveSpec("supervised fine-tuning", tuple(name for name, spec in FORMATS.items() if not spec.learned)),
    "dpo": ObjectiveSpec(
        "direct preference optimization", ("preference",), trl="DPO", sequences=2, has_reference=True,
        head_adapter="TRL reads the head's weights directly", is_proven=_shards_evenly,
    ),
    "kto": ObjectiveSpec(
        "Kahneman-Tversky optimization", ("unpaired-preference",), trl="KTO", has_reference=True, forwards=2,
        compares_batch=True, head_adapter="TRL reads the head's weights directly", is_proven=_shards_evenly,
    ),
    "reward": ObjectiveSpec(
        "reward modelling", ("preference",), trl="Reward", sequences=2, new_head="score", cuts=False,
        head_adapter="a reward model does not have that layer", is_proven=_shards_evenly,
    ),
}  # fmt: skip
