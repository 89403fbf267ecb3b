"""What each training engine allocates around the model's own forward and backward pass.

An `Engine` holds the states of one rank on a `Timeline` and reacts as the step goes by: before and after a layer, when
a gradient is whole, at the end of a backward pass, at the optimizer's step. Sources: DeepSpeed 0.19
``runtime/zero/stage_1_and_2.py``, ``stage3.py``, ``partitioned_param_coordinator.py``; torch's FSDP2
``_fsdp_param_group.py`` and ``_fsdp_collectives.py``; Accelerate's ``fsdp2_prepare_model``; DDP's ``reducer.cpp``.
"""

from collections import deque
from dataclasses import dataclass, field
from math import ceil

from shardmake.plan.buckets import Buckets
from shardmake.plan.memory import states
from shardmake.plan.memory.scenario import Scenario
from shardmake.plan.memory.timeline import COMMUNICATION, Timeline
from shardmake.plan.model import Tensor, is_quantized

HEAD = "head"
EMBEDDING = "embedding"
Unit = int | str
FLAT = ("model buffers", "cuBLAS workspaces", "communication buffers", "weights kept whole", "gradients")


@dataclass
class Engine:
    """DDP or a single GPU: whole weights, whole gradients, whole optimizer states."""

    scenario: Scenario
    buckets: Buckets
    timeline: Timeline
    sizes: dict[str, int] = field(default_factory=dict)
    gradients: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        model, adapters = self.scenario.model.tensors, self.scenario.split.adapters
        self.sizes = {tensor.name: tensor.numel for tensor in (*model, *adapters)}
        self.trained = [tensor.numel for tensor in (model if self.scenario.method == "full" else adapters)]
        self._late: dict[str, int] = {}

    def load(self) -> None:
        """Put on the GPU what stays there; torch's optimizers make their states in the first step."""
        for term, size in states.resident(self.scenario, self.buckets).items():
            if term == "optimizer states" and self.scenario.zero_stage == 0:
                self._late[term] = size
            else:
                self._take(term, size)

    def _take(self, term: str, size: int) -> list[int]:
        """Allocate ``size`` bytes as this engine holds them: DeepSpeed flat, the others tensor by tensor."""
        if self.scenario.zero_stage or term in FLAT:
            return [self.timeline.alloc(size, term)]
        parts = list(self.sizes.values()) if term == "frozen weights" else self.trained
        whole = sum(parts)
        return [self.timeline.alloc(size * part // whole, term) for part in parts]

    def before_forward(self, block: int) -> None:
        """A layer's forward pass begins."""

    def after_forward(self, block: int) -> None:
        """A layer's forward pass has ended."""

    def before_head(self) -> None:
        """The final norm, the head and the loss begin."""

    def before_backward(self, block: int) -> None:
        """A layer's backward pass begins; the one after it has ended."""

    def start_backward(self) -> None:
        """A backward pass begins."""

    def gradient(self, name: str, size: int, key: int | None) -> bool:
        """The gradient of ``name`` is whole, ``size`` bytes under ``key``; whether the engine keeps it."""
        if name in self.gradients or key is None:
            return False
        self.timeline.rename(key, "gradients")
        self.gradients[name] = key
        return True

    def end_backward(self) -> None:
        """A backward pass has ended."""

    def step(self) -> None:
        """The optimizer's step, after which gradients go."""
        for term, size in self._late.items():
            self._take(term, size)
        self._late.clear()
        if self.scenario.stack.foreach_optimizer:
            held = ceil(self.scenario.split.trainable / (self.scenario.shards if self.scenario.is_fsdp else 1))
            trained = states.trained_bytes(self.scenario) * held
            for key in self._take("optimizer temporaries", trained):
                self.timeline.free(key)
        self._update()
        if not self.scenario.stack.keeps_gradients:
            self._drop_gradients()

    def _update(self) -> None:
        size = states.step_temporaries(self.scenario, self.buckets)
        if size:
            self.timeline.free(self.timeline.alloc(size, "optimizer temporaries"))

    def _drop_gradients(self) -> None:
        for key in self.gradients.values():
            self.timeline.free(key)
        self.gradients.clear()


class ZeroOneTwo(Engine):
    """DeepSpeed ZeRO-1 and 2: whole weights; gradients go through a bucket into this rank's part (2) or stay (1)."""

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
        if key is None or self.sizes[name] <= self.buckets.reduce_bucket_size:
            return False
        self._release_large()
        self.timeline.rename(key, "gradients")
        self._large = key
        return True

    def _reserve_part(self) -> None:
        scenario = self.scenario
        if "part" in self.gradients or scenario.offloads_optimizer:
            return
        size = scenario.compute * ceil(scenario.split.trainable / scenario.shards)
        self.gradients["part"] = self.timeline.alloc(size, "gradients")

    def _release_large(self) -> None:
        if self._large is not None:
            self.timeline.free(self._large)
            self._large = None

    def end_backward(self) -> None:
        """The buckets go."""
        self._release_large()
        for key in self._ipg:
            self.timeline.free(key)

    def step(self) -> None:
        """Gradients of this rank's part, flattened and in fp32."""
        keys = [
            self.timeline.alloc(size, term) for term, size in states.optimizer_step(self.scenario, self.buckets).items()
        ]
        self._drop_gradients()
        self._update()
        for key in keys:
            self.timeline.free(key)


class ZeroThree(Engine):
    """DeepSpeed ZeRO-3: weights are gathered before a layer needs them and let go when their next use is far."""

    def load(self) -> None:
        """The rank's part of everything, and weights too small to be cut."""
        super().load()
        self._units = units(self.scenario)
        self._order: list[Unit] = [EMBEDDING, *sorted(u for u in self._units if isinstance(u, int)), HEAD]
        self._live: dict[Unit, int] = {}

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
        """It is copied into the bucket; one larger than the bucket is reduced where it lies."""
        return False

    def end_backward(self) -> None:
        """Nothing gathered remains."""
        for unit in list(self._live):
            self._release(unit)

    def step(self) -> None:
        """One sub-group after the other gets fp32 gradients."""
        keys = [
            self.timeline.alloc(size, term) for term, size in states.optimizer_step(self.scenario, self.buckets).items()
        ]
        self._update()
        for key in keys:
            self.timeline.free(key)

    def _fetch(self, unit: Unit) -> None:
        """The gathered bytes arrive flat and are copied out; a prefetched bucket is on its way beside them."""
        if unit in self._live or not self._units.get(unit):
            return
        compute = self.scenario.compute
        if self.scenario.world_size == 1:
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
        if unit in self._live:
            self.timeline.free(self._live.pop(unit))


class Fsdp(Engine):
    """FSDP2 as Accelerate prepares it: a unit per layer, the embedding, and norm with head, which stays gathered.

    An all-gather lands flat and is copied out into the weights; the next one is on its way by then. Backwards, a
    layer's gradients wait until it is done, then go flat into a reduce-scatter.
    """

    def load(self) -> None:
        """This rank's part of everything. FSDP1 brings each unit whole, FSDP2 each tensor."""
        self._units = units(self.scenario)
        if self.scenario.stack.fsdp1 and not self.scenario.offloads_parameters:
            self._wrap_units()
        else:
            super().load()
            whole = self.timeline.alloc(4 * max(self.sizes.values()), "weights on their way")
            self.timeline.free(whole)
        self._trained = trained_units(self.scenario)
        self._live: dict[Unit, int] = {}
        self._flat: deque[int] = deque()
        self._waiting: list[int] = []
        self._reducing: int | None = None
        self._last = max((unit for unit in self._units if isinstance(unit, int)), default=-1)

    def _wrap_units(self) -> None:
        """Each unit's tensors, their flat copy, and the part of it that stays (``FlatParamHandle``)."""
        terms = states.resident(self.scenario, self.buckets)
        self._late["optimizer states"] = terms.pop("optimizer states", 0)
        for term in ("weights", "frozen weights"):
            terms.pop(term, 0)
        for term, size in terms.items():
            self._take(term, size)
        tensors = unit_tensors(self.scenario)
        for unit, numel in self._units.items():
            compute = self.scenario.compute
            single = [self.timeline.alloc(compute * part, "weights on their way") for part in tensors[unit]]
            flat = self.timeline.alloc(compute * numel, "weights on their way")
            for key in single:
                self.timeline.free(key)
            self.timeline.alloc(compute * ceil(numel / self.scenario.shards), "weights")
            self.timeline.free(flat)

    def before_forward(self, block: int) -> None:
        """Gather the layer."""
        if block == 0:
            self._gather(EMBEDDING)
            if not self._keeps(EMBEDDING):
                self._reshard(EMBEDDING)
        self._gather(block)

    def after_forward(self, block: int) -> None:
        """Let it go, unless weights stay over the whole step."""
        if not self._keeps(block):
            self._reshard(block)

    def before_head(self) -> None:
        """Gather norm and head, which stay until their backward pass."""
        self._gather(HEAD)
        self._drop_flat()

    def before_backward(self, block: int) -> None:
        """Gather the layer and the one before it, reduce the one after it."""
        after = block + 1 if block + 1 in self._units else HEAD
        self._reduce(after)
        self._gather(block)
        if block - 1 in self._units:
            self._gather(block - 1)

    def gradient(self, name: str, size: int, key: int | None) -> bool:
        """Held until its unit is done."""
        if key is None:
            return False
        self.timeline.rename(key, "gradients on their way")
        self._waiting.append(key)
        return True

    def end_backward(self) -> None:
        """The first layer and the embedding are reduced."""
        self._reduce(0)
        self._reduce(EMBEDDING)
        self._finish_reduction()
        self._drop_flat()
        for unit in list(self._live):
            self._reshard(unit)

    def _keeps(self, unit: Unit) -> bool:
        root = unit == EMBEDDING and self.scenario.stack.fsdp1
        return self.scenario.strategy == "fsdp-grad-op" or unit == HEAD or root

    def _gather(self, unit: Unit) -> None:
        if unit in self._live or not self._units.get(unit):
            return
        size = self.scenario.compute * self._units[unit]
        if self.scenario.stack.fsdp1:
            self._live[unit] = self.timeline.alloc(size, "gathered weights", COMMUNICATION)
            return
        flat = self.timeline.alloc(size, "gathered weights", COMMUNICATION)
        self._live[unit] = self.timeline.alloc(size, "gathered weights")
        self._drop_flat()
        self._flat.append(flat)

    def _drop_flat(self) -> None:
        while self._flat:
            self.timeline.free(self._flat.popleft())

    def _reshard(self, unit: Unit) -> None:
        if unit in self._live:
            self.timeline.free(self._live.pop(unit))

    def _reduce(self, unit: Unit) -> None:
        """Copy a unit's gradients into the reduce-scatter's input; its output becomes fp32 gradients of the part."""
        self._finish_reduction()
        trained = self._trained.get(unit, 0)
        if trained and self._waiting:
            self._reducing = self.timeline.alloc(
                self.scenario.compute * trained, "communication buffers", COMMUNICATION
            )
        for key in self._waiting:
            self.timeline.free(key)
        self._waiting.clear()
        if not (self.scenario.stack.fsdp1 and isinstance(unit, str)):
            self._reshard(unit)
        self._add_part(unit, trained)

    def _add_part(self, unit: Unit, trained: int) -> None:
        name = str(unit)
        if trained and name not in self.gradients and self.scenario.strategy != "fsdp-offload":
            size = states.trained_bytes(self.scenario) * ceil(trained / self.scenario.shards)
            self.gradients[name] = self.timeline.alloc(size, "gradients")

    def _finish_reduction(self) -> None:
        if self._reducing is not None:
            self.timeline.free(self._reducing)
            self._reducing = None


def make_engine(scenario: Scenario, buckets: Buckets, timeline: Timeline) -> Engine:
    """The engine that runs ``scenario``."""
    kinds: dict[int, type[Engine]] = {1: ZeroOneTwo, 2: ZeroOneTwo, 3: ZeroThree}
    kind = Fsdp if scenario.is_fsdp else kinds.get(scenario.zero_stage, Engine)
    return kind(scenario, buckets, timeline)


def unit_of(tensor: Tensor, tied: bool) -> Unit:
    """The group that ``tensor`` is gathered with: its layer, the embedding, or the tail, which tied weights go to."""
    if tensor.block is not None:
        return tensor.block
    if tensor.kind == "embedding":
        return HEAD if tied else EMBEDDING
    return HEAD


def units(scenario: Scenario) -> dict[Unit, int]:
    """Elements of each group that is gathered; 4-bit weights count as the 16-bit elements that carry them."""
    return {unit: sum(parts) for unit, parts in unit_tensors(scenario).items()}


def unit_tensors(scenario: Scenario) -> dict[Unit, list[int]]:
    """Elements of each tensor of each group."""
    sizes: dict[Unit, list[int]] = {}
    model = scenario.model
    for tensor in (*model.tensors, *scenario.split.adapters):
        quantized = scenario.method == "qlora" and is_quantized(tensor) and "lora_" not in tensor.name
        numel = ceil(tensor.numel * states.NF4_BYTES / scenario.compute) if quantized else tensor.numel
        sizes.setdefault(unit_of(tensor, model.tied), []).append(numel)
    return sizes


def trained_units(scenario: Scenario) -> dict[Unit, int]:
    """Trained elements of each group."""
    sizes: dict[Unit, int] = {}
    trained = scenario.model.tensors if scenario.method == "full" else scenario.split.adapters
    for tensor in trained:
        unit = unit_of(tensor, scenario.model.tied)
        sizes[unit] = sizes.get(unit, 0) + tensor.numel
    return sizes
