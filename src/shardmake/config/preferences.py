"""The settings of a run that learning from preferences does not take."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardmake.config.models import Run


def check_preferences(run: "Run") -> None:
    """Raise `ValueError` for a section `dpo` without its objective, and for settings that `objective: dpo` refuses."""
    if run.objective != "dpo":
        if run.dpo is not None:
            raise ValueError(f"dpo has no effect with objective: {run.objective}. Set objective: dpo, or remove dpo")
        return
    targets = run.lora.targets
    refused = {
        "packing: true cannot be combined with objective: dpo, which compares pairs. Set packing: false": run.packing,
        "script cannot be combined with objective: dpo, which is an objective of Shardmake's own training. Remove one "
        "of them": run.script is not None,
        "engine: loop cannot be combined with objective: dpo, which TRL's trainer optimizes. Remove engine": run.engine
        == "loop",
        f"loss: {run.loss} cannot be combined with objective: dpo, which has a loss of its own. Remove loss": (
            run.loss != "plain"
        ),
        "method: qlora is not supported with objective: dpo. Take lora or full": run.method == "qlora",
        "torch_compile is not supported with objective: dpo. Remove it": run.torch_compile,
        "tensor_parallel is not supported with objective: dpo. Remove it": run.tensor_parallel > 1,
        "sequence_parallel is not supported with objective: dpo. Remove it": run.sequence_parallel > 1,
        "lora.dropout has no effect with objective: dpo, for which TRL turns dropout off. Remove it": run.method
        != "full"
        and run.lora.dropout > 0,
        "lora.targets: an adapter of lm_head has no effect with objective: dpo, because TRL reads the head's weights "
        "directly. Remove lm_head": run.method != "full" and targets != "all-linear" and "lm_head" in targets,
        "data.loss_on: all has no effect with objective: dpo, which learns from answers. Remove loss_on": (
            run.data.loss_on == "all"
        ),
    }
    for message, applies in refused.items():
        if applies:
            raise ValueError(message)
