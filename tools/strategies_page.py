"""Write ``docs/reference/strategies.md``, the rendered settings of each strategy."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.published_models import CONFIGS
from shardmake.config.models import STRATEGIES, Strategy
from shardmake.config.settings import SETTINGS
from shardmake.config.strategies import STRATEGY_SPECS
from shardmake.memory.read_config import from_config
from shardmake.render.check import Files
from shardmake.render.stage import render_files
from tests.unit.plans import make_cluster, make_plan, make_run

HEAD = """# Rendered settings of each strategy

The example is an 8B Llama in bf16 on 2 nodes of 8 GPUs with 1 TiB of RAM each; sizes are in elements; "h" is the hidden
size. FSDP is version 2, wraps the model's `_no_split_modules` and saves SHARDED_STATE_DICT. DeepSpeed loads weights in
bf16, DDP and FSDP in fp32. `python -m tools.strategies_page > docs/reference/strategies.md` writes this page.
"""


SAME_FOR_ALL = {
    "`script`": "`program` in training.json; `train_micro_batch_size_per_gpu` and `gradient_accumulation_steps` are "
    '"auto" in deepspeed.json',
    "`precision`": "bf16 or fp16 in deepspeed.json for DeepSpeed, `mixed_precision` in accelerate.yaml for the others, "
    "and in the training arguments",
    "`gradient_dtype`": "`data_types.grad_accum_dtype` and `communication_data_type` in deepspeed.json unless it is "
    "that of `precision`; for FSDP `expected.gradient_dtype` in training.json, from which ranks set `reduce_dtype`",
    "`gradient_checkpointing`": "`fsdp_activation_checkpointing` for FSDP, else `activation_checkpointing` of the "
    "training arguments, non-reentrant",
    "`attention`": "the model's attention kernel: varlen (registered by Shardmake), flash_attention_2, sdpa or eager",
    **{
        f"`{row.key}`": f"`{row.deepspeed[0]}` in deepspeed.json, and the training argument"
        for row in SETTINGS.values()
        if row.is_plain and row.planned is None
    },
    "`torch_compile`": "the training argument; off unless asked for",
    "where the weights are loaded": "`model.on_gpu` in training.json: DDP, ZeRO-1, ZeRO-2 and QLoRA load them to each "
    "rank's GPU (`device_map`); FSDP, ZeRO-3, tensor parallelism and CPU runs to host RAM",
    "`method: lora`, `method: qlora`": "`method` in training.json; the base is loaded in the compute type, for QLoRA "
    "in 4 bits (NF4, stored in the compute type so that FSDP can shard it)",
}


def table() -> str:
    """Return the whole page."""
    same = _section("The same for every strategy", ("key of the run", "what is rendered"), SAME_FOR_ALL.items())
    deepspeed = _section("DeepSpeed and DDP", _DEEPSPEED_COLUMNS, _not_fsdp())
    return "\n".join([HEAD, *deepspeed, *_fsdp_section(), *_tensor_parallel(), *same]).rstrip() + "\n"


_DEEPSPEED_COLUMNS = (
    "strategy", "stage", "reduce bucket (h², on several nodes at least 50,000,000)",
    "prefetch bucket (0.9 h²)", "persistence threshold (10 h)", "sub-group", "optimizer states", "parameters",
    "optimizer",
)  # fmt: skip
_FSDP_COLUMNS = ("strategy", "reshard_after_forward", "mesh (replicas x shards)", "offload_params")


def _not_fsdp() -> list[list[str]]:
    return [_deepspeed_row(strategy) for strategy in STRATEGIES if not STRATEGY_SPECS[strategy].is_fsdp]


def _fsdp_section() -> list[str]:
    rows = [_fsdp_row(strategy) for strategy in STRATEGIES if STRATEGY_SPECS[strategy].is_fsdp]
    return _section("FSDP", _FSDP_COLUMNS, rows)


def _section(title: str, columns: tuple[str, ...], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(line)} |" for line in (columns, *rows)]
    return [f"## {title}", "", lines[0], "|---" * len(columns) + "|", *lines[1:], ""]


def _deepspeed_row(strategy: Strategy) -> list[str]:
    files = _rendered(strategy)
    zero, training = files.deepspeed.get("zero_optimization", {}), files.training
    optimizer = training.optimizer.class_name if training.optimizer else training.arguments["optim"]
    return [
        f"`{strategy}`", _cell(zero, "stage") + _second_shard(zero),
        _cell(zero, "reduce_bucket_size"), _cell(zero, "stage3_prefetch_bucket_size"),
        _cell(zero, "stage3_param_persistence_threshold"), _cell(zero, "sub_group_size"),
        _place(zero, "offload_optimizer"), _place(zero, "offload_param"), optimizer.rpartition(".")[2],
    ]  # fmt: skip


def _second_shard(zero: Mapping[str, Any]) -> str:
    ranks = zero.get("zero_hpz_partition_size")
    return f", hpz {ranks}" if ranks else ""


def _fsdp_row(strategy: Strategy) -> list[str]:
    files = _rendered(strategy)
    settings = files.accelerate["fsdp_config"]
    mesh = files.accelerate.get("parallelism_config", {})
    replicas = mesh.get("parallelism_config_dp_replicate_size", 1)
    return [
        f"`{strategy}`",
        str(settings["fsdp_reshard_after_forward"]).lower(),
        f"{replicas} x {files.accelerate['num_processes'] // replicas}",
        str(settings["fsdp_offload_params"]).lower(),
    ]


def _tensor_parallel() -> list[str]:
    columns = ("strategy", "where", "what is rendered", "trains with")
    size = {"tensor_parallel": 4, "gradient_accumulation_steps": 16}
    deepspeed, fsdp = (_rendered(strategy, **size) for strategy in ("zero1", "fsdp"))
    groups = f"`tensor_parallel: {deepspeed.deepspeed['tensor_parallel']}`"
    mesh = ", ".join(f"`{key}: {value}`" for key, value in fsdp.accelerate["parallelism_config"].items())
    rows = [
        ["`zero1`, `zero2`", "deepspeed.json", groups, "Trainer"],
        ["`fsdp`, `fsdp-grad-op`", "accelerate.yaml", mesh, "a script of your own"],
    ]
    return _section("Tensor parallelism, here over 4 ranks", columns, rows)


def _cell(values: dict[str, Any], key: str) -> str:
    return f"{values[key]:,}" if key in values else ""


def _place(zero: dict[str, Any], key: str) -> str:
    """Where it is kept; on NVMe with what is swapped through RAM."""
    if not zero:
        return "GPU"
    section = zero.get(key, {"device": "GPU"})
    if "buffer_size" in section:
        return f"nvme, {section['buffer_count']} buffers of {_cell(section, 'buffer_size')}"
    return f"{section['device']}, {section['buffer_count']} buffers" if "buffer_count" in section else section["device"]


def _rendered(strategy: Strategy, **choice: int) -> Files:
    model = from_config(CONFIGS["Llama-3.1-8B"])
    cluster = make_cluster(
        executor="slurm", accelerator="h100", processes_per_node=8, cpus_per_node=96, memory_gib_per_node=1024.0,
        nvme_path="/nvme",
    )  # fmt: skip
    run = make_run(sequence_length=8192, global_batch_size=64, max_steps=1000, learning_rate=1e-5)
    changes = {"micro_batch_size": 1, "gradient_accumulation_steps": 4, "processes_per_node": 8} | choice
    plan = make_plan(strategy, gradient_checkpointing=True, **changes)
    workload = plan.workload.model_copy(update={"sequence_length": 8192, "attention": "flash"})
    return render_files(plan.model_copy(update={"workload": workload}), run, cluster, model, Path("/plan"))


if __name__ == "__main__":
    sys.stdout.write(table())
