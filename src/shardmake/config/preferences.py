"""The settings of a run that its objective does not take."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from shardmake.config.objectives import OBJECTIVES, ObjectiveSpec

if TYPE_CHECKING:
    from shardmake.config.models import Run


def check_objective(run: "Run") -> None:
    """Raise `ValueError` for the section of another objective, and for settings that the run's objective refuses."""
    for name in OBJECTIVES:
        if name != run.objective and getattr(run, name, None) is not None:
            raise ValueError(
                f"{name} has no effect with objective: {run.objective}. Set objective: {name}, or remove {name}"
            )
    spec = OBJECTIVES[run.objective]
    for message in _refused_by_trl(run, spec) if spec.trl else ():
        raise ValueError(message)


def _refused_by_trl(run: "Run", spec: ObjectiveSpec) -> Iterator[str]:
    """Yield a message for each setting of ``run`` that TRL's trainers do not take."""
    objective, targets = f"objective: {run.objective}", run.lora.targets
    if run.packing:
        yield f"packing: true cannot be combined with {objective}, whose examples are padded. Set packing: false"
    if run.script is not None:
        yield (
            f"script cannot be combined with {objective}, which is an objective of Shardmake's own training. Remove "
            "one of them"
        )
    if run.loss != "plain":
        yield f"loss: {run.loss} cannot be combined with {objective}, which has a loss of its own. Remove loss"
    if run.torch_compile:
        yield f"torch_compile is not supported with {objective}. Remove it"
    if run.tensor_parallel > 1:
        yield f"tensor_parallel is not supported with {objective}. Remove it"
    if run.sequence_parallel > 1:
        yield f"sequence_parallel is not supported with {objective}. Remove it"
    if run.method_spec.has_adapters and run.lora.dropout > 0:
        yield f"lora.dropout has no effect with {objective}, for which TRL turns dropout off. Remove it"
    if spec.head_adapter and run.method_spec.has_adapters and targets != "all-linear" and "lm_head" in targets:
        yield (
            f"lora.targets: an adapter of lm_head has no effect with {objective}, because {spec.head_adapter}. "
            "Remove lm_head"
        )
    if spec.compares_batch and run.micro_batch_size == 1:
        yield (
            f"micro_batch_size: 1 cannot be combined with {objective}, which compares the examples of a micro batch. "
            "Set 2 or more, or auto"
        )
    if spec.new_head:
        yield from (
            f"evaluation.{key} has no effect with {objective}, whose model does not generate text. Remove it"
            for key in ("prompts", "lm_eval", "losses")
            if getattr(run.evaluation, key)
        )
    if run.data.loss_on == "all":
        yield f"data.loss_on: all has no effect with {objective}, which learns from answers. Remove loss_on"
