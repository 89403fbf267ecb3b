"""The runs that the published measurements come from, as options of ``shardmake estimate``.

Nothing here is fitted to the rows: an option is what the source's script says, or the default of the libraries at its
date (`benchmarks.old_libraries`).
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from benchmarks.published_models import config_file, deepspeed_file
from shardmake.commands.estimate import EstimateRequest
from shardmake.core.units import MIB

Row = dict[str, str]
OLD: dict[str, Any] = {"transformers_4": True}
Figure = Literal["device", "reserved"]
METAMATH_TOKENS = 650
FMS_OTHER_MEMORY = 1163 * MIB
"""Memory beside PyTorch's that nvidia-smi shows in the newest file of fms-acceleration, and not in the one before it.

Both have torch 2.4.1, CUDA 12.1 and NCCL 2.20.5. Between them 23 pairs of runs have the same tensors (within 1 MiB):
the newer ones show 1,165 MiB more (median), one GPU or two, full or QLoRA, with either micro batch.
"""
DEFAULT_SIZES = {
    **{"reduce_bucket_size": 5 * 10**8, "stage3_prefetch_bucket_size": 5 * 10**7},
    "stage3_param_persistence_threshold": 10**5,
}
"""DeepSpeed's, which apply if a file does not say "auto"."""
MLP = "gate_proj,up_proj,down_proj"
TARGETS = {"q,v": "q_proj,v_proj", "MLP": MLP, "all linears": "all-linear", "all-linear": "all-linear"}


class NotModelledError(Exception):
    """Why a row has no estimate."""


@dataclass(frozen=True)
class PublishedRun:
    """A row as the command's options, which figure of the estimate is comparable, and fields of `OldScenario`."""

    request: EstimateRequest
    figure: Figure
    libraries: Mapping[str, Any] = field(default_factory=dict)
    other_memory: int = 0
    """Bytes that nvidia-smi shows in addition to those of PyTorch, the context and NCCL."""


def _base(row: Row, **options: object) -> EstimateRequest:
    """Return the options that the columns give."""
    try:
        model = config_file(row["model"])
        length, batch = int(row["seq_len"]), int(row["micro_batch"])
    except (KeyError, ValueError) as error:  # a shape that is not listed, a length such as "<=512"
        raise NotModelledError(f"not listed here or not a number: {error}") from None
    request = EstimateRequest(
        model=model, gpus_per_node=int(row["gpus"]), sequence_length=length, micro_batch=batch, strategies=("ddp",),
        gradient_checkpointing=row["grad_ckpt"].startswith("yes"), attention="flash",
    )  # fmt: skip
    return replace(request, **options)  # type: ignore[arg-type]


def peft_metamath(row: Row) -> PublishedRun:
    """PEFT's method_comparison: the loop holds `outputs`; foreach AdamW; padded batches; an L40S.

    The longest batch is not reported. Examples are cut at 1300 characters (data.py), and dense mathematics gives about
    2 characters a token: 650. The documented bound is 768 tokens, at which each figure is about 10 % higher.
    """
    request = _base(
        {**row, "seq_len": str(METAMATH_TOKENS)}, attention="sdpa", weights="bf16", accelerator="l40s",
    )  # fmt: skip
    loop = {"keeps_output": True, "foreach_optimizer": True, "mixed": False}
    if row["strategy"].startswith("full"):
        return PublishedRun(request, "reserved", loop)
    found = re.match(r"LoRA r(\d+) (.+?) single GPU", row["strategy"])
    if not found or found[2] not in TARGETS:
        raise NotModelledError("this kind of adapter")
    adapters = replace(request, method="lora", lora_rank=int(found[1]), lora_targets=TARGETS[found[2]])
    return PublishedRun(adapters, "reserved", loop)


def fsdp_qlora(row: Row) -> PublishedRun:
    """train.py of March 2024: r 64 on all but o_proj, everything bf16, `output` held, mask of ones (no mask).

    It wraps the layers inside FSDP's units for checkpointing (``apply_activation_checkpointing``).
    """
    strategy = "ddp" if "NO_SHARD" in row["strategy"] else "fsdp-offload" if "offload" in row["strategy"] else "fsdp"
    loop = {"keeps_output": True, "mixed": False, "masked": False, "kbit": "plain", "checkpoint": "inside"}
    request = _base(
        row, strategies=(strategy,), attention="sdpa", accelerator="rtx3090",
        method="qlora" if "QLoRA" in row["strategy"] else "lora", lora_rank=64, lora_dropout=0.1,
        lora_targets=f"k_proj,q_proj,v_proj,{MLP}",
    )  # fmt: skip
    return PublishedRun(request, "reserved", {**OLD, **loop, "adapter_weights": "bf16", "loads_on_gpu": False})


def qwen(row: Row) -> PublishedRun:
    """Qwen's finetune.py of 2023: adapters of rank 64 with dropout, its DeepSpeed files, A100s of 80 GB.

    Its own modeling_qwen.py leaves logits in 16 bits, and its DeepSpeed files leave gradients in them. One GPU runs
    under Trainer's autocast; DeepSpeed's bf16 has none.
    """
    kind = row["strategy"]
    if "QLoRA" in kind:
        raise NotModelledError("GPTQ weights")
    if "emb" in kind:
        raise NotModelledError("modules_to_save")
    request = _base(row, accumulation=8, gradient_dtype="bf16")
    if "LoRA" in kind:
        request = replace(request, method="lora", lora_rank=64, lora_dropout=0.05)
    if "ZeRO-3" in kind:  # its "auto" sizes are those of Trainer, as here
        request = replace(request, strategies=("zero3",))
    if "multinode" in kind:  # finetune_lora_ds.sh with ds_config_zero2.json
        sizes = deepspeed_file(stage=2, reduce_bucket_size=200_000_000, overlap_comm=True)
        request = replace(request, nodes=2, gpus_per_node=2, strategies=("zero2",), deepspeed_config=sizes)
    return PublishedRun(request, "device", {**OLD, "own_logits": True})


def peft_docs(row: Row) -> PublishedRun:
    """PEFT's DeepSpeed and FSDP guides of spring 2024: Llama-2-70B, packing, DeepSpeed's default buckets.

    Adapters have rank 8 and dropout 0.1. The launch commands of LoRA say ``--use_reentrant False``, that of QLoRA True.
    The script (``utils.py``) loads a base that is not quantized in fp32.
    """
    libraries = {**OLD, "adapter_weights": "bf16", "checkpoint": "plain", "wide_base": True}
    if "ZeRO-3 LoRA" in row["strategy"] and row["model"] == "Llama-2-70B":
        sizes = deepspeed_file(stage=3, **DEFAULT_SIZES)
        request = _base(row, strategies=("zero3",), accelerator="h100", deepspeed_config=sizes)
    elif "FSDP1 full shard LoRA" in row["strategy"]:
        request = _base(row, strategies=("fsdp",), accelerator="h100")
    elif "FSDP1 QLoRA + CPU offload" in row["strategy"]:  # it leaves out prepare_model_for_kbit_training under FSDP
        request = _base(row, strategies=("fsdp-offload",), accelerator="rtx3090", method="qlora")
        libraries = {**OLD, "adapter_weights": "bf16", "kbit": "plain", "loads_on_gpu": False}
        return PublishedRun(replace(request, lora_rank=8, lora_dropout=0.1), "device", libraries)
    else:
        raise NotModelledError("length, dtype or batch not given")
    return PublishedRun(replace(request, method="lora", lora_rank=8, lora_dropout=0.1), "device", libraries)


def fms_acceleration(row: Row) -> PublishedRun:
    """IBM's fms-acceleration: packed sequences of 4,096, FSDP1 on two GPUs, weights loaded in bf16, A100s of 80 GB.

    Full fine-tunes and LoRA of Mistral and Mixtral have no mixed precision. TRL's SFTTrainer prepares QLoRA: on one GPU
    embedding and head end in 16 bits, and under FSDP nothing is widened, nor in the files with Liger and with newer
    libraries. The runs with Liger have mixed precision, and take the kernel of its loss alone.
    """
    kind, sharded, granite = row["strategy"], row["gpus"] != "1", re.search("granite|liger", row["source_url"])
    quantized = kind.startswith("QLoRA")
    if row["model"] == "Mixtral-8x7B":
        raise NotModelledError("experts one after the other, each in a module of its own (transformers 4)")
    if "fast kernels" in kind and "Liger" not in kind:
        raise NotModelledError("IBM's kernel for the cross entropy")
    new = re.search("update|liger", row["source_url"])
    widened = "plain" if sharded or new or "nothing widened" in kind else "norms"
    mixed = quantized or granite is not None
    newer = "cross_entropy_and_deps" in row["source_url"]  # its requirements file says transformers 4.48.1
    libraries = {**OLD, "transformers_48": newer, "kbit": widened, "mixed": mixed, "plain_layers": True}
    if sharded and quantized:
        libraries["loads_on_gpu"] = False
    libraries["own_logits"] = "santacoder" in row["model"]  # its class of transformers 4 has a loss of its own
    request = _base(
        row,
        strategies=("fsdp" if sharded else "ddp",),
        weights=None if mixed and sharded else "bf16",
        loss="fused" if "Liger" in kind else "plain",
    )
    other = FMS_OTHER_MEMORY if newer else 0
    if kind.startswith("full"):
        return PublishedRun(request, "device", libraries, other)
    adapters = replace(request, method="qlora" if quantized else "lora", lora_rank=16, lora_dropout=0.1)
    return PublishedRun(replace(adapters, lora_targets="q_proj,k_proj,v_proj,o_proj"), "device", libraries, other)


def swift(row: Row) -> PublishedRun:
    """ms-swift: nvidia-smi's figure; its `zero3` has "auto" sizes and no data types, its `zero2` buckets of 2e8."""
    kind = row["strategy"]
    if "Liger" in kind and "padded" not in kind:
        gpu = "h100" if "H20" in row["notes"] else "a100-80gb"
        request = _base(row, strategies=("zero3",), loss="fused", accelerator=gpu, gradient_dtype="bf16")
        return PublishedRun(request, "device")
    if kind == "DeepSpeed ZeRO-2 LoRA r8":
        sizes = deepspeed_file(stage=2, reduce_bucket_size=200_000_000, overlap_comm=False)
        request = _base(row, strategies=("zero2",), method="lora", lora_rank=8, deepspeed_config=sizes)
        return PublishedRun(request, "device")
    if kind == "FSDP2 LoRA r8":
        request = _base(row, strategies=("fsdp",), gradient_checkpointing=True, method="lora", lora_rank=8)
        return PublishedRun(request, "device")
    raise NotModelledError("method or length not modelled")


def own_loop(row: Row) -> PublishedRun:
    """fitcheck and can-i-finetune-this: steps in a loop of their own, which holds the output; a T4, and an RTX 4080.

    Without autocast PEFT's fp32 weights make bitsandbytes compute in fp32. fitcheck's scales are fp32, and it repeats
    keys for the efficient kernel. The other ran on Windows, which has no FlashAttention; the efficient kernel takes no
    grouped heads, so torch's math kernel ran, which is eager attention. Its rows without autocast leave checkpointing
    of QLoRA to PEFT, which passes no arguments: reentrant. The output of its last step stays until the next one.
    """
    kind, fitcheck = row["strategy"], "fitcheck" in row["source_url"]
    quantized, mixed = kind.startswith("QLoRA"), "no autocast" not in kind
    loop: dict[str, Any] = {"keeps_output": True, "masked": False, "mixed": mixed}
    loop |= {"foreach_optimizer": "foreach" in row["optimizer"], "keeps_last_output": not fitcheck}
    if fitcheck:
        loop |= {"single_quantization": True, "repeats_keys": True}
    elif quantized and not mixed:
        loop |= {"checkpoint": "inside"}
    request = _base(
        row, attention=row["attn"] if fitcheck else "eager", accelerator="t4" if fitcheck else "rtx4090",
        gpu_memory=14.6 if fitcheck else 16.0, precision="bf16" if mixed or not quantized else "fp32",
        optimizer="adamw" if "foreach" in row["optimizer"] else "adamw8bit", method="qlora" if quantized else "lora",
        lora_rank=int(kind.split()[1].removeprefix("r")), lora_targets="q_proj,k_proj,v_proj,o_proj",
    )  # fmt: skip
    return PublishedRun(request, "reserved", loop)


def _not_modelled(why: str) -> Callable[[Row], PublishedRun]:
    def refuse(_row: Row) -> PublishedRun:
        raise NotModelledError(why)

    return refuse


RUNS: list[tuple[str, Callable[[Row], PublishedRun]]] = [
    ("huggingface/peft/.*MetaMathQA|method_comparison", peft_metamath), ("huggingface/peft", peft_docs),
    ("fsdp_qlora", fsdp_qlora),
    ("perf_train_gpu_one", _not_modelled("BERT with a classifier: the command takes causal language models only")),
    ("QwenLM/Qwen", qwen), ("ms-swift", swift), ("fitcheck|can-i-finetune", own_loop),
    ("fms-acceleration", fms_acceleration), ("litgpt", _not_modelled("litgpt's own model and loop")),
    ("torchtitan", _not_modelled("torchtitan's own model, op-level checkpointing, torch.compile")),
    ("torchtune", _not_modelled("torchtune's own model and loop")),
    ("pytorch/ao", _not_modelled("torchtitan or torchtune with torchao")),
    ("", _not_modelled("the row does not say enough")),
]  # fmt: skip


RESIDUALS: list[tuple[str, str, str]] = [
    (
        "Qwen-1.8B",
        "LoRA",
        "not explained: 0.6 to 0.8 GiB; Qwen-72B's rows of the same date lack as much, the older 7B's and 14B's do not",
    ),
    (
        "Qwen-1.8B",
        "ZeRO-3",
        "the copy in which DeepSpeed 0.9.5 to 0.11.1 looks for infinities has that size; no source states the version",
    ),
    (
        "Qwen-7B",
        "ZeRO-3",
        "not explained: 13 to 16 MiB a token from 256 to 1,024 tokens; no tensor grows so fast",
    ),
    ("Llama-2-70B", "ZeRO-3", "not explained: 3.4 GiB; the guide says 64 GB, which is 80 % of the GPU"),
    ("gpt_bigcode-santacoder", "full", "not explained: its tensors lack another copy of the 16-bit logits"),
    ("Llama-3-8B", "Liger", "not explained: its tensors are 3 % too high, but 5 GiB of cache lack"),
    (
        "Llama-2-7B",
        "offload",
        "the run filled its GPU: 22.7 of 23.6 GiB were PyTorch's, we leave 1.95 to the rest; 22.9 without limit",
    ),
]
"""Model, a part of the strategy, and what is known about a row that is more than 5 % too low."""


def residual_of(row: Row) -> str:
    """Return what is known about why the estimate of ``row`` is too low."""
    found = (why for model, strategy, why in RESIDUALS if row["model"] == model and strategy in row["strategy"])
    return next(found, "not explained")


def run_of(row: Row) -> PublishedRun:
    """Return the command's options for ``row``.

    Raises:
        NotModelledError: The row is none that the command estimates.
    """
    return next(run for pattern, run in RUNS if re.search(pattern, row["source_url"]))(row)
