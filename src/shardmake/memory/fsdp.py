"""Memory of one rank under FSDP, beside the activations of the model.

Sources: torch 2.13's FSDP2 (``_fully_shard/_fsdp_param_group.py``, ``_fsdp_collectives.py``) as Accelerate's
``fsdp2_prepare_model`` sets it up, and FSDP1 (``_init_utils.py``, ``_runtime_utils.py``, ``_limiter_utils.py``).
"""

from collections import deque
from math import ceil

from shardmake.core.units import MIB
from shardmake.memory import states
from shardmake.memory.ddp import DdpMemory
from shardmake.memory.decoder import layer_input
from shardmake.memory.scenario import BYTES
from shardmake.memory.states import EMBEDDING, HEAD, Unit, trained_units, unit_tensors, units
from shardmake.memory.timeline import COMMUNICATION, REDUCTION, Pending

BROADCAST_BUCKET = 250 * MIB  # PARAM_BROADCAST_BUCKET_SIZE in FSDP1's _init_utils.py
IN_FLIGHT = 2  # _FreeEventQueue._max_num_inflight_all_gathers in FSDP1's _limiter_utils.py


class Fsdp2Memory(DdpMemory):
    """FSDP2 as Accelerate prepares it: a unit per layer, the embedding, and norm with head, which stays gathered.

    An all-gather arrives flat and is copied out into the weights; in the backward pass the next one runs at the same
    time. The gradients of a layer go flat into a reduce-scatter when its backward pass has ended.
    """

    def load(self) -> None:
        """Allocate this rank's part of everything; tensors load whole in fp32 (``fsdp2_load_full_state_dict``)."""
        self._units = units(self.scenario)
        self._tensors = unit_tensors(self.scenario)
        self._trained = trained_units(self.scenario)
        self._live: dict[Unit, int] = {}
        self._flat: dict[Unit, int] = {}
        self._waiting: list[int] = []
        self._reducing: int | None = None
        self._last = max(unit for unit in self._units if isinstance(unit, int))
        self._begun = True
        if self.scenario.loads_on_gpu:  # 4-bit weights
            self._allocate_briefly(states.frozen_bytes(self.scenario), "weights during loading")
        self._load_states()

    def _load_states(self) -> None:
        super().load()
        self._allocate_briefly(4 * max(self.sizes.values()), "weights during loading")

    def before_forward(self, block: int) -> None:
        """Gather the layer."""
        if block == 0:
            self._gather(EMBEDDING)
            if not self._keeps(EMBEDDING):
                self._reshard(EMBEDDING)
        self._gather(block)

    def after_forward(self, block: int) -> None:
        """Reshard the layer, unless weights stay gathered during the whole step."""
        if not self._keeps(block):
            self._reshard(block)

    def before_head(self) -> None:
        """Gather norm and head, which stay until their backward pass."""
        self._gather(HEAD)

    def start_backward(self) -> None:
        """Begin with the loss; the head has not begun.

        The last flat buffer is freed when the root's forward pass has ended, after the loss (``_post_forward``).
        """
        self._drop_flat()
        self._begun = False

    def before_backward(self, block: int) -> None:
        """Reduce the layer after this one, gather this one, and prefetch the one before it."""
        self._begun = True
        self._reduce(block + 1 if block + 1 in self._units else HEAD)
        self._gather(block)
        self._drop_flat()
        if block - 1 in self._units:
            self._prefetch(block - 1)

    def gradient(self, name: str, size: int, key: int | None) -> bool:
        """Keep it until the backward pass of its unit has ended; the head prefetches the last layer."""
        if not self._begun:
            self._begun = True
            self._prefetch(self._last)
        if key is None:
            return False
        self.timeline.rename(key, "gradients before reduction")
        self._waiting.append(key)
        return True

    def end_backward(self) -> None:
        """Reduce the first layer and the embedding."""
        self._reduce(0)
        self._reduce(EMBEDDING)
        self._finish_reduction()
        self._drop_flat()
        for unit in list(self._live):
            self._reshard(unit)

    def _keeps(self, unit: Unit) -> bool:
        return not self.scenario.spec.reshard_after_forward or unit == HEAD

    def _numel(self, unit: Unit) -> int:
        return 0 if unit in self._live else self._units.get(unit, 0)

    def _prefetch(self, unit: Unit) -> None:
        """Start an all-gather: this rank's part is cast, then gathered with the others in one flat buffer.

        A single rank casts tensor by tensor and gathers nothing.
        """
        numel, compute = self._numel(unit), self.scenario.compute
        if not numel or unit in self._flat or self.scenario.shards == 1:
            return
        cast = self.timeline.alloc(compute * ceil(numel / self.scenario.shards), "gathered weights", COMMUNICATION)
        self._flat[unit] = self.timeline.alloc(compute * numel, "gathered weights", COMMUNICATION)
        self.timeline.free(cast)

    def _gather(self, unit: Unit) -> None:
        """Copy the gathered weights out; the previous flat buffer is freed after that, so that copies overlap."""
        numel, compute = self._numel(unit), self.scenario.compute
        if not numel:
            return
        self._prefetch(unit)
        self._live[unit] = self.timeline.alloc(compute * numel, "gathered weights")
        if self.scenario.shards == 1:
            self._allocate_briefly(compute * max(self._tensors[unit]), "gathered weights")
        self._drop_flat(but=unit)

    def _drop_flat(self, but: Unit | None = None) -> None:
        for unit in [unit for unit in self._flat if unit != but]:
            self.timeline.free(self._flat.pop(unit))

    def _reshard(self, unit: Unit) -> None:
        if unit in self._live:
            self.timeline.free(self._live.pop(unit))

    def _reduce(self, unit: Unit) -> None:
        """Copy a unit's gradients into the reduce-scatter's input; its output becomes fp32 gradients of the part."""
        self._finish_reduction()
        trained = self._trained.get(unit, 0)
        if trained and self._waiting:
            self._reducing = self.timeline.alloc(self.scenario.gradient * trained, "communication buffers")
        for key in self._waiting:
            self.timeline.free(key)
        self._waiting.clear()
        self._leave(unit)
        if trained:
            self._add_part(str(unit), ceil(trained / self.scenario.shards))

    def _add_part(self, name: str, part: int) -> None:
        """Allocate the output of the reduce-scatter in the weights' type; keep it or add it to the gradients."""
        output = self.timeline.alloc(self.scenario.gradient * part, "communication buffers", REDUCTION)
        if self.scenario.widens_gradients:
            self.timeline.rename(output, "gradients")
            wide = output
        else:
            wide = self.timeline.alloc(states.trained_bytes(self.scenario) * part, "gradients", REDUCTION)
            self.timeline.free(output)
        if name in self.gradients or self.scenario.offloads_optimizer:
            self.timeline.free(wide)
        else:
            self.gradients[name] = wide

    def _leave(self, unit: Unit) -> None:
        """End the unit's backward pass."""
        self._reshard(unit)

    def _finish_reduction(self) -> None:
        if self._reducing is not None:
            self.timeline.free(self._reducing)
            self._reducing = None


class Fsdp1Memory(Fsdp2Memory):
    """FSDP1: one flat weight per unit, gathered in place; the root's (embedding, norm and head) stays gathered.

    A gathered weight is released at once, but its memory is reused only when the GPU has finished with it. Two may be
    pending (the rate limiter).
    """

    def load(self) -> None:
        """Allocate the states as for FSDP2."""
        self._pending = Pending(self.timeline)
        self._held: list[int] = []
        super().load()
        if self.scenario.method == "full":
            self.trained = [part for parts in self._tensors.values() for part in self._first_part(parts)]

    def _first_part(self, parts: list[int]) -> list[int]:
        """Return the elements of a unit's tensors in the first rank's part of the flat weight (``use_orig_params``).

        The optimizer has these parts as its tensors. Each adapter is a unit of its own (PEFT's wrap policy).
        """
        left, found = ceil(sum(parts) / self.scenario.shards), []
        for part in parts:
            found.append(min(part, left))
            left -= found[-1]
        return [part for part in found if part]

    def _load_states(self) -> None:
        """Load each unit: tensors, their broadcast, their flat copy, and the part that stays (`FlatParamHandle`)."""
        terms = states.resident(self.scenario, self.buckets)
        self._state_bytes = terms.pop("optimizer states", 0)
        weights = terms.pop("weights", 0) + terms.pop("frozen weights", 0)
        for term, size in terms.items():
            self._allocate(term, size)
        for unit in self._units:
            self._wrap(unit, stays=bool(weights))

    def _wrap(self, unit: Unit, stays: bool) -> None:
        numel, held = self._units[unit], 4 if self.scenario.wide_base else self.scenario.compute
        trained, shards = self._trained.get(unit, 0), self.scenario.shards
        single = [self.timeline.alloc(held * part, "weights during loading") for part in self._tensors[unit]]
        sizes = broadcast_buckets([held * part for part in self._tensors[unit]])
        sent = deque([self.timeline.alloc(size, "weights during loading") for size in sizes[:2]])
        for size in sizes[2:]:
            self.timeline.free(sent.popleft())
            sent.append(self.timeline.alloc(size, "weights during loading"))
        for key in sent:
            self.timeline.free(key)
        flat = self.timeline.alloc(held * numel, "weights during loading")
        for key in single:
            self.timeline.free(key)
        if stays:
            self.timeline.alloc(states.trained_bytes(self.scenario) * ceil(trained / shards), "weights")
            self.timeline.alloc(held * ceil((numel - trained) / shards), "frozen weights")
        self.timeline.free(flat)

    def start_backward(self) -> None:
        """Gather the last layer ahead: the root's hook runs at the loss (``_pre_backward_hook``)."""
        self._gather_ahead(self._last)

    def before_backward(self, block: int) -> None:
        """Reduce the layer after this one; gather this one and the one before it.

        A recomputed unit is gathered twice (`Scenario.recomputes_units`); the second time takes the place of the first.
        """
        self._hold(block + 1)
        self._reduce(block + 1 if block + 1 in self._units else HEAD)
        self._gather(block)
        self._gather_ahead(block - 1)

    def _gather_ahead(self, unit: Unit) -> None:
        if not self.scenario.recomputes_units:
            self._gather(unit)

    def end_backward(self) -> None:
        """End it as for FSDP2; the GPU has finished when the optimizer begins."""
        self._hold(0)
        super().end_backward()
        self._pending.drain(0)
        for key in self._held:
            self.timeline.free(key)
        self._held.clear()

    def _hold(self, ended: Unit) -> None:
        """Keep the input of a layer that has ended (`Scenario.holds_inputs`), and the gradient that it took."""
        if not self.scenario.holds_inputs or ended not in self._units:
            return
        for _ in range(1 if ended == self._last else 2):
            self._held.append(self.timeline.alloc(layer_input(self.scenario), "held inputs"))

    def _keeps(self, unit: Unit) -> bool:
        return super()._keeps(unit) or unit == EMBEDDING

    def _leave(self, unit: Unit) -> None:
        """Reshard the unit; the root's weights stay gathered until the end of the backward pass."""
        if isinstance(unit, int):
            self._reshard(unit)

    def _gather(self, unit: Unit) -> None:
        """Gather a unit; mixed precision first casts this rank's part (``_use_low_precision_shard``)."""
        numel, scenario = self._numel(unit), self.scenario
        if not numel:
            return
        self._pending.drain(IN_FLIGHT - 1)
        trained = self._trained.get(unit, 0)
        item = scenario.compute if scenario.method == "full" else BYTES[scenario.adapter_compute]
        size = item * trained + scenario.compute * (numel - trained)
        narrow = 0 if item == states.trained_bytes(scenario) else item * ceil(trained / scenario.shards)
        if scenario.wide_base:
            narrow += scenario.compute * ceil((numel - trained) / scenario.shards)
        part = self.timeline.alloc(narrow, "gathered weights", COMMUNICATION)
        self._live[unit] = self.timeline.alloc(size, "gathered weights", COMMUNICATION)
        self.timeline.free(part)

    def _reshard(self, unit: Unit) -> None:
        if unit in self._live:
            self._pending.add(self._live.pop(unit))


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
