"""Train with a loop of your own over Accelerate, without transformers' Trainer.

Set ``script: examples/train_loop.py`` in a run; its plan, data, learning rate, steps and seed come from the variables
that docs/how-to/user-script.md lists. The loop keeps what Shardmake's own training does: the mean of the loss over the
tokens of a global batch, checkpoints from which the next attempt resumes exactly, metrics, heartbeats and stop files.
It trains all weights under DDP, ZeRO 1 to 3 and FSDP. Copy the file and change it.
"""

import argparse
import json
import math
import os
import shutil
import time
from collections import deque
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, GradientAccumulationPlugin, set_seed
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, get_scheduler

from shardmake.data.dataset import Sequences, collator
from shardmake.run.attempt import AttemptDir, write_heartbeat
from shardmake.train.sharded_trainer import WholeBatches

Batch = dict[str, Any]

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("--scheduler", default="cosine")
parser.add_argument("--warmup_ratio", type=float, default=0.05)
parser.add_argument("--weight_decay", type=float, default=0.0)
parser.add_argument("--max_grad_norm", type=float, default=1.0, help="under DeepSpeed, that of the run")
parser.add_argument("--save_steps", type=int, default=100)
parser.add_argument("--eval_steps", type=int, default=100)
parser.add_argument("--keep", type=int, default=2, help="checkpoints")


def variable(name: str) -> str:
    """Return the value of a variable of the run."""
    return os.environ[f"SHARDMAKE_{name}"]


class Loop:
    """The model, the data and the state of the training on one rank."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, seed = args, int(variable("SEED"))
        set_seed(seed)
        self.accumulation = int(variable("GRADIENT_ACCUMULATION_STEPS"))
        # A step knows its passes; Accelerate would also end one when the loader has read its last batch ahead.
        passes = GradientAccumulationPlugin(num_steps=self.accumulation, sync_with_dataloader=False)
        order = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=seed)
        self.accelerator = Accelerator(gradient_accumulation_plugin=passes, dataloader_config=order)
        # DDP and FSDP train fp32 weights under autocast or a policy; DeepSpeed converts them.
        model = AutoModelForCausalLM.from_pretrained(variable("BASE"), dtype=torch.float32)
        optimizer = torch.optim.AdamW(
            parameter_groups(model, args.weight_decay), lr=float(variable("LEARNING_RATE")), weight_decay=0.0
        )
        self.model, self.optimizer, self.batches, self.eval_batches = self.accelerator.prepare(
            model, optimizer, *self.make_loaders()
        )
        self.steps_per_epoch = len(self.batches) // self.accumulation
        self.steps = int(variable("MAX_STEPS") or math.ceil(float(variable("EPOCHS")) * self.steps_per_epoch))
        warmup = math.ceil(self.steps * args.warmup_ratio)
        self.scheduler = get_scheduler(args.scheduler, self.optimizer, warmup, self.steps)
        self.accelerator.register_for_checkpointing(self.scheduler)
        self.step = 0
        self.seconds: deque[float] = deque(maxlen=20)

    def make_loaders(self) -> tuple[DataLoader[Any], DataLoader[Any]]:
        """Return the loaders of both splits; an epoch of the first has a whole number of global batches."""
        folder, size = Path(variable("DATA")), int(variable("MICRO_BATCH_SIZE"))
        self.global_batch_size = size * self.accumulation * self.accelerator.num_processes
        train, collate = WholeBatches(Sequences(folder, "train"), self.global_batch_size), collator(folder, "sdpa")
        return (
            DataLoader(train, size, shuffle=True, collate_fn=collate),
            DataLoader(Sequences(folder, "eval"), size, collate_fn=collate),
        )

    def run(self) -> None:
        """Train from the newest checkpoint to the last step, or until a stop is requested."""
        self.resume()
        self.beat("first step")
        while self.step < self.steps:
            for batches in self.rest_of_epoch():
                start = time.monotonic()
                loss, norm = self.train_step(batches)
                self.step += 1
                self.seconds.append(time.monotonic() - start)
                self.log(loss=loss, grad_norm=norm, learning_rate=self.scheduler.get_last_lr()[0])
                if not self.accelerator.optimizer_step_was_skipped:  # by fp16's loss scaler
                    self.scheduler.step()
                self.beat("train")
                if self.step % self.args.eval_steps == 0 or self.step == self.steps:
                    self.log(eval_loss=self.evaluate())
                if self.step == self.steps:
                    self.finish()
                    return
                stops = self.stop_requested()
                if stops or self.step % self.args.save_steps == 0:
                    self.save()
                if stops:
                    Path(variable("STOPPED")).touch()
                    return

    def rest_of_epoch(self) -> Iterator[list[Batch]]:
        """Yield the micro batches of each remaining step of this epoch."""
        epoch, done = divmod(self.step, self.steps_per_epoch)
        batches = self.accelerator.skip_first_batches(self.batches, done * self.accumulation) if done else self.batches
        batches.set_epoch(epoch)
        with torch.random.fork_rng(devices=[], enabled=done > 0):  # the epoch drew its loader's seed when it began
            remaining = iter(batches)
            group = list(islice(remaining, self.accumulation))
        while group:
            yield group
            group = list(islice(remaining, self.accumulation))

    def train_step(self, batches: list[Batch]) -> tuple[float, float]:
        """Take one optimizer step; return the mean loss over the tokens of all ranks, and the gradient norm."""
        self.model.train()
        accelerator, tokens = self.accelerator, self.count_tokens(batches)
        total = torch.zeros((), device=accelerator.device)
        for batch in batches:
            with accelerator.accumulate(self.model):
                loss = self.model(**batch, num_items_in_batch=tokens).loss
                # The engines average over the ranks and the passes; a part of the mean over all tokens is to be added.
                accelerator.backward(loss * accelerator.num_processes * self.accumulation)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(self.model.parameters(), self.args.max_grad_norm)
                self.optimizer.step()
                self.optimizer.zero_grad()
            total += loss.detach()
        mean = accelerator.reduce(total).item()
        if not math.isfinite(mean):
            raise FloatingPointError(f"The loss of step {self.step + 1} is {mean}.")
        return mean, float(norm)

    def count_tokens(self, batches: list[Batch]) -> torch.Tensor:
        """Return the number of tokens with a loss in ``batches`` of all ranks."""
        own = sum((batch["labels"][..., 1:] != -100).sum() for batch in batches)
        return self.accelerator.reduce(torch.as_tensor(own, device=self.accelerator.device))

    @torch.no_grad()
    def evaluate(self) -> float:
        """Return the mean loss over the evaluation sequences; within one pass of all ranks it is weighted by tokens."""
        self.model.eval()
        losses = []
        for batch in self.eval_batches:
            self.beat("evaluate")
            loss = self.model(**batch, num_items_in_batch=self.count_tokens([batch])).loss
            loss = loss * self.accelerator.num_processes
            losses.append(self.accelerator.gather_for_metrics(loss.repeat(int(variable("MICRO_BATCH_SIZE")))))
        return torch.cat(losses).mean().item()

    def log(self, **values: float) -> None:
        """Append a line to the run's metrics on the first rank."""
        if self.accelerator.is_main_process:
            tokens = self.step * self.global_batch_size * int(variable("SEQUENCE_LENGTH"))
            line = {"step": self.step, "time": time.time(), "attempt": int(variable("ATTEMPT")), "tokens": tokens}
            with Path(variable("METRICS")).open("a") as file:
                file.write(json.dumps(line | values) + "\n")

    def beat(self, phase: str) -> None:
        """Write this rank's heartbeat: a rank that hangs in a phase other than "script" ends the attempt."""
        pace = median(self.seconds) if self.seconds else 0.0
        folder = AttemptDir(Path(variable("ATTEMPT_FOLDER")))
        write_heartbeat(folder, self.accelerator.process_index, phase, self.step, median_step_seconds=pace)

    def stop_requested(self) -> bool:
        """Return True on every rank if one of them sees a stop file."""
        found = any(Path(path).exists() for path in variable("STOP_FILES").split(":"))
        return bool(self.accelerator.reduce(torch.tensor(int(found), device=self.accelerator.device)))

    def resume(self) -> None:
        """Load the newest checkpoint, if there is one; a folder that is still being written has another name."""
        if found := self.checkpoints():
            self.accelerator.load_state(str(found[-1]))
            self.step = int(found[-1].name.removeprefix("step-"))

    def checkpoints(self) -> list[Path]:
        """Return the complete checkpoints, the newest last."""
        return sorted(Path(variable("CHECKPOINTS")).glob("step-*"), key=lambda path: int(path.name[5:]))

    def save(self) -> None:
        """Write a checkpoint under a temporary name, rename it when all ranks have written, and remove old ones."""
        self.beat("save")
        folder = Path(variable("CHECKPOINTS"))
        if self.accelerator.is_main_process:
            shutil.rmtree(folder / "writing", ignore_errors=True)
        self.accelerator.wait_for_everyone()
        self.accelerator.save_state(str(folder / "writing"))
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            (folder / "writing").rename(folder / f"step-{self.step}")
            for old in self.checkpoints()[: -self.args.keep]:
                shutil.rmtree(old)
        self.accelerator.wait_for_everyone()

    def finish(self) -> None:
        """Write the final state, from which Shardmake merges the model, and the tokenizer."""
        self.beat("script")
        self.accelerator.save_state(variable("OUTPUT"))
        if self.accelerator.is_main_process:
            AutoTokenizer.from_pretrained(variable("BASE")).save_pretrained(variable("OUTPUT"))


def parameter_groups(model: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return the trained parameters, with weight decay for matrices and without for vectors (norms, biases)."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # A tensor that ZeRO-3 has sharded is flat; `ds_shape` is its original shape.
    shapes = [getattr(parameter, "ds_shape", parameter.shape) for parameter in trained]
    matrices = [one for one, shape in zip(trained, shapes, strict=True) if len(shape) > 1]
    vectors = [one for one, shape in zip(trained, shapes, strict=True) if len(shape) <= 1]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]


if __name__ == "__main__":
    loop = Loop(parser.parse_args())
    loop.run()
    loop.accelerator.end_training()
