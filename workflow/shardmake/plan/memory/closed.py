"""Closed-form activations: bytes per token of a Llama-like decoder, and of the cross entropy (used to scan)."""

from shardmake.plan.memory.scenario import Scenario
from shardmake.plan.model import Decoder

FUSED_CHUNK = 1024


def layer_bytes(scenario: Scenario, shape: Decoder) -> int:
    """Bytes that one layer saves for its backward pass, per token (16h + 4ad + 4kd + 8f + 4a + 8 in 16 bits)."""
    z, h, f, a, k, d = scenario.compute, shape.h, shape.f, shape.a, shape.k, shape.d
    norm = (8 * h + 4) if z == 2 else (12 * h + 4)
    size = shape.norms * norm + 2 * z * a * d + 2 * z * k * d + 4 * z * f + 4 * a
    if scenario.autocast:
        size += 16 * h + z * (a + k) * d
    if shape.qk_norm:
        size += (6 if z == 2 else 8) * (a + k) * d
    if scenario.attention == "eager":
        size += (4 + z) * a * scenario.sequence_length - 4 * a + 2 * z * (a - k) * d
    elif scenario.attention == "sdpa" and scenario.masked:
        size += 2 * z * (a - k) * d + z * scenario.sequence_length
    if scenario.method != "full":
        size += 4 * (6 * h + f) // 4
    return size


def checkpoint_bytes(scenario: Scenario, hidden_size: int) -> int:
    """Bytes of a layer's saved input, per token."""
    return (4 if scenario.autocast else scenario.compute) * hidden_size


def cross_entropy_bytes(scenario: Scenario, vocabulary: int) -> int:
    """Peak of the loss's backward pass for one micro batch: three fp32 copies of the logits (plain)."""
    tokens = scenario.tokens if scenario.loss == "plain" else min(scenario.tokens, FUSED_CHUNK)
    return 12 * vocabulary * tokens


def generic_layer_bytes(scenario: Scenario) -> int:
    """A stand-in for architectures without a closed form: a GPT layer with a mask (Korthikanti et al. 2022)."""
    heads = int(scenario.model.config.get("num_attention_heads") or scenario.model.config.get("n_head") or 16)
    return 34 * scenario.model.hidden_size * scenario.compute // 2 + 5 * heads * scenario.sequence_length
