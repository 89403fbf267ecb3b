"""The keys of a run's own DeepSpeed and Accelerate files, and the effect of each.

A key that is not in these tables is refused, because Shardmake does not know its effect.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Final

from shardmake.config.deepspeed_keys import (
    DEEPSPEED_KEYS,
    OPTIMIZER_REMOVED,
    KeyRule,
    find_rule,
    is_removed_optimizer,
    taken,
)
from shardmake.config.settings import ACCELERATE_STOPS, ARGUMENTS_WIN, FILE_WINS, FSDP1_ONLY, SETTINGS, WRAPPED
from shardmake.config.user_files import Kind, UserFile
from shardmake.core.nested import leaves, same


@dataclass(frozen=True)
class JudgedKey:
    """A key of a user's file, its value and its rule; ``is_idle`` if the value has no effect."""

    key: str
    value: Any
    rule: KeyRule
    is_idle: bool = False


ACCELERATE_KEYS: Final[dict[str, KeyRule]] = {
    **{
        key: KeyRule("planned", row.launch_effect or ACCELERATE_STOPS)
        for row in SETTINGS.values()
        for key in row.accelerate
    },
    **taken(
        "planned", FILE_WINS, "compute_environment", "main_training_function",
        "deepspeed_config.deepspeed_multinode_launcher", "parallelism_config.*",
    ),
    **taken(
        "planned", "The command line would have won. To use that file, name it in the run.",
        "deepspeed_config.deepspeed_config_file",
    ),
    **taken(
        "planned", ARGUMENTS_WIN, "fsdp_config.fsdp_sharding_strategy", "fsdp_config.fsdp_cpu_ram_efficient_loading",
    ),
    **taken("planned", WRAPPED, "fsdp_config.fsdp_auto_wrap_policy"),
    **taken("planned", FSDP1_ONLY, "fsdp_config.fsdp_forward_prefetch", "fsdp_config.fsdp_sync_module_states"),
    **taken(
        "unused", "The command line of the launch sets it.", "machine_rank", "main_process_ip", "main_process_port",
    ),
    **taken("neutral", "Accelerate checks the shapes of collectives.", "debug"),
    "rdzv_backend": KeyRule("refused", "Shardmake always uses a static rendezvous.", ("static",)),
    "same_network": KeyRule("refused", "Shardmake always uses one network for all nodes.", (True,)),
    "downcast_bf16": KeyRule("refused", "It is for TPUs only.", (False, "no")),
    "enable_cpu_affinity": KeyRule(
        "refused", "Accelerate ignores it in a file. Shardmake binds ranks with offload itself.", (False,),
    ),
    "gpu_ids": KeyRule("refused", "Slurm or the cluster file decides the GPUs of a node.", ("all",)),
    "fsdp_config.fsdp_min_num_params": KeyRule("refused", WRAPPED, (0,)),
    "fsdp_config.fsdp_ignored_modules": KeyRule("refused", WRAPPED),
    "tpu_use_cluster": KeyRule("refused", "Shardmake does not use TPUs.", (False,)),
    "tpu_use_sudo": KeyRule("refused", "Shardmake does not use TPUs.", (False,)),
    "tpu_env": KeyRule("refused", "Shardmake does not use TPUs.", ([],)),
}  # fmt: skip

TABLES: Final[dict[Kind, dict[str, KeyRule]]] = {"deepspeed": DEEPSPEED_KEYS, "accelerate": ACCELERATE_KEYS}
_FLAGS: Final = frozenset(
    f"zero_optimization.{key}" for key in ("overlap_comm", "offload_optimizer.pin_memory", "offload_param.pin_memory")
)
"""Keys for the memory estimate that are true or false; the others are sizes."""


def judge(file: UserFile, is_script: bool) -> Iterator[JudgedKey]:
    """Yield every key of ``file`` with its rule. A script may use a DeepSpeed file's optimizer and scheduler."""
    off = _sections_that_are_off(file)
    for key, value in leaves(file.values):
        rule = _rule(file.kind, key, is_script)
        section = key.partition(".")[0]
        is_off = section in off and rule.use != "planned"
        unset = value is None and rule.use != "planned"
        yield JudgedKey(key, value, rule, is_idle=is_off or unset or any(same(value, idle) for idle in rule.idle))


def refusals(file: UserFile, is_script: bool) -> dict[str, str]:
    """Return the keys of ``file`` that no plan can take, each with the reason."""
    found = {}
    for one in judge(file, is_script):
        if one.key == "optimizer.type" and file.kind == "deepspeed" and is_removed_optimizer(one.value):
            found[one.key] = OPTIMIZER_REMOVED
        elif one.rule.use == "refused" and not one.is_idle:
            found[one.key] = one.rule.reason
        elif one.rule.use == "estimated" and not one.is_idle and (reason := _wrong_size(one)):
            found[one.key] = reason
    return found


def estimated_values(file: UserFile) -> dict[str, Any]:
    """Return the values of ``file`` that the memory estimate counts, by dotted key."""
    return {
        one.key: one.value for one in judge(file, is_script=True) if one.rule.use == "estimated" and not one.is_idle
    }


def is_tuning(one: JudgedKey) -> bool:
    """Return True if the value changes memory, speed or logs, but neither what is trained nor what is refused."""
    return one.rule.use in ("estimated", "neutral", "unused")


def changes_result(key: str) -> bool:
    """Return True if a value of ``key`` that was taken from a run's own file can change the result."""
    return any(_rule(kind, key, is_script=True).use == "result" for kind in TABLES)


def _rule(kind: Kind, key: str, is_script: bool) -> KeyRule:
    table = TABLES[kind]
    if is_script and kind == "deepspeed" and key.startswith(("optimizer.", "scheduler.")):
        return KeyRule("result", "The script decides whether it uses this section.")
    return find_rule(table, key) or KeyRule("refused", _unknown(kind, key))


def _unknown(kind: Kind, key: str) -> str:
    if any(name.startswith(f"{key}.") for name in TABLES[kind]):
        return "A section with keys is needed here." + (
            " To use a DeepSpeed file, name it under deepspeed_config of the run." if key == "deepspeed_config" else ""
        )
    section, dot, name = key.rpartition(".")
    siblings = [known.rpartition(".")[2] for known in TABLES[kind] if known.rpartition(".")[0] == section]
    alike = get_close_matches(name, siblings, 1)
    return "Shardmake does not know its effect." + (f" Did you mean '{section}{dot}{alike[0]}'?" if alike else "")


def _sections_that_are_off(file: UserFile) -> set[str]:
    """Return the sections that switch themselves off with ``enabled: false``."""
    table = TABLES[file.kind]
    off = {key for key in file.values if file.section(key).get("enabled") is False}
    rules = {key: find_rule(table, f"{key}.enabled") for key in off}
    return {key for key, rule in rules.items() if f"{key}.enabled" in table or (rule and rule.fate == "removed")}


def _wrong_size(one: JudgedKey) -> str:
    if one.value == "auto":
        return ""
    if one.key in _FLAGS:
        return "" if isinstance(one.value, bool) else "It must be true or false."
    is_size = isinstance(one.value, int | float) and not isinstance(one.value, bool) and math.isfinite(one.value)
    return "" if is_size and one.value >= 0 else "It must be a number that is not negative."


def contradictions(file: UserFile, planned: Mapping[str, Any], is_script: bool) -> dict[str, KeyRule]:
    """Return the keys that the plan decides and whose value in ``file`` is not the one in ``planned``."""
    return {
        one.key: one.rule
        for one in judge(file, is_script)
        if one.rule.use == "planned"
        and one.value != "auto"
        and not (one.key in planned and same(one.value, planned[one.key]))
    }
