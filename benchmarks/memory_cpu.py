"""States and peak RSS of DeepSpeed over two real CPU processes, measured beside the estimate.

    python -m benchmarks.memory_cpu [--strategy NAME ...]

Each rank trains a Llama of 134 M parameters in fp32 for three steps with the rendered settings, then counts the bytes
of every live tensor's storage and reads its peak RSS from /proc. ``zero1:2`` is zero1 with ``tensor_parallel: 2``.
"""

import argparse
import gc
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from shardmake.config.models import Cluster, Strategy
from shardmake.core.units import MIB
from shardmake.memory import host, states
from shardmake.memory.buckets import read_buckets, zero_optimization
from shardmake.memory.estimate import simulate, step_of
from shardmake.memory.families import part_of
from shardmake.memory.model import split
from shardmake.memory.read_config import from_config
from shardmake.memory.scenario import Scenario
from shardmake.run.plan import Choice

RANKS, BATCH, LENGTH, STEPS = 2, 1, 128, 3
CONFIG = {
    "model_type": "llama", "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12,
    "num_attention_heads": 12, "num_key_value_heads": 12, "vocab_size": 32000, "tie_word_embeddings": False,
}  # fmt: skip
SETUPS = ("zero1", "zero2", "zero3", "zero2-offload", "zero3-offload-optimizer", "zero3-offload", "zero1:2", "zero2:2")
CLUSTER = Cluster(executor="local", processes_per_node=RANKS, cpus_per_node=2, memory_gib_per_node=16.0)


def choice(strategy: Strategy) -> Choice:
    return Choice(
        strategy=strategy, gradient_checkpointing=False, micro_batch_size=BATCH, gradient_accumulation_steps=1, nodes=1,
        processes_per_node=RANKS, precision="fp32",
    )  # fmt: skip


def zero_section(strategy: Strategy) -> dict[str, Any]:
    return zero_optimization(choice(strategy), from_config(CONFIG), CLUSTER, "")


# ---------------------------------------------------------------------------------------------------------------------
# One rank


def rank_main(strategy: Strategy, shared: int, output: Path) -> None:
    import deepspeed
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    section = zero_section(strategy)
    config = AutoConfig.for_model(**CONFIG)
    baseline = peak_rss()
    if section["stage"] == 3:
        with deepspeed.zero.Init(config_dict_or_path=deepspeed_file(section)):
            model = AutoModelForCausalLM.from_config(config)
    else:
        model = AutoModelForCausalLM.from_config(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=deepspeed_file(section, shared))
    torch.manual_seed(0)  # tensor-parallel ranks see the same rows
    tokens = torch.randint(0, CONFIG["vocab_size"], (BATCH, LENGTH))  # type: ignore[call-overload]
    for _ in range(STEPS):
        engine.backward(engine(input_ids=tokens, labels=tokens, use_cache=False).loss)
        engine.step()
    gc.collect()
    found = {"tensors": tensor_bytes(), "rss": peak_rss(), "baseline": baseline}
    output.write_text(json.dumps(found))


def deepspeed_file(section: dict[str, Any], shared: int = 1) -> dict[str, Any]:
    return {
        **({"tensor_parallel": {"autotp_size": shared}} if shared > 1 else {}), "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": 1, "zero_optimization": section, "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }  # fmt: skip


def tensor_bytes() -> int:
    """Bytes of the distinct storages of all live tensors."""
    import torch

    sizes: dict[int, int] = {}
    for thing in gc.get_objects():
        if isinstance(thing, torch.Tensor) and thing.device.type == "cpu":
            for tensor in (thing, thing.grad) if thing.is_leaf else (thing,):
                if tensor is not None:
                    storage = tensor.untyped_storage()
                    sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def peak_rss() -> int:
    text = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", text).group(1)) << 10  # type: ignore[union-attr]


# ---------------------------------------------------------------------------------------------------------------------
# Both, and the comparison


def measure(setup: str) -> dict[str, int]:
    """Rank 0's figures."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as errors, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
        probe.close()
        outputs = [Path(folder) / f"{rank}.json" for rank in range(RANKS)]
        command = [sys.executable, __file__, "--rank", setup]
        processes = [
            subprocess.Popen(
                [*command, str(output)], env=environment(rank, port), stdout=subprocess.DEVNULL, stderr=errors
            )
            for rank, output in enumerate(outputs)
        ]
        codes = [process.wait() for process in processes]
        if any(codes):
            errors.seek(0)
            raise SystemExit(f"{setup}: ranks ended with {codes}\n{errors.read()}")
        return json.loads(outputs[0].read_text())


def environment(rank: int, port: str) -> dict[str, str]:
    return {
        **os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1",
    }  # fmt: skip


def parse(setup: str) -> tuple[Strategy, int]:
    """Return the strategy and the ranks that share each matrix."""
    strategy, _, shared = setup.partition(":")
    return strategy, int(shared or 1)


def predict(strategy: Strategy, shared: int) -> dict[str, int]:
    """Tensor bytes after a step, and the peak over the whole run."""
    model = from_config(CONFIG)
    if shared > 1:
        model = part_of(model, shared)
    scenario = Scenario(
        model=model, split=split(model, "full"), strategy=strategy, nodes=1, ranks_per_node=RANKS, micro_batch=BATCH,
        sequence_length=LENGTH, tensor_parallel=shared, attention="sdpa", precision="fp32", on_cpu=True,
    )  # fmt: skip
    buckets = read_buckets(zero_section(strategy), model.hidden_size)
    offloaded = host.offloaded(scenario, buckets)
    timeline = simulate(scenario, buckets, step_of(scenario))
    return {
        "tensors": sum(states.resident(scenario, buckets).values()) + sum(offloaded.values()),
        "rss": timeline.resident() + sum(offloaded.values()) + host.CPU_PROCESS,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strategy", nargs="*", default=SETUPS)
    parser.add_argument("--rank", nargs=2)
    options = parser.parse_args()
    if options.rank:
        rank_main(*parse(options.rank[0]), Path(options.rank[1]))
        return 0
    print(
        f"{'strategy':26} {'tensors MiB':>12} {'estimate':>9} {'error':>8} {'peak RSS':>9} {'estimate':>9} {'error':>8}"
    )
    for setup in options.strategy:
        found, said = measure(setup), predict(*parse(setup))
        rss = said["rss"]
        print(
            f"{setup:26} {found['tensors'] / MIB:12.1f} {said['tensors'] / MIB:9.1f} "
            f"{100 * (said['tensors'] / found['tensors'] - 1):+7.2f}% "
            f"{found['rss'] / MIB:9.0f} {rss / MIB:9.0f} {100 * (rss / found['rss'] - 1):+7.1f}%   "
            f"(baseline {found['baseline'] / MIB:.0f})"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
