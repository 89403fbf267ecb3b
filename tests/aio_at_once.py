"""Test-only: compiles DeepSpeed's asynchronous I/O as one source file. Import it first in a rank's program.

It is the same code. Each of its twelve files reads all of torch's headers, which takes minutes on two cores; read once,
they take one. As a program, it compiles: ``python -m tests.aio_at_once``.
"""

from pathlib import Path

import deepspeed
from deepspeed.ops.op_builder import AsyncIOBuilder
from torch.utils.cpp_extension import get_default_build_root

_folder = Path(deepspeed.__file__).parent / "ops"
_whole = Path(get_default_build_root(), "shardmake_aio.cpp")
_text = "".join(f'#include "{_folder / source}"\n' for source in AsyncIOBuilder().sources())


def _one_source(self: AsyncIOBuilder) -> list[str]:
    return [str(_whole)]


AsyncIOBuilder.sources = _one_source

if __name__ == "__main__":
    _whole.parent.mkdir(parents=True, exist_ok=True)
    _whole.write_text(_text)
    AsyncIOBuilder().load()
