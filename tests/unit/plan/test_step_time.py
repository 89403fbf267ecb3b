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
from shardmake.memory.scenario import Scenario
from shardmake.plan.step_time import LINK_SHARE, step_time
from tests.unit.memory.llama_8b import LLAMA_8B, MODEL, scenario


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
    assert two.parameters == four.parameters
    assert matrix_weights(four) - matrix_weights(two) == 2 * 2 * 3 * 2048 * 4096
    on = hardware(processes_per_node=1)
    slow, fast = (
        step_time(Scenario(model, split(model, "full"), "ddp", 1, 1, 1, 4096), on) for model in (four, two)
    )  # fmt: skip
    assert fast < slow


def test_recomputation_repeats_the_forward_pass_of_the_layers() -> None:
    assert 1.15 < seconds(checkpointing=True) / seconds(checkpointing=False) < 4 / 3


def test_frozen_weights_need_no_gradient() -> None:
    many = {"micro_batch": 4, "checkpointing": False}
    assert 0.65 < seconds(method="lora", **many) / seconds(**many) < 0.9


def test_a_dense_mask_slows_long_sequences_and_hardly_short_ones() -> None:
    """Packing under SDPA."""
    mask = {"attention": "sdpa", "masked": True, "micro_batch": 8}
    ratio = {n: seconds(sequence_length=n, **mask) / seconds(sequence_length=n, micro_batch=8) for n in (512, 8192)}
    assert 1 < ratio[512] < 1.3 and ratio[8192] > 1.6


def test_newer_gpus_are_faster_and_reach_a_smaller_part_of_their_peak() -> None:
    ratio = seconds(hardware("a100-80gb")) / seconds()
    assert 1.5 < ratio < 989 / 312


def test_communication_that_exceeds_compute_bounds_the_step() -> None:
    """70 GB/s of 100 GB/s carry three transfers of the weights in 16 bits."""
    slow = hardware(inter_node_gbps=1)
    moved = 15 / 16 * (2 * 2 + 2) * MODEL.parameters
    assert seconds(slow, nodes=2, micro_batch=1, checkpointing=False) >= moved / 0.7e9


def test_hybrid_sharding_pays_for_the_network_between_nodes() -> None:
    fast, slow = (seconds(hardware(inter_node_gbps=rate), strategy="fsdp-hybrid", nodes=4) for rate in (400, 2))
    assert slow > 1.5 * fast
    assert slow < seconds(hardware(inter_node_gbps=2), strategy="fsdp", nodes=4)


def test_hpz_gathers_once_per_step_between_nodes() -> None:
    """At 70 GB/s of 100: per step one gather of the weights in 16 bits, and per micro batch the gradients."""
    slow = hardware(inter_node_gbps=1)
    case = {"nodes": 2, "micro_batch": 1, "checkpointing": False, "accumulation": 4}
    hpz, plain = (seconds(slow, strategy=name, **case) for name in ("zero3-hpz", "zero3"))
    assert plain - hpz == pytest.approx(15 / 16 * (4 * 2 - 1) * 2 * MODEL.parameters / 0.7e9, rel=0.02)


def test_zero3_gathers_again_to_recompute_and_fsdp_does_not() -> None:
    on = hardware(inter_node_gbps=20)
    more = {"nodes": 2, "checkpointing": True}
    assert seconds(on, strategy="fsdp", **more) < seconds(on, strategy="zero3", **more)
    assert seconds(on, strategy="fsdp", nodes=2, checkpointing=False) == pytest.approx(
        seconds(on, strategy="zero3", nodes=2, checkpointing=False), rel=0.01
    )


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("accelerator", ["cpu", "a100-80gb", "h100"])
def test_more_tokens_take_longer_and_each_token_less(strategy: str, accelerator: str) -> None:
    on = hardware(accelerator)
    one = scenario(strategy=strategy, nodes=2)
    two = replace(one, micro_batch=2)
    assert 0 < step_time(one, on) <= step_time(two, on) <= 2 * step_time(one, on)


def test_two_optimizer_steps_cost_more_than_one_of_twice_the_accumulation() -> None:
    case = scenario(strategy="zero2-offload")
    assert step_time(replace(case, accumulation=2), H100) < 2 * step_time(case, H100)


LOSSES = ["plain", "fused"]
LIBRARIES = ["ddp", "zero1", "fsdp", "zero2", "zero3"]


def test_the_launches_of_a_library_bound_narrow_layers_and_hide_behind_wide_ones() -> None:
    """One H100 took 0.11, 0.17 and 0.40 s under DDP, FSDP2 and ZeRO-3 for eight layers of 1,024; 0.03 are kernels."""
    narrow = from_config({**LLAMA_8B, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8,
                          "num_attention_heads": 16, "vocab_size": 4096})  # fmt: skip
    one = hardware(processes_per_node=1, cpus_per_node=16)
    case = {"ranks_per_node": 1, "nodes": 1, "accumulation": 2, "checkpointing": False}
    small = [step_time(scenario(narrow, **case, sequence_length=4096, strategy=name), one) for name in LIBRARIES]
    assert small == sorted(small) and small[-1] > 3 * small[0]
    large = [seconds(one, **{**case, "strategy": name, "micro_batch": 16}) for name in LIBRARIES]
    assert max(large) < 1.03 * min(large)


def test_the_fused_loss_of_one_sequence_moves_the_head_in_each_chunk() -> None:
    """One H200 took 25 ms for the head and the fused loss of 4,096 tokens of 2,048 numbers, and 16 when plain."""
    model = from_config({**LLAMA_8B, "hidden_size": 2048})
    case = {"model": model, "strategy": "ddp", "sequence_length": 4096, "checkpointing": False, "ranks_per_node": 1}
    of_one, of_eight = (
        [step_time(scenario(**case, nodes=1, micro_batch=size, loss=loss), hardware("h200")) for loss in LOSSES]
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
    assert varlen - sdpa == pytest.approx(flops / 331e12 - flops / 568e12, rel=0.1)
    assert masked > varlen
    ampere = [seconds(hardware("a100-80gb"), **long, attention=kernel) for kernel in ("varlen", "sdpa")]
    assert ampere[0] == ampere[1]


@pytest.mark.parametrize("strategy", ["zero2-offload", "zero3-offload-optimizer", "zero3-offload", "fsdp-offload"])
def test_offload_doubles_the_step_of_a_7b_model_and_more_cores_help(strategy: str) -> None:
    """Full training on eight A100: published steps are 2.2 to 4.8 times those without offload."""
    plain = strategy.partition("-")[0]
    case = {"micro_batch": 2, "gradient_dtype": "fp32"}
    on, few = (hardware("a100-80gb", cpus_per_node=cores) for cores in (64, 8))
    assert seconds(on, strategy=strategy, **case) > 1.6 * seconds(on, strategy=plain, **case)
    assert seconds(few, strategy=strategy, **case) > 3 * seconds(few, strategy=plain, **case)


def test_quantized_weights_are_converted_in_each_pass() -> None:
    """4-bit weights become 16 bits: 2.5 bytes moved of each, three times with recomputation."""
    lora, qlora = (scenario(strategy="ddp", method=name) for name in ("lora", "qlora"))
    moved = 3 * 2.5 * qlora.split.quantized
    extra = step_time(replace(qlora, micro_batch=8), H100) - step_time(replace(lora, micro_batch=8), H100)
    assert extra == pytest.approx(moved / (0.8 * H100.accelerator.bandwidth * GB), rel=0.01)


def test_tf32_computes_at_half_the_rate_of_bf16() -> None:
    fp32, tf32, bf16 = (
        seconds(precision="fp32"),
        seconds(precision="fp32", tf32=True),
        seconds(precision="bf16"),
    )
    assert bf16 < tf32 < fp32 / 3
    assert seconds(precision="bf16", tf32=True) == bf16
    assert H100.flops("fp32", tf32=True) == H100.flops("bf16") / 2


def test_offloaded_activations_take_the_link_to_the_host_twice() -> None:
    case = scenario(checkpointing=True, accumulation=2)
    moved = 2 * 2 * len(case.model.blocks) * case.tokens * case.model.hidden_size * 2
    extra = step_time(replace(case, activation_offload=True), H100) - step_time(case, H100)
    assert extra == pytest.approx(moved / (H100.accelerator.host_link * GB))


def test_sharing_sequences_keeps_the_work_and_adds_exchanges() -> None:
    """Eight ranks on one sequence compute as fast as each on its own, and exchange heads over the node's links."""
    alone = seconds(strategy="zero3", sequence_length=32768, ranks_per_node=8, accumulation=1)
    shared = seconds(strategy="zero3", sequence_length=32768, ranks_per_node=8, accumulation=8, sequence_parallel=8)
    slow = seconds(
        hardware(intra_node_gbps=100), strategy="zero3", sequence_length=32768, ranks_per_node=8, sequence_parallel=8
    )
    fast = seconds(strategy="zero3", sequence_length=32768, ranks_per_node=8, sequence_parallel=8)
    assert alone < shared and fast < slow


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
def test_each_layer_waits_for_seven_reductions_and_the_head_for_its_own(
    kind: str, tied: bool, outside: int, gathers: bool
) -> None:
    model = from_config({**LLAMA_8B, "model_type": kind, "head_dim": 128, "tie_word_embeddings": tied})
    whole = scenario(model, strategy="zero1", ranks_per_node=4, checkpointing=False)
    part = part_of(model, 4)
    shared = replace(whole, model=part, split=split(part, "full"), tensor_parallel=4)
    slow, fast = (step_time(shared, hardware(intra_node_gbps=rate)) for rate in (100, 400))
    numbers = 2 * (7 * len(part.blocks) + outside) * part.hidden_size + (part.vocab_size if gathers else 0)
    moved = 0.75 * 2 * shared.tokens * numbers
    assert slow - fast == pytest.approx(moved / LINK_SHARE / GB * (1 / 100 - 1 / 400))
