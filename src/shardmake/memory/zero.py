"""What DeepSpeed's ZeRO allocates around the model's own forward and backward pass.

Sources: DeepSpeed 0.19, ``runtime/zero/stage_1_and_2.py``, ``stage3.py``, ``partitioned_param_coordinator.py``,
``partition_parameters.py``.
"""

from math import ceil

from shardmake.memory import states
from shardmake.memory.ddp import MemoryEngine
from shardmake.memory.timeline import COMMUNICATION, Pending
from shardmake.memory.units import EMBEDDING, HEAD, Unit, units

PENDING = 2  # fetches that may be under way (``PartitionedParameterCoordinator.__max_ongoing_fetch_events``)


class Zero(MemoryEngine):
    """What all stages share: flat partitions, in groups, and an optimizer step group by group."""

    def load(self) -> None:
        """The resident states; gradients of the largest group come and go (`initialize_optimizer_states`)."""
        super().load()
        if not self.scenario.offloads_optimizer:
            self._brief(4 * self._groups()[0], "fp32 gradients")

    def _take(self, term: str, size: int) -> list[int]:
        """Partitions are flat: masters are one tensor a group, Adam's moments two."""
        groups = {"master weights": self._groups(), "optimizer states": 2 * self._groups()}.get(term, [1])
        whole = sum(groups)
        return [self.timeline.alloc(size * group // whole, term) for group in groups]

    def _groups(self) -> list[int]:
        """Elements of each group that the optimizer updates at once."""
        return states.step_groups(self.scenario, self.buckets)

    def step(self) -> None:
        """The norm in fp64, then one group after the other gets fp32 gradients."""
        self._brief(states.norm_bytes(self.scenario), "gradient norm")
        for group in self._groups():
            if self.scenario.offloads_optimizer:
                self._update()
            else:
                self._step_group(group)
        self._drop_gradients()

    def _step_group(self, group: int) -> None:
        compute = self.scenario.compute
        grad = self.timeline.alloc(compute * group, "flat gradients")
        if compute < 4:
            wide = self.timeline.alloc(4 * group, "fp32 gradients")
            self.timeline.free(grad)
            grad = wide
        if self.scenario.zero_stage < 3:
            self._drop_gradients()
        self._make_states()
        self._update()
        self.timeline.free(grad)


class ZeroOneTwo(Zero):
    """ZeRO-1 and 2: whole weights; gradients go through a bucket into this rank's part (2) or stay (1)."""

    def start_backward(self) -> None:
        """The buckets live during a backward pass."""
        count = 2 if self.buckets.overlap_comm else 1
        size = self.scenario.compute * self.buckets.reduce_bucket_size
        self._ipg = [self.timeline.alloc(size, "communication buffers") for _ in range(count)]
        self._large: int | None = None

    def gradient(self, name: str, size: int, key: int | None) -> bool:
        """Stage 2 copies it into a bucket; one larger than the bucket stays until it is reduced itself."""
        if self.scenario.zero_stage == 1:
            return super().gradient(name, size, key)
        self._reserve_part()
        self._brief(states.boundary_norm_bytes(self.scenario, self.sizes[name]), "gradient norm")
        if key is None or self.sizes[name] <= self.buckets.reduce_bucket_size:
            return False
        self._release_large()
        self.timeline.rename(key, "gradients")
        self._large = key
        return True

    def _reserve_part(self) -> None:
        if "part" not in self.gradients and not self.scenario.offloads_optimizer:
            self.gradients["part"] = self.timeline.alloc(self.scenario.compute * sum(self._groups()), "gradients")

    def _release_large(self) -> None:
        if self._large is not None:
            self.timeline.free(self._large)
            self._large = None

    def end_backward(self) -> None:
        """The buckets go."""
        self._release_large()
        for key in self._ipg:
            self.timeline.free(key)


class ZeroThree(Zero):
    """ZeRO-3: weights are gathered before a layer needs them and let go when their next use is far."""

    def load(self) -> None:
        """The rank's part of everything, and weights too small to be cut; each tensor comes whole (`zero.Init`)."""
        self._brief(self.scenario.compute * max(self.sizes.values()), "weights on their way")
        super().load()
        self._units = units(self.scenario)
        self._order: list[Unit] = [EMBEDDING, *sorted(u for u in self._units if isinstance(u, int)), HEAD]
        self._live: dict[Unit, int] = {}
        self._pending = Pending(self.timeline)

    def before_forward(self, block: int) -> None:
        """Gather the layer; drop the embedding after its use."""
        if block == 0:
            self._fetch(EMBEDDING)
            self._leave(EMBEDDING)
        self._fetch(block)

    def after_forward(self, block: int) -> None:
        """Let the layer go, unless its use in the backward pass is near."""
        self._leave(block)

    def before_head(self) -> None:
        """Gather norm and head."""
        self._fetch(HEAD)

    def before_backward(self, block: int) -> None:
        """Gather the layer, let the one after it go."""
        after = block + 1 if block + 1 in self._units else HEAD
        self._release(after)
        self._fetch(block)

    def gradient(self, name: str, size: int, key: int | None) -> bool:
        """It is copied into the bucket; one larger than the bucket is reduced where it lies.

        With its states offloaded, this rank's part takes its norm and goes to the host in fp32
        (``_offload_grad_partition_at_boundary``).
        """
        if self.scenario.offloads_optimizer:
            part = ceil(self.sizes[name] / self.scenario.shards)
            held = self.timeline.alloc(self.scenario.compute * part, "gradients on their way", COMMUNICATION)
            self._brief(states.boundary_norm_bytes(self.scenario, self.sizes[name]), "gradient norm", COMMUNICATION)
            self._brief(4 * part, "gradients on their way", COMMUNICATION)
            self.timeline.free(held)
        return False

    def end_backward(self) -> None:
        """Nothing gathered remains."""
        for unit in list(self._live):
            self._release(unit)
        self._pending.settle(0)

    def _fetch(self, unit: Unit) -> None:
        """The gathered bytes arrive flat and are copied out; a prefetched bucket is on its way beside them.

        A single rank has nothing to gather: the weight is its partition, brought from the host if it lies there.
        """
        if unit in self._live or not self._units.get(unit):
            return
        self._pending.settle(PENDING - 1)
        compute = self.scenario.compute
        if self.scenario.world_size == 1:
            if self.scenario.offloads_parameters:
                self._live[unit] = self.timeline.alloc(compute * self._units[unit], "gathered weights")
            return
        flat = self.timeline.alloc(compute * self._units[unit], "gathered weights", COMMUNICATION)
        ahead = min(self.buckets.stage3_prefetch_bucket_size, self._units[unit])
        prefetched = self.timeline.alloc(compute * ahead, "gathered weights", COMMUNICATION)
        self._live[unit] = self.timeline.alloc(compute * self._units[unit], "gathered weights")
        self.timeline.free(flat)
        self.timeline.free(prefetched)

    def _leave(self, unit: Unit) -> None:
        """Keep a unit only where its next use is within the reuse distance and the live window has room."""
        place = self._order.index(unit)
        between = 2 * sum(self._units.get(later, 0) for later in self._order[place + 1 :])
        live = sum(self._units[held] for held in self._live)
        if between > self.buckets.stage3_max_reuse_distance or live > self.buckets.stage3_max_live_parameters:
            self._release(unit)

    def _release(self, unit: Unit) -> None:
        """Let a unit go; its memory can be used again once the GPU is done with it (`record_stream`)."""
        if unit in self._live:
            self._pending.add(self._live.pop(unit))
