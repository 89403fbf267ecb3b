"""The training of a run by transformers' Trainer alone: ``python -m benchmarks.gpu_kit.bare CASE WORK RUN``.

It takes the run's rendered arguments, data and order of the data, and its DeepSpeed file if it has one. The losses are
those of the run, up to rounding, and the difference of the steps is what Shardmake adds.
"""

import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

from benchmarks.gpu_kit.cases import WARM_UP
from shardmake.core.atomic import read_json
from shardmake.core.private_names import named_arguments
from shardmake.data.dataset import Sequences, collator
from shardmake.data.varlen import register_varlen
from shardmake.run.paths import RunDir
from shardmake.run.plan import Plan
from shardmake.run.training_settings import TrainingSettings
from shardmake.run.turns import wait_for_turn
from shardmake.train.sharded_trainer import WholeBatches


class Watch(TrainerCallback):
    """Keeps the time of each step and its loss."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.losses: dict[int, float] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Keep the time when the GPU has ended the step."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.times.append(time.time())

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, float] | None = None, **_: Any) -> None:
        """Keep the loss."""
        if logs and "loss" in logs:
            self.losses[state.global_step] = logs["loss"]


def figures(watch: Watch, tokens_per_step: int) -> dict[str, Any]:
    """Return what a row keeps of a training in this process."""
    gaps = [later - earlier for earlier, later in zip(watch.times, watch.times[1:], strict=False)]
    seconds = median(gaps[WARM_UP:] or gaps)
    found: dict[str, Any] = {"allocated": None, "reserved": None, "losses": watch.losses, "step_seconds": seconds}
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        found |= {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
        found["device"] = total - free
    return {**found, "tokens_per_second": tokens_per_step / seconds}


def one_rank() -> None:
    """Set the variables of a launcher of one rank, which DeepSpeed reads."""
    os.environ |= {
        "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29671",
    }  # fmt: skip


def main(name: str, work: Path, run_name: str) -> None:
    """Train, and print the figures as the last line."""
    run = RunDir(work / "runs" / run_name)
    plan, settings = Plan.read(run.plan), TrainingSettings.read(run.training)
    deepspeed = read_json(run.deepspeed, "shardmake render")
    if deepspeed:
        one_rank()
        import deepspeed as library

        print(library.__version__)
    wait_for_turn(name)
    register_varlen()
    arguments = named_arguments(settings.arguments) | ({"deepspeed": deepspeed} if deepspeed else {})
    arguments |= {"save_strategy": "no", "report_to": "none", "output_dir": str(run.root / "bare"), "ddp_backend": None}
    made = TrainingArguments(**arguments)
    model = AutoModelForCausalLM.from_pretrained(
        work / settings.model.path,
        dtype=getattr(torch, settings.model.dtype),
        attn_implementation=settings.model.attention,
    )
    model.config.use_cache = False
    watch = Watch()
    Trainer(
        model=model, args=made, train_dataset=WholeBatches(Sequences(run.data, "train"), plan.choice.global_batch_size),
        data_collator=collator(run.data, plan.workload.attention), callbacks=[watch],
    ).train()  # fmt: skip
    program = "transformers' Trainer" + (" with DeepSpeed" if deepspeed else "")
    found = figures(watch, plan.choice.global_batch_size * plan.workload.sequence_length)
    print(json.dumps({"trainer": f"{program}, {plan.workload.attention}", "of": run_name, **found}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
