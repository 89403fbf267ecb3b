"""Memory of one rank under FSDP2, beside the activations of the model.

Sources: torch 2.13's FSDP2 (``_fully_shard/_fsdp_param_group.py``, ``_fsdp_collectives.py``) as Accelerate's
``fsdp2_prepare_model`` sets it up.
"""

from math import ceil

from shardmake.memory import states
from shardmake.memory.ddp import DdpMemory
from shardmake.memory.states import EMBEDDING, HEAD, Unit, trained_units, unit_tensors, units
from shardmake.memory.timeline import COMMUNICATION, REDUCTION


class Fsdp2Memory(DdpMemory):
    """FSDP2 as Accelerate prepares it: a unit per layer, the embedding, and norm with head, which stays gathered.

    An all-gather arrives flat and is copied out into the weights; in the backward pass the next one runs at the same
    time. The gradients of a layer go flat into a reduce-scatter when its backward pass has ended.
    """

    def load(self) -> None:
        """Allocate this rank's part of everything; tensors load whole in fp32 (``fsdp2_load_full_state_dict``)."""
        self._units = units(self.scenario)
        self._tensors = unit_tensors(self.scenario.held_model, self.scenario.split, self.scenario.compute)
        self._trained = trained_units(self.scenario.model, self.scenario.split)
        self._live: dict[Unit, list[int]] = {}
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

    def after_forward(self, unit: Unit) -> None:
        """Reshard the unit, unless weights stay gathered during the whole step, as norm and head do."""
        if not self._keeps(unit):
            self._reshard(unit)

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

    def gradient(self, name: str, key: int | None) -> bool:
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
        self._live[unit] = [self.timeline.alloc(compute * numel, "gathered weights")]
        if self.scenario.shards == 1:
            self._allocate_briefly(compute * max(self._tensors[unit]), "gathered weights")
        self._drop_flat(but=unit)

    def _drop_flat(self, but: Unit | None = None) -> None:
        for unit in [unit for unit in self._flat if unit != but]:
            self.timeline.free(self._flat.pop(unit))

    def _reshard(self, unit: Unit) -> None:
        self.timeline.free(*self._live.pop(unit, []))

    def _reduce(self, unit: Unit) -> None:
        """Copy a unit's gradients into the reduce-scatter's input; its output becomes fp32 gradients of the part."""
        self._finish_reduction()
        trained = self._trained.get(unit, 0)
        if trained and self._waiting:
            copied = self.scenario.gradient * min(trained, self._units.get(unit, 0))
            self._reducing = self.timeline.alloc(copied, "communication buffers")
        self.timeline.free(*self._waiting)
        self._waiting.clear()
        self._leave(unit)
        if trained:
            self._add_part(str(unit), ceil(trained / self.scenario.shards))

    def _add_part(self, name: str, part: int) -> None:
        """Allocate the output of the reduce-scatter in the weights' type; keep it or add it to the gradients."""
        output = self.timeline.alloc(self.scenario.gradient * part, "communication buffers", REDUCTION)
        held, wide = states.trained_bytes(self.scenario), output
        if self.scenario.gradient == held:
            self.timeline.rename(output, "gradients")
        else:
            wide = self.timeline.alloc(held * part, "gradients", REDUCTION)
            self.timeline.free(output)
        if name in self.gradients or self.scenario.spec.offload_optimizer:
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
