"""Shardmake: fine-tune Hugging Face models on a Slurm cluster with DeepSpeed or FSDP.

The names below are the public interface of the package. They are imported on first use, because some of them import
large libraries.
"""

import sys
from enum import Enum
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardmake.commands.estimate import estimate
    from shardmake.commands.estimate_request import EstimateRequest
    from shardmake.consolidate.merge import consolidate
    from shardmake.consolidate.verify import verify

__all__ = ["EstimateRequest", "__version__", "consolidate", "estimate", "verify"]
__version__ = "0.2.0"

_MODULES = {
    "EstimateRequest": "shardmake.commands.estimate_request",
    "estimate": "shardmake.commands.estimate",
    "verify": "shardmake.consolidate.verify",
}

if sys.version_info < (3, 11, 4):  # such as Debian 12: a member becomes a call of getattr, which no checkpoint may have
    Enum.__reduce_ex__ = lambda self, _: (type(self), (self.value,))  # type: ignore[assignment,method-assign]


def __getattr__(name: str) -> Any:
    """Import a public name on first use."""
    if name == "consolidate":
        return import_module("shardmake.consolidate")  # a package that can be called
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
