"""``python -m tests.unit.check_many REQUESTS WORLD_SIZE``: check many renderings in one process, answers in place."""

import json
import os
import sys
from pathlib import Path

path, world_size = Path(sys.argv[1]), int(sys.argv[2])
os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(world_size), "MASTER_ADDR": "localhost"}
os.environ["DS_ACCELERATOR"] = "cpu"

from shardmake.render import parsers  # noqa: E402
from shardmake.render.check import find_problems  # noqa: E402

parsers.pretend_world(world_size)
answers = []
for request in json.loads(path.read_text()):
    for name in [name for name in os.environ if name.startswith(("ACCELERATE_", "FSDP_"))]:
        del os.environ[name]
    if request["files"]["deepspeed"]:
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    answers.append(find_problems(request, path.parent))
path.write_text(json.dumps(answers))
