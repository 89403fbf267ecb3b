"""One process imports the libraries once, and the helper modules of `shardmake.core.process` are forked from it.

A helper otherwise imports torch, transformers, Accelerate and DeepSpeed for seconds, hundreds of times in the unit
tests. A forked helper still has memory, environment, files and an exit status of its own. The tests in
`tests/workflow`, `tests/cluster` and `tests/unit/core/test_process.py` start helpers as users do.
"""

import gc
import json
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping
from pathlib import Path
from threading import Lock
from typing import Any

NAMES = ("request", "output", "errors")


class ModuleServer:
    """The process that helpers are forked from; it starts with the first helper."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._process: subprocess.Popen[str] | None = None

    def run(
        self, module: str, text: str, environment: Mapping[str, str], folder: Path | None
    ) -> subprocess.CompletedProcess[str]:
        """Run ``module`` with ``text`` as its input, as a new Python process would."""
        with tempfile.TemporaryDirectory(prefix="helper-") as name, self._lock:
            paths = {each: str(Path(name) / each) for each in NAMES}
            Path(paths["request"]).write_text(text)
            order = {
                "module": module, "environment": dict(environment), "folder": str(folder or Path.cwd()), "paths": paths,
            }  # fmt: skip
            status = self._ask(order)
            return subprocess.CompletedProcess(
                [module], status, Path(paths["output"]).read_text(), Path(paths["errors"]).read_text()
            )

    def _ask(self, order: dict[str, Any]) -> int:
        process = self._process or self._start()
        self._process = None  # an interrupted question leaves no process whose next answer is that of this one
        assert process.stdin and process.stdout
        print(json.dumps(order), file=process.stdin, flush=True)
        answer = process.stdout.readline()
        assert answer, "the process that helpers are forked from has ended; its error is above"
        self._process = process
        return int(answer)

    def _start(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-P", "-W", "ignore", __file__]
        return subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd="/")

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            assert self._process.stdin
            self._process.stdin.close()
            self._process.wait()


def _serve() -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    _import_libraries()
    for line in sys.stdin:
        child = os.fork()
        if not child:
            _become_helper(**json.loads(line))
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), file=replies, flush=True)


def _import_libraries() -> None:
    import accelerate.commands.launch  # noqa: F401
    import deepspeed.runtime.config  # noqa: F401
    import peft  # noqa: F401
    import torch.distributed.fsdp
    import torch.testing._internal.distributed.fake_pg  # noqa: F401
    import transformers.integrations.deepspeed
    import transformers.models.auto.modeling_auto
    import transformers.models.llama.modeling_llama  # noqa: F401
    from transformers import PreTrainedModel, TrainingArguments  # noqa: F401

    gc.freeze()  # a collection in a helper would copy the memory of all that is imported


def _become_helper(module: str, environment: dict[str, str], folder: str, paths: dict[str, str]) -> None:
    """Run ``module`` in this process, which was forked for it, and end."""
    status = 1
    try:
        os.dup2(os.open(paths["request"], os.O_RDONLY), 0)
        for number, name in ((1, "output"), (2, "errors")):
            os.dup2(os.open(paths[name], os.O_WRONLY | os.O_CREAT), number)
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        sys.path[:0] = [path for path in environment["PYTHONPATH"].split(os.pathsep) if path not in sys.path]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    _serve()
