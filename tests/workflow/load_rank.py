"""Load a model as rendered on one rank, and write its use of memory: ``load_rank.py ATTEMPT``."""

import json
import os
import resource
import sys
import threading
import time
from pathlib import Path

from transformers import TrainingArguments

import tests.fsdp_on_cpu  # noqa: F401
from shardmake.core.environment import leave_collectives_to_gloo
from shardmake.core.private_names import named_arguments
from shardmake.run.training_settings import TrainingSettings
from shardmake.train.load_model import load_base
from shardmake.train.process_group import end_process, leave_together

folder = Path(sys.argv[1])
settings = TrainingSettings.read(folder / "training.json")


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def resident() -> int:
    """Return the resident memory outside pages of files, which the system takes back at need."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def watch() -> None:
    while True:
        samples.append((time.monotonic(), resident() - before))
        time.sleep(0.005)


leave_collectives_to_gloo()
options = {"deepspeed": str(folder / "deepspeed.json")} if settings.expected.engine == "deepspeed" else {}
arguments = TrainingArguments(output_dir=str(folder / "output"), **named_arguments(settings.arguments), **options)
if options:
    from deepspeed.runtime.zero import GatheredParameters
before, samples = resident(), list[tuple[float, int]]()
threading.Thread(target=watch, daemon=True).start()
model = load_base(settings, arguments)
found = {"peak": peak(), "anonymous": before + max(size for _, size in samples), "samples": samples}
weights = list(model.parameters())
if options and sum(weight.ds_numel for weight in weights) < 1e6:
    with GatheredParameters(weights):
        found["sums"] = [float(tensor.double().sum()) for tensor in (*weights, *model.buffers())]
(folder / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(found))
leave_together()
end_process()
