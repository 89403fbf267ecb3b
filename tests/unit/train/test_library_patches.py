"""Changes to what libraries do, in a process that has imported nothing yet."""

import subprocess
import sys

CODE = """
import sys
from shardmake.train.library_patches import import_deepspeed
import_deepspeed()
assert "deepspeed.runtime.zero.muon.muon_optimizer" in sys.modules
assert sys.modules.get("mlflow", "not imported") == "not imported"
assert "torch._inductor.compile_fx" not in sys.modules, "DeepSpeed compiled its Muon"
import torch
assert torch.compile.__module__ == "torch"
"""


def test_deepspeed_is_imported_without_its_tuner_and_its_compiled_optimizer() -> None:
    subprocess.run([sys.executable, "-c", CODE], check=True)
