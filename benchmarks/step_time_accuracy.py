"""Compare the modelled step time with published throughputs, row by row: ``python -m benchmarks.step_time_accuracy``.

The rows are in step_time_rows.csv: bf16 with flash attention, and but for the last source full training under FSDP. A
row is modelled as its source describes it. The shares of the peak were fitted to the rows of MosaicML, and what the CPU
needs to launch kernels and to offload to the product's own; the other sources are held out.

- mosaicml: llm-foundry, scripts/train/benchmarking/README.md (MPT models; HBM3 H100, A100 with 1600 Gbit/s a node).
- torchtitan: docs/performance.md and benchmarks/llama3_h100_202412_torchtitan.md, without torch.compile. Its H100 have
  HBM2e and 500 W, so their peak is below the data sheet's. Selective checkpointing, of every second layer or matrix
  product, counts as half: 13B took 13 % longer with it. The network of the A100 nodes is not stated; 200 is assumed.
- shardmake: this product on one H100 with 16 cores, torch 2.11, 27 November 2026 (benchmarks/results/gpu): Llamas of
  0.13, 1.24 and 8 billion weights, 4,096 tokens packed, medians of 8 steps. Other runs used the CPUs beside zero2 and
  the smallest model's zero3.
- deepspeed-3901: issue 3901 of DeepSpeed, seconds per step of Falcon-7B at 4,096 tokens. The micro batch and the
  threads are not stated: two sequences explain the step without offload. One thread a rank is the launchers' default.
  One row offloads weights alone, which no strategy of this product does.
- deepspeed-zenflow: blogs/zenflow-corebinding/README.md of DeepSpeed, milliseconds per step of Qwen2.5 with 64 cores
  bound to each of two ranks. The length is not stated: below 512 tokens launches take longer than the GPU.
- fms-fsdp: README.md (Llama 2, 4,096 tokens, 400 Gbit/s a node; 7B and 13B with hybrid sharding).
"""

import csv
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from shardmake.config.strategies import DEEPSPEED, STRATEGY_SPECS, StrategySpec
from shardmake.core.units import GB, GIB
from shardmake.memory.hardware import Hardware, find_accelerator
from shardmake.memory.model import Model, split
from shardmake.memory.read_config import from_config
from shardmake.memory.scenario import Scenario
from shardmake.plan.step_time import Kernel, step_time

ROWS = Path(__file__).with_name("step_time_rows.csv")
RESULTS = Path(__file__).parent / "results/step_time_accuracy.txt"
GPUS_PER_NODE = 8
FITTED = ("mosaicml", "shardmake", "deepspeed-3901", "deepspeed-zenflow")
OF_SOURCES = {"zero3-offload-parameters": StrategySpec(DEEPSPEED, 3, offload_param="cpu")}
"""Setups of sources for which this product has no strategy."""
TRITON = {"a100": Kernel(0.35, 0.35, 730), "h100": Kernel(0.19, 0.19, 730)}
"""MosaicML's attention kernel, an early FlashAttention in Triton, fitted with the shares."""
MPT = {  # hidden size, layers, heads
    "mpt-1b": (2048, 24, 16),
    "mpt-3b": (2560, 32, 20),
    "mpt-7b": (4096, 32, 32),
    "mpt-13b": (5120, 40, 40),
    "mpt-30b": (7168, 48, 56),
    "mpt-70b": (8192, 80, 64),
}
LLAMA = {  # hidden size, layers, heads, key-value heads, intermediate size, vocabulary
    "llama2-7b": (4096, 32, 32, 32, 11008, 32000),
    "llama2-13b": (5120, 40, 40, 40, 13824, 32000),
    "llama2-34b": (8192, 48, 64, 8, 22016, 32000),
    "llama2-70b": (8192, 80, 64, 8, 28672, 32000),
    "llama3-8b": (4096, 32, 32, 8, 14336, 128256),
    "qwen2.5-1.5b": (1536, 28, 12, 2, 8960, 151936),
    "qwen2.5-3b": (2048, 36, 16, 2, 11008, 151936),
    "falcon-7b": (4544, 32, 71, 1, 12117, 65024),
    "llama-0.1b": (1024, 8, 16, 8, 4096, 4096),
    "llama3-1b": (2048, 16, 32, 8, 8192, 128256),
    "llama3-70b": (8192, 80, 64, 8, 28672, 128256),
}
TIED = ("falcon-7b", "qwen2.5-1.5b", "qwen2.5-3b", "llama-0.1b", "llama3-1b")


def model_of(name: str) -> Model:
    """Return the model; an MPT or Falcon is a Llama whose gated MLP has as many weights as their plain one."""
    if name in MPT:
        hidden, layers, heads = MPT[name]
        groups, inner, vocabulary, tied = heads, 8 * hidden // 3, 50368, True
    else:
        (hidden, layers, heads, groups, inner, vocabulary), tied = LLAMA[name], name in TIED
    return from_config({
        "model_type": "llama", "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": groups, "intermediate_size": inner, "vocab_size": vocabulary,
        "tie_word_embeddings": tied,
    })  # fmt: skip


@patch.dict(STRATEGY_SPECS, OF_SOURCES)
def predict(row: Mapping[str, Any]) -> float:
    """Return the modelled tokens per second and GPU of ``row``."""
    model, gpus = model_of(row["model"]), int(row["gpus"])
    ranks = min(gpus, GPUS_PER_NODE)
    given: Any = {name: int(row[name]) for name in ("micro_batch", "sequence_length", "accumulation")}
    scenario = Scenario(
        model=model, split=split(model, row["method"]), method=row["method"], strategy=row["strategy"],
        gradient_dtype=row["gradient_dtype"] or None, nodes=gpus // ranks, ranks_per_node=ranks, **given,
        attention="flash" if row["attention"] == "triton" else row["attention"],
    )  # fmt: skip
    kernel = TRITON[row["gpu"].partition("-")[0]] if row["attention"] == "triton" else None
    hardware = _hardware(row["gpu"], float(row["inter_node_gbps"]), int(row["cores"]))
    kept, recomputed = (step_time(replace(scenario, checkpointing=all_), hardware, kernel) for all_ in (False, True))
    seconds = kept + float(row["checkpointing"]) * (recomputed - kept)
    return scenario.tokens * scenario.accumulation / seconds


def _hardware(name: str, inter_node: float, cores: int) -> Hardware:
    gpu = find_accelerator(name)
    return Hardware(
        accelerator=gpu, gpu_memory=int(gpu.memory * GIB), host_memory=1 << 40, nvme=None, max_nodes=128,
        processes_per_node=GPUS_PER_NODE, cpus_per_node=cores, intra_node=gpu.link * GB, inter_node=inter_node * GB,
    )  # fmt: skip


def rank_correlation(measured: Sequence[float], modelled: Sequence[float]) -> float:
    """Return Spearman's coefficient; equal values share their mean rank."""
    ranks = ([sum((x < y) + (x == y) / 2 for x in values) for y in values] for values in (measured, modelled))
    return statistics.correlation(*ranks)


def summary(rows: Sequence[Mapping[str, str]], modelled: Sequence[float]) -> list[str]:
    """Return a line for each source and kind of GPU, and one for all held-out rows."""
    groups: dict[str, list[tuple[float, float]]] = {}
    for row, value in zip(rows, modelled, strict=True):
        pair = (float(row["tokens_per_second_per_gpu"]), value)
        groups.setdefault(f"{row['source']}, {row['gpu']}", []).append(pair)
        groups.setdefault(f"{row['source']}, all", []).append(pair)
        if row["source"] not in FITTED:
            groups.setdefault("held out, all", []).append(pair)
    lines = [
        f"{'rows':<24} {'n':>3} {'median ratio':>13} {'min':>5} {'max':>5} {'median error':>13} {'rank corr.':>11}"
    ]
    for name, pairs in sorted(groups.items()):
        ratios = [value / truth for truth, value in pairs]
        error = statistics.median(abs(ratio - 1) for ratio in ratios)
        truth, found = zip(*pairs, strict=True)
        order = f"{rank_correlation(truth, found):.2f}" if len(pairs) > 2 else "-"
        lines.append(
            f"{name:<24} {len(pairs):>3} {statistics.median(ratios):>13.2f} {min(ratios):>5.2f} {max(ratios):>5.2f} "
            f"{error:>12.1%} {order:>11}"
        )
    return lines


def main() -> None:
    """Print and keep the comparison."""
    with ROWS.open() as file:
        rows: list[dict[str, Any]] = list(csv.DictReader(file))
    modelled = [predict(row) for row in rows]
    names = ("source", "model", "strategy", "gpu", "gpus", "tokens", "micro", "measured", "model", "ratio")
    widths = (-14, -11, -13, -10, 5, 7, 5, 9, 7, 5)
    lines = [
        " ".join(f"{name:{'<' if width < 0 else '>'}{abs(width)}}" for name, width in zip(names, widths, strict=True))
    ]
    for row, value in zip(rows, modelled, strict=True):
        truth = float(row["tokens_per_second_per_gpu"])
        lines.append(
            f"{row['source']:<14} {row['model']:<11} {row['strategy']:<13} {row['gpu']:<10} {row['gpus']:>5} "
            f"{row['sequence_length']:>7} {row['micro_batch']:>5} {truth:>9,.0f} {value:>7,.0f} {value / truth:>5.2f}"
        )
    text = "\n".join([*lines, "", *summary(rows, modelled)]) + "\n"
    print(text, end="")
    RESULTS.write_text(text)


if __name__ == "__main__":
    main()
