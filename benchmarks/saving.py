"""Measure how long training waits for a save, synchronous and asynchronous: ``python -m benchmarks.saving``.

Two ranks train a Llama of 57 million weights on the CPU, under ZeRO-3 and under FSDP2, and save after every step: in
turn straight to a folder on disk, through a scratch in ``/dev/shm``, and through one on the same disk. Each save begins
when the upload before has ended. It takes minutes; results/saving.json has the medians, their ratios, and the load of
the machine, which decides whether they mean anything.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from benchmarks.machine import machine
from shardmake.checkpoint import store
from shardmake.config.models import Strategy
from shardmake.run.paths import RunDir
from shardmake.train.async_saver import ScratchFolder
from shardmake.train.checkpoint_saver import Saver

RESULTS = Path(__file__).parent / "results/saving.json"
STRATEGIES: tuple[Strategy, ...] = ("zero3", "fsdp")
PLACES = ("at once", "through /dev/shm", "through disk")
SHAPE = {
    "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 12,
    "num_key_value_heads": 12,
}  # fmt: skip


class Alternate(TrainerCallback):
    """Gives each save its place, and writes down what the one before took."""

    def __init__(self, saver: Saver, attempt: Path, memory: Path) -> None:
        folders = [None, memory, attempt / "scratch"]
        self.scratches = [
            folder and ScratchFolder(folder, folder, attempt, node=0, nodes=1, share=1.0) for folder in folders
        ]
        self.saver = saver
        self.log = attempt / "saves.jsonl"

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The save follows this."""
        self.saver.wait_for_upload()
        newest = next(store.committed(self.saver.folder), None)
        if newest and state.is_world_process_zero:
            record = newest[0]
            line = {
                "step": record.step, "place": PLACES[record.step % len(PLACES)],
                "waits": record.save_seconds if record.blocked_seconds is None else record.blocked_seconds,
                "whole": record.save_seconds, "bytes": record.size,
            }  # fmt: skip
            with self.log.open("a") as file:
                file.write(json.dumps(line) + "\n")
        self.saver.scratch = self.scratches[state.global_step % len(PLACES)]


def rank() -> None:
    """This process is one rank: ``saving.py ATTEMPT``."""
    import tests.fsdp_on_cpu  # noqa: F401
    from shardmake.train import trainer
    from shardmake.train.__main__ import main as train

    make, attempt = trainer.make_callbacks, Path(sys.argv[1])

    def make_callbacks(*arguments: Any) -> Any:
        callbacks = make(*arguments)
        return *callbacks, Alternate(callbacks[3].saver, attempt, Path(os.environ["SAVING_MEMORY"]))

    trainer.make_callbacks = make_callbacks  # type: ignore[assignment]
    train()


def measure(strategy: Strategy, rounds: int, root: Path) -> list[dict[str, Any]]:
    """The saves of one training but for the last one, and for the first round, which also makes the folders."""
    from shardmake.demo import make_inputs
    from tests.workflow.by_hand import launch
    from tests.workflow.checkout import Checkout
    from tests.workflow.forked import plan_of, write_attempt

    make_inputs(root / "inputs")
    enlarge(root / "inputs/base", SHAPE)
    checkout = Checkout.create(root / "checkout", root / "inputs")
    steps = (rounds + 1) * len(PLACES)
    settings = {"strategy": strategy, "nodes": 1, "max_steps": steps, "checkpoints": {"every_steps": 1, "keep": 1}}
    checkout.configure({}, **settings)
    checkout("shardmake", "data", "demo")
    planned = plan_of(checkout)
    folder = write_attempt(RunDir(checkout.run), planned)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        os.environ["SAVING_MEMORY"] = f"{memory}/saves"
        launch(planned[0], folder, Path(__file__))
    lines = [json.loads(line) for line in (folder.root / "saves.jsonl").read_text().splitlines()]
    return [line for line in lines if line["step"] >= len(PLACES)]


def enlarge(base: Path, shape: dict[str, int]) -> None:
    """Put a larger model of the same kind and vocabulary in the place of the demo's."""
    from transformers import AutoConfig, AutoModelForCausalLM, set_seed

    set_seed(0)  # results of several runs are compared
    config = AutoConfig.from_pretrained(base)
    config.update(shape | {"head_dim": shape["hidden_size"] // shape["num_attention_heads"]})
    AutoModelForCausalLM.from_config(config).save_pretrained(base)


def summary(saves: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians by place, and how many times shorter training waits than at once: the median over rounds."""
    by_round: dict[int, dict[str, dict[str, Any]]] = {}
    for save in saves:
        by_round.setdefault(save["step"] // len(PLACES), {})[save["place"]] = save
    rounds = list(by_round.values())
    found: dict[str, Any] = {"checkpoint_bytes": saves[-1]["bytes"], "rounds": len(rounds)}
    for place in PLACES:
        mine = [one[place] for one in rounds]
        found[place] = {
            "waits_seconds": round(statistics.median(save["waits"] for save in mine), 3),
            "counts_after_seconds": round(statistics.median(save["whole"] for save in mine), 3),
            "times_shorter": round(
                statistics.median(one[PLACES[0]]["waits"] / one[place]["waits"] for one in rounds), 2
            ),
            "bytes_per_second_and_rank": round(statistics.median(save["bytes"] / 2 / save["waits"] for save in mine)),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    found = {}
    for strategy in STRATEGIES:
        with tempfile.TemporaryDirectory() as folder:
            found[strategy] = summary(measure(strategy, arguments.rounds, Path(folder)))
        print(json.dumps({strategy: found[strategy]}, indent=2), flush=True)
    arguments.results.write_text(json.dumps({"saves": found, "machine": machine()}, indent=2) + "\n")


if __name__ == "__main__":
    if "LOCAL_RANK" in os.environ:
        rank()
    else:
        main()
