"""The names of the variables that a user's script gets, which its ``script_args`` may use."""

from collections.abc import Iterable, Sequence
from string import Template
from typing import Final

from shardmake.core.errors import nearest

PREFIX: Final = "SHARDMAKE_"
SCRIPT_VARIABLES: Final = tuple(
    PREFIX + name
    for name in (
        "ATTEMPT",
        "ATTEMPT_FOLDER",
        "CHECKPOINTS",
        "OUTPUT",
        "METRICS",
        "STOP_FILES",
        "STOPPED",
        "DATA",
        "RAW_DATA",
        "BASE",
        "DEEPSPEED_CONFIG",
        "SEQUENCE_LENGTH",
        "MICRO_BATCH_SIZE",
        "GRADIENT_ACCUMULATION_STEPS",
        "LEARNING_RATE",
        "MAX_STEPS",
        "EPOCHS",
        "SEED",
    )
)
"""docs/how-to/user-script.md describes them."""
SERVICE_VARIABLES: Final = tuple(f"{PREFIX}SERVICE_{name}" for name in ("HOST", "PORT", "ADDRESSES"))
"""The variables that lead to a run's service (docs/how-to/service.md)."""


def check_variables(key: str, words: Iterable[str], known: Sequence[str]) -> None:
    """Raise a `ValueError` if one of ``words``, the value of ``key``, names a variable of Shardmake beside ``known``.

    Other variables are those of the nodes, which are not known here.
    """
    names = [name for word in words for name in Template(word).get_identifiers() if name.startswith(PREFIX)]
    for name in names:
        if name in SERVICE_VARIABLES and not set(known) & set(SERVICE_VARIABLES):
            raise ValueError(f"{key}: ${name} is set only for a run with a service. Add service and service_nodes")
        if name not in known:
            raise ValueError(
                f"{key}: ${name} is not set for this program.{nearest(name, known)} Use one of {', '.join(known)}"
            )
