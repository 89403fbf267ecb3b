"""Write the tables of ``docs/reference/deepspeed-features.md``: ``python -m tools.deepspeed_page``.

What became of a key and what to do instead is in `shardmake.config.deepspeed_keys`; this module adds the names that
DeepSpeed's tutorials give the features.
"""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from shardmake.config.deepspeed_keys import DEEPSPEED_KEYS, OPTIMIZER_REMOVED, Fate, Use, find_rule

PAGE = Path("docs/reference/deepspeed-features.md")
STATES: dict[Fate, str] = {
    "effective": "alive", "memory": "alive", "numbers": "alive", "ignored": "no effect", "unmergeable": "alive",
    "removed": "gone",
}  # fmt: skip
FEATURES: dict[str, tuple[str, str]] = {
    "ZeRO-1, ZeRO-2, ZeRO-3": ("zero_optimization.stage", "`strategy: zero3`; the plan chooses."),
    "ZeRO-Offload": ("zero_optimization.offload_optimizer.device", "`strategy: zero2-offload` and others"),
    "ZeRO-Infinity": ("zero_optimization.offload_param.nvme_path", "`strategy: zero3-nvme`, with `cluster.nvme_path`"),
    "ZeRO++ hpZ": ("zero_optimization.zero_hpz_partition_size", "`strategy: zero3-hpz`: a second copy in each node."),
    "ZeRO++ qwZ, qgZ": ("zero_optimization.zero_quantized_weights", ""),
    "LoCo": ("zero_optimization.zeropp_loco_param", ""),
    "MiCS": ("zero_optimization.mics_shard_size", "Instead: `strategy: fsdp-hybrid`."),
    "SuperOffload": ("zero_optimization.offload_optimizer.super_offload", ""),
    "ZenFlow": ("zero_optimization.zenflow.topk_ratio", ""),
    "ZeRO-Inference": ("zero_optimization.offload_param.device", "`evaluation.backend: zero3-offload`"),
    "activation checkpointing": ("activation_checkpointing.cpu_checkpointing", "Instead: `gradient_checkpointing`."),
    "3D parallelism: pipeline (`PipelineModule`)": (
        "pipeline.stages", "The model must be rewritten as a list of layers, with a training loop of DeepSpeed's own. "
        "Instead: `nodes`, `tensor_parallel`, `sequence_parallel`.",
    ),
    "tensor parallelism (AutoTP)": ("tensor_parallel.autotp_size", "`tensor_parallel`, with ZeRO-1 or ZeRO-2"),
    "sequence parallelism (Ulysses, ALST)": ("sequence_parallel_size", "Instead: `sequence_parallel`."),
    "expert parallelism (AutoEP)": ("expert_parallel.enabled", ""),
    "MoE layers of DeepSpeed": ("use_data_before_expert_parallelism", "Models of transformers do not have them."),
    "1-bit Adam, 1-bit LAMB, 0/1 Adam": ("optimizer.type", ""),
    "sparse gradients": ("sparse_gradients", ""),
    "NVIDIA Apex": ("amp.enabled", "Instead: `precision`."),
    "autocast by DeepSpeed": ("torch_autocast.enabled", "Instead: `precision`."),
    "DeepCompile": ("compile.deepcompile", "Instead: `torch_compile`."),
    "curriculum (old key)": ("curriculum_learning.enabled", "Instead: `data.order: length`."),
    "data efficiency: curriculum, random-LTD": ("data_efficiency.enabled", "Instead: `data.order: length`."),
    "progressive layer drop": ("progressive_layer_drop.enabled", ""),
    "sparse attention": ("sparse_attention.mode", "Instead: `attention`, `sequence_parallel`."),
    "compression library": ("compression_training.weight_quantization", ""),
    "MoQ": ("quantize_training.enabled", ""),
    "weights quantized at loading": ("weight_quantization.quantized_initialization", "Instead: `method: qlora`."),
    "DeepSpeed-Chat": ("hybrid_engine.enabled", "An engine of another class, which also generates text, for RLHF."),
    "autotuning": ("autotuning.enabled", "It ends the process after the profiled steps. Instead: `shardmake plan`."),
    "elastic training": ("elasticity.enabled", "Instead: `nodes`; the global batch stays the same."),
    "FLOPS profiler": ("flops_profiler.enabled", "The report of a run has FLOPs and MFU."),
    "monitor": ("tensorboard.enabled", "Instead: `report_to`."),
    "Nebula": ("nebula.enabled", "Instead: `checkpoints.asynchronous`."),
    "graph harvesting": ("graph_harvesting", "Instead: `torch_compile`."),
    "universal checkpoints": (
        "checkpoint.load_universal",
        "A run converts by itself when the number of ranks changes; by hand `shardmake reshard CHECKPOINT OUT`.",
    ),
}  # fmt: skip
"""Key of a DeepSpeed file by feature, and what Shardmake has for it if the key's rule does not say so."""
SHORT = {
    "DeepSpeed has removed (it|the 1-bit optimizers) and stops. ": "", "(Nothing replaced it.)? ?Leave it out.": "",
    "The memory estimate does not know this setting, so the plan would be wrong.": "*(memory)*",
    " ?It changes what is trained, and neither the plan nor the card would say so.": " *(result)*",
}  # fmt: skip
"""Sentences of the refusals that the head of the page explains."""
USES: dict[Use, str] = {
    "planned": 'must equal the plan or the run, or be `"auto"`',
    "estimated": "taken; the memory estimate counts it",
    "result": "taken; it can change the result, and receipt and card state it",
    "neutral": "taken; the result is the same",
    "unused": "left out; it has no effect in a file",
}


def page() -> str:
    """Return the page with its generated tables."""
    uses = [(text, _names(use)) for use, text in USES.items()]
    tables = {
        "features": _table(("feature", "key", "state", "what to know"), _features()),
        "keys": _table(("use", "keys"), uses),
    }
    text = PAGE.read_text()
    for name, table in tables.items():
        text = re.sub(rf"(<!-- generated: {name} -->\n).*?(<!-- end -->)", rf"\g<1>{table}\g<2>", text, flags=re.DOTALL)
    return text


def _features() -> Iterator[tuple[str, ...]]:
    rows: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for feature, (key, note) in FEATURES.items():
        rule = find_rule(DEEPSPEED_KEYS, key) or find_rule(DEEPSPEED_KEYS, f"{key}.any")
        assert rule, key
        reason = note or (OPTIMIZER_REMOVED if key == "optimizer.type" else rule.reason)
        for sentence, short in SHORT.items():
            reason = re.sub(sentence, short, reason)
        state = "gone" if key == "optimizer.type" else STATES[rule.fate]
        rows.setdefault((state, reason.strip()), []).append((feature, f"`{key}`"))
    for (state, reason), features in rows.items():
        names, keys = (", ".join(cells) for cells in zip(*features, strict=True))
        yield names, keys, state, reason


def _names(use: Use) -> str:
    """Return the keys of a use, those of one section together."""
    sections: dict[str, list[str]] = {}
    for key, rule in DEEPSPEED_KEYS.items():
        if rule.use == use:
            section, _, last = key.removesuffix(".*").rpartition(".")
            sections.setdefault(section, []).append(f"`{last}`")
    return "; ".join((f"`{name}`: " if name else "") + ", ".join(keys) for name, keys in sections.items())


def _table(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [f"| {' | '.join(line)} |\n" for line in (heads, *rows)]
    return "".join([lines[0], "|---" * len(heads) + "|\n", *lines[1:]])


if __name__ == "__main__":
    PAGE.write_text(page())
