"""The choice of `shardmake plan` for 22 questions that a lab asks, with its reason, its advice and what it costs.

    python -m benchmarks.choices [LETTER ...] [--expected]

Each question is a model, a method and a machine. A reader judges the answers: an answer is right if an expert would
sign it. ``--expected`` prints under each answer what an expert said about the question before the answer was known.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.published_models import CONFIGS, llama_like
from shardmake.config.load import parse_section
from shardmake.config.models import Cluster, Run
from shardmake.core.errors import ShardmakeError
from shardmake.plan.stage import describe, plan_offline
from shardmake.run.paths import RunDir

_QWEN3_MOE = {
    "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "head_dim": 128, "num_experts": 128,
    "num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    **CONFIGS,
    "1B": llama_like(2048, 8192, 16, 32, 8, 128256, head_dim=64, tie_word_embeddings=True),
    "7B": CONFIGS["Llama-2-7B"],
    "14B": llama_like(5120, 17408, 40, 40, 8, 151936, model_type="qwen3", head_dim=128),
    "32B": llama_like(5120, 25600, 64, 64, 8, 151936, model_type="qwen3", head_dim=128),
    "30B-A3B": llama_like(2048, 6144, 48, 32, 4, 151936, **_QWEN3_MOE, moe_intermediate_size=768),
    "235B-A22B": llama_like(4096, 12288, 94, 64, 4, 151936, **_QWEN3_MOE, moe_intermediate_size=1536),
    "gemma-27B": llama_like(
        5376, 21504, 62, 32, 16, 262208, model_type="gemma3_text", architectures=["Gemma3ForCausalLM"], head_dim=128,
        sliding_window=1024, query_pre_attn_scalar=168, tie_word_embeddings=True,
    ),
    # Of the other sizes, the defaults of transformers' classes for these types are those of the published models.
    "gpt-oss-120b": {
        "model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "hidden_size": 2880, "num_hidden_layers": 36,
        "vocab_size": 201088,
    },
    "DeepSeek-V3": {
        "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "hidden_size": 7168,
        "num_hidden_layers": 61, "vocab_size": 129280,
    },
}  # fmt: skip


@dataclass(frozen=True)
class Question:
    """A training, the machine for it, and what an expert said about it."""

    model: str
    accelerator: str
    gpus: int
    expected: str
    nodes: int = 1
    """At most."""
    tokens: int = 4096
    batch: int = 64
    run: Mapping[str, Any] = field(default_factory=dict)
    ram: int = 1000

    @property
    def text(self) -> str:
        """The question in a line."""
        more = ", ".join(f"{name}: {value}" for name, value in self.run.items())
        place = f"{self.gpus} x {self.accelerator}" + (f" on each of at most {self.nodes} nodes" * (self.nodes > 1))
        return f"{self.model}, {more or 'method: full'}, {self.batch} x {self.tokens:,} tokens a step, {place}"


LORA, QLORA = {"method": "lora"}, {"method": "qlora"}
QUESTIONS = {
    "a": Question("Llama-3.1-8B", "a100-40gb", 4, "adamw8bit, or loss: fused; at most the optimizer offloaded"),
    "b": Question(
        "Llama-3.1-8B", "rtx4090", 2, "ddp with micro batch 1, or qlora", tokens=2048, batch=32, run=LORA, ram=250
    ),
    "c": Question("Llama-3.1-70B", "h100", 1, "ddp", run=QLORA, ram=250),
    "d": Question("32B", "h100", 8, "zero3 or fsdp with adamw8bit, else the optimizer offloaded", tokens=16384),
    "e": Question("30B-A3B", "h100", 8, "fsdp, with a margin that covers a MoE's error"),
    "f": Question("235B-A22B", "h100", 8, "fsdp on all 8 nodes", nodes=8, batch=128, ram=1800),
    "g": Question("gpt-oss-120b", "h100", 8, "fsdp or zero3 with LoRA of attention", run={**LORA, "packing": False}),
    "h": Question("Llama-3.1-8B", "a100-80gb", 8, "zero2 or fsdp; precomputed reference", run={"objective": "dpo"}),
    "i": Question("Llama-3.2-3B", "v100-32gb", 4, "fsdp or zero in fp16, micro batch 1", tokens=2048, ram=500),
    "j": Question("gemma-27B", "h100", 8, "loss: fused or sequence_parallel", tokens=131072, batch=8, run=LORA),
    "k": Question("Llama-3.1-70B", "a100-80gb", 8, "fsdp without offload", nodes=2, batch=128, run=LORA),
    "l": Question("7B", "rtx4090", 1, "ddp", run=QLORA, ram=125),
    "m": Question("Llama-3.1-8B", "h100", 8, "nothing fits; advice: fused, sequence_parallel", tokens=131072, batch=8),
    "m2": Question(
        "Llama-3.1-8B", "h100", 8, "zero2 or zero3", tokens=131072, batch=8,
        run={"sequence_parallel": 8, "loss": "fused"},
    ),
    "n": Question("Llama-3.1-70B", "h100", 8, "fsdp with checkpointing on 4 nodes", nodes=4, tokens=8192),
    "o": Question("Llama-3.1-8B", "h200", 1, "adamw8bit with checkpointing, no offload", ram=250),
    "p": Question("Llama-3.1-405B", "h100", 8, "16 nodes, or offload with RAM left", nodes=16, batch=128, ram=1800),
    "q": Question("14B", "h100", 8, "zero3 or fsdp", run={"objective": "kto"}),
    "r": Question("Llama-3.1-8B", "h100", 8, "zero2 or fsdp", run={"objective": "reward"}),
    "s": Question("Mixtral-8x7B", "a100-80gb", 8, "fsdp on 2 nodes", nodes=2),
    "t": Question(
        "DeepSeek-V3", "h100", 8, "fsdp or zero3 on enough nodes", nodes=16, batch=128, ram=1800,
        run={**LORA, "lora": {"targets": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]}},
    ),
    "u": Question("1B", "a100-80gb", 8, "ddp or zero1, no checkpointing if it is faster"),
}  # fmt: skip


def answer(question: Question, folder: Path) -> str:
    """Return the plan of ``question`` as a user reads it, or the message that refuses it."""
    (folder / "config.json").write_text(json.dumps(MODELS[question.model]))
    run = {"model": str(folder), "data": {"train": "data.jsonl"}, "sequence_length": question.tokens}
    run |= {"global_batch_size": question.batch, "max_steps": 1000, "learning_rate": 1e-5, **question.run}
    cluster = {
        "executor": "local", "accelerator": question.accelerator, "processes_per_node": question.gpus,
        "max_nodes": question.nodes, "memory_gib_per_node": question.ram,
        "cpus_per_node": 8 * question.gpus, "inter_node_gbps": 400 if question.accelerator == "h100" else 200,
    }  # fmt: skip
    rundir = RunDir(folder / "question")
    try:
        made = plan_offline(
            parse_section(Run, run, "The question"), parse_section(Cluster, cluster, "The cluster"), rundir
        )
    except ShardmakeError as error:
        return f"refused: {error}"
    return describe(made, rundir)


def _ask(letter: str, *, expected: bool) -> None:
    """Print a question with its answer, in a process of its own, so that its time and memory are its own."""
    question, started = QUESTIONS[letter], time.perf_counter()
    print(f"{letter}. {question.text}", flush=True)
    child = os.fork()
    if not child:
        with tempfile.TemporaryDirectory() as folder:
            print(answer(question, Path(folder)), flush=True)
        os._exit(0)
    _, status, used = os.wait4(child, 0)
    cpu = used.ru_utime + used.ru_stime
    if expected:
        print(f"  an expert: {question.expected}")
    print(
        f"  [{time.perf_counter() - started:.1f} s, {cpu:.1f} s of CPU, {used.ru_maxrss / 1024:.0f} MiB"
        f"{f', status {status}' if status else ''}]\n",
        flush=True,
    )


def main() -> int:
    """Print the questions named on the command line, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("letters", nargs="*", choices=[*QUESTIONS, []], default=[])
    parser.add_argument("--expected", action="store_true")
    options = parser.parse_args()
    for letter in options.letters or QUESTIONS:
        _ask(letter, expected=options.expected)
    return 0


if __name__ == "__main__":
    sys.exit(main())
