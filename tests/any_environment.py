"""Helper modules of the unit tests: one process imports the libraries for requests of any environment.

A helper otherwise imports torch, transformers, Accelerate and DeepSpeed for seconds, hundreds of times in the unit
tests, because each test has folders of its own in its environment. The tests in `tests/workflow`, `tests/cluster` and
`tests/unit/core/test_library_process.py` start helpers as users do.
"""

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any

from shardmake.core.library_process import LibraryProcess
from shardmake.core.process import absolute_python_path

LIBRARIES = (
    "accelerate.commands.launch", "deepspeed.runtime.config", "peft", "torch.distributed.fsdp",
    "torch.testing._internal.distributed.fake_pg", "transformers.integrations.deepspeed",
    "transformers.models.auto.modeling_auto", "transformers.models.llama.modeling_llama", "transformers.training_args",
)  # fmt: skip


class AnyEnvironment(LibraryProcess):
    """A process whose requests set their environment when they are forked.

    A request whose PYTHONPATH has modules of a test gets a process of its own. One thread starts the process, because
    the kernel ends it with that thread, and asks for all.
    """

    def __init__(self) -> None:
        super().__init__()
        path = os.pathsep.join([absolute_python_path({}), str(Path(__file__).parents[1])])
        self._started_with = {**os.environ, "PYTHONPATH": path}
        self._thread = ThreadPoolExecutor(1)

    def ask(
        self, module: str, request: Any, environment: Mapping[str, str], folder: Path | None, libraries: Sequence[str]
    ) -> Any:
        """Answer as `LibraryProcess.ask`."""
        if not module.startswith("shardmake.") or environment["PYTHONPATH"] != absolute_python_path({}):
            own = LibraryProcess()
            try:
                return own.ask(module, request, environment, folder, libraries)
            finally:
                own.close()
        order = {"module": module, "request": request, "environment": dict(environment)}
        folder = folder or Path.cwd()
        return self._thread.submit(super().ask, __name__, order, self._started_with, folder, LIBRARIES).result()


def answer(order: Mapping[str, Any]) -> Any:
    """Return the answer of a helper module; this runs in the process that was forked for it."""
    os.environ.clear()
    os.environ.update(order["environment"])
    return import_module(order["module"]).answer(order["request"])
