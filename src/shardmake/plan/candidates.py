"""Candidates: the ways to run a training, each with its memory, verdict and time."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from shardmake.config.models import Run, Strategy
from shardmake.config.objectives import OBJECTIVES
from shardmake.config.strategies import STRATEGY_SPECS, StrategySpec
from shardmake.core.errors import ConfigError
from shardmake.core.units import plural
from shardmake.memory.estimate import Estimate
from shardmake.plan.parallelism import divides_experts
from shardmake.plan.refusals import multiples, undivided, unsuitable
from shardmake.plan.resolve import ResolvedRun
from shardmake.plan.verdict import Verdict
from shardmake.run.own_files import check_choice, number_of_conflicts
from shardmake.run.plan import CandidateEstimate, Choice


@dataclass(frozen=True)
class Candidate(Verdict):
    """One choice with its memory, verdict and time."""

    choice: Choice
    memory: Estimate
    step_seconds: float
    simulated: bool
    """True if the step was simulated; else the figures are in closed form."""
    is_half_precision: bool = False
    """It computes in 16 bits although the run has fp32: a fallback, never the first choice."""

    @property
    def last_resort(self) -> int:
        """Return `last_resort` of the choice."""
        return last_resort(self.choice)

    @property
    def rounded_seconds(self) -> float:
        """`step_seconds` in two digits; candidates that are equal in them count as equally fast."""
        return float(f"{self.step_seconds:.2g}")

    @property
    def gpu_seconds(self) -> float:
        """GPU-seconds of one optimizer step, over all ranks."""
        return self.choice.world_size * self.step_seconds

    @property
    def name(self) -> str:
        """Name in messages, and the key of `Plan.rejected`."""
        return describe_choice(self.choice) + (f", {self.choice.precision}" if self.is_half_precision else "")

    def as_record(self) -> CandidateEstimate:
        """Return the candidate as it is written to memory.json."""
        return CandidateEstimate(
            name=self.name,
            choice=self.choice,
            **dict(self.memory),
            fits=self.fits,
            reason=self.reason,
            step_seconds=self.step_seconds,
            method="simulated" if self.simulated else "closed form",
        )


def last_resort(choice: Choice) -> int:
    """Return 1 if ``choice`` offloads the optimizer, 2 if the weights, too; `auto` takes the lowest that fits.

    The time of an offload is not proven, and weights on the host cross the link with every micro batch.
    """
    return (choice.spec.offload_optimizer is not None) + (choice.spec.offload_param is not None)


def describe_choice(choice: Choice) -> str:
    """Return a name such as ``zero2, checkpointing, micro batch 4, 2 nodes``."""
    checkpointing = "checkpointing" if choice.gradient_checkpointing else "no checkpointing"
    return f"{choice.strategy}, {checkpointing}, micro batch {choice.micro_batch_size}, {plural(choice.nodes, 'node')}"


def choices(settings: ResolvedRun, strategies: Sequence[Strategy] = ()) -> Iterator[Choice]:
    """Yield every way to run ``settings``, fewest nodes first; the global batch size is the same in all.

    ``strategies`` replaces the run's own.
    """
    run, hardware = settings.run, settings.hardware
    node_counts = [run.nodes] if run.nodes else [*range(1, hardware.max_nodes + 1)]
    if run.expert_parallel > 1:
        ranks = hardware.processes_per_node
        node_counts = [nodes for nodes in node_counts if divides_experts(settings.model, nodes * ranks)]
    usable = [nodes for nodes in node_counts if run.global_batch_size % _data_parallel_size(settings, nodes) == 0]
    if not usable:
        raise ConfigError(undivided(run, _data_parallel_size(settings, node_counts[0]), node_counts[0]))
    shares = {nodes: run.global_batch_size // _data_parallel_size(settings, nodes) for nodes in usable}
    found = [
        Choice(
            strategy=strategy,
            gradient_checkpointing=checkpointing,
            micro_batch_size=micro,
            gradient_accumulation_steps=shares[nodes] // micro,
            nodes=nodes,
            processes_per_node=hardware.processes_per_node,
            precision=settings.precision,
            gradient_dtype=run.gradient_dtype,
            tensor_parallel=run.tensor_parallel,
            sequence_parallel=run.sequence_parallel,
            expert_parallel=run.expert_parallel,
        )
        for nodes in usable
        for strategy in strategies or _strategies(settings, nodes)
        for checkpointing in _checkpointing(settings)
        for micro in _micro_batches(settings, shares[nodes])
    ]
    if not found:
        raise ConfigError(_micro_batch_message(run, _data_parallel_size(settings, usable[0])))
    if run.strategy == "auto":
        found = [choice for choice in found if not choice.loses_gradients]
    conflicts = [number_of_conflicts(settings.user_files, choice, run) for choice in found]
    if min(conflicts, default=0):
        check_choice(settings.user_files, found[conflicts.index(min(conflicts))], run)
    fitting = [choice for choice, count in zip(found, conflicts, strict=True) if not count]
    if run.strategy == "auto" and any(choice.world_size == 1 and choice.spec.is_ddp for choice in fitting):
        # Sharding on a single rank divides nothing; DDP does the same there.
        fitting = [one for one in fitting if one.world_size > 1 or one.spec.is_ddp or one.spec.offload_optimizer]
    yield from fitting


def _data_parallel_size(settings: ResolvedRun, nodes: int) -> int:
    """Return the number of ranks with different data; the ranks of a group have the same."""
    group = settings.run.tensor_parallel * settings.run.sequence_parallel
    return nodes * settings.hardware.processes_per_node // group


def _strategies(settings: ResolvedRun, nodes: int) -> Iterable[Strategy]:
    run, hardware = settings.run, settings.hardware
    if run.strategy != "auto":
        return [] if STRATEGY_SPECS[run.strategy].hpz and nodes == 1 else [run.strategy]

    def is_open(spec: StrategySpec) -> bool:
        alone = spec.hybrid and min(nodes, hardware.processes_per_node) == 1
        return spec.cpu if hardware.is_cpu else not (spec.hpz or alone or (spec.uses_nvme and hardware.nvme is None))

    return [
        name
        for name, spec in STRATEGY_SPECS.items()
        if (run.sequence_parallel == 1 or spec.sequence_parallel)
        and (run.tensor_parallel == 1 or (spec.tensor_parallel and spec.is_deepspeed))
        and (run.expert_parallel == 1 or spec.expert_parallel)
        and is_open(spec)
        and not unsuitable(run, name, settings.model.tied)
    ]


def _checkpointing(settings: ResolvedRun) -> list[bool]:
    wanted = settings.run.gradient_checkpointing
    if settings.run.activation_offload or wanted != "auto":
        return [settings.run.activation_offload or wanted is True]
    return [False, True] if settings.abilities.gradient_checkpointing else [False]


def _micro_batches(settings: ResolvedRun, per_rank: int) -> list[int]:
    """Return the divisors of a rank's share of the global batch, largest first, at most 64."""
    wanted, least = settings.run.micro_batch_size, OBJECTIVES[settings.run.objective].least_micro_batch
    sizes = range(min(per_rank, 64), least - 1, -1) if wanted == "auto" else [wanted]
    return [size for size in sizes if per_rank % size == 0]


def _micro_batch_message(run: Run, ranks: int) -> str:
    if run.micro_batch_size == "auto":
        return (
            f"global_batch_size {run.global_batch_size} leaves one example for each of {ranks} ranks, but objective: "
            f"{run.objective} compares the examples of a micro batch. Use at least {2 * ranks}."
        )
    sizes = multiples(run.global_batch_size, ranks * run.micro_batch_size)
    return (
        f"global_batch_size {run.global_batch_size} is not a multiple of {ranks} ranks x micro_batch_size "
        f"{run.micro_batch_size}. Use a global_batch_size of {sizes}, or micro_batch_size: auto."
    )
