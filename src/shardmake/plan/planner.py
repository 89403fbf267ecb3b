"""Candidates, verdicts, the choice with its reason, and the fallbacks after an out-of-memory."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec

from shardmake.config.models import Attention, Cluster, Precision, Run, Strategy
from shardmake.config.strategies import STRATEGY_SPECS
from shardmake.core.errors import ConfigError, ShardmakeError
from shardmake.core.units import GIB
from shardmake.memory import calibration, closed_form
from shardmake.memory.buckets import Buckets, read_buckets, zero_optimization
from shardmake.memory.estimate import COMFORT, Estimate, estimate_closed_form, estimate_simulated, events_of, verdict
from shardmake.memory.events import StepEvents
from shardmake.memory.hardware import Hardware, from_cluster
from shardmake.memory.model import Model, Split, split
from shardmake.memory.read_config import read_model
from shardmake.memory.scenario import BYTES, LibraryBehavior, Scenario
from shardmake.memory.trace import trace_all
from shardmake.plan import step_time
from shardmake.plan.tensor_parallel import check_tensor_parallel
from shardmake.run.plan import CandidateEstimate, Choice, Fallback, MemoryEstimates, Plan, Resources, Workload

ALMOST = 1.1  # of the GPU's memory: above it, the closed form is trusted to rule a candidate out
LESS = 0.97  # of the memory of the fallback before: less of a difference is no use


@dataclass(frozen=True)
class Candidate:
    """One choice with its memory, its verdict and its time."""

    choice: Choice
    memory: Estimate
    fits: bool
    tight: bool
    reason: str
    step_seconds: float
    acted: bool
    """Whether the step was acted out; else the figures are the closed form's."""
    halved: bool = False
    """Whether it computes in 16 bits where the run says fp32: a fallback of the fallbacks, never the first choice."""

    @property
    def name(self) -> str:
        """What people call it, and the key of `Plan.rejected`."""
        return describe(self.choice) + (f", {self.choice.precision}" if self.halved else "")

    def as_record(self) -> CandidateEstimate:
        """Return the candidate as it is written to memory.json."""
        return CandidateEstimate(
            name=self.name,
            choice=self.choice,
            **self.memory.as_json(),
            fits=self.fits,
            reason=self.reason,
            step_seconds=self.step_seconds,
            method="simulated" if self.acted else "closed form",
        )


@dataclass(frozen=True)
class ResolvedRun:
    """A run with every `auto` that does not depend on memory resolved."""

    run: Run
    model: Model
    split: Split
    cluster: Cluster
    hardware: Hardware
    precision: Precision
    attention: Attention
    weights: Precision = "fp32"
    """Data type of the trained weights under DDP and FSDP; only `shardmake estimate` changes it."""
    behavior: LibraryBehavior = field(default_factory=LibraryBehavior)
    """How the libraries behave; only `shardmake estimate` changes it."""

    @property
    def workload(self) -> Workload:
        """What is trained, the same for every candidate."""
        return Workload(
            model=self.run.model,
            sequence_length=self.run.sequence_length,
            packing=self.run.packing,
            objective=self.run.objective,
            method=self.run.method,
            optimizer=self.run.optimizer,
            attention=self.attention,
            loss=self.run.loss,
        )


class NothingFitsError(ShardmakeError):
    """No candidate of ``settings`` fits."""

    def __init__(self, message: str, settings: ResolvedRun) -> None:
        super().__init__(message)
        self.settings = settings


def make_plan(name: str, run: Run, cluster: Cluster) -> tuple[Plan, MemoryEstimates]:
    """The plan of run ``name`` on ``cluster``, and memory.json: every candidate with its bytes, term by term.

    Raises `ShardmakeError` where settings contradict each other or nothing fits.
    """
    settings = resolve(run, cluster)
    check(settings)
    desk = Planner(settings)
    possible = list(choices(settings))
    desk.prepare(possible)
    candidates = [desk.scan(choice) for choice in possible]
    chosen, candidates = choose(candidates, desk)
    fallbacks, candidates = fallbacks_of(chosen, candidates, desk)
    plan = Plan(
        run=name,
        choice=chosen.choice,
        workload=settings.workload,
        reason=_reason(chosen, candidates),
        rejected=_rejected(chosen, candidates),
        fallbacks=[_as_fallback(candidate, settings.hardware) for candidate in fallbacks],
        host_memory=_host_need(chosen, settings.hardware),
        resources=resources(settings, chosen),
    )
    return plan, memory_estimates(settings, candidates)


def memory_estimates(settings: ResolvedRun, candidates: Iterable[Candidate]) -> MemoryEstimates:
    """Return the content of plan/memory.json."""
    return MemoryEstimates(
        model=settings.model.architecture,
        parameters=settings.model.parameters,
        trainable=settings.split.trainable,
        gpu_memory=settings.hardware.gpu_memory,
        host_memory=settings.hardware.host_memory,
        candidates=[candidate.as_record() for candidate in candidates],
    )


# ---------------------------------------------------------------------------------------------------------------------
# What does not depend on memory


def resolve(run: Run, cluster: Cluster) -> ResolvedRun:
    """Return ``run`` on ``cluster`` with precision and attention decided.

    Raises:
        ConfigError: The run needs something that the cluster's accelerator does not have.
    """
    hardware = from_cluster(cluster)
    if hardware.is_cpu:
        _check_cpu(run)
    model = read_model(run.model, revision=run.revision, trust_remote_code=run.trust_remote_code)
    return ResolvedRun(
        run=run,
        model=model,
        split=split(model, run.method, run.lora.rank, run.lora.targets),
        cluster=cluster,
        hardware=hardware,
        precision=_precision(run, hardware),
        attention=_attention(run, hardware),
    )


def check(settings: ResolvedRun) -> None:
    """Raise a `ConfigError` if the run contradicts itself, the cluster, the model or the installed packages."""
    run, cluster, model = settings.run, settings.cluster, settings.model
    if run.nodes is not None and run.nodes > cluster.max_nodes:
        raise ConfigError(
            f"The run asks for {run.nodes} nodes, the cluster file allows {cluster.max_nodes} (max_nodes). "
            "Lower nodes, or raise max_nodes if the cluster has them."
        )
    if model.max_positions is not None and run.sequence_length > model.max_positions:
        raise ConfigError(
            f"sequence_length is {run.sequence_length}, but {model.architecture} has only {model.max_positions} "
            "positions (max_position_embeddings). Lower sequence_length."
        )
    spec = STRATEGY_SPECS.get(run.strategy)
    if spec and spec.uses_nvme and settings.hardware.nvme is None:
        raise ConfigError(f"Strategy {run.strategy} needs node-local NVMe; set nvme_path in the cluster file.")
    if run.strategy != "auto":
        check_strategy(run, run.strategy)
    check_tensor_parallel(run, cluster, model)
    _check_packages(run)


def check_strategy(run: Run, strategy: Strategy) -> None:
    """Raise a `ConfigError` if ``strategy`` cannot train ``run``, however much memory there is."""
    if reason := _unfit(run, strategy):
        raise ConfigError(reason)


def _unfit(run: Run, strategy: Strategy) -> str:
    """Why ``strategy`` is nothing for ``run``, whatever memory there is, and what to do; empty if it is not so."""
    spec = STRATEGY_SPECS[strategy]
    if run.script and spec.uses_nvme:
        return (
            f"Strategy {strategy} is not for a script: what DeepSpeed alone saved with it cannot be merged, and "
            "resumes without the optimizer's moments. Take zero3-offload, or let Shardmake train (engine: loop)."
        )
    if not run.script and run.optimizer == "adafactor" and spec.is_fsdp and run.fsdp_version == 2:
        return (
            "optimizer: adafactor fails at the first step under FSDP2, whose tensors transformers' Adafactor cannot "
            "add to its own. Take a ZeRO strategy, or another optimizer."
        )
    return ""


def _check_packages(run: Run) -> None:
    """What only some runs need and Shardmake does not install; without it the ranks would fail, or fall back."""
    wanted = {
        "loss: fused": ("liger_kernel", "liger-kernel", run.loss == "fused"),
        "attention: flash": ("flash_attn", "flash-attn", run.attention == "flash"),
        "optimizer: adamw8bit": ("bitsandbytes", "bitsandbytes", run.optimizer == "adamw8bit"),
        "method: qlora": ("bitsandbytes", "bitsandbytes", run.method == "qlora"),
    }
    for setting, (module, package, is_wanted) in wanted.items():
        if is_wanted and find_spec(module) is None:
            raise ShardmakeError(
                f"{setting} needs the package {package}, which is not installed: pip install {package}"
            )


def _check_cpu(run: Run) -> None:
    needs_gpu = {
        "optimizer: adamw8bit": run.optimizer == "adamw8bit",
        "method: qlora": run.method == "qlora",
        "attention: flash": run.attention == "flash",
        "precision: fp16": run.precision == "fp16",
        "loss: fused": run.loss == "fused",
    }
    for setting, wanted in needs_gpu.items():
        if wanted:
            raise ShardmakeError(
                f"{setting} needs a GPU, and the cluster file says accelerator: cpu. Change one of them."
            )


def _precision(run: Run, hardware: Hardware) -> Precision:
    has_bf16 = hardware.accelerator.bf16 > 0
    if run.precision == "auto":
        return "fp32" if hardware.is_cpu else "bf16" if has_bf16 else "fp16"
    if run.precision == "bf16" and not has_bf16:
        raise ShardmakeError(
            f"precision: bf16 needs Ampere or later, and {hardware.accelerator.name} is older. Use fp16, or auto."
        )
    return run.precision


def _attention(run: Run, hardware: Hardware) -> Attention:
    has_flash = hardware.accelerator.capability >= 8.0
    if run.attention == "flash" and not has_flash:
        raise ShardmakeError(
            f"attention: flash needs Ampere or later, and {hardware.accelerator.name} is older. Use sdpa, or auto."
        )
    if run.attention == "auto":
        return "flash" if has_flash and find_spec("flash_attn") else "sdpa"
    return run.attention


# ---------------------------------------------------------------------------------------------------------------------
# Candidates


def choices(settings: ResolvedRun, strategies: Sequence[Strategy] = ()) -> Iterator[Choice]:
    """Yield every way to run ``settings``, fewest nodes first; the global batch size is the same in all.

    ``strategies`` replaces the run's own.
    """
    run, hardware = settings.run, settings.hardware
    node_counts = [run.nodes] if run.nodes else range(1, hardware.max_nodes + 1)
    usable = [nodes for nodes in node_counts if run.global_batch_size % _readers(settings, nodes) == 0]
    if not usable:
        raise ShardmakeError(_batch_advice(settings, list(node_counts)))
    found = [
        Choice(
            strategy=strategy,
            gradient_checkpointing=checkpointing,
            micro_batch_size=micro,
            gradient_accumulation_steps=run.global_batch_size // (_readers(settings, nodes) * micro),
            nodes=nodes,
            processes_per_node=hardware.processes_per_node,
            precision=settings.precision,
            tensor_parallel=run.tensor_parallel,
        )
        for nodes in usable
        for strategy in strategies or _strategies(settings, nodes)
        for checkpointing in _checkpointing(run)
        for micro in _micro_batches(settings, run.global_batch_size // _readers(settings, nodes))
    ]
    if not found:
        raise ShardmakeError(_micro_advice(settings, usable))
    yield from found


def _readers(settings: ResolvedRun, nodes: int) -> int:
    """Ranks that see data of their own; those of one tensor-parallel group see the same."""
    return nodes * settings.hardware.processes_per_node // settings.run.tensor_parallel


def _strategies(settings: ResolvedRun, nodes: int) -> Iterable[Strategy]:
    run = settings.run
    if run.strategy != "auto":
        return [run.strategy]
    if settings.hardware.is_cpu:
        return [name for name, spec in STRATEGY_SPECS.items() if spec.cpu]
    sharded = {
        name: spec
        for name, spec in STRATEGY_SPECS.items()
        if not spec.hybrid or min(nodes, settings.hardware.processes_per_node) > 1
    }
    if run.method == "qlora":
        sharded = {name: spec for name, spec in sharded.items() if spec.qlora}
    if run.optimizer == "adamw8bit":
        sharded = {name: spec for name, spec in sharded.items() if not spec.offload_optimizer}
    if settings.hardware.nvme is None:
        sharded = {name: spec for name, spec in sharded.items() if not spec.uses_nvme}
    return [name for name in sharded if not _unfit(run, name)]


def _checkpointing(run: Run) -> list[bool]:
    return [False, True] if run.gradient_checkpointing == "auto" else [run.gradient_checkpointing]


def _micro_batches(settings: ResolvedRun, per_rank: int) -> list[int]:
    """Divisors of a rank's share of the global batch, largest first, at most 64."""
    wanted = settings.run.micro_batch_size
    sizes = range(min(per_rank, 64), 0, -1) if wanted == "auto" else [wanted]
    return [size for size in sizes if per_rank % size == 0]


def _batch_advice(settings: ResolvedRun, node_counts: list[int]) -> str:
    run, ranks = settings.run, _readers(settings, node_counts[0])
    below, above = run.global_batch_size // ranks * ranks, -(-run.global_batch_size // ranks) * ranks
    sizes = " or ".join(str(size) for size in (below, above) if size)
    return (
        f"global_batch_size {run.global_batch_size} cannot be divided over {ranks} ranks "
        f"({node_counts[0]} nodes x {settings.hardware.processes_per_node}). Use {sizes}, or another number of nodes."
    )


def _micro_advice(settings: ResolvedRun, usable: list[int]) -> str:
    run = settings.run
    ranks = _readers(settings, usable[0])
    step = ranks * int(run.micro_batch_size)
    below, above = run.global_batch_size // step * step, -(-run.global_batch_size // step) * step
    sizes = " or ".join(str(size) for size in (below, above) if size)
    return (
        f"global_batch_size {run.global_batch_size} is no multiple of {ranks} ranks x micro_batch_size "
        f"{run.micro_batch_size}. Use a global_batch_size of {sizes}, or micro_batch_size: auto."
    )


class Planner:
    """Estimates candidates of one run, and remembers what they share."""

    def __init__(self, settings: ResolvedRun) -> None:
        self.settings = settings
        self._profiles: dict[tuple[object, ...], closed_form.Profile] = {}
        self._scripts: dict[tuple[object, ...], StepEvents] = {}

    def prepare(self, possible: Iterable[Choice]) -> None:
        """Trace at once what ``possible`` need, where the model has no closed form."""
        if self.settings.model.decoder is None:
            trace_all(scenario_of(self.settings, choice) for choice in possible)

    def scan(self, choice: Choice) -> Candidate:
        """``choice`` in closed form."""
        scenario, buckets = scenario_of(self.settings, choice), buckets_of(self.settings, choice)
        activations = closed_form.profile(scenario, self._profiles)
        return self._judged(
            choice, scenario, estimate_closed_form(scenario, buckets, activations, self._kept), acted=False
        )

    def act(self, choice: Choice) -> Candidate:
        """Return ``choice`` with its step simulated, allocation by allocation."""
        scenario, buckets = scenario_of(self.settings, choice), buckets_of(self.settings, choice)
        return self._judged(choice, scenario, self._simulated(scenario, buckets), acted=True)

    def _simulated(self, scenario: Scenario, buckets: Buckets) -> Estimate:
        key = (scenario.micro_batch, scenario.checkpointing, scenario.autocast, scenario.precision)
        if key not in self._scripts:
            self._scripts[key] = events_of(scenario)
        capacity = self.settings.hardware.gpu_memory
        return estimate_simulated(scenario, buckets, self._scripts[key], self._kept, capacity)

    @property
    def _kept(self) -> int:
        return self.settings.run.checkpoints.most(self.settings.run.max_steps)

    def _judged(self, choice: Choice, scenario: Scenario, memory: Estimate, acted: bool) -> Candidate:
        hardware = self.settings.hardware
        fits, reason = verdict(memory, scenario, hardware)
        tight = not hardware.is_cpu and memory.gpu.device * COMFORT > hardware.gpu_memory
        seconds = step_time.step_time(scenario, hardware).total
        halved = choice.precision != self.settings.precision
        return Candidate(choice, memory, fits, tight, reason, seconds, acted, halved)


def scenario_of(settings: ResolvedRun, choice: Choice) -> Scenario:
    """``choice`` as the memory formulas see it."""
    run = settings.run
    return Scenario(
        model=settings.model,
        split=settings.split,
        strategy=choice.strategy,
        nodes=choice.nodes,
        ranks_per_node=choice.processes_per_node,
        micro_batch=choice.micro_batch_size,
        sequence_length=run.sequence_length,
        accumulation=choice.gradient_accumulation_steps,
        checkpointing=choice.gradient_checkpointing,
        attention=settings.attention,
        masked=settings.attention == "sdpa",
        precision=choice.precision,
        weights=settings.weights,
        optimizer=run.optimizer,
        method=run.method,
        loss=run.loss,
        lora_rank=run.lora.rank,
        lora_targets=run.lora.targets if isinstance(run.lora.targets, str) else tuple(run.lora.targets),
        lora_dropout=run.lora.dropout,
        on_cpu=settings.hardware.is_cpu,
        checkpoint_in_memory=run.checkpoints.asynchronous and settings.cluster.scratch_in_memory,
        fsdp_version=run.fsdp_version,
        stack=settings.behavior,
        calibration=calibration.read(settings.hardware.accelerator.name),
    )


def buckets_of(settings: ResolvedRun, choice: Choice) -> Buckets:
    """DeepSpeed's buffer sizes for ``choice``: those of the file that is rendered."""
    if not choice.is_deepspeed:
        return Buckets()
    return read_buckets(zero_optimization(choice, settings.model, settings.cluster, ""), settings.model.hidden_size)


# ---------------------------------------------------------------------------------------------------------------------
# The choice


def choose(candidates: list[Candidate], desk: Planner) -> tuple[Candidate, list[Candidate]]:
    """The fastest that fits with room to spare on the fewest nodes; a tight one only where nothing else fits.

    Candidates come in closed form; from the best on they are acted out until one holds. The second value is all of
    them with the better figures where there are some.
    """
    known = {candidate.name: candidate for candidate in candidates}
    for wants_room in (True, False):
        for candidate in sorted(candidates, key=_order_of_trial):
            if not _may_fit(candidate, desk.settings.hardware):
                continue
            if not known[candidate.name].acted:
                known[candidate.name] = desk.act(candidate.choice)
            acted = known[candidate.name]
            if acted.fits and not (wants_room and acted.tight):
                return acted, list(known.values())
    raise NothingFitsError(_nothing_fits(list(known.values()), desk.settings), desk.settings)


def _may_fit(candidate: Candidate, hardware: Hardware) -> bool:
    """Whether acting out may still find room: the closed form is within a tenth of it."""
    return candidate.fits or (
        not hardware.is_cpu
        and candidate.memory.gpu.device < ALMOST * hardware.gpu_memory
        and _host_fits(candidate, hardware)
    )


def _host_fits(candidate: Candidate, hardware: Hardware) -> bool:
    return candidate.memory.host_total <= hardware.host_memory


def _order_of_trial(candidate: Candidate) -> tuple[int, tuple[float, tuple[bool, int], bool, int]]:
    return candidate.choice.nodes, _preference(candidate)


def _preference(candidate: Candidate) -> tuple[float, tuple[bool, int], bool, int]:
    """Faster first; within a percent the simpler strategy, then no checkpointing, then the smaller micro batch."""
    choice = candidate.choice
    simplicity = choice.is_fsdp, 0 if choice.is_fsdp else choice.spec.fallback_order
    rounded = float(f"{candidate.step_seconds:.2g}")
    return rounded, simplicity, choice.gradient_checkpointing, choice.micro_batch_size


def describe(choice: Choice) -> str:
    """``zero2, checkpointing, micro batch 4, 2 nodes``."""
    parts = [choice.strategy, "checkpointing" if choice.gradient_checkpointing else "no checkpointing"]
    nodes = "1 node" if choice.nodes == 1 else f"{choice.nodes} nodes"
    return ", ".join([*parts, f"micro batch {choice.micro_batch_size}", nodes])


def _reason(chosen: Candidate, candidates: list[Candidate]) -> str:
    fitting = [candidate for candidate in candidates if candidate.fits]
    rivals = sum(candidate.choice.nodes == chosen.choice.nodes for candidate in fitting)
    lead = "the only candidate that fits" if rivals == 1 else f"the fastest of {rivals} candidates that fit"
    if rivals < len(fitting):
        lead += " on the fewest nodes"
    return f"{chosen.name}: {lead} ({chosen.reason.removeprefix('fits: ')}, about {chosen.step_seconds:.3g} s a step)."


def _rejected(chosen: Candidate, candidates: list[Candidate]) -> dict[str, str]:
    return {candidate.name: _why_not(candidate, chosen) for candidate in candidates if candidate is not chosen}


def _why_not(candidate: Candidate, chosen: Candidate) -> str:
    if not candidate.fits or candidate.tight:
        return candidate.reason
    if candidate.choice.nodes > chosen.choice.nodes:
        return "takes more nodes than needed"
    ratio = candidate.step_seconds / chosen.step_seconds
    return f"{ratio:.2f} times the time per step" if ratio > 1.005 else "no faster, and less simple"


def _nothing_fits(candidates: list[Candidate], settings: ResolvedRun) -> str:
    best = min(candidates, key=lambda candidate: candidate.memory.gpu.device + candidate.memory.host_total)
    subject = "Nothing fits" if settings.run.strategy == "auto" else f"Strategy {settings.run.strategy} does not fit"
    return (
        f"{subject}: even {best.name} {best.reason}. "
        "Use more nodes (max_nodes), a shorter sequence_length, method: lora, or strategy: auto."
    )


# ---------------------------------------------------------------------------------------------------------------------
# The fallbacks


def fallbacks_of(
    chosen: Candidate, candidates: list[Candidate], desk: Planner
) -> tuple[list[Candidate], list[Candidate]]:
    """What follows the choice after each out-of-memory: each fallback needs less GPU memory than the one before.

    The order is that of DeepSpeed's guide: recomputation, ZeRO-2, its offload, ZeRO-3, its offloads, 16 bits, NVMe,
    more nodes. The second value is all candidates, with acted figures for the fallbacks.
    """
    fallbacks: list[Candidate] = []
    candidates = [*candidates, *_half_precision(candidates, desk)]
    known = {candidate.name: candidate for candidate in candidates}
    below = chosen.memory.gpu.device
    for candidate in sorted(candidates, key=_next_fallback):
        if not _is_below(candidate, chosen) or candidate.memory.gpu.device > LESS * below:
            continue
        acted = candidate if candidate.acted else desk.act(candidate.choice)
        known[acted.name] = acted
        if acted.fits and acted.memory.gpu.device < LESS * below:
            fallbacks.append(acted)
            below = acted.memory.gpu.device
    return fallbacks, list(known.values())


def _half_precision(candidates: Iterable[Candidate], desk: Planner) -> list[Candidate]:
    """``candidates`` in 16 bits, where the run says fp32 and the GPU has them: bf16 from Ampere on, fp16 before."""
    settings = desk.settings
    if settings.hardware.is_cpu or settings.precision != "fp32":
        return []
    half = "bf16" if settings.hardware.accelerator.bf16 else "fp16"
    return [desk.scan(candidate.choice.model_copy(update={"precision": half})) for candidate in candidates]


def _next_fallback(candidate: Candidate) -> tuple[int, bool, bool, int, bool, int]:
    choice = candidate.choice
    late = choice.nodes, choice.spec.uses_nvme, candidate.halved
    return *late, choice.spec.fallback_order, choice.gradient_checkpointing, -choice.micro_batch_size


def _is_below(candidate: Candidate, chosen: Candidate) -> bool:
    """Same engine family, same or more nodes, and not before the choice in the guide's order."""
    mine, its = candidate.choice, chosen.choice
    if mine.is_fsdp != its.is_fsdp or not candidate.fits:
        return False
    if mine.spec.fallback_order < its.spec.fallback_order or mine.nodes < its.nodes:
        return False
    one_sequence = mine.micro_batch_size in (its.micro_batch_size, 1)
    return one_sequence and (mine.gradient_checkpointing or not its.gradient_checkpointing)


# ---------------------------------------------------------------------------------------------------------------------
# What Slurm is asked for


def resources(settings: ResolvedRun, chosen: Candidate) -> dict[str, Resources]:
    """Memory and cores per node by stage; every figure with a quarter to spare and at most what a node has."""
    hardware, model = settings.hardware, settings.model
    weights = BYTES[settings.precision] * model.parameters
    largest = 4 * model.largest_tensor
    few = min(4, hardware.cpus_per_node)
    return {
        "train": _resources(hardware, _host_need(chosen, hardware), hardware.cpus_per_node),
        "consolidate": _resources(hardware, 2 * GIB + 4 * largest, few),
        "evaluate": _resources(hardware, 3 * GIB + (4 * model.parameters if hardware.is_cpu else 2 * weights), few),
        "data": _resources(hardware, 4 * GIB, few),
    }


def _as_fallback(candidate: Candidate, hardware: Hardware) -> Fallback:
    need = _host_need(candidate, hardware)
    asked = _resources(hardware, need, hardware.cpus_per_node)
    return Fallback(choice=candidate.choice, host_memory=need, memory_gib=asked.memory_gib)


def _host_need(candidate: Candidate, hardware: Hardware) -> int:
    """Host RAM per node, bytes; without GPUs all tensors lie there."""
    tensors = candidate.choice.processes_per_node * candidate.memory.gpu.reserved if hardware.is_cpu else 0
    return candidate.memory.host_total + tensors


def _resources(hardware: Hardware, needed: int, cpus: int) -> Resources:
    gib = -(-int(1.25 * needed) // GIB)
    return Resources(memory_gib=max(1, min(gib, hardware.host_memory // GIB)), cpus=cpus)
