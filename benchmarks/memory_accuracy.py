"""Compare the estimates, and the formulas that people use today, with published measurements, row by row.

    python -m benchmarks.memory_accuracy [--csv FILE]

Each row's source says what was run; `CASES` turns it into a scenario. Nothing here is fitted to the rows: a setting is
what the source's script says, or the library's default at its date.
"""

import argparse
import csv
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from benchmarks.deepspeed_table import table
from shardmake.config.models import Method
from shardmake.core.units import GIB
from shardmake.memory import states
from shardmake.memory.buckets import Buckets
from shardmake.memory.decoder import micro_step
from shardmake.memory.estimate import gpu_memory
from shardmake.memory.host import PROCESS
from shardmake.memory.model import Model, split
from shardmake.memory.read_config import from_config
from shardmake.memory.scenario import LibraryBehavior, Scenario

TRUTH = Path(__file__).parent / "data" / "memory_truth.csv"
Row = dict[str, str]
METAMATH_TOKENS = 650
T0_3B = (2_783_959_040, 65_798_144)


def llama(hidden: int, inner: int, layers: int, heads: int, groups: int, vocabulary: int, **more: object) -> Model:
    sizes = {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "vocab_size": vocabulary,
    }
    return from_config({**sizes, **more})


def models() -> dict[str, Callable[[], Model]]:
    """Shapes by the names in the file. Qwen 1 is a Qwen 2 without grouped heads (its c_attn is q, k and v in one)."""
    qwen = {"model_type": "qwen2"}
    return {
        "Llama-2-7B": lambda: llama(4096, 11008, 32, 32, 32, 32000),
        "Llama-2-13B": lambda: llama(5120, 13824, 40, 40, 40, 32000),
        "Llama-2-70B": lambda: llama(8192, 28672, 80, 64, 8, 32000),
        "Llama-3-8B": lambda: llama(4096, 14336, 32, 32, 8, 128256),
        "Llama-3.1-8B": lambda: llama(4096, 14336, 32, 32, 8, 128256),
        "Llama-3.1-8B-Instruct": lambda: llama(4096, 14336, 32, 32, 8, 128256),
        "Llama-3.1-70B": lambda: llama(8192, 28672, 80, 64, 8, 128256),
        "Llama-3.1-405B": lambda: llama(16384, 53248, 126, 128, 8, 128256),
        "meta-llama/Llama-3.2-3B": lambda: llama(3072, 8192, 28, 24, 8, 128256, head_dim=128, tie_word_embeddings=True),
        "Llama-3.2-3B": lambda: llama(3072, 8192, 28, 24, 8, 128256, head_dim=128, tie_word_embeddings=True),
        "Mistral-7B-v0.3": lambda: llama(4096, 14336, 32, 32, 8, 32768, model_type="mistral"),
        "Mistral-7B": lambda: llama(4096, 14336, 32, 32, 8, 32000, model_type="mistral"),
        "Yi-34B": lambda: llama(7168, 20480, 60, 56, 8, 64000),
        "SmolLM2-360M": lambda: llama(960, 2560, 32, 15, 5, 49152, tie_word_embeddings=True),
        "gemma-1.1-2b-it": lambda: llama(2048, 16384, 18, 8, 1, 256000, model_type="gemma", head_dim=256),
        "Qwen3-4B": lambda: llama(2560, 9728, 36, 32, 8, 151936, model_type="qwen3", tie_word_embeddings=True),
        "DeepSeek-R1-0528-Qwen3-8B": lambda: llama(4096, 12288, 36, 32, 8, 151936, model_type="qwen3"),
        "Qwen2.5-7B": lambda: llama(3584, 18944, 28, 28, 4, 152064, **qwen),
        "Qwen2.5-7B-Instruct": lambda: llama(3584, 18944, 28, 28, 4, 152064, **qwen),
        "Qwen2.5-32B": lambda: llama(5120, 27648, 64, 40, 8, 152064, **qwen),
        "Qwen-1.8B": lambda: llama(2048, 5504, 24, 16, 16, 151936, **qwen),
        "Qwen-7B": lambda: llama(4096, 11008, 32, 32, 32, 151936, **qwen),
        "Qwen-14B": lambda: llama(5120, 13696, 40, 40, 40, 152064, **qwen),
        "Qwen-72B": lambda: llama(8192, 24576, 80, 64, 64, 152064, **qwen),
        "bert-large-uncased (SeqCls)": lambda: from_config(
            {
                "model_type": "bert",
                "architectures": ["BertForSequenceClassification"],
                "hidden_size": 1024,
                "intermediate_size": 4096,
                "num_hidden_layers": 24,
                "num_attention_heads": 16,
                "vocab_size": 30522,
            }
        ),
    }


@dataclass(frozen=True)
class Case:
    """One row as the estimator sees it, or why it does not."""

    estimate: float | None
    figure: str
    missing: str = ""


@dataclass(frozen=True)
class Result:
    """A row with its estimates in GiB."""

    row: Row
    case: Case
    others: dict[str, float]

    @property
    def grade(self) -> str:
        """How well the source specifies the row."""
        return re.match(r"[A-E]-?", self.row["notes"]).group()  # type: ignore[union-attr]

    @property
    def measured(self) -> float:
        """GiB. Qwen's "G" are 10^9: its 81.0 on an 80 GiB card could not be GiB."""
        value = float(self.row["measured_gib"])
        return value * 1e9 / GIB if "QwenLM" in self.row["source_url"] else value

    @property
    def error(self) -> float:
        """Relative error of the estimate, in percent."""
        assert self.case.estimate is not None
        return 100 * (self.case.estimate / self.measured - 1)


# ---------------------------------------------------------------------------------------------------------------------
# What the rows' sources ran

OLD = LibraryBehavior(
    returns_wide_logits=True,
    copies_shifted_logits=True,
    expands_keys=True,
    copies_attention=True,
    foreach_optimizer=True,
)
BEFORE_TORCH_2 = LibraryBehavior(nccl=False, keeps_gradients=True, softmax_saves_input=True)


def base(row: Row, **more: object) -> Scenario:
    """A scenario with what the columns say."""
    model = models()[row["model"]]()
    values = {
        "model": model,
        "split": split(model, "full"),
        "strategy": "ddp",
        "nodes": 1,
        "ranks_per_node": int(row["gpus"]),
        "micro_batch": int(row["micro_batch"]),
        "sequence_length": int(row["seq_len"]),
        "checkpointing": row["grad_ckpt"].startswith("yes"),
        "attention": "eager" if row["attn"] == "eager" else "flash",
        "precision": "bf16",
    }
    return Scenario(**{**values, **more})  # type: ignore[arg-type]


def with_lora(scenario: Scenario, rank: int, targets: str | tuple[str, ...], method: Method = "lora") -> Scenario:
    return replace(
        scenario,
        method=method,
        split=split(scenario.model, method, rank, targets),
        lora_rank=rank,
        lora_targets=targets,
    )


MLP = ("gate_proj", "up_proj", "down_proj")
TARGETS: dict[str, str | tuple[str, ...]] = {
    "q,v": ("q_proj", "v_proj"),
    "MLP": MLP,
    "all linears": "all-linear",
    "all-linear": "all-linear",
}


def peft_metamath(row: Row) -> Case:
    """PEFT's method_comparison: the loop holds `outputs`; foreach AdamW.

    The longest batch is not reported. Examples are cut at 1300 characters (data.py), and dense mathematics gives about
    2 characters a token: 650. The documented bound is 768 tokens, at which each figure is about 10 % higher.
    """
    behavior = LibraryBehavior(keeps_output=True, foreach_optimizer=True, autocast=False, nccl=False)
    row = {**row, "seq_len": str(METAMATH_TOKENS)}
    scenario = base(row, attention="sdpa", masked=True, weights="bf16", behavior=behavior)
    if row["strategy"].startswith("full"):
        return reserved(scenario)
    found = re.match(r"LoRA r(\d+) (.+?) single GPU", row["strategy"])
    if not found or found[2] not in TARGETS:
        return Case(None, "reserved", "this kind of adapter")
    return reserved(with_lora(scenario, int(found[1]), TARGETS[found[2]]))


def fsdp_qlora(row: Row) -> Case:
    """train.py of March 2024: r 64 on all but o_proj, everything bf16, `output` held, mask of ones (no mask)."""
    strategy = "ddp" if "NO_SHARD" in row["strategy"] else "fsdp-offload" if "offload" in row["strategy"] else "fsdp"
    behavior = replace(OLD, keeps_output=True, autocast=False, widens_frozen=False)
    scenario = base(row, strategy=strategy, weights="bf16", adapter_weights="bf16", fsdp_version=1, behavior=behavior)
    targets = ("k_proj", "q_proj", "v_proj", *MLP[1:], MLP[0])
    method: Method = "qlora" if "QLoRA" in row["strategy"] else "lora"
    return reserved(with_lora(scenario, 64, targets, method), capacity=int(23.6 * GIB))


def bert(row: Row) -> Case:
    """perf_train_gpu_one of 2022: fp32 weights, fp16 under autocast, its own AdamW; the context is in the notes."""
    context = int(re.search(r"includes (\d+) MiB", row["notes"]).group(1)) << 20  # type: ignore[union-attr]
    half = "fp16" in row["dtype"]
    optimizer = {"adafactor": "adafactor", "bnb Adam8bit": "adamw8bit"}.get(row["optimizer"], "adamw")
    accumulation = int(re.search(r"grad_accum=(\d+)", row["notes"]).group(1))  # type: ignore[union-attr]
    precision = "fp16" if half else "fp32"
    scenario = base(row, precision=precision, optimizer=optimizer, accumulation=accumulation, behavior=BEFORE_TORCH_2)
    figures = gpu_memory(scenario, Buckets())
    return Case((figures.reserved + context) / GIB, "device")


def qwen(row: Row) -> Case:
    """Qwen's finetune.py of 2023: bf16 weights, adapters of rank 64, its DeepSpeed files.

    Its own modeling_qwen.py leaves logits in bf16 (no upcast) and copies the shifted ones. One GPU runs under Trainer's
    autocast; DeepSpeed's bf16 has none. Adapters made by PEFT up to 0.6 stay in fp32 (``update_layer`` moves them to
    the weight's device, not to its type); DeepSpeed casts them with the model.
    """
    behavior = LibraryBehavior(keeps_logits_narrow=True, copies_shifted_logits=True, foreach_optimizer=True)
    scenario = base(row, weights="bf16", behavior=behavior, accumulation=8)
    h = scenario.model.hidden_size
    buckets = Buckets(h * h, 500_000_000, int(0.9 * h * h), 10 * h)
    kind = row["strategy"]
    if "QLoRA" in kind:
        return Case(None, "device", "GPTQ weights")
    if "emb" in kind:
        return Case(None, "device", "modules_to_save")
    if "ZeRO-3" in kind:
        scenario = replace(scenario, strategy="zero3")
    if "LoRA" in kind:
        scenario = replace(with_lora(scenario, 64, "all-linear"), lora_dropout=0.05)
    if "multinode" in kind:
        scenario = replace(scenario, nodes=2, ranks_per_node=2, strategy="zero2")
        buckets = Buckets(200_000_000, 200_000_000)  # finetune_lora_ds.sh with ds_config_zero2.json
    return device(scenario, buckets)


def peft_docs(row: Row) -> Case:
    """PEFT's DeepSpeed and FSDP guides: Llama-2-70B, r 8, packing, default buckets."""
    if "ZeRO-3 LoRA" in row["strategy"] and row["model"] == "Llama-2-70B":
        scenario = with_lora(base(row, strategy="zero3", behavior=OLD), 8, "all-linear")
        return device(scenario, Buckets())
    if "FSDP1 full shard LoRA" in row["strategy"]:
        return device(with_lora(base(row, strategy="fsdp", behavior=OLD), 8, "all-linear"), Buckets())
    if "FSDP1 QLoRA + CPU offload" in row["strategy"]:
        behavior = replace(OLD, widens_frozen=False)  # its code leaves out prepare_model_for_kbit_training under FSDP
        scenario = base(row, strategy="fsdp-offload", behavior=behavior, adapter_weights="bf16")
        return device(with_lora(scenario, 8, "all-linear", "qlora"), Buckets())
    return Case(None, "device", "length, dtype or batch not given")


def swift(row: Row) -> Case:
    """ms-swift's scripts say what nvidia-smi showed."""
    if "Liger" in row["strategy"] and "padded" not in row["strategy"]:
        scenario = base(row, strategy="zero3", loss="fused")
        return device(scenario, Buckets(reduce_bucket_size=scenario.model.hidden_size**2))
    if row["strategy"] == "DeepSpeed ZeRO-2 LoRA r8":
        return device(with_lora(base(row, strategy="zero2"), 8, "all-linear"), Buckets())
    if row["strategy"] == "FSDP2 LoRA r8":
        return device(with_lora(base(row, strategy="fsdp", checkpointing=True), 8, "all-linear"), Buckets())
    return Case(None, "device", "method or length not modelled")


def one_layer(row: Row) -> Case:
    """One layer's forward pass by itself: what it saved and its output (transformers of 2024)."""
    model = models()[row["model"]]()
    behavior = LibraryBehavior(expands_keys=True, copies_attention=True)
    events = micro_step(base(row, model=model, strategy="zero2", split=split(model, "full"), behavior=behavior))
    layer = events[events.index(("forward", 0)) : events.index(("forward end", 0))]
    freed = {event[1] for event in layer if event[0] == "free"}
    size = sum(event[2] for event in layer if event[0] == "alloc" and event[1] not in freed)
    return Case(size / GIB, "allocated")


def overhead(row: Row) -> Case:
    talks = "NCCL" in row["strategy"]
    return Case((states.CONTEXT + (states.NCCL if talks else 0)) / GIB, "device")


def host_load(row: Row) -> Case:
    """Under FSDP rank 0 holds all weights and the file that it reads; the other ranks receive theirs."""
    weights_and_file = 4 * models()[row["model"]]().parameters + 5 * 10**9 if "rank 0" in row["strategy"] else 0
    return Case((weights_and_file + PROCESS) / GIB, "host")


def not_modelled(what: str) -> Callable[[Row], Case]:
    return lambda _row: Case(None, "-", what)


CASES: list[tuple[str, Callable[[Row], Case]]] = [
    ("huggingface/peft/.*MetaMathQA|method_comparison", peft_metamath),
    ("huggingface/peft", peft_docs),
    ("fsdp_qlora", fsdp_qlora),
    ("perf_train_gpu_one", bert),
    ("QwenLM/Qwen", qwen),
    ("activation-memory-per-layer", one_layer),
    ("stas00/ml-engineering", overhead),
    ("ram-efficient-pytorch-fsdp", host_load),
    ("ms-swift", swift),
    ("litgpt", not_modelled("litgpt's own model and loop")),
    ("torchtitan", not_modelled("torchtitan's own model, op-level checkpointing, torch.compile")),
    ("torchtune", not_modelled("torchtune's own model and loop")),
    ("pytorch/ao", not_modelled("torchtitan or torchtune with torchao")),
    ("", not_modelled("the row does not say enough")),
]


def reserved(scenario: Scenario, capacity: int | None = None) -> Case:
    return Case(gpu_memory(scenario, Buckets(), capacity=capacity).reserved / GIB, "reserved")


def device(scenario: Scenario, buckets: Buckets) -> Case:
    return Case(gpu_memory(scenario, buckets).device / GIB, "device")


def case_of(row: Row) -> Case:
    case = next(case for pattern, case in CASES if re.search(pattern, row["source_url"]))
    try:
        return case(row)
    except (KeyError, ValueError) as error:  # a shape that is not listed above, a length such as "<=512"
        return Case(None, "-", f"not listed here or not a number: {error}")


# ---------------------------------------------------------------------------------------------------------------------
# Formulas that people use today


def largest_module(model: Model) -> int:
    """Elements of the module with the most parameters of its own, which DeepSpeed calls the largest layer."""
    sizes: Counter[str] = Counter()
    for tensor in model.tensors:
        sizes[tensor.module] += tensor.numel
    return max(sizes.values())


def others(row: Row) -> dict[str, float]:
    """DeepSpeed's, accelerate's and the EleutherAI cookbook's figures for a full fine-tune, GiB."""
    if row["model"] not in models() or not row["params"].isdigit() or not row["seq_len"].isdigit():
        return {}
    model, ranks = models()[row["model"]](), int(row["gpus"])
    p = model.parameters
    if "LoRA" in row["strategy"] or model.decoder is None or not row["micro_batch"].isdigit():
        return {}
    deepspeed = 4 * largest_module(model) + 18 * p / ranks
    accelerate = 2 * 4 * p if "bf16" in row["dtype"] else 4 * 4 * p
    s, b, h, layers = int(row["seq_len"]), int(row["micro_batch"]), model.hidden_size, len(model.blocks)
    per_layer = 34 if row["grad_ckpt"].startswith("yes") else 34 + 5 * model.decoder.a * s / h
    cookbook = 18 * p / ranks + 2 * (5e8 + 1e9) + s * b * h * layers * per_layer + 5 * GIB
    return {"deepspeed": deepspeed / GIB, "accelerate": accelerate / GIB, "cookbook": cookbook / GIB}


# ---------------------------------------------------------------------------------------------------------------------
# The table


def run(rows: Iterable[Row]) -> list[Result]:
    return [Result(row, case_of(row), others(row)) for row in rows if not row["notes"].startswith("E")]


def line(result: Result) -> str:
    row, case = result.row, result.case
    what = f"{row['model'][:26]:26} {row['strategy'][:34]:34} s={row['seq_len'][:6]:6} b={row['micro_batch'][:3]:3}"
    head = f"{result.grade:2} {what} {case.figure:9} {result.measured:7.2f}"
    if case.estimate is None:
        return f"{head}       -        -   not modelled: {case.missing}"
    beside = "  ".join(f"{name} {value:.1f}" for name, value in result.others.items())
    return f"{head} {case.estimate:7.2f} {result.error:+7.1f} %   {beside}"


def summary(results: list[Result], grade: str) -> str:
    errors = [result.error for result in results if result.grade == grade and result.case.estimate is not None]
    if not errors:
        return f"{grade}: no modelled rows"
    sizes = sorted(abs(error) for error in errors)
    ninth = sizes[min(len(sizes) - 1, int(0.9 * len(sizes)))]
    return (
        f"{grade}: {len(errors)} rows, median absolute error {median(sizes):.1f} %, 90th percentile {ninth:.1f} %, "
        f"from {min(errors):+.1f} to {max(errors):+.1f} %"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--csv", type=Path, default=TRUTH)
    options = parser.parse_args()
    with options.csv.open() as file:
        results = run(csv.DictReader(file))
    for result in sorted(results, key=lambda r: (r.grade, r.row["source_url"], r.row["model"], r.row["strategy"])):
        print(line(result))
    print()
    for grade in ("A", "A-", "B"):
        print(summary(results, grade))
    for name in ("deepspeed", "accelerate", "cookbook"):
        print(beside(results, name))
    print("\nDeepSpeed's own table for T0_3B, one node with two GPUs:\n" + table(*T0_3B, 1, 2))
    return 0


def beside(results: list[Result], name: str) -> str:
    """Error of another formula and ours on the rows that it has something to say about."""
    rows = [result for result in results if name in result.others and result.case.estimate is not None]
    theirs = median(abs(100 * (result.others[name] / result.measured - 1)) for result in rows)
    ours = median(abs(result.error) for result in rows)
    return f"{name}: median absolute error {theirs:.1f} % on {len(rows)} full fine-tunes, ours {ours:.1f} %"


if __name__ == "__main__":
    sys.exit(main())
