"""The estimate in closed form, which scans many candidates in microseconds each.

A few short simulated steps (or the trace) give the memory of each kind of layer, because every phase is linear in the
number of layers. The rest is the arithmetic of `states`. Reserved memory here is allocated memory with a planning
allowance; for the chosen candidate, `estimate.gpu_memory` simulates the step and the allocator.
"""

from collections import Counter
from dataclasses import replace
from typing import NamedTuple

from shardmake.memory import states
from shardmake.memory.buckets import Buckets
from shardmake.memory.ddp import StepEvents
from shardmake.memory.decoder import DecoderStep
from shardmake.memory.scenario import Scenario
from shardmake.memory.states import EMBEDDING, HEAD, Terms, trained_units, units
from shardmake.memory.trace import events_of

RESERVED_SHARE = 1.08  # planning allowance for the allocator: replays give 1.01 to 1.20, most of them below this


class Profile(NamedTuple):
    """Peak of activations in each phase in bytes, without weights and their gradients."""

    forward: int = 0
    loss: int = 0
    head: int = 0
    """The backward pass of the loss and the head."""
    last_layer: int = 0
    first_layer: int = 0


def profile(scenario: Scenario) -> Profile:
    """Return the profile of ``scenario``'s micro step."""
    shape = scenario.held_model.decoder
    if shape is None:
        return of_events(events_of(scenario), len(scenario.model.blocks))
    layers = range(shape.layers)
    kinds = [(shape.of_layers[n] if shape.of_layers else None, n in shape.unrotated, n < shape.dense) for n in layers]
    few = sorted({*map(kinds.index, kinds), layers[-1]})
    left = Counter(kinds[n] for n in layers if n not in few)
    if shape.layers <= len(few) + len(left):
        return of_events(events_of(scenario), shape.layers)
    all_trained = replace(scenario, split=replace(scenario.split, frozen_names=frozenset()))  # others may be

    def step(*more: int) -> Profile:
        return of_events(DecoderStep(all_trained, shape, layers=sorted([*few, *more])).run(), shape.layers)

    first = step()
    grown = [
        (count, step(next(n for n in layers if n not in few and kinds[n] == kind))) for kind, count in left.items()
    ]
    return Profile(*(a + sum(count * (one[i] - a) for count, one in grown) for i, a in enumerate(first)))


def of_events(events: StepEvents, layers: int) -> Profile:
    """Return the peaks of a micro step's own allocations; a weight's gradient is dropped when it is complete."""
    sizes: dict[int, int] = {}
    peaks = dict.fromkeys(("forward", "loss", "head", "last_layer", "first_layer"), 0)
    live, phase = 0, "forward"
    for event in events:
        kind = event[0]
        if kind == "alloc":
            sizes[event[1]] = event[2]
            live += event[2]
            peaks[phase] = max(peaks[phase], live)
        elif kind == "free":
            live -= sizes.pop(event[1])
        elif kind == "forward end" and event[1] == layers - 1 and phase == "forward":
            phase = "loss"
        elif kind == "backward":
            phase = "head"
        elif kind == "backward block":
            phase = "last_layer" if event[1] == layers - 1 else "first_layer"
    return Profile(**{**peaks, "first_layer": peaks["first_layer"] or peaks["last_layer"]})


def phases(scenario: Scenario, buckets: Buckets, activations: Profile) -> dict[str, Terms]:
    """Return the allocations at the peak of each phase, by term."""
    base = states.resident(scenario, buckets)
    whole = {"accumulated gradients": states.gradients(scenario)}
    held = whole if scenario.accumulation > 1 else {}
    # The gradient of a classifier's small head is there while all activations are, and with it ZeRO-2's part.
    at_head = whole if scenario.spec.zero_stage == 2 and scenario.model.is_classifier else held
    bucket = {
        "gradients before reduction": states.bucket_bytes(scenario, buckets),
        "gradients": base.get("gradients", 0) + states.added_gradients(scenario),
    }
    head, layer = ({"gathered weights": size} for size in _gathered(scenario, buckets))
    at_loss = dict(head)
    if scenario.spec.is_fsdp and scenario.shards > 1:  # the last all-gather's flat buffer stays until the loss ends
        at_loss["gathered weights"] += scenario.compute * units(scenario).get(HEAD, 0)
    parts = trained_units(scenario.model, scenario.split)
    first, last = (
        {
            "gradient norm": states.norm_bytes(scenario, parts.get(unit, 0), offloaded=True),
            "gradients in fp32": states.reduction_bytes(scenario, buckets, parts.get(unit, 0)),
        }
        for unit in (EMBEDDING, HEAD)
    )
    flat, norm = {} if scenario.spec.is_fsdp else bucket, states.norm_bytes(scenario, states.largest_trained(scenario))
    overflow = 0 if scenario.spec.offload_optimizer else sum(states.overflow_bytes(scenario))
    loading = states.frozen_bytes(scenario) if scenario.loads_on_gpu and scenario.spec.gathers_parameters else 0
    return {
        "load": {"weights during loading": loading},
        "cross entropy": {**base, **held, **at_loss, "activations": activations.loss},
        "backward of the head": {
            **base, **at_head, **head, **flat, "activations": activations.head
        },
        "backward of the last layer": {
            **base, **held, **layer, **bucket, **last, "activations": activations.last_layer
        },
        "backward of the first layer": {
            **base, **whole, **layer, **bucket, **first, "activations": activations.first_layer
        },
        "overflow check": {**base, **whole, "overflow check": overflow},
        "gradient norm": {**base, **whole, "gradient norm": norm},
        "optimizer step": {
            **base,
            **whole,
            **states.optimizer_step(scenario, buckets),
            "optimizer temporaries": states.step_temporaries(scenario, buckets),
        },
    }  # fmt: skip


def _gathered(scenario: Scenario, buckets: Buckets) -> tuple[int, int]:
    """Return the bytes of gathered weights during the loss, and during the backward pass of a layer."""
    sizes = units(scenario)
    whole, head = sum(sizes.values()), sizes.get(HEAD, 0)
    layer = max((size for unit, size in sizes.items() if isinstance(unit, int)), default=0)
    if scenario.spec.zero_stage == 3 and (scenario.world_size > 1 or scenario.spec.offload_param):
        window = min(whole, buckets.stage3_max_live_parameters, buckets.stage3_max_reuse_distance // 2)
        near = max(window, head) + buckets.stage3_prefetch_bucket_size
        loss, backward = near, max(near, 2 * layer)
    elif not scenario.spec.is_fsdp:
        loss = backward = 0
    elif scenario.spec.reshard_after_forward:
        loss, backward = head + (2 * layer if scenario.extra_forwards else 0), head + 2 * layer
    else:
        loss, backward = whole, whole + layer
    return scenario.compute * loss, scenario.compute * backward
