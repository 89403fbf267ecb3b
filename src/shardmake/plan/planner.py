"""The planner: the memory, verdict and time of each candidate of a run, in closed form or simulated."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any

from shardmake.config.objectives import OBJECTIVES
from shardmake.config.optimizers import DEFAULT_OPTIMIZER
from shardmake.config.strategies import STRATEGY_SPECS
from shardmake.config.user_file_keys import estimated_values
from shardmake.core.nested import overlay
from shardmake.memory import calibration, closed_form, estimate, states
from shardmake.memory.buckets import Buckets, read_buckets, zero_optimization
from shardmake.memory.cache import cached_path
from shardmake.memory.estimate import Estimate, outside, simulate, step_of
from shardmake.memory.families import part_of
from shardmake.memory.model import split
from shardmake.memory.scenario import Scenario
from shardmake.memory.timeline import Timeline
from shardmake.memory.trace import trace_all, traced_tokens
from shardmake.plan.candidates import Candidate
from shardmake.plan.parallelism import local_model
from shardmake.plan.resolve import ResolvedRun
from shardmake.plan.step_time import step_time
from shardmake.plan.verdict import error_of, judge
from shardmake.run.plan import Choice

_profile, _micro_step = lru_cache(maxsize=1024)(closed_form.profile), lru_cache(maxsize=12)(step_of)


class Planner:
    """Estimates candidates of one run; what candidates, also of other runs, share is computed once."""

    def __init__(self, settings: ResolvedRun, least: Callable[[Choice], int] | None = None) -> None:
        self.settings = settings
        self._least = least
        """The bytes that activations of a choice take at least, where that is known without a trace."""
        self._candidates: dict[Choice, Candidate] = {}
        self._kept = settings.run.checkpoints.most(settings.run.max_steps)
        self._last = Timeline()

    def _parts(self, choice: Choice) -> tuple[Scenario, Buckets]:
        return scenario_of(self.settings, choice), buckets_of(self.settings, choice)

    def prepare(self, possible: Iterable[Choice]) -> None:
        """Trace the steps of ``possible`` that can fit in one process, if the model's family is not written down."""
        if self.settings.model.decoder is None:
            trace_all(scenario_of(self.settings, choice) for choice in possible if self.can_hold(choice))

    def traced_tokens(self, choice: Choice) -> int | None:
        """Return with how many tokens the step of ``choice`` was traced if its bytes were scaled; else None."""
        return traced_tokens(scenario_of(self.settings, choice))

    def can_hold(self, choice: Choice) -> bool:
        """Return False if what stays on a GPU during the whole step already exceeds its memory."""
        if self.settings.hardware.is_cpu:
            return True
        scenario, buckets = self._parts(choice)
        held = sum(states.resident(scenario, buckets).values()) + outside(scenario)
        room = self.settings.hardware.gpu_memory - held
        return room >= 0 and (self._least is None or self._least(choice) <= room)

    def seconds(self, choice: Choice) -> float:
        """Return the seconds of an optimizer step of ``choice``."""
        return step_time(scenario_of(self.settings, choice), self.settings.hardware)

    def forward_bytes(self, choice: Choice) -> int:
        """Return the most bytes of activations in the forward pass of ``choice``, up to the loss."""
        return _profile(_of_step(scenario_of(self.settings, choice))).forward

    def scan(self, choice: Choice) -> Candidate:
        """Return ``choice`` with its memory in closed form, without activations if a trace could not make it fit."""
        scenario, buckets = self._parts(choice)
        hopeless = self.settings.model.decoder is None and not self.can_hold(choice)
        activations = closed_form.Profile() if hopeless else _profile(_of_step(scenario))
        memory = estimate.estimate_closed_form(scenario, buckets, activations, self._kept)
        return self._candidate(choice, scenario, memory, lambda capacity: memory.gpu.device, simulated=False)

    def simulate(self, choice: Choice) -> Candidate:
        """Return ``choice`` with its memory from a simulated step; it is simulated once."""
        if choice not in self._candidates:
            scenario, buckets = self._parts(choice)
            on = partial(self._simulated, scenario, buckets, cache(partial(self._step, scenario, buckets)))
            memory = on(self.settings.hardware.gpu_memory)
            found = self._candidate(choice, scenario, memory, lambda size: on(size).gpu.device, simulated=True)
            self._candidates[choice] = found
        return self._candidates[choice]

    def _step(self, scenario: Scenario, buckets: Buckets) -> Timeline:
        """Return the simulated step; where it offloads to makes no difference: then the last one, with its results."""
        found, last = simulate(scenario, buckets, _micro_step(_of_step(scenario))), self._last
        self._last = last if (found.events, found.peaks) == (last.events, last.peaks) else found
        return self._last

    def _simulated(self, scenario: Scenario, buckets: Buckets, step: Callable[[], Timeline], capacity: int) -> Estimate:
        """Return the estimate on a GPU of ``capacity`` bytes; ``step`` simulates it, once for all capacities."""
        return estimate.whole(scenario, buckets, estimate.memory_of(scenario, step(), capacity), self._kept)

    def _candidate(
        self, choice: Choice, scenario: Scenario, memory: Estimate, device_on: Callable[[int], int], *, simulated: bool
    ) -> Candidate:
        hardware, error = self.settings.hardware, error_of(scenario)
        return Candidate(
            **vars(judge(memory, scenario, hardware, error, device_on)),
            choice=choice,
            memory=memory,
            step_seconds=step_time(scenario, hardware),
            simulated=simulated,
            is_half_precision=choice.precision != self.settings.precision,
        )


class CachedPlanner(Planner):
    """A `Planner` that keeps simulated estimates on disk."""

    def simulate_all(self, possible: Sequence[Choice]) -> list[Candidate]:
        """Return ``possible`` simulated; the steps of those that are not on disk are traced in one process."""
        if self.settings.model.decoder is None:
            capacity, parts = self.settings.hardware.gpu_memory, map(self._parts, possible)
            trace_all(one for one, buckets in parts if not self._path(one, buckets, capacity).is_file())
        return [self.simulate(choice) for choice in possible]

    def _simulated(self, scenario: Scenario, buckets: Buckets, step: Callable[[], Timeline], capacity: int) -> Estimate:
        path = self._path(scenario, buckets, capacity)
        if (memory := Estimate.read_if_exists(path)) is None:
            memory = super()._simulated(scenario, buckets, step, capacity)
            memory.write(path)
        return memory

    def _path(self, scenario: Scenario, buckets: Buckets, capacity: int) -> Path:
        """Return the file of an estimate, named by everything that the estimate depends on."""
        values = {name: value for name, value in vars(scenario).items() if name not in ("model", "split")}
        values["calibration"] = scenario.calibration and asdict(scenario.calibration)
        request = {"model": scenario.model.key, "settings": values, "kept": self._kept, "capacity": capacity}
        return cached_path("shardmake.plan.estimate", request | {"buckets": vars(buckets)})


def _of_step(scenario: Scenario) -> Scenario:
    """Return ``scenario`` with one value for all of what does not change its micro step."""
    same = replace(scenario, nodes=1, accumulation=1, gradient_dtype=None, optimizer=DEFAULT_OPTIMIZER)
    like = next(name for name, spec in STRATEGY_SPECS.items() if spec.is_ddp == scenario.spec.is_ddp)
    return replace(same, strategy=like, loads_on_gpu=False)


def scenario_of(settings: ResolvedRun, choice: Choice) -> Scenario:
    """Return the scenario of ``choice`` for the memory model."""
    run = settings.run
    objective = OBJECTIVES[run.objective]
    in_place = settings.cluster.executor == "slurm" and settings.cluster.slurm.restart_in_place
    ranks = choice.tensor_parallel if choice.is_deepspeed and settings.model.has_all_levers else 1
    model = part_of(settings.model, ranks) if ranks > 1 else settings.model
    return Scenario(
        model=model,
        split=split(model, run.method) if ranks > 1 else settings.split,
        strategy=choice.strategy,
        nodes=choice.nodes,
        ranks_per_node=choice.processes_per_node,
        micro_batch=choice.micro_batch_size * objective.sequences,
        log_probs=objective.has_reference,
        extra_forwards=objective.forwards - 1 + (objective.forwards if run.reference == "model" else 0),
        reference_weights=run.reference == "model" and not run.method_spec.has_adapters,
        sequence_length=run.sequence_length,
        sequence_parallel=choice.sequence_parallel,
        tensor_parallel=ranks,
        expert_parallel=choice.expert_parallel,
        local_model=local_model(model, choice.expert_parallel),
        accumulation=choice.gradient_accumulation_steps,
        checkpointing=choice.gradient_checkpointing,
        activation_offload=run.activation_offload,
        attention=settings.attention,
        masked=settings.attention == "sdpa" and choice.sequence_parallel == 1,
        precision=choice.precision,
        gradient_dtype=choice.gradients,
        tf32=run.tf32,
        weights=settings.weights,
        optimizer=run.optimizer,
        method=run.method,
        loss=run.loss,
        lora_rank=run.lora.rank,
        lora_targets=run.lora.targets if isinstance(run.lora.targets, str) else tuple(run.lora.targets),
        lora_dropout=run.lora.dropout,
        token_rows=len(run.lora.train_tokens),
        on_cpu=settings.hardware.is_cpu,
        checkpoint_in_memory=run.checkpoints.asynchronous and settings.cluster.scratch_in_memory,
        keeps_ready=in_place and not (run.script or run.service or settings.cluster.slurm.container),
        has_script=run.script is not None,
        loads_on_gpu=not settings.hardware.is_cpu and run.script is None and choice.loads_on_gpu(run.method),
        gpu_memory=settings.hardware.gpu_memory,
        gpu_capability=settings.hardware.accelerator.capability,
        calibration=calibration.read(settings.hardware.accelerator.name),
    )


def buckets_of(settings: ResolvedRun, choice: Choice) -> Buckets:
    """Return DeepSpeed's buffer sizes for ``choice``, as they are rendered with the run's own file."""
    if not choice.is_deepspeed:
        return Buckets()
    section: dict[str, Any] = zero_optimization(choice, settings.model, settings.cluster, "")
    if own := settings.user_files.get("deepspeed"):
        section = overlay({"zero_optimization": section}, estimated_values(own))["zero_optimization"]
    return read_buckets(section, settings.model.hidden_size)
