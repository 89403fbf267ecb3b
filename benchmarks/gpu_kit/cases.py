"""The table of cases in the order of their worth, what repeats a training after it. Nothing else names a case."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from benchmarks.gpu_kit.machine import Machine
from shardmake.doctor.trainings import run_keys

STEPS, WARM_UP = 12, 4
SHAPES: dict[str, dict[str, Any]] = {  # the last two are those of Llama 3.2 and 3.1
    "tiny": {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 6,
             "num_key_value_heads": 2},
    "0.13B": {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8, "num_attention_heads": 16,
              "num_key_value_heads": 8},
    "1.24B": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
              "num_key_value_heads": 8, "vocab_size": 128_256},
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
           "num_key_value_heads": 8, "vocab_size": 128_256, "tie_word_embeddings": False},
}  # fmt: skip
"""Values of the model's configuration that differ from the demo's. CPUs rehearse every case with ``tiny``."""
CPU_LENGTH, CPU_STEPS = 128, 6
COMPILE_SECONDS = 150
CHECKPOINT_STEPS = 5
"""The killed and the stopped training have a checkpoint of this step."""
NO_FSDP = "Shardmake refuses FSDP without a GPU; tests/workflow trains it on CPUs with patches of Accelerate"
NO_QLORA = "Shardmake refuses QLoRA without a GPU; tests/workflow/test_recipes.py trains it on CPUs"
NO_FUSED = "Liger's kernels need Triton and a GPU; tests/fake_cuda has their forward pass"
Ends = Literal["steps", "kill", "memory", "stop"]


@dataclass(frozen=True)
class Case:
    """A training of Shardmake, or another program, that gets the GPU for its turn."""

    name: str
    shape: str = "1.24B"
    keys: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the run that differ from those of `keys_of`."""
    ends: Ends = "steps"
    """``steps``: the last step, without a save. ``kill``: SIGKILL and a second attempt. ``memory``: too little memory
    and the next fallback. ``stop``: a stop file, and a second training with ``resume``."""
    resume: Mapping[str, Any] = field(default_factory=dict)
    """Keys that differ in the training that resumes a stopped one."""
    then: Sequence[str] = ()
    """Stages that follow its end."""
    program: Sequence[str] = ()
    """Instead of a training: a module of this package and its arguments."""
    steps: int = STEPS
    limit: float = 60
    """Seconds at the GPU."""
    gpu_gib: float = 0
    """GPUs with less memory leave it out."""
    not_on_cpu: str = ""
    """Why the rehearsal on a CPU leaves it out; empty if it runs there."""


_NOT_IN_LABEL = (
    "strategy", "loss", "torch_compile", "attention", "gradient_checkpointing", "evaluation", "data", "packing",
    "global_batch_size",
)  # fmt: skip


def _full(strategy: str, **keys: Any) -> Case:
    fsdp = strategy.startswith("fsdp")
    return Case(strategy, keys={"strategy": strategy, **keys}, not_on_cpu=NO_FSDP if fsdp else "")


def _offload(strategy: str) -> Case:
    fsdp = strategy.startswith("fsdp")
    return Case(strategy, keys={"strategy": strategy}, steps=8, limit=75, not_on_cpu=NO_FSDP if fsdp else "")


def _lever(name: str, micro: int = 4, not_on_cpu: str = "", gpu_gib: float = 0, **keys: Any) -> Case:
    batch = {"micro_batch_size": micro, "global_batch_size": 2 * micro}
    limit = COMPILE_SECONDS if keys.get("torch_compile") else 60
    return Case(name, keys={"strategy": "ddp", **batch, **keys}, limit=limit, gpu_gib=gpu_gib, not_on_cpu=not_on_cpu)


def _lora(name: str, strategy: str, loss: str, method: str = "lora", not_on_cpu: str = "") -> Case:
    keys = {"strategy": strategy, "method": method, "loss": loss, "gradient_checkpointing": True}
    return Case(name, "8B", keys, steps=10, limit=90, not_on_cpu=not_on_cpu)


EVALUATION = {"batch_tokens": 2048, "prompts": ["What does os.getcwd do?"], "max_new_tokens": 4}
PREFERENCES = {
    "objective": "dpo", "data": {"train": "inputs/pairs.jsonl"}, "packing": False, "sequence_length": 128,
    "micro_batch_size": 4, "global_batch_size": 8,
}  # fmt: skip
CASES: Sequence[Case] = (
    _full("ddp"),
    Case("bare-trainer", program=("bare", "ddp")),
    _full("zero3"),
    _full("fsdp"),
    _full("zero2"),
    Case("bare-deepspeed", program=("bare", "zero3")),
    _lever("micro-2", 2),
    Case("bare-trainer-2", program=("bare", "micro-2")),
    _lever("chunked-2", 2, loss="chunked"),
    _lever("fused-4", loss="fused", not_on_cpu=NO_FUSED),
    _lever("micro-4", gpu_gib=90),
    Case("bare-trainer-4", program=("bare", "micro-4"), gpu_gib=90),
    _lever("chunked-4", loss="chunked"),
    _lever("compiled-2", 2, torch_compile=True),
    _lever("fused-compiled-4", loss="fused", torch_compile=True, not_on_cpu=NO_FUSED),
    _lever("fused-compiled-8", 8, loss="fused", torch_compile=True, not_on_cpu=NO_FUSED),
    *map(_offload, ("zero2-offload", "zero3-offload", "fsdp-offload")),
    _lora("lora-8b", "ddp", "chunked"),
    Case("bare-trl-8b", "8B", program=("bare_trl", "lora-8b"), limit=90, steps=10),
    _lora("qlora-8b", "ddp", "chunked", "qlora", NO_QLORA),
    _lora("lora-8b-fsdp", "fsdp", "fused", not_on_cpu=NO_FSDP),
    Case("killed", "0.13B", {"strategy": "zero3", "evaluation": EVALUATION}, "kill",
         then=("consolidate", "verify", "evaluate")),
    Case("undisturbed", "0.13B", {"strategy": "zero3"}),
    Case("out-of-memory", keys={"strategy": "ddp", "micro_batch_size": "auto", "global_batch_size": 16,
                                "gradient_checkpointing": "auto"}, ends="memory", steps=6),
    Case("stopped", "0.13B", {"strategy": "zero2", "evaluation": EVALUATION}, "stop", {"strategy": "zero3"},
         then=("consolidate", "verify", "evaluate"), steps=40),
    Case("killed-fsdp", "0.13B", {"strategy": "fsdp"}, "kill", not_on_cpu=NO_FSDP),
    Case("dpo", "0.13B", PREFERENCES | {"strategy": "zero2"}),
    Case("dpo-lora", "0.13B", PREFERENCES | {"strategy": "ddp", "method": "lora"}),
    Case("two-ranks", program=("two_ranks",)),
    Case("attention", program=("attention",)),
    Case("rates", program=("rates",), limit=90),
)  # fmt: skip


def keys_of(case: Case, machine: Machine) -> dict[str, Any]:
    """Return the keys of the run: two passes a step, 4,096 tokens; on a CPU short sequences of the small model."""
    steps = steps_of(case, machine)
    saves = {"every_steps": CHECKPOINT_STEPS if case.ends in ("kill", "stop") else steps, "keep": 1}
    length = {"sequence_length": CPU_LENGTH} if machine.is_cpu else {}
    defaults = {"sequence_length": 4096, "gradient_checkpointing": False, "nodes": 1, "checkpoints": saves}
    model = f"bases/{shape_of(case, machine)}"
    return run_keys(model, "inputs/train.jsonl", steps, 2, **defaults | dict(case.keys) | length)


def shape_of(case: Case, machine: Machine) -> str:
    """Return the name of the model's shape."""
    return "tiny" if machine.is_cpu else case.shape


def steps_of(case: Case, machine: Machine) -> int:
    """Return the steps of the training; one that is stopped or killed needs more than `CHECKPOINT_STEPS`."""
    few = {"kill": 2 * CPU_STEPS, "stop": case.steps}.get(case.ends, CPU_STEPS)
    return min(case.steps, few) if machine.is_cpu else case.steps


def settings_of(case: Case) -> str:
    """Return the settings of a training that change its speed and not its losses, as words."""
    named = {name: case.keys[name] for name in ("loss", "torch_compile") if name in case.keys}
    return ", ".join(f"{name}: {str(value).lower()}" for name, value in named.items())


def label_of(case: Case, machine: Machine) -> str:
    """Return model, batch and steps as words, which trainings share whose losses can be compared.

    The number of steps decides the schedule of the learning rate.
    """
    named = ((name.replace("_", " "), value) for name, value in case.keys.items() if name not in _NOT_IN_LABEL)
    words = (case.shape, *(f"{name} {value}" for name, value in named), f"{steps_of(case, machine)} steps")
    return ", ".join(words)
