"""Formulas for memory that people use today, for a full fine-tune: bytes per GPU."""

from collections import Counter

from shardmake.memory.model import Model


def largest_module(model: Model) -> int:
    """Return the elements of DeepSpeed's largest layer: the module with the most parameters of its own."""
    sizes: Counter[str] = Counter()
    for tensor in model.tensors:
        sizes[tensor.module] += tensor.numel
    return max(sizes.values())


def deepspeed_states(model: Model, ranks: int) -> float:
    """Return DeepSpeed's ZeRO-3 figure, which counts model states only.

    Source: ``estimate_zero3_model_states_mem_needs`` without offload.
    """
    return 4 * largest_module(model) + 18 * model.parameters / ranks


def accelerate_training(model: Model, narrow: bool) -> float:
    """Return the figure of ``accelerate estimate-memory`` for training; ``narrow`` means weights in 16 bits."""
    return (2 if narrow else 4) * 4 * model.parameters


def cookbook(model: Model, ranks: int, length: int, batch: int, checkpointing: bool) -> float:
    """Return what EleutherAI's ``calc_transformer_mem.py`` computes for ZeRO-3 with its defaults.

    It counts parameters itself, with two matrices per MLP and as many key-value heads as heads; gradients have
    4 bytes; several GPUs add an all-gather bucket and the live parameters; other memory is 0 by default.
    """
    assert model.decoder is not None
    shape = model.decoder
    h, layers = shape.h, shape.layers
    parameters = 2 * shape.v * h + h * length + 8 * h * layers + 2 * h + 4 * layers * h * h + 2 * layers * h * shape.f
    states = (2 + 4 + 12) * parameters / ranks
    communication = 2 * (5e8 + 1e9) if ranks > 1 else 0.0
    per_value = 34.0 if checkpointing else 34 + 5 * shape.a * length / h
    return states + communication + length * batch * h * layers * per_value
