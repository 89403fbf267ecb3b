"""Merge sharded checkpoints into a Hugging Face folder at disk speed, in bounded memory, and prove the result.

A checkpoint's metadata is read without its tensors and without running anything from it (`unpickle`), a reader per
format (`deepspeed`, `dcp`, `folder`) says which byte ranges make up each tensor (`contents`), `layout` fixes names,
shards and headers, `writer` streams the bytes, and `verify` reads the result again.
"""

import sys
from types import ModuleType
from typing import Any


class _CallableModule(ModuleType):
    """Let ``from shardmake import consolidate`` give a function, although a package has this name."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Merge a checkpoint; see `shardmake.consolidate.merge.consolidate`."""
        from shardmake.consolidate.merge import consolidate

        return consolidate(*args, **kwargs)


sys.modules[__name__].__class__ = _CallableModule
