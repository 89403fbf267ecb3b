"""Groups of weights that ZeRO-3 and FSDP gather at once: layers, the embedding, and norm with head."""

from math import ceil

from shardmake.memory import states
from shardmake.memory.model import ParameterSpec, is_quantized
from shardmake.memory.scenario import Scenario

HEAD = "head"
EMBEDDING = "embedding"
Unit = int | str


def unit_of(tensor: ParameterSpec, tied: bool) -> Unit:
    """Return the group of ``tensor``: its layer, the embedding, or the tail, which also holds tied weights."""
    if tensor.block is not None:
        return tensor.block
    if tensor.kind == "embedding":
        return HEAD if tied else EMBEDDING
    return HEAD


def units(scenario: Scenario) -> dict[Unit, int]:
    """Return the elements of each group; 4-bit weights count as the 16-bit elements that store them."""
    return {unit: sum(parts) for unit, parts in unit_tensors(scenario).items()}


def unit_tensors(scenario: Scenario) -> dict[Unit, list[int]]:
    """Return the elements of each tensor of each group."""
    sizes: dict[Unit, list[int]] = {}
    model = scenario.model
    for tensor in (*model.tensors, *scenario.split.adapters):
        quantized = scenario.method == "qlora" and is_quantized(tensor) and "lora_" not in tensor.name
        numel = ceil(tensor.numel * states.NF4_BYTES / scenario.compute) if quantized else tensor.numel
        sizes.setdefault(unit_of(tensor, model.tied), []).append(numel)
    return sizes


def trained_units(scenario: Scenario) -> dict[Unit, int]:
    """Return the trained elements of each group."""
    sizes: dict[Unit, int] = {}
    for tensor in states.trained_tensors(scenario):
        unit = unit_of(tensor, scenario.model.tied)
        sizes[unit] = sizes.get(unit, 0) + tensor.numel
    return sizes
