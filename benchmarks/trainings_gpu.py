"""Planned against measured memory and step time of real trainings on the GPUs of this machine.

python -m benchmarks.trainings_gpu [--only WORD ...] [--jobs N] [--output FILE]

Every case goes through the stages as a user's run does: `shardmake data`, `plan`, `render`, `train`. The models are
Llamas with random weights and a vocabulary of 128,256. With --jobs above 1 several cases share the GPUs: memory
stays that of each, but step times count only with one job.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.machine import machine as this_machine
from shardmake.core.units import GIB
from shardmake.demo import make_preferences
from shardmake.run.paths import RunDir
from tests.gpu.checks import read_training
from tests.gpu.machine import Machine, find_machine
from tests.gpu.results import Trained
from tests.workflow.checkout import Checkout

RESULTS = Path(__file__).parent / "results/trainings_gpu.json"
STEPS, WARM_UP = 10, 4
VOCABULARY = 128_256
SHAPES: dict[str, dict[str, int]] = {  # the last two are those of Llama 3.2 and 3.1
    "0.3B": {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 16, "num_attention_heads": 16},
    "1B": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32},
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
}
KEY_VALUE_HEADS = 8
LAST_LINES = 30
"""Lines of its output that stand for a case that failed."""


@dataclass(frozen=True)
class Case:
    """A training: the model's shape and the keys of the run that differ from the defaults."""

    shape: str
    """Name in `SHAPES`."""
    changes: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Return the shape and the changed values."""
        return " ".join([self.shape, *(_words(key, value) for key, value in self.changes.items())])


def _words(key: str, value: Any) -> str:
    return str(value) if key in ("strategy", "method", "objective") else f"{key}={value}"


def _case(shape: str, strategy: str, **changes: Any) -> Case:
    return Case(shape, {"strategy": strategy, **changes})


RECOMPUTE: dict[str, Any] = {"gradient_checkpointing": True}
CASES: Sequence[Case] = (
    *(_case("1B", strategy) for strategy in ("ddp", "zero1", "zero2", "zero3", "fsdp")),
    *(_case("0.3B", strategy, **RECOMPUTE) for strategy in ("ddp", "zero3-offload", "fsdp-offload")),
    _case("0.3B", "ddp", attention="sdpa"),
    _case("0.3B", "ddp", attention="eager", sequence_length=1024),
    _case("0.3B", "ddp", loss="fused"),
    _case("0.3B", "zero2", loss="fused", **RECOMPUTE),
    _case("0.3B", "ddp", optimizer="adamw8bit"),
    _case("0.3B", "ddp", torch_compile=True),
    _case("0.3B", "fsdp", torch_compile=True),
    _case("0.3B", "ddp", activation_offload=True, **RECOMPUTE),
    _case("0.3B", "zero2", precision="fp16"),
    _case("0.3B", "ddp", precision="fp32", attention="sdpa", sequence_length=2048),
    *(_case("0.3B", strategy, objective="dpo") for strategy in ("ddp", "zero2", "zero3", "fsdp")),
    _case("0.3B", "ddp", objective="dpo", method="lora"),
    _case("0.3B", "ddp", objective="kto"),
    _case("0.3B", "ddp", objective="reward"),
    *(_case("8B", strategy, method="lora", **RECOMPUTE) for strategy in ("ddp", "zero2", "zero3", "fsdp")),
    _case("8B", "ddp", method="lora", sequence_length=8192, **RECOMPUTE),
    *(_case("8B", strategy, method="qlora", **RECOMPUTE) for strategy in ("ddp", "zero2", "fsdp")),
)


def make_bases(shapes: set[str], folder: Path) -> None:
    """Write the data and the models; a process of its own frees the GPU, which trainings expect to be unused."""
    make_preferences(folder / "inputs")
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as maker:
        for shape in sorted(shapes):
            maker.submit(make_base, shape, folder / "inputs", folder / f"base-{shape}").result()


def make_base(shape: str, inputs: Path, folder: Path, device: str = "cuda") -> None:
    """Write a Llama of ``shape`` with random weights in bf16, made on ``device``, and the demo's tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    shutil.copytree(inputs / "base", folder)
    config, sizes = AutoConfig.from_pretrained(folder), SHAPES[shape]
    config.update(
        {
            **sizes,
            "num_key_value_heads": KEY_VALUE_HEADS,
            "head_dim": sizes["hidden_size"] // sizes["num_attention_heads"],
            "vocab_size": VOCABULARY,
            "max_position_embeddings": 16384,
            "tie_word_embeddings": shape != "8B",
        }
    )
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)


def keys_of(case: Case, folder: Path, ranks: int) -> dict[str, Any]:
    """Return the keys of the run: two passes a step."""
    pairs = case.changes.get("objective", "sft") != "sft"
    micro = 4 if pairs else 1
    return {
        "model": str(folder / f"base-{case.shape}"),
        "data": {"train": f"resources/demo/{'pairs' if pairs else 'train'}.jsonl"},
        "packing": not pairs,
        "sequence_length": 128 if pairs else 4096,
        "micro_batch_size": micro,
        "global_batch_size": 2 * micro * ranks,
        "max_steps": STEPS,
        "gradient_checkpointing": False,
        "checkpoints": {"every_steps": STEPS},
        "learning_rate": 1e-5,
        "dtype": None,
        "evaluation": None,
        "nodes": 1,
        "push": None,
        **case.changes,
    }


def train(case: Case, folder: Path, machine: Machine) -> Trained:
    """Take a case through the stages to its last step, in a copy of the repository that is removed."""
    with tempfile.TemporaryDirectory(dir=folder) as root:
        copy = Checkout.create(Path(root) / "checkout", folder / "inputs")
        copy.configure(machine.cluster(), **keys_of(case, folder, machine.ranks))
        for stage in ("data", "plan", "render"):
            copy("shardmake", stage, "demo")
        train_to_last_step(copy)
        return read_training(RunDir(copy.run), WARM_UP)


def train_to_last_step(copy: Checkout) -> None:
    """Train without the save after the last step, which takes longer than the steps.

    Raises:
        AssertionError: The training ended before its last step.
    """
    log = copy.root / "train.log"
    process = copy.start("shardmake", "train", "demo", log=log)
    while process.poll() is None and len(copy.losses()) < STEPS:
        time.sleep(0.2)
    copy("shardmake", "cancel", "demo", check=False)
    process.wait()
    if len(copy.losses()) < STEPS:
        ranks = sorted(copy.run.glob("train/attempts/*/node-*.log"))
        print(*(path.read_text()[-3000:] for path in [*ranks[-1:], log]), sep="\n")
        raise AssertionError(f"the training ended with exit status {process.returncode}")


def figures(trained: Trained) -> dict[str, Any]:
    """Return what a result keeps: GiB and seconds, planned over measured."""
    pairs = {
        "allocated": (trained.planned_allocated, trained.allocated),
        "reserved": (trained.planned_reserved, trained.reserved),
    }
    found: dict[str, Any] = {"losses": list(trained.losses.values())}
    for name, (planned, measured) in pairs.items():
        assert measured is not None, "a training without a GPU"
        found[name] = {
            "planned_gib": round(planned / GIB, 3),
            "measured_gib": round(measured / GIB, 3),
            "error": round(planned / measured - 1, 4),
        }
    seconds = {"planned": trained.planned_step_seconds, "measured": trained.step_seconds, "ratio": trained.step_ratio}
    return found | {"step_seconds": {name: round(value, 4) for name, value in seconds.items()}}


def run(case: Case, folder: Path) -> dict[str, Any]:
    """Run a case in a process of its own; return its figures, or the end of its output if it failed."""
    begun = time.time()
    command = [sys.executable, "-m", "benchmarks.trainings_gpu", "--folder", str(folder), "--case"]
    done = subprocess.run([*command, json.dumps(asdict(case))], capture_output=True, text=True, check=False)
    result: dict[str, Any] = {"case": case.name, "seconds": round(time.time() - begun, 1)}
    if done.returncode:
        result["failed"] = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()][-LAST_LINES:]
    else:
        result |= json.loads(done.stdout.splitlines()[-1])
    print(line_of(result), flush=True)
    return result


def line_of(result: dict[str, Any]) -> str:
    """Return a result as a line, or as the last lines of a case that failed."""
    if "failed" in result:
        return "\n    ".join([f"{result['case']}: FAILED after {result['seconds']} s", *result["failed"]])
    memory = (
        f"{name} {found['planned_gib']:.2f} / {found['measured_gib']:.2f} GiB {found['error']:+.1%}"
        for name in ("allocated", "reserved")
        for found in [result[name]]
    )
    step = result["step_seconds"]
    return "  ".join([f"{result['case']}:", *memory, f"step {step['planned']:.3f} / {step['measured']:.3f} s"])


def summary(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the errors over the cases that ended."""
    ended = [result for result in results if "failed" not in result]
    found: dict[str, Any] = {"cases": len(results), "failed": len(results) - len(ended)}
    for name in ("allocated", "reserved"):
        errors = [result[name]["error"] for result in ended]
        if errors:
            found[name] = {"median": median(map(abs, errors)), "from": min(errors), "to": max(errors)}
    return found


def main() -> int:
    """Prepare the models, run the cases and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[""], help="Run the cases whose name has one of these words.")
    parser.add_argument("--jobs", type=int, default=1, help="Cases at once.")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--folder", type=Path, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--case", default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    machine = find_machine()
    if options.case:
        print(json.dumps(figures(train(Case(**json.loads(options.case)), options.folder, machine))))
        return 0
    chosen = [case for case in CASES if any(word in case.name for word in options.only)]
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(options.jobs) as pool:
        make_bases({case.shape for case in chosen}, Path(name))
        for result in pool.map(partial(run, folder=Path(name)), chosen):
            results.append(result)
            found = {"gpu": asdict(machine), "jobs": options.jobs, "summary": summary(results), "cases": results}
            options.output.write_text(json.dumps(found | {"machine": this_machine()}, indent=1) + "\n")
    print(json.dumps(summary(results)))
    return 1 if any("failed" in result for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
