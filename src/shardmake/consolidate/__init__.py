"""Merge sharded checkpoints into a Hugging Face folder at disk speed, in bounded memory, and verify the result.

`checkpoint.formats` reads a checkpoint's metadata without its tensors and without executing code in it. It returns the
byte ranges of each tensor. `layout` computes names, shards and headers and divides the copy, `stream` and `writer` copy
the bytes, `loading` asks transformers, and `verify` reads the result again. `destination` decides what may be
replaced, and `aux_files` which small files the model gets.
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
