"""Load a model as rendered on one rank, and write its peak memory: ``load_rank.py ATTEMPT``."""

import json
import os
import resource
import sys
import threading
import time
from pathlib import Path

from transformers import TrainingArguments

import tests.fsdp_on_cpu  # noqa: F401
from shardmake.core.private_names import named_arguments
from shardmake.run.training_settings import TrainingSettings
from shardmake.train.load_model import load_base
from shardmake.train.process_group import end_process, leave_together

folder = Path(sys.argv[1])
settings = TrainingSettings.read(folder / "training.json")


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def watch() -> None:
    """Keep the largest part of the resident memory outside pages of files, which the system takes back at need."""
    while True:
        (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
        anonymous[0] = max(anonymous[0], int(line.split()[1]) * 1024)
        time.sleep(0.005)


anonymous = [0]
threading.Thread(target=watch, daemon=True).start()
deepspeed = {"deepspeed": str(folder / "deepspeed.json")} if settings.expected.engine == "deepspeed" else {}
arguments = TrainingArguments(output_dir=str(folder / "output"), **named_arguments(settings.arguments), **deepspeed)
model = load_base(settings)
(folder / f"rank-{os.environ['RANK']}.json").write_text(json.dumps({"peak": peak(), "anonymous": anonymous[0]}))
leave_together()
end_process()
