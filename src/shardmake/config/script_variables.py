"""The names of the variables that a user's script gets, which its ``script_args`` may use."""

from collections.abc import Iterable
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


def check_variables(words: Iterable[str]) -> None:
    """Raise a `ValueError` if one of ``words`` names a variable of Shardmake that a script does not get.

    Other variables are those of the nodes, which are not known here.
    """
    names = [name for word in words for name in Template(word).get_identifiers() if name.startswith(PREFIX)]
    for name in names:
        if name not in SCRIPT_VARIABLES:
            raise ValueError(
                f"script_args name ${name}, which a script does not get.{nearest(name, SCRIPT_VARIABLES)} Use one of "
                f"{', '.join(SCRIPT_VARIABLES)}"
            )
