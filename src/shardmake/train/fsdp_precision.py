"""Numbers that FSDP would round to 16 bits: the loss and, with the count of tokens, the scale of all gradients.

Accelerate's own policy for FSDP2 casts the loss. It reads no policy from its file or from a variable, so the plugin
gets the planned one in the process of each rank. FSDP also casts every argument of the model that is not an integer,
and Trainer passes the count of a step's tokens as a float.
"""

from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from shardmake.config.strategies import FSDP
from shardmake.core.private_names import private
from shardmake.run.engine import Engine
from shardmake.train.library_patches import wrap


def fsdp_policy(expected: Engine) -> MixedPrecisionPolicy | None:
    """Return the planned policy; None for other engines, and if FSDP casts nothing.

    FSDP2's policy has no type of outputs: the loss leaves the model as it was computed, and so do hidden states.
    """
    if expected.engine != FSDP or expected.dtype == "float32":
        return None
    compute, reduce = getattr(torch, expected.dtype), getattr(torch, str(expected.gradient_dtype))
    return MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce)


def whole_tokens(count: Any) -> Any:
    """Return Trainer's ``count`` of a step's tokens as integers, which FSDP does not cast; as it is if not a tensor."""
    return count.long() if isinstance(count, torch.Tensor) else count


def count_whole_tokens(trainer: type[Any]) -> None:
    """Let the class ``trainer`` of a script pass the count of a step's tokens as an integer."""
    wrap(private(trainer), "get_num_items_in_batch", lambda count, /, *args, **more: whole_tokens(count(*args, **more)))


def set_script_policy(plugin: type[Any], expected: Engine) -> None:
    """Let Accelerate's FSDP ``plugin`` class choose the planned policy where it would choose its own.

    A script that sets a policy itself keeps it.
    """
    policy = fsdp_policy(expected)
    if policy is None:
        return
    names = {"bf16": torch.bfloat16, "fp16": torch.float16}

    def choose_planned(choose: Any, plugin: Any, precision: Any, *args: Any, **kwargs: Any) -> None:
        if plugin.mixed_precision_policy is None and names.get(precision) == policy.param_dtype:
            plugin.mixed_precision_policy = policy
        choose(plugin, precision, *args, **kwargs)

    wrap(plugin, "set_mixed_precision", choose_planned)
