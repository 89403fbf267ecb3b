"""The step time follows the work: tokens, recomputation, frozen weights, experts, masks, networks."""

from dataclasses import replace
from typing import Any

import pytest

from shardmake.config.models import STRATEGIES, Cluster
from shardmake.core.units import GB
from shardmake.memory.families import part_of
from shardmake.memory.hardware import Hardware, from_cluster
from shardmake.memory.model import ParameterSpec, matrix_weights, split
from shardmake.memory.read_config import from_config
from shardmake.plan.step_time import LINK_SHARE, step_time
from tests.unit.memory.llama_8b import LLAMA_8B, MODEL, scenario

Values = dict[str, Any]


def hardware(accelerator: str = "h100", **changes: Any) -> Hardware:
    values = {
        "executor": "slurm", "accelerator": accelerator, "processes_per_node": 8, "cpus_per_node": 64,
        "memory_gib_per_node": 1000, "max_nodes": 16, "inter_node_gbps": 400,
    }  # fmt: skip
    return from_cluster(Cluster.model_validate(values | changes))


H100 = hardware()


def seconds(on: Hardware = H100, **changes: Any) -> float:
    return step_time(scenario(**{"strategy": "fsdp", "sequence_length": 4096, **changes}), on)


def test_the_forward_pass_uses_every_weight_but_the_embedding() -> None:
    assert matrix_weights(MODEL) == MODEL.parameters - 128256 * 4096 - (2 * 32 + 1) * 4096


@pytest.mark.parametrize(
    ("key", "share"), [("num_experts_per_tok", 0.25), ("num_experts_per_token", 0.25), ("moe_topk", 0.25), ("other", 1)]
)
def test_the_selected_experts_have_several_names(key: str, share: float) -> None:
    """Kimi and Hunyuan have names of their own; without any, all experts count."""
    experts = ParameterSpec("model.layers.0.mlp.experts.gate_up_proj", (8, 16, 32), "other", 0)
    model = replace(MODEL, tensors=(experts,), config={"num_experts": 8, key: 2})
    assert matrix_weights(model) == share * experts.numel


def test_a_mixture_uses_the_selected_experts() -> None:
    config = {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2, "hidden_size": 2048,
              "intermediate_size": 4096, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
              "vocab_size": 512}  # fmt: skip
    two, four = (from_config({**config, "num_experts_per_tok": n}) for n in (2, 4))
    assert two.parameters == four.parameters and matrix_weights(four) - matrix_weights(two) == 2 * 2 * 3 * 2048 * 4096
    fast, slow = (seconds(model=model, strategy="ddp", nodes=1, ranks_per_node=1) for model in (two, four))
    assert fast < slow


A100, MANY = hardware("a100-80gb"), {"micro_batch": 4, "checkpointing": False}
MASK = {"attention": "sdpa", "masked": True, "micro_batch": 8}
SLOW = {"on": hardware(inter_node_gbps=2), "nodes": 4}
TWO_NODES = {"on": hardware(inter_node_gbps=20), "nodes": 2}
LONG = {"strategy": "zero3", "sequence_length": 32768}
OFFLOAD = {"micro_batch": 2, "gradient_dtype": "fp32"}
RATIOS: dict[str, tuple[Values, Values, float, float]] = {
    "recomputation repeats the forward pass": ({"checkpointing": True}, {"checkpointing": False}, 1.15, 4 / 3),
    "frozen weights need no gradient": ({"method": "lora", **MANY}, MANY, 0.65, 0.9),
    "a dense mask hardly slows short sequences": (
        {"sequence_length": 512, **MASK}, {"sequence_length": 512, "micro_batch": 8}, 1, 1.3,
    ),
    "a dense mask slows long sequences": (
        {"sequence_length": 8192, **MASK}, {"sequence_length": 8192, "micro_batch": 8}, 1.6, 9,
    ),
    "newer GPUs are faster, and reach a smaller part of their peak": ({"on": A100}, {}, 1.5, 989 / 312),
    "hybrid sharding pays for the network between nodes": (
        {**SLOW, "strategy": "fsdp-hybrid"}, {"nodes": 4, "strategy": "fsdp-hybrid"}, 1.5, 99,
    ),
    "and takes less of it than FSDP": ({**SLOW, "strategy": "fsdp-hybrid"}, SLOW, 0, 1),
    "ZeRO-3 gathers again to recompute, and FSDP does not": (
        {**TWO_NODES, "strategy": "zero3", "checkpointing": True}, {**TWO_NODES, "checkpointing": True}, 1.001, 9,
    ),
    "without recomputation they gather alike": (
        {**TWO_NODES, "strategy": "zero3", "checkpointing": False}, {**TWO_NODES, "checkpointing": False}, 0.99, 1.01,
    ),
    # Full training of 7B on eight A100: published steps are 2.2 to 4.8 times those without offload.
    **{
        f"{name} doubles the step{where}": (
            {"on": on, "strategy": name, **OFFLOAD}, {"on": on, "strategy": name.partition("-")[0], **OFFLOAD}, least, 99,
        )
        for name in ("zero2-offload", "zero3-offload-optimizer", "zero3-offload", "fsdp-offload")
        for where, on, least in (("", A100, 1.6), (" more on few cores", hardware("a100-80gb", cpus_per_node=8), 3))
    },
    "TF32 is half as fast as bf16": ({"precision": "fp32", "tf32": True}, {"precision": "bf16"}, 1.001, 3),
    "and three times as fast as fp32": ({"precision": "fp32"}, {"precision": "fp32", "tf32": True}, 3, 99),
    "bf16 has no TF32": ({"precision": "bf16", "tf32": True}, {"precision": "bf16"}, 0.9999, 1.0001),
    # Eight ranks on one sequence compute as fast as each on its own, and exchange heads over the node's links.
    "sharing sequences adds exchanges": (
        {**LONG, "accumulation": 8, "sequence_parallel": 8}, {**LONG, "accumulation": 1}, 1, 9,
    ),
    "exchanges use the node's links": (
        {**LONG, "on": hardware(intra_node_gbps=100), "sequence_parallel": 8}, {**LONG, "sequence_parallel": 8}, 1, 9,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("one", "other", "least", "most"), RATIOS.values(), ids=RATIOS)
def test_a_step_takes_so_many_times_as_long(one: Values, other: Values, least: float, most: float) -> None:
    assert least < seconds(**one) / seconds(**other) < most


def test_communication_that_exceeds_compute_bounds_the_step() -> None:
    """70 GB/s of 100 GB/s carry three transfers of the weights in 16 bits."""
    slow = hardware(inter_node_gbps=1)
    moved = 15 / 16 * (2 * 2 + 2) * MODEL.parameters
    assert seconds(slow, nodes=2, micro_batch=1, checkpointing=False) >= moved / 0.7e9


def test_hpz_gathers_once_per_step_between_nodes() -> None:
    """At 70 GB/s of 100: per step one gather of the weights in 16 bits, and per micro batch the gradients."""
    slow = hardware(inter_node_gbps=1)
    case = {"nodes": 2, "micro_batch": 1, "checkpointing": False, "accumulation": 4}
    hpz, plain = (seconds(slow, strategy=name, **case) for name in ("zero3-hpz", "zero3"))
    assert plain - hpz == pytest.approx(15 / 16 * (4 * 2 - 1) * 2 * MODEL.parameters / 0.7e9, rel=0.02)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("accelerator", ["cpu", "a100-80gb", "h100"])
def test_more_tokens_take_longer_and_each_token_less(strategy: str, accelerator: str) -> None:
    on = hardware(accelerator)
    one = scenario(strategy=strategy, nodes=2)
    two = replace(one, micro_batch=2)
    assert 0 < step_time(one, on) <= step_time(two, on) <= 2 * step_time(one, on)
    assert step_time(replace(one, accumulation=2), on) <= 2 * step_time(one, on)


def test_the_launches_of_a_library_bound_narrow_layers_and_hide_behind_wide_ones() -> None:
    """One H100 took 0.11, 0.17 and 0.40 s under DDP, FSDP2 and ZeRO-3 for eight layers of 1,024; 0.03 are kernels."""
    narrow = from_config({**LLAMA_8B, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8,
                          "num_attention_heads": 16, "vocab_size": 4096})  # fmt: skip
    one = hardware(processes_per_node=1, cpus_per_node=16)
    case = {"ranks_per_node": 1, "nodes": 1, "accumulation": 2, "checkpointing": False}
    libraries = ("ddp", "zero1", "fsdp", "zero2", "zero3")
    small = [step_time(scenario(narrow, **case, sequence_length=4096, strategy=name), one) for name in libraries]
    assert small == sorted(small) and small[-1] > 3 * small[0]
    large = [seconds(one, **{**case, "strategy": name, "micro_batch": 16}) for name in libraries]
    assert max(large) < 1.03 * min(large)


def test_the_fused_loss_of_one_sequence_moves_the_head_in_each_chunk() -> None:
    """One H200 took 25 ms for the head and the fused loss of 4,096 tokens of 2,048 numbers, and 16 when plain."""
    model = from_config({**LLAMA_8B, "hidden_size": 2048})
    case = {"model": model, "strategy": "ddp", "sequence_length": 4096, "checkpointing": False, "ranks_per_node": 1}
    of_one, of_eight = (
        [
            step_time(scenario(**case, nodes=1, micro_batch=size, loss=loss), hardware("h200"))
            for loss in ("plain", "fused")
        ]
        for size in (1, 8)
    )
    assert of_one[1] > of_one[0] and of_eight[1] < of_eight[0]


def test_attention_runs_at_the_rate_of_its_kernel_and_length() -> None:
    """On one H100, heads of 128 numbers, 32,768 tokens: varlen 331 TFLOP/s, sdpa 568 without the mask of packing."""
    long = {"sequence_length": 32768, "checkpointing": False}
    varlen, sdpa, masked = (
        seconds(**long, attention=kernel, masked=mask) for kernel, mask in (("varlen", 0), ("sdpa", 0), ("sdpa", 1))
    )
    flops = 3.5 * 4 * 32 * 4096 * 32768**2 / 2
    assert varlen - sdpa == pytest.approx(flops / 331e12 - flops / 568e12, rel=0.1) and masked > varlen
    ampere = [seconds(hardware("a100-80gb"), **long, attention=kernel) for kernel in ("varlen", "sdpa")]
    assert ampere[0] == ampere[1]


def test_quantized_weights_are_converted_in_each_pass() -> None:
    """4-bit weights become 16 bits: 2.5 bytes moved of each, three times with recomputation."""
    lora, qlora = (scenario(strategy="ddp", method=name) for name in ("lora", "qlora"))
    moved = 3 * 2.5 * qlora.split.quantized
    extra = step_time(replace(qlora, micro_batch=8), H100) - step_time(replace(lora, micro_batch=8), H100)
    assert extra == pytest.approx(moved / (0.8 * H100.accelerator.bandwidth * GB), rel=0.01)


def test_offloaded_activations_take_the_link_to_the_host_twice() -> None:
    case = scenario(checkpointing=True, accumulation=2)
    moved = 2 * 2 * len(case.model.blocks) * case.tokens * case.model.hidden_size * 2
    extra = step_time(replace(case, activation_offload=True), H100) - step_time(case, H100)
    assert extra == pytest.approx(moved / (H100.accelerator.host_link * GB))


def test_sharing_matrices_divides_the_work() -> None:
    """Four ranks on the same rows divide the work."""
    whole = scenario(strategy="zero1", ranks_per_node=4, checkpointing=False)
    part = part_of(whole.model, 4)
    shared = replace(whole, model=part, split=split(part, "full"), tensor_parallel=4, accumulation=4)
    long, alone = (replace(case, sequence_length=16384) for case in (shared, whole))
    assert 1.0 < step_time(long, H100) / step_time(alone, H100) < 3.0


def test_spread_experts_exchange_tokens_and_gather_less() -> None:
    """Two experts of a token, there and back, forward and backward, in each of four layers; 16-bit numbers."""
    experts = {"num_local_experts": 8, "num_experts_per_tok": 2}
    config = {**LLAMA_8B, **experts, "model_type": "mixtral", "architectures": [], "num_hidden_layers": 4}
    whole, slow = scenario(from_config(config), strategy="fsdp", checkpointing=False), hardware(intra_node_gbps=20)
    local = replace(whole, local_model=from_config({**config, "num_local_experts": 2}))
    sent = 2 * 2 * 2 * 4 * 2 * whole.tokens * whole.model.hidden_size
    exchange = step_time(replace(local, expert_parallel=8), slow) - step_time(local, slow)
    assert exchange == pytest.approx(7 / 8 * sent / (slow.intra_node * LINK_SHARE))
    assert step_time(local, slow) < step_time(whole, slow)


@pytest.mark.parametrize(("kind", "tied", "outside", "gathers"), [
    ("llama", False, 1, True), ("llama", True, 2, False), ("gemma", True, 0, False), ("gemma", False, 1, True),
])  # fmt: skip
def test_layers_wait_for_seven_reductions_the_head_for_more(kind: str, tied: bool, outside: int, gathers: bool) -> None:
    model = from_config({**LLAMA_8B, "model_type": kind, "head_dim": 128, "tie_word_embeddings": tied})
    whole = scenario(model, strategy="zero1", ranks_per_node=4, checkpointing=False)
    part = part_of(model, 4)
    shared = replace(whole, model=part, split=split(part, "full"), tensor_parallel=4)
    slow, fast = (step_time(shared, hardware(intra_node_gbps=rate)) for rate in (100, 400))
    numbers = 2 * (7 * len(part.blocks) + outside) * part.hidden_size + (part.vocab_size if gathers else 0)
    moved = 0.75 * 2 * shared.tokens * numbers
    assert slow - fast == pytest.approx(moved / LINK_SHARE / GB * (1 / 100 - 1 / 400))
