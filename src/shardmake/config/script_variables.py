"""The names of the variables that a user's script gets, which its ``script_args`` may use."""

from typing import Final

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
