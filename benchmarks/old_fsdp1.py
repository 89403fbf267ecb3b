"""The memory of a rank with torch's foreach AdamW, and under FSDP1, beside the activations of the model.

Sources: torch's ``_init_utils.py``, ``_flat_param.py``, ``_runtime_utils.py`` and ``_limiter_utils.py``, and
Accelerate's ``prepare_model``. What loads comes first in the allocator's pools, so its order decides what is reserved.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

from shardmake.core.units import MIB
from shardmake.memory import states
from shardmake.memory.ddp import DdpMemory
from shardmake.memory.decoder import layer_input
from shardmake.memory.fsdp import Fsdp2Memory
from shardmake.memory.model import ParameterSpec, is_quantized
from shardmake.memory.scenario import BYTES, Scenario
from shardmake.memory.states import HEAD, Unit
from shardmake.memory.timeline import CAST, COMMUNICATION, Pending

if TYPE_CHECKING:
    from benchmarks.old_libraries import OldScenario

BROADCAST_BUCKET = 250 * MIB  # PARAM_BROADCAST_BUCKET_SIZE in _init_utils.py
IN_FLIGHT = 2  # _FreeEventQueue._max_num_inflight_all_gathers in _limiter_utils.py
ROOT = HEAD
"""Embedding, norm and head are one unit: the policies wrap layers only."""
LOADING = "weights during loading"
OUTPUT = "output"
GATHERED = "gathered weights"


class ForeachMemory(DdpMemory):
    """DDP with torch's foreach AdamW."""

    def step(self) -> None:  # noqa: D102
        self._make_states()
        held = ceil(self.scenario.split.trainable / (self.scenario.shards if self.scenario.spec.is_fsdp else 1))
        for key in self._allocate("optimizer temporaries", states.trained_bytes(self.scenario) * held):
            self.timeline.free(key)
        super().step()


class LoopMemory(ForeachMemory):
    """A loop that keeps the output of a step until the model returns the next one."""

    _last: int | None = None

    def gradient(self, name: str, key: int | None) -> bool:  # noqa: D102
        if name != OUTPUT:
            return super().gradient(name, key)
        self._last = key
        return True

    def start_backward(self) -> None:  # noqa: D102
        super().start_backward()
        if self._last is not None:
            self.timeline.free(self._last)


@dataclass(frozen=True)
class FlatWeight:
    """One flat weight: the elements of its tensors, its bytes per element at load, at rest and in a pass."""

    tensors: tuple[int, ...]
    loaded: int
    held: int
    gathered: int
    term: str

    def part(self, shards: int) -> int:
        """Return the elements of one rank."""
        return ceil(sum(self.tensors) / shards)

    def first_parts(self, shards: int) -> Iterator[int]:
        """Yield the elements of each tensor in the first rank's part, which are the optimizer's tensors.

        That is so with ``use_orig_params``, which Accelerate and Trainer set.
        """
        left = self.part(shards)
        for tensor in self.tensors:
            if left > 0:
                yield min(tensor, left)
            left -= tensor


def flat_weights(scenario: Scenario) -> dict[Unit, list[FlatWeight]]:
    """Return the flat weights of each unit in torch's order, which is the layers, then the root (`_recursive_wrap`).

    Each adapter is a flat weight of its own (`fsdp_auto_wrap_policy` of PEFT) and comes before that of its layer.
    """
    tensors, adapters = unit_tensors(scenario, scenario.model.tensors), unit_tensors(scenario, scenario.split.adapters)
    order = [*(unit for unit in tensors if unit != ROOT), *(unit for unit in tensors if unit == ROOT)]
    return {unit: list(_of_unit(scenario, tensors[unit], adapters.get(unit, []))) for unit in order}


def unit_tensors(scenario: Scenario, tensors: Iterable[ParameterSpec]) -> dict[Unit, list[int]]:
    """Return the elements of ``tensors`` by unit; 4-bit weights count as the 16-bit elements that store them."""
    sizes: dict[Unit, list[int]] = {}
    for tensor in tensors:
        quantized = scenario.method == "qlora" and is_quantized(tensor) and "lora_" not in tensor.name
        numel = ceil(tensor.numel * states.NF4_BYTES / scenario.compute) if quantized else tensor.numel
        sizes.setdefault(states.unit_of(tensor, tied=True), []).append(numel)
    return sizes


def _of_unit(scenario: Scenario, base: list[int], adapters: list[int]) -> Iterator[FlatWeight]:
    """Yield the flat weights of a unit.

    A full fine-tune loads 16-bit weights, which Accelerate then widens. Frozen weights stay as they are.
    """
    compute, trained = scenario.compute, states.trained_bytes(scenario)
    for adapter in adapters:
        yield FlatWeight((adapter,), trained, trained, BYTES[scenario.adapter_compute], "weights")
    if base and not scenario.method_spec.has_adapters:
        yield FlatWeight(tuple(base), min(compute, trained), trained, compute, "weights")
    elif base:
        yield FlatWeight(tuple(base), scenario.frozen, scenario.frozen, compute, "frozen weights")


class Fsdp1Memory(ForeachMemory, Fsdp2Memory):
    """FSDP1: one flat weight per unit, gathered in place; the root's stays gathered.

    A gathered weight is released at once, but its memory is reused only when the GPU has finished with it. Two may be
    pending (the rate limiter).
    """

    scenario: "OldScenario"

    def load(self) -> None:
        """Allocate this rank's part of everything, in the order in which it loads."""
        self._pending = Pending(self.timeline)
        self._casts = Pending(self.timeline)
        self._held: list[int] = []
        self._of_root: list[int] = []
        self._narrow: dict[Unit, list[int]] = {}
        self._flats = flat_weights(self.scenario)
        self._in_root = {
            tensor.name
            for tensor in (*self.scenario.model.tensors, *self.scenario.split.adapters)
            if states.unit_of(tensor, tied=True) == ROOT
        }
        super().load()
        if not self.scenario.method_spec.has_adapters:
            shards, flats = self.scenario.shards, (flat for flats in self._flats.values() for flat in flats)
            self.trained = [part for flat in flats for part in flat.first_parts(shards)]

    def _load_states(self) -> None:
        trained = unit_tensors(self.scenario, self.scenario.split.trained(self.scenario.model))
        self._trained = {unit: sum(sizes) for unit, sizes in trained.items()}
        root = max(self._units.get(ROOT, 0), self._trained.get(ROOT, 0))  # it has the embedding, too
        self._units = {**self._units, ROOT: root}
        terms = states.resident(self.scenario, self.buckets)
        self._state_bytes = terms.pop("optimizer states", 0)
        for term, size in terms.items():
            if term not in ("weights", "frozen weights"):
                self._allocate(term, size)
        for unit, flats in self._flats.items():
            for flat in flats:
                self._wrap(unit, flat)
        self._widen()
        self._begin()

    def _wrap(self, unit: Unit, flat: FlatWeight) -> None:
        """Load one flat weight: its tensors, their broadcast, their flat copy, and this rank's part of that.

        The tensors stay until the part is there, since the parameters then become its views (`FlatParamHandle.shard`).
        An offloaded part goes to the host after that (`_init_param_handle_from_params`).
        """
        sizes = [flat.loaded * tensor for tensor in flat.tensors]
        single = [self.timeline.alloc(size, LOADING) for size in sizes]
        self._broadcast(sizes)
        whole = self.timeline.alloc(sum(sizes), LOADING)
        is_final = flat.loaded == flat.held
        part = self.timeline.alloc(flat.loaded * flat.part(self.scenario.shards), flat.term if is_final else LOADING)
        self.timeline.free(whole)
        for key in single:
            self.timeline.free(key)
        if self.scenario.spec.offload_param:
            self.timeline.free(part)
        elif not is_final:
            self._narrow.setdefault(unit, []).append(part)

    def _broadcast(self, sizes: list[int]) -> None:
        """Send the tensors from rank 0 in flat copies, of which two are in flight (`broadcast_coalesced`)."""
        sent: deque[int] = deque()
        for size in broadcast_buckets(sizes):
            if len(sent) == 2:
                self.timeline.free(sent.popleft())
            sent.append(self.timeline.alloc(size, LOADING))
        for key in sent:
            self.timeline.free(key)

    def _widen(self) -> None:
        """Widen the parts of trained 16-bit weights, the root's first, after all are loaded (`prepare_model`).

        The 16-bit part stays until its unit is resharded for the first time: the parameters are its views until then
        (`_use_sharded_views`).
        """
        for unit in sorted(self._narrow, key=lambda unit: unit != ROOT):
            for flat in self._flats[unit]:
                self.timeline.alloc(flat.held * flat.part(self.scenario.shards), flat.term)

    def _begin(self) -> None:
        """Allocate and free each buffer of a pass once, the root's first (`init_flat_param_attributes`)."""
        shards = self.scenario.shards
        for unit in sorted(self._flats, key=lambda unit: unit != ROOT):
            for flat in reversed(self._flats[unit]):
                part = flat.part(shards)
                narrows = flat.gathered != flat.held
                for size in (narrows * flat.gathered, flat.gathered * shards, narrows * flat.held * shards):
                    self._allocate_briefly(size * part, LOADING)

    def before_forward(self, block: int) -> None:
        """Gather the root, then the layer."""
        if block == 0:
            self._gather(ROOT)
        self._gather(block)

    def after_forward(self, unit: Unit) -> None:
        """Reshard the layer, unless weights stay gathered during the whole step."""
        super().after_forward(unit)
        self._drop_narrow(unit)

    def _drop_narrow(self, unit: Unit) -> None:
        for key in self._narrow.pop(unit, []):
            self.timeline.free(key)

    def before_head(self) -> None:
        """Begin norm and head; the root is gathered."""

    def start_backward(self) -> None:
        """Gather the last layer ahead: the root's hook runs at the loss (``_pre_backward_hook``)."""
        self._drop_narrow(ROOT)
        self._gather_ahead(self._last)

    def before_backward(self, block: int) -> None:
        """Reduce the layer after this one; gather this one and the one before it.

        A recomputed unit is gathered twice; the second time takes the place of the first.
        """
        self._hold(block + 1)
        if block + 1 in self._units:
            self._reduce(block + 1)
        self._gather(block)
        self._gather_ahead(block - 1)

    def gradient(self, name: str, key: int | None) -> bool:
        """Keep it until the backward pass of its unit has ended: the root's until all of them are there."""
        if key is None:
            return False
        self.timeline.rename(key, "gradients before reduction")
        (self._of_root if name in self._in_root else self._waiting).append(key)
        return True

    def _gather_ahead(self, unit: Unit) -> None:
        if not self.scenario.recomputes_units:
            self._gather(unit)

    def end_backward(self) -> None:
        """Reduce the first layer and the root; the GPU has finished when the optimizer begins."""
        self._hold(0)
        self._reduce(0)
        self._waiting, self._of_root = self._of_root, []
        self._reduce(ROOT)
        self._finish_reduction()
        for unit in list(self._live):
            self._reshard(unit)
        self._pending.drain(0)
        self._casts.drain(0)
        for key in self._held:
            self.timeline.free(key)
        self._held.clear()

    def _hold(self, ended: Unit) -> None:
        """Keep the input of a frozen layer that has ended, and the gradient that it took.

        The hook on an input (``_register_post_backward_reshard_only_hook``) sees the leaf that reentrant checkpointing
        makes, and the leaf holds its data and its gradient.
        """
        holds = self.scenario.recomputes_units and self.scenario.method != "full"
        if not holds or ended not in self._units:
            return
        for _ in range(1 if ended == self._last else 2):
            self._held.append(self.timeline.alloc(layer_input(self.scenario), "held inputs"))

    def _keeps(self, unit: Unit) -> bool:
        return super()._keeps(unit) or unit == ROOT

    def _leave(self, unit: Unit) -> None:
        """Reshard the unit; the root's weights stay gathered until the end of the backward pass."""
        if unit != ROOT:
            self._reshard(unit)

    def _gather(self, unit: Unit) -> None:
        """Gather the flat weights of a unit after the rate limiter's wait, that of the layer before its adapters'."""
        if unit in self._live or unit not in self._flats:
            return
        self._live[unit] = [self._gather_flat(flat) for flat in reversed(self._flats[unit])]

    def _gather_flat(self, flat: FlatWeight) -> int:
        """Gather one flat weight from the cast of each part, which has a stream of its own (``_pre_unshard_stream``).

        The gather of the unit before the last has ended when the rate limiter has waited, so that its cast is unused.
        """
        part = flat.part(self.scenario.shards)
        cast = self._copy(flat, part)
        self._pending.drain(IN_FLIGHT - 1)
        self._casts.drain(IN_FLIGHT - 1)
        whole = self.timeline.alloc(flat.gathered * self.scenario.shards * part, GATHERED, COMMUNICATION)
        if cast is not None:
            self._casts.add(cast)
        return whole

    def _copy(self, flat: FlatWeight, part: int) -> int | None:
        """Copy a part that is offloaded to the GPU, and cast it to the type of the pass (`pre_unshard`)."""
        copied = None
        if self.scenario.spec.offload_param:
            copied = self.timeline.alloc(flat.held * part, GATHERED, CAST)
        if flat.gathered == flat.held:
            return copied
        cast = self.timeline.alloc(flat.gathered * part, GATHERED, CAST)
        if copied is not None:
            self.timeline.free(copied)
        return cast

    def _reshard(self, unit: Unit) -> None:
        for key in reversed(self._live.pop(unit, [])):
            self._pending.add(key)


def broadcast_buckets(sizes: list[int]) -> list[int]:
    """Return the bytes of the flat copies in which rank 0 sends tensors of ``sizes`` (``comm.cpp``).

    A bucket is closed once it has reached its limit; a tensor that is alone in one is not copied.
    """
    copies: list[int] = []
    bucket = count = 0
    for size in sizes:
        bucket, count = bucket + size, count + 1
        if bucket >= BROADCAST_BUCKET:
            copies += [bucket] if count > 1 else []
            bucket = count = 0
    return copies + ([bucket] if count > 1 else [])
