"""Let PEFT save and load adapters in layers that FSDP1 or activation checkpointing wraps."""

from functools import wraps
from typing import Any


def name_checkpointed_adapters(tuners_utils: Any) -> None:
    """Let PEFT find adapters in layers that FSDP1 wraps, or that Accelerate wraps for activation checkpointing.

    PEFT selects weights by the names of modules. Those have the wrapper's part, and the names of weights do not, so it
    would silently save and load an empty adapter. ``tuners_utils`` is PEFT's module of that name; a second call has no
    effect.
    """
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import _CHECKPOINT_PREFIX
    from torch.distributed.fsdp._common_utils import FSDP_PREFIX

    find = tuners_utils._get_tuner_state_dict_key_prefixes
    if hasattr(find, "__wrapped__"):
        return

    @wraps(find)
    def find_as_weights(*arguments: Any, **options: Any) -> set[str]:
        found = find(*arguments, **options)
        return {prefix.replace(_CHECKPOINT_PREFIX, "").replace(FSDP_PREFIX, "") for prefix in found}

    tuners_utils._get_tuner_state_dict_key_prefixes = find_as_weights
