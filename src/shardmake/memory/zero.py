"""Memory of one rank under DeepSpeed's ZeRO, beside the activations of the model.

Sources: DeepSpeed 0.19, ``runtime/zero/stage_1_and_2.py``, ``stage3.py``, ``partitioned_param_coordinator.py``,
``partition_parameters.py``.
"""

from math import ceil

from shardmake.memory import states
from shardmake.memory.ddp import DdpMemory
from shardmake.memory.states import EMBEDDING, HEAD, Unit, units
from shardmake.memory.timeline import COMMUNICATION, REDUCTION, Pending

PENDING = 2  # fetches in flight (``PartitionedParameterCoordinator.__max_ongoing_fetch_events``)
REDUCTIONS = 3  # reductions in flight (one more than ``max_param_reduce_events``)


class ZeroMemory(DdpMemory):
    """Common to all stages: flat partitions, in groups, and an optimizer step group by group."""

    def load(self) -> None:
        """Allocate the resident states, and briefly gradients of the largest group (`initialize_optimizer_states`)."""
        super().load()
        if not self.scenario.spec.offload_optimizer:
            self._allocate_briefly(4 * self._groups()[0], "fp32 gradients")

    def _allocate(self, term: str, size: int) -> list[int]:
        """Allocate flat partitions: one tensor per group for the masters, two for Adam's moments."""
        groups = {"master weights": self._groups(), "optimizer states": 2 * self._groups()}.get(term, [1])
        whole = sum(groups)
        return [self.timeline.alloc(size * group // whole, term) for group in groups]

    def _groups(self) -> list[int]:
        """Return the elements of each group that the optimizer updates at once."""
        return states.step_groups(self.scenario, self.buckets)

    def step(self) -> None:
        """Compute the norm in fp64; then cast the gradients to fp32 and update, group by group."""
        self._allocate_briefly(states.norm_bytes(self.scenario, states.largest_trained(self.scenario)), "gradient norm")
        for group in self._groups():
            if self.scenario.spec.offload_optimizer:
                self._update()
            else:
                self._step_group(group)
        self._drop_gradients()

    def _step_group(self, group: int) -> None:
        if states.keeps_flat_gradients(self.scenario):
            self._make_states()
            self._update()
            return
        held = self.scenario.gradient
        grad = self.timeline.alloc(held * group, "flat gradients")
        if held < 4:
            narrow, grad = grad, self.timeline.alloc(4 * group, "fp32 gradients")
            self.timeline.free(narrow)
        if self.scenario.spec.zero_stage < 3:
            self._drop_gradients()
        self._make_states()
        self._update()
        self.timeline.free(grad)


class Zero12Memory(ZeroMemory):
    """ZeRO-1 and 2: full weights; gradients go through a bucket into this rank's part (2) or stay (1)."""

    def _allocate(self, term: str, size: int) -> list[int]:
        """Allocate flat partitions; those of a whole model are copied from a segment that stays in the cache.

        transformers loads it into one (`caching_allocator_warmup`). Adapters are made one by one.
        """
        loads = self.scenario.loads_on_gpu and not self.scenario.method_spec.has_adapters
        apart = term == "weights" and loads and states.flattens_on_gpu(self.scenario)
        loaded = self.timeline.alloc(size, term) if apart else None
        flat = super()._allocate(term, size)
        if loaded is not None:
            self.timeline.free(loaded)
        return flat

    def start_backward(self) -> None:
        """Allocate the buckets, which exist during a backward pass."""
        self._reserved = False
        self._large: list[int] = []  # the gradient that waits, larger than the bucket
        self._added: list[int] = []  # gradients of this micro step
        size = self.scenario.compute * self.buckets.reduce_bucket_size
        self._ipg = [self.timeline.alloc(size, "communication buffers") for _ in range(1 + self.buckets.overlap_comm)]

    def gradient(self, name: str, key: int | None) -> bool:
        """Copy it into a bucket under stage 2; one larger than the bucket stays until it is reduced itself."""
        numel = self.sizes[name]
        self._allocate_briefly(states.norm_bytes(self.scenario, numel, offloaded=True), "gradient norm")
        if self.scenario.spec.zero_stage == 1:
            return super().gradient(name, key)
        self._reserve_part()
        copied = states.reduction_bytes(self.scenario, self.buckets, numel)
        self._allocate_briefly(copied, "communication buffers", REDUCTION)
        if key is None or numel <= self.buckets.reduce_bucket_size:
            return False
        self.timeline.free(*self._large)
        self.timeline.rename(key, "gradients")
        self._large = [key]
        return True

    def _reserve_part(self) -> None:
        """Allocate the part's gradients at the first one; those of a later micro step are added to them at its end."""
        size = states.partition_gradients(self.scenario)
        if self._reserved or not size:
            return
        self._reserved = True
        if "part" not in self.gradients:
            self.gradients["part"] = self.timeline.alloc(size, "gradients")
        elif states.added_gradients(self.scenario):
            self._added.append(self.timeline.alloc(size, "gradients"))

    def end_backward(self) -> None:
        """Free the buckets, and the gradients that were added to those of earlier micro steps."""
        self.timeline.free(*self._large, *self._added, *self._ipg)


class Zero3Memory(ZeroMemory):
    """ZeRO-3: weights are gathered before a layer uses them and released if their next use is far."""

    def load(self) -> None:
        """Allocate the rank's part of everything and small whole weights; each tensor is first whole (`zero.Init`)."""
        self._allocate_briefly(self.scenario.compute * max(self.sizes.values()), "weights during loading")
        super().load()
        self._units = units(self.scenario)
        self._order: list[Unit] = [EMBEDDING, *sorted(u for u in self._units if isinstance(u, int)), HEAD]
        self._live: dict[Unit, int] = {}
        self._pending = Pending(self.timeline)
        self._bucket: list[int] = []  # elements of the gradients that wait for the next reduction
        self._large: int | None = None
        self._reduced = Pending(self.timeline)

    def step(self) -> None:
        """Look for infinities in the flat gradients on the stream of the reductions; then update."""
        copy, mask = states.overflow_bytes(self.scenario)
        if copy and not self.scenario.spec.offload_optimizer:
            held = self.timeline.alloc(copy, "overflow check", REDUCTION)
            self._allocate_briefly(mask, "overflow check", REDUCTION)
            self.timeline.free(held)
        super().step()

    def after_forward(self, unit: Unit) -> None:
        """Keep a unit only if its next use is within the reuse distance and the live window has room."""
        place = self._order.index(unit)
        between = 2 * sum(self._units.get(later, 0) for later in self._order[place + 1 :])
        live = sum(self._units[held] for held in self._live)
        if between > self.buckets.stage3_max_reuse_distance or live > self.buckets.stage3_max_live_parameters:
            self._release(unit)

    def before_backward(self, block: int) -> None:
        """Gather the layer and release the one after it."""
        self._release(block + 1 if block + 1 in self._units else HEAD)
        self._gather(block)

    def gradient(self, name: str, key: int | None) -> bool:
        """Copy it into the bucket; one larger than the bucket waits as it is until the next one is complete.

        With offloaded states, the norm of this rank's part is computed and the part goes to the host in fp32
        (``_offload_grad_partition_at_boundary``).
        """
        numel = self.sizes[name]
        if sum(self._bucket) + numel > self.buckets.reduce_bucket_size:
            self._reduce()
        self._bucket.append(numel)
        copied = states.reduction_bytes(self.scenario, self.buckets, numel)
        self._allocate_briefly(copied, "gradients before reduction", COMMUNICATION)
        if self.scenario.spec.offload_optimizer:
            part, norm = ceil(numel / self.scenario.shards), states.norm_bytes(self.scenario, numel, offloaded=True)
            held = self.timeline.alloc(self.scenario.gradient * part, "gradients before reduction", COMMUNICATION)
            self._allocate_briefly(norm, "gradient norm", COMMUNICATION)
            self._allocate_briefly(4 * part, "gradients before reduction", COMMUNICATION)
            self.timeline.free(held)
        if key is None or numel <= self.buckets.reduce_bucket_size:
            return False
        self.timeline.rename(key, "gradients before reduction")
        self._large = key
        return True

    def _reduce(self) -> None:
        """Reduce the bucket, from a copy sorted by rank if it holds several gradients (``reduce_scatter_coalesced``).

        A gradient outside the bucket's buffer is in use until its reduction ends on the GPU (`record_stream`).
        """
        if len(self._bucket) > 1:
            size = self.scenario.gradient * sum(self._bucket)
            self._allocate_briefly(size, "gradients before reduction", REDUCTION)
        self._bucket.clear()
        self._reduced.drain(REDUCTIONS - 1)
        if self._large is not None:
            self._reduced.add(self._large)
            self._large = None

    def end_backward(self) -> None:
        """Reduce the last bucket and release all gathered weights."""
        self._reduce()
        self._reduced.drain(0)
        for unit in list(self._live):
            self._release(unit)
        self._pending.drain(0)

    def _gather(self, unit: Unit) -> None:
        """Gather a unit: the bytes arrive flat and are copied out, while a prefetched bucket is in flight.

        A single rank gathers nothing: the weight is its partition, copied from the host if it is offloaded.
        """
        if unit in self._live or not self._units.get(unit):
            return
        self._pending.drain(PENDING - 1)
        compute = self.scenario.compute
        if self.scenario.world_size == 1:
            if self.scenario.spec.offload_param:
                self._live[unit] = self.timeline.alloc(compute * self._units[unit], "gathered weights")
            return
        flat = self.timeline.alloc(compute * self._units[unit], "gathered weights", COMMUNICATION)
        ahead = min(self.buckets.stage3_prefetch_bucket_size, self._units[unit])
        prefetched = self.timeline.alloc(compute * ahead, "gathered weights", COMMUNICATION)
        self._live[unit] = self.timeline.alloc(compute * self._units[unit], "gathered weights")
        self.timeline.free(flat, prefetched)

    def _release(self, unit: Unit) -> None:
        """Release a unit; its memory can be reused when the GPU has finished with it (`record_stream`)."""
        if unit in self._live:
            self._pending.add(self._live.pop(unit))
